"""Status: what is compared, and that each difference is named by the thing that differs."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import planner_hosts
import pytest

from kvfleet.core import serving, status
from kvfleet.core.command import CommandResult
from kvfleet.core.disk_probe import HostPaths
from kvfleet.core.engine import Layout
from kvfleet.core.http import HttpFailure
from kvfleet.core.services import attach_commands
from kvfleet.core.status import DRIFT, OK, UNKNOWN, compare, observe, options, undeployed, unit_file_words, verdict

GIB = 1024**3


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    made = planner_hosts.plan(planner_hosts.host(gpus=1), profile="disk")
    attach_commands(made)
    return made


@pytest.fixture
def plan(planned: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(planned)


@pytest.fixture
def seen(plan: dict[str, Any]) -> dict[str, Any]:
    """What a host shows that runs exactly this plan."""
    units = {}
    for unit in [f"kvfleet-lmcache@{one['name']}.service" for one in plan["servers"]] + [
        f"kvfleet-vllm@{one['name']}.service" for one in plan["instances"]
    ]:
        service = status.service_of(plan, unit)
        assert service is not None
        units[unit] = {
            "present": True, "active": "active", "sub": "running", "enabled": "enabled", "needs_reload": False,
            "restarts": 0, "result": "success", "command": list(service["command"]),
            "environment": {k: str(v) for k, v in service["environment"].items()},
            "started_with": "d1", "on_disk": "d1",
        }  # fmt: skip
    return {
        "release": {"current": plan["release"]["id"]},
        "plan": {"fingerprint": plan["fingerprint"], "profile": "disk"},
        "units": units,
        "health": {"age_s": 12.0, "units": {name: {"unit": name, "state": "ok", "reason": ""} for name in units}},
        "strays": [],
        "target": "enabled",
        "mount": {"number": "259:1", "fstype": "ext4", "source": "/dev/nvme1n1p1", "read_only": False},
        "data": {"uid": 990, "mode": "0750"},
        "disk": {"serial": "x", "device": "/dev/disk/by-id/nvme-x", "device_present": True, "record": "/r",
                 "filesystem_uuid": "u", "filesystem_number": "259:1"},
        "driver": "580.159.04",
        "space": {"/opt/kvfleet": {"total_bytes": 100 * GIB, "free_bytes": 50 * GIB}},
        "tiers": {one["name"]: {"l1_bytes": GIB, "l2_bytes": GIB} for one in plan["servers"]},
        "instances": {one["name"]: {"pool_share": 0.5, "running": 1, "waiting": 0} for one in plan["instances"]},
        "proof": {"record": {"verdict": "pass", "time": "2026-11-29T10:00:00Z", "release": "test"}, "reason": ""},
        "readiness": None,
        "proxy": {"wanted": True, "ports": [one["port"] for one in plan["instances"]], "active": "active",
                  "enabled": "enabled"},
    }  # fmt: skip


def drifted(plan: dict[str, Any], seen: dict[str, Any]) -> dict[str, str]:
    return {f"{item.area} {item.name}": item.state for item in compare(plan, seen) if item.state != OK}


def test_a_host_that_runs_its_plan_shows_no_drift(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    items = compare(plan, seen)
    assert [str(item) for item in items if item.state != OK] == []
    assert verdict(items) == OK
    areas = {item.area for item in items}
    assert areas >= {"plan", "release", "unit", "disk", "mount", "space", "tier", "proxy", "verdict"}


def first_unit(seen: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(value for name, value in seen["units"].items() if name.startswith(f"kvfleet-{kind}@"))


def health_of(seen: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(value for name, value in seen["health"]["units"].items() if name.startswith(f"kvfleet-{kind}@"))


def change_option(seen: dict[str, Any], option: str, value: str) -> None:
    command = first_unit(seen, "vllm")["command"]
    command[command.index(option) + 1] = value


CASES: dict[str, tuple[Any, str]] = {
    "release": (lambda s: s["release"].update(current="old"), "release in use"),
    "plan": (lambda s: s["plan"].update(fingerprint="0"), "plan fingerprint"),
    "profile": (lambda s: s["plan"].update(profile="gpu"), "plan profile"),
    "dead unit": (lambda s: first_unit(s, "vllm").update(active="failed"), "unit kvfleet-vllm@default.service"),
    "unit gone": (lambda s: first_unit(s, "vllm").update(present=False), "unit kvfleet-vllm@default.service"),
    "stale": (lambda s: first_unit(s, "vllm").update(started_with="d0"), "unit kvfleet-vllm@default.service restart"),
    "disabled": (lambda s: first_unit(s, "lmcache").update(enabled="disabled"), "unit kvfleet-lmcache@"),
    "option": (lambda s: change_option(s, "--max-num-seqs", "3"), "settings kvfleet-vllm@default.service --max-num-"),
    "variable": (
        lambda s: first_unit(s, "vllm")["environment"].update(HF_HUB_OFFLINE="0"),
        "settings kvfleet-vllm@default.service HF_HUB_OFFLINE",
    ),
    "stray": (lambda s: s["strays"].append("kvfleet-vllm@x.service"), "unit kvfleet-vllm@x.service"),
    "target": (lambda s: s.update(target="disabled"), "unit kvfleet.target"),
    "degraded": (lambda s: health_of(s, "lmcache").update(state="degraded"), "health kvfleet-lmcache@0.service"),
    "gave up": (lambda s: health_of(s, "vllm").update(state="failed"), "health kvfleet-vllm@default.service"),
    "never looked": (lambda s: s.update(health=None), "health watcher"),
    "looked long ago": (lambda s: s["health"].update(age_s=3600.0), "health watcher"),
    "unmounted": (lambda s: s.update(mount=None), "mount /var/cache/kvfleet"),
    "other disk": (lambda s: s["mount"].update(number="259:9"), "mount /var/cache/kvfleet"),
    "read-only": (lambda s: s["mount"].update(read_only=True), "mount /var/cache/kvfleet"),
    "owner": (lambda s: s["data"].update(uid=0), "mount /var/cache/kvfleet/data"),
    "disk missing": (lambda s: s["disk"].update(device_present=False), "disk x"),
    "space": (lambda s: s["space"]["/opt/kvfleet"].update(free_bytes=GIB), "space /opt/kvfleet"),
    "tier": (lambda s: s["tiers"]["0"].update(l2_bytes=10**15), "tier disk of server 0"),
    "proof": (lambda s: s["proof"].update(reason="changed"), "verdict last"),
    "unproved": (lambda s: s["proof"].update(record=None), "verdict last"),
    "nginx dead": (lambda s: s["proxy"].update(active="failed"), "proxy nginx.service"),
    "nginx disabled": (lambda s: s["proxy"].update(enabled="disabled"), "proxy nginx.service at boot"),
    "proxy gone": (lambda s: s["proxy"].update(ports=None), "proxy configuration"),
    "proxy elsewhere": (lambda s: s["proxy"].update(ports=[9999]), "proxy ports"),
    "proxy unwanted": (lambda s: s["proxy"].update(wanted=False), "proxy configuration"),
    "drained": (lambda s: s.update(readiness={"ready": False, "reason": "rollout"}), "traffic readiness"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_difference_is_named(case: str, plan: dict[str, Any], seen: dict[str, Any]) -> None:
    change, name = CASES[case]
    change(seen)
    found = drifted(plan, seen)
    assert len(found) == 1, found
    assert next(iter(found)).startswith(name)
    assert set(found.values()) == {DRIFT}


def test_a_host_that_runs_its_plan_may_be_benchmarked(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    assert undeployed(plan, seen) == []


@pytest.mark.parametrize("case", ["release", "plan", "profile", "unit gone", "stale", "option", "variable", "stray"])
def test_what_a_deploy_would_change_is_not_deployed(case: str, plan: dict[str, Any], seen: dict[str, Any]) -> None:
    change, name = CASES[case]
    change(seen)
    found = [f"{item.area} {item.name}" for item in undeployed(plan, seen)]
    assert len(found) == 1, found
    assert found[0].startswith(name)


@pytest.mark.parametrize("case", sorted({*CASES} - {"release", "plan", "profile", "unit gone", "stale", "option",
                                                    "variable", "stray"}))  # fmt: skip
def test_a_fault_of_what_is_deployed_is_the_proofs_to_find(
    case: str, plan: dict[str, Any], seen: dict[str, Any]
) -> None:
    CASES[case][0](seen)
    assert undeployed(plan, seen) == []


def test_a_host_that_was_never_deployed_has_nothing_to_benchmark(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    seen.update(plan=None, release={"current": None})
    assert [item.name for item in undeployed(plan, seen)] == ["deployed", "in use"]


def test_the_driver_is_compared_with_the_row(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    plan["release"]["min_driver"] = "580.65.06"
    assert drifted(plan, seen) == {}
    seen["driver"] = "535.183.01"
    assert drifted(plan, seen) == {"driver NVIDIA": DRIFT}
    seen["driver"] = None
    assert drifted(plan, seen) == {"driver NVIDIA": UNKNOWN}


def test_what_does_not_answer_is_unknown_and_never_ok(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    seen["instances"]["default"] = {"error": "connection refused"}
    items = compare(plan, seen)
    assert verdict(items) == UNKNOWN
    assert "connection refused" in next(str(item) for item in items if item.state == UNKNOWN)


@pytest.mark.parametrize(
    ("found", "state"), [("busy", OK), ("activating", UNKNOWN), ("unknown", UNKNOWN), ("hung", DRIFT), ("dead", DRIFT)]
)
def test_the_watchers_word_is_told_with_its_reason(
    found: str, state: str, plan: dict[str, Any], seen: dict[str, Any]
) -> None:
    health_of(seen, "vllm").update(state=found, reason="why")
    item = next(
        item for item in compare(plan, seen) if item.name == "kvfleet-vllm@default.service" and "why" in item.note
    )
    assert (item.area, item.state) == ("health", state)
    assert "why" in str(item)


def test_a_host_without_a_proxy_has_nothing_to_say_of_nginx(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    seen["proxy"] = {"wanted": False, "ports": None, "active": "inactive", "enabled": "disabled"}
    assert [item for item in compare(plan, seen) if item.area == "proxy"] == []


def test_the_proxy_is_looked_at_where_nginx_reads_it(plan: dict[str, Any], tmp_path: Path) -> None:
    text = (
        "# proxy_pass http://127.0.0.1:1;\nlocation /v1/ {\n    proxy_pass http://127.0.0.1:8001;\n}\n"
        "location = /health {\n    proxy_pass http://127.0.0.1:8001;\n}\nproxy_pass http://127.0.0.1:8000;\n"
    )
    conf = tmp_path / "kvfleet.conf"
    calls = []

    def run(argv: Any, **_: Any) -> CommandResult:
        calls.append(list(argv))
        return CommandResult(0, "ActiveState=inactive\nUnitFileState=enabled\n", "")

    def look() -> dict[str, Any]:
        found = observe(
            plan, run, proxy=True, proxy_file=conf, paths=paths, layout=Layout(tmp_path / "opt"), fetch=lambda *_: ""
        )
        return dict(found["proxy"])

    paths = HostPaths(systemd=str(tmp_path), records=str(tmp_path), by_uuid=str(tmp_path), proc=str(tmp_path))
    assert look() == {"wanted": True, "ports": None, "active": "inactive", "enabled": "enabled"}
    conf.write_text(text)
    assert look()["ports"] == [8000, 8001]
    assert ["systemctl", "show", "--property=ActiveState,UnitFileState", "nginx.service"] in calls


def test_errors_of_the_plan_are_drift_with_their_fix(plan: dict[str, Any], seen: dict[str, Any]) -> None:
    plan["errors"] = [{"code": "KVF-DISK-001", "message": "gone.", "fix": "Set it.", "numbers": {}}]
    assert drifted(plan, seen) == {"plan KVF-DISK-001": DRIFT}


def test_words_are_read_as_systemd_writes_them() -> None:
    command, environment = unit_file_words(
        "[Service]\nEnvironment=\"A=1 2\"\nEnvironment=\"B=x$$y\"\nExecStartPre=/bin/true\n"
        "ExecStart=/opt/v serve /m \\\n  --port 8000 \\\n  --x '{\"a\":1}' \\\n  --flag\n"
    )  # fmt: skip
    assert command == ["/opt/v", "serve", "/m", "--port", "8000", "--x", '{"a":1}', "--flag"]
    assert environment == {"A": "1 2", "B": "x$y"}
    assert options(command) == {"command": "/opt/v serve /m", "--port": "8000", "--x": '{"a":1}', "--flag": ""}
    assert options(["--a=1", "--a", "2"]) == {"--a": "1 2"}


def test_a_bare_host_is_observed_without_an_error(plan: dict[str, Any], tmp_path: Path) -> None:
    def run(argv: Any, **_: Any) -> CommandResult:
        return CommandResult(1, "", "")

    def fetch(url: str, path: str) -> str:
        raise HttpFailure("refused", f"{url}{path}: connection refused")

    for name in ("etc", "state", "current", "releases", "cache_mount", "cache_data"):
        plan["paths"][name] = str(tmp_path / "none" / name)
    paths = HostPaths(systemd=str(tmp_path), records=str(tmp_path), by_uuid=str(tmp_path), proc=str(tmp_path))
    found = observe(plan, run, paths=paths, layout=Layout(tmp_path / "opt"), fetch=fetch)
    json.dumps(found)
    assert "never deployed" in " ".join(map(str, compare(plan, found)))


def test_observing_reads_units_mount_and_records(plan: dict[str, Any], tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    (units / "kvfleet-vllm@default.service").write_text(
        "[Service]\nExecStart=/opt/kvfleet/libexec/kvfleet-unit exec -- /x --port 1\n"
    )
    (units / "kvfleet-vllm@gone.service").write_text("[Service]\n")
    (units / "other.service").write_text("")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n21 1 259:1 / /var/cache/kvfleet ro,noatime - ext4 /dev/nvme1n1p1 rw\n"
    )
    look = {"time": time.time() - 20, "units": [{"unit": "u.service", "state": "degraded", "reason": "full"}]}
    (tmp_path / "health.json").write_text(json.dumps(look))
    calls = []

    def run(argv: Any, **_: Any) -> CommandResult:
        calls.append(list(argv))
        if argv[0] == "systemctl":
            return CommandResult(0, "ActiveState=active\nUnitFileState=enabled\nNRestarts=2\n", "")
        return CommandResult(0, "digest-now\n", "")

    paths = HostPaths(systemd=str(units), proc=str(tmp_path / "proc"), records=str(tmp_path), by_uuid=str(tmp_path))
    found = observe(
        plan, run, paths=paths, run_directory=tmp_path, watch_directory=tmp_path, layout=Layout(tmp_path / "opt"),
        fetch=lambda url, path: "vllm:kv_cache_usage_perc 0.25\nlmcache_mp_l2_usage_bytes 7\n",
    )  # fmt: skip
    assert found["strays"] == ["kvfleet-vllm@gone.service"]
    assert found["units"]["kvfleet-vllm@default.service"]["restarts"] == 2
    # with an API key the helper becomes the engine; the plan knows the engine's own command
    assert found["units"]["kvfleet-vllm@default.service"]["command"] == ["/x", "--port", "1"]
    assert found["health"]["units"]["u.service"]["reason"] == "full"
    assert 20 <= found["health"]["age_s"] < 60
    assert found["units"]["kvfleet-vllm@default.service"]["on_disk"] == "digest-now"
    assert found["mount"] == {"number": "259:1", "fstype": "ext4", "source": "/dev/nvme1n1p1", "read_only": True}
    assert found["instances"]["default"]["pool_share"] == 0.25
    assert {call[1] for call in calls} <= {"show", "digest"}, "status only looks"


def test_a_host_that_a_rollout_took_out_of_traffic_is_told_with_its_reason(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    plan["paths"]["releases"] = str(tmp_path / "opt" / "releases")

    def run(argv: Any, **_: Any) -> CommandResult:
        return CommandResult(0, "", "")

    def items() -> list[str]:
        paths = HostPaths(systemd=str(tmp_path), records=str(tmp_path), by_uuid=str(tmp_path), proc=str(tmp_path))
        found = observe(plan, run, paths=paths, layout=Layout(tmp_path / "opt"), fetch=lambda url, path: "")
        return [f"{item.found} {item.note}" for item in compare(plan, found) if item.area == "traffic"]

    assert items() == [], "a host that never served is no drained one"
    serving.serve(plan, serving.Hooks(), run)
    assert items() == []
    serving.drain(plan, "rollout 7", serving.Hooks(deadline_s=0), run, fetch=lambda url, path: "")
    assert items() == ["drained rollout 7"]
    serving.serve(plan, serving.Hooks(), run)
    assert items() == []


@pytest.mark.parametrize(("options", "read_only"), [("rw", False), ("ro", True), ("rw,emergency_ro", True)])
def test_a_file_system_that_stopped_writing_after_an_error_is_read_only(
    options: str, read_only: bool, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    # as Linux 6.18 showed it after I/O errors
    (tmp_path / "self/mountinfo").write_text(f"1333 27 7:7 / /mnt rw,relatime - ext4 /dev/loop7 {options}\n")
    found = status._mount("/mnt", HostPaths(proc=str(tmp_path)))
    assert found is not None
    assert found["read_only"] is read_only


def test_the_mount_table_of_this_machine_is_understood() -> None:
    points = subprocess.run(["findmnt", "-rno", "TARGET"], capture_output=True, text=True, check=True).stdout.split()
    found = status._mount(points[0], HostPaths())
    assert found is not None
