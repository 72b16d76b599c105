"""Sums of disks whose backing files are mostly holes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

BLOCK = 64 * 1024


def sparse_digest(file: Path, in_use: tuple[int, int] = (0, 0)) -> str:
    """SHA-256 of every block of 64 KiB that is not all zero, with its place.

    Skips the file's holes, which read as zeros: a disk of many gigabytes takes as long as what was written to it.
    Flush the device over the file first.

    :param file: backing file of a disk.
    :param in_use: bytes [from, to) that do not count, because their holder writes there of its own accord.
    """
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as handle:
        end, at = os.fstat(handle.fileno()).st_size, 0
        while at < end:
            try:
                at = os.lseek(handle.fileno(), at, os.SEEK_DATA) // BLOCK * BLOCK
            except OSError:
                break
            chunk = bytearray(os.pread(handle.fileno(), BLOCK, at))
            first, last = (min(max(edge - at, 0), len(chunk)) for edge in in_use)
            chunk[first:last] = bytes(last - first)
            if chunk.strip(b"\0"):
                digest.update(at.to_bytes(8, "little") + chunk)
            at += BLOCK
    return digest.hexdigest()
