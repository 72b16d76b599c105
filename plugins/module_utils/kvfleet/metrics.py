"""Reading the engine's and the cache server's Prometheus text, and what a series of samples says about the sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")

#: sources of ``vllm:prompt_tokens_by_source_total`` (vLLM 0.32) by the name used here
PROMPT_SOURCES = {
    "computed": "local_compute",
    "engine_cache": "local_cache_hit",
    "external": "external_kv_transfer",
}


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Metrics:
    """A metrics page; values are summed over all lines whose labels match."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def has(self, name: str) -> bool:
        """Whether any line carries ``name``; a counter that never counted may be missing."""
        return name in self._by_name

    def total(self, name: str, **labels: str) -> float:
        """Sum of ``name`` over the lines that carry all of ``labels``; 0 when there is none."""
        return math.fsum(
            sample.value
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def highest(self, name: str, **labels: str) -> float | None:
        """Largest value of ``name`` over the matching lines; ``None`` when there is none."""
        values = [
            sample.value
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        return max(values) if values else None

    def samples(self, name: str) -> list[Sample]:
        """All lines of ``name``."""
        return list(self._by_name.get(name, ()))

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the first line of ``name``: how vLLM publishes its settings; empty when there is none."""
        samples = self._by_name.get(name)
        return dict(samples[0].labels) if samples else {}


def parse(text: str) -> Metrics:
    """Read a page in Prometheus' text format; comments, histograms' help and malformed lines are left out."""
    samples = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if not match:
            continue
        try:
            value = float(match.group(3))
        except ValueError:
            continue
        labels = {
            key: _ESCAPE.sub(lambda found: {"n": "\n"}.get(found.group(1), found.group(1)), raw)
            for key, raw in _LABEL.findall(match.group(2) or "")
        }
        samples.append(Sample(match.group(1), labels, value))
    return Metrics(samples)


def prompt_tokens_by_source(metrics: Metrics) -> dict[str, float]:
    """Prompt tokens so far by where their KV came from: ``computed``, ``engine_cache``, ``external``.

    Engines before vLLM's counter by source have the same three numbers in their prefix-cache counters.
    """
    name = "vllm:prompt_tokens_by_source_total"
    if metrics.has(name):
        return {ours: metrics.total(name, source=theirs) for ours, theirs in PROMPT_SOURCES.items()}
    engine_cache = metrics.total("vllm:prefix_cache_hits_total")
    external = metrics.total("vllm:external_prefix_cache_hits_total")
    total = metrics.total("vllm:prompt_tokens_total")
    return {"computed": max(0.0, total - engine_cache - external), "engine_cache": engine_cache, "external": external}


def tier_tokens(metrics: Metrics, salt: str | None = None) -> dict[str, float]:
    """LMCache's lookups so far in tokens: ``requested``, ``hit``, and of these ``cpu`` (its L1) and ``disk`` (its L2).

    With ``salt`` only the lookups of requests that carried this ``cache_salt``, so that users' traffic on a shared
    server does not count; a server that does not label by salt counts all. Names are those of LMCache 0.5.6; see
    :func:`tells_tiers_apart` for older ones.
    """
    return {
        "requested": of_salt(metrics, "lmcache_mp_lookup_requested_tokens_total", salt),
        "hit": of_salt(metrics, "lmcache_mp_lookup_hit_tokens_total", salt),
        "cpu": of_salt(metrics, "lmcache_mp_lookup_hit_l1_tokens_total", salt),
        "disk": of_salt(metrics, "lmcache_mp_lookup_hit_l2_tokens_total", salt),
    }


def of_salt(metrics: Metrics, name: str, salt: str | None) -> float:
    """Sum of ``name`` over the lines of ``salt``; over all lines when there is no salt or none carries that label."""
    if salt is None or "cache_salt" not in metrics.labels(name):
        return metrics.total(name)
    return metrics.total(name, cache_salt=salt)


def tells_tiers_apart(metrics: Metrics) -> bool:
    """Whether the server has counters by tier (LMCache 0.5.6); before any lookup nothing is known, so yes."""
    return metrics.has("lmcache_mp_lookup_hit_l1_tokens_total") or not metrics.has("lmcache_mp_lookup_hit_tokens_total")


def foreign_tokens(metrics: Metrics, own_prefix: str) -> float:
    """Tokens that others looked up: requests whose ``cache_salt`` does not begin with ``own_prefix``.

    Prompts shorter than a chunk are never looked up, so readiness checks do not count.
    """
    name = "lmcache_mp_lookup_requested_tokens_total"
    return metrics.total(name) - math.fsum(
        sample.value for sample in metrics.samples(name) if sample.labels.get("cache_salt", "").startswith(own_prefix)
    )


def pool_tokens(metrics: Metrics) -> int | None:
    """Tokens that the engine's own KV pool really holds, from ``vllm:cache_config_info``; ``None`` if not told."""
    labels = metrics.labels("vllm:cache_config_info")
    try:
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    except (KeyError, ValueError):
        return None


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """``after - before`` for every key of ``after``; a counter that went back (a restart) counts from zero."""
    result = {}
    for key, value in after.items():
        change = value - before.get(key, 0.0)
        result[key] = change if change >= 0 else value
    return result


def percentile(values: Sequence[float], share: float) -> float:
    """``share`` (0 to 1) percentile with linear interpolation between ranks, as numpy's default does it.

    Raises ``ValueError`` for an empty sequence.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def thin_out(series: Sequence[Any], limit: int) -> list[Any]:
    """At most ``limit`` entries of ``series``, evenly spread, first and last kept."""
    if len(series) <= limit:
        return list(series)
    step = (len(series) - 1) / (limit - 1)
    return [series[round(index * step)] for index in range(limit)]


#: the article's rule: a pool whose use swings by less than this share of it has settled
SETTLED_SWING = 0.20
#: fewer samples under load say nothing about a pattern
_PATTERN_SAMPLES = 8


@dataclass(frozen=True)
class Advice:
    """What a series says: ``pattern``, the swing it rests on (share of the pool), and one variable to change."""

    pattern: str
    swing: float | None
    message: str
    variable: str | None = None
    value: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the result."""
        return {
            "pattern": self.pattern,
            "swing": self.swing,
            "message": self.message,
            "variable": self.variable,
            "value": self.value,
        }


def advise(
    samples: Sequence[Mapping[str, Any]],
    *,
    buffer_gib: float | None,
    buffer_needed_gib: float | None,
    max_num_seqs: int,
) -> Advice:
    """The article's reading of a load's series of ``kv_usage`` (0 to 1), waiting requests and evictions.

    A saw-tooth with steady evictions means that the buffer is too small; a flat full line with waiting requests that
    the pool is; a swing under 20 % is settled. ``buffer_gib`` is the present buffer (``None`` without a RAM tier),
    ``buffer_needed_gib`` what the load's working set needs.
    """
    loaded = [entry for entry in samples if entry.get("running") and entry.get("kv_usage") is not None]
    if len(loaded) < _PATTERN_SAMPLES:
        return Advice("short", None, f"{len(loaded)} samples under load are too few for a pattern.")
    # ramp-up and the last requests are no pattern
    edge = len(loaded) // 10
    middle = loaded[edge : len(loaded) - edge]
    usage = [float(entry["kv_usage"]) for entry in middle]
    swing = max(usage) - min(usage)
    full = sum(value >= 0.95 for value in usage) / len(usage)
    waiting = sum(bool(entry.get("waiting")) for entry in middle) / len(middle)
    evicting = _steady_evictions(middle)
    if full >= 0.7 and waiting >= 0.5:
        lower = max(1, max_num_seqs // 2)
        return Advice(
            "pool too small",
            swing,
            f"The pool was full in {full:.0%} of the samples while requests waited: it is too small for {max_num_seqs} "
            "sequences.",
            "kvfleet_max_num_seqs",
            float(lower),
        )
    if swing > SETTLED_SWING and evicting >= 0.3 and buffer_gib is not None:
        wanted = max(math.ceil((buffer_needed_gib or 0) * 4) / 4, math.ceil(buffer_gib * 1.5 * 4) / 4)
        return Advice(
            "buffer too small",
            swing,
            f"Use of the pool swung by {swing:.0%} and the RAM tier evicted in {evicting:.0%} of the samples: the "
            "buffer of "
            f"{buffer_gib:g} GiB is too small.",
            "kvfleet_buffer_gib_per_gpu",
            wanted,
        )
    if swing <= SETTLED_SWING:
        return Advice("settled", swing, f"Use of the pool swung by {swing:.0%}: settled.")
    return Advice(
        "varies",
        swing,
        f"Use of the pool swung by {swing:.0%} without steady evictions: the load varies, nothing to change.",
    )


def _steady_evictions(samples: Sequence[Mapping[str, Any]]) -> float:
    """Share of the steps in which the RAM tier gave up chunks that were not merely staged for a disk hit."""
    steps = list(zip(samples, samples[1:]))
    if not steps:
        return 0.0
    evicting = 0
    for early, late in steps:
        evicted = float(late.get("ram_evicted_chunks") or 0) - float(early.get("ram_evicted_chunks") or 0)
        # LMCache 0.5.6 counts a chunk that was staged for a disk hit as evicted when the hit was served
        staged = float(late.get("disk_loaded_chunks") or 0) - float(early.get("disk_loaded_chunks") or 0)
        evicting += evicted > staged
    return evicting / len(steps)
