"""The load part of the proof: which runs a profile has, what a result file says, and the verdict over everything.

Pure functions. Times are milliseconds, rates are per second, sizes are tokens or bytes as their names say.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .findings import Finding, refuse
from .metrics import percentile

PROFILES = ("smoke", "article", "long", "custom")

#: the article's load: 200 requests, 2048 tokens in, 128 out, five concurrencies
ARTICLE_REQUESTS = 200
ARTICLE_INPUT_TOKENS = 2048
ARTICLE_OUTPUT_TOKENS = 128
ARTICLE_CONCURRENCIES = (1, 4, 8, 16, 32)
#: its RAG prompts as first measured with vLLM's own dataset: 50 prefixes of 2000 tokens, 48 tokens of question
ARTICLE_PREFIXES = 50
ARTICLE_SUFFIX_TOKENS = 48
#: more would take longer than anybody waits
ARTICLE_MOST_PREFIXES = 2000
#: contexts of profile ``long``
LONG_CONTEXTS = (32768, 131072)

#: fewer samples than this support no such percentile: the value would simply be the slowest request
SAMPLES_FOR_P95 = 20
SAMPLES_FOR_P99 = 100

_SERIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Run:
    """One ``vllm bench serve`` call.

    ``dataset`` is ``prefix_repetition`` (``prefixes`` prefixes of ``prefix_tokens``, each followed by
    ``suffix_tokens``) or ``random`` (``input_tokens``). ``phase``: ``populate`` fills the tiers and is the declared
    warm-up, ``warm`` repeats the same prompts, ``single`` stands for itself. ``clear_ram`` empties LMCache's RAM tier
    before the run, so that the disk tier serves it.
    """

    name: str
    phase: str
    dataset: str
    requests: int
    concurrency: int
    output_tokens: int
    seed: int
    prefixes: int = 0
    prefix_tokens: int = 0
    suffix_tokens: int = 0
    input_tokens: int = 0
    clear_ram: bool = False
    load: str = "rag"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of one prompt."""
        return self.input_tokens or self.prefix_tokens + self.suffix_tokens

    @property
    def working_set_tokens(self) -> int:
        """Tokens whose KV a repeat can reuse."""
        return self.prefixes * self.prefix_tokens if self.dataset == "prefix_repetition" else 0


@dataclass(frozen=True)
class Speed:
    """What the truth check measured on an instance: prompt tokens per second, one output token's milliseconds."""

    prefill_tokens_per_s: float
    decode_ms_per_token: float


@dataclass(frozen=True)
class Capacity:
    """Room of an instance in tokens: engine pool, RAM tier, disk tier (0 = none), and its limits."""

    pool_tokens: int
    ram_tokens: int
    disk_tokens: int
    chunk_tokens: int
    max_model_len: int
    max_num_seqs: int


def capacity(instance: Mapping[str, Any], server: Mapping[str, Any] | None, pool_tokens: int) -> Capacity:
    """The plan's room in tokens; ``pool_tokens`` as the running engine tells it."""
    per_token = float(instance["kv_bytes_per_token"])
    ram = float((server or {}).get("l1_gib") or 0) * 1024**3
    disk = float((server or {}).get("quota_gib") or 0) * 1024**3
    return Capacity(
        pool_tokens=pool_tokens,
        ram_tokens=int(ram / per_token),
        disk_tokens=int(disk / per_token),
        chunk_tokens=int(instance.get("chunk_tokens") or instance["block_size_tokens"]),
        max_model_len=int(instance["max_model_len"]),
        max_num_seqs=int(instance["max_num_seqs"]),
    )


@dataclass(frozen=True)
class LoadPlan:
    """The runs of a profile, what to say about their sizes, and the factor that shortened them (1 = as published)."""

    profile: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    scale: float = 1.0


