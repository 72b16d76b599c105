"""Sizes of the profiles' runs, the reading of real result files, and the verdict."""

import itertools
import json
from pathlib import Path

import pytest

from kvfleet.core import bench
from kvfleet.core.bench import Capacity, Speed, Thresholds
from kvfleet.core.findings import KvfleetError

DATA = Path(__file__).parents[1] / "data" / "bench"

DEMO = Capacity(8192, 32768, 131072, 256, 7680, 4)
#: an H200 with Llama-3-8B's shape: 128 KiB a token, pool of about 110 GiB, 20 GiB RAM, 900 GiB disk
H200 = Capacity(900_000, 163_840, 7_372_800, 256, 32768, 32)


def recorded():
    return json.loads((DATA / "prefix_repetition.json").read_text())


def recorded_run():
    return bench.Run("a", "warm", "prefix_repetition", 4, 1, 8, 11, prefixes=2, prefix_tokens=768, suffix_tokens=16)


def test_recorded_result_gives_the_tools_own_figures():
    raw = recorded()
    figures = bench.parse_result(json.dumps(raw), recorded_run())
    assert figures["completed"] == 4
    assert figures["requests_per_s"] == raw["request_throughput"]
    assert figures["output_tokens"] == 32
    # the tool's own means and medians, from the same requests
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        assert figures[ours]["mean"] == pytest.approx(raw[f"mean_{theirs}_ms"])
        assert figures[ours]["p50"] == pytest.approx(raw[f"p50_{theirs}_ms"])


def test_percentiles_beyond_the_sample_are_not_claimed():
    figures = bench.parse_result(json.dumps(recorded()), recorded_run())
    assert figures["ttft"]["p99"] is None
    assert figures["ttft"]["p95"] is None
    assert figures["ttft"]["max"] == pytest.approx(max(recorded()["ttfts"]) * 1000)
    assert figures["ttft"]["samples"] == 4
    assert bench.summary([float(i) for i in range(100)])["p99"] == pytest.approx(98.01)


def test_an_interrupted_file_is_no_result():
    text = json.dumps(recorded())
    with pytest.raises(KvfleetError, match="KVF-BENCH-020"):
        bench.parse_result(text[: len(text) // 2], recorded_run())
    with pytest.raises(KvfleetError, match="KVF-BENCH-020"):
        bench.parse_result("[]", recorded_run())


@pytest.mark.parametrize(("completed", "failed"), [(0, 4), (3, 1), (3, 0)])
def test_missing_or_failed_requests_fail_although_the_tool_ends_with_zero(completed, failed):
    raw = {
        **recorded(),
        "completed": completed,
        "failed": failed,
        "errors": ["", "", "Traceback\n\nInternal Server Error"],
    }
    with pytest.raises(KvfleetError, match="KVF-BENCH-021") as error:
        bench.parse_result(json.dumps(raw), recorded_run())
    assert "Internal Server Error" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"total_output_tokens": 0},
        {"request_throughput": 0.0},
        {"output_throughput": float("nan")},
        {"duration": 0},
        {"ttfts": [0.0, 0.0, 0.0, 0.0]},
    ],
)
def test_zero_and_nan_are_no_measurement(change):
    with pytest.raises(KvfleetError, match="KVF-BENCH-022"):
        bench.parse_result(json.dumps({**recorded(), **change}), recorded_run())


def test_smoke_overflows_the_pool_and_fits_the_tiers():
    plan = bench.smoke_runs(DEMO, Speed(540, 52), 1, 70, may_clear=True)
    cold, warm, many, disk = plan.runs
    assert cold.working_set_tokens > DEMO.pool_tokens
    assert cold.requests * cold.prompt_tokens < DEMO.ram_tokens
    assert cold.prefix_tokens % DEMO.chunk_tokens == 0
    assert (warm.concurrency, many.concurrency, disk.concurrency) == (1, 4, 4)
    assert [run.clear_ram for run in plan.runs] == [False, False, False, True]
    assert plan.notes == ()
    # the same prompts in all three: same seed, prefixes and lengths
    assert len({(r.seed, r.requests, r.prefixes, r.prefix_tokens, r.suffix_tokens) for r in plan.runs}) == 1


