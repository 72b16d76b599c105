"""Results on the controller: one JSON file per run, never overwritten, and what earlier ones say about a new one."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .bench import Reason
from .findings import refuse

SCHEMA = 1

#: what makes a file a result; other files may lie in the same folder
_REQUIRED = {"host", "time", "release", "plan_profile", "profile", "plan", "verdict", "reasons", "deciding"}

#: what of a plan goes into a result: numbers, never environments or command lines, which may hold keys
_PLAN_KEYS = ("schema", "fingerprint", "profile")
_RELEASE_KEYS = ("id", "vllm", "lmcache", "torch", "cuda", "mode", "python", "connector")
_INSTANCE_SECRETS = ("environment", "command", "exec_start", "lmcache_config")


def public_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's numbers without environments, command lines and settings."""
    shown: dict[str, Any] = {key: plan.get(key) for key in _PLAN_KEYS}
    shown["release"] = {key: plan["release"].get(key) for key in _RELEASE_KEYS}
    shown["host"] = dict(plan.get("host") or {})
    for kind in ("servers", "instances"):
        shown[kind] = [
            {key: value for key, value in entry.items() if key not in _INSTANCE_SECRETS} for entry in plan[kind]
        ]
    return shown


def build_record(
    host: str,
    time_utc: str,
    plan: Mapping[str, Any],
    profile: str,
    truth: Mapping[str, Any] | None,
    load: Mapping[str, Any] | None,
    verdict: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """One result: ``time_utc`` as ``20261129T200000Z``; everything a report needs, nothing secret."""
    return {
        "schema": SCHEMA,
        "host": host,
        "time": time_utc,
        "release": plan["release"]["id"],
        "plan_profile": plan["profile"],
        "profile": profile,
        "environment": dict(environment),
        "plan": public_plan(plan),
        "truth": truth,
        "load": load,
        **verdict,
    }


def safe_name(text: str) -> str:
    """``text`` as part of a file name: letters, digits, dot, dash and underscore stay."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip(".") or "unnamed"


def store(results_dir: Path, record: Mapping[str, Any]) -> Path:
    """Write ``results_dir/<host>/<time>-<release>.json``; an existing file is never touched, a number is appended.

    The file appears complete or not at all. Raises KVF-BENCH-033 when the directory cannot be written.
    """
    folder = results_dir / safe_name(str(record["host"]))
    stem = f"{record['time']}-{safe_name(str(record['release']))}"
    text = json.dumps(_finite(record), indent=1, sort_keys=True, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{stem}.{os.getpid()}"
        temporary.write_text(text)
        try:
            for number in range(1, 1000):
                target = folder / (f"{stem}.json" if number == 1 else f"{stem}.{number}.json")
                try:
                    # a link fails where a rename would overwrite
                    os.link(str(temporary), str(target))
                except FileExistsError:
                    continue
                return target
        finally:
            temporary.unlink()
    except OSError as error:
        raise refuse(
            "KVF-BENCH-033",
            f"The result cannot be written below {folder}: {error.strerror}.",
            "Set smoke_benchmark_results_dir to a directory that this user may write.",
        ) from error
    raise refuse(
        "KVF-BENCH-033", f"{folder} holds a thousand results of the same second.", "Check the controller's clock."
    )


def _finite(value: Any) -> Any:
    """``value`` with ``None`` for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


def load_records(results_dir: Path, host: str | None = None) -> list[dict[str, Any]]:
    """All readable results, oldest first, each with its ``path``; files that are no result are left out."""
    pattern = f"{safe_name(host)}/*.json" if host else "*/*.json"
    records = []
    for path in sorted(results_dir.glob(pattern)):
        record = _read_result(path)
        if record is not None:
            records.append({**record, "path": str(path)})
    # of the same second the one with the number came later, and its name is longer
    return sorted(records, key=lambda record: (str(record["time"]), len(str(record["path"])), str(record["path"])))


def damaged_files(results_dir: Path, host: str | None = None) -> list[Path]:
    """Files that are called like results and are none: cut off, edited, or written by another version."""
    pattern = f"{safe_name(host)}/*.json" if host else "*/*.json"
    return [
        path
        for path in sorted(results_dir.glob(pattern))
        if re.match(r"\d{8}T\d{6}Z-", path.name) and _read_result(path) is None
    ]


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not set(record) >= _REQUIRED:
        return None
    return record if _has_kinds(record) else None


def _has_kinds(record: Mapping[str, Any]) -> bool:
    """Whether the parts that every reader goes through have their kind."""
    texts = ("host", "time", "release", "plan_profile", "profile", "verdict")
    plan, deciding = record["plan"], record["deciding"]
    return (
        all(isinstance(record[key], str) and record[key] for key in texts)
        and isinstance(record["reasons"], list)
        and isinstance(deciding, dict)
        and isinstance(deciding.get("message"), str)
        and isinstance(plan, dict)
        and all(isinstance(plan.get(key), dict) for key in ("release", "host"))
        and all(_are_objects(plan.get(key)) for key in ("servers", "instances"))
        and all(_has_instances(record.get(key)) for key in ("truth", "load"))
        and _are_objects(record.get("changes") or [])
        and all(isinstance(record.get(key) or {}, dict) for key in ("environment", "payoff"))
    )


def _has_instances(part: Any) -> bool:
    """Whether ``truth`` or ``load`` is absent, or lists named instances; a host that died in it left none."""
    if part is None:
        return True
    instances = part.get("instances", []) if isinstance(part, dict) else None
    return _are_objects(instances) and all(
        isinstance(entry.get("name"), str)
        and isinstance(entry.get("ttft_ms") or {}, dict)
        and _are_objects(entry.get("runs") or [])
        for entry in instances or ()
    )


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def clock_reason(record: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A note (KVF-BENCH-050) when an earlier result of this host has a later time: some clock was or is wrong."""
    later = [str(entry["time"]) for entry in earlier if str(entry["time"]) > str(record["time"])]
    if not later:
        return []
    return [
        asdict(
            Reason(
                "note",
                "KVF-BENCH-050",
                "time",
                f"The controller's clock says {record['time']}, and {len(later)} earlier results of this host are from "
                f"after that, the last from {max(later)}.",
                "Set the controller's clock; remove results with times that never were, or they stay the newest.",
            )
        )
    ]


def latest_per_host(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The newest result of every host."""
    newest: dict[str, Mapping[str, Any]] = {}
    for record in records:
        newest[str(record["host"])] = record
    return newest


def line(record: Mapping[str, Any]) -> str:
    """The summary of one result on one line: host, release, profile, verdict, deciding figure."""
    return (
        f"{record['host']}  release {record['release']}  profile {record['plan_profile']}  "
        f"{str(record['verdict']).upper()}  {record['deciding']['message']}"
    )


def explanation(record: Mapping[str, Any]) -> str:
    """The line of :func:`line`, then every reason with its fix and the result's notes, one a line."""
    lines = [line(record)]
    lines += [
        f"{reason['level']}: {reason['code']}: {reason['message']} {reason['fix']}" for reason in record["reasons"]
    ]
    parts = [(record.get(kind) or {}).get("instances") or () for kind in ("truth", "load")]
    lines += [f"note: {entry['name']}: {note}" for part in parts for entry in part for note in entry.get("notes") or ()]
    return "\n".join(lines)


# -- comparing with earlier results -----------------------------------------------------------------------------------

#: as many passing results make the baseline
BASELINE_RESULTS = 5
#: how many standard errors a mean must move before it counts: 3 are exceeded by chance in 0.3 % of comparisons
STANDARD_ERRORS = 3.0
#: share of the prompt tokens that a tier must have delivered for a load to say anything about it
SERVED_SHARE = 0.3
#: figures that are compared: path in a run's figures, words, whether more is better
COMPARED = (
    (("ttft", "mean"), "mean TTFT in ms", False),
    (("tpot", "mean"), "mean TPOT in ms", False),
    (("requests_per_s",), "requests per second", True),
)


@dataclass(frozen=True)
class Change:
    """One figure against its baseline; ``worse`` is the relative loss (0.2 = 20 % worse), ``tolerance`` likewise."""

    instance: str
    run: str
    figure: str
    value: float
    baseline: float
    worse: float
    tolerance: float
    results: int

    @property
    def regressed(self) -> bool:
        """Whether the loss exceeds what the observed spread explains."""
        return self.worse > self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the result."""
        return {**asdict(self), "regressed": self.regressed}


def release_line(record: Mapping[str, Any]) -> str:
    """The versions whose results are compared: vLLM's and LMCache's major and minor numbers."""
    release = record["plan"]["release"]

    def minor(version: Any) -> str:
        return ".".join(str(version or "").split(".")[:2])

    return f"{minor(release.get('vllm'))}/{minor(release.get('lmcache'))}"


def comparable(record: Mapping[str, Any], other: Mapping[str, Any], *, same_plan_profile: bool = True) -> bool:
    """Whether two results measured the same thing: host, load profile, release line, models and load sizes."""
    return bool(
        record["host"] == other["host"]
        and record["profile"] == other["profile"]
        and release_line(record) == release_line(other)
        and (not same_plan_profile or record["plan_profile"] == other["plan_profile"])
        and _sizes(record) == _sizes(other) != []
    )


def _sizes(record: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Per instance its name, model and the names and sizes of its runs."""
    models = {entry["name"]: entry.get("model") for entry in record["plan"]["instances"]}
    found = []
    for entry in (record.get("load") or {}).get("instances") or ():
        if not entry.get("runs"):
            continue
        plain = {_size(run) for run in entry["runs"] if not run["run"].get("clear_ram")}
        # a run that is repeated from the emptied RAM tier exists only where there is a disk tier
        runs = [run for run in entry["runs"] if not (run["run"].get("clear_ram") and _size(run) in plain)]
        sizes = tuple((run["run"].get("name"), _size(run)) for run in runs)
        found.append((entry["name"], models.get(entry["name"]), sizes))
    return found


#: what makes two runs the same load
_SIZE_KEYS = (
    "phase",
    "requests",
    "concurrency",
    "prompt_tokens",
    "output_tokens",
    "prefixes",
    "prefix_tokens",
    "input_tokens",
)


def _size(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Phase and sizes of a run."""
    return tuple(run["run"].get(key) for key in _SIZE_KEYS)


def regressions(record: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Every compared figure of ``record`` against the median of the last passing comparable results.

    The tolerance follows from what was observed, not from a fixed guess: half the range of the baseline's values, or
    three standard errors of the difference of the two means (from the single requests' spread), whichever is larger.
    """
    baseline = [entry for entry in earlier if entry.get("verdict") == "pass" and comparable(record, entry)]
    baseline = baseline[-BASELINE_RESULTS:]
    changes = []
    for instance, run in _runs(record):
        if run["run"]["phase"] == "populate":
            continue
        for path, words, more_is_better in COMPARED:
            now = _figure(run, path)
            values = [
                value
                for entry in baseline
                for other_instance, other in _runs(entry)
                if other_instance == instance and other["run"]["name"] == run["run"]["name"]
                for value in [_figure(other, path)]
                if value
            ]
            if now is None or not values:
                continue
            middle = statistics.median(values)
            loss = (middle - now) / middle if more_is_better else (now - middle) / middle
            spread = (max(values) - min(values)) / 2 / middle
            tolerance = max(spread, STANDARD_ERRORS * _relative_error(run, path) * math.sqrt(1 + 1 / len(values)))
            changes.append(Change(instance, run["run"]["name"], words, now, middle, loss, tolerance, len(values)))
    return changes


def _runs(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every measured run with its instance's name."""
    return [
        (str(entry["name"]), run)
        for entry in (record.get("load") or {}).get("instances") or ()
        for run in entry.get("runs") or ()
        if run.get("figures")
    ]


def _tier_share(run: Mapping[str, Any]) -> float:
    """Share of a run's prompt tokens that a tier delivered."""
    tokens = run.get("tokens") or {}
    total = sum(float(tokens.get(key) or 0) for key in ("computed", "engine_cache", "external"))
    return float(tokens.get("external") or 0) / total if total else 0.0


def _is_warm(run: Mapping[str, Any]) -> bool:
    return bool(run["run"]["phase"] == "warm")


def _busiest_warm(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Warm runs at the highest concurrency, with their instance's name."""
    warm = [(name, run) for name, run in _runs(record) if _is_warm(run)]
    most = max((int(run["run"]["concurrency"]) for _, run in warm), default=0)
    return [(name, run) for name, run in warm if int(run["run"]["concurrency"]) == most]


def _figure(run: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The figure at ``path``; ``None`` when it was not measured."""
    value: Any = run["figures"]
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _relative_error(run: Mapping[str, Any], path: Sequence[str]) -> float:
    """Standard error of a run's mean over the mean; of a rate, that of the time a request takes."""
    series = run["figures"].get(path[0] if len(path) > 1 else "e2e") or {}
    mean, std, samples = series.get("mean"), series.get("std"), series.get("samples") or 0
    if not mean or std is None or samples < 2:
        return 0.0
    return float(std / mean / math.sqrt(samples))


@dataclass(frozen=True)
class Payoff:
    """Whether the tiers pay: ``pays``, ``costs`` or ``unknown``; ``ratio`` of request rates to profile ``gpu``."""

    state: str
    message: str
    ratio: float | None = None
    ttft_ratio: float | None = None
    run: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the result."""
        return asdict(self)


def payoff(record: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> Payoff:
    """The tiered profile against the newest passing ``gpu`` result of the same load, host and exact release.

    The busiest warm runs decide, the worst of them where one was served from RAM and one from disk: a disk tier that
    is slower than computing does not pay. A loss within three standard errors is no loss.
    """
    if record["plan_profile"] == "gpu":
        return Payoff("unknown", "Profile gpu is the baseline itself.")
    baseline = [
        entry
        for entry in earlier
        if entry.get("plan_profile") == "gpu"
        and entry.get("verdict") == "pass"
        and entry.get("release") == record["release"]
        and comparable(record, entry, same_plan_profile=False)
    ]
    if not baseline:
        return Payoff(
            "unknown",
            f"Nothing to compare with: no passing result of profile gpu with release {record['release']} and this "
            "load on "
            "this host. Profile article measures all three.",
        )
    reference = {(name, _size(run)): run for name, run in _runs(baseline[-1]) if _is_warm(run)}
    pairs = [
        (run, reference[name, _size(run)]) for name, run in _busiest_warm(record) if (name, _size(run)) in reference
    ]
    if not pairs:
        return Payoff("unknown", "The baseline has no warm run of this load.")
    pairs = [pair for pair in pairs if _tier_share(pair[0]) >= SERVED_SHARE]
    if not pairs:
        return Payoff(
            "unknown",
            "The engine's own pool served this load, so it says nothing about the tiers: a larger working set or "
            "a smaller "
            "pool would.",
        )

    def rate_ratio(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> float:
        now, then = (_figure(run, ("requests_per_s",)) for run in pair)
        return now / then if now and then else math.inf

    run, other = min(pairs, key=rate_ratio)
    now, then = _figure(run, ("requests_per_s",)), _figure(other, ("requests_per_s",))
    ttft, ttft_then = _figure(run, ("ttft", "mean")), _figure(other, ("ttft", "mean"))
    if now is None or then is None:
        return Payoff("unknown", "The baseline measured no requests per second.")
    ratio = now / then
    noise = STANDARD_ERRORS * math.hypot(
        _relative_error(run, ("requests_per_s",)), _relative_error(other, ("requests_per_s",))
    )
    ttft_ratio = ttft_then / ttft if ttft and ttft_then else None
    name = run["run"]["name"]
    words = f"{now:.3g} requests/s against {then:.3g} of the GPU alone in run {name}"
    state = "costs" if ratio < 1 and 1 - ratio > noise else "pays"
    return Payoff(state, f"Offload {'costs' if state == 'costs' else 'pays'}: {words}.", ratio, ttft_ratio, name)


def better_profile(record: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> str | None:
    """The other profile that served the same load best on this host and release, when better than ``record`` did.

    Requests per second of the busiest warm runs decide, as in :func:`payoff`; of each other profile its newest passing
    result counts. What the profile of ``record`` served in better days does not: it is the one that costs now.
    """
    newest = {
        str(entry["plan_profile"]): entry
        for entry in earlier
        if entry.get("verdict") == "pass"
        and entry.get("release") == record["release"]
        and entry.get("plan_profile") != record["plan_profile"]
        and comparable(record, entry, same_plan_profile=False)
    }
    rates = {profile: _busiest_rate(entry) for profile, entry in newest.items()}
    best = max(rates, key=lambda profile: rates[profile], default=None)
    return best if best is not None and rates[best] > _busiest_rate(record) else None


def _busiest_rate(record: Mapping[str, Any]) -> float:
    """Requests per second of the slowest of the busiest warm runs; 0 when there is none."""
    rates = [_figure(run, ("requests_per_s",)) for _, run in _busiest_warm(record)]
    return min((value for value in rates if value is not None), default=0.0)
