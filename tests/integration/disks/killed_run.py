"""One run of ``present`` in a process of its own that kills itself (SIGKILL) at a chosen point.

Argument: a JSON object with ``paths``, ``settings``, ``kill_at`` (number of the point, 0 = never) and ``kill_in`` (a
tool's name and milliseconds: the tool is started, and both die that long after). Points are counted before and after
each command that can write, and after each finished step. Prints the number of points when it lives to the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from kvfleet.core.command import CommandResult, run_command
from kvfleet.core.disk_actions import DiskRun, present
from kvfleet.core.disk_probe import HostPaths
from kvfleet.core.disks import DiskSettings

WRITERS = {"sgdisk", "wipefs", "mkfs.ext4", "mkfs.xfs", "blkdiscard", "partx", "systemctl"}

task = json.loads(sys.argv[1])
points = 0


def point() -> None:
    global points
    points += 1
    if points == task["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)


def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
    if argv[0] not in WRITERS or "--no-act" in argv:
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)
    tool, milliseconds = task.get("kill_in") or ("", 0.0)
    if argv[0] == tool:
        started = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(milliseconds / 1000)
        started.kill()
        started.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    point()
    done = run_command(argv, stdin=stdin, timeout_s=timeout_s)
    point()
    return done


present(DiskRun(DiskSettings(**task["settings"]), runner, HostPaths(**task["paths"]), after_step=lambda _name: point()))
print(points)