def smoke_runs(
    room: Capacity,
    speed: Speed,
    seed: int,
    budget_s: float,
    may_clear: bool = False,
    shape: Mapping[str, Any] | None = None,
) -> LoadPlan:
    """The default load: the same prefixes cold, then warm at 1 and at 16 (or ``max_num_seqs``), then from disk.

    The working set is a quarter larger than the engine's own pool: a repeat in the same order then finds nothing
    there (least recently used goes first) and must be served by a tier. ``budget_s`` seconds are split 60 : 25 : 15
    over the cold run, the warm one at 1 and the others; prefixes are long where the pool is large, outputs short
    where time is short. ``shape`` are the sizes of an earlier load, kept while they fit.
    """
    notes: list[str] = []
    chunk, suffix, shortest = room.chunk_tokens, 32, 4
    longest = room.max_model_len - suffix - 64 - 16
    if longest < chunk:
        raise refuse(
            "KVF-BENCH-012",
            f"A prompt of one chunk ({chunk} tokens) with {suffix + 64} tokens around it does not fit "
            f"max_model_len {room.max_model_len}.",
            "Raise kvfleet_max_model_len or lower kvfleet_chunk_tokens.",
            max_model_len=room.max_model_len,
            chunk_tokens=chunk,
        )
    many = max(1, min(16, room.max_num_seqs))
    if shape and _shape_fits(shape, room):
        prefixes, prefix, output_tokens = (int(shape[key]) for key in _SHAPE_KEYS)
    else:
        prefix = min(longest, int(speed.prefill_tokens_per_s * 2), max(2048, room.pool_tokens // 64))
        prefix = max(chunk, prefix // chunk * chunk)
        prompt_s = (prefix + suffix) / speed.prefill_tokens_per_s
        decode_s = speed.decode_ms_per_token / 1000
        wanted = max(4, math.ceil(1.25 * room.pool_tokens / prefix))
        tier = max(room.ram_tokens, room.disk_tokens)
        limits = {
            "the time (smoke_benchmark_budget_s)": int(0.6 * budget_s / (prompt_s + shortest * decode_s)),
            "the tiers' size": int(0.8 * tier / (prefix + suffix)) if tier else wanted,
        }
        why = min(limits, key=lambda name: limits[name])
        prefixes = max(4, min(wanted, limits[why]))
        if prefixes < wanted:
            notes.append(
                f"{why} allows {prefixes} prefixes of {prefix} tokens, the engine's pool of {room.pool_tokens} tokens "
                f"would need {wanted} to overflow: its own cache serves part of the warm runs"
            )
        # a served prompt is assumed to take a tenth of its computing time; measured gains are larger
        output = (0.25 * budget_s / prefixes - 0.1 * prompt_s) / max(decode_s, 1e-6)
        output_tokens = max(shortest, min(64, int(output)))
    cold = Run(
        name="cold-c1",
        phase="populate",
        dataset="prefix_repetition",
        requests=prefixes,
        concurrency=1,
        output_tokens=shortest,
        seed=seed,
        prefixes=prefixes,
        prefix_tokens=prefix,
        suffix_tokens=suffix,
    )
    runs = [cold, replace(cold, name="warm-c1", phase="warm", output_tokens=output_tokens)]
    if many > 1:
        runs.append(replace(cold, name=f"warm-c{many}", phase="warm", concurrency=many, output_tokens=output_tokens))
    if may_clear and room.disk_tokens:
        # the RAM tier may hold everything: without it the disk shows what it is worth
        runs.append(replace(runs[-1], name=f"disk-c{many}", clear_ram=True))
    return LoadPlan("smoke", tuple(runs), tuple(notes))


#: sizes that make two smoke loads the same
_SHAPE_KEYS = ("prefixes", "prefix_tokens", "output_tokens")


def shape_of(plan: LoadPlan) -> dict[str, int]:
    """Sizes of a load's warm runs; two results with the same shape can be compared."""
    run = next((run for run in plan.runs if run.phase == "warm"), plan.runs[-1])
    return {key: int(getattr(run, key)) for key in _SHAPE_KEYS}


def _shape_fits(shape: Mapping[str, Any], room: Capacity) -> bool:
    """Whether an earlier load's sizes still overflow the pool and fit model and tiers."""
    try:
        prefixes, prefix, output = (int(shape[key]) for key in _SHAPE_KEYS)
    except (KeyError, TypeError, ValueError):
        return False
    total = prefixes * prefix
    tier = max(room.ram_tokens, room.disk_tokens)
    return (
        prefixes >= 4
        and output >= 4
        and prefix % room.chunk_tokens == 0
        and prefix + 32 + output + 16 <= room.max_model_len
        and 1.1 * room.pool_tokens <= total <= 2.5 * room.pool_tokens
        and (not tier or total <= 0.9 * tier)
    )


#: share of the hit bytes that must have come from the device; the rest may be metadata, read-ahead or staging
_DEVICE_SHARE = 0.5


def served_by(hit_bytes: int, read_bytes: int) -> str:
    """``device`` when the disk tier's device really read what was hit, else ``page cache``: RAM posing as a disk."""
    return "device" if read_bytes >= _DEVICE_SHARE * hit_bytes else "page cache"


def article_runs(room: Capacity, seed: int, scale: float = 1.0, may_clear: bool = False) -> LoadPlan:
    """The article's load, twice: its own random prompts, and RAG prompts that share prefixes.

    ``scale`` below 1 shortens requests, prompts and outputs alike; the five concurrencies stay. With ``may_clear`` a
    disk tier serves the repeats, not the RAM above it: that is emptied before each of them.
    """
    if not 0 < scale <= 1:
        raise refuse(
            "KVF-BENCH-015",
            f"A scale of {scale:g} makes no load.",
            "Set smoke_benchmark_article_scale above 0, at most 1.",
        )
    notes: list[str] = []
    chunk = room.chunk_tokens
    # fewer requests than the highest concurrency would never reach it
    requests = max(ARTICLE_CONCURRENCIES[-1], round(ARTICLE_REQUESTS * scale))
    output = max(4, round(ARTICLE_OUTPUT_TOKENS * scale))
    longest = room.max_model_len - output - 16
    total = min(longest, max(chunk + ARTICLE_SUFFIX_TOKENS, round(ARTICLE_INPUT_TOKENS * scale)))
    suffix = min(ARTICLE_SUFFIX_TOKENS, max(8, total - chunk))
    if total < chunk + 8:
        raise refuse(
            "KVF-BENCH-012",
            f"The article's prompt shortened to {total} tokens holds no chunk of {chunk} tokens.",
            "Raise kvfleet_max_model_len or smoke_benchmark_article_scale, or lower kvfleet_chunk_tokens.",
        )
    if scale < 1:
        notes.append(
            f"scale {scale:g}: {requests} requests of {total} tokens in and {output} out, the article ran "
            f"{ARTICLE_REQUESTS} of {ARTICLE_INPUT_TOKENS} in and {ARTICLE_OUTPUT_TOKENS} out"
        )
    waiting = [many for many in ARTICLE_CONCURRENCIES if many > room.max_num_seqs]
    if waiting:
        notes.append(
            f"max_num_seqs is {room.max_num_seqs} in every set-up: at concurrency {', '.join(map(str, waiting))} "
            "requests "
            "wait (the article compared 16 on the GPU alone with 32 with offload)"
        )
    runs = [
        Run(
            name=f"random-c{many}", phase="single", dataset="random", requests=requests, concurrency=many,
            output_tokens=output, seed=seed + many, input_tokens=total, load="random",
        )
        for many in ARTICLE_CONCURRENCIES
    ]  # fmt: skip
    prefix = total - suffix
    usual = max(2, min(ARTICLE_PREFIXES, requests // 4))
    # prefixes that fit the engine's own pool are served from there in every set-up, and nothing is compared
    overflowing = math.ceil(1.25 * room.pool_tokens / prefix)
    tier = max(room.ram_tokens, room.disk_tokens)
    most = min(ARTICLE_MOST_PREFIXES, int(0.8 * tier / total) if tier else ARTICLE_MOST_PREFIXES)
    prefixes = max(usual, min(overflowing, most))
    if prefixes > usual:
        notes.append(
            f"{prefixes} prefixes instead of {usual}, so that they exceed the pool of {room.pool_tokens} tokens"
        )
    if prefixes < overflowing:
        notes.append(
            f"{overflowing} prefixes would be needed to exceed the pool of {room.pool_tokens} tokens, {prefixes} "
            "are sent: "
            "the engine's own cache serves part of the repeats in every set-up"
        )
    rag = Run(
        name="rag-populate", phase="populate", dataset="prefix_repetition",
        requests=-(-requests // prefixes) * prefixes, concurrency=min(16, room.max_num_seqs),
        output_tokens=output, seed=seed, prefixes=prefixes, prefix_tokens=total - suffix, suffix_tokens=suffix,
    )  # fmt: skip
    runs.append(rag)
    from_disk = may_clear and room.disk_tokens > 0
    if from_disk:
        notes.append("the RAM tier is emptied before every repeat in this set-up, so that the disk tier serves it")
    runs += [
        replace(rag, name=f"rag-c{many}", phase="warm", concurrency=many, clear_ram=from_disk)
        for many in ARTICLE_CONCURRENCIES
    ]
    return LoadPlan("article", tuple(runs), tuple(notes), scale)


def long_runs(room: Capacity, seed: int, may_clear: bool = False) -> LoadPlan:
    """32K and 128K tokens as far as ``max_model_len`` and the pool allow, one at a time: cold, warm, and from disk."""
    runs: list[Run] = []
    notes: list[str] = []
    for context in LONG_CONTEXTS:
        if context + 64 + 16 > min(room.max_model_len, room.pool_tokens):
            notes.append(
                f"{context} tokens left out: max_model_len {room.max_model_len}, pool {room.pool_tokens} tokens"
            )
            continue
        cold = Run(
            name=f"cold-{context // 1024}k", phase="populate", dataset="prefix_repetition", requests=4, concurrency=1,
            output_tokens=64, seed=seed + context, prefixes=4, prefix_tokens=context - 64, suffix_tokens=64,
        )  # fmt: skip
        warm = replace(cold, name=f"warm-{context // 1024}k", phase="warm")
        runs += [cold, warm]
        if may_clear and room.disk_tokens:
            runs.append(replace(warm, name=f"disk-{context // 1024}k", clear_ram=True))
    if not runs:
        raise refuse(
            "KVF-BENCH-012",
            f"Profile long needs {LONG_CONTEXTS[0]} tokens of context; max_model_len is {room.max_model_len} and "
            "the pool "
            f"holds {room.pool_tokens} tokens.",
            "Raise kvfleet_max_model_len, or use smoke_benchmark_profile: smoke.",
        )
    return LoadPlan("long", tuple(runs), tuple(notes))


def custom_runs(entries: Sequence[Mapping[str, Any]], room: Capacity, seed: int) -> LoadPlan:
    """Runs that a user wrote: each entry has the fields of :class:`Run`; sizes are checked against the instance."""
    if not entries:
        raise refuse(
            "KVF-BENCH-016", "Profile custom has no runs.", "Set smoke_benchmark_custom_runs to a list of runs."
        )
    known = set(Run.__dataclass_fields__)
    runs = []
    for number, entry in enumerate(entries, 1):
        unknown = sorted(set(entry) - known)
        if unknown:
            raise refuse(
                "KVF-BENCH-016",
                f"Run {number} of smoke_benchmark_custom_runs has unknown fields {', '.join(unknown)}.",
                f"Use {', '.join(sorted(known))}.",
            )
        try:
            run = Run(
                **{
                    "name": f"custom-{number}",
                    "phase": "single",
                    "seed": seed,
                    "concurrency": 1,
                    "load": "custom",
                    **entry,
                }
            )
        except TypeError as error:
            raise refuse(
                "KVF-BENCH-016",
                f"Run {number} of smoke_benchmark_custom_runs: {error}.",
                "Give dataset, requests, output_tokens and the dataset's sizes.",
            ) from error
        runs.append(run)
    plan = LoadPlan("custom", tuple(runs), ())
    for run in plan.runs:
        check_run(run, room)
    return plan


def check_run(run: Run, room: Capacity) -> None:
    """Refuse (KVF-BENCH-012, -016) a run that can never work on the instance, before anything is sent."""
    if run.dataset not in ("prefix_repetition", "random"):
        raise refuse(
            "KVF-BENCH-016", f"Run {run.name}: dataset {run.dataset!r} is unknown.", "Use prefix_repetition or random."
        )
    sizes = (run.requests, run.concurrency, run.output_tokens, run.prompt_tokens)
    if min(sizes) < 1 or (run.dataset == "prefix_repetition" and not 1 <= run.prefixes <= run.requests):
        raise refuse(
            "KVF-BENCH-016",
            f"Run {run.name}: {run.requests} requests, {run.prefixes} prefixes, {run.prompt_tokens} tokens in, "
            f"{run.output_tokens} out, concurrency {run.concurrency} is no load.",
            "Every size must be at least 1, and requests at least the number of prefixes.",
        )
    if run.prompt_tokens + run.output_tokens + 8 > room.max_model_len:
        raise refuse(
            "KVF-BENCH-012",
            f"Run {run.name}: {run.prompt_tokens} tokens in and {run.output_tokens} out exceed max_model_len "
            f"{room.max_model_len}.",
            "Shorten the run or raise kvfleet_max_model_len.",
        )


def bench_arguments(
    run: Run, base_url: str, served_model_name: str, tokenizer: str, salt: str, result_dir: str
) -> list[str]:
    """Arguments of ``vllm`` for one run; the tokenizer is a local directory, never a hub name.

    ``--ready-check-timeout-sec 0``: the readiness check would send the first prompt and warm it.
    """
    arguments = [
        "bench", "serve", "--backend", "vllm", "--base-url", base_url, "--endpoint", "/v1/completions",
        "--model", served_model_name, "--tokenizer", tokenizer,
        "--dataset-name", run.dataset, "--num-prompts", str(run.requests), "--max-concurrency", str(run.concurrency),
        "--seed", str(run.seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        "--ready-check-timeout-sec", "0", "--percentile-metrics", ",".join(_SERIES), "--metric-percentiles", "50,95,99",
        "--extra-body", json.dumps({"cache_salt": salt}, separators=(",", ":")),
        "--save-result", "--save-detailed", "--result-dir", result_dir, "--result-filename", f"{run.name}.json",
    ]  # fmt: skip
    if run.dataset == "prefix_repetition":
        arguments += [
            "--prefix-repetition-prefix-len", str(run.prefix_tokens),
            "--prefix-repetition-suffix-len", str(run.suffix_tokens),
            "--prefix-repetition-num-prefixes", str(run.prefixes),
            "--prefix-repetition-output-len", str(run.output_tokens),
        ]  # fmt: skip
    else:
        arguments += [
            "--random-input-len", str(run.input_tokens), "--random-output-len", str(run.output_tokens),
            "--random-range-ratio", "0.0",
        ]  # fmt: skip
    return arguments


def parse_result(text: str, run: Run) -> dict[str, Any]:
    """Figures of one run from the JSON that ``vllm bench serve --save-result --save-detailed`` wrote.

    Percentiles are computed from the single requests and left ``None`` when the sample is too small to support them
    (95: 20 requests, 99: 100). Raises KVF-BENCH-020 for a file that is no result, -021 for requests that are missing
    or failed, -022 for figures that are no measurement (zero tokens, zero or no time, NaN).
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise refuse(
            "KVF-BENCH-020",
            f"The result of run {run.name} is no complete JSON ({error}): the benchmark ended in the middle.",
            "Read the benchmark's output in the result; run again.",
        ) from error
    if not isinstance(raw, dict) or "completed" not in raw:
        raise refuse(
            "KVF-BENCH-020",
            f"The result of run {run.name} holds no figures.",
            "Read the benchmark's output in the result.",
        )
    completed, failed = raw.get("completed"), raw.get("failed", 0)
    if completed != run.requests or failed:
        raise refuse(
            "KVF-BENCH-021",
            f"Run {run.name}: {completed} of {run.requests} requests completed, {failed} failed"
            f"{_first_error(raw)} (the tool itself ends with status 0 then).",
            "Read the instance's journal; the service cannot take this load.",
            completed=completed, asked=run.requests, failed=failed,
        )  # fmt: skip
    figures: dict[str, Any] = {
        "completed": completed,
        "failed": failed,
        "duration_s": raw.get("duration"),
        "requests_per_s": raw.get("request_throughput"),
        "output_tokens_per_s": raw.get("output_throughput"),
        "total_tokens_per_s": raw.get("total_token_throughput"),
        "input_tokens": raw.get("total_input_tokens"),
        "output_tokens": raw.get("total_output_tokens"),
    }
    for name in _SERIES:
        ours = {"e2el": "e2e"}.get(name, name)
        figures[ours] = summary(_milliseconds(raw, name), raw.get(f"mean_{name}_ms"))
    bad = [
        name for name in ("duration_s", "requests_per_s", "output_tokens_per_s", "input_tokens", "output_tokens")
        if not _is_measurement(figures[name])
    ]  # fmt: skip
    bad += [f"{name} mean" for name in ("ttft", "e2e") if not _is_measurement(figures[name]["mean"])]
    if bad:
        raise refuse(
            "KVF-BENCH-022",
            f"Run {run.name} measured nothing in {', '.join(bad)}: zero and NaN are no measurement.",
            "Check that the instance streams tokens and that the tokenizer in the model directory is the model's own.",
        )
    return figures


def _first_error(raw: Mapping[str, Any]) -> str:
    """The first request's error, for the message."""
    error = next((str(entry) for entry in raw.get("errors") or () if entry), "")
    lines = [line for line in error.splitlines() if line.strip()]
    return f"; first error: {lines[-1].strip()[:200]}" if lines else ""


def _milliseconds(raw: Mapping[str, Any], name: str) -> list[float]:
    """One value a request (for ``itl`` one a token) in milliseconds, from the detailed arrays."""
    itls = [list(entry) for entry in raw.get("itls") or ()]
    if name == "ttft":
        return [value * 1000 for value in raw.get("ttfts") or ()]
    if name == "itl":
        return [value * 1000 for entry in itls for value in entry]
    latencies = list(raw.get("latencies") or ())
    if name == "e2el":
        return [value * 1000 for value in latencies]
    # vLLM's own definition: time after the first token, divided by the tokens after the first
    ttfts, lengths = list(raw.get("ttfts") or ()), list(raw.get("output_lens") or ())
    return [
        (latency - ttft) / (length - 1) * 1000 for latency, ttft, length in zip(latencies, ttfts, lengths) if length > 1
    ]


def summary(values: Sequence[float], mean: float | None = None) -> dict[str, float | None]:
    """Spread and percentiles of ``values``; percentiles that the sample cannot carry are ``None``."""
    if not values:
        return {"mean": mean, "std": None, "p50": None, "p95": None, "p99": None, "max": None, "samples": 0}
    return {
        "mean": math.fsum(values) / len(values),
        "std": statistics.pstdev(values),
        "p50": percentile(values, 0.5),
        "p95": percentile(values, 0.95) if len(values) >= SAMPLES_FOR_P95 else None,
        "p99": percentile(values, 0.99) if len(values) >= SAMPLES_FOR_P99 else None,
        "max": max(values),
        "samples": len(values),
    }


def _is_measurement(value: Any) -> bool:
    """A number above zero that is neither NaN nor infinite."""
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def run_as_dict(run: Run) -> dict[str, Any]:
    """A run as plain data for the result file."""
    return {**asdict(run), "prompt_tokens": run.prompt_tokens}


# -- verdict ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """Limits that decide; ``None`` is not checked. The speed-ups are the second witness beside the counters."""

    ttft_p99_ms: float | None = None
    tpot_mean_ms: float | None = None
    requests_per_s: float | None = None
    min_warm_speedup_ram: float = 2.0
    min_warm_speedup_disk: float = 1.3


@dataclass(frozen=True)
class Reason:
    """Why a verdict is not ``pass``: the figure, its value and limit, and the likely causes."""

    level: str
    code: str
    figure: str
    message: str
    fix: str
    value: float | None = None
    limit: float | None = None


def judge(
    truth: Sequence[Mapping[str, Any]],
    units: Sequence[Mapping[str, Any]],
    load: Mapping[str, Any] | None,
    thresholds: Thresholds,
    gone: str = "",
) -> dict[str, Any]:
    """The verdict over one host's proof.

    ``truth`` is ``truth_check``'s list of instances, ``units`` its findings about units, ``load`` what ``bench_load``
    returned (``None`` = it did not run), ``gone`` how the host went away in the middle, if it did. Returns ``verdict``
    (``pass``, ``degrade``, ``fail``), ``reasons`` and ``deciding`` (the figure that decided, or the leading figure of a
    pass).
    """
    reasons = [_from_finding(entry) for entry in units]
    for instance in truth:
        reasons += [_from_finding(entry) for entry in instance.get("findings") or ()]
        reasons += _speedups(instance, thresholds)
    if gone:
        reasons.append(
            Reason(
                "fail",
                "KVF-BENCH-047",
                "host",
                f"The host stopped answering during the proof: {gone}",
                "Read its journal of the time before (journalctl -b -1) once it is up again, then run again.",
            )
        )
    elif not truth:
        reasons.append(Reason("fail", "KVF-BENCH-040", "truth", "No instance was checked.", "Check kvfleet_instances."))
    if gone:
        pass
    elif load is None:
        if not reasons:
            reasons.append(
                Reason("fail", "KVF-BENCH-041", "load", "The load did not run.", "Read the tasks above; run again.")
            )
    else:
        for instance in load.get("instances") or ():
            reasons += [_from_finding(entry) for entry in instance.get("findings") or ()]
            reasons += _load_limits(instance, thresholds)
        reasons += _unproved_disk(truth, load)
    return conclude(reasons, truth)


def conclude(reasons: Sequence[Reason], truth: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Worst level wins; the first reason of that level is the deciding figure."""
    for level in ("fail", "degrade"):
        worst = [reason for reason in reasons if reason.level == level]
        if worst:
            first = worst[0]
            deciding = {"figure": first.figure, "value": first.value, "limit": first.limit, "message": first.message}
            return {"verdict": level, "reasons": [asdict(reason) for reason in reasons], "deciding": deciding}
    return {
        "verdict": "pass",
        "reasons": [asdict(reason) for reason in reasons],
        "deciding": _leading_figure(truth),
    }


def _leading_figure(truth: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a passing line shows: the slowest tier's gain over computing."""
    for instance in truth:
        times = instance.get("ttft_ms") or {}
        for tier in ("disk", "ram", "engine_cache"):
            if times.get(tier) and times.get("cold"):
                ratio = times["cold"] / times[tier]
                parts = ", ".join(
                    f"{name} {times[name]:.0f} ms"
                    for name in ("cold", "ram", "disk", "engine_cache")
                    if times.get(name)
                )
                return {
                    "figure": f"ttft cold/{tier}", "value": round(ratio, 1), "limit": None,
                    "message": f"TTFT {parts}",
                }  # fmt: skip
    return {"figure": "none", "value": None, "limit": None, "message": "nothing measured"}


#: how a finding's numbers name what was due
_LIMIT_NUMBERS = ("expected_", "allowed_", "asked")


def _from_finding(entry: Mapping[str, Any]) -> Reason:
    """A finding as a reason to fail: its first number is the figure, the one that says what was due the limit."""
    numbers = {str(key): item for key, item in (entry.get("numbers") or {}).items() if isinstance(item, (int, float))}
    limit = next((item for key, item in numbers.items() if key.startswith(_LIMIT_NUMBERS)), None)
    figure, value = next(
        ((key, item) for key, item in numbers.items() if not key.startswith(_LIMIT_NUMBERS)),
        (str(entry["code"]), None),
    )
    return Reason("fail", str(entry["code"]), figure, str(entry["message"]), str(entry["fix"]), value, limit)


def _speedups(instance: Mapping[str, Any], thresholds: Thresholds) -> list[Reason]:
    """The second witness: a served prefix must also be faster than computing it."""
    reasons = []
    times = instance.get("ttft_ms") or {}
    missed = {str(entry["code"]) for entry in instance.get("findings") or ()}
    for tier, limit, code in (
        ("ram", thresholds.min_warm_speedup_ram, "KVF-BENCH-006"),
        ("disk", thresholds.min_warm_speedup_disk, "KVF-BENCH-007"),
    ):
        # a tier that did not serve is not a slow tier
        if not times.get("cold") or not times.get(tier) or code in missed:
            continue
        ratio = times["cold"] / times[tier]
        if ratio < limit:
            reasons.append(
                Reason(
                    "fail", "KVF-BENCH-042", f"ttft cold/{tier}",
                    f"Instance {instance['name']}: served from {tier} the long prompt took {times[tier]:.0f} ms, cold "
                    f"{times['cold']:.0f} ms: {ratio:.2f} times faster, expected at least {limit:g}.",
                    "The counters say that the tier served it, so the tier is slow: check the disk's speed and "
                    "other load, "
                    f"or lower smoke_benchmark_min_warm_speedup_{tier}.",
                    round(ratio, 2), limit,
                )
            )  # fmt: skip
    return reasons


def _unproved_disk(truth: Sequence[Mapping[str, Any]], load: Mapping[str, Any]) -> list[Reason]:
    """A disk tier that stored and was never read, or was read from memory: neither proved nor measured."""
    reasons = []
    runs = {str(entry["name"]): entry.get("runs") or () for entry in load.get("instances") or ()}
    for instance in truth:
        warm = [run for run in runs.get(str(instance["name"]), ()) if run["run"]["phase"] == "warm"]
        stored = (instance.get("bytes") or {}).get("disk")
        hits = (instance.get("hit_tokens") or {}).get("disk") or 0
        # a lookup is no load: what the engine's own cache held was looked up and never fetched
        hits += sum(
            min(int(run["tokens"]["tier_disk"]), int(run["tokens"]["external"])) for run in warm if run.get("tokens")
        )
        if instance.get("profile") == "disk" and stored and not hits and not instance.get("findings"):
            reasons.append(
                Reason(
                    "degrade",
                    "KVF-BENCH-048",
                    "disk hit tokens",
                    f"Instance {instance['name']}: nothing was read from the disk tier, the RAM tier held everything: "
                    "whether the disk serves is not proved.",
                    "Run the proof with smoke_benchmark_may_clear: true before the host takes traffic.",
                    0,
                )
            )
        for run in warm:
            if (run.get("disk") or {}).get("served_by") == "page cache":
                disk = run["disk"]
                reasons.append(
                    Reason(
                        "degrade",
                        "KVF-BENCH-049",
                        "device read bytes",
                        f"Instance {instance['name']}, run {run['run']['name']}: the disk tier was hit for "
                        f"{disk['hit_bytes'] / 1024**2:.0f} MiB and its device read {disk['read_bytes'] / 1024**2:.0f} "
                        "MiB: served by page cache, so these figures are RAM's.",
                        "Check that the tier's file system takes O_DIRECT, or measure a working set beyond free RAM.",
                        disk["read_bytes"],
                        disk["hit_bytes"],
                    )
                )
                break
    return reasons


def _load_limits(instance: Mapping[str, Any], thresholds: Thresholds) -> list[Reason]:
    """Thresholds that the user set, against every warm or single run."""
    reasons = []
    for entry in instance.get("runs") or ():
        figures = entry.get("figures")
        if not figures or entry["run"]["phase"] == "populate":
            continue
        where = f"instance {instance['name']}, run {entry['run']['name']}"
        ttft = figures["ttft"]
        tail, tail_name = (
            (ttft["p99"], "TTFT p99")
            if ttft["p99"] is not None
            else (ttft["max"], f"slowest TTFT of {ttft['samples']}")
        )
        checks = (
            ("ttft_p99_ms", tail, thresholds.ttft_p99_ms, tail_name, False),
            ("tpot_mean_ms", figures["tpot"]["mean"], thresholds.tpot_mean_ms, "mean TPOT", False),
            ("requests_per_s", figures["requests_per_s"], thresholds.requests_per_s, "requests per second", True),
        )
        for name, value, limit, words, at_least in checks:
            if limit is None or value is None:
                continue
            if (value < limit) if at_least else (value > limit):
                reasons.append(
                    Reason(
                        "fail", "KVF-BENCH-043", name,
                        f"{where}: {words} is {value:.4g}, the limit is {limit:g}.",
                        "Other load on the host, a tier that is too small (see tier hits of this run), or a "
                        "limit set for other hardware.",
                        round(float(value), 2), limit,
                    )
                )  # fmt: skip
    return reasons


def findings_as_dicts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as plain data."""
    return [finding.as_dict() for finding in findings]


#: the article's own finding, for the person who sees a degrade verdict
_DEGRADE_ADVICE = (
    "Set kvfleet_profile: cpu if RAM can hold the working set (kvfleet_buffer_gib_per_gpu), else gpu: a disk tier pays "
    "only when memory is short and prompts repeat."
)


def judge_history(
    verdict: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], payoff: Mapping[str, Any]
) -> dict[str, Any]:
    """Add what earlier results say to a verdict of :func:`judge`: regressions and offload that costs are ``degrade``.

    A failing verdict keeps its deciding figure. ``changes`` and ``payoff`` come from :mod:`history`.
    """
    reasons = [Reason(**reason) for reason in verdict["reasons"]]
    for change in sorted(changes, key=lambda change: float(change["tolerance"]) - float(change["worse"])):
        if change["regressed"]:
            reasons.append(
                Reason(
                    "degrade",
                    "KVF-BENCH-044",
                    change["figure"],
                    f"Instance {change['instance']}, run {change['run']}: {change['figure']} is {change['value']:.4g}, "
                    f"{change['worse']:.0%} worse than the median {change['baseline']:.4g} of the last "
                    f"{change['results']} "
                    f"passing results; their spread explains {change['tolerance']:.0%}.",
                    "Other load on the host, a throttling disk or GPU, or the change that this deploy brought; run the "
                    "proof again (smoke_benchmark_force) before you believe it.",
                    round(float(change["value"]), 2),
                    round(float(change["baseline"]), 2),
                )
            )
    if payoff["state"] == "costs":
        reasons.append(
            Reason(
                "degrade",
                "KVF-BENCH-045",
                "requests_per_s ratio",
                payoff["message"],
                _DEGRADE_ADVICE,
                payoff["ratio"],
                1.0,
            )
        )
    levels = {reason.level for reason in reasons}
    if verdict["verdict"] != "pass" or "degrade" not in levels:
        return {**verdict, "reasons": [asdict(reason) for reason in reasons]}
    return conclude(reasons, ())
