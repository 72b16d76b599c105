"""Memory of virtual machines that grow as it is used: touch it once, so that planners see what is there."""

from __future__ import annotations

import mmap
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GIB = 1024**3
#: one at a time: the machine has to give the memory as fast as it is taken
_WORKERS = 1


def read(path: str = "/proc/meminfo") -> dict[str, float]:
    """MemTotal and MemAvailable in GiB."""
    found = {}
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[f"{name[3:].lower()}_gib"] = round(int(rest.split()[0]) / 1024**2, 1)
    return found


def _touch(size_bytes: int, hold: Any) -> None:
    # if the memory does not come after all, this process is to be killed for it and no other
    Path("/proc/self/oom_score_adj").write_text("1000")
    area = mmap.mmap(-1, size_bytes)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        area[offset] = 1
    hold.wait(60)


def grow(gib: int) -> Callable[[float], dict[str, Any]]:
    """Touch ``gib`` GiB in the background; the returned function waits (at most so many seconds) and frees it."""
    before = read()
    context = multiprocessing.get_context("fork")
    hold = context.Event()
    start = time.monotonic()
    workers = [
        context.Process(target=_touch, args=(gib * _GIB // _WORKERS, hold), daemon=True) for _ in range(_WORKERS)
    ]
    for worker in workers:
        worker.start()

    def finish(limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        # they hold what they touched until all are done: memory that one gives back would be touched by the next
        while time.monotonic() < deadline:
            used = sum(_resident(worker.pid or 0) for worker in workers)
            if used >= 0.98 * gib * _GIB or not any(worker.is_alive() for worker in workers):
                break
            time.sleep(0.2)
        hold.set()
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.terminate()
        return {"asked_gib": gib, "before": before, "after": read(), "seconds": round(time.monotonic() - start, 1)}

    return finish


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0