@pytest.mark.parametrize(("room", "speed"), [(DEMO, Speed(540, 52)), (DEMO, Speed(320, 60)), (H200, Speed(18000, 6))])
def test_smoke_stays_within_its_budget(room, speed):
    plan = bench.smoke_runs(room, speed, 1, 70)
    seconds = 0.0
    for run in plan.runs:
        prompt_s = run.prompt_tokens / speed.prefill_tokens_per_s * (1 if run.phase == "populate" else 0.1)
        seconds += (
            run.requests * (prompt_s + run.output_tokens * speed.decode_ms_per_token / 1000) / run.concurrency**0.5
        )
    assert seconds < 75


def test_a_slow_host_gets_fewer_prefixes_and_a_note():
    plan = bench.smoke_runs(DEMO, Speed(60, 200), 1, 30)
    assert plan.runs[0].working_set_tokens < DEMO.pool_tokens
    assert "smoke_benchmark_budget_s" in plan.notes[0]


def test_every_smoke_request_fits_the_model():
    for length in (512, 1024, 4096):
        room = Capacity(8192, 32768, 0, 256, length, 4)
        for run in bench.smoke_runs(room, Speed(540, 52), 1, 70).runs:
            bench.check_run(run, room)
    with pytest.raises(KvfleetError, match="KVF-BENCH-012"):
        bench.smoke_runs(Capacity(8192, 0, 0, 256, 300, 4), Speed(540, 52), 1, 70)


def test_article_is_the_articles_load():
    plan = bench.article_runs(Capacity(32768, 163840, 0, 256, 32768, 32), 1)
    random_runs = [run for run in plan.runs if run.dataset == "random"]
    assert [run.concurrency for run in random_runs] == [1, 4, 8, 16, 32]
    assert {(run.requests, run.input_tokens, run.output_tokens) for run in random_runs} == {(200, 2048, 128)}
    # no random prompt may be served by what an earlier run left
    assert len({run.seed for run in random_runs}) == 5
    warm = [run for run in plan.runs if run.phase == "warm"]
    assert [run.concurrency for run in warm] == [1, 4, 8, 16, 32]
    assert {(run.prefixes, run.prefix_tokens, run.suffix_tokens) for run in warm} == {(50, 2000, 48)}
    assert plan.scale == 1
    assert plan.notes == ()


def test_a_scaled_article_says_so():
    plan = bench.article_runs(DEMO, 1, scale=0.2)
    assert "scale 0.2" in plan.notes[0]
    assert any("max_num_seqs is 4" in note and "8, 16, 32" in note for note in plan.notes)
    assert {run.requests for run in plan.runs if run.dataset == "random"} == {40}
    # 410 tokens, 362 of them prefix: 29 prefixes exceed the pool of 8192 tokens by a quarter, two prompts each
    assert {(run.prefixes, run.prefix_tokens, run.requests) for run in plan.runs if run.prefixes} == {(29, 362, 58)}
    for run in plan.runs:
        bench.check_run(run, DEMO)


def test_a_large_pool_gets_prefixes_that_exceed_it():
    plan = bench.article_runs(H200, 1)
    warm = plan.runs[-1]
    # the RAM and disk tiers hold it; 200 requests of the article would all fit the pool
    assert warm.working_set_tokens > 1.2 * H200.pool_tokens
    assert warm.requests == warm.prefixes
    assert any("exceed the pool of 900000" in note for note in plan.notes)
    small_tier = Capacity(900_000, 100_000, 0, 256, 32768, 32)
    assert any("own cache serves part" in note for note in bench.article_runs(small_tier, 1).notes)


def test_the_articles_repeats_come_from_disk_where_there_is_one():
    cleared = {}
    for name, room in (("disk", DEMO), ("cpu", bench.replace(DEMO, disk_tokens=0))):
        plan = bench.article_runs(room, 1, 0.2, may_clear=True)
        cleared[name] = [run.name for run in plan.runs if run.clear_ram]
        assert any("RAM tier is emptied" in note for note in plan.notes) is bool(cleared[name])
    assert cleared == {"disk": ["rag-c1", "rag-c4", "rag-c8", "rag-c16", "rag-c32"], "cpu": []}
    assert not any(run.clear_ram for run in bench.article_runs(DEMO, 1, 0.2).runs)


