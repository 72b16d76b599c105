"""The health log of the disk behind a link, where there is one to read."""

from __future__ import annotations

import os

from .command import CommandRunner
from .disk_probe import resolve_disk
from .health import SmartLog, parse_smart_log


def smart_log(device: str, run: CommandRunner) -> tuple[SmartLog | None, str]:
    """SMART log of ``device`` (a /dev/disk/by-id link), or ``None`` and why there is none."""
    probe = resolve_disk(device) if device else None
    if probe is None or probe.resolve_error or probe.is_partition:
        return None, "no cache disk to ask"
    if probe.kind != "nvme":
        return None, f"a {probe.kind} device has no NVMe health log"
    if os.geteuid() != 0:
        return None, "only root may read the drive's health log"
    return ask(probe.node, run)


def ask(node: str, run: CommandRunner) -> tuple[SmartLog | None, str]:
    """SMART log of the NVMe namespace ``node`` (``/dev/nvme0n1``), or ``None`` and why there is none."""
    shown = run(["nvme", "smart-log", "--output-format=json", node])
    if shown.returncode == 127:
        return None, "nvme-cli is not installed"
    if not shown.ok:
        return None, f"nvme smart-log: {(shown.stderr or shown.stdout).strip()[:200]}"
    try:
        return parse_smart_log(shown.stdout), ""
    except (ValueError, TypeError) as error:
        return None, f"the drive's answer was not understood: {error}"
