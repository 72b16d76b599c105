"""When a tier pays."""

import pytest

from kvfleet.core import breakeven


def test_estimate_of_prefill():
    # measured by proofs on H200s with 8.03 billion parameters, one prompt alone: the estimate may be above, never below
    assert 38_836 <= breakeven.prefill_tokens_per_s(989, 1, 8_030_000_000) <= 1.1 * 38_836
    assert breakeven.prefill_tokens_per_s(989, 2, 8_030_000_000) >= 51_320
    assert breakeven.prefill_tokens_per_s(None, 1, 8_030_000_000) is None
    assert breakeven.prefill_tokens_per_s(989, 1, None) is None


@pytest.mark.parametrize(
    ("needed", "measured", "pays"),
    [(2e9, 3e9, "yes"), (2e9, 1e9, "no"), (2e9, 2e9, "no"), (None, 1e9, "unknown"), (2e9, None, "unknown")],
)
def test_judgement(needed, measured, pays):
    assert breakeven.judge(needed, measured) == pays


def test_break_even_covers_the_latency_in_whole_chunks():
    # 10 ms latency; 20,000 tokens/s are 50 us a token, loading 128 KiB at 5 GB/s takes 26 us: 24 us won a token
    assert breakeven.break_even_tokens("disk", 131072, 20_000, 5e9, 256) == 512
    assert breakeven.break_even_tokens("disk", 131072, 20_000, 2e9, 256) is None
    assert breakeven.break_even_tokens("cpu", 131072, None, 2e9, 256) is None