def test_a_scale_of_nothing_is_refused():
    with pytest.raises(KvfleetError, match="smoke_benchmark_article_scale"):
        bench.article_runs(DEMO, 1, scale=0)


def test_long_leaves_out_what_does_not_fit():
    plan = bench.long_runs(Capacity(100_000, 1, 1, 256, 65536, 8), 1)
    assert [run.name for run in plan.runs] == ["cold-32k", "warm-32k"]
    assert "131072" in plan.notes[0]
    cleared = bench.long_runs(Capacity(300_000, 1, 1, 256, 200_000, 8), 1, may_clear=True).runs
    assert [run.name for run in cleared if run.clear_ram] == ["disk-32k", "disk-128k"]
    with pytest.raises(KvfleetError, match="KVF-BENCH-012"):
        bench.long_runs(DEMO, 1)


def test_custom_runs_are_checked_before_anything_is_sent():
    good = {"dataset": "random", "requests": 4, "output_tokens": 8, "input_tokens": 100}
    assert bench.custom_runs([good], DEMO, 5).runs[0].seed == 5
    with pytest.raises(KvfleetError, match="inputtokens"):
        bench.custom_runs([{**good, "inputtokens": 3}], DEMO, 5)
    with pytest.raises(KvfleetError, match="max_model_len 7680"):
        bench.custom_runs([{**good, "input_tokens": 8000}], DEMO, 5)
    with pytest.raises(KvfleetError, match="KVF-BENCH-016"):
        bench.custom_runs([], DEMO, 5)


def test_arguments_keep_the_tool_offline_and_the_first_prompt_cold():
    arguments = bench.bench_arguments(recorded_run(), "http://127.0.0.1:8000", "chat", "/models/m", "salt-1", "/tmp/r")
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--tokenizer"] == "/models/m"
    assert pairs["--model"] == "chat"
    assert pairs["--ready-check-timeout-sec"] == "0"
    assert json.loads(pairs["--extra-body"]) == {"cache_salt": "salt-1"}
    assert pairs["--prefix-repetition-num-prefixes"] == "2"


# -- verdict ---------------------------------------------------------------------------------------------------------


def truth(**times):
    return [{"name": "a", "ttft_ms": {"cold": 1000, "ram": 100, "disk": 200, **times}, "findings": []}]


def load(**figures):
    ttft = {"mean": 50, "p99": 80, "max": 90, "samples": 200}
    entry = {"ttft": ttft, "tpot": {"mean": 10}, "requests_per_s": 5.0, **figures}
    populate = {"run": {"name": "cold-c1", "phase": "populate"}, "figures": {**entry, "ttft": {**ttft, "p99": 99999}}}
    warm = {"run": {"name": "warm-c16", "phase": "warm"}, "figures": entry}
    return {"instances": [{"name": "a", "runs": [populate, warm], "findings": []}]}


def test_a_good_proof_passes_and_leads_with_the_slowest_tier():
    verdict = bench.judge(truth(), [], load(), Thresholds())
    assert verdict["verdict"] == "pass"
    assert verdict["deciding"]["value"] == 5.0
    assert "disk 200 ms" in verdict["deciding"]["message"]


@pytest.mark.parametrize(
    ("times", "tier", "value", "limit"), [({"ram": 700}, "ram", 1.43, 2.0), ({"disk": 900}, "disk", 1.11, 1.3)]
)
def test_a_tier_that_hits_but_is_slow_fails(times, tier, value, limit):
    verdict = bench.judge(truth(**times), [], load(), Thresholds())
    assert verdict["verdict"] == "fail"
    assert verdict["deciding"]["figure"] == f"ttft cold/{tier}"
    assert (verdict["deciding"]["value"], verdict["deciding"]["limit"]) == (value, limit)


@pytest.mark.parametrize(
    ("limits", "figure"),
    [
        ({"ttft_p99_ms": 79}, "ttft_p99_ms"),
        ({"tpot_mean_ms": 9.9}, "tpot_mean_ms"),
        ({"requests_per_s": 5.1}, "requests_per_s"),
    ],
)
def test_thresholds_decide_where_set(limits, figure):
    assert bench.judge(truth(), [], load(), Thresholds(**limits))["deciding"]["figure"] == figure
    loose = {name: value * (0.5 if name == "requests_per_s" else 2) for name, value in limits.items()}
    assert bench.judge(truth(), [], load(), Thresholds(**loose))["verdict"] == "pass"


