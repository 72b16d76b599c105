"""One instance under load: real result files behind a fake tool, counters of a fake engine, the host's devices."""

import json
import random
from pathlib import Path

import pytest
from fake_stack import FakeCache, FakeEngine, FakeStack

from kvfleet.core import bench, load
from kvfleet.core.findings import KvfleetError

RECORDED = json.loads((Path(__file__).parents[1] / "data/bench/prefix_repetition.json").read_text())


class Host:
    """Devices: the disk tier's reads follow what the test says."""

    def __init__(self):
        self.root_device = 1
        self.seen_devices = set()
        self.seen_direct = set()
        self.read_bytes = 0
        self.root_used = 10**9
        self.written_bytes = 0

    def __call__(self):
        return {"root_used_bytes": self.root_used}

    def cache_disk_counters(self):
        return {"read_bytes": self.read_bytes, "written_bytes": self.written_bytes}


class Tool:
    """`vllm bench serve`: writes the recorded result, as asked; `during` is what happens meanwhile."""

    def __init__(self, directory, during=lambda: None):
        self.directory = directory
        self.during = during
        self.calls = []
        self.text = None
        self.status = 0

    def run(self, arguments, timeout_s):
        self.calls.append(arguments)
        self.during()
        options = dict(zip(arguments, arguments[1:], strict=False))  # noqa: RUF007
        raw = {**RECORDED, "completed": int(options["--num-prompts"])}
        target = self.directory / options["--result-filename"]
        target.write_text(json.dumps(raw) if self.text is None else self.text)
        return self.status

    def output(self):
        return "tool says"

    def last_line(self):
        return "the tool's last line"


class Sampler:
    def __init__(self, probe):
        self.probe = probe
        self.samples = []

    def __enter__(self):
        self.samples.append({"at_s": 0.0, **self.probe()})
        return self

    def __exit__(self, *_):
        self.samples.append({"at_s": 1.0, **self.probe()})


@pytest.fixture
def setting(tmp_path):
    stack = FakeStack()
    host, tool = Host(), Tool(tmp_path)
    # the recorded result has 3138 prompt tokens; the engine books them
    tool.during = lambda: stack.sources.update(local_compute=stack.sources["local_compute"] + 3138)
    instance = {**stack.instance(), "tensor_parallel_size": 1, "buffer_gib_per_gpu": 1}
    server = {**stack.server(), "base_path": str(tmp_path)}
    host.root_device = -1
    runner = load.InstanceLoad(
        instance,
        server,
        FakeEngine(stack),
        FakeCache(stack),
        "/models/tiny",
        tool,
        Sampler,
        host,
        tmp_path,
        60,
        settle_limit_s=2,
        sleep=stack.sleep,
        clock=stack.clock,
        rng=random.Random(3),  # noqa: S311
    )
    return stack, host, tool, runner


def plan(*runs):
    return bench.LoadPlan("smoke", runs, ())


SIZES = {"prefixes": 2, "prefix_tokens": 64, "suffix_tokens": 16}
COLD = bench.Run("cold-c1", "populate", "prefix_repetition", 4, 1, 8, 11, **SIZES)
WARM = bench.Run("warm-c1", "warm", "prefix_repetition", 4, 1, 8, 11, **SIZES)


def codes(result):
    return [finding["code"] for finding in result["findings"]]


def test_runs_in_order_with_figures_and_counters(setting):
    _, _, tool, runner = setting
    result = runner.run(plan(COLD, WARM))
    assert codes(result) == []
    assert [entry["run"]["name"] for entry in result["runs"]] == ["cold-c1", "warm-c1"]
    assert result["runs"][0]["tokens"]["computed"] == 3138
    assert result["runs"][0]["figures"]["ttft"]["samples"] == 4
    assert len(tool.calls) == 2
    assert result["shape"] == {"prefixes": 2, "prefix_tokens": 64, "output_tokens": 8}


def test_all_runs_of_a_load_share_a_salt_that_no_user_has(setting):
    _, _, tool, runner = setting
    result = runner.run(plan(COLD, WARM))
    bodies = {call[call.index("--extra-body") + 1] for call in tool.calls}
    assert bodies == {json.dumps({"cache_salt": result["salt"]}, separators=(",", ":"))}
    assert result["salt"].startswith("kvfleet-proof-")


def test_random_runs_never_share_a_salt(setting):
    _, _, tool, runner = setting
    runs = [bench.Run(f"random-c{n}", "single", "random", 4, n, 8, 11, input_tokens=80) for n in (1, 2)]
    runner.run(plan(*runs))
    assert len({call[call.index("--extra-body") + 1] for call in tool.calls}) == 2


def test_a_tool_that_fails_ends_the_load_and_is_not_the_services_fault(setting):
    _, _, tool, runner = setting
    tool.status = 1
    result = runner.run(plan(COLD, WARM))
    assert codes(result) == ["KVF-BENCH-023"]
    assert "the tool's last line" in result["findings"][0]["message"]
    assert len(tool.calls) == 1


def test_a_stale_result_file_is_never_read(setting, tmp_path):
    _, _, tool, runner = setting
    (tmp_path / "cold-c1.json").write_text(json.dumps(RECORDED))
    tool.run = lambda *_: 0
    assert codes(runner.run(plan(COLD))) == ["KVF-BENCH-023"]


def test_a_file_cut_in_the_middle_is_found(setting):
    _, _, tool, runner = setting
    tool.text = json.dumps(RECORDED)[:700]
    assert codes(runner.run(plan(COLD, WARM))) == ["KVF-BENCH-020"]


