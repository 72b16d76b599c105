"""Speeds and write rates of a proof, in the words that the next plan reads."""

import json
from dataclasses import replace

import pytest
from planner_hosts import host, plan

from kvfleet.core import measured, services
from kvfleet.core.command import CommandResult
from kvfleet.core.disk_health import smart_log
from kvfleet.core.health import SmartLog

MIB = 1024**2
TERABYTE = 1e12
#: 20 % used after 700 TB: 3500 TB in all by the drive's own scale
SMART = SmartLog(0, 100, 10, 20, 0, int(700 * TERABYTE), 8000, 40)

INSTANCE = {"name": "a", "model": "/m/a", "tensor_parallel_size": 1}
PLAN = {"instances": [{**INSTANCE, "kv_bytes_per_token": 1024, "kv_bytes_per_token_stored": 2048}]}
TRUTH = {
    "name": "a",
    "prefill_tokens_per_s": 900.0,
    "decode_ms_per_token": 40.0,
    "hit_tokens": {"ram": 1024, "disk": 1024, "engine_cache": None},
    "ttft_ms": {"cold": 1000.0, "ram": 100.0, "disk": 400.0},
}


def warm(duration_s, served_by="device", phase="warm", disk=8192, external=8192):
    return {
        "run": {"phase": phase},
        "figures": {"duration_s": duration_s},
        "tokens": {"tier_cpu": 0, "tier_disk": disk, "external": external},
        "disk": {"served_by": served_by},
    }


def test_the_repeated_prompt_gives_bytes_per_second():
    found = measured.speeds(PLAN, [TRUTH], None)
    # 1024 tokens of 2 KiB: 2 MiB in 0.1 s and 0.4 s
    assert found["cpu"] == 20 * MIB
    assert found["disk"] == 5 * MIB
    assert found["prefill_tokens_per_s"] == 900.0
    assert found["instances"]["a"] == {
        "model": "/m/a", "tensor_parallel_size": 1, "prefill_tokens_per_s": 900.0, "decode_ms_per_token": 40.0,
    }  # fmt: skip


def test_a_faster_warm_run_counts_and_the_page_cache_does_not():
    def load(*runs):
        return {"instances": [{"name": "a", "runs": list(runs)}]}

    # 8192 tokens of 2 KiB are 16 MiB
    assert measured.speeds(PLAN, [TRUTH], load(warm(2.0)))["disk"] == 8 * MIB
    assert measured.speeds(PLAN, [TRUTH], load(warm(2.0, "page cache")))["disk"] == 5 * MIB
    assert measured.speeds(PLAN, [TRUTH], load(warm(2.0, phase="populate")))["disk"] == 5 * MIB
    assert measured.speeds(PLAN, [], load(warm(2.0, disk=0)))["disk"] is None
    # looked up by LMCache, but the engine's own pool had them: nothing was delivered
    assert measured.speeds(PLAN, [], load(warm(2.0, external=0)))["disk"] is None


def test_several_instances_have_no_common_prefill_speed():
    two = {"instances": [*PLAN["instances"], {**PLAN["instances"][0], "name": "b"}]}
    found = measured.speeds(two, [TRUTH, {**TRUTH, "name": "b"}], None)
    assert found["prefill_tokens_per_s"] is None
    assert set(found["instances"]) == {"a", "b"}


def test_the_plan_takes_the_speed_of_the_same_instance_and_model():
    def tier(instances):
        made = plan(
            host(1), profile="disk", measured={"disk": 1e9, "prefill_tokens_per_s": 1.0, "instances": instances}
        )
        return made["instances"][0]

    own = plan(host(1), profile="disk")["instances"][0]
    entry = {"model": own["model"], "tensor_parallel_size": 1, "prefill_tokens_per_s": 5000.0}
    fed = tier({own["name"]: entry})
    assert fed["tiers"]["disk"]["needed_bytes_per_s"] == 5000 * own["kv_bytes_per_token_stored"]
    assert "history" in fed["reasons"]["tiers"]
    # a record that does not tell the number of ranks yet
    old = tier({own["name"]: {key: value for key, value in entry.items() if key != "tensor_parallel_size"}})
    assert old["tiers"] == fed["tiers"]
    # another model, or the same one on two GPUs, said nothing about this one
    for change in ({"model": "/m/other"}, {"tensor_parallel_size": 2}):
        other = tier({own["name"]: {**entry, **change}})
        assert other["tiers"]["disk"]["needed_bytes_per_s"] == own["tiers"]["disk"]["needed_bytes_per_s"]