def test_a_sample_too_small_for_p99_is_judged_by_its_slowest():
    small = load(ttft={"mean": 50, "p99": None, "max": 90, "samples": 14})
    verdict = bench.judge(truth(), [], small, Thresholds(ttft_p99_ms=85))
    assert verdict["verdict"] == "fail"
    assert "slowest TTFT of 14" in verdict["deciding"]["message"]


def test_findings_of_truth_units_and_load_fail():
    numbers = {"hit_tokens": 0, "expected_tokens": 1792}
    finding = {"code": "KVF-BENCH-007", "message": "m", "fix": "f", "numbers": numbers}
    broken = truth()
    broken[0]["findings"] = [finding]
    verdict = bench.judge(broken, [], None, Thresholds())
    assert verdict["verdict"] == "fail"
    assert verdict["deciding"] == {"figure": "hit_tokens", "value": 0, "limit": 1792, "message": "m"}
    assert bench.judge(truth(), [finding], load(), Thresholds())["verdict"] == "fail"
    failed = load()
    failed["instances"][0]["findings"] = [finding]
    assert bench.judge(truth(), [], failed, Thresholds())["verdict"] == "fail"


def test_a_load_that_did_not_run_is_no_pass():
    assert bench.judge(truth(), [], None, Thresholds())["verdict"] == "fail"
    assert bench.judge([], [], load(), Thresholds())["verdict"] == "fail"


def disk_truth(hits):
    return {
        "name": "a", "profile": "disk", "findings": [], "ttft_ms": {"cold": 900.0, "ram": 90.0},
        "hit_tokens": {"ram": 1024, "disk": hits}, "bytes": {"disk": 4096},
    }  # fmt: skip


def disk_load(hits, served_by, loaded=None):
    run = {
        "run": {"name": "warm-c1", "phase": "warm"},
        "tokens": {"tier_disk": hits, "external": hits if loaded is None else loaded},
        "disk": {"hit_bytes": 64 * 1024**2, "read_bytes": 1024**2, "served_by": served_by},
    }
    return {"instances": [{"name": "a", "runs": [run]}]}


@pytest.mark.parametrize(
    ("truth_hits", "load_hits", "served_by", "expected"),
    [
        (None, 0, None, {"KVF-BENCH-048"}),
        (1024, 0, None, set()),
        (None, 512, "device", set()),
        (1024, 512, "page cache", {"KVF-BENCH-049"}),
    ],
)
def test_a_disk_that_was_not_read_is_not_proved(truth_hits, load_hits, served_by, expected):
    verdict = bench.judge([disk_truth(truth_hits)], [], disk_load(load_hits, served_by), Thresholds())
    assert {reason["code"] for reason in verdict["reasons"]} == expected
    assert verdict["verdict"] == ("degrade" if expected else "pass")


def test_a_lookup_proves_no_disk():
    verdict = bench.judge([disk_truth(None)], [], disk_load(512, "device", loaded=0), Thresholds())
    assert [reason["code"] for reason in verdict["reasons"]] == ["KVF-BENCH-048"]


def test_a_host_that_went_away_fails_with_what_was_said():
    for truth, load in (([], None), ([disk_truth(1024)], {"unreachable": True})):
        verdict = bench.judge(truth, [], load, Thresholds(), gone="Connection reset by peer")
        assert [reason["code"] for reason in verdict["reasons"]] == ["KVF-BENCH-047"]
        assert "Connection reset" in verdict["deciding"]["message"]


@pytest.mark.parametrize(("tier", "code"), [("ram", "KVF-BENCH-006"), ("disk", "KVF-BENCH-007")])
def test_a_tier_that_did_not_serve_is_not_called_slow(tier, code):
    finding = {"code": code, "message": "delivered 0 tokens", "fix": "look", "numbers": {}}
    truth = {**disk_truth(1024), "ttft_ms": {"cold": 900.0, tier: 890.0}, "findings": [finding]}
    verdict = bench.judge([truth], [], None, Thresholds())
    assert [reason["code"] for reason in verdict["reasons"]] == [code]
