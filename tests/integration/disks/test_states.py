"""Every state of :mod:`states` on a real block device: the answer, and a checksum of the disk around each refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_bench import Bench, sh
from states import FORMATTED, MOUNTED, STATES, UNCHANGED, State

from kvfleet.core.disk_actions import present, report
from kvfleet.core.disk_probe import list_candidates
from kvfleet.core.findings import KvfleetError


def _asked(state: State, serial: str, node: str) -> dict[str, object]:
    asked = dict(state.asked)
    if asked.get("wipe_serial") == "SAME":
        asked["wipe_serial"] = serial
    if asked.get("device") == "KERNEL":
        asked["device"] = node
    return asked


@pytest.mark.parametrize("state", STATES, ids=lambda state: f"{state.title} ({state.allowed})")
def test_state(bench: Bench, state: State) -> None:
    disk = state.prepare(bench)
    asked = _asked(state, disk.serial, disk.node)
    if state.answer.startswith("KVF-"):
        moving = "writes to it" in state.title
        before = "" if moving else disk.checksum()
        with pytest.raises(KvfleetError) as refusal:
            present(bench.run(disk, **asked))
        assert state.answer in [finding.code for finding in refusal.value.findings], str(refusal.value)
        # every refusal says what to do
        assert all(finding.fix for finding in refusal.value.findings)
        assert moving or disk.checksum() == before
        # nor does a look, or a check run, write
        report(bench.run(disk, **asked))
        if "owner" not in asked:
            # a check run of a whole site comes before the service user is made
            with pytest.raises(KvfleetError):
                present(bench.run(disk, check_mode=True, **asked))
        list_candidates(bench.settings(disk), bench.run(disk).runner, bench.paths)
        assert moving or disk.checksum() == before
        return
    if state.answer != UNCHANGED:
        before = disk.checksum()
        plan = present(bench.run(disk, check_mode=True, **asked))
        assert plan["changed"] is True
        assert plan["steps"]
        assert disk.checksum() == before
    result = present(bench.run(disk, **asked))
    assert result["mounted"] is True
    (part,) = disk.parts()
    assert sh("findmnt", "--noheadings", "--first-only", "--output", "SOURCE", str(bench.mount_point)).strip() == part
    assert sh("blkid", "-p", "-s", "UUID", "-o", "value", part).strip() == result["filesystem_uuid"]
    if state.answer == FORMATTED:
        assert any(step.startswith("make ") for step in result["steps"])
    else:
        assert not any(step.startswith(("make ext4", "make xfs", "partition", "erase")) for step in result["steps"])
        assert (bench.mount_point / "data" / "kept").read_text() == "precious"
    if state.answer == UNCHANGED:
        assert (result["changed"], result["steps"]) == (False, [])
    if state.answer == MOUNTED:
        assert result["changed"] is True
    again = present(bench.run(disk, **asked))
    assert (again["changed"], again["steps"]) == (False, [])
    assert oct(Path(result["data_directory"]).stat().st_mode & 0o7777) == "0o750"
