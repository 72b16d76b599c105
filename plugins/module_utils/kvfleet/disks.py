"""Decide what may happen to a host's cache disk: pure logic over what was read from it.

Nothing here reads or writes a device. :mod:`disk_probe` reads a disk into a :class:`DiskProbe`, :func:`decide` turns
that into a :class:`Decision`, and :mod:`disk_actions` carries a decision out and asks again before each write.
The one rule behind all others: a disk is somebody's until every probe says that it is blank, or that it is ours.
"""

from __future__ import annotations

import math
import re
import struct
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from .findings import Finding, refuse
from .units import GIB, KIB, MIB, human_bytes

#: GPT type of a kvfleet cache partition; no other software uses it.
PARTITION_TYPE_GUID = "9a3c1f0e-5b1d-4e67-8f0a-6b76666c6565"
PARTITION_NAME = "kvfleet-cache"
#: Fits xfs (12 bytes) as well as ext4 (16).
DEFAULT_LABEL = "kvfleet"
MARKER_NAME = ".kvfleet.json"
RECORD_SCHEMA = 1
DEFAULT_MOUNT_POINT = "/var/cache/kvfleet"
FILESYSTEMS = ("ext4", "xfs")
LABEL_LIMIT_BYTES = {"ext4": 16, "xfs": 12}
#: mkfs.xfs 6.1 refuses less than 300 MiB; ext4 would work below but a cache would not.
MINIMUM_PARTITION_BYTES = 320 * MIB
MAXIMUM_SPARE_PERCENT = 50
#: How much is read from both ends of a disk. A partition that lost its table usually starts at 1 MiB, so the
#: first MiB alone would call it blank.
HEAD_BYTES = 4 * MIB
TAIL_BYTES = 1 * MIB

#: Stages of a format, in order, as kept in the host's record.
STAGES = ("begun", "partitioned", "formatted", "ready")

#: Signatures of stacks that own their members: kvfleet never decides that one can do without a member.
STACK_MEMBERS: Mapping[str, tuple[str, str]] = {
    "LVM2_member": ("an LVM physical volume", "vgreduce or vgremove, then pvremove"),
    "LVM1_member": ("an LVM physical volume", "pvremove"),
    "linux_raid_member": ("a member of an md array", "mdadm --stop, then mdadm --zero-superblock"),
    "isw_raid_member": ("a member of a firmware RAID array", "the controller's set-up"),
    "ddf_raid_member": ("a member of a firmware RAID array", "the controller's set-up"),
    "zfs_member": ("a member of a ZFS pool", "zpool destroy or zpool labelclear"),
    "bcache": ("a bcache device", "bcache unregister, then wipefs"),
    "mpath_member": ("a path of a multipath device", "multipath -f"),
    "drbd": ("a DRBD backing device", "drbdadm wipe-md"),
    "ceph_bluestore": ("a Ceph OSD", "ceph-volume lvm zap"),
    "VMFS_volume_member": ("a VMFS volume", "the hypervisor's tools"),
}

_KERNEL_NAME = re.compile(
    r"^(/dev/)?(nvme\d+(c\d+)?n\d+(p\d+)?|(s|h|v|xv)d[a-z]+\d*|(loop|md|mmcblk|nbd)\d+(p\d+)?|dm-\d+)$"
)
_GUID_NONE = "00000000-0000-0000-0000-000000000000"


# --------------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Layout:
    """Where the one partition lies; all in bytes, start and size multiples of ``alignment_bytes``."""

    start_bytes: int
    partition_bytes: int
    spare_bytes: int
    alignment_bytes: int
    sector_bytes: int

    @property
    def first_sector(self) -> int:
        """First logical sector of the partition."""
        return self.start_bytes // self.sector_bytes

    @property
    def last_sector(self) -> int:
        """Last logical sector of the partition, inclusive."""
        return (self.start_bytes + self.partition_bytes) // self.sector_bytes - 1


