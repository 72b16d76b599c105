"""Results on disk, and what earlier ones say about a new one."""

import json

import pytest
import sample_results

from kvfleet.core import bench, history
from kvfleet.core.findings import KvfleetError


def passing(at, factor=1.0, profile="cpu", earlier=(), host="h"):
    return sample_results.record(host, at, profile, factor=factor, earlier=earlier)


def test_results_are_never_overwritten(tmp_path):
    record = passing("20261129T090000Z")
    first = history.store(tmp_path, record)
    before = first.read_bytes()
    second = history.store(tmp_path, {**record, "verdict": "fail"})
    assert first.read_bytes() == before
    assert (first.name, second.name) == (
        "20261129T090000Z-cu13-0.32.0-0.5.6.json",
        "20261129T090000Z-cu13-0.32.0-0.5.6.2.json",
    )
    assert [r["verdict"] for r in history.load_records(tmp_path)] == ["pass", "fail"]
    assert not list(tmp_path.glob("*/.*"))


def test_a_host_name_cannot_leave_the_directory(tmp_path):
    path = history.store(tmp_path / "results", {**passing("20261129T090000Z"), "host": "../../etc"})
    assert (tmp_path / "results") in path.parents


def test_a_directory_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KvfleetError, match="smoke_benchmark_results_dir"):
        history.store(tmp_path / "file", passing("20261129T090000Z"))


def test_half_written_and_foreign_files_are_left_out(tmp_path):
    good = history.store(tmp_path, passing("20261129T090000Z"))
    (good.parent / "20261129T090001Z-x.json").write_text(good.read_text()[:500])
    (good.parent / "20261129T090002Z-x.json").write_text("[1]")
    (good.parent / "20261129T090003Z-x.json").write_text(json.dumps({"schema": 99, "host": "h"}))
    assert len(history.load_records(tmp_path)) == 1


def test_a_clock_that_jumped_back_keeps_the_order_of_times(tmp_path):
    for at in ("20261129T100000Z", "20261129T090000Z"):
        history.store(tmp_path, passing(at))
    assert [r["time"] for r in history.load_records(tmp_path)] == ["20261129T090000Z", "20261129T100000Z"]


def test_plan_is_kept_without_environments_and_commands():
    text = json.dumps(history.public_plan(sample_results.plan("disk", "cu13-0.32.0-0.5.6")))
    assert "canary" not in text
    assert '"gpu_kv_tokens": 32768' in text


def test_a_host_as_fast_as_before_has_not_regressed():
    earlier = [passing(f"2026112{day}T090000Z", factor=1 + day / 200) for day in range(5)]
    changes = history.regressions(passing("20261129T090000Z", factor=1.01), earlier)
    assert changes
    assert not any(change.regressed for change in changes)


def test_a_slower_host_has_regressed_and_degrades():
    earlier = [passing(f"2026112{day}T090000Z") for day in range(5)]
    now = passing("20261129T090000Z", factor=1.8, earlier=earlier)
    assert now["verdict"] == "degrade"
    assert now["deciding"]["value"] is not None
    changes = [change for change in now["changes"] if change["figure"] == "requests per second"]
    # 1.8 times slower is a loss of 1 - 1/1.8 of the rate
    assert all(change["worse"] == pytest.approx(1 - 1 / 1.8) for change in changes)
    assert {reason["code"] for reason in now["reasons"]} == {"KVF-BENCH-044"}


def test_tolerance_follows_the_observed_spread():
    calm = [passing(f"2026112{day}T090000Z") for day in range(5)]
    wild = [passing(f"2026112{day}T090000Z", factor=1 + 0.3 * day) for day in range(5)]
    now = passing("20261129T090000Z", factor=1.7)

    def tolerance(earlier):
        return max(change.tolerance for change in history.regressions(now, earlier))

    assert tolerance(wild) > 1.5 * tolerance(calm)


def test_only_comparable_passing_results_are_a_baseline():
    good = passing("20261120T090000Z")
    assert history.regressions(passing("20261129T090000Z", factor=3), [{**good, "verdict": "fail"}]) == []
    assert history.regressions(passing("20261129T090000Z", factor=3), [{**good, "host": "other"}]) == []
    assert history.regressions(passing("20261129T090000Z", factor=3), [{**good, "profile": "article"}]) == []
    shorter = json.loads(json.dumps(good))
    for run in shorter["load"]["instances"][0]["runs"]:
        run["run"]["requests"] -= 1
    assert history.regressions(passing("20261129T090000Z", factor=3), [shorter]) == []
    assert history.regressions(passing("20261129T090000Z", factor=3), [good])


def test_a_patch_release_stays_in_the_line_a_minor_does_not():
    record = passing("20261129T090000Z")
    patch, minor = json.loads(json.dumps(record)), json.loads(json.dumps(record))
    patch["plan"]["release"]["vllm"] = "0.32.7"
    minor["plan"]["release"]["vllm"] = "0.33.0"
    assert history.comparable(record, patch)
    assert not history.comparable(record, minor)


def test_offload_that_pays():
    base = passing("20261127T080000Z", profile="gpu")
    found = history.payoff(passing("20261129T090000Z"), [base])
    assert found.state == "pays"
    # 16.1 against 11.73 requests per second at 16
    assert found.ratio == pytest.approx(16.1 / 11.73)


