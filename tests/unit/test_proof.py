"""Fingerprint, record, units and journal."""

import json
import os

import pytest

from kvfleet.core import proof
from kvfleet.core.command import CommandResult


@pytest.fixture
def host(tmp_path):
    """A host's files: units, settings, a release and the link to it."""
    for name in ("units", "etc", "state", "r1", "r2"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("r1")
    (tmp_path / "units/kvfleet-vllm@a.service").write_text("[Service]\nExecStart=vllm")
    (tmp_path / "units/kvfleet-lmcache@0.service").write_text("[Service]\nExecStart=lmcache")
    plan = {
        "fingerprint": "p1",
        "paths": {"current": str(tmp_path / "current"), "etc": str(tmp_path / "etc"), "state": str(tmp_path / "state")},
        "servers": [{"name": "0"}],
        "instances": [{"name": "a"}],
    }
    return tmp_path, plan


def parts(host):
    folder, plan = host
    return proof.fingerprint(plan, proof.unit_files(plan, folder / "units"))


def record(host, **extra):
    return {"verdict": "pass", "profile": "smoke", "parts": parts(host), **extra}


def test_an_unchanged_host_is_proved(host):
    assert proof.difference(record(host), parts(host), "smoke") == ""


def changes(folder, plan):
    yield "plan", lambda: plan.update(fingerprint="p2")
    yield "release", lambda: ((folder / "current").unlink(), (folder / "current").symlink_to("r2"))
    yield "kvfleet-vllm@a.service", lambda: (folder / "units/kvfleet-vllm@a.service").write_text("changed")
    yield "kvfleet-lmcache@0.env", lambda: (folder / "etc/kvfleet-lmcache@0.env").write_text("new file")
    yield (
        "drop.conf",
        lambda: (
            (folder / "units/kvfleet-vllm@a.service.d").mkdir(),
            (folder / "units/kvfleet-vllm@a.service.d/drop.conf").write_text("x"),
        ),
    )


@pytest.mark.parametrize("number", range(5))
def test_every_part_of_the_state_counts_and_is_named(host, number):
    before = record(host)
    named, change = list(changes(*host))[number]
    change()
    assert named in proof.difference(before, parts(host), "smoke")


def test_another_instances_files_do_not_count(host):
    before = record(host)
    (host[0] / "units/kvfleet-vllm@other.service").write_text("x")
    assert proof.difference(before, parts(host), "smoke") == ""


def test_what_is_no_proof():
    assert "never" in proof.difference(None, {"all": "x"}, "smoke")
    assert "fail" in proof.difference({"verdict": "fail", "parts": {}}, {}, "smoke")


def test_a_smoke_proof_does_not_stand_for_the_articles_load(host):
    assert "article" in proof.difference(record(host), parts(host), "article")
    assert proof.difference(record(host, profile="article"), parts(host), "smoke") == ""


def test_record_is_replaced_whole_and_the_one_before_kept(tmp_path):
    state = tmp_path / "state"
    proof.write_record(state, {"n": 1})
    proof.write_record(state, {"n": 2})
    assert proof.read_record(state) == {"n": 2}
    assert json.loads((state / "proved.previous.json").read_text()) == {"n": 1}
    assert oct((state / "proved.json").stat().st_mode & 0o777) == "0o640"
    assert sorted(path.name for path in state.iterdir()) == ["proved.json", "proved.previous.json"]


def test_a_failing_write_leaves_the_old_record(tmp_path, monkeypatch):
    proof.write_record(tmp_path, {"n": 1})

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        proof.write_record(tmp_path, {"n": 2})
    assert proof.read_record(tmp_path) == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["proved.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_broken_record_is_none(tmp_path, text):
    (tmp_path / "proved.json").write_text(text)
    assert proof.read_record(tmp_path) is None


def systemd(active="active", restarts="0", journal="", result="success"):
    def run(argv, **_options):
        if argv[0] == "systemctl":
            return CommandResult(
                0, f"ActiveState={active}\nNRestarts={restarts}\nInvocationID=abc\nResult={result}\n", ""
            )
        assert argv[:2] == ["journalctl", "_SYSTEMD_INVOCATION_ID=abc"]
        return CommandResult(0, journal, "")

    return run


PLAN = {"servers": [{"name": "0"}], "instances": [{"name": "a"}]}


def found(**state):
    report, findings = proof.check_units(PLAN, systemd(**state))
    assert set(report) == {"kvfleet-lmcache@0.service", "kvfleet-vllm@a.service"}
    return {finding.code for finding in findings}


def test_quiet_units_have_no_finding():
    assert found(journal="INFO Application startup complete.\n") == set()


def test_dead_restarted_and_alarming_units_are_found():
    assert found(active="failed", result="exit-code") == {"KVF-BENCH-030"}
    assert found(restarts="3") == {"KVF-BENCH-031"}
    # the line as LMCache 0.5.4 writes it on the wrong torch, with its colours
    line = (
        "\x1b[33;20m[2026-11-29] LMCache WARNING:\x1b[0m lmcache.cuda_ops compiled extension not found; CudaDeviceOps"
    )
    assert found(journal=line) == {"KVF-BENCH-032"}


def test_a_unit_that_systemd_does_not_know_is_not_active():
    _, findings = proof.check_units(PLAN, lambda _argv, **_options: CommandResult(127, "", "systemctl: not found"))
    assert {finding.code for finding in findings} == {"KVF-BENCH-030"}
