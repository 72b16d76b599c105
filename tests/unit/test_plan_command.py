"""``kvfleet plan`` from files alone."""

import json

import pytest
from planner_hosts import LLAMA_8B, host
from typer.testing import CliRunner

from kvfleet import fleet
from kvfleet.cli import app
from kvfleet.core.findings import KvfleetError
from kvfleet.core.redact import clean
from kvfleet.exits import Exit

DISK = {"by_id": "/dev/disk/by-id/nvme-S1", "serial": "S1", "size_bytes": 1920383410176, "rotational": False}


@pytest.fixture
def files(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "host.json").write_text(json.dumps(host(2, disks=[DISK])))
    return tmp_path


def run(files, *arguments, model="model"):
    return CliRunner().invoke(
        app,
        ["plan", "--host", str(files / "host.json"), "--model", str(files / model), *arguments],
        standalone_mode=False,
    )


def sets(**values):
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def test_json_of_the_articles_machine(files):
    done = run(
        files, *sets(cache_disk_device=DISK["by_id"], cache_disk_serial="S1", kvfleet_gpu_memory_utilization=0.75),
        "--sessions", "100", "--context", "131072", "--format", "json",
    )  # fmt: skip
    made = json.loads(done.stdout)
    assert done.return_value == 0
    assert made["instances"][0]["name"] == "default"
    assert made["instances"][0]["tensor_parallel_size"] == 2
    assert made["instances"][0]["buffer_gib_per_gpu"] == 20
    assert made["instances"][0]["tiers"]["disk"]["pays"] == "unknown"
    assert made["release"]["id"]
    assert made["sessions"]["fits"]["disk"] is False
    assert made["servers"][0]["command"]


def test_table_says_why(files):
    done = run(files, *sets(kvfleet_profile="cpu"))
    assert done.return_value == 0
    for words in ("128 KiB", "buffer per GPU", "weights", "vLLM's default"):
        assert words in done.stdout


def test_bare_config_has_its_weights_computed(files):
    (files / "c.json").write_text(json.dumps(LLAMA_8B))
    bare = json.loads(run(files, *sets(kvfleet_profile="cpu"), "--format", "json", model="c.json").stdout)
    assert bare["instances"][0]["weights_bytes_per_rank"] == pytest.approx(8.03e9, rel=0.01)
    (files / "model" / "model.safetensors").write_bytes(b"12345678")
    whole = json.loads(run(files, *sets(kvfleet_profile="cpu"), "--format", "json").stdout)
    assert whole["instances"][0]["weights_bytes_per_rank"] == 4


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"kvfleet_profile": "disk"}, "KVF-DISK-100"),
        ({"cache_disk_device": "/dev/nvme1n1"}, "KVF-DISK-104"),
        ({"cache_disk_device": "/dev/disk/by-id/nvme-S2", "cache_disk_serial": "S2"}, "KVF-DISK-100"),
        ({"cache_disk_device": DISK["by_id"], "cache_disk_serial": "other"}, "KVF-DISK-105"),
        ({"kvfleet_profile": "cpu", "kvfleet_release": "no-such"}, "KVF-REL"),
        ({"kvfleet_profile": "cpu", "kvfleet_buffer_gib_per_gpu": 400}, "KVF-RAM-002"),
    ],
)
def test_errors_end_in_two_and_are_listed(files, values, code):
    done = run(files, *sets(**values), "--format", "json")
    assert done.return_value == 2
    assert [error for error in json.loads(done.stdout)["errors"] if error["code"].startswith(code)]
    assert code in run(files, *sets(**values)).stdout


def test_missing_model_and_host(files):
    done = run(files, *sets(kvfleet_profile="cpu"), "--format", "json", model="nothing")
    assert done.return_value == 2
    assert [error["code"] for error in json.loads(done.stdout)["errors"]] == ["KVF-MODEL-001"]
    (files / "host.json").write_text("{")
    assert isinstance(run(files).exception, KvfleetError)
    (files / "host.json").write_text('{"hostname": "x"}')
    assert "KVF-HOST-003" in str(run(files).exception)


def test_wrong_usage(files):
    for arguments in (["--sessions", "3"], ["--set", "nothing"], ["--set", "kvfleet_port=[1"], ["--set", "model=x"]):
        assert "BadParameter" in type(run(files, *arguments).exception).__name__


def test_result_of_the_module_is_a_host_too(files):
    (files / "host.json").write_text(json.dumps({"changed": False, "host": host(2)}))
    assert run(files, *sets(kvfleet_profile="cpu")).return_value == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"os_id": "centos", "os_version": "9", "os": "CentOS Stream 9"}, "KVF-HOST-001"),
        ({"os_id": None, "os": "Ubuntu 20.04.6 LTS"}, "KVF-HOST-001"),
        ({"python": "3.8.10"}, "KVF-HOST-002"),
    ],
)
def test_unsupported_systems(files, change, code):
    (files / "host.json").write_text(json.dumps(host(2, **change)))
    done = run(files, *sets(kvfleet_profile="cpu"), "--format", "json")
    assert code in {error["code"] for error in json.loads(done.stdout)["errors"]}


