"""One file for each command of ``kvfleet``."""
