"""Debian packages for a bundle: those that the engine needs, with their dependencies, for hosts without a mirror."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfleet.core.findings import refuse


def collect(row: Mapping[str, Any], source: str) -> list[Path]:
    """The ``.deb`` files in the folder ``source``."""
    folder = Path(source)
    found = sorted(folder.glob("*.deb")) if folder.is_dir() else []
    if not found:
        raise refuse(
            "KVF-REL-065", f"{source} holds no .deb files for {row['id']}.", "Give --debian a folder with them."
        )
    return found
