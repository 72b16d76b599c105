"""Every state in which a disk can be found, how to make it on a real block device, and the answer that it must get.

``docs/cache-disk.md`` shows this list; a unit test compares both. An answer that is a code means: refused with it, and
every byte of the disk is the same afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labels import bluestore, md_member, recorded, zfs_member

from kvfleet.core.units import KIB, MIB

if TYPE_CHECKING:
    from disk_bench import Bench, Disk

FORMATTED = "formatted and mounted"
UNCHANGED = "unchanged"
MOUNTED = "mounted with its data"

Prepare = Callable[["Bench"], "Disk"]


@dataclass(frozen=True)
class State:
    """One state: its title, what the inventory allows, the answer, how to make it."""

    title: str
    answer: str
    prepare: Prepare
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        """What the inventory allows, in the words of the documentation."""
        words = []
        if self.asked.get("format") is True:
            words.append("format")
        wipe = self.asked.get("wipe_serial")
        if wipe:
            words.append("wipe_serial" if wipe == "SAME" else "another wipe_serial")
        return " + ".join(words) or "nothing"


STATES: list[State] = []


def state(title: str, answer: str, **asked: Any) -> Callable[[Prepare], Prepare]:
    """Register a state; may be used several times on one function."""

    def register(prepare: Prepare) -> Prepare:
        STATES.append(State(title, answer, prepare, asked))
        return prepare

    return register


def sh(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


BOTH = {"format": True, "wipe_serial": "SAME"}

# ------------------------------------------------------------------------------------------------ blank and unknown


@state("blank, formatted only if allowed", FORMATTED, format=True)
@state("blank, formatting not allowed", "KVF-DISK-031")
@state("blank, 'format' is the text yes", "KVF-DISK-006", texts=("format=yes",))
@state("blank, wipe_serial of another disk", "KVF-DISK-004", format=True, wipe_serial="OTHER")
def blank(bench: Bench) -> Disk:
    return bench.disk()


@state("blank, sectors of 4 KiB", FORMATTED, format=True)
def blank_4k(bench: Bench) -> Disk:
    return bench.disk(sector_bytes=4096)


@state("blank, xfs wanted", FORMATTED, format=True, fstype="xfs")
def blank_xfs(bench: Bench) -> Disk:
    return bench.disk(512)


@state("random bytes at the start, no signature", "KVF-DISK-035", format=True)
@state("random bytes at the start, allowed to go", FORMATTED, **BOTH)
def random_start(bench: Bench) -> Disk:
    disk = bench.disk()
    # no byte of it may look like a boot signature
    disk.write(0, os.urandom(510) + b"\1\1" + os.urandom(64 * KIB))
    return disk


@state("random bytes at the end only", "KVF-DISK-035", format=True)
def random_end(bench: Bench) -> Disk:
    disk = bench.disk()
    disk.write(384 * MIB - 700 * KIB, os.urandom(32 * KIB))
    return disk


@state("a file system at 1 MiB whose partition table is gone", "KVF-DISK-035", format=True)
def lost_table(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("mkfs.ext4", "-q", "-E", f"offset={MIB}", disk.node, "200M")
    return disk


# ------------------------------------------------------------------------------------------------ recognised content


@state("ext4 on the whole disk", "KVF-DISK-035", format=True)
@state("ext4 on the whole disk, wipe_serial without format", "KVF-DISK-035", wipe_serial="SAME")
@state("ext4 on the whole disk, wipe_serial of another disk", "KVF-DISK-004", format=True, wipe_serial="OTHER")
@state("ext4 on the whole disk, allowed to go", FORMATTED, **BOTH)
def ext4(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("mkfs.ext4", "-q", "-L", "theirs", disk.node)
    return disk


@state("xfs on the whole disk", "KVF-DISK-035", format=True)
def xfs(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("mkfs.xfs", "-q", disk.node)
    return disk


@state("swap area, not active", "KVF-DISK-035", format=True)
def swap(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("mkswap", disk.node)
    return disk


def _recorded(name: str) -> Prepare:
    def prepare(bench: Bench) -> Disk:
        disk = bench.disk()
        for offset, data in recorded(name):
            disk.write(offset, data)
        return disk

    return prepare


for _name, _title in (
    ("btrfs", "btrfs"),
    ("f2fs", "f2fs"),
    ("vfat", "vfat"),
    ("iso", "ISO9660"),
    ("luks1", "LUKS1, closed"),
    ("luks2", "LUKS2, closed"),
    ("mbr", "MBR with a partition"),
):
    state(_title, "KVF-DISK-035", format=True)(_recorded(_name))
state("LUKS2, closed, allowed to go", FORMATTED, **BOTH)(_recorded("luks2"))
state("MBR with a partition, allowed to go", FORMATTED, **BOTH)(_recorded("mbr"))
state("LVM physical volume of an inactive group", "KVF-DISK-025", **BOTH)(_recorded("lvm"))
state("bcache backing device, not registered", "KVF-DISK-025", **BOTH)(_recorded("bcache"))


@state("member of an md array, metadata 1.2", "KVF-DISK-025", **BOTH)
def md_12(bench: Bench) -> Disk:
    disk = bench.disk()
    for offset, data in md_member(384 * MIB, "1.2"):
        disk.write(offset, data)
    return disk


@state("member of an md array, metadata 1.0 at the end", "KVF-DISK-025", **BOTH)
def md_10(bench: Bench) -> Disk:
    disk = bench.disk()
    for offset, data in md_member(384 * MIB, "1.0"):
        disk.write(offset, data)
    return disk


@state("member of a ZFS pool, not imported", "KVF-DISK-025", **BOTH)
def zfs(bench: Bench) -> Disk:
    disk = bench.disk()
    for offset, data in zfs_member():
        disk.write(offset, data)
    return disk


@state("Ceph OSD", "KVF-DISK-025", **BOTH)
def ceph(bench: Bench) -> Disk:
    disk = bench.disk()
    for offset, data in bluestore():
        disk.write(offset, data)
    return disk


@state("ext4 and an LVM label on one disk", "KVF-DISK-025", **BOTH)
def two_signatures(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("mkfs.ext4", "-q", disk.node)
    for offset, data in recorded("lvm")[:1]:
        disk.write(offset, data)
    return disk


@state("GPT without a partition", "KVF-DISK-035", format=True)
@state("GPT without a partition, allowed to go", FORMATTED, **BOTH)
def gpt_empty(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("sgdisk", "--clear", disk.node)
    return disk


@state("GPT with two partitions and an ext4 in one", "KVF-DISK-035", format=True)
@state("GPT with two partitions and an ext4 in one, allowed to go", FORMATTED, **BOTH)
def gpt_partitions(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("sgdisk", "--clear", "--new=1:2048:+100M", "--new=2:0:0", disk.node)
    disk.partitions()
    sh("mkfs.ext4", "-q", "-L", "theirs", disk.parts()[0])
    return disk


@state("GPT with an LVM member in one partition", "KVF-DISK-025", **BOTH)
def gpt_lvm(bench: Bench) -> Disk:
    disk = gpt_partitions(bench)
    node = Path(disk.parts()[1])
    with node.open("r+b", buffering=0) as handle:
        for offset, data in recorded("lvm"):
            if offset < MIB:
                handle.seek(offset)
                handle.write(data)
        os.fsync(handle.fileno())
    return disk


@state("GPT of which only the backup at the end is left", "KVF-DISK-035", format=True)
def gpt_backup_only(bench: Bench) -> Disk:
    disk = gpt_empty(bench)
    disk.write(0, bytes(MIB))
    return disk


@state("GPT whose backup is gone", "KVF-DISK-035", format=True)
def gpt_primary_only(bench: Bench) -> Disk:
    disk = gpt_empty(bench)
    disk.write(383 * MIB, bytes(MIB))
    return disk


@state("GPT with a damaged checksum", "KVF-DISK-035", format=True)
def gpt_damaged(bench: Bench) -> Disk:
    disk = gpt_empty(bench)
    disk.write(512 + 16, b"\xff\xff\xff\xff")
    return disk


@state("another's partition that has our name but not our type", "KVF-DISK-035", format=True)
def gpt_same_name(bench: Bench) -> Disk:
    disk = bench.disk()
    sh("sgdisk", "--clear", "--new=1:2048:0", "--change-name=1:kvfleet-cache", disk.node)
    return disk


# ------------------------------------------------------------------------------------------------ ours


def _ours(bench: Bench, fstype: str = "ext4", size_mib: int = 384) -> Disk:
    from kvfleet.core.disk_actions import present

    disk = bench.disk(size_mib)
    present(bench.run(disk, format=True, fstype=fstype))
    bench.keep("precious")
    return disk


def _unmounted(bench: Bench, disk: Disk) -> Disk:
    from kvfleet.core.disk_actions import unmounted

    unmounted(bench.run(disk))
    return disk


@state("ours, mounted", UNCHANGED)
@state("ours, mounted, format still allowed", UNCHANGED, format=True)
@state("ours, mounted, format and wipe_serial left in the inventory", UNCHANGED, **BOTH)
@state("ours, the inventory now wants xfs", UNCHANGED, format=True, fstype="xfs")
@state("ours, the inventory now wants more spare", UNCHANGED, format=True, spare_percent=10.0)
def ours(bench: Bench) -> Disk:
    return _ours(bench)


@state("ours (xfs), mounted", UNCHANGED, fstype="xfs")
def ours_xfs(bench: Bench) -> Disk:
    return _ours(bench, "xfs", 512)


@state("ours, unmounted", MOUNTED)
@state("ours, unmounted, format and wipe_serial left in the inventory", MOUNTED, **BOTH)
def ours_unmounted(bench: Bench) -> Disk:
    return _unmounted(bench, _ours(bench))


@state("ours, unmounted, the kernel has not read the table yet", MOUNTED)
def ours_unpublished(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench))
    sh("partx", "--delete", disk.node)
    return disk


@state("ours, full", UNCHANGED)
def ours_full(bench: Bench) -> Disk:
    disk = _ours(bench)
    with (bench.mount_point / "data" / "fill").open("wb") as handle, contextlib.suppress(OSError):
        while True:
            os.write(handle.fileno(), bytes(MIB))
    left = os.statvfs(bench.mount_point)
    assert left.f_bavail * left.f_frsize < MIB
    return disk


@state("ours, the data directory has another mode", MOUNTED)
def ours_wrong_mode(bench: Bench) -> Disk:
    disk = _ours(bench)
    (bench.mount_point / "data").chmod(0o777)
    return disk


@state("ours, mounted twice (bind)", UNCHANGED)
def ours_bind(bench: Bench) -> Disk:
    disk = _ours(bench)
    there = bench.root / "there"
    there.mkdir()
    sh("mount", "--bind", str(bench.mount_point / "data"), str(there))
    bench.mounted.append(there)
    return disk


@state("ours, mounted elsewhere", "KVF-DISK-021", **BOTH)
def ours_elsewhere(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench))
    there = bench.root / "there"
    there.mkdir()
    sh("mount", "-o", "noinit_itable", disk.parts()[0], str(there))
    return disk


@state("ours, this host's record is gone (ext4 carries a marker)", MOUNTED)
def ours_no_record(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench))
    for entry in Path(bench.paths.records).iterdir():
        entry.unlink()
    return disk


@state("ours (xfs), this host's record is gone", "KVF-DISK-034", format=True, fstype="xfs")
def ours_no_record_xfs(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench, "xfs", 512))
    for entry in Path(bench.paths.records).iterdir():
        entry.unlink()
    return disk


@state("a cache disk of another host", "KVF-DISK-034", format=True)
@state("a cache disk of another host, allowed to go", FORMATTED, **BOTH)
def ours_moved(bench: Bench) -> Disk:
    disk = ours_no_record(bench)
    Path(bench.paths.machine_id).write_text("f" * 32 + "\n")
    return disk


@state("ours, somebody made another file system in it", "KVF-DISK-033", **BOTH)
def ours_reformatted(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench))
    sh("mkfs.ext4", "-q", "-F", "-L", "kvfleet", disk.parts()[0])
    return disk


@state("ours, another label", "KVF-DISK-033", **BOTH)
def ours_relabelled(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench))
    sh("e2label", disk.parts()[0], "other")
    return disk


@state("ours, the first copy of the partition table is gone", "KVF-DISK-033", **BOTH)
def ours_no_primary(bench: Bench) -> Disk:
    disk = _unmounted(bench, _ours(bench))
    disk.write(512, bytes(512))
    return disk


@state("ours, with a line in fstab", "KVF-DISK-024")
def ours_fstab(bench: Bench) -> Disk:
    disk = _ours(bench)
    record = json.loads(next(Path(bench.paths.records).iterdir()).read_text())
    Path(bench.paths.fstab).write_text(f"UUID={record['filesystem_uuid']} /elsewhere ext4 defaults 0 2\n")
    return disk


# ------------------------------------------------------------------------------------------------ in use


@state("ext4 on the whole disk, mounted", "KVF-DISK-021", **BOTH)
def mounted_whole(bench: Bench) -> Disk:
    disk = ext4(bench)
    there = bench.root / "there"
    there.mkdir()
    sh("mount", "-o", "noinit_itable", disk.node, str(there))
    return disk


@state("a partition of it is mounted", "KVF-DISK-021", **BOTH)
def mounted_partition(bench: Bench) -> Disk:
    disk = gpt_partitions(bench)
    there = bench.root / "there"
    there.mkdir()
    sh("mount", "-o", "noinit_itable", disk.parts()[0], str(there))
    return disk


@state("mounted in another mount namespace only", "KVF-DISK-021", **BOTH)
def mounted_namespace(bench: Bench) -> Disk:
    disk = ext4(bench)
    there = bench.root / "there"
    there.mkdir()
    script = f"mount -o noinit_itable {disk.node} {there} && echo up && exec sleep 300"
    bench.background(["unshare", "--mount", "--propagation", "private", "sh", "-c", script], "up")
    assert not there.is_mount()
    return disk


@state("active swap", "KVF-DISK-020", **BOTH)
def swap_active(bench: Bench) -> Disk:
    disk = swap(bench)
    sh("swapon", disk.node)
    # the kernel may move pages to it at any moment; the header in its first page is what a wipe would take
    disk.in_use = (4 * KIB, disk.file.stat().st_size)
    return disk


@state("active swap in a partition", "KVF-DISK-020", **BOTH)
def swap_partition_active(bench: Bench) -> Disk:
    disk = gpt_partitions(bench)
    sh("mkswap", disk.parts()[1])
    sh("swapon", disk.parts()[1])
    shown = Path("/sys/class/block", Path(disk.parts()[1]).name)
    start, sectors = (int((shown / name).read_text()) for name in ("start", "size"))
    disk.in_use = (512 * start + 4 * KIB, 512 * (start + sectors))
    return disk


@state("opened exclusively by a process", "KVF-DISK-022", **BOTH)
def exclusive(bench: Bench) -> Disk:
    disk = bench.disk()
    bench.handles.append(os.open(disk.node, os.O_RDONLY | os.O_EXCL))
    return disk


@state("a partition of it opened exclusively by a process", "KVF-DISK-022", **BOTH)
def exclusive_partition(bench: Bench) -> Disk:
    disk = gpt_partitions(bench)
    bench.handles.append(os.open(disk.parts()[1], os.O_RDONLY | os.O_EXCL))
    return disk


@state("open for writing by a process, not exclusively", "KVF-DISK-022", **BOTH)
def open_for_writing(bench: Bench) -> Disk:
    disk = bench.disk()
    bench.handles.append(os.open(disk.node, os.O_RDWR))
    return disk


@state("backing device of another loop device that is mounted", "KVF-DISK-022", **BOTH)
def stacked_loop(bench: Bench) -> Disk:
    disk = ext4(bench)
    upper = sh("losetup", "--find", "--show", disk.node).strip()
    bench.loops.append(upper)
    there = bench.root / "there"
    there.mkdir()
    sh("mount", "-o", "noinit_itable", upper, str(there))
    bench.mounted.append(there)
    return disk


@state("named in fstab, not mounted", "KVF-DISK-024", **BOTH)
def in_fstab(bench: Bench) -> Disk:
    disk = ext4(bench)
    Path(bench.paths.fstab).write_text("# disks\nLABEL=theirs /data ext4 defaults 0 2 # keep\n")
    return disk


@state("read-only, blank", "KVF-DISK-023", **BOTH)
def read_only(bench: Bench) -> Disk:
    return bench.disk(read_only=True)


@state("cannot be read to its end", "KVF-DISK-030", **BOTH)
def unreadable(bench: Bench) -> Disk:
    disk = bench.disk()
    # a loop device whose file became shorter answers with I/O errors at its end
    os.truncate(disk.file, 380 * MIB)
    return disk


@state("something writes to it while it is looked at", "KVF-DISK-030", **BOTH)
def changing(bench: Bench) -> Disk:
    disk = bench.disk()
    script = (
        f"import os,itertools\nh=os.open({disk.node!r},os.O_RDWR)\nprint('up',flush=True)\n"
        "for n in itertools.count(1):\n os.pwrite(h,n.to_bytes(8,'little'),8192); os.fsync(h)\n"
    )
    bench.background(["python3", "-c", script], "up")
    return disk


# ------------------------------------------------------------------------------------------------ identity


@state("serial does not fit", "KVF-DISK-013", serial="OTHER", **{"format": True})
@state("no serial given", "KVF-DISK-003", serial="", **{"format": True})
@state("smaller than min_size_gib", "KVF-DISK-015", min_size_gib=1.0, **{"format": True})
@state("larger than max_size_gib", "KVF-DISK-015", max_size_gib=0.25, **{"format": True})
def identity(bench: Bench) -> Disk:
    return bench.disk()


@state("too small for a cache at all", "KVF-DISK-015", format=True)
def tiny(bench: Bench) -> Disk:
    return bench.disk(256)


@state("named by its kernel name", "KVF-DISK-002", device="KERNEL", **{"format": True})
def kernel_name(bench: Bench) -> Disk:
    return bench.disk()


@state("link is missing", "KVF-DISK-010", format=True)
def link_missing(bench: Bench) -> Disk:
    disk = bench.disk()
    disk.link.unlink()
    return disk


@state("link dangles", "KVF-DISK-010", format=True)
def link_dangling(bench: Bench) -> Disk:
    disk = bench.disk()
    disk.link.unlink()
    disk.link.symlink_to("/dev/no-such-disk")
    return disk


@state("link leads to a file", "KVF-DISK-010", format=True)
def link_file(bench: Bench) -> Disk:
    disk = bench.disk()
    disk.link.unlink()
    disk.link.symlink_to(disk.file)
    return disk


@state("link leads to a partition", "KVF-DISK-011", **BOTH)
def link_partition(bench: Bench) -> Disk:
    disk = gpt_partitions(bench)
    disk.link.unlink()
    disk.link.symlink_to(disk.parts()[0])
    return disk


# ------------------------------------------------------------------------------------------------ around the disk


@state("blank, but the mount point holds files", "KVF-DISK-026", format=True)
def mount_point_used(bench: Bench) -> Disk:
    disk = bench.disk()
    bench.mount_point.mkdir(parents=True)
    (bench.mount_point / "theirs").write_text("x")
    return disk


@state("blank, but the mount point leads through a symbolic link", "KVF-DISK-026", format=True)
def mount_point_link(bench: Bench) -> Disk:
    disk = bench.disk()
    bench.mount_point.parent.mkdir(parents=True, exist_ok=True)
    (bench.root / "elsewhere").mkdir()
    bench.mount_point.symlink_to(bench.root / "elsewhere")
    return disk


@state("blank, but another disk is mounted at the mount point", "KVF-DISK-026", format=True)
def mount_point_taken(bench: Bench) -> Disk:
    disk = bench.disk()
    bench.mount_point.mkdir(parents=True)
    sh("mount", "-t", "tmpfs", "tmpfs", str(bench.mount_point))
    bench.mounted.append(bench.mount_point)
    return disk


@state("blank, but the service user does not exist", "KVF-DISK-053", format=True, owner="no-such-user")
def no_user(bench: Bench) -> Disk:
    return bench.disk()


@state("blank, but the host has no machine id", "KVF-DISK-053", format=True)
def no_machine_id(bench: Bench) -> Disk:
    disk = bench.disk()
    Path(bench.paths.machine_id).write_text("")
    return disk


def _begun(bench: Bench, disk: Disk, stage: str) -> None:
    """A record of a format that was cut short."""
    record = {
        "schema": 1,
        "serial": disk.serial,
        "stage": stage,
        "machine_id": Path(bench.paths.machine_id).read_text().strip(),
        "disk_guid": "aaaaaaaa-0000-4000-8000-000000000001",
        "partition_uuid": "aaaaaaaa-0000-4000-8000-000000000002",
        "filesystem_uuid": "aaaaaaaa-0000-4000-8000-000000000003",
        "fstype": "ext4",
        "label": "kvfleet",
        "size_bytes": 384 * MIB,
        "overwrote": [],
        "notes": {},
    }
    (Path(bench.paths.records) / f"{disk.serial}.json").write_text(json.dumps(record))


def _half_table(bench: Bench) -> Disk:
    disk = bench.disk()
    sh(
        "sgdisk", "--clear", "--disk-guid=aaaaaaaa-0000-4000-8000-000000000001", "--new=1:2048:+340M",
        "--typecode=1:9a3c1f0e-5b1d-4e67-8f0a-6b76666c6565", "--change-name=1:kvfleet-cache",
        "--partition-guid=1:aaaaaaaa-0000-4000-8000-000000000002", disk.node,
    )  # fmt: skip
    return disk


@state("our own partitioning cut short: only the backup table was written", FORMATTED, format=True)
def cut_backup_only(bench: Bench) -> Disk:
    disk = _half_table(bench)
    disk.write(0, bytes(34 * 512))
    _begun(bench, disk, "begun")
    return disk


@state("our own partitioning cut short: entries without a header", FORMATTED, format=True)
def cut_entries_only(bench: Bench) -> Disk:
    disk = _half_table(bench)
    disk.write(0, bytes(34 * 512))
    disk.write(384 * MIB - 512, bytes(512))
    _begun(bench, disk, "begun")
    return disk


@state("our own format cut short, formatting no longer allowed", "KVF-DISK-032")
@state("our own format cut short before mkfs", FORMATTED, format=True)
def cut_before_mkfs(bench: Bench) -> Disk:
    disk = _half_table(bench)
    _begun(bench, disk, "partitioned")
    return disk


@state("a record of a format of ours, but the table is another's", "KVF-DISK-035", format=True)
def stale_record(bench: Bench) -> Disk:
    disk = gpt_empty(bench)
    _begun(bench, disk, "begun")
    return disk


@state("our unfinished partition, but somebody made a file system in it", "KVF-DISK-035", format=True)
def cut_then_used(bench: Bench) -> Disk:
    disk = _half_table(bench)
    disk.partitions()
    sh("mkfs.ext4", "-q", disk.parts()[0])
    _begun(bench, disk, "partitioned")
    return disk
