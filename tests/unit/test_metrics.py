"""Reading recorded pages of vLLM 0.32.0 and LMCache 0.5.6."""

from pathlib import Path

import pytest

from kvfleet.core import metrics

DATA = Path(__file__).parents[1] / "data" / "metrics"


@pytest.fixture(scope="module")
def engine():
    return metrics.parse((DATA / "vllm-0.32.0.txt").read_text())


@pytest.fixture(scope="module")
def cache():
    return metrics.parse((DATA / "lmcache-0.5.6.txt").read_text())


def raw_sum(name, *parts):
    """What grep and a sum say, without the parser."""
    lines = (DATA / ("vllm-0.32.0.txt" if name.startswith("vllm") else "lmcache-0.5.6.txt")).read_text().splitlines()
    found = [line for line in lines if line.startswith(name + "{") and all(part in line for part in parts)]
    assert found
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_prompt_tokens_by_source_are_those_on_the_page(engine):
    found = metrics.prompt_tokens_by_source(engine)
    name = "vllm:prompt_tokens_by_source_total"
    assert found == {
        "computed": raw_sum(name, 'source="local_compute"'),
        "engine_cache": raw_sum(name, 'source="local_cache_hit"'),
        "external": raw_sum(name, 'source="external_kv_transfer"'),
    }
    assert min(found.values()) > 0


def test_pool_is_what_the_engine_was_started_with(engine):
    # --num-gpu-blocks-override 64, blocks of 128
    assert metrics.pool_tokens(engine) == 8192


def test_tier_tokens_sum_over_salts_or_take_one(cache):
    everything = metrics.tier_tokens(cache)
    assert everything["cpu"] == raw_sum("lmcache_mp_lookup_hit_l1_tokens_total")
    assert everything["disk"] == raw_sum("lmcache_mp_lookup_hit_l2_tokens_total")
    one = metrics.tier_tokens(cache, "kvfleet-proof-a111b82e168983af")
    assert one == {"requested": 18432, "hit": 12288, "cpu": 6144, "disk": 6144}


def test_a_salt_without_traffic_has_no_tokens(cache):
    assert metrics.tier_tokens(cache, "kvfleet-proof-none") == {"requested": 0, "hit": 0, "cpu": 0, "disk": 0}


def test_odd_lines_are_left_out_and_labels_unescaped():
    page = metrics.parse(
        '# HELP x y\nx{a="one\\"two, b=\\"",c="d}"} 3 1700000000\nbroken line here\nx{a="e"} NaN\ny 1e3\n'
    )
    assert page.total("x", c="d}") == 3
    assert page.labels("x")["a"] == 'one"two, b="'
    assert page.total("y") == 1000
    assert not page.has("broken")


def test_a_counter_that_went_back_counts_from_zero():
    assert metrics.differences({"a": 10, "b": 5}, {"a": 4, "b": 8, "c": 1}) == {"a": 4, "b": 3, "c": 1}


def test_percentile_is_numpys():
    # numpy.percentile([10, 20, 40, 80], 95) == 74.0
    assert metrics.percentile([80, 10, 40, 20], 0.95) == pytest.approx(74.0)
    assert metrics.percentile([7], 0.99) == 7


def test_thinning_keeps_both_ends():
    thin = metrics.thin_out(list(range(1000)), 5)
    assert thin == [0, 250, 500, 749, 999]
    assert metrics.thin_out([1, 2], 5) == [1, 2]


def series(usage, waiting=0, evicted_per_step=0, staged_per_step=0):
    return [
        {
            "running": 4,
            "waiting": waiting,
            "kv_usage": value,
            "ram_evicted_chunks": step * evicted_per_step,
            "disk_loaded_chunks": step * staged_per_step,
        }
        for step, value in enumerate(usage)
    ]


SAW = [0.2, 0.5, 0.8, 0.95] * 8


def advise(samples, **changes):
    options = {"buffer_gib": 20, "buffer_needed_gib": 27.3, "max_num_seqs": 16, **changes}
    return metrics.advise(samples, **options)


def test_a_saw_tooth_with_steady_evictions_asks_for_a_bigger_buffer():
    found = advise(series(SAW, evicted_per_step=3))
    assert found.pattern == "buffer too small"
    # half as much again, or what the working set needs, whichever is more
    assert (found.variable, found.value) == ("kvfleet_buffer_gib_per_gpu", 30)
    assert advise(series(SAW, evicted_per_step=3), buffer_needed_gib=41.1).value == 41.25


def test_chunks_staged_for_disk_hits_are_no_evictions():
    assert advise(series(SAW, evicted_per_step=3, staged_per_step=3)).pattern == "varies"


def test_a_full_pool_with_waiting_requests_is_too_small():
    found = advise(series([1.0] * 30, waiting=5))
    assert found.pattern == "pool too small"
    assert (found.variable, found.value) == ("kvfleet_max_num_seqs", 8)


def test_a_swing_below_a_fifth_is_settled():
    assert advise(series([0.70, 0.75, 0.8, 0.85] * 8, evicted_per_step=3)).pattern == "settled"
    assert advise(series([1.0] * 30)).pattern == "settled"


def test_few_samples_say_nothing():
    assert advise(series([0.1, 0.9])).pattern == "short"
    assert advise([{"running": 0, "kv_usage": 0.5}] * 50).pattern == "short"


def test_without_a_ram_tier_no_buffer_is_advised():
    assert advise(series(SAW, evicted_per_step=3), buffer_gib=None).pattern == "varies"


def test_an_engine_without_the_counter_by_source_says_the_same(engine):
    page = (DATA / "vllm-0.32.0.txt").read_text()
    older = metrics.parse("\n".join(line for line in page.splitlines() if "tokens_by_source" not in line))
    assert metrics.prompt_tokens_by_source(older) == metrics.prompt_tokens_by_source(engine)


def test_a_server_without_salts_or_tiers_counts_all():
    older = metrics.parse(
        'lmcache_mp_lookup_requested_tokens_total{model_name="m"} 512\nlmcache_mp_lookup_hit_tokens_total 256\n'
    )
    assert metrics.tier_tokens(older, "kvfleet-proof-1") == {"requested": 512, "hit": 256, "cpu": 0, "disk": 0}
    assert not metrics.tells_tiers_apart(older)
    assert metrics.tells_tiers_apart(metrics.parse(""))


def test_foreign_lookups_are_those_of_other_salts(cache):
    own = raw_sum("lmcache_mp_lookup_requested_tokens_total", 'cache_salt="kvfleet-proof-')
    everything = raw_sum("lmcache_mp_lookup_requested_tokens_total")
    assert metrics.foreign_tokens(cache, "kvfleet-proof-") == everything - own > 0