def test_endurance_at_the_rate_since_the_first_proof():
    first = measured.disk_writes(None, "S1", replace(SMART, data_written_bytes=int(690 * TERABYTE)), 0)
    later = measured.disk_writes({"disk_writes": first}, "S1", SMART, 10 * 86400)
    assert later == first == {"serial": "S1", "written_bytes": int(690 * TERABYTE), "at_s": 0}
    # 10 TB in 10 days, 2800 TB left
    days, basis = measured.endurance({"disk_writes": later}, "S1", SMART, "", 10 * 86400)
    assert days == pytest.approx(2800)
    assert "measured rate" in basis


@pytest.mark.parametrize(
    ("last", "smart", "words"),
    [
        (None, None, "no log"),
        (None, SMART, "first proof"),
        ({"disk_writes": {"serial": "OTHER", "written_bytes": 0, "at_s": 0}}, SMART, "first proof"),
        ({"disk_writes": {"serial": "S1", "written_bytes": 0, "at_s": 9 * 86400 + 1}}, SMART, "a day"),
        ({"disk_writes": {"serial": "S1", "written_bytes": SMART.data_written_bytes, "at_s": 0}}, SMART, "nothing"),
    ],
)
def test_endurance_that_is_not_measured_has_a_reason(last, smart, words):
    days, reason = measured.endurance(last, "S1", smart, "no log", 10 * 86400)
    assert days is None
    assert words in reason


@pytest.mark.parametrize(
    "first",
    [
        {"serial": "OTHER", "written_bytes": 1, "at_s": 1},
        {"serial": "S1", "written_bytes": SMART.data_written_bytes + 1, "at_s": 1},
        {"serial": "S1", "written_bytes": 1, "at_s": 1000},
    ],
)
def test_another_disk_or_a_clock_set_back_begins_anew(first):
    assert measured.disk_writes({"disk_writes": first}, "S1", SMART, 500)["at_s"] == 500
    assert measured.disk_writes({"disk_writes": first}, "S1", None, 500) is None


def test_the_plan_shows_days_or_the_reason():
    def disk(**given):
        return plan(host(1), profile="disk", **given)["host"]["disk"]

    assert disk()["endurance_days"] is None
    assert disk()["endurance_reason"]
    shown = disk(endurance=(2800.0, "the drive's own wear scale at the measured rate"))
    assert (shown["endurance_days"], shown["endurance_reason"]) == (
        2800.0, "the drive's own wear scale at the measured rate",
    )  # fmt: skip


@pytest.mark.parametrize(("direct_io", "used"), [(None, True), (True, True), (False, False)])
def test_a_partition_that_refuses_o_direct_is_not_asked_for_it(direct_io, used):
    made = plan(host(1), profile="disk", measured={"direct_io": direct_io})
    assert made["servers"][0]["use_odirect"] is used
    assert (json.loads(disk_adapter(made))["use_odirect"]) is used
    assert any(entry["code"] == "KVF-DISK-107" for entry in made["warnings"]) is not used


def disk_adapter(made):
    services.attach_commands(made)
    command = made["servers"][0]["command"]
    return command[command.index("--l2-adapter") + 1]


def test_a_disk_without_a_health_log_says_so(tmp_path):
    asked = []

    def run(argv, **_):
        asked.append(argv)
        return CommandResult(argv, 0, json.dumps({"critical_warning": 0}), "")

    assert smart_log("", run) == (None, "no cache disk to ask")
    assert smart_log("/dev/disk/by-id/nvme-none", run) == (None, "no cache disk to ask")
    assert asked == []
