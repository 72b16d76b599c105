"""The module ``kv_plan``: one call from variables to the plan, refusals in one message."""

import json

import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args
from planner_hosts import LLAMA_8B, host

import kv_plan
from kvfleet.checkout import ROOT

RELEASES = yaml.safe_load((ROOT / "releases.yml").read_text())


class Left(Exception):
    """How the module ended: its result."""


@pytest.fixture
def run(monkeypatch):
    def leave(_, **result):
        raise Left(result)

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
    monkeypatch.setattr(basic.AnsibleModule, "fail_json", lambda self, **result: leave(self, failed=True, **result))

    def call(settings, **arguments):
        arguments.setdefault("releases", RELEASES)
        with patch_module_args({"settings": settings, **arguments}), pytest.raises(Left) as left:
            kv_plan.main()
        return left.value.args[0]

    return call


@pytest.fixture
def model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path / "m")


def test_recorded_host(run, model):
    done = run({"kvfleet_profile": "cpu", "kvfleet_model": model}, host=host(2), releases=json.dumps(RELEASES))
    assert done["changed"] is False
    assert done["plan"]["errors"] == []
    assert done["plan"]["instances"][0]["command"][1] == "serve"
    assert done["host"]["hostname"] == "h"
    assert any("128 KiB" in line for line in done["summary"])
    assert done["page"][0]["title"] == "Host"
    assert json.loads(done["record"])["fingerprint"] == done["plan"]["fingerprint"]
    assert done["error_text"] == ""


def test_this_machine_is_described_in_the_same_call(run, model):
    done = run({"kvfleet_profile": "gpu", "kvfleet_model": model}, fail_on_errors=False)
    assert done["host"]["memory"]["total_bytes"] > 0
    assert done["plan"]["host"]["hostname"] == done["host"]["hostname"]


def test_every_error_is_one_line_of_the_message(run, model):
    done = run({"kvfleet_model": model, "kvfleet_buffer_gib_per_gpu": 4000}, host=host(2))
    assert done["failed"]
    assert [line.split(":")[0] for line in done["msg"].splitlines()] == ["KVF-DISK-100", "KVF-RAM-002"]
    assert [finding["code"] for finding in done["findings"]] == ["KVF-DISK-100", "KVF-RAM-002"]
    listed = run({"kvfleet_model": model, "kvfleet_buffer_gib_per_gpu": 4000}, host=host(2), fail_on_errors=False)
    assert listed["error_text"] == done["msg"]


@pytest.mark.parametrize(
    ("settings", "names", "says"),
    [
        ({"kvfleet_profile": "ssd"}, [], "gpu, cpu, disk"),
        ({"kvfleet_profile": "cpu"}, ["kvfleet_profil"], "Did you mean kvfleet_profile?"),
        ({"kvfleet_profile": "cpu", "kvfleet_release": "cu13"}, [], "kvfleet_release"),
        ({"kvfleet_profile": "cpu", "kvfleet_model": "/nowhere"}, [], "/nowhere does not exist"),
        ({"kvfleet_profile": "cpu"}, [], "has no model"),
        ({"cache_disk_device": "/dev/nvme0n1"}, [], "kernel name"),
    ],
)
def test_bad_input_names_the_variable(run, model, settings, names, says):
    if says != "has no model":
        settings = {"kvfleet_model": model, **settings}
    done = run(settings, host=host(2), variable_names=names)
    assert done["failed"]
    assert says in done["msg"]


def test_own_flags_reach_the_commands_or_are_refused(run, model):
    settings = {"kvfleet_profile": "cpu", "kvfleet_model": model, "kvfleet_trust_remote_code": True}
    flags = {"kvfleet_engine_flags": {"async-scheduling": False}, "kvfleet_server_flags": {"max_workers": 2}}
    plan = run({**settings, **flags}, host=host(2))["plan"]
    assert plan["instances"][0]["command"][-1] == "--no-async-scheduling"
    assert plan["servers"][0]["command"][-2:] == ["--max-workers", "2"]
    assert [warning["code"] for warning in plan["warnings"] if warning["code"].startswith("KVF-SET")] == ["KVF-SET-024"]
    wrong = {"kvfleet_engine_flags": {"swap-space": 4, "port": 1}, "kvfleet_server_flags": {"l1-sice-gb": 1}}
    done = run({**settings, **wrong}, host=host(2))
    assert [finding["code"] for finding in done["findings"]] == ["KVF-SET-020", "KVF-SET-021", "KVF-SET-020"]
    assert "engine_flags of instance default" in done["msg"]
    assert "did you mean --l1-size-gb?" in done["msg"]
    assert "must be a mapping" in run({**settings, "kvfleet_engine_flags": "--x"}, host=host(2))["msg"]


def test_directory_without_a_config(run, tmp_path):
    done = run({"kvfleet_profile": "cpu", "kvfleet_model": str(tmp_path)}, host=host(2))
    assert "has no config.json" in done["msg"]
    assert "kvfleet_model" in done["msg"]


def test_recorded_config_for_models_that_are_elsewhere(run):
    done = run({"kvfleet_profile": "cpu", "kvfleet_model": "/data/m"}, host=host(2), model_config=LLAMA_8B)
    assert done["plan"]["instances"][0]["kv_bytes_per_token"] == 131072


def test_running_plan_is_read_from_its_file(run, model, tmp_path):
    settings = {"kvfleet_profile": "gpu", "kvfleet_model": model}
    first = run(settings, fail_on_errors=False)
    (tmp_path / "plan.json").write_text(first["record"])
    again = run(settings, fail_on_errors=False, plan_file=str(tmp_path / "plan.json"))
    assert again["plan"]["inputs"] == first["plan"]["inputs"]
    assert again["record"] == first["record"]
    (tmp_path / "plan.json").write_text("not JSON")
    assert run(settings, fail_on_errors=False, plan_file=str(tmp_path / "plan.json"))["record"] == first["record"]


def test_speeds_of_the_last_proof_feed_the_advice():
    proof = {"measured": {"prefill_tokens_per_s": 700.0, "disk": 1e9, "cpu": None, "other": 1}}
    assert kv_plan.measured({}, proof) == {"prefill_tokens_per_s": 700.0, "disk": 1e9}
    assert kv_plan.measured({}, None) == {}
    assert kv_plan.measured({}, {"measured": "x"}) == {}


def test_rows_of_the_inventory_follow_those_of_the_matrix(run, model):
    own = {**RELEASES["releases"][0], "id": "cu13-of-my-own"}
    for matrix in (json.dumps(RELEASES), RELEASES["releases"]):
        settings = {"kvfleet_profile": "cpu", "kvfleet_model": model, "kvfleet_release": "cu13-of-my-own"}
        asked = run(settings, host=host(2), releases=matrix)
        assert "cu13-of-my-own" in asked["msg"]
        done = run(settings, host=host(2), releases=matrix, releases_extra=[own])
        assert done["plan"]["release"]["id"] == "cu13-of-my-own"


def test_releases_may_be_a_list_of_rows(run, model):
    done = run({"kvfleet_profile": "cpu", "kvfleet_model": model}, host=host(2), releases=RELEASES["releases"])
    assert done["plan"]["release"]["id"]


def test_an_empty_recorded_host_is_not_this_machine(run, model):
    done = run({"kvfleet_profile": "cpu", "kvfleet_model": model}, host={})
    assert done["failed"]
    assert "KVF-HOST-003" in done["msg"]
