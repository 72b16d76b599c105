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
    assert one == {"requested": 18432, "cpu": 6144, "disk": 6144}


def test_a_salt_without_traffic_has_no_tokens(cache):
    assert metrics.tier_tokens(cache, "kvfleet-proof-none") == {"requested": 0, "cpu": 0, "disk": 0}


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
