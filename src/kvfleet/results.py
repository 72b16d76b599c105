"""Results on the controller, from the side of people: choosing, naming and comparing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfleet.core import history
from kvfleet.core.findings import refuse

Record = Mapping[str, Any]

PROFILES = ("gpu", "cpu", "disk")


def record_id(record: Record) -> str:
    """How people name a result: ``<host>/<time>-<release>``, as its file is called."""
    path = Path(str(record["path"])) if record.get("path") else None
    return f"{record['host']}/{path.stem if path else record['time']}"


def find(records: Sequence[Record], name: str) -> Record:
    """The result that ``name`` means: its id, its file, a unique part of its id, or a host (its newest result).

    Raises KVF-BENCH-036 when nothing or more than one fits.
    """
    for record in records:
        if name in (record_id(record), str(record.get("path"))) or (
            record.get("path") and Path(name).exists() and Path(name).samefile(str(record["path"]))
        ):
            return record
    of_host = [record for record in records if record["host"] == name]
    if of_host:
        return of_host[-1]
    fitting = [record for record in records if name in record_id(record)]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(record_id(record) for record in fitting[:3]) or "none does"
    raise refuse(
        "KVF-BENCH-036",
        f"{name!r} names {len(fitting)} results ({known}).",
        "Use an id as kvfleet results list shows it.",
    )


def setups(records: Sequence[Record], record: Record) -> dict[str, Record]:
    """The three set-ups beside ``record``: per profile the newest result of the same host, load, sizes and release."""
    found: dict[str, Record] = {}
    for other in records:
        if (
            other["release"] == record["release"]
            and history.comparable(record, other, same_plan_profile=False)
            and other.get("verdict") != "fail"
        ):
            found[str(other["plan_profile"])] = other
    found[str(record["plan_profile"])] = record
    return {profile: found[profile] for profile in PROFILES if profile in found}


def previous_release(records: Sequence[Record], record: Record) -> Record | None:
    """The newest earlier passing result of the same host, profile and load with another release."""
    for other in reversed(records):
        if (
            other["host"] == record["host"]
            and other["profile"] == record["profile"]
            and other["plan_profile"] == record["plan_profile"]
            and other["release"] != record["release"]
            and other.get("verdict") == "pass"
            and str(other["time"]) < str(record["time"])
        ):
            return other
    return None


def runs(record: Record) -> list[tuple[str, dict[str, Any]]]:
    """Every run that measured something, with its instance's name."""
    return [
        (str(entry["name"]), run)
        for entry in (record.get("load") or {}).get("instances") or ()
        for run in entry.get("runs") or ()
        if run.get("figures")
    ]


@dataclass(frozen=True)
class Difference:
    """One figure of two results; ``change`` is relative to the first, ``better`` says in which direction it went."""

    where: str
    figure: str
    unit: str
    first: float
    second: float
    more_is_better: bool

    @property
    def change(self) -> float:
        """Relative change from the first to the second."""
        return (self.second - self.first) / self.first if self.first else 0.0

    @property
    def better(self) -> bool | None:
        """Whether the second is better; ``None`` within 2 %, which no load of this size tells apart."""
        if abs(self.change) < 0.02:
            return None
        return (self.change > 0) == self.more_is_better


def compare(first: Record, second: Record) -> tuple[list[Difference], list[str]]:
    """Figures that both results have, and what makes them unequal measurements."""
    notes = []
    for key, words in (
        ("host", "hosts"),
        ("release", "releases"),
        ("plan_profile", "profiles"),
        ("profile", "load profiles"),
    ):
        if first[key] != second[key]:
            notes.append(f"different {words}: {first[key]} and {second[key]}")
    sizes = [
        [
            (name, entry["run"]["name"], entry["run"]["requests"], entry["run"].get("prompt_tokens"))
            for name, entry in runs(record)
        ]
        for record in (first, second)
    ]
    if sizes[0] != sizes[1]:
        notes.append("the loads had different sizes: compare ratios within a result, not times between them")
    found: list[Difference] = []
    others = {entry["name"]: entry for entry in (second.get("truth") or {}).get("instances") or ()}
    for instance in (first.get("truth") or {}).get("instances") or ():
        other = others.get(instance["name"])
        for tier in ("cold", "ram", "disk", "engine_cache"):
            left, right = instance["ttft_ms"].get(tier), ((other or {}).get("ttft_ms") or {}).get(tier)
            if left and right:
                found.append(
                    Difference(f"{instance['name']} long prompt", f"TTFT {TIER_WORDS[tier]}", "ms", left, right, False)
                )
    second_runs = {(name, run["run"]["name"]): run for name, run in runs(second)}
    for name, run in runs(first):
        other_run = second_runs.get((name, run["run"]["name"]))
        if other_run is None:
            continue
        for path, words, unit, more in FIGURES:
            left, right = figure(run, path), figure(other_run, path)
            if left and right:
                found.append(Difference(f"{name} {run['run']['name']}", words, unit, left, right, more))
    return found, notes


TIER_WORDS = {"cold": "cold", "ram": "from RAM", "disk": "from disk", "engine_cache": "from the engine's own cache"}

#: path in a run's figures, words, unit, whether more is better
FIGURES: tuple[tuple[tuple[str, ...], str, str, bool], ...] = (
    (("ttft", "mean"), "mean TTFT", "ms", False),
    (("ttft", "p99"), "p99 TTFT", "ms", False),
    (("tpot", "mean"), "mean TPOT", "ms", False),
    (("requests_per_s",), "requests", "1/s", True),
    (("output_tokens_per_s",), "output tokens", "1/s", True),
)


def figure(run: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The figure at ``path`` of a run; ``None`` when the run has none."""
    value: Any = run["figures"]
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def tail_words(series: Mapping[str, Any]) -> tuple[float | None, str]:
    """The tail of a latency series that its sample can carry: p99, else p95, else the slowest, with its name."""
    for key in ("p99", "p95"):
        if series.get(key) is not None:
            return float(series[key]), key
    return (float(series["max"]), "max") if series.get("max") is not None else (None, "")
