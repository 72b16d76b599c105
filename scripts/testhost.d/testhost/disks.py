"""Backing files of a host's disks: making, attaching, measuring, and proving that one was never touched."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .state import Disk, Host
from .tools import TesthostError, run

MIB = 2**20
BLOCK_BYTES = 64 * 1024


def make_disk(host: Host, disk: Disk) -> None:
    """Make the sparse backing file of a disk; a system disk gets a partition table and a file system with content."""
    path = host.disk_file(disk)
    if path.exists():
        return
    with path.open("wb") as handle:
        handle.truncate(disk.size_bytes)
    if disk.role == "system":
        fill_system_disk(path, disk.size_bytes, host.name)
        disk.system_sha256 = content_sha256(path)


def fill_system_disk(path: Path, size_bytes: int, name: str) -> None:
    """Make a disk look like somebody's system: GPT, one ext4 partition, a few files.

    The file system is written into the file at the partition's offset; nothing is mounted or attached.
    """
    run(["sfdisk", "--quiet", path], stdin="label: gpt\nstart=2048, type=L, name=system\n")
    with tempfile.TemporaryDirectory(prefix="testhost-") as folder:
        tree = Path(folder)
        (tree / "etc").mkdir()
        (tree / "etc" / "hostname").write_text(f"{name}-system\n", encoding="utf-8")
        (tree / "home").mkdir()
        (tree / "home" / "irreplaceable.txt").write_text("Nothing may ever touch this disk.\n" * 2000, encoding="utf-8")
        # the table's first MiB and its copy at the end are not the partition's
        kib = (size_bytes - 2 * MIB) // 1024
        run(["mke2fs", "-q", "-F", "-t", "ext4", "-L", "system", "-E", f"offset={MIB}", "-d", tree, path, f"{kib}k"])


def data_extents(handle: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each stretch of an open file that is not a hole."""
    position = 0
    while position < size:
        try:
            start = os.lseek(handle, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = os.lseek(handle, start, os.SEEK_HOLE)
        yield start, position


def content_sha256(path: Path) -> str:
    """Return a SHA-256 over a file's content that costs nothing for its holes.

    Hashed are the file's size and, for each block of 64 KiB that is not all zeros, its position and bytes. A hole and
    written zeros therefore count the same: only content counts.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "big"))
    done = 0
    with path.open("rb") as handle:
        for start, end in data_extents(handle.fileno(), size):
            position = max(start - start % BLOCK_BYTES, done)
            while position < end:
                block = os.pread(handle.fileno(), BLOCK_BYTES, position)
                if block.strip(b"\0"):
                    digest.update(position.to_bytes(8, "big"))
                    digest.update(block)
                position += BLOCK_BYTES
            done = position
    return digest.hexdigest()


def verify_system_disk(host: Host) -> str:
    """Compare the system disk with what it was when the host was made; return its SHA-256.

    :raises TesthostError: the host has no system disk, or its content changed.
    """
    disk = host.disk_with_role("system")
    if disk is None or disk.system_sha256 is None:
        raise TesthostError(f"{host.name} has no system disk: make it with --disks 2 --system-disk.")
    now = content_sha256(host.disk_file(disk))
    if now != disk.system_sha256:
        raise TesthostError(
            f"the system disk {disk.serial} of {host.name} was changed: SHA-256 {now}, "
            f"at creation {disk.system_sha256}."
        )
    return now


def allocated_bytes(path: Path) -> int:
    """Return the bytes that a file occupies, after everything written so far has been placed on the disk."""
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        # st_blocks counts 512 bytes whatever the file system's block is, see stat(2)
        return os.fstat(handle.fileno()).st_blocks * 512


def loops_of(path: Path) -> list[str]:
    """Return the loop devices that are attached to a file, also when only the kernel remembers them."""
    if not path.exists():
        return []
    out = run(["losetup", "--noheadings", "--output", "NAME", "--associated", path], check=False).stdout
    return out.split()


def loops_below(folder: Path, listing: str) -> list[str]:
    """Return the loop devices whose backing file lies, or lay before it was deleted, below a folder.

    :param listing: ``losetup --list --noheadings --raw --output NAME,BACK-FILE``; blanks in paths come as ``\\x20``.
    """
    prefix = str(folder).replace(" ", "\\x20") + "/"
    pairs = (line.split(maxsplit=1) for line in listing.splitlines())
    return [pair[0] for pair in pairs if len(pair) == 2 and pair[1].startswith(prefix)]


def loops_left(folder: Path) -> list[str]:
    """Return the loop devices that a host's folder still has in use."""
    argv = ["losetup", "--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"]
    return loops_below(folder, run(argv, check=False).stdout)


def detach(loop: str) -> None:
    """Give a loop device back, with its partitions.

    ``losetup --detach`` leaves partitions behind that ``partx`` made, on a kernel that cannot read tables itself.
    """
    run(["partx", "--delete", loop], check=False)
    run(["losetup", "--detach", loop], check=False)


def attach_disks(host: Host) -> None:
    """Attach the backing files to loop devices in the host's order, and record them.

    The host's kernel names follow: the first disk of ``order`` gets the first of ``loops``. Loop devices that are
    already right stay as they are, so that a reboot keeps its names; after a swap the files change places.
    """
    wanted = [host.disk_file(host.disk(number)) for number in host.order]
    loops = list(host.loops)
    absent = [host.disk_file(disk) for disk in host.disks if disk.number not in host.order]
    if [[loop] for loop in loops] == [loops_of(path) for path in wanted] and not any(map(loops_of, absent)):
        return
    for path in [*wanted, *absent]:
        for loop in loops_of(path):
            detach(loop)
    attached = []
    for path, loop in zip(wanted, [*loops, *[""] * len(wanted)], strict=False):
        if loop and run(["losetup", "--partscan", loop, str(path)], check=False).returncode == 0:
            attached.append(loop)
        else:
            # the first time, or somebody else took the device while the host was down
            attached.append(run(["losetup", "--find", "--show", "--partscan", path]).stdout.strip())
    host.loops = attached
    host.save()
