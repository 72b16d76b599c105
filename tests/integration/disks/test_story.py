"""The life of a cache disk on real block devices: blank, brought in, kept, moved, retired."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from disk_bench import Bench, sh

from kvfleet.core.disk_actions import present, report, unmounted
from kvfleet.core.disks import PARTITION_NAME, PARTITION_TYPE_GUID
from kvfleet.core.findings import KvfleetError


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_blank_disk_becomes_a_mounted_cache(bench: Bench, fstype: str) -> None:
    disk = bench.disk(1024)
    result = present(bench.run(disk, format=True, fstype=fstype))
    assert result["changed"] is True
    assert result["mounted"] is True
    (part,) = disk.parts()
    # what independent tools say
    info = sh("sgdisk", "--info=1", disk.node)
    assert PARTITION_TYPE_GUID.upper() in info
    assert f"'{PARTITION_NAME}'" in info
    assert result["partition_uuid"].upper() in info
    values = dict(line.split("=", 1) for line in sh("blkid", "-p", "-o", "export", part).splitlines() if "=" in line)
    assert values["TYPE"] == fstype
    assert values["LABEL"] == "kvfleet"
    assert values["UUID"] == result["filesystem_uuid"]
    mounted = sh("findmnt", "--noheadings", "--output", "SOURCE,FSTYPE,OPTIONS", str(bench.mount_point)).split()
    assert mounted[:2] == [part, fstype]
    assert "noatime" in mounted[2].split(",")
    assert "discard" not in mounted[2].split(",")
    data = bench.mount_point / "data"
    assert oct(data.stat().st_mode & 0o7777) == "0o750"
    assert (data.owner(), data.group()) == ("daemon", "daemon")
    assert "No problems found" in sh("sgdisk", "--verify", disk.node)
    # about 7 % of the disk is left free
    sectors = int(sh("blockdev", "--getsz", disk.node))
    assert 0.069 < 1 - int(sh("blockdev", "--getsz", part)) / sectors < 0.075


def test_second_run_changes_nothing_and_keeps_data(bench: Bench) -> None:
    disk = bench.disk()
    present(bench.run(disk, format=True))
    (bench.mount_point / "data" / "kept").write_text("precious")
    os.sync()
    before = disk.checksum()
    result = present(bench.run(disk, format=True))
    assert (result["changed"], result["steps"]) == (False, [])
    # format and wipe_serial left in the inventory must not reformat either
    result = present(bench.run(disk, format=True, wipe_serial=disk.serial))
    assert (result["changed"], result["steps"]) == (False, [])
    assert disk.checksum() == before
    assert (bench.mount_point / "data" / "kept").read_text() == "precious"


def test_unmounted_disk_of_ours_is_mounted_again_with_its_data(bench: Bench) -> None:
    disk = bench.disk()
    first = present(bench.run(disk, format=True))
    (bench.mount_point / "data" / "kept").write_text("precious")
    gone = unmounted(bench.run(disk))
    assert gone["changed"] is True
    assert subprocess.run(["mountpoint", "-q", str(bench.mount_point)], check=False).returncode != 0
    assert oct(bench.mount_point.stat().st_mode & 0o7777) == "0o0"
    assert unmounted(bench.run(disk))["changed"] is False
    assert report(bench.run(disk))["content"] == "ours"
    again = present(bench.run(disk))
    assert again["changed"] is True
    assert again["filesystem_uuid"] == first["filesystem_uuid"]
    assert (bench.mount_point / "data" / "kept").read_text() == "precious"


def test_check_mode_shows_the_steps_and_writes_nothing(bench: Bench) -> None:
    disk = bench.disk()
    before = disk.checksum()
    result = present(bench.run(disk, format=True, check_mode=True))
    assert result["changed"] is True
    assert any("make ext4 'kvfleet'" in step for step in result["steps"])
    assert disk.checksum() == before
    assert list(Path(bench.paths.records).iterdir()) == []
    assert list(Path(bench.paths.systemd).iterdir()) == []


def test_blank_disk_needs_format(bench: Bench) -> None:
    disk = bench.disk()
    before = disk.checksum()
    with pytest.raises(KvfleetError) as refusal:
        present(bench.run(disk))
    assert refusal.value.findings[0].code == "KVF-DISK-031"
    assert disk.checksum() == before


def test_marker_names_the_host(bench: Bench) -> None:
    disk = bench.disk()
    present(bench.run(disk, format=True))
    marker = json.loads((bench.mount_point / ".kvfleet.json").read_text())
    assert marker["machine_id"] == Path(bench.paths.machine_id).read_text().strip()
    assert marker["serial"] == disk.serial