def planned_layout(size_bytes: int, spare_percent: float, optimal_io_bytes: int = 0, sector_bytes: int = 512) -> Layout:
    """Lay one partition out on a disk of ``size_bytes`` bytes that keeps ``spare_percent`` percent unpartitioned.

    The start is aligned to the larger of 1 MiB and the device's optimal I/O size (rounded up to whole MiB if it is
    not a multiple of one), the size is rounded down to the same alignment, and the backup table at the end of the
    disk (33 sectors of 512 bytes or 5 of 4 KiB, UEFI 2.10 section 5.3) always fits. ``spare_bytes`` is everything after
    the partition.
    Raises ``ValueError`` when less than :data:`MINIMUM_PARTITION_BYTES` would be left.
    """
    if not 0 <= spare_percent <= MAXIMUM_SPARE_PERCENT:
        raise ValueError(f"spare_percent is {spare_percent:g}; it must lie between 0 and {MAXIMUM_SPARE_PERCENT}")
    alignment = max(MIB, -(-optimal_io_bytes // MIB) * MIB)
    # a device that reports an absurd optimal size (USB bridges do: 32 MiB minus a sector) must not eat the disk
    if alignment > 64 * MIB:
        alignment = MIB
    backup_table = sector_bytes + 16 * KIB
    usable = min(size_bytes * (100 - spare_percent) / 100, size_bytes - backup_table)
    partition = int(usable - alignment) // alignment * alignment
    if partition < MINIMUM_PARTITION_BYTES:
        raise ValueError(
            f"{human_bytes(size_bytes)} with {spare_percent:g} % spare leave {human_bytes(max(partition, 0))};"
            " "
            f"a cache partition needs {human_bytes(MINIMUM_PARTITION_BYTES)}"
        )
    return Layout(alignment, partition, size_bytes - alignment - partition, alignment, sector_bytes)


# --------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class DiskSettings:
    """What the inventory says about the cache disk; sizes in GiB, ``None`` = no limit."""

    device: str = ""
    serial: str = ""
    min_size_gib: float | None = None
    max_size_gib: float | None = None
    format: bool = False
    wipe_serial: str = ""
    fstype: str = "ext4"
    label: str = DEFAULT_LABEL
    spare_percent: float = 7.0
    mount_point: str = DEFAULT_MOUNT_POINT
    data_directory: str = ""
    owner: str = "kvfleet"
    group: str = "kvfleet"
    allow_raid0: bool = False
    #: switches that were given as a text instead of a boolean, as ``name=text``
    texts: tuple[str, ...] = ()

    @property
    def data_path(self) -> str:
        """The data directory: as given, or ``data`` below the mount point."""
        return self.data_directory or str(PurePosixPath(self.mount_point) / "data")


def _number(name: str, value: Any) -> float:
    """A finite number, also from a text as ``-e name=7`` produces it; a refusal that names the variable otherwise."""
    try:
        number = float("x" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise refuse("KVF-DISK-005", f"{name} is {value!r}, not a number.", f"Set {name} to a plain number.")
    return number


def settings_from(values: Mapping[str, Any]) -> DiskSettings:
    """Build settings from inventory values with or without the prefix ``cache_disk_``; unknown names are left out.

    ``format`` and ``allow_raid0`` are true only for a real ``True``: the string ``"false"``, which Ansible's
    ``-e name=false`` produces, is a non-empty string and must never arm a formatter. Raises :class:`KvfleetError` for
    a number that is none.
    """
    plain = {
        str(key)[len("cache_disk_") :] if str(key).startswith("cache_disk_") else str(key): value
        for key, value in values.items()
    }
    known: dict[str, Any] = {}
    for name in (
        "device",
        "serial",
        "wipe_serial",
        "fstype",
        "label",
        "mount_point",
        "data_directory",
        "owner",
        "group",
    ):
        if plain.get(name) not in (None, ""):
            known[name] = str(plain[name]).strip()
    for name in ("min_size_gib", "max_size_gib", "spare_percent"):
        if plain.get(name) not in (None, ""):
            known[name] = _number(f"cache_disk_{name}", plain[name])
    texts = []
    for name in ("format", "allow_raid0"):
        value = plain.get(name)
        known[name] = value is True
        if value not in (True, False, None) and str(value).strip().lower() not in (
            "",
            "false",
            "no",
            "off",
            "0",
            "n",
            "f",
        ):
            texts.append(f"{name}={value}")
    known["texts"] = tuple(texts)
    return DiskSettings(**known)


def check_settings(settings: DiskSettings) -> list[Finding]:
    """Everything that is wrong with the settings themselves, before any disk is looked at."""
    found: list[Finding] = []
    device = settings.device
    if not device:
        found.append(
            Finding(
                "KVF-DISK-001",
                "No cache disk is named.",
                "Set cache_disk_device to a /dev/disk/by-id/ link and cache_disk_serial to the disk's serial; "
                "'kvfleet disks' lists both.",
            )
        )
    elif _KERNEL_NAME.match(device):
        found.append(
            Finding(
                "KVF-DISK-002",
                f"cache_disk_device is {device}, a kernel name; kernel names point at another disk after the next "
                "boot.",
                "Set cache_disk_device to the disk's /dev/disk/by-id/ link; 'kvfleet disks' lists them.",
            )
        )
    elif not re.fullmatch(r"/dev/disk/by-id/[^/]+", device):
        found.append(
            Finding(
                "KVF-DISK-002",
                f"cache_disk_device is {device}, which is not a link below /dev/disk/by-id/.",
                "Set cache_disk_device to the disk's /dev/disk/by-id/ link; 'kvfleet disks' lists them.",
            )
        )
    for text in settings.texts:
        name, _, value = text.partition("=")
        found.append(
            Finding(
                "KVF-DISK-006",
                f"cache_disk_{name} is the text {value!r}, not a boolean; a switch that can destroy data is not "
                "armed by a text.",
                f"Set cache_disk_{name}: true in the inventory, or say -e '{{\"cache_disk_{name}\": true}}'.",
            )
        )
    if not settings.serial:
        found.append(
            Finding(
                "KVF-DISK-003",
                "cache_disk_serial is empty; a disk is only touched when link and serial agree.",
                "Set cache_disk_serial to the serial that 'kvfleet disks' shows for the disk.",
            )
        )
    if settings.wipe_serial and settings.wipe_serial != settings.serial:
        found.append(
            Finding(
                "KVF-DISK-004",
                f"cache_disk_wipe_serial is {settings.wipe_serial!r} but cache_disk_serial is {settings.serial!r}; "
                "they must be the same text.",
                "Set cache_disk_wipe_serial for this one host to the serial of the disk that may be overwritten, or"
                " remove it.",
            )
        )
    if settings.fstype not in FILESYSTEMS:
        found.append(
            Finding(
                "KVF-DISK-005",
                f"cache_disk_fstype is {settings.fstype!r}; kvfleet makes ext4 or xfs.",
                "Set cache_disk_fstype to ext4 or xfs.",
            )
        )
    limit = LABEL_LIMIT_BYTES.get(settings.fstype, 12)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", settings.label) or len(settings.label) > limit:
        found.append(
            Finding(
                "KVF-DISK-005",
                f"The file system label {settings.label!r} is not 1 to {limit} letters, digits, dots, dashes or "
                f"underscores, as {settings.fstype} needs.",
                f"Set the label to at most {limit} such characters.",
            )
        )
    if not 0 <= settings.spare_percent <= MAXIMUM_SPARE_PERCENT:
        found.append(
            Finding(
                "KVF-DISK-005",
                f"cache_disk_spare_percent is {settings.spare_percent:g}; it must lie between 0 and "
                f"{MAXIMUM_SPARE_PERCENT}.",
                "Set cache_disk_spare_percent to the percentage of the disk that stays unpartitioned, usually 7.",
            )
        )
    low, high = settings.min_size_gib, settings.max_size_gib
    if low is not None and high is not None and low > high:
        found.append(
            Finding(
                "KVF-DISK-005",
                f"cache_disk_min_size_gib is {low:g} and cache_disk_max_size_gib is {high:g}: no disk can be both.",
                "Set cache_disk_min_size_gib to the smaller number.",
            )
        )
    mount = PurePosixPath(settings.mount_point)
    if not mount.is_absolute() or len(mount.parts) < 3 or ".." in mount.parts or str(mount) != settings.mount_point:
        found.append(
            Finding(
                "KVF-DISK-005",
                f"The mount point {settings.mount_point!r} is not a plain absolute path at least two levels deep.",
                f"Set the mount point to a directory of its own, like {DEFAULT_MOUNT_POINT}.",
            )
        )
    elif mount not in PurePosixPath(settings.data_path).parents:
        found.append(
            Finding(
                "KVF-DISK-005",
                f"The data directory {settings.data_path} does not lie below the mount point {mount}; it would be "
                "on another disk.",
                f"Set the data directory to a path below {mount}.",
            )
        )
    return found


# --------------------------------------------------------------------------------------------------- probes


@dataclass(frozen=True)
class Signature:
    """One thing that a probe recognised: on which kernel device, at which byte, what."""

    device: str
    type: str
    offset_bytes: int = 0
    label: str = ""
    uuid: str = ""

    def __str__(self) -> str:
        named = f" {self.label!r}" if self.label else ""
        return f"{self.type}{named} on {self.device}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a module's return value."""
        return {
            "device": self.device,
            "type": self.type,
            "offset_bytes": self.offset_bytes,
            "label": self.label,
            "uuid": self.uuid,
        }


@dataclass(frozen=True)
class GptEntry:
    """One used entry of a GUID partition table; sectors are logical sectors, both inclusive."""

    number: int
    type_guid: str
    partition_guid: str
    first_sector: int
    last_sector: int
    name: str


@dataclass(frozen=True)
class GptTable:
    """One of the two copies of a GUID partition table. ``valid`` = both checksums and the header's own address fit."""

    disk_guid: str
    entries: tuple[GptEntry, ...]
    valid: bool


@dataclass(frozen=True)
class TableProbe:
    """What both ends of the disk say when read directly.

    ``mbr``: ``none``, ``protective`` or ``mbr``. ``head_used``/``tail_used``: any byte there differs from zero.
    ``loose_entries``: used-looking GPT entries found in the places where tables live although no header points there.
    ``outside_used``: a non-zero byte that no GPT structure accounts for, in the head or the tail.
    """

    mbr: str = "none"
    primary: GptTable | None = None
    backup: GptTable | None = None
    head_used: bool = False
    tail_used: bool = False
    outside_used: bool = False
    loose_entries: tuple[GptEntry, ...] = ()


@dataclass(frozen=True)
class FilesystemProbe:
    """What lies in our partition: type, UUID and label as blkid reads them; ``finished``: mkfs ran to its end."""

    type: str = ""
    uuid: str = ""
    label: str = ""
    finished: bool = False
    others: tuple[Signature, ...] = ()
    marker: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MountEntry:
    """One mount of a device of the disk. ``namespace`` is empty for the host's own mount namespace."""

    device: str
    mount_point: str
    namespace: str = ""
    fstype: str = ""
    root: str = "/"

    def __str__(self) -> str:
        where = f" (in the mount namespace of process {self.namespace})" if self.namespace else ""
        return f"{self.device} on {self.mount_point}{where}"


@dataclass(frozen=True)
class PartitionProbe:
    """One partition that the kernel knows."""

    kernel_name: str
    number: int
    start_bytes: int
    size_bytes: int
    major_minor: str = ""


@dataclass(frozen=True)
class DiskProbe:
    """Everything that was read about one disk in one look. Sizes in bytes; ``errors`` make the disk occupied."""

    device: str
    kernel_name: str = ""
    node: str = ""
    major_minor: str = ""
    disk_sequence: str = ""
    kind: str = ""
    raid_level: str = ""
    is_partition: bool = False
    model: str = ""
    serial: str = ""
    serial_source: str = ""
    firmware: str = ""
    size_bytes: int = 0
    sector_bytes: int = 512
    optimal_io_bytes: int = 0
    read_only: bool = False
    removable: bool = False
    rotational: bool = False
    discard: bool = False
    links: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    partitions: tuple[PartitionProbe, ...] = ()
    table: TableProbe = field(default_factory=TableProbe)
    signatures: tuple[Signature, ...] = ()
    filesystem: FilesystemProbe = field(default_factory=FilesystemProbe)
    mounts: tuple[MountEntry, ...] = ()
    system_uses: tuple[str, ...] = ()
    swaps: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    fstab: tuple[str, ...] = ()
    exclusive_error: str = ""
    resolve_error: str = ""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class DiskRecord:
    """What this host wrote down about a disk that it formatted (``/etc/kvfleet/disks/<serial>.json``)."""

    serial: str
    stage: str
    machine_id: str
    disk_guid: str
    partition_uuid: str
    filesystem_uuid: str
    fstype: str
    label: str
    size_bytes: int
    hostname: str = ""
    overwrote: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def reached(self, stage: str) -> bool:
        """Whether ``stage`` or a later one was written down."""
        return STAGES.index(self.stage) >= STAGES.index(stage)

    def as_dict(self) -> dict[str, Any]:
        """The record as it is kept in JSON."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["overwrote"] = list(self.overwrote)
        data["notes"] = dict(self.notes)
        return dict(data, schema=RECORD_SCHEMA)


def parse_record(data: Mapping[str, Any]) -> DiskRecord | None:
    """A record from its JSON; ``None`` if it is of another schema or lacks a field."""
    if data.get("schema") != RECORD_SCHEMA or data.get("stage") not in STAGES:
        return None
    texts = ("serial", "stage", "machine_id", "disk_guid", "partition_uuid", "filesystem_uuid", "fstype", "label")
    if not all(isinstance(data.get(name), str) and data[name] for name in texts) or not isinstance(
        data.get("size_bytes"), int
    ):
        return None
    notes = data.get("notes")
    return DiskRecord(
        **{name: data[name] for name in texts},
        size_bytes=data["size_bytes"],
        hostname=str(data.get("hostname", "")),
        overwrote=tuple(str(item) for item in data.get("overwrote", ())),
        notes=notes if isinstance(notes, dict) else {},
    )


# --------------------------------------------------------------------------------------------------- raw tables


def _guid(raw: bytes) -> str:
    return str(uuid.UUID(bytes_le=raw))


def _entry(raw: bytes, number: int) -> GptEntry | None:
    type_guid = _guid(raw[:16])
    if type_guid == _GUID_NONE:
        return None
    first, last = struct.unpack_from("<QQ", raw, 32)
    name = raw[56:128].decode("utf-16-le", "replace").split("\0", 1)[0]
    return GptEntry(number, type_guid, _guid(raw[16:32]), first, last, name)


def _entries(raw: bytes, entry_bytes: int = 128) -> tuple[GptEntry, ...]:
    found = (_entry(raw[at : at + entry_bytes], at // entry_bytes + 1) for at in range(0, len(raw) - 127, entry_bytes))
    return tuple(entry for entry in found if entry is not None)


def _table(header: bytes, my_sector: int, read_entries: Any) -> tuple[GptTable | None, tuple[int, int]]:
    """One copy of the table and the byte range (start, length) of its entries; ``None`` without the header's magic."""
    if header[:8] != b"EFI PART":
        return None, (0, 0)
    header_bytes, header_sum = struct.unpack_from("<II", header, 12)
    own, _other = struct.unpack_from("<QQ", header, 24)
    entries_sector, count, entry_bytes, entries_sum = struct.unpack_from("<QIII", header, 72)
    valid = 92 <= header_bytes <= len(header) and own == my_sector
    if valid:
        blank_sum = header[:16] + b"\0\0\0\0" + header[20:header_bytes]
        valid = zlib.crc32(blank_sum) == header_sum
    if not (1 <= count <= 1024 and 128 <= entry_bytes <= 4096):
        return GptTable(_guid(header[56:72]), (), False), (0, 0)
    span = (entries_sector, count * entry_bytes)
    raw = read_entries(*span)
    valid = valid and raw is not None and zlib.crc32(raw) == entries_sum
    return GptTable(_guid(header[56:72]), _entries(raw or b"", entry_bytes), valid), span


def parse_tables(head: bytes, tail: bytes, size_bytes: int, sector_bytes: int = 512) -> TableProbe:
    """Read MBR and both GPT copies out of the first and the last bytes of a disk (UEFI 2.10, section 5.3).

    ``head`` starts at byte 0, ``tail`` ends at ``size_bytes``; both longer than a table (17 KiB).
    """
    tail_start = size_bytes - len(tail)
    sectors = size_bytes // sector_bytes

    def entries_at(sector: int, length: int) -> bytes | None:
        at = sector * sector_bytes
        if at + length <= len(head):
            return head[at : at + length]
        if at >= tail_start and at + length <= size_bytes:
            return tail[at - tail_start : at - tail_start + length]
        return None

    first = head[:512]
    mbr = "none"
    if first[510:512] == b"\x55\xaa":
        kinds = {first[446 + 16 * slot + 4] for slot in range(4)} - {0}
        mbr = "protective" if kinds == {0xEE} else "mbr"
    primary, _ = _table(head[sector_bytes : 2 * sector_bytes], 1, entries_at)
    backup, _ = _table(tail[-sector_bytes:], sectors - 1, entries_at)

    # bytes that GPT structures may occupy: LBA 0, LBA 1, 16 KiB of entries; the same mirrored at the end
    table_head = 2 * sector_bytes + 16 * KIB
    table_tail = sector_bytes + 16 * KIB
    loose: list[GptEntry] = []
    for raw in (head[2 * sector_bytes : table_head], tail[-table_tail:-sector_bytes]):
        loose.extend(_entries(raw))
    sector0_foreign = any(first) and mbr != "protective"
    outside = (
        sector0_foreign
        or any(head[512:sector_bytes])
        or (primary is None and any(head[sector_bytes : 2 * sector_bytes]))
        or (backup is None and any(tail[-sector_bytes:]))
        or any(head[table_head:])
        or any(tail[:-table_tail])
    )
    return TableProbe(mbr, primary, backup, any(head), any(tail), bool(outside), tuple(loose))


def filesystem_finished(fstype: str, start: bytes) -> bool:
    """Whether mkfs ran to its end, from the first 4 KiB of the partition.

    ext4: mke2fs writes the primary superblock with the "valid" state bit last (``s_magic`` at 0x438,
    ``s_state`` at 0x43A, Linux ``Documentation/filesystems/ext4/super.rst``). xfs: mkfs.xfs
    keeps ``sb_inprogress`` (byte 126) at 1 until
    it is done (``libxfs/xfs_format.h``).
    """
    if fstype == "ext4":
        magic, state = struct.unpack_from("<HH", start, 0x438)
        return bool(magic == 0xEF53 and state & 1)
    if fstype == "xfs":
        return start[:4] == b"XFSB" and start[126] == 0
    return False


# --------------------------------------------------------------------------------------------------- decision


@dataclass(frozen=True)
class Decision:
    """What may be done. ``action``: ``refuse``, ``reuse``, ``resume``, ``format``, ``overwrite``.

    ``content`` says whose the disk is: ``blank``, ``ours``, ``ours_unfinished``, ``ours_moved``, ``ours_damaged``,
    ``recognised`` (a foreign signature), ``unknown`` (bytes nobody recognises), ``unreadable``.
    ``steps`` are the writing steps in order, in words for the diff. ``record``: what to write down on adoption.
    """

    action: str
    content: str
    errors: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    steps: tuple[str, ...] = ()
    layout: Layout | None = None
    partition_uuid: str = ""
    filesystem_uuid: str = ""
    adopt: bool = False

    @property
    def refused(self) -> bool:
        """Whether nothing may be done."""
        return self.action == "refuse"


def serial_matches_link(link: str, serial: str) -> bool:
    """Whether the by-id link's own name ends in ``serial``, with or without udev's namespace suffix ``_1``."""
    name = PurePosixPath(link).name
    # udev replaces what cannot stand in a link by an underscore
    wanted = re.sub(r"[^A-Za-z0-9#+.:=@_-]", "_", serial.strip())
    return bool(wanted) and bool(re.search(rf"(^|[_-]){re.escape(wanted)}(_\d+)?$", name))


def check_identity(probe: DiskProbe, settings: DiskSettings) -> list[Finding]:
    """Is this exactly the disk that the inventory names? Link, whole disk, kind, serial, size window."""
    if probe.resolve_error:
        return [
            Finding(
                "KVF-DISK-010",
                f"{settings.device} {probe.resolve_error}.",
                "Set cache_disk_device to a link that exists on this host; 'kvfleet disks' lists them.",
            )
        ]
    if probe.is_partition:
        return [
            Finding(
                "KVF-DISK-011",
                f"{settings.device} is a partition ({probe.kernel_name}), not a whole disk.",
                "Set cache_disk_device to the link without -part.",
            )
        ]
    found: list[Finding] = []
    if probe.kind == "md" and not (probe.raid_level == "raid0" and settings.allow_raid0):
        if probe.raid_level in ("raid4", "raid5", "raid6"):
            found.append(
                Finding(
                    "KVF-DISK-012",
                    f"{settings.device} is an md {probe.raid_level} array; each small write there costs extra reads"
                    " and parity writes, "
                    "which a cache that rewrites itself pays all the time.",
                    "Set cache_disk_device to one plain NVMe namespace; a cache needs no redundancy.",
                )
            )
        else:
            hint = "set cache_disk_allow_raid0 to true, or " if probe.raid_level == "raid0" else ""
            found.append(
                Finding(
                    "KVF-DISK-012",
                    f"{settings.device} is an md array ({probe.raid_level or 'level unknown'}), not a disk.",
                    f"To use it, {hint}set cache_disk_device to one plain NVMe namespace.".replace(
                        "To use it, set", "Set"
                    ),
                )
            )
    elif probe.kind in ("dm", "multipath"):
        found.append(
            Finding(
                "KVF-DISK-012",
                f"{settings.device} is a device-mapper device ({probe.kernel_name}: LVM, LUKS or multipath), not a "
                "disk.",
                "Set cache_disk_device to one plain NVMe namespace.",
            )
        )
    elif probe.kind not in ("nvme", "scsi", "virtio", "xen", "mmc", "loop", "md"):
        found.append(
            Finding(
                "KVF-DISK-012",
                f"{settings.device} is a {probe.kind or 'device of an unknown kind'} ({probe.kernel_name}), not a "
                "disk.",
                "Set cache_disk_device to one plain NVMe namespace.",
            )
        )
    if settings.serial and probe.serial_source in ("", "link"):
        matches = serial_matches_link(settings.device, settings.serial)
    else:
        matches = probe.serial.strip() == settings.serial
    if not matches:
        found.append(
            Finding(
                "KVF-DISK-013",
                f"{settings.device} has serial {probe.serial or 'unknown'}, the inventory says {settings.serial!r}.",
                "Correct cache_disk_device or cache_disk_serial; 'kvfleet disks' shows which belong together.",
            )
        )
    if probe.rivals:
        found.append(
            Finding(
                "KVF-DISK-014",
                f"{settings.device} is ambiguous: {', '.join((probe.kernel_name, *probe.rivals))} answer to it.",
                "Set cache_disk_device to a link that names one namespace (ends in _1, _2 or starts with nvme-eui. "
                "or wwn-).",
            )
        )
    size_gib = probe.size_bytes / GIB
    for limit, wrong, word in (
        (settings.min_size_gib, settings.min_size_gib is not None and size_gib < settings.min_size_gib, "min"),
        (settings.max_size_gib, settings.max_size_gib is not None and size_gib > settings.max_size_gib, "max"),
    ):
        if wrong:
            found.append(
                Finding(
                    "KVF-DISK-015",
                    f"{settings.device} has {size_gib:.1f} GiB; cache_disk_{word}_size_gib is {limit:g}.",
                    f"Check that this is the right disk, then correct cache_disk_{word}_size_gib.",
                    {"size_gib": round(size_gib, 3), f"{word}_size_gib": limit},
                )
            )
    if not found:
        try:
            planned_layout(probe.size_bytes, settings.spare_percent, probe.optimal_io_bytes, probe.sector_bytes)
        except ValueError as error:
            found.append(
                Finding(
                    "KVF-DISK-015",
                    f"{settings.device} is too small: {error}.",
                    "Set cache_disk_device to a larger disk.",
                )
            )
    return found


def check_use(probe: DiskProbe) -> list[Finding]:
    """Reasons why nothing may be written to the disk, whatever the inventory allows: in use, held, not writable."""
    name = probe.device or probe.kernel_name
    found: list[Finding] = []
    if probe.system_uses:
        found.append(
            Finding(
                "KVF-DISK-020",
                f"{name} ({probe.kernel_name}) carries the running system: {', '.join(probe.system_uses)}.",
                "Set cache_disk_device to a disk that the system does not need.",
            )
        )
    if probe.swaps:
        found.append(
            Finding(
                "KVF-DISK-020",
                f"{name} ({probe.kernel_name}) is used as swap: {', '.join(probe.swaps)}.",
                "Set cache_disk_device to another disk.",
            )
        )
    if probe.mounts and not probe.system_uses:
        found.append(
            Finding(
                "KVF-DISK-021",
                f"{name} is mounted: {'; '.join(str(mount) for mount in probe.mounts[:4])}.",
                "Unmount it if it may really be given up, or set cache_disk_device to another disk.",
            )
        )
    if probe.holders:
        found.append(
            Finding(
                "KVF-DISK-022",
                f"{name} is held by {', '.join(probe.holders)}.",
                "Take the disk out of that volume, array or mapping by hand, or set cache_disk_device to another disk.",
            )
        )
    if probe.exclusive_error and not (probe.mounts or probe.holders or probe.swaps):
        found.append(
            Finding(
                "KVF-DISK-022",
                f"{name} is opened exclusively by something on this machine ({probe.exclusive_error}).",
                "Find what uses it (lsof, fuser, another mount namespace), or set cache_disk_device to another disk.",
            )
        )
    if probe.read_only:
        found.append(
            Finding("KVF-DISK-023", f"{name} is read-only.", "Set cache_disk_device to a disk that can be written.")
        )
    if probe.removable:
        found.append(Finding("KVF-DISK-023", f"{name} is removable.", "Set cache_disk_device to a built-in disk."))
    if probe.fstab:
        found.append(
            Finding(
                "KVF-DISK-024",
                f"{name} is named in /etc/fstab: {'; '.join(probe.fstab)}.",
                "Remove that line if the disk may be given up, or set cache_disk_device to another disk.",
            )
        )
    members = [signature for signature in probe.signatures if signature.type in STACK_MEMBERS]
    if members:
        what, release = STACK_MEMBERS[members[0].type]
        found.append(
            Finding(
                "KVF-DISK-025",
                f"{name} is {what} ({'; '.join(str(member) for member in members)}), active or not; "
                "kvfleet never takes a member away from such a stack.",
                f"Release it by hand ({release}), or set cache_disk_device to another disk.",
            )
        )
    return found


def _our_entry(probe: DiskProbe) -> GptEntry | None:
    """The one entry of a GPT that looks like ours (type and name), from whichever copy is there; else ``None``."""
    table = probe.table.primary or probe.table.backup
    if table is None or len(table.entries) != 1:
        return None
    entry = table.entries[0]
    return entry if entry.type_guid == PARTITION_TYPE_GUID and entry.name == PARTITION_NAME else None


def _interrupted_table(probe: DiskProbe, record: DiskRecord) -> bool:
    """Whether all that is on the disk is part of the table that the record announced: a partitioning cut short."""
    table = probe.table
    if table.outside_used or table.mbr == "mbr" or not (table.head_used or table.tail_used):
        return False
    entries = list(table.loose_entries)
    for copy in (table.primary, table.backup):
        if copy is not None:
            if copy.disk_guid != record.disk_guid:
                return False
            entries.extend(copy.entries)
    if any(entry.partition_guid != record.partition_uuid for entry in entries):
        return False
    allowed = {"gpt", "PMBR"}
    return all(signature.type in allowed for signature in probe.signatures)


def classify(probe: DiskProbe, record: DiskRecord | None, machine_id: str) -> tuple[str, str]:
    """Whose the content is, and one sentence that says why (for people)."""
    if probe.errors:
        return "unreadable", "; ".join(probe.errors)
    table, filesystem = probe.table, probe.filesystem
    known = record if record is not None and record.serial and record.machine_id == machine_id else None
    if known is not None and known.size_bytes != probe.size_bytes:
        known = None
    entry = _our_entry(probe)
    blank = not (table.head_used or table.tail_used or probe.signatures or probe.partitions)
    if blank:
        return "blank", "no signature, no table, first and last bytes are zero"
    if entry is None:
        if known is not None and not known.reached("formatted") and _interrupted_table(probe, known):
            return "ours_unfinished", "a partitioning by kvfleet on this host was cut short"
        if probe.signatures or table.primary or table.backup or table.mbr != "none":
            # both copies of a GPT and its protective MBR are one thing to a reader
            listed = list(dict.fromkeys(str(item) for item in probe.signatures if item.type != "PMBR"))
            if table.backup and not table.primary:
                listed.append("the backup of a GPT at the end of the disk")
            return "recognised", "; ".join(listed) or "a partition table"
        return "unknown", "bytes that are not zero and that no probe recognises"
    both_valid = (
        table.primary is not None
        and table.backup is not None
        and table.primary.valid
        and table.backup.valid
        and table.primary == table.backup
    )
    if known is not None and entry.partition_guid == known.partition_uuid:
        if not known.reached("formatted"):
            foreign = [item for item in filesystem.others if item.uuid != known.filesystem_uuid]
            if filesystem.type and filesystem.uuid != known.filesystem_uuid:
                foreign.append(Signature("the partition", filesystem.type, 0, filesystem.label, filesystem.uuid))
            if foreign:
                return "recognised", f"{foreign[0]} in a partition that kvfleet began and never finished"
            return "ours_unfinished", "a format by kvfleet on this host was cut short"
        if not both_valid:
            return "ours_damaged", "one copy of the partition table is damaged"
        wanted = (known.fstype, known.filesystem_uuid, known.label)
        if (filesystem.type, filesystem.uuid, filesystem.label) == wanted:
            return "ours", "partition type, name and UUID, file system UUID and label are the recorded ones"
        return (
            "ours_damaged",
            f"the partition is ours but holds {filesystem.type or 'no file system'} {filesystem.label!r} "
            f"{filesystem.uuid or ''}".rstrip()
            + f" instead of {known.fstype} {known.label!r} {known.filesystem_uuid}",
        )
    marker = filesystem.marker
    if (
        both_valid
        and marker.get("machine_id") == machine_id
        and marker.get("partition_uuid") == entry.partition_guid
        and filesystem.uuid
        and marker.get("filesystem_uuid") == filesystem.uuid
    ):
        return "ours", "this host's record is gone, but the disk carries this host's marker with the same UUIDs"
    where = (
        f"host {marker['hostname']}"
        if marker.get("hostname")
        else "another host, or this one before it was installed anew"
    )
    return "ours_moved", f"a kvfleet cache disk of {where} (partition {entry.partition_guid})"


def _write_steps(
    action: str, probe: DiskProbe, settings: DiskSettings, layout: Layout, content: str
) -> tuple[str, ...]:
    steps: list[str] = []
    node = probe.kernel_name
    table_done = content == "ours_unfinished" and _our_entry(probe) is not None
    if action == "overwrite":
        steps += [f"erase signatures on {part.kernel_name}" for part in probe.partitions]
        steps.append(f"erase signatures and partition tables on {node}")
    elif action == "resume" and not table_done:
        steps.append(f"erase the unfinished partition table on {node}")
    if not table_done:
        steps.append(
            f"make a GPT with one partition {PARTITION_NAME} of {human_bytes(layout.partition_bytes)} from "
            f"{human_bytes(layout.start_bytes)}, "
            f"{human_bytes(layout.spare_bytes)} left free"
        )
    if probe.discard:
        steps.append("discard the free space behind the partition")
    if not (table_done and probe.filesystem.finished):
        steps.append(f"make {settings.fstype} {settings.label!r}" + (" with discard" if probe.discard else ""))
    return tuple(steps)


def decide(
    probe: DiskProbe, settings: DiskSettings, record: DiskRecord | None = None, machine_id: str = ""
) -> Decision:
    """Decide from one look at the disk. Never raises; a refusal is a decision with ``errors``."""
    errors = check_settings(settings)
    if any(finding.code in ("KVF-DISK-001", "KVF-DISK-002") for finding in errors):
        return Decision("refuse", "unreadable", tuple(errors))
    errors += check_identity(probe, settings)
    if errors:
        return Decision("refuse", "unreadable", tuple(errors))
    layout = planned_layout(probe.size_bytes, settings.spare_percent, probe.optimal_io_bytes, probe.sector_bytes)
    content, why = classify(probe, record, machine_id)
    name = settings.device
    entry = _our_entry(probe)
    warnings: list[Finding] = []
    if probe.rotational and probe.kind != "loop":
        warnings.append(
            Finding(
                "KVF-DISK-040",
                f"{name} reports that it rotates; a cache tier on it will not pay.",
                "Set cache_disk_device to an NVMe namespace.",
            )
        )
    if content == "ours" and entry is not None:
        if record is not None and (record.fstype != settings.fstype or record.label != settings.label):
            warnings.append(
                Finding(
                    "KVF-DISK-041",
                    f"{name} keeps {record.fstype} {record.label!r}; the inventory now says {settings.fstype} "
                    f"{settings.label!r}.",
                    "Set cache_disk_fstype back, or retire the disk and bring it in again (docs/cache-disk.md).",
                )
            )
        on_disk = (entry.last_sector - entry.first_sector + 1) * probe.sector_bytes
        if on_disk != layout.partition_bytes:
            warnings.append(
                Finding(
                    "KVF-DISK-041",
                    f"{name} keeps its partition of {human_bytes(on_disk)}; cache_disk_spare_percent "
                    f"{settings.spare_percent:g} would give {human_bytes(layout.partition_bytes)}.",
                    "Set cache_disk_spare_percent back, or retire the disk and bring it in again (docs/cache-disk.md).",
                )
            )
        wrong = [
            mount
            for mount in probe.mounts
            if not mount.namespace and mount.root == "/" and mount.mount_point != settings.mount_point
        ]
        in_place = any(mount.mount_point == settings.mount_point and not mount.namespace for mount in probe.mounts)
        if wrong and not in_place:
            errors.append(
                Finding(
                    "KVF-DISK-021",
                    f"{name} is ours but is mounted elsewhere: {'; '.join(str(mount) for mount in wrong)}.",
                    f"Unmount it there, or set the mount point of the cache disk to {wrong[0].mount_point}.",
                )
            )
        if probe.read_only:
            errors.append(
                Finding(
                    "KVF-DISK-023",
                    f"{name} is read-only.",
                    "Replace the disk, or set cache_disk_device to another one.",
                )
            )
        if probe.holders:
            errors += [finding for finding in check_use(probe) if finding.code == "KVF-DISK-022"]
        if probe.fstab:
            errors.append(
                Finding(
                    "KVF-DISK-024",
                    f"{name} is ours but is also named in /etc/fstab: {'; '.join(probe.fstab)}.",
                    "Remove that line; kvfleet mounts the disk with its own systemd unit.",
                )
            )
        layout = Layout(
            entry.first_sector * probe.sector_bytes,
            on_disk,
            probe.size_bytes - entry.first_sector * probe.sector_bytes - on_disk,
            layout.alignment_bytes,
            probe.sector_bytes,
        )
        return Decision(
            "refuse" if errors else "reuse",
            content,
            tuple(errors),
            tuple(warnings),
            (),
            layout,
            entry.partition_guid,
            probe.filesystem.uuid,
            adopt=record is None or record.partition_uuid != entry.partition_guid,
        )
    errors += check_use(probe)
    if content == "unreadable":
        errors.append(
            Finding(
                "KVF-DISK-030",
                f"{name} could not be read completely and therefore counts as occupied: {why}.",
                "Repair or replace the disk, then run again.",
            )
        )
    elif content == "blank":
        if settings.format is not True:
            errors.append(
                Finding(
                    "KVF-DISK-031",
                    f"{name} is blank and cache_disk_format is not true.",
                    "Set cache_disk_format to true for the run that may format this disk.",
                )
            )
    elif content == "ours_unfinished":
        if settings.format is not True:
            errors.append(
                Finding(
                    "KVF-DISK-032",
                    f"{name}: {why}.",
                    "Set cache_disk_format to true once more to finish it; nothing was stored there yet.",
                )
            )
    elif content == "ours_damaged":
        errors.append(
            Finding(
                "KVF-DISK-033",
                f"{name} is this host's cache disk, but {why}; kvfleet neither repairs nor overwrites it.",
                "Look at it (sgdisk --verify, fsck), save what matters, then erase it by hand (wipefs --all) and "
                "run with cache_disk_format true.",
            )
        )
    elif settings.format is True and settings.wipe_serial and settings.wipe_serial == settings.serial:
        pass
    elif content == "ours_moved":
        errors.append(
            Finding(
                "KVF-DISK-034",
                f"{name} is {why}, not of this host.",
                "Give it back, or set cache_disk_format to true and cache_disk_wipe_serial to its serial for this "
                "host; its cache is lost then.",
            )
        )
    else:
        errors.append(
            Finding(
                "KVF-DISK-035",
                f"{name} is occupied: {why}.",
                "Set cache_disk_device to another disk, or, if all of it may be destroyed, set cache_disk_format to"
                " true and "
                "cache_disk_wipe_serial to its serial for this one host.",
            )
        )
    if errors:
        return Decision("refuse", content, tuple(errors), tuple(warnings), (), layout)
    action = {"blank": "format", "ours_unfinished": "resume"}.get(content, "overwrite")
    unfinished = content == "ours_unfinished" and record is not None
    return Decision(
        action,
        content,
        (),
        tuple(warnings),
        _write_steps(action, probe, settings, layout, content),
        layout,
        record.partition_uuid if unfinished and record else "",
        record.filesystem_uuid if unfinished and record else "",
    )


def check_cache_disk(
    probe: DiskProbe, settings: DiskSettings, record: DiskRecord | None = None, machine_id: str = ""
) -> list[Finding]:
    """The errors that :func:`decide` would refuse with: what the planner asks before any change on the host."""
    return list(decide(probe, settings, record, machine_id).errors)
