"""kill -9 between any two steps, and in the middle of the tools: nothing foreign is touched, the next run converges."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_bench import Bench, Disk, sh
from states import gpt_partitions, ours_unmounted

from kvfleet.core.disk_actions import present
from kvfleet.core.disk_probe import read_record

HERE = Path(__file__).resolve().parent


def _killed(
    bench: Bench, disk: Disk, kill_at: int = 0, kill_in: tuple[str, float] | None = None, **asked: object
) -> str:
    """Run ``present`` in a process that kills itself; returns what it printed, empty if it was killed."""
    task = {
        "paths": dataclasses.asdict(bench.paths),
        "settings": dataclasses.asdict(bench.settings(disk, **asked)),
        "kill_at": kill_at,
        "kill_in": kill_in,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_run.py"), json.dumps(task)], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.stdout.strip()


def _blank(bench: Bench) -> Disk:
    return bench.disk()


def _fresh(bench: Bench, prepare: Callable[[Bench], Disk]) -> Disk:
    """A new host with one new disk."""
    bench.close()
    for disk in bench.disks:
        disk.file.unlink()
    bench.disks.clear()
    for folder in (bench.paths.records, bench.paths.systemd):
        for entry in sorted(Path(folder).rglob("*"), reverse=True):
            entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return prepare(bench)


def _converges(bench: Bench, disk: Disk, **asked: object) -> None:
    result = present(bench.run(disk, **asked))
    assert result["mounted"] is True
    (part,) = disk.parts()
    assert sh("blkid", "-p", "-s", "UUID", "-o", "value", part).strip() == result["filesystem_uuid"]
    assert "No problems found" in sh("sgdisk", "--verify", disk.node)
    again = present(bench.run(disk, **asked))
    assert (again["changed"], again["steps"]) == (False, [])


@pytest.mark.parametrize(
    ("prepare", "asked"),
    [
        (_blank, {"format": True}),
        (gpt_partitions, {"format": True, "wipe_serial": "KVTEST01"}),
        (ours_unmounted, {}),
    ],
    ids=["blank", "overwrite", "ours with data"],
)
def test_killed_at_every_point(bench: Bench, prepare: Callable[[Bench], Disk], asked: dict[str, object]) -> None:
    bystander_file = bench.root / "bystander.img"
    sh("truncate", "--size=64M", str(bystander_file))
    sh("mkfs.ext4", "-q", "-L", "bystander", str(bystander_file))
    bystander = bystander_file.read_bytes()
    kill_at = 0
    while True:
        kill_at += 1
        disk = _fresh(bench, prepare)
        lived = _killed(bench, disk, kill_at, **asked)
        record = read_record(disk.serial, bench.paths)
        _converges(bench, disk, **asked)
        if prepare is ours_unmounted:
            assert (bench.mount_point / "data" / "kept").read_text() == "precious"
        # from "formatted" on, an overwritten disk goes the way of a blank one
        if lived or (prepare is gpt_partitions and record is not None and record.reached("formatted")):
            break
    assert kill_at > 8
    assert bystander_file.read_bytes() == bystander


@pytest.mark.parametrize("milliseconds", [0.5, 2, 5, 10, 20, 40, 80])
@pytest.mark.parametrize("tool", ["sgdisk", "mkfs.ext4", "mkfs.xfs"])
def test_killed_inside_a_tool(bench: Bench, tool: str, milliseconds: float) -> None:
    asked: dict[str, object] = {"format": True, "fstype": "xfs" if tool == "mkfs.xfs" else "ext4"}
    disk = bench.disk(512)
    assert _killed(bench, disk, kill_in=(tool, milliseconds), **asked) == ""
    _converges(bench, disk, **asked)


def test_killed_twice_in_a_row(bench: Bench) -> None:
    disk = bench.disk()
    assert _killed(bench, disk, kill_in=("mkfs.ext4", 3), format=True) == ""
    assert _killed(bench, disk, kill_in=("mkfs.ext4", 3), format=True) == ""
    _converges(bench, disk, format=True)
