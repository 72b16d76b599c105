"""Which units are stopped, started and removed, and which line of a journal is the cause."""

from pathlib import Path

import pytest

from kvfleet.core.command import CommandResult
from kvfleet.core.findings import KvfleetError
from kvfleet.core.unit_control import UnitActions, UnitControl, UnitState, decide, root_cause

SERVER = "kvfleet-lmcache@0.service"
INSTANCE = "kvfleet-vllm@default.service"


def state(name, active=True, enabled=True, needs_reload=False, started_with="now", wanted="now"):
    return UnitState(name, active, enabled, needs_reload, started_with, wanted)


def test_everything_as_wanted_needs_nothing():
    assert not decide([state(SERVER), state(INSTANCE)], [], True, "kvfleet.target").any


def test_only_the_stale_unit_restarts():
    actions = decide([state(SERVER), state(INSTANCE, started_with="before")], [], True, "kvfleet.target")
    assert actions.stop == [INSTANCE]
    assert actions.start == [INSTANCE]


def test_stale_units_stop_in_reverse_order_and_start_in_order():
    stale = [state(SERVER, started_with="before"), state(INSTANCE, started_with=None)]
    actions = decide(stale, [], True, "kvfleet.target")
    assert actions.stop == [INSTANCE, SERVER]
    assert actions.start == [SERVER, INSTANCE]


def test_inactive_unit_is_started_without_a_stop():
    actions = decide([state(SERVER, active=False)], [], True, "kvfleet.target")
    assert actions.stop == []
    assert actions.start == [SERVER]


def test_units_the_plan_forgot_are_removed_with_a_reload():
    actions = decide([state(INSTANCE)], [SERVER], True, "kvfleet.target")
    assert actions.remove == [SERVER]
    assert actions.reload


def test_target_is_enabled_once():
    assert decide([state(SERVER)], [], False, "kvfleet.target").enable == ["kvfleet.target"]


def test_an_inactive_target_is_started_after_its_units():
    # seen on a deployed host: "systemctl stop kvfleet.target" stopped nothing until the next boot
    actions = decide([state(SERVER, active=False)], [], True, "kvfleet.target", target_active=False)
    assert actions.start == [SERVER, "kvfleet.target"]
    assert decide([state(SERVER)], [], True, "kvfleet.target", target_active=False).any
    assert not decide([state(SERVER)], [], True, "kvfleet.target", target_active=True).any


def fake_systemd(show, journal="", start_status=0):
    calls = []

    def run(argv, *, stdin=None, timeout_s=60):
        calls.append(list(argv))
        if argv[:2] == ["systemctl", "show"]:
            return CommandResult(0, show, "")
        if argv[0] == "journalctl":
            return CommandResult(0, journal, "")
        if argv[:2] == ["systemctl", "start"]:
            return CommandResult(start_status, "", "")
        if argv[1] == "digest":
            return CommandResult(0, "abc\n", "")
        return CommandResult(0, "", "")

    return run, calls


def test_state_compares_the_recorded_start(tmp_path: Path):
    run, _ = fake_systemd("ActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no\nLoadState=loaded\n")
    control = UnitControl(run, "/helper", tmp_path, tmp_path)
    assert control.state(SERVER).started_with is None
    (tmp_path / f"{SERVER}.digest").write_text("abc\n")
    now = control.state(SERVER)
    assert now.started_with == now.wanted == "abc"
    assert now.active
    assert now.enabled


def test_strays_are_only_units_of_ours(tmp_path: Path):
    for name in (SERVER, INSTANCE, "kvfleet-vllm@old.service", "nginx.service"):
        (tmp_path / name).touch()
    control = UnitControl(fake_systemd("")[0], "/helper", tmp_path, tmp_path)
    found = control.strays(["kvfleet-vllm@", "kvfleet-lmcache@"], [SERVER, INSTANCE])
    assert found == ["kvfleet-vllm@old.service"]


