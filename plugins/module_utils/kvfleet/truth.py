"""Does the cache tell the truth? One long prompt, cold, from RAM and from disk: same answer, right tier, real bytes.

The prompt is random token ids of a fresh seed under a ``cache_salt`` of this run alone, so that nothing from an
earlier run or a user can serve it, and nothing of it can serve a user. Between two passes other prompts displace it
from the engine's own pool: vLLM's ``skip_reading_prefix_cache`` would switch the connector off too
(``v1/core/sched/scheduler.py`` of vLLM 0.32). Counters decide which tier served a pass; times only confirm it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable

from . import flags, metrics
from .findings import Finding, KvfleetError, refuse
from .http import Client, HttpFailure

#: what the proof asks for at most: long enough that prefill dominates, short enough for seconds on a GPU
LONG_PROMPT_TOKENS = 6144
#: tokens after the last full chunk, so that the repeat always computes something of its own
TAIL_TOKENS = 48
#: greedy tokens compared in every pass
OUTPUT_TOKENS = 24
#: alternatives the engine returns for every position
TOP_LOGPROBS = 5
#: a prefix of every salt; whoever cleans a disk tier by hand sees what the files are
SALT_PREFIX = "kvfleet-proof-"
#: share of the RAM tier that a displacing flood may fill before it is sent without being stored
FLOOD_SHARE_OF_L1 = 0.6
#: prompts of this length displace the pool; short ones, since attention's cost grows with the square
FLOOD_PROMPT_TOKENS = 1024


#: finding and advice by the tier that did not deliver
_TIER_MISSED = {
    "cpu": (
        "KVF-BENCH-006",
        "Read the journal of kvfleet-lmcache@; raise kvfleet_buffer_gib_per_gpu if it says out of memory.",
    ),
    "disk": (
        "KVF-BENCH-007",
        "Check the disk tier: mounted, writable for the service user, quota above zero, L1 with room for staging.",
    ),
}


@dataclass(frozen=True)
class Tolerance:
    """How far two passes of the same prompt may differ, in nats of log-probability.

    ``logprob`` bounds every compared alternative, ``tie`` is the gap at which two first choices count as a near-tie.
    """

    logprob: float
    tie: float


#: Rounding of the engine's dtype decides: the cold pass computes in chunks of other shapes than the repeat.
#: docs/proof.md gives the measurements behind each value.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(logprob=0.005, tie=0.005),
    "float16": Tolerance(logprob=0.1, tie=0.1),
    "bfloat16": Tolerance(logprob=0.25, tie=0.25),
}


@dataclass(frozen=True)
class Completion:
    """One greedy answer: token ids, their alternatives' log-probabilities, and times in milliseconds."""

    tokens: tuple[int, ...]
    alternatives: tuple[Mapping[int, float], ...]
    ttft_ms: float
    total_ms: float
    prompt_tokens: int


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`; ``first_difference`` is a position or ``None``."""

    same: bool
    identical: bool
    near_tie: bool
    first_difference: int | None
    max_logprob_difference: float
    reason: str


def compare(reference: Completion, other: Completion, tolerance: Tolerance) -> Comparison:
    """Whether ``other`` is the same greedy answer as ``reference``.

    Same means: the same tokens, or up to the first difference the same tokens and there a near-tie in both answers;
    and at every position with the same history all alternatives within ``tolerance.logprob``. An alternative that
    only one side lists counts with the least difference it can have: its distance to the other side's last listed.
    After the first difference the histories differ, so nothing there is compared.
    """
    length = min(len(reference.tokens), len(other.tokens))
    if length == 0 or len(reference.tokens) != len(other.tokens):
        return Comparison(
            False, False, False, None, float("inf"),
            f"{len(other.tokens)} tokens came back where the cold pass gave {len(reference.tokens)}",
        )  # fmt: skip
    first = next((i for i in range(length) if reference.tokens[i] != other.tokens[i]), None)
    compared = length if first is None else first + 1
    worst, worst_at = 0.0, 0
    for position in range(compared):
        difference = _alternatives_difference(reference.alternatives[position], other.alternatives[position])
        if difference > worst:
            worst, worst_at = difference, position
    if math.isinf(worst):
        reason = f"log-probabilities at token {worst_at} are missing or not numbers"
        return Comparison(False, False, False, first, worst, reason)
    near_tie = False
    if first is not None:
        gap = max(
            _choice_gap(reference.alternatives[first], reference.tokens[first], other.tokens[first]),
            _choice_gap(other.alternatives[first], other.tokens[first], reference.tokens[first]),
        )
        near_tie = gap <= tolerance.tie
        if not near_tie:
            return Comparison(
                False, False, False, first, worst,
                f"token {first} differs and is no near-tie (gap {gap:.3g}, allowed {tolerance.tie:g})",
            )  # fmt: skip
    if worst > tolerance.logprob:
        return Comparison(
            False, first is None, near_tie, first, worst,
            f"log-probabilities at token {worst_at} differ by {worst:.3g}, allowed {tolerance.logprob:g}",
        )  # fmt: skip
    return Comparison(True, first is None, near_tie, first, worst, "")


def _alternatives_difference(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """Largest difference between two lists of alternatives (see :func:`compare` for those that one side lacks)."""
    if not left or not right or any(math.isnan(value) for value in (*left.values(), *right.values())):
        return float("inf")
    worst = 0.0
    for mine, theirs in ((left, right), (right, left)):
        floor = min(theirs.values())
        for token, value in mine.items():
            worst = max(worst, abs(value - theirs[token])) if token in theirs else max(worst, value - floor)
    return worst


def _choice_gap(alternatives: Mapping[int, float], chosen: int, rival: int) -> float:
    """How much less likely ``rival`` was than ``chosen``; infinite when it is not among the alternatives."""
    if chosen not in alternatives or rival not in alternatives:
        return float("inf")
    return abs(alternatives[chosen] - alternatives[rival])


@dataclass(frozen=True)
class PromptSize:
    """Tokens of the long prompt: ``cached`` of them are whole chunks, which a repeat must find in a tier."""

    tokens: int
    cached: int


def prompt_size(max_model_len: int, pool_tokens: int, chunk_tokens: int, block_tokens: int) -> PromptSize:
    """Length of the long prompt: whole chunks plus a tail, at most 6144 + 48 tokens, room left for the answer.

    One block of vLLM's pool is never usable. Raises KVF-BENCH-012 when not even one chunk fits.
    """
    usable = min(max_model_len, pool_tokens - 2 * block_tokens) - OUTPUT_TOKENS - TAIL_TOKENS
    chunks = min(usable, LONG_PROMPT_TOKENS) // chunk_tokens
    if chunks < 1:
        raise refuse(
            "KVF-BENCH-012",
            f"A prompt of one chunk ({chunk_tokens} tokens) with its answer does not fit max_model_len {max_model_len} "
            f"and the pool of {pool_tokens} tokens, so nothing of any prompt can be cached.",
            "Raise kvfleet_max_model_len or lower kvfleet_chunk_tokens.",
            max_model_len=max_model_len, pool_tokens=pool_tokens, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    tokens = chunks * chunk_tokens + TAIL_TOKENS
    return PromptSize(tokens, tokens // chunk_tokens * chunk_tokens)


@dataclass(frozen=True)
class Flood:
    """Prompts that displace a pool: ``count`` of them, ``tokens`` long each, ``concurrency`` at a time."""

    count: int
    tokens: int
    concurrency: int

    @property
    def total_tokens(self) -> int:
        """Prompt tokens of the whole flood."""
        return self.count * self.tokens


def flood_size(pool_tokens: int, max_model_len: int, block_tokens: int, max_num_seqs: int) -> Flood:
    """A flood that takes every block of the pool once: freed blocks are reused oldest first.

    Only full blocks are cached; a partly filled one is reused at once and displaces nothing, so prompts are whole
    blocks, and their one output token needs no block of its own.
    """
    longest = FLOOD_PROMPT_TOKENS if pool_tokens <= 65536 else 4 * FLOOD_PROMPT_TOKENS
    longest = min(longest, max_model_len - 1, pool_tokens // 2)
    blocks_each = max(1, longest // block_tokens)
    pool_blocks = -(-pool_tokens // block_tokens)
    concurrency = max(1, min(max_num_seqs, 16, (pool_blocks - 1) // blocks_each))
    return Flood(-(-pool_blocks // blocks_each), blocks_each * block_tokens, concurrency)


def random_prompt(rng: random.Random, tokens: int, vocabulary: int) -> list[int]:
    """``tokens`` random ids; neither the first 5 % nor the last 25 % of the vocabulary, where special ids live."""
    low, high = vocabulary // 20, max(vocabulary // 20 + 2, vocabulary * 3 // 4)
    return [rng.randrange(low, high) for _ in range(tokens)]


def completion(
    engine: Client,
    model: str,
    prompt: Sequence[int],
    salt: str,
    output_tokens: int = OUTPUT_TOKENS,
    store: bool = True,
    timeout_s: float = 300.0,
) -> Completion:
    """One greedy streamed completion of token ids.

    TTFT ends at the first event that carries text or a token, never at an empty first event (some streams open with
    one). ``store=False`` asks LMCache's connector not to keep it (``lmcache.max_offload_tokens``, 0.5.x). Raises
    :class:`HttpFailure`, also when no token came back.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not store:
        body["kv_transfer_params"] = {"lmcache.max_offload_tokens": 0}
    tokens: list[int] = []
    alternatives: list[Mapping[int, float]] = []
    first_s: float | None = None
    last_s = 0.0
    prompt_tokens = len(prompt)
    for elapsed, event in engine.stream("/v1/completions", body, timeout_s):
        last_s = elapsed
        try:
            usage = event.get("usage") or {}
            prompt_tokens = int(usage.get("prompt_tokens", prompt_tokens))
            for choice in event.get("choices") or ():
                listed = choice.get("logprobs") or {}
                if first_s is None and (choice.get("text") or listed.get("tokens")):
                    first_s = elapsed
                tokens += [_token_id(name) for name in listed.get("tokens") or ()]
                alternatives += [_alternatives(entry) for entry in listed.get("top_logprobs") or ()]
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise HttpFailure("broken", f"{engine.base_url}/v1/completions: an odd event: {event!r:.200}") from error
    if first_s is None or not tokens:
        raise HttpFailure("broken", f"{engine.base_url}/v1/completions: the answer holds no token")
    if len(tokens) != len(alternatives):
        raise HttpFailure(
            "broken",
            f"{engine.base_url}: {len(tokens)} tokens but {len(alternatives)} lists of log-probabilities",
        )
    return Completion(tuple(tokens), tuple(alternatives), first_s * 1000, last_s * 1000, prompt_tokens)


def _alternatives(entry: Mapping[str, Any] | None) -> dict[int, float]:
    """One position's alternatives; a damaged cache makes NaN, which the server writes as ``null``."""
    return {_token_id(name): float("nan") if value is None else float(value) for name, value in (entry or {}).items()}


def _token_id(name: str) -> int:
    """The id in ``token_id:39``, as ``return_tokens_as_token_ids`` writes it."""
    return int(name.rsplit(":", 1)[1])


@dataclass
class Surroundings:
    """All that a proof touches besides the two servers; tests replace it."""

    #: bytes and number of files of a salt below the disk tier's directory
    tier_files: Callable[[str, str], tuple[int, int]] = lambda _path, _salt: (0, 0)
    #: write out and forget the page cache of a salt's files, so that a buffered read must come from the device
    drop_page_cache: Callable[[str, str], None] = lambda _path, _salt: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.SystemRandom)


@dataclass(frozen=True)
class Limits:
    """Seconds: one request, one flood, the wait until stores are on disk, and what the cold pass may be planned for."""

    request_s: float = 300.0
    flood_s: float = 300.0
    settle_s: float = 60.0
    cold_s: float = 45.0


class InstanceProof:
    """The passes of one instance; :meth:`run` returns its part of ``truth_check``'s result."""

    def __init__(
        self,
        instance: Mapping[str, Any],
        server: Mapping[str, Any] | None,
        engine: Client,
        cache: Client | None,
        vocabulary: int,
        tolerance: Tolerance,
        may_clear: bool,
        surroundings: Surroundings,
        limits: Limits = Limits(),
    ) -> None:
        self.instance = instance
        self.server = server
        self.engine = engine
        self.cache = cache
        self.vocabulary = vocabulary
        self.tolerance = tolerance
        self.may_clear = may_clear
        self.outside = surroundings
        self.limits = limits
        self.model = str(instance["served_model_name"])
        self.salt = f"{SALT_PREFIX}{surroundings.rng.getrandbits(64):016x}"
        self.tiers_apart = True
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.result: dict[str, Any] = {
            "name": instance["name"],
            "profile": instance["profile"],
            "salt": self.salt,
            "ttft_ms": {"cold": None, "engine_cache": None, "ram": None, "disk": None},
            "hit_tokens": {"engine_cache": None, "ram": None, "disk": None},
            "bytes": {"ram": None, "disk": None, "disk_files": None},
            "identical": None,
            "max_logprob_difference": None,
            "tolerance": {"logprob": tolerance.logprob, "tie": tolerance.tie},
            "prompt_tokens": None,
            "prefill_tokens_per_s": None,
            "decode_ms_per_token": None,
            "notes": self.notes,
        }

    def run(self) -> dict[str, Any]:
        """All passes of the instance's profile; trouble ends up in the result's ``findings``, never as an exception."""
        try:
            self._passes()
        except KvfleetError as refusal:
            self.findings += refusal.findings
        except HttpFailure as failure:
            self.findings.append(request_finding(self.instance["name"], failure))
        self.result["findings"] = [finding.as_dict() for finding in self.findings]
        return self.result

    def _passes(self) -> None:
        check_model_name(self.engine, self.instance)
        real_completion(self.engine, self.model, self.limits.request_s)
        page = self._engine_metrics()
        pool = metrics.pool_tokens(page) or int(self.instance["gpu_kv_tokens"])
        block = int(self.instance["block_size_tokens"])
        chunk = int(self.instance["chunk_tokens"] or block)
        size = prompt_size(int(self.instance["max_model_len"]), pool, chunk, block)
        # first requests compile kernels and fill allocators: never let the measured one be the first of its shape
        warmup = random_prompt(self.outside.rng, min(512, size.tokens), self.vocabulary)
        for _ in range(2):
            first = completion(self.engine, self.model, warmup, f"{self.salt}-warmup", 4, False, self.limits.request_s)
            # the repeat would be served by the engine's own cache
            warmup = random_prompt(self.outside.rng, len(warmup), self.vocabulary)
        size = self._affordable(size, chunk, len(warmup) / (first.ttft_ms / 1000))
        prompt = random_prompt(self.outside.rng, size.tokens, self.vocabulary)
        whole = random_prompt(self.outside.rng, 2 * chunk, self.vocabulary)
        # shorter models hold no prompt of two chunks
        ask_whole = self.instance["profile"] != "gpu" and size.cached >= len(whole)
        whole_cold = self._whole(whole) if ask_whole else None
        cold = self._pass("cold", prompt, size, expect=None)
        self.result["prompt_tokens"] = size.tokens
        self.result["prefill_tokens_per_s"] = size.tokens / (cold.ttft_ms / 1000)
        self.result["decode_ms_per_token"] = (cold.total_ms - cold.ttft_ms) / max(1, len(cold.tokens) - 1)
        if self.instance["profile"] == "gpu":
            self._repeat_in_the_engine(prompt, size, cold)
            return
        self.tiers_apart = metrics.tells_tiers_apart(self._cache_metrics())
        if not self.tiers_apart:
            self.notes.append(
                "this LMCache does not count by tier: a hit after the RAM tier was emptied counts as disk"
            )
        flood = flood_size(pool, int(self.instance["max_model_len"]), block, int(self.instance["max_num_seqs"]))
        flood_prompts = [random_prompt(self.outside.rng, flood.tokens, self.vocabulary) for _ in range(flood.count)]
        keep = self._flood_fits_l1(size, flood)
        started = self.outside.clock()
        self._flood(flood, flood_prompts, keep)
        # nothing of it was known, so this is how fast prompts of its length are computed
        self.result["prefill_tokens_per_s"] = flood.total_tokens / max(1e-3, self.outside.clock() - started)
        self._wait_for_stores(size, disk=False)
        ram = self._pass("ram", prompt, size, expect="cpu")
        self._compare("RAM", cold, ram)
        if whole_cold is not None:
            self._compare("RAM to its last token", whole_cold, self._whole(whole, least_loaded=chunk))
        if self.instance["profile"] != "disk":
            return
        if self.cache is None:
            self.notes.append(
                "the disk tier of an in-process release has no counter of its own: not told apart from RAM"
            )
            return
        self._wait_for_stores(size, disk=True)
        self._check_files()
        foreign = metrics.foreign_tokens(self._cache_metrics(), SALT_PREFIX)
        if not self.may_clear or foreign > 0:
            why = f"others looked up {foreign:.0f} tokens" if foreign > 0 else "smoke_benchmark_may_clear is false"
            self.notes.append(f"disk pass left out: it empties the RAM tier, and this host takes traffic ({why})")
            return
        self._flood(flood, flood_prompts, keep)
        self.outside.drop_page_cache(str(self.server["base_path"]) if self.server else "", self.salt)
        self.cache.post_json("/cache/clear", {}, self.limits.request_s)
        disk = self._pass("disk", prompt, size, expect="disk")
        self._compare("disk", cold, disk)

    def _repeat_in_the_engine(self, prompt: Sequence[int], size: PromptSize, cold: Completion) -> None:
        """The repeat comes from the engine's own cache, unless the inventory switched that off."""
        if "--no-enable-prefix-caching" in flags.words(self.instance.get("engine_flags") or {}):
            self.notes.append("prefix caching is off (kvfleet_engine_flags): a repeated prompt is computed again")
            again = completion(self.engine, self.model, prompt, self.salt, timeout_s=self.limits.request_s)
            self._compare("a second computation", cold, again)
            return
        repeat = self._pass("engine_cache", prompt, size, expect="engine_cache")
        self._compare("the engine's own cache", cold, repeat)

    def _affordable(self, size: PromptSize, chunk: int, tokens_per_s: float) -> PromptSize:
        """``size``, or a shorter prompt where computing it would take more than ``limits.cold_s`` seconds."""
        # attention makes long prompts dearer than the short one that was measured
        most = int(self.limits.cold_s * tokens_per_s / 1.5)
        if size.tokens <= most:
            return size
        chunks = max(1, min(size.cached, most) // chunk)
        tokens = chunks * chunk + TAIL_TOKENS
        shorter = PromptSize(tokens, tokens // chunk * chunk)
        self.notes.append(
            f"prompt shortened to {tokens} tokens: this host computes {tokens_per_s:.0f} tokens per second now"
        )
        return shorter

    def _whole(self, prompt: Sequence[int], least_loaded: int = 0) -> Completion:
        """The answer to a prompt of whole chunks: from a tier, one token is left to compute, as in a step of decoding.

        Engines take another way through such a step; one was seen to skip the load there and nowhere else. A repeat
        that took fewer than ``least_loaded`` tokens from the tiers shows nothing.
        """
        before = metrics.prompt_tokens_by_source(self._engine_metrics())
        answer = completion(self.engine, self.model, prompt, f"{self.salt}-whole", timeout_s=self.limits.request_s)
        loaded = self._sources_since(before, len(prompt))["external"]
        if loaded < least_loaded:
            code, fix = _TIER_MISSED["cpu"]
            self._add(
                code,
                f"The RAM tier delivered {loaded:.0f} of {len(prompt)} tokens of a repeated prompt of whole chunks.",
                fix, hit_tokens=loaded, expected_tokens=least_loaded,
            )  # fmt: skip
        return answer

    # -- passes ---------------------------------------------------------------------------------------------------

    def _pass(self, name: str, prompt: Sequence[int], size: PromptSize, expect: str | None) -> Completion:
        """Send the long prompt once; check by counters that ``expect`` (``None`` = nothing) served it."""
        sources_before = metrics.prompt_tokens_by_source(self._engine_metrics())
        tiers_before = self._tier_tokens()
        answer = completion(self.engine, self.model, prompt, self.salt, timeout_s=self.limits.request_s)
        if answer.prompt_tokens != size.tokens:
            self.notes.append(f"the engine counted {answer.prompt_tokens} prompt tokens where {size.tokens} were sent")
        sources = self._sources_since(sources_before, size.tokens)
        tiers = metrics.differences(tiers_before, self._tier_tokens())
        self.result["ttft_ms"][name] = round(answer.ttft_ms, 1)
        if expect is None:
            self._check_cold(sources, tiers, size)
        elif expect == "engine_cache":
            self._check_engine_cache(sources, size)
        else:
            self._check_tier(name, expect, sources, tiers, size)
        return answer

    def _check_cold(self, sources: Mapping[str, float], tiers: Mapping[str, float], size: PromptSize) -> None:
        stale = max(tiers["hit"], tiers["cpu"] + tiers["disk"])
        alone = sum(sources.values()) <= size.tokens
        if alone:
            stale = max(stale, sources["external"], sources["engine_cache"])
        if stale > 0:
            self._add(
                "KVF-BENCH-005",
                f"A prompt that was never sent before hit {stale:.0f} tokens, so hits of this host prove nothing.",
                "Look for a cache server that ignores cache_salt or a proxy that answers from memory.",
                hit_tokens=stale,
                allowed_tokens=0,
            )

    def _check_engine_cache(self, sources: Mapping[str, float], size: PromptSize) -> None:
        hits = sources["engine_cache"]
        self.result["hit_tokens"]["engine_cache"] = int(hits)
        # vLLM reuses whole blocks and always computes the last token
        if hits < size.cached * 0.9:
            self._add(
                "KVF-BENCH-011",
                f"The repeated prompt found {hits:.0f} of {size.cached} tokens in the engine's own cache.",
                "Check that prefix caching is on (no --no-enable-prefix-caching) and that no other load displaces it.",
                hit_tokens=hits, expected_tokens=size.cached,
            )  # fmt: skip

    def _check_tier(
        self, name: str, tier: str, sources: Mapping[str, float], tiers: Mapping[str, float], size: PromptSize
    ) -> None:
        if self.cache is None:
            hits = sources["external"]
        elif self.tiers_apart:
            hits = tiers[tier]
        else:
            # the pass after the RAM tier was emptied can only have come from disk
            hits = tiers["hit"]
        self.result["hit_tokens"][name] = int(hits)
        where = "RAM tier (LMCache's L1)" if tier == "cpu" else "disk tier (LMCache's L2)"
        other = "disk" if tier == "cpu" else "cpu"
        if sources["engine_cache"] > size.cached * 0.1 and sum(sources.values()) <= size.tokens:
            self._add(
                "KVF-BENCH-011",
                f"The engine's own cache still held {sources['engine_cache']:.0f} of {size.cached} tokens, so the "
                f"{where} was not asked for them.",
                "Run the proof without other load; if it stays, report the pool's size that kvfleet_plan predicts.",
                engine_cache_tokens=sources["engine_cache"],
                allowed_tokens=size.cached * 0.1,
            )
        elif hits < size.cached * 0.9:
            code, fix = _TIER_MISSED[tier]
            self._add(
                code,
                f"The {where} delivered {hits:.0f} of {size.cached} tokens of the repeated prompt"
                f" ({tiers[other]:.0f} came from the other tier, {sources['computed']:.0f} were computed again).",
                fix, hit_tokens=hits, expected_tokens=size.cached,
            )  # fmt: skip
        elif sources["external"] < size.cached * 0.9:
            self._add(
                "KVF-BENCH-013",
                f"LMCache reported {hits:.0f} hit tokens but the engine loaded {sources['external']:.0f}: a "
                "lookup is not a load.",
                "Read the engine's journal for failed loads (kv_load_failure_policy recomputes them silently).",
                loaded_tokens=sources["external"], expected_tokens=hits,
            )  # fmt: skip

    def _compare(self, where: str, cold: Completion, repeat: Completion) -> None:
        found = compare(cold, repeat, self.tolerance)
        known = self.result["max_logprob_difference"]
        worst = max(known or 0.0, found.max_logprob_difference)
        # JSON has no infinity
        self.result["max_logprob_difference"] = worst if math.isfinite(worst) else None
        self.result["identical"] = bool(found.same and self.result["identical"] in (None, True))
        if found.same and not found.identical:
            self.notes.append(
                f"served from {where} the answer parts at token {found.first_difference}, a near-tie within "
                f"{self.tolerance.tie:g}"
            )
        if not found.same:
            self._add(
                "KVF-BENCH-008",
                f"Served from {where}, the same prompt gives another answer: {found.reason}.",
                "Do not serve from this cache: wipe the tier, and check versions, dtype and the disk's health.",
                max_logprob_difference=self.result["max_logprob_difference"],
                allowed_difference=self.tolerance.logprob,
            )

    # -- displacing the pool, waiting for stores ------------------------------------------------------------------

    def _flood_fits_l1(self, size: PromptSize, flood: Flood) -> bool:
        """Whether the flood may be stored: then its repeat is loaded, which is much faster than computing it again."""
        l1_gib = (self.server or {}).get("l1_gib") or 0
        bytes_needed = (size.tokens + flood.total_tokens) * float(self.instance["kv_bytes_per_token"])
        return bool(bytes_needed <= FLOOD_SHARE_OF_L1 * float(l1_gib) * 1024**3)

    def _flood(self, flood: Flood, prompts: Sequence[Sequence[int]], store: bool) -> None:
        """Send the flood's prompts, ``flood.concurrency`` at a time, within ``limits.flood_s``."""
        deadline = self.outside.clock() + self.limits.flood_s

        def send(prompt: Sequence[int]) -> None:
            left = deadline - self.outside.clock()
            if left <= 0:
                raise refuse(
                    "KVF-BENCH-014",
                    f"Displacing the pool of instance {self.instance['name']} with {flood.total_tokens} tokens "
                    "took more than "
                    f"{self.limits.flood_s:g} s.",
                    "Raise smoke_benchmark_flood_limit_s or lower the pool (kvfleet_gpu_memory_utilization) for "
                    "the proof.",
                    flood_tokens=flood.total_tokens, allowed_s=self.limits.flood_s,
                )  # fmt: skip
            completion(self.engine, self.model, prompt, f"{self.salt}-flood", 1, store, timeout_s=max(1.0, left))

        def send_all(batch: Sequence[Sequence[int]]) -> float:
            before = metrics.prompt_tokens_by_source(self._engine_metrics())
            with ThreadPoolExecutor(flood.concurrency) as pool:
                list(pool.map(send, batch))
            since = self._sources_since(before, sum(map(len, batch)))
            return since["computed"] + since["external"]

        # what an earlier flood left in the pool is found there again and takes no new blocks: send more until the
        # engine itself counted a whole pool of computed or loaded tokens
        taken = send_all(prompts)
        while taken < flood.total_tokens:
            missing = -(-int(flood.total_tokens - taken) // flood.tokens)
            fresh = [random_prompt(self.outside.rng, flood.tokens, self.vocabulary) for _ in range(missing)]
            taken += max(1.0, send_all(fresh))

    def _wait_for_stores(self, size: PromptSize, disk: bool) -> None:
        """Wait until the long prompt's chunks are in L1 (and, for ``disk``, on disk): stores are asynchronous."""
        if self.cache is None:
            self.outside.sleep(2.0)
            return
        chunks = size.cached // int(self.instance["chunk_tokens"])
        deadline = self.outside.clock() + self.limits.settle_s
        stored = 0.0
        name = "lmcache_mp_l2_store_completed_objects_chunks_total" if disk else "lmcache_mp_l1_write_chunks_total"
        previous = -1.0
        while True:
            page = self._cache_metrics()
            stored = metrics.of_salt(page, name, self.salt)
            submitted = metrics.of_salt(page, "lmcache_mp_l2_store_submitted_objects_chunks_total", self.salt)
            # several ranks store several objects a chunk: also wait until the count stands still
            if stored >= chunks and stored == previous and not (disk and submitted > stored):
                return
            if self.outside.clock() > deadline:
                break
            previous = stored
            self.outside.sleep(0.25)
        self._add(
            "KVF-BENCH-010",
            f"Only {stored:.0f} of {chunks} chunks were stored {'on disk' if disk else 'in RAM'} within "
            f"{self.limits.settle_s:g} s.",
            "Read the journal of kvfleet-lmcache@ for failed writes; check free space and health of the cache "
            "partition."
            if disk
            else "Read the journals of kvfleet-lmcache@ and kvfleet-vllm@ for a connector that does not store.",
            stored_chunks=stored, expected_chunks=chunks,
        )  # fmt: skip

    def _check_files(self) -> None:
        """Bytes of this run's own files below the tier's directory, and what the server says that it uses."""
        size_bytes, files = self.outside.tier_files(str(self.server["base_path"]) if self.server else "", self.salt)
        self.result["bytes"]["disk"] = size_bytes
        self.result["bytes"]["disk_files"] = files
        page = self._cache_metrics()
        self.result["bytes"]["ram"] = int(page.total("lmcache_mp_l1_memory_usage_bytes"))
        self.result["bytes"]["disk_usage"] = int(page.total("lmcache_mp_l2_usage_bytes"))
        if size_bytes <= 0:
            self._add(
                "KVF-BENCH-009",
                f"No file of this run lies below {self.server['base_path'] if self.server else '(no directory)'}, "
                "though the prompt was stored.",
                "Check that the server's base_path is the mounted cache partition of the plan.",
            )

    # -- counters -------------------------------------------------------------------------------------------------

    def _engine_metrics(self) -> metrics.Metrics:
        return metrics.parse(self.engine.get_text("/metrics"))

    def _cache_metrics(self) -> metrics.Metrics:
        return metrics.parse(self.cache.get_text("/metrics")) if self.cache else metrics.Metrics(())

    def _tier_tokens(self) -> dict[str, float]:
        return metrics.tier_tokens(self._cache_metrics(), self.salt)

    def _sources_since(self, before: Mapping[str, float], prompt_tokens: int) -> dict[str, float]:
        """Prompt tokens by source since ``before``; the counters trail the answer by a moment."""
        for _ in range(20):
            since = metrics.differences(before, metrics.prompt_tokens_by_source(self._engine_metrics()))
            if sum(since.values()) >= prompt_tokens:
                break
            self.outside.sleep(0.1)
        return since

    def _add(self, code: str, message: str, fix: str, **numbers: Any) -> None:
        self.findings.append(Finding(code, f"Instance {self.instance['name']}: {message}", fix, numbers))


def check_model_name(engine: Client, instance: Mapping[str, Any]) -> None:
    """Refuse (KVF-BENCH-003) unless the server lists the instance's model name. Raises :class:`HttpFailure` too."""
    answer = engine.get_json("/v1/models")
    listed = [str(entry.get("id")) for entry in (answer or {}).get("data") or ()]
    if instance["served_model_name"] not in listed:
        raise refuse(
            "KVF-BENCH-003",
            f"Instance {instance['name']} should serve {instance['served_model_name']}, but port "
            f"{instance['port']} lists "
            f"{', '.join(listed) or 'nothing'}.",
            "Another server holds the port, or the unit runs an old command: check kvfleet_instances and the "
            "unit's state.",
            listed=listed,
        )  # fmt: skip


def real_completion(engine: Client, model: str, timeout_s: float) -> dict[str, Any]:
    """A short completion of words, not ids, so that tokenizer and detokenizer take part; returns usage and latency."""
    started = time.monotonic()
    answer = engine.post_json(
        "/v1/completions",
        {
            "model": model,
            "prompt": "A cache that tells the truth",
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        },
        timeout_s,
    )
    latency_ms = (time.monotonic() - started) * 1000
    usage = (answer or {}).get("usage") or {}
    if not (answer or {}).get("choices") or not usage.get("completion_tokens"):
        raise HttpFailure("broken", f"{engine.base_url}/v1/completions: no token came back")
    return {"latency_ms": round(latency_ms, 1), "completion_tokens": int(usage["completion_tokens"])}


def request_finding(name: str, failure: HttpFailure) -> Finding:
    """A failed request as a finding: not up yet, wrong key, a request that can never work, or a broken answer."""
    if failure.kind == "refused" or failure.status == 503:
        return Finding(
            "KVF-BENCH-001",
            f"Instance {name} is not up: {failure}.",
            f"Read journalctl -u kvfleet-vllm@{name}.service.",
        )
    if failure.status in (401, 403):
        return Finding(
            "KVF-BENCH-002",
            f"Instance {name} refuses the key: {failure}.",
            "Set the API key that the instance was started with.",
        )
    if failure.status is not None and 400 <= failure.status < 500:
        return Finding(
            "KVF-BENCH-004",
            f"Instance {name} can never answer this request: {failure}.",
            "Check served_model_name and max_model_len of kvfleet_instances.",
        )
    return Finding(
        "KVF-BENCH-004",
        f"Instance {name} gave no usable answer: {failure}.",
        f"Read journalctl -u kvfleet-vllm@{name}.service.",
    )
