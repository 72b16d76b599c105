"""Refusals on real block devices: the whole disk is the same before and after, whatever is asked for."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from conftest import Bench, Disk, sh
from kvfleet.core.disk_actions import present
from kvfleet.core.findings import KvfleetError
from kvfleet.core.units import MIB


def refused(bench: Bench, disk: Disk, code: str, **settings: object) -> str:
    """``present`` refuses with ``code`` and leaves disk, records and units as they were; returns the message."""
    before = disk.checksum()
    records = sorted(entry.name for entry in Path(bench.paths.records).iterdir())
    with pytest.raises(KvfleetError) as refusal:
        present(bench.run(disk, **settings))
    codes = [finding.code for finding in refusal.value.findings]
    assert code in codes, str(refusal.value)
    assert disk.checksum() == before
    assert sorted(entry.name for entry in Path(bench.paths.records).iterdir()) == records
    return str(refusal.value)


def test_ext4_needs_wipe_serial(bench: Bench) -> None:
    disk = bench.disk()
    sh("mkfs.ext4", "-q", "-L", "theirs", disk.node)
    assert "ext4 'theirs'" in refused(bench, disk, "KVF-DISK-035", format=True)
    refused(bench, disk, "KVF-DISK-004", format=True, wipe_serial="another")
    refused(bench, disk, "KVF-DISK-035", wipe_serial=disk.serial)
    assert present(bench.run(disk, format=True, wipe_serial=disk.serial))["mounted"] is True


def test_random_bytes_are_occupied(bench: Bench) -> None:
    disk = bench.disk()
    disk.write(0, os.urandom(MIB))
    refused(bench, disk, "KVF-DISK-035", format=True)


def test_mounted_elsewhere_is_never_overwritten(bench: Bench) -> None:
    disk = bench.disk()
    sh("mkfs.ext4", "-q", disk.node)
    there = bench.root / "there"
    there.mkdir()
    sh("mount", disk.node, str(there))
    text = refused(bench, disk, "KVF-DISK-021", format=True, wipe_serial=disk.serial)
    assert str(there) in text


def test_mounted_in_another_namespace_is_never_overwritten(bench: Bench) -> None:
    disk = bench.disk()
    sh("mkfs.ext4", "-q", disk.node)
    there = bench.root / "there"
    there.mkdir()
    holder = subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            f"mount {disk.node} {there} && echo up && exec sleep 60",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        assert not os.path.ismount(there)
        text = refused(bench, disk, "KVF-DISK-021", format=True, wipe_serial=disk.serial)
        assert f"process {holder.pid}" in text
    finally:
        holder.kill()
        holder.wait()


def test_kernel_name_serial_and_size_are_checked(bench: Bench) -> None:
    disk = bench.disk()
    refused(bench, disk, "KVF-DISK-002", format=True, device=disk.node)
    refused(bench, disk, "KVF-DISK-013", format=True, serial="OTHER")
    refused(bench, disk, "KVF-DISK-003", format=True, serial="")
    refused(bench, disk, "KVF-DISK-015", format=True, min_size_gib=1)
    refused(bench, disk, "KVF-DISK-015", format=True, max_size_gib=0.25)


def test_exclusive_open_is_never_overwritten(bench: Bench) -> None:
    disk = bench.disk()
    handle = os.open(disk.node, os.O_RDONLY | os.O_EXCL)
    try:
        refused(bench, disk, "KVF-DISK-022", format=True, wipe_serial=disk.serial)
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)
