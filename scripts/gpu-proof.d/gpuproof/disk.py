"""A loop-backed disk that looks like a named disk: link by id, serial, nodes of its partitions, and its speed."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from . import settings

_CHUNK = 8 * 1024 * 1024
_GIB = 1024**3


def attach(image: Path, size_gib: float = 0.0) -> dict[str, Any]:
    """Make (once) and attach the disk; its device, sizes, whether O_DIRECT reaches the file below, and its speed.

    ``size_gib`` 0 takes 40 GiB or what the file system can spare. The host has no udev: the link by id, udev's record
    with the serial, and nodes of partitions are made here.
    """
    found = subprocess.run(["losetup", "-j", str(image), "-n", "-O", "NAME"], capture_output=True, text=True)
    node = found.stdout.split()[0] if found.stdout.split() else ""
    speed: dict[str, Any] = {}
    if not node:
        if not image.exists():
            free = shutil.disk_usage(image.parent).free / _GIB
            size = size_gib or min(40.0, free - 6)
            speed = measure(image.with_name("speed.img"), 2 * _GIB if size > 8 else _GIB // 4)
            with image.open("wb") as stream:
                stream.truncate(int(size * _GIB))
        argv = ["losetup", "--find", "--show", "--partscan"]
        node = _run(*argv, "--direct-io=on", str(image)) or _run(*argv, str(image))
        if not node:
            raise OSError(f"{image} could not be attached: no loop device")
    name = Path(node).name
    number = Path(f"/sys/block/{name}/dev").read_text().strip()
    link = Path(settings.DISK_LINK)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(node)
    record = Path("/run/udev/data") / f"b{number}"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"I:1\nE:ID_SERIAL=kvfleet_proof_disk_{settings.SERIAL}\nE:ID_SERIAL_SHORT={settings.SERIAL}\n")
    _watch(name)
    direct = Path(f"/sys/block/{name}/loop/dio")
    return {
        "device": node,
        "size_gib": round(int(Path(f"/sys/block/{name}/size").read_text()) * 512 / _GIB, 1),
        "direct_io_below": direct.exists() and direct.read_text().strip() == "1",
        "serial": settings.SERIAL,
        **speed,
    }


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _watch(name: str) -> None:
    """Make the nodes of partitions that the kernel makes only in a devtmpfs, for as long as this process lives."""

    def loop() -> None:
        while True:
            nodes(name)
            time.sleep(0.2)

    threading.Thread(target=loop, daemon=True).start()


def nodes(name: str, dev: Path = Path("/dev"), block: Path = Path("/sys/block")) -> None:
    """Nodes for the partitions of ``name`` that lack one."""
    for part in (block / name).glob(f"{name}p*"):
        with contextlib.suppress(OSError, ValueError):
            major, minor = (int(word) for word in (part / "dev").read_text().strip().split(":"))
            path = dev / part.name
            if not path.exists():
                os.mknod(path, 0o660 | 0o060000, os.makedev(major, minor))


def measure(path: Path, size_bytes: int, workers: int = 4) -> dict[str, Any]:
    """Bytes per second of O_DIRECT writes and reads of a file of that size, ``workers`` at a time."""
    try:
        buffer = mmap.mmap(-1, _CHUNK)
        buffer.write(os.urandom(_CHUNK))
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    except OSError as error:
        return {"speed_unknown": str(error)}
    try:
        count = size_bytes // _CHUNK
        write_s = _spread(lambda number: os.pwrite(handle, buffer, number * _CHUNK), count, workers)
        os.fsync(handle)
        areas = [mmap.mmap(-1, _CHUNK) for _ in range(workers)]
        read_s = _spread(lambda number: os.preadv(handle, [areas[number % workers]], number * _CHUNK), count, workers)
        return {
            "write_bytes_per_s": round(count * _CHUNK / write_s),
            "read_bytes_per_s": round(count * _CHUNK / read_s),
        }
    except OSError as error:
        return {"speed_unknown": str(error)}
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)


def _spread(work: Any, count: int, workers: int) -> float:
    """Seconds that ``count`` pieces of work took, worker w doing every piece with number % workers == w."""
    start = time.monotonic()
    threads = [
        threading.Thread(target=lambda first=first: [work(number) for number in range(first, count, workers)])
        for first in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(1e-6, time.monotonic() - start)