def test_a_server_that_dies_in_the_middle_is_found(setting):
    stack, _, _, runner = setting
    page = stack.engine_page
    calls = []

    def dying():
        calls.append(1)
        if len(calls) > 3:
            raise load.HttpFailure("refused", "nobody listens")
        return page()

    stack.engine_page = dying
    assert codes(runner.run(plan(COLD))) == ["KVF-BENCH-001"]


def test_disk_hits_that_the_device_did_not_read_are_the_page_caches(setting):
    stack, host, tool, runner = setting

    def hits():
        stack.sources["external_kv_transfer"] += 3138
        stack.tier_hits.setdefault(runner.salt, {"requested": 0, "l1": 0, "l2": 0})["l2"] += 1024

    tool.during = hits
    result = runner.run(plan(WARM))
    # 1024 tokens of 1 KiB each
    assert result["runs"][0]["disk"]["hit_bytes"] == 1024 * 1024
    assert result["runs"][0]["disk"]["served_by"] == "page cache"

    def hits_from_the_device():
        hits()
        host.read_bytes += 1024 * 1024

    tool.during = hits_from_the_device
    assert runner.run(plan(WARM))["runs"][0]["disk"]["served_by"] == "device"


def test_cache_files_on_the_root_file_system_are_found(setting, tmp_path):
    _, host, _, runner = setting
    host.root_device = tmp_path.stat().st_dev
    assert codes(runner.run(plan(COLD))) == ["KVF-BENCH-034"]


def test_an_open_cache_file_on_the_root_file_system_is_found(setting):
    _, host, _, runner = setting
    host.seen_devices = {host.root_device}
    assert codes(runner.run(plan(COLD))) == ["KVF-BENCH-034"]


def grow(stack, host, by, written):
    def writes():
        stack.sources["local_compute"] += 3138
        host.root_used += by
        host.written_bytes += written

    return writes


def test_cache_writes_that_land_on_the_root_file_system_are_found(setting):
    stack, host, tool, runner = setting
    # 3138 tokens of 1 KiB were stored, none of them on the cache's device
    tool.during = grow(stack, host, 600 * 1024**2, 0)
    assert codes(runner.run(plan(COLD))) == ["KVF-BENCH-035"]


def test_what_others_write_to_the_root_file_system_is_only_noted(setting):
    stack, host, tool, runner = setting
    tool.during = grow(stack, host, 600 * 1024**2, 3138 * 1024)
    result = runner.run(plan(COLD))
    assert codes(result) == []
    assert any("grew by 600 MiB" in note for note in result["notes"])


def test_the_ram_tier_is_emptied_once_its_chunks_are_on_disk(setting):
    stack, _, _, runner = setting
    stack.ram["x", (1,)] = True
    runner.run(plan(COLD, bench.replace(WARM, clear_ram=True)))
    assert stack.ram == {}


def test_stores_that_never_complete_are_not_waited_for(setting, monkeypatch):
    """LMCache counts a failed store as submitted only."""
    stack, _, _, runner = setting
    runner.settle_limit_s = 600
    page = stack.cache_page

    def failed_stores():
        name = "lmcache_mp_l2_store_submitted_objects_chunks_total"
        return f'{page()}\n{name}{{cache_salt="{runner.salt}"}} 3'

    monkeypatch.setattr(stack, "cache_page", failed_stores)
    started = stack.clock()
    runner.run(plan(COLD, bench.replace(WARM, clear_ram=True)))
    assert load.STILL_S <= stack.clock() - started < 2 * load.STILL_S


def test_a_load_without_a_truth_check_assumes_a_slow_host():
    room = bench.Capacity(8192, 32768, 0, 256, 7680, 4)
    made = load.plan_runs("smoke", room, None, 1, 70, False, 1, ())
    assert made.runs[0].requests * made.runs[0].prompt_tokens / 300 < 70


def test_sizes_of_an_earlier_load_are_kept_while_they_fit():
    room = bench.Capacity(8192, 32768, 0, 256, 7680, 4)
    shape = {"prefixes": 12, "prefix_tokens": 1024, "output_tokens": 9}
    kept = load.plan_runs("smoke", room, bench.Speed(5000, 5), 1, 70, False, 1, (), shape)
    assert bench.shape_of(kept) == shape
    # a pool that grew would hold that working set
    bigger = bench.Capacity(65536, 262144, 0, 256, 7680, 4)
    assert bench.shape_of(load.plan_runs("smoke", bigger, bench.Speed(5000, 5), 1, 70, False, 1, (), shape)) != shape


def test_profiles_make_their_own_loads():
    room = bench.Capacity(8192, 32768, 0, 256, 7680, 4)
    assert load.plan_runs("article", room, None, 1, 70, False, 0.2, ()).scale == 0.2
    with pytest.raises(KvfleetError, match="KVF-BENCH-012"):
        load.plan_runs("long", room, None, 1, 70, False, 1, ())
    custom = [{"dataset": "random", "requests": 2, "output_tokens": 4, "input_tokens": 50}]
    assert load.plan_runs("custom", room, None, 1, 70, False, 1, custom).runs[0].requests == 2


def test_a_disk_tier_that_no_warm_run_used_is_said(setting):
    _, _, _, runner = setting
    assert any("nothing about the disk tier" in note for note in runner.run(plan(COLD, WARM))["notes"])
