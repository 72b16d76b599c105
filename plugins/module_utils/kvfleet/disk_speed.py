"""How fast the new file system is: fio on a file in it, never on the raw device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .command import CommandRunner
from .units import GIB, KIB, MIB

#: Seconds of each of the three measurements; together at most 30 with fio's own start.
RUNTIME_S = 5
FILE_BYTES = 1 * GIB
SEQUENTIAL_BLOCK_BYTES = 1 * MIB


def block_bytes(chunk_bytes: int) -> int:
    """The chunk size rounded up to whole blocks of 4 KiB, as O_DIRECT needs; 4 KiB to 64 MiB."""
    return min(max(-(-chunk_bytes // (4 * KIB)) * 4 * KIB, 4 * KIB), 64 * MIB)


def file_bytes(free_bytes: int) -> int:
    """Size of the test file: 1 GiB, at most a quarter of what is free, whole MiB; 0 = too little to measure."""
    size = min(FILE_BYTES, free_bytes // 4) // MIB * MIB
    return size if size >= 64 * MIB else 0


def fio_argv(kind: str, path: str, size_bytes: int, block: int) -> list[str]:
    """One measurement: ``write``, ``read`` or ``randread`` with O_DIRECT on ``path``."""
    return [
        "fio",
        f"--name={kind}",
        f"--filename={path}",
        f"--rw={kind}",
        f"--bs={block}",
        f"--size={size_bytes}",
        f"--runtime={RUNTIME_S}",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=8",
        "--fallocate=none",
        "--randrepeat=0",
        # reads go on until the time is over; the write ends with its file, which the reads then need whole
        *([] if kind == "write" else ["--time_based"]),
        *(["--end_fsync=1"] if kind == "write" else ["--invalidate=1"]),
        "--output-format=json",
    ]


def parse_fio(text: str, kind: str) -> tuple[int, int]:
    """Bytes a second and bytes moved of the one job in fio's JSON. Raises ``ValueError`` when there is no such job."""
    data = json.loads(text[text.index("{") :])
    jobs = data.get("jobs") if isinstance(data, dict) else None
    if not jobs or jobs[0].get("error"):
        raise ValueError(f"fio reports error {jobs[0].get('error') if jobs else 'no job'}")
    side: Mapping[str, Any] = jobs[0]["write" if kind == "write" else "read"]
    return int(side["bw_bytes"]), int(side["io_bytes"])


def measure(folder: str, free_bytes: int, chunk_bytes: int, runner: CommandRunner) -> dict[str, Any]:
    """Measure sequential write, sequential read and random read at chunk size in ``folder``; removes its file.

    Returns ``available`` and, if true, ``write_bytes_per_s``, ``read_bytes_per_s``, ``random_read_bytes_per_s``,
    ``chunk_bytes`` and ``file_bytes``; else ``reason``.
    """
    size = file_bytes(free_bytes)
    if not size:
        return {"available": False, "reason": f"{free_bytes} bytes are free, too few for a test file"}
    path = f"{folder}/.kvfleet-speed"
    block = block_bytes(chunk_bytes)
    result: dict[str, Any] = {"available": True, "chunk_bytes": block, "file_bytes": size}
    try:
        for kind, name, size_of_block in (
            ("write", "write_bytes_per_s", SEQUENTIAL_BLOCK_BYTES),
            ("read", "read_bytes_per_s", SEQUENTIAL_BLOCK_BYTES),
            ("randread", "random_read_bytes_per_s", block),
        ):
            done = runner(fio_argv(kind, path, size, size_of_block), timeout_s=RUNTIME_S + 30.0)
            if done.returncode == 127:
                return {"available": False, "reason": "fio is not installed"}
            if not done.ok:
                return {"available": False, "reason": f"fio {kind}: {(done.stderr or done.stdout).strip()[-300:]}"}
            try:
                result[name], moved = parse_fio(done.stdout, kind)
            except (ValueError, KeyError) as error:
                return {"available": False, "reason": f"fio {kind}: output not understood ({error})"}
            if kind == "write":
                # a slow disk does not fill the file in time; read only what is really there
                size = max(moved // MIB, 1) * MIB
                result["file_bytes"] = size
    finally:
        runner(["rm", "--force", path])
    return result
