"""Foreign content for test disks: sectors recorded from the real tools, and label bytes where no tool can run here."""

from __future__ import annotations

import base64
import json
import struct
import uuid
import zlib
from pathlib import Path

from kvfleet.core.units import KIB

RECORDED = Path(__file__).resolve().parents[2] / "data" / "disks" / "labels"


def recorded(name: str) -> list[tuple[int, bytes]]:
    """``(offset, sector)`` of every sector that the tool wrote (at either end, for large ones) on a 384 MiB device."""
    raw = zlib.decompress(base64.b64decode(json.loads((RECORDED / f"{name}.json").read_text())["data"]))
    return [(struct.unpack_from("<Q", raw, at)[0], raw[at + 8 : at + 520]) for at in range(0, len(raw), 520)]


def md_member(size_bytes: int, version: str) -> list[tuple[int, bytes]]:
    """The superblock of an md RAID1 member (Linux ``md_p.h``), 1.2 at 4 KiB or 1.0 at the end."""
    # mdadm super1.c, 1.0: at least 8 KiB and less than 12 KiB from the end, on a 4 KiB boundary
    offset = 4 * KIB if version == "1.2" else (size_bytes // 512 - 16) // 8 * 8 * 512
    block = bytearray(512)
    struct.pack_into("<IIII", block, 0, 0xA92B4EFC, 1, 0, 0)
    block[16:32] = uuid.UUID("11111111-2222-3333-4444-555555555555").bytes
    block[32:42] = b"host:array"
    struct.pack_into("<QIIQII", block, 64, 0, 1, 0, size_bytes // 512 - 4096, 0, 2)
    struct.pack_into("<QQQ", block, 128, 2048, size_bytes // 512 - 4096, offset // 512)
    struct.pack_into("<I", block, 220, 128)
    values = sum(struct.unpack_from("<64I", block))
    struct.pack_into("<I", block, 216, ((values & 0xFFFFFFFF) + (values >> 32)) & 0xFFFFFFFF)
    return [(offset, bytes(block))]


def zfs_member() -> list[tuple[int, bytes]]:
    """Uberblocks of a vdev label (OpenZFS ``include/sys/uberblock_impl.h``): magic at 128 KiB, one a KiB."""
    uberblock = struct.pack("<QQQQQ", 0x00BAB10C, 5000, 100, 0, 0).ljust(512, b"\0")
    return [(128 * KIB + slot * KIB, uberblock) for slot in range(16)]


def bluestore() -> list[tuple[int, bytes]]:
    """The first bytes of a Ceph OSD (Ceph ``BlueStore::_write_bdev_label``)."""
    return [(0, b"bluestore block device\n11111111-2222-3333-4444-555555555555\n".ljust(4096, b"\0"))]