def test_failed_start_names_the_cause_and_stops_the_unit(tmp_path: Path):
    journal = (
        "(EngineCore pid=1) ERROR ValueError: 8192 needs 65 blocks, 64 are there.\n"
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    run, calls = fake_systemd("", journal, start_status=1)
    control = UnitControl(run, "/helper", tmp_path, tmp_path)
    with pytest.raises(KvfleetError, match="ValueError: 8192 needs 65 blocks"):
        control.apply(decide([state(INSTANCE, active=False)], [], True, "t"), 10)
    assert ["systemctl", "stop", INSTANCE] in calls


def test_a_process_that_changes_while_settling_is_a_failure(tmp_path: Path):
    pids = iter(["MainPID=10\nNRestarts=0\n", "MainPID=11\nNRestarts=1\nActiveState=active\n"])

    def run(argv, *, stdin=None, timeout_s=60):
        return CommandResult(0, next(pids) if argv[:2] == ["systemctl", "show"] else "", "")

    with pytest.raises(KvfleetError, match="did not stay up"):
        UnitControl(run, "/helper", tmp_path, tmp_path, sleep=lambda _: None).settle([INSTANCE], 3)


def test_root_cause_skips_consequences():
    assert root_cause(
        ["ERROR OSError: [Errno 98] Address already in use", "kvfleet-unit: the process ended before x"]
    ) == ("OSError: [Errno 98] Address already in use")


def test_root_cause_of_a_silent_service():
    assert root_cause([]) == "its journal is empty"
    assert root_cause(["Started.", "Killed"]) == "Killed"


def test_enabled_means_every_link_that_the_file_asks_for(tmp_path: Path):
    control = UnitControl(
        lambda *_, **__: CommandResult(0, "UnitFileState=enabled\n", ""), "helper", tmp_path, tmp_path
    )
    target = tmp_path / "kvfleet.target"
    target.write_text("[Install]\nWantedBy=multi-user.target\nWantedBy=a.mount\n")
    for other in ("multi-user.target", "a.mount"):
        assert not control.is_enabled("kvfleet.target")
        (tmp_path / f"{other}.wants").mkdir()
        (tmp_path / f"{other}.wants/kvfleet.target").symlink_to(target)
    assert control.is_enabled("kvfleet.target")
    # a link of an earlier version of the file, which systemctl enable leaves
    target.write_text("[Install]\nWantedBy=multi-user.target\n")
    assert not control.is_enabled("kvfleet.target")
    control.apply(UnitActions(enable=["kvfleet.target"]), 1)
    assert not (tmp_path / "a.mount.wants/kvfleet.target").is_symlink()


def test_service_of_a_wanted_timer_is_no_stray(tmp_path: Path):
    for name in ("kvfleet-watch.service", "kvfleet-watch.timer"):
        (tmp_path / name).touch()
    control = UnitControl(fake_systemd("")[0], "/helper", tmp_path, tmp_path)
    assert control.strays(["kvfleet-watch."], ["kvfleet-watch.timer"]) == []
    assert control.strays(["kvfleet-watch."], []) == ["kvfleet-watch.service", "kvfleet-watch.timer"]


def test_removed_unit_is_forgotten_only_when_asked(tmp_path: Path):
    for cache, expected in ((None, False), (("/c/data", "/c"), True)):
        (tmp_path / SERVER).touch()
        run, calls = fake_systemd("")
        UnitControl(run, "/helper", tmp_path, tmp_path).apply(UnitActions(remove=[SERVER]), 10, cache)
        assert (["/helper", "forget", SERVER, "/c/data", "/c"] in calls) is expected


def test_start_of_a_timer_is_recorded_for_it(tmp_path: Path):
    run, calls = fake_systemd("")
    UnitControl(run, "/helper", tmp_path, tmp_path).apply(UnitActions(start=["kvfleet-watch.timer"]), 10)
    assert calls[-1] == ["/helper", "started", "kvfleet-watch.timer"]