def test_supported_system_told_by_its_name_only(files):
    where = {key: value for key, value in host(2).items() if not key.startswith("os_")}
    for name in ("Ubuntu 22.04.4 LTS", "Ubuntu 24.04.1 LTS", "Debian GNU/Linux 12 (bookworm)"):
        (files / "host.json").write_text(json.dumps({**where, "os": name}))
        codes = {
            error["code"]
            for error in json.loads(run(files, *sets(kvfleet_profile="cpu"), "--format", "json").stdout)["errors"]
        }
        assert "KVF-HOST-001" not in codes


def test_documents_that_nest_without_end(files):
    (files / "deep.json").write_text("[" * 100_000)
    done = run(files, *sets(kvfleet_profile="cpu"), "--format", "json", model="deep.json")
    assert "KVF-MODEL-003" in {error["code"] for error in json.loads(done.stdout)["errors"]}
    (files / "host.json").write_text("[" * 100_000)
    assert "KVF-HOST-003" in str(run(files).exception)


def test_sessions_longer_than_a_request_are_said(files):
    done = run(
        files, *sets(kvfleet_profile="cpu", kvfleet_max_model_len=8192), "--sessions", "2", "--context", "8193",
        "--format", "json",
    )  # fmt: skip
    assert "KVF-MODEL-022" in {warning["code"] for warning in json.loads(done.stdout)["warnings"]}


@pytest.fixture
def planned(files, monkeypatch):
    """``kvfleet plan -i``, with one planned and one refused host as a run returns them; says what it was asked for."""
    asked = {}

    def plan_of(*arguments):
        return clean(json.loads(run(files, *arguments, "--format", "json").stdout))

    def answer(action, inventory, **options):
        asked.update(options["variables"], action=action)
        words = ("--sessions", "3", "--context", "131072") if "host_plan_sessions" in options["variables"] else ()
        good = plan_of(*sets(kvfleet_profile="cpu", kvfleet_max_model_len=8192), *words)
        bad = plan_of(*sets(kvfleet_profile="cpu", kvfleet_buffer_gib_per_gpu=400))
        hosts = {
            "gpu-one": fleet.HostResult("gpu-one", fleet.Verdict.PLANNED, plan=good),
            "gpu-two": fleet.HostResult("gpu-two", fleet.Verdict.REFUSED, reasons=("KVF-RAM-002",), plan=bad),
            "gpu-off": fleet.HostResult("gpu-off", fleet.Verdict.UNREACHABLE),
        }
        return fleet.FleetResult(action, str(inventory), Exit.REFUSED, hosts, 1.0, True)

    monkeypatch.setattr(fleet, "run", answer)

    def ask(*arguments):
        return CliRunner().invoke(app, ["plan", "-i", str(files), *arguments], standalone_mode=False)

    return ask, asked


def test_an_inventorys_plans_show_their_numbers(planned):
    ask, asked = planned
    done = ask("--sessions", "3", "--context", "131072")
    assert done.exception is None
    assert asked == {"action": fleet.Action.PLAN, "host_plan_sessions": 3, "host_plan_context": 131072}
    one, two = done.stdout.split("\ngpu-two ", 1)
    assert one.startswith("gpu-one ")
    for words in ("128 KiB", "buffer per GPU", "KV pool per rank", "3 x 131,072 tokens", "held by", "KVF-MODEL-022"):
        assert words in one
    assert "400 GiB" in two
    # an error is a reason of the result, once
    assert done.stdout.count("KVF-RAM-002") == 1
    assert done.return_value == 2


def test_an_inventorys_plans_are_whole_as_json(planned):
    ask, _ = planned
    result = json.loads(ask("--json").stdout.splitlines()[-1])
    assert result["kind"] == "result"
    assert result["hosts"]["gpu-one"]["plan"]["instances"][0]["gpu_kv_tokens"] > 0
    assert result["hosts"]["gpu-off"]["plan"] is None


def test_options_that_would_do_nothing_are_refused(planned, files):
    ask, asked = planned
    for words in (["--format", "json"], ["--format", "table"], ["--model", str(files)], ["--releases", "x.yml"]):
        done = ask(*words)
        assert "BadParameter" in type(done.exception).__name__
        assert f"{words[0]} only with --host" in str(done.exception)
    for words in (["--limit", "h"], ["--json"]):
        assert f"{words[0]} only with -i" in str(run(files, *words).exception)
    assert asked == {}
