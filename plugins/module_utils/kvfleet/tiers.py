"""Directories of the disk tier that nothing needs any more, once the deploy that left them is proved."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: written into the root of a cache partition when it was made; nothing is ever deleted where it is missing
PARTITION_MARKER = ".kvfleet.json"


def stale_tiers(plan: Mapping[str, Any]) -> list[Path]:
    """Directories beside the planned ``base_path`` of every server: KV of another release, model or chunk size.

    A server's start leaves them alone, so that a failed upgrade finds its old files again. Empty when the plan has
    no disk tier or the partition is not one of ours.
    """
    mount = Path(str(plan["paths"].get("cache_mount") or "/nonexistent"))
    if not (mount / PARTITION_MARKER).is_file():
        return []
    found = []
    for server in plan["servers"]:
        if not server.get("base_path"):
            continue
        base = Path(str(server["base_path"]))
        if mount in base.parents and base.parent.is_dir():
            found += [one for one in base.parent.iterdir() if one != base and one.is_dir() and not one.is_symlink()]
    return sorted(found)


def drop_stale_tiers(plan: Mapping[str, Any], *, dry_run: bool = False) -> list[str]:
    """Remove :func:`stale_tiers` and return their paths; to be called only when the plan that runs is proved."""
    stale = stale_tiers(plan)
    for folder in () if dry_run else stale:
        shutil.rmtree(folder)
    return [str(folder) for folder in stale]