def test_a_disk_tier_slower_than_computing_costs_although_ram_pays():
    base = passing("20261127T080000Z", profile="gpu")
    now = json.loads(json.dumps(passing("20261129T090000Z", profile="disk")))
    runs = now["load"]["instances"][0]["runs"]
    from_disk = json.loads(json.dumps(next(run for run in runs if run["run"]["name"] == "warm-c16")))
    from_disk["run"].update(name="disk-c16", clear_ram=True)
    from_disk["figures"]["requests_per_s"] = 5.0
    assert history.payoff(now, [base]).state == "pays"
    runs.append(from_disk)
    found = history.payoff(now, [base])
    assert found.state == "costs"
    assert found.run == "disk-c16"
    assert history.better_profile(now, [base]) == "gpu"


def test_a_tiers_better_days_do_not_keep_a_host_on_it():
    days = ("20261125T080000Z", "20261126T080000Z")
    disk, gpu = passing(days[0], profile="disk"), passing(days[1], profile="gpu")
    # disk was the best of all and now serves a third
    now = passing("20261129T090000Z", profile="disk", factor=3.0)
    assert history.payoff(now, [disk, gpu]).state == "costs"
    assert history.better_profile(now, [disk, gpu]) == "gpu"
    # a profile's newest result counts, and one that is worse still is no way out
    slower = passing("20261127T080000Z", profile="gpu", factor=9.0)
    assert history.better_profile(now, [disk, gpu, slower]) is None
    cpu = passing("20261128T080000Z", profile="cpu")
    assert history.better_profile(now, [disk, gpu, cpu]) == "cpu"


def test_repeats_from_an_emptied_ram_tier_compare_with_those_of_other_profiles():
    base, now = (
        json.loads(json.dumps(sample_results.record("h", at, profile, load="article")))
        for at, profile in (("20261127T080000Z", "gpu"), ("20261129T090000Z", "disk"))
    )
    for run in now["load"]["instances"][0]["runs"]:
        run["run"]["clear_ram"] = run["run"]["phase"] == "warm"
    assert history.comparable(now, base, same_plan_profile=False)
    assert history.payoff(now, [base]).run == "rag-c32"
    now["load"]["instances"][0]["runs"][-1]["run"]["requests"] += 1
    assert not history.comparable(now, base, same_plan_profile=False)


def test_runs_of_one_concurrency_are_compared_by_their_sizes():
    base, now = (
        json.loads(json.dumps(passing(at, profile=profile)))
        for at, profile in (("20261127T080000Z", "gpu"), ("20261129T090000Z", "disk"))
    )
    for record, rates in ((base, (4.0, 1.0)), (now, (3.0, 1.1))):
        runs = record["load"]["instances"][0]["runs"]
        warm = next(run for run in runs if run["run"]["name"] == "warm-c16")
        for context, rate in zip((32768, 131072), rates, strict=True):
            run = json.loads(json.dumps(warm))
            run["run"].update(name=f"warm-{context}", prompt_tokens=context, concurrency=99)
            run["figures"]["requests_per_s"] = rate
            runs.append(run)
    # 3 of 4 at the short context, not 3 against the long one's 1
    found = history.payoff(now, [base])
    assert (found.run, found.ratio) == ("warm-32768", 0.75)


def test_offload_that_costs_degrades_with_advice():
    base = passing("20261127T080000Z", profile="gpu")
    now = passing("20261129T090000Z", factor=1.9, earlier=[base])
    assert now["payoff"]["state"] == "costs"
    assert now["verdict"] == "degrade"
    assert "kvfleet_profile: cpu" in now["reasons"][0]["fix"]


def test_a_load_that_the_engines_own_pool_served_says_nothing():
    base = passing("20261127T080000Z", profile="gpu")
    now = json.loads(json.dumps(passing("20261129T090000Z", factor=1.9)))
    for run in now["load"]["instances"][0]["runs"]:
        tokens = run["tokens"]
        tokens["engine_cache"], tokens["external"] = tokens["external"], 0
    found = history.payoff(now, [base])
    assert found.state == "unknown"
    assert "own pool" in found.message


def test_without_a_baseline_the_payoff_is_unknown():
    now = passing("20261129T090000Z")
    assert history.payoff(now, []).state == "unknown"
    other_release = {**passing("20261127T080000Z", profile="gpu"), "release": "another"}
    assert history.payoff(now, [other_release]).state == "unknown"
    assert history.payoff(passing("20261127T080000Z", profile="gpu"), []).state == "unknown"


def test_a_failing_verdict_keeps_its_figure_beside_a_regression():
    failed = bench.judge([], [], None, bench.Thresholds())
    change = {"instance": "a", "run": "r", "figure": "f", "value": 2.0, "baseline": 1.0, "worse": 1.0, "tolerance": 0.1}
    judged = bench.judge_history(failed, [{**change, "results": 3, "regressed": True}], {"state": "unknown"})
    assert judged["verdict"] == "fail"
    assert judged["deciding"] == failed["deciding"]
    assert len(judged["reasons"]) == len(failed["reasons"]) + 1


def test_line_and_explanation_are_for_people():
    record = sample_results.record("h", "20261129T090000Z", "disk", findings=[sample_results.FINDING])
    assert history.line(record).startswith("h  release cu13-0.32.0-0.5.6  profile disk  FAIL  ")
    assert "wipe the tier" in history.explanation(record)


def test_figures_that_json_has_not_are_kept_as_unknown(tmp_path):
    path = history.store(tmp_path, {**passing("20261129T090000Z"), "odd": [float("nan"), {"x": float("inf")}, 1.5]})
    assert json.loads(path.read_text())["odd"] == [None, {"x": None}, 1.5]
