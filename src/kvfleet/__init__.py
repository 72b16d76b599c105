"""The controller's side of kvfleet: the command, the report, bundles. The logic itself is ``kvfleet.core``."""
