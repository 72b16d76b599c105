"""The decisions about a cache disk: recorded outputs of the real tools, and states that no loop device can be in."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.core.disk_probe import fstab_uses, parse_export, parse_mountinfo, parse_wipefs
from kvfleet.core.disks import (
    PARTITION_TYPE_GUID,
    DiskProbe,
    DiskRecord,
    DiskSettings,
    FilesystemProbe,
    GptTable,
    MountEntry,
    PartitionProbe,
    Signature,
    TableProbe,
    check_cache_disk,
    check_settings,
    classify,
    decide,
    filesystem_finished,
    parse_record,
    parse_tables,
    planned_layout,
    serial_matches_link,
    settings_from,
)
from kvfleet.core.findings import KvfleetError
from kvfleet.core.units import GIB, MIB

DATA = Path(__file__).resolve().parents[1] / "data" / "disks"
LINK = "/dev/disk/by-id/nvme-SAMSUNG_MZQL21T9HCJR-00A07_S64GNE0T000001"
SERIAL = "S64GNE0T000001"
# a "1.92 TB" drive by the IDEMA rule of capacities, LBA1-03: 97696368 + 1953504 * (GB - 50) sectors
SIZE_1920 = 512 * (97696368 + 1953504 * (1920 - 50))
HOST = "0123456789abcdef0123456789abcdef"


def recorded(name: str, size: int) -> tuple[bytearray, bytearray]:
    """First 4 MiB and last MiB of a device of ``size`` bytes with the recorded sectors on it."""
    raw = zlib.decompress(base64.b64decode(json.loads((DATA / "labels" / f"{name}.json").read_text())["data"]))
    head, tail = bytearray(4 * MIB), bytearray(MIB)
    for at in range(0, len(raw), 520):
        (offset,) = struct.unpack_from("<Q", raw, at)
        sector = raw[at + 8 : at + 520]
        if offset < len(head):
            head[offset : offset + 512] = sector
        else:
            tail[offset - size + MIB : offset - size + MIB + 512] = sector
    return head, tail


def tables(image: tuple[bytearray, bytearray], size: int) -> TableProbe:
    return parse_tables(bytes(image[0]), bytes(image[1]), size)


SETTINGS = DiskSettings(device=LINK, serial=SERIAL, format=True)
BLANK = DiskProbe(
    device=LINK,
    kernel_name="nvme1n1",
    node="/dev/nvme1n1",
    kind="nvme",
    model="SAMSUNG MZQL21T9HCJR-00A07",
    serial=SERIAL,
    serial_source="kernel",
    size_bytes=SIZE_1920,
    discard=True,
)


def codes(probe: DiskProbe, settings: DiskSettings = SETTINGS, record: DiskRecord | None = None) -> list[str]:
    return [finding.code for finding in decide(probe, settings, record, HOST).errors]


# ------------------------------------------------------------------------------------------------ layout


def test_layout_of_a_1920_gb_drive() -> None:
    layout = planned_layout(SIZE_1920, 7)
    assert SIZE_1920 == 1_920_383_410_176
    assert layout.start_bytes == MIB
    assert layout.first_sector == 2048
    # 93 % of the disk less the first MiB, whole MiB
    assert layout.partition_bytes == (1_920_383_410_176 * 93 // 100 - MIB) // MIB * MIB
    assert layout.start_bytes + layout.partition_bytes + layout.spare_bytes == SIZE_1920
    assert layout.last_sector == 2048 + layout.partition_bytes // 512 - 1


def test_layout_without_spare_leaves_room_for_the_backup_table() -> None:
    layout = planned_layout(512 * MIB, 0)
    # sgdisk's own "last usable sector" for a disk of 1048576 sectors is 1048542
    assert layout.last_sector <= 1048542


@given(
    size=st.integers(min_value=512 * MIB // 4096, max_value=64 * 1024 * GIB // 4096).map(lambda blocks: blocks * 4096),
    spare=st.floats(min_value=0, max_value=30),
    optimal=st.sampled_from([0, 512, 4096, 131072, MIB, 3 * MIB, 33553920]),
    sector=st.sampled_from([512, 4096]),
)
def test_layout_is_aligned_and_keeps_the_spare(size: int, spare: float, optimal: int, sector: int) -> None:
    layout = planned_layout(size, spare, optimal, sector)
    assert layout.start_bytes % layout.alignment_bytes == 0
    assert layout.partition_bytes % layout.alignment_bytes == 0
    assert layout.alignment_bytes % MIB == 0
    assert layout.start_bytes + layout.partition_bytes <= size * (100 - spare) / 100
    end_of_usable = size - sector - 16384
    assert (layout.last_sector + 1) * sector <= end_of_usable


def test_layout_refuses_what_cannot_be_a_cache() -> None:
    with pytest.raises(ValueError, match="needs 320 MiB"):
        planned_layout(300 * MIB, 7)
    with pytest.raises(ValueError, match="between 0 and 50"):
        planned_layout(SIZE_1920, 51)


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("value", ["true", "yes", "True", "1", 1, "on"])
def test_only_a_real_true_arms_the_formatter(value: Any) -> None:
    settings = settings_from({"cache_disk_device": LINK, "cache_disk_serial": SERIAL, "cache_disk_format": value})
    assert settings.format is False
    if value != 1:
        assert "KVF-DISK-006" in [finding.code for finding in check_settings(settings)]


@pytest.mark.parametrize("value", [False, None, "false", "no", "False", "", "0"])
def test_false_in_any_spelling_is_no(value: Any) -> None:
    settings = settings_from({"device": LINK, "serial": SERIAL, "format": value})
    assert settings.format is False
    assert check_settings(settings) == []


@pytest.mark.parametrize("value", ["seven", True, "nan", [7], "1e999"])
def test_numbers_that_are_none_name_their_variable(value: Any) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-DISK-005: cache_disk_spare_percent is .*not a number"):
        settings_from({"cache_disk_spare_percent": value})
    assert settings_from({"cache_disk_spare_percent": "7.5"}).spare_percent == 7.5


def test_true_is_yes() -> None:
    assert settings_from({"format": True}).format is True


@pytest.mark.parametrize(
    "device",
    ["/dev/sdb", "sdb", "/dev/nvme0n1", "nvme1n1", "/dev/nvme0n1p1", "/dev/vda", "/dev/md0", "/dev/dm-0",
     "/dev/mmcblk0", "/dev/mapper/mpatha", "/dev/disk/by-path/pci-0000:01:00.0-nvme-1", "/dev/disk/by-id/",
     "/dev/disk/by-id/../../sda",
     "nvme-SAMSUNG_MZQL21T9HCJR-00A07_S64GNE0T000001"],
)  # fmt: skip
def test_everything_but_a_link_by_id_is_refused(device: str) -> None:
    assert codes(BLANK, replace(SETTINGS, device=device))[0] == "KVF-DISK-002"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fstype": "btrfs"}, "cache_disk_fstype"),
        ({"label": "thirteen-long", "fstype": "xfs"}, "12"),
        ({"label": ""}, "label"),
        ({"spare_percent": 60.0}, "cache_disk_spare_percent"),
        ({"min_size_gib": 10.0, "max_size_gib": 5.0}, "cache_disk_min_size_gib"),
        ({"mount_point": "/cache"}, "/cache"),
        ({"mount_point": "/var/../etc"}, "/var/../etc"),
        ({"data_directory": "/srv/data"}, "/srv/data"),
    ],
)
def test_settings_that_cannot_work_name_the_variable(change: dict[str, Any], word: str) -> None:
    (finding,) = check_settings(replace(SETTINGS, **change))
    assert finding.code == "KVF-DISK-005"
    assert word in finding.message + finding.fix


# ------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize(
    ("link", "serial", "fits"),
    [
        ("nvme-QEMU_NVMe_Ctrl_THDEMO02", "THDEMO02", True),
        ("nvme-QEMU_NVMe_Ctrl_THDEMO02_1", "THDEMO02", True),
        ("nvme-QEMU_NVMe_Ctrl_THDEMO02", "DEMO02", False),
        ("nvme-QEMU_NVMe_Ctrl_THDEMO02", "THDEMO0", False),
        ("nvme-Model_A B C".replace(" ", "_"), "A B C", True),
        ("wwn-0x5000c500a1b2c3d4", "0x5000c500a1b2c3d4", True),
        ("nvme-QEMU_NVMe_Ctrl_THDEMO02", "", False),
        ("nvme-x_aXb", "a.b", False),
    ],
)
def test_serial_in_the_link(link: str, serial: str, fits: bool) -> None:
    assert serial_matches_link(f"/dev/disk/by-id/{link}", serial) is fits


def test_blank_disk_is_formatted() -> None:
    decision = decide(BLANK, SETTINGS, None, HOST)
    assert (decision.action, decision.content, decision.errors) == ("format", "blank", ())
    assert decision.layout == planned_layout(SIZE_1920, 7)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"resolve_error": "does not exist on this host"}, "KVF-DISK-010"),
        ({"is_partition": True}, "KVF-DISK-011"),
        ({"kind": "dm"}, "KVF-DISK-012"),
        ({"kind": "multipath"}, "KVF-DISK-012"),
        ({"kind": "zram"}, "KVF-DISK-012"),
        ({"kind": "md", "raid_level": "raid1"}, "KVF-DISK-012"),
        ({"serial": "S64GNE0T000002"}, "KVF-DISK-013"),
        ({"rivals": ("nvme1n2",)}, "KVF-DISK-014"),
        ({"size_bytes": 200 * MIB}, "KVF-DISK-015"),
        ({"system_uses": ("nvme1n1p2 on /",)}, "KVF-DISK-020"),
        ({"swaps": ("/dev/nvme1n1p3",)}, "KVF-DISK-020"),
        ({"mounts": (MountEntry("nvme1n1p1", "/data"),)}, "KVF-DISK-021"),
        ({"mounts": (MountEntry("nvme1n1p1", "/data", namespace="812"),)}, "KVF-DISK-021"),
        ({"holders": ("dm-0",)}, "KVF-DISK-022"),
        ({"exclusive_error": "nvme1n1: Device or resource busy"}, "KVF-DISK-022"),
        ({"read_only": True}, "KVF-DISK-023"),
        ({"removable": True}, "KVF-DISK-023"),
        ({"fstab": ("UUID=x /data ext4",)}, "KVF-DISK-024"),
        ({"errors": ("blkid on nvme1n1: Input/output error",)}, "KVF-DISK-030"),
    ],
)
def test_nothing_that_is_set_overrides_these(change: dict[str, Any], code: str) -> None:
    probe = replace(BLANK, **change)
    assert code in codes(probe)
    assert code in codes(probe, replace(SETTINGS, wipe_serial=SERIAL))


@pytest.mark.parametrize(
    "kind", ["LVM2_member", "linux_raid_member", "zfs_member", "bcache", "mpath_member", "isw_raid_member"]
)
def test_members_of_a_stack_are_never_taken(kind: str) -> None:
    probe = replace(
        BLANK, signatures=(Signature("nvme1n1p1", kind),), partitions=(PartitionProbe("nvme1n1p1", 1, MIB, GIB),)
    )
    assert "KVF-DISK-025" in codes(probe, replace(SETTINGS, wipe_serial=SERIAL))


def test_raid5_is_refused_with_its_reason_even_if_raid0_is_allowed() -> None:
    probe = replace(BLANK, kind="md", raid_level="raid5", serial_source="link")
    settings = replace(SETTINGS, allow_raid0=True)
    (finding,) = [item for item in check_cache_disk(probe, settings) if item.code == "KVF-DISK-012"]
    assert "parity" in finding.message


def test_raid0_only_by_its_own_switch() -> None:
    link = "/dev/disk/by-id/md-uuid-a1:b2:c3:d4"
    probe = replace(BLANK, device=link, kind="md", raid_level="raid0", serial="a1:b2:c3:d4", serial_source="link")
    settings = replace(SETTINGS, device=link, serial="a1:b2:c3:d4")
    assert codes(probe, settings) == ["KVF-DISK-012"]
    assert codes(probe, replace(settings, allow_raid0=True)) == []


def test_size_window_is_inclusive() -> None:
    gib = SIZE_1920 / GIB
    assert codes(BLANK, replace(SETTINGS, min_size_gib=gib, max_size_gib=gib)) == []
    (finding,) = check_cache_disk(BLANK, replace(SETTINGS, min_size_gib=gib + 1))
    # 1,920,383,410,176 / 2**30
    assert "1788.5 GiB" in finding.message


# ------------------------------------------------------------------------------------------------ tables, recorded


def test_table_of_sgdisk_is_read_as_sgdisk_shows_it() -> None:
    probe = tables(recorded("gpt_ours", 512 * MIB), 512 * MIB)
    shown = (DATA / "tools" / "sgdisk-info.txt").read_text()
    assert probe.mbr == "protective"
    assert probe.primary is not None
    assert probe.primary == probe.backup
    assert probe.primary.valid
    (entry,) = probe.primary.entries
    for text in (
        f"(GUID): {probe.primary.disk_guid.upper()}",
        f"GUID code: {entry.type_guid.upper()}",
        f"unique GUID: {entry.partition_guid.upper()}",
        f"First sector: {entry.first_sector} ",
        f"Last sector: {entry.last_sector} ",
        f"Partition name: '{entry.name}'",
    ):
        assert text in shown
    assert entry.type_guid == PARTITION_TYPE_GUID
    assert not probe.outside_used


def test_one_changed_bit_makes_a_table_invalid() -> None:
    head, tail = recorded("gpt_ours", 512 * MIB)
    head[2 * 512 + 60] ^= 1
    probe = tables((head, tail), 512 * MIB)
    assert probe.primary is not None
    assert probe.backup is not None
    assert not probe.primary.valid
    assert probe.backup.valid


def test_table_with_only_its_backup_is_seen() -> None:
    head, tail = recorded("gpt_ours", 512 * MIB)
    head[:] = bytes(4 * MIB)
    probe = tables((head, tail), 512 * MIB)
    assert (probe.primary, probe.mbr, probe.head_used, probe.tail_used) == (None, "none", False, True)
    assert probe.backup is not None
    assert probe.backup.valid


def test_mbr_of_sfdisk_is_no_protective_one() -> None:
    assert tables(recorded("mbr", 384 * MIB), 384 * MIB).mbr == "mbr"


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_finished_file_systems_are_recognised(fstype: str) -> None:
    start = recorded(f"{fstype}_start", 0)[0][:4096]
    assert filesystem_finished(fstype, bytes(start))
    # what mkfs leaves when it is cut short: no valid state, or still in progress
    if fstype == "ext4":
        start[0x43A] = 0
    else:
        start[126] = 1
    assert not filesystem_finished(fstype, bytes(start))


def test_wipefs_output() -> None:
    assert parse_wipefs((DATA / "tools" / "wipefs-blank.json").read_text()) == []
    found = parse_wipefs((DATA / "tools" / "wipefs-gpt.json").read_text())
    # the primary header, the backup header in the last sector, the protective MBR
    assert [(item.type, item.offset_bytes) for item in found] == [("gpt", 512), ("gpt", 512 * MIB - 512), ("PMBR", 510)]
    (ext4,) = parse_wipefs((DATA / "tools" / "wipefs-ext4.json").read_text())
    assert (ext4.type, ext4.label, ext4.uuid) == ("ext4", "kvfleet", "0b1e55ed-0000-4000-8000-0000000000f5")


def test_blkid_output() -> None:
    values = parse_export((DATA / "tools" / "blkid-xfs.txt").read_text())
    assert (values["TYPE"], values["LABEL"], values["PART_ENTRY_NAME"]) == ("xfs", "kvfleet", "kvfleet-cache")
    assert parse_export("LABEL=a\\ b\n") == {"LABEL": "a b"}


def test_mountinfo_of_a_booted_host() -> None:
    lines = list(parse_mountinfo((DATA / "tools" / "mountinfo.txt").read_text()))
    points = [line[2] for line in lines]
    assert "/mnt/with space" in points
    (cache,) = [line for line in lines if line[2] == "/var/cache/kvfleet"]
    assert (cache[1], cache[3]) == ("/", "ext4")


def test_fstab_lines() -> None:
    text = (
        "# UUID=abc /a ext4\nUUID=ABC /a ext4 defaults # note\nLABEL=theirs /b xfs\n"
        "proc /proc proc\nnone /var/cache/kvfleet tmpfs\n"
    )
    assert fstab_uses(text, {"abc"}, {}) == ["UUID=ABC /a ext4"]
    assert fstab_uses(text, {"theirs"}, {}) == ["LABEL=theirs /b xfs"]
    assert fstab_uses(text, set(), {}, "/var/cache/kvfleet") == ["none /var/cache/kvfleet tmpfs"]


# ------------------------------------------------------------------------------------------------ ours


def _ours() -> tuple[DiskProbe, DiskRecord]:
    table = tables(recorded("gpt_ours", 512 * MIB), 512 * MIB)
    (ext4,) = parse_wipefs((DATA / "tools" / "wipefs-ext4.json").read_text())
    assert table.primary is not None
    entry = table.primary.entries[0]
    probe = replace(
        BLANK,
        size_bytes=512 * MIB,
        table=table,
        signatures=(*parse_wipefs((DATA / "tools" / "wipefs-gpt.json").read_text()), ext4),
        filesystem=FilesystemProbe("ext4", ext4.uuid, ext4.label, finished=True),
        partitions=(PartitionProbe("nvme1n1p1", 1, MIB, 476 * MIB, "259:1"),),
    )
    record = DiskRecord(
        SERIAL, "ready", HOST, table.primary.disk_guid, entry.partition_guid, ext4.uuid, "ext4", "kvfleet", 512 * MIB
    )
    return probe, record


def test_ours_is_used_again_whatever_the_switches_say() -> None:
    probe, record = _ours()
    for settings in (replace(SETTINGS, format=False), SETTINGS, replace(SETTINGS, wipe_serial=SERIAL)):
        decision = decide(probe, settings, record, HOST)
        assert (decision.action, decision.steps, decision.adopt) == ("reuse", (), False)
        assert decision.partition_uuid == record.partition_uuid


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ({"partition_uuid": "0b1e55ed-0000-4000-8000-0000000000ff"}, "ours_moved"),
        ({"machine_id": "f" * 32}, "ours_moved"),
        ({"filesystem_uuid": "0b1e55ed-0000-4000-8000-0000000000ff"}, "ours_damaged"),
        ({"label": "other"}, "ours_damaged"),
        ({"fstype": "xfs"}, "ours_damaged"),
        ({"size_bytes": 513 * MIB}, "ours_moved"),
    ],
)
def test_every_part_of_ours_counts(what: dict[str, Any], content: str) -> None:
    probe, record = _ours()
    assert classify(probe, replace(record, **what), HOST)[0] == content


def test_marker_of_this_host_restores_a_lost_record() -> None:
    probe, record = _ours()
    marker = {"machine_id": HOST, "partition_uuid": record.partition_uuid, "filesystem_uuid": record.filesystem_uuid}
    marked = replace(probe, filesystem=replace(probe.filesystem, marker=marker))
    assert decide(marked, SETTINGS, None, HOST).adopt
    for change in ({"machine_id": "f" * 32}, {"partition_uuid": "x"}, {"filesystem_uuid": "x"}):
        other = replace(probe, filesystem=replace(probe.filesystem, marker={**marker, **change}))
        assert classify(other, None, HOST)[0] == "ours_moved"


def test_moved_disk_names_its_host() -> None:
    probe, _record = _ours()
    moved = replace(probe, filesystem=replace(probe.filesystem, marker={"machine_id": "f" * 32, "hostname": "gpu-17"}))
    (finding,) = check_cache_disk(moved, SETTINGS, None, HOST)
    assert finding.code == "KVF-DISK-034"
    assert "gpu-17" in finding.message


def test_two_partitions_are_never_ours() -> None:
    probe, record = _ours()
    assert probe.table.primary is not None
    entry = probe.table.primary.entries[0]
    two = GptTable(probe.table.primary.disk_guid, (entry, replace(entry, number=2)), True)
    assert (
        classify(replace(probe, table=replace(probe.table, primary=two, backup=two)), record, HOST)[0] == "recognised"
    )


def test_unfinished_format_is_finished_and_never_another_ones() -> None:
    probe, record = _ours()
    begun = replace(record, stage="partitioned")
    decision = decide(probe, SETTINGS, begun, HOST)
    assert decision.action == "resume"
    # mkfs had ended: it is not repeated
    assert not any(step.startswith("make ext4") for step in decision.steps)
    cut = replace(probe, filesystem=replace(probe.filesystem, finished=False))
    assert any(step.startswith("make ext4") for step in decide(cut, SETTINGS, begun, HOST).steps)
    theirs = replace(probe, filesystem=FilesystemProbe("ext4", "another", "x", finished=True))
    assert codes(theirs, SETTINGS, begun) == ["KVF-DISK-035"]


def test_formatted_is_never_made_again() -> None:
    """Once mkfs is known to have ended, a missing file system is damage, not an invitation."""
    probe, record = _ours()
    empty = replace(probe, filesystem=FilesystemProbe())
    assert codes(empty, replace(SETTINGS, wipe_serial=SERIAL), replace(record, stage="formatted")) == ["KVF-DISK-033"]


def test_record_survives_json_and_rejects_what_it_does_not_know() -> None:
    _probe, record = _ours()
    data = json.loads(json.dumps(record.as_dict()))
    assert parse_record(data) == record
    for change in ({"schema": 2}, {"stage": "done"}, {"partition_uuid": ""}, {"size_bytes": "1"}):
        assert parse_record({**data, **change}) is None


def test_overwriting_needs_both_switches() -> None:
    probe = replace(BLANK, signatures=(Signature("nvme1n1", "ext4", 1080, "theirs"),), table=TableProbe(head_used=True))
    assert codes(probe) == ["KVF-DISK-035"]
    assert codes(probe, replace(SETTINGS, format=False, wipe_serial=SERIAL)) == ["KVF-DISK-035"]
    assert codes(probe, replace(SETTINGS, wipe_serial="another")) == ["KVF-DISK-004"]
    assert decide(probe, replace(SETTINGS, wipe_serial=SERIAL), None, HOST).action == "overwrite"
