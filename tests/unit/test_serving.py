"""Drain, return, keep and restore, on real files in a folder of the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvfleet.core import proof, serving
from kvfleet.core.command import CommandResult
from kvfleet.core.engine import MARKER
from kvfleet.core.findings import KvfleetError
from kvfleet.core.http import HttpFailure
from kvfleet.core.serving import Hooks, drain, keep, restore, serve
from kvfleet.core.unit_control import UnitState


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    paths = {
        "releases": tmp_path / "opt" / "releases",
        "current": tmp_path / "opt" / "current",
        "etc": tmp_path / "etc",
        "state": tmp_path / "state",
    }
    for name in ("one", "two"):
        folder = paths["releases"] / name
        folder.mkdir(parents=True)
        (folder / MARKER).write_text(json.dumps({"schema": 1, "release": name}))
    paths["current"].symlink_to("releases/one")
    paths["etc"].mkdir()
    paths["state"].mkdir()
    return {
        "fingerprint": "f1",
        "release": {"id": "one"},
        "servers": [],
        "instances": [{"name": "a", "port": 8000, "host": "127.0.0.1"}],
        "paths": {name: str(path) for name, path in paths.items()},
    }


@pytest.fixture
def units(tmp_path: Path) -> Path:
    folder = tmp_path / "units"
    folder.mkdir()
    (folder / "kvfleet-vllm@a.service").write_text("[Service]\nExecStart=/one\n")
    (folder / "kvfleet.target").write_text("[Unit]\n")
    return folder


def prove(plan: dict[str, Any], units: Path) -> None:
    parts = proof.fingerprint(plan, proof.unit_files(plan, units))
    proof.write_record(Path(plan["paths"]["state"]), {"verdict": "pass", "parts": parts, "release": "one"})


class Runner:
    def __init__(self, status: int = 0) -> None:
        self.calls: list[list[str]] = []
        self.status = status

    def __call__(self, argv: Any, **_: Any) -> CommandResult:
        self.calls.append(list(argv))
        return CommandResult(self.status, "", "router says no\n" if self.status else "")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_draining_removes_readiness_first_and_waits_for_what_is_in_flight(plan: dict[str, Any]) -> None:
    run, clock = Runner(), Clock()
    serve(plan, Hooks(), run)
    folder = serving.traffic_directory(plan)
    assert (folder / "ready").is_file()
    left = [3, 1, 0, 0]

    def fetch(url: str, path: str) -> str:
        assert not (folder / "ready").exists(), "balancers must know before we wait"
        assert run.calls == [["router", "drain"]]
        return f"vllm:num_requests_running {left.pop(0)}\nvllm:num_requests_waiting 0\n"

    told = drain(plan, "why", Hooks(drain=("router", "drain")), run, fetch=fetch, sleep=clock.sleep, clock=clock)
    assert told == {"in_flight": 0, "waited_s": 1.5}
    assert json.loads((folder / "state.json").read_text())["reason"] == "why"
    assert left == []


def test_a_balancer_gets_time_to_notice_before_the_wait_begins(plan: dict[str, Any]) -> None:
    asked: list[float] = []
    clock = Clock()

    def fetch(url: str, path: str) -> str:
        asked.append(clock())
        return "vllm:num_requests_running 0\n"

    serve(plan, Hooks(), Runner())
    began, hooks = clock(), Hooks(notice_s=5, deadline_s=3)
    told = drain(plan, "", hooks, Runner(), fetch=fetch, sleep=clock.sleep, clock=clock)
    assert asked[0] - began == 5.0
    assert told == {"in_flight": 0, "waited_s": 5.5}
    # nobody sends to a host that is out of traffic already
    began = clock()
    drain(plan, "", hooks, Runner(), fetch=fetch, sleep=clock.sleep, clock=clock)
    assert asked[2] == began


def test_the_deadline_ends_the_wait(plan: dict[str, Any]) -> None:
    clock = Clock()
    told = drain(
        plan, "", Hooks(deadline_s=3), Runner(), fetch=lambda *_: "vllm:num_requests_running 2\n",
        sleep=clock.sleep, clock=clock,
    )  # fmt: skip
    assert told == {"in_flight": 2, "waited_s": 3.0}


def test_an_instance_that_is_down_holds_nothing_up(plan: dict[str, Any]) -> None:
    def fetch(url: str, path: str) -> str:
        raise HttpFailure("refused", "connection refused")

    clock = Clock()
    assert drain(plan, "", Hooks(), Runner(), fetch=fetch, sleep=clock.sleep, clock=clock)["in_flight"] == 0


def test_a_failing_drain_hook_stops_before_any_restart(plan: dict[str, Any]) -> None:
    serve(plan, Hooks(), Runner())
    with pytest.raises(KvfleetError, match=r"KVF-SVC-050.*router says no"):
        drain(plan, "", Hooks(drain=("router",)), Runner(1), fetch=lambda *_: "")
    assert serving.is_ready(serving.traffic_directory(plan))


def test_a_drain_hook_that_fails_late_is_taken_back_and_leaves_a_drained_host_drained(plan: dict[str, Any]) -> None:
    class Late(Runner):
        def __call__(self, argv: Any, **options: Any) -> CommandResult:
            self.status = 1 if argv == ["router", "drain"] else 0
            return super().__call__(argv, **options)

    hooks = Hooks(drain=("router", "drain"), undrain=("router", "undrain"))
    serve(plan, Hooks(), Runner())
    run = Late()
    with pytest.raises(KvfleetError, match="still takes traffic"):
        drain(plan, "", hooks, run, fetch=lambda *_: "")
    # it may have told the router before it failed
    assert run.calls == [["router", "drain"], ["router", "undrain"]]
    drain(plan, "an interrupted rollout", Hooks(deadline_s=0), Runner(), fetch=lambda *_: "")
    with pytest.raises(KvfleetError, match="stays out of traffic"):
        drain(plan, "the next rollout", hooks, Late(), fetch=lambda *_: "")
    assert not serving.is_ready(serving.traffic_directory(plan)), "what runs there is not proved"


def test_a_service_that_starts_beside_others_takes_the_host_out_of_traffic(tmp_path: Path) -> None:
    class Control:
        def strays(self, *_: Any) -> list[str]:
            return []

        def state(self, unit: str) -> UnitState:
            down = unit in ("kvfleet-vllm@b.service", "kvfleet-watch.timer")
            return UnitState(unit, not down, True, False, None if down else "now", "now")

    helper = tmp_path / "helper"
    helper.write_text("")
    units = ["kvfleet-lmcache@0.service", "kvfleet-vllm@a.service", "kvfleet-vllm@b.service", "kvfleet-watch.timer"]
    assert serving.will_move(Control(), units, [], str(helper), True) == [], "nothing is installed"  # type: ignore[arg-type]
    helper.chmod(0o755)
    assert serving.will_move(Control(), units, [], str(helper), True) == ["kvfleet-vllm@b.service"]  # type: ignore[arg-type]
    assert serving.will_move(Control(), units, [], str(helper), False) == []  # type: ignore[arg-type]


def test_a_host_returns_once_and_tells_the_router_once(plan: dict[str, Any]) -> None:
    run = Runner()
    assert serve(plan, Hooks(undrain=("router", "undrain")), run) is True
    assert serve(plan, Hooks(undrain=("router", "undrain")), run) is False
    assert run.calls == [["router", "undrain"]]


def test_a_failing_undrain_hook_leaves_the_host_out(plan: dict[str, Any]) -> None:
    with pytest.raises(KvfleetError, match="KVF-SVC-051"):
        serve(plan, Hooks(undrain=("router",)), Runner(1))
    assert not serving.is_ready(serving.traffic_directory(plan))


def test_only_a_proved_state_is_kept(plan: dict[str, Any], units: Path) -> None:
    assert keep(plan, units) is False
    prove(plan, units)
    assert keep(plan, units) is True
    assert keep(plan, units) is False, "the same state twice is no change"
    path = serving.snapshot_path(plan)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    (units / "kvfleet-vllm@a.service").write_text("[Service]\nExecStart=/two\n")
    assert keep(plan, units) is False, "what changed after the proof was not proved"


def test_a_restore_brings_back_exactly_what_was_proved(plan: dict[str, Any], units: Path) -> None:
    prove(plan, units)
    keep(plan, units)
    before = proof.fingerprint(plan, proof.unit_files(plan, units))
    newer = {**plan, "fingerprint": "f2", "release": {"id": "two"}}
    (units / "kvfleet-vllm@a.service").write_text("[Service]\nExecStart=/two\n")
    (Path(plan["paths"]["etc"]) / "kvfleet-vllm@a.new.yaml").write_text("x: 1\n")
    current = Path(plan["paths"]["current"])
    current.unlink()
    current.symlink_to("releases/two")

    restored = restore(newer, units)

    assert restored["plan"]["fingerprint"] == "f1"
    assert restored["units"] == ["kvfleet-vllm@a.service"]
    assert current.resolve().name == "one"
    after = proof.fingerprint(restored["plan"], proof.unit_files(restored["plan"], units))
    assert after == before
    record = proof.read_record(Path(plan["paths"]["state"]))
    assert proof.difference(record, after, "smoke") == "", "the last proof stands again"
    assert restore(newer, units)["files"] == []


def test_what_is_restored_is_watched_as_before(plan: dict[str, Any], units: Path) -> None:
    etc = Path(plan["paths"]["etc"])
    (units / "kvfleet-watch.timer").write_text("[Timer]\nOnActiveSec=15\n")
    (units / "kvfleet-watch.service").write_text("[Service]\nExecStart=/watch\n")
    (etc / "kvfleet-watch.json").write_text('{"a": 8000}\n')
    prove(plan, units)
    keep(plan, units)
    (units / "kvfleet-watch.timer").write_text("[Timer]\nOnActiveSec=60\n")
    (etc / "kvfleet-watch.json").write_text('{"b": 9000}\n')
    # a change that fails stops the watcher first
    assert restore(plan, units)["units"] == ["kvfleet-vllm@a.service", "kvfleet-watch.timer"]
    assert (units / "kvfleet-watch.timer").read_text() == "[Timer]\nOnActiveSec=15\n"
    assert (etc / "kvfleet-watch.json").read_text() == '{"a": 8000}\n'


def test_the_proxy_sends_to_the_proved_ports_again(plan: dict[str, Any], units: Path, tmp_path: Path) -> None:
    proxy = tmp_path / "nginx" / "kvfleet.conf"
    proxy.parent.mkdir()
    proxy.write_text("proxy_pass http://127.0.0.1:8000;\n")
    prove(plan, units)
    assert keep(plan, units, proxy_file=proxy) is True
    proxy.write_text("proxy_pass http://127.0.0.1:9000;\n")
    restored = restore(plan, units, proxy_file=proxy)
    assert proxy.read_text() == "proxy_pass http://127.0.0.1:8000;\n"
    assert str(proxy) in restored["files"]
    assert restored["proxy"] == "wanted"
    # a reload that was lost is made up for: what nginx runs cannot be read from its file
    assert restore(plan, units, proxy_file=proxy)["proxy"] == "wanted"


def test_a_proxy_that_came_with_the_change_goes_again(plan: dict[str, Any], units: Path, tmp_path: Path) -> None:
    proxy = tmp_path / "kvfleet.conf"
    prove(plan, units)
    keep(plan, units, proxy_file=proxy)
    assert restore(plan, units, proxy_file=proxy)["proxy"] == "untouched"
    proxy.write_text("proxy_pass http://127.0.0.1:9000;\n")
    restored = restore(plan, units, proxy_file=proxy)
    assert not proxy.exists()
    assert (restored["files"], restored["proxy"]) == ([str(proxy)], "removed")


def test_a_snapshot_from_before_the_proxy_was_part_of_it_leaves_the_proxy_alone(
    plan: dict[str, Any], units: Path, tmp_path: Path
) -> None:
    proxy = tmp_path / "kvfleet.conf"
    prove(plan, units)
    keep(plan, units, proxy_file=proxy)
    path = serving.snapshot_path(plan)
    older = json.loads(path.read_text())
    del older["proxy"]
    path.write_text(json.dumps(older))
    proxy.write_text("proxy_pass http://127.0.0.1:8000;\n")
    assert restore(plan, units, proxy_file=proxy)["proxy"] == "untouched"
    assert proxy.is_file()
    # and the next proof knows it
    assert keep(plan, units, proxy_file=proxy) is True
    assert restore(plan, units, proxy_file=proxy)["proxy"] == "wanted"


def test_another_allow_list_is_kept_without_a_proof(plan: dict[str, Any], units: Path, tmp_path: Path) -> None:
    proxy = tmp_path / "kvfleet.conf"
    proxy.write_text("allow 10.0.0.0/8;\n")
    prove(plan, units)
    assert keep(plan, units, proxy_file=proxy) is True
    proxy.write_text("allow 10.1.0.0/16;\n")
    assert keep(plan, units, proxy_file=proxy) is True
    assert keep(plan, units, proxy_file=proxy) is False


def test_other_settings_of_the_watcher_are_kept_without_a_proof(plan: dict[str, Any], units: Path) -> None:
    (units / "kvfleet-watch.timer").write_text("[Timer]\nOnActiveSec=15\n")
    prove(plan, units)
    assert keep(plan, units) is True
    (units / "kvfleet-watch.timer").write_text("[Timer]\nOnActiveSec=60\n")
    assert keep(plan, units) is True
    assert keep(plan, units) is False


def test_without_a_proved_state_there_is_no_way_back(plan: dict[str, Any], units: Path) -> None:
    with pytest.raises(KvfleetError, match="KVF-HOST-083"):
        restore(plan, units)


def test_a_release_that_is_gone_is_said(plan: dict[str, Any], units: Path) -> None:
    prove(plan, units)
    keep(plan, units)
    (Path(plan["paths"]["releases"]) / "one" / MARKER).unlink()
    with pytest.raises(KvfleetError, match="KVF-HOST-084"):
        restore(plan, units)
