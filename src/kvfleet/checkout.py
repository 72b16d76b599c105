"""Where the parts of a kvfleet checkout lie."""

from __future__ import annotations

import os
from pathlib import Path

#: root of the checkout: playbooks, roles, releases.yml; the package is installed from it (editable)
ROOT = Path(__file__).resolve().parents[2]


def cache_directory() -> Path:
    """Folder for what is expensive to make again (wheels, host images): ``$KVFLEET_CACHE``, else below ``~/.cache``."""
    configured = os.environ.get("KVFLEET_CACHE")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvfleet"
