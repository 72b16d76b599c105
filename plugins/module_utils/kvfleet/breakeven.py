"""Does a tier pay? What it must deliver to beat computing the same KV again, against what was measured."""

from __future__ import annotations

import math
from typing import Any

#: Share of a card's dense 16-bit peak that prefill reaches. One prompt alone of an 8B model reached 0.63 on an H200
#: (38,836 tokens/s) and 0.41 of two (49,879; docs/measured/gpu), 0.24-0.33 were seen under mixed load. The estimate is
#: above all of them on purpose: a tier must beat a fast recompute to be said to pay.
PREFILL_EFFICIENCY = 0.65
#: Seconds that a lookup and load take whatever their size, by tier (an estimate; only break_even_tokens uses it).
TIER_LATENCY_S = {"cpu": 0.005, "disk": 0.010}


def prefill_tokens_per_s(dense_tflops: float | None, gpus: int, active_parameters: int | None) -> float | None:
    """Prompt tokens per second that an instance should compute: ``gpus x peak x efficiency / (2 x parameters)``.

    ``None`` when the card or the number of parameters is not known.
    """
    if not dense_tflops or not active_parameters or gpus < 1:
        return None
    return gpus * dense_tflops * 1e12 * PREFILL_EFFICIENCY / (2 * active_parameters)


def needed_bytes_per_s(kv_bytes_per_token: int, tokens_per_s: float | None) -> float | None:
    """Bytes per second that a tier must deliver to an instance to be as fast as computing the tokens again."""
    return None if tokens_per_s is None else kv_bytes_per_token * tokens_per_s


def judge(needed: float | None, measured: float | None) -> str:
    """``yes`` when the measured speed beats the needed one, ``no`` when not, ``unknown`` when one of them is
    missing.
    """
    if needed is None or measured is None:
        return "unknown"
    return "yes" if measured > needed else "no"


def break_even_tokens(
    tier: str, kv_bytes_per_token: int, tokens_per_s: float | None, measured: float | None, chunk_tokens: int
) -> int | None:
    """Shortest prefix, in whole chunks, for which loading beats computing; ``None`` when it never does or is
    unknown.
    """
    if not tokens_per_s or not measured:
        return None
    gain_s = 1 / tokens_per_s - kv_bytes_per_token / measured
    if gain_s <= 0:
        return None
    return max(1, math.ceil(TIER_LATENCY_S[tier] / gain_s / chunk_tokens)) * chunk_tokens


def tier_report(
    tier: str, kv_bytes_per_token: int, tokens_per_s: float | None, measured: float | None, chunk_tokens: int
) -> dict[str, Any]:
    """The plan's entry for one tier of one instance (bytes per second, tokens, ``pays``)."""
    needed = needed_bytes_per_s(kv_bytes_per_token, tokens_per_s)
    return {
        "needed_bytes_per_s": None if needed is None else round(needed),
        "measured_bytes_per_s": None if measured is None else round(measured),
        "break_even_tokens": break_even_tokens(tier, kv_bytes_per_token, tokens_per_s, measured, chunk_tokens),
        "pays": judge(needed, measured),
    }
