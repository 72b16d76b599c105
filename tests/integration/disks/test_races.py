"""What changes under a run: names, links, mounts, the disk itself. Real block devices, checksums around refusals."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from disk_bench import Bench, sh, until
from states import ext4, ours

from kvfleet.core.command import CommandResult, run_command
from kvfleet.core.disk_actions import present, report, unmounted
from kvfleet.core.disk_probe import list_candidates
from kvfleet.core.findings import KvfleetError
from kvfleet.core.units import MIB


def _interfering(tool: str, action: Callable[[], None]) -> Callable[..., CommandResult]:
    """A runner that calls ``action`` once, right before the first writing call of ``tool``."""
    pending = [action]

    def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if argv[0] == tool and "--no-act" not in argv and pending:
            pending.pop()()
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    return runner


def _after(step_start: str, action: Callable[[], None]) -> Callable[[str], None]:
    pending = [action]

    def hook(step: str) -> None:
        if step.startswith(step_start) and pending:
            pending.pop()()

    return hook


def _codes(error: pytest.ExceptionInfo[KvfleetError]) -> list[str]:
    return [finding.code for finding in error.value.findings]


def test_two_disks_of_one_model_only_the_named_one_is_touched(bench: Bench) -> None:
    first, second = bench.disk(), bench.disk()
    before = first.checksum()
    result = present(bench.run(second, format=True))
    assert result["kernel_name"] == second.name
    assert first.checksum() == before


def test_kernel_names_swapped_between_runs(bench: Bench) -> None:
    """After a boot in which the kernel found the disks in the other order, the same disk is mounted."""
    first, second = bench.disk(), bench.disk()
    result = present(bench.run(second, format=True))
    bench.keep("precious")
    unmounted(bench.run(second))
    for disk in (first, second):
        bench.release(disk)
    for disk in (second, first):
        disk.node = sh("losetup", "--find", "--show", str(disk.file)).strip()
        disk.link.unlink()
        disk.link.symlink_to(disk.node)
    before = first.checksum()
    again = present(bench.run(second))
    assert again["kernel_name"] == second.name
    assert again["filesystem_uuid"] == result["filesystem_uuid"]
    assert (bench.mount_point / "data" / "kept").read_text() == "precious"
    assert first.checksum() == before


def test_link_led_elsewhere_between_decision_and_write(bench: Bench) -> None:
    disk, other = bench.disk(), ext4(bench)
    before, other_before = disk.checksum(), other.checksum()

    def swap() -> None:
        disk.link.unlink()
        disk.link.symlink_to(other.node)

    run = bench.run(disk, format=True)
    run.after_step = _after("write down what is about", swap)
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert _codes(refusal) == ["KVF-DISK-052"]
    assert other.checksum() == other_before
    assert disk.checksum() == before


def test_mounted_between_decision_and_write(bench: Bench) -> None:
    disk = ext4(bench)
    there = bench.root / "there"
    there.mkdir()

    def mount() -> None:
        sh("mount", "-o", "noload,ro", disk.node, str(there))

    before = disk.checksum()
    run = bench.run(disk, format=True, wipe_serial=disk.serial)
    run.after_step = _after("write down what is about", mount)
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert _codes(refusal) == ["KVF-DISK-052"]
    assert disk.checksum() == before


def test_content_appears_between_two_looks(bench: Bench) -> None:
    """Somebody makes a file system after the first look: the second look must not end in a format."""
    disk = bench.disk()
    run = bench.run(disk, format=True)
    looks = []

    def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if argv[0] == "wipefs" and disk.node in argv:
            looks.append(argv)
            # two calls a look; the third opens the second look
            if len(looks) == 3:
                sh("mkfs.ext4", "-q", "-L", "theirs", disk.node)
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    run.runner = runner
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert _codes(refusal) == ["KVF-DISK-052"]
    assert sh("blkid", "-p", "-s", "LABEL", "-o", "value", disk.node).strip() == "theirs"


def test_disk_vanishes_before_the_write_and_comes_back(bench: Bench) -> None:
    disk = bench.disk()

    def vanish() -> None:
        sh("losetup", "--detach", disk.node)
        until(lambda: str(disk.file) not in sh("losetup", "--list", "--noheadings", "--output", "BACK-FILE"))

    run = bench.run(disk, format=True)
    run.after_step = _after("write down what is about", vanish)
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert _codes(refusal) == ["KVF-DISK-052"]
    disk.node = sh("losetup", "--find", "--show", str(disk.file)).strip()
    disk.link.unlink()
    disk.link.symlink_to(disk.node)
    assert present(bench.run(disk, format=True))["mounted"] is True


def test_disk_breaks_during_mkfs_and_is_repaired(bench: Bench) -> None:
    disk = bench.disk()
    run = bench.run(disk, format=True)
    # the backing file ends early: every access behind that is an I/O error
    run.runner = _interfering("mkfs.ext4", lambda: os.truncate(disk.file, 8 * MIB))
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert _codes(refusal) == ["KVF-DISK-050"]
    text = str(refusal.value)
    # the step, and the tool's own words
    assert "'make ext4" in text
    assert "mkfs.ext4" in text
    os.truncate(disk.file, 384 * MIB)
    assert present(bench.run(disk, format=True, wipe_serial=disk.serial))["mounted"] is True


@pytest.mark.parametrize(
    ("tool", "step"),
    [("sgdisk", "partition"), ("mkfs.ext4", "make ext4"), ("systemctl", "reload systemd")],
)
def test_failing_tool_is_named_with_its_words_and_the_next_run_converges(bench: Bench, tool: str, step: str) -> None:
    disk = bench.disk()

    def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if argv[0] == tool:
            return CommandResult(4, "", f"{tool}: the moon is in the way\n")
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    run = bench.run(disk, format=True)
    run.runner = runner
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert _codes(refusal) == ["KVF-DISK-050"]
    assert f"'{step}" in str(refusal.value)
    assert "the moon is in the way" in str(refusal.value)
    assert present(bench.run(disk, format=True))["mounted"] is True


def test_mount_that_lies_is_found_out(bench: Bench) -> None:
    """systemd says started, but something else is mounted there: not a success."""
    disk = bench.disk()

    def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if list(argv[:2]) == ["systemctl", "start"]:
            sh("mount", "-t", "tmpfs", "tmpfs", str(bench.mount_point))
            bench.mounted.append(bench.mount_point)
            return CommandResult(0, "", "")
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    run = bench.run(disk, format=True)
    run.runner = runner
    with pytest.raises(KvfleetError) as refusal:
        present(run)
    assert "'verify" in str(refusal.value)
    assert "tmpfs" in str(refusal.value)


def test_one_run_at_a_time(bench: Bench) -> None:
    disk = bench.disk()
    before = disk.checksum()
    with Path(bench.paths.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KvfleetError) as refusal:
            present(bench.run(disk, format=True))
    assert _codes(refusal) == ["KVF-DISK-051"]
    assert disk.checksum() == before


def test_busy_cache_is_not_unmounted(bench: Bench) -> None:
    disk = ours(bench)
    with (bench.mount_point / "data" / "busy").open("w"):
        with pytest.raises(KvfleetError) as refusal:
            unmounted(bench.run(disk))
        assert _codes(refusal) == ["KVF-DISK-055"]
        # by name and number, so that a person can stop it
        assert f"({os.getpid()})" in str(refusal.value)
    assert os.path.ismount(bench.mount_point)
    assert unmounted(bench.run(disk, check_mode=True))["changed"] is True
    assert os.path.ismount(bench.mount_point)
    assert unmounted(bench.run(disk))["mounted"] is False


def test_foreign_mount_is_not_unmounted(bench: Bench) -> None:
    disk = bench.disk()
    bench.mount_point.mkdir(parents=True)
    sh("mount", "-t", "tmpfs", "tmpfs", str(bench.mount_point))
    bench.mounted.append(bench.mount_point)
    with pytest.raises(KvfleetError) as refusal:
        unmounted(bench.run(disk))
    assert _codes(refusal) == ["KVF-DISK-054"]
    assert os.path.ismount(bench.mount_point)


def test_lost_mount_leaves_a_directory_that_nobody_but_root_can_fill(bench: Bench) -> None:
    disk = ours(bench)
    sh("umount", str(bench.mount_point))
    # only the mount point itself may keep the user out
    bench.root.chmod(0o755)
    sh("setpriv", "--reuid=daemon", "--clear-groups", "ls", str(bench.mount_point.parent))
    tried = subprocess.run(
        ["setpriv", "--reuid=daemon", "--clear-groups", "touch", str(bench.mount_point / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode != 0
    assert "Permission denied" in tried.stderr
    assert present(bench.run(disk))["mounted"] is True


def test_candidates_say_why(bench: Bench) -> None:
    blank, used, small = bench.disk(), ext4(bench), bench.disk(256)
    listed = {item["kernel_name"]: item for item in list_candidates(bench.settings(blank), run_command, bench.paths)}
    assert listed[blank.name]["eligible"] is True
    assert (listed[blank.name]["device"], listed[blank.name]["serial"]) == (blank.device, blank.serial)
    assert listed[used.name]["eligible"] is False
    assert "ext4 'theirs'" in listed[used.name]["reasons"][0]
    assert "too small" in listed[small.name]["reasons"][0]
    # the machine's own disk is listed, and never eligible
    root = sh("findmnt", "--noheadings", "--output", "MAJ:MIN", "/").strip()
    own = [
        item for item in listed.values() if Path("/sys/block", item["kernel_name"], "dev").read_text().strip() == root
    ]
    assert not any(item["eligible"] for item in own)


def test_report_of_a_missing_disk_is_no_failure(bench: Bench) -> None:
    disk = bench.disk()
    disk.link.unlink()
    result = report(bench.run(disk, format=True))
    assert result["changed"] is False
    assert [finding["code"] for finding in result["errors"]] == ["KVF-DISK-010"]


def test_disk_without_discard_is_said_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = bench.disk()
    from kvfleet.core import disk_actions

    real = disk_actions.probe_disk
    # a loop device always discards; everything else about it stays real
    monkeypatch.setattr(disk_actions, "probe_disk", lambda *words: dataclasses.replace(real(*words), discard=False))
    first = present(bench.run(disk, format=True))
    assert [item["code"] for item in first["warnings"]] == ["KVF-DISK-048"]
    assert first["discard"] is False
    assert present(bench.run(disk, format=True))["warnings"] == []
