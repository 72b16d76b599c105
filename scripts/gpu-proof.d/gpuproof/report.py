"""On the controller: collected results into ``docs/measured/gpu/``, and the page's section that is made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import settings
from .host import own_seconds

if TYPE_CHECKING:
    from kvfleet.plots import Chart

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = "<!-- gpu-proof: made by scripts/gpu-proof report -->", "<!-- gpu-proof: end -->"
#: goals of the comparison at the busiest and the quieter load; the trial before had 1.567 and 7.7
GOAL_RATE, GOAL_TTFT, GOAL_COLD, GOAL_ARTICLE, GOAL_TOKENS, GOAL_OWN_S = 1.6, 9.0, 0.03, 1.15, 0.05, 60.0
#: at 8 concurrent requests TTFT is compared, at 32 requests per second
QUIET, BUSY = 8, 32


def store(collected: Path, results: Path) -> list[Path]:
    """Copy what a ``run`` collected to ``<date>-<release>-<profile>.json`` and ``...-summary.json``; append-only."""
    summary = json.loads((collected / "summary.json").read_text())
    release = summary["proof"]["release"]
    written = []
    results.mkdir(parents=True, exist_ok=True)
    ran = [outcome["time"] for outcome in summary["profiles"].values() if outcome.get("time")]
    if not ran:
        return []
    pairs = [(collected / "summary.json", "summary", min(ran))]
    pairs += [
        (collected / f"results-{profile}.json", profile, summary["profiles"][profile].get("time", min(ran)))
        for profile in settings.PROFILES
        if (collected / f"results-{profile}.json").exists()
    ]
    for source in sorted(collected.glob("results-try-*.json")):
        pairs.append((source, source.stem.removeprefix("results-"), json.loads(source.read_text())["time"]))
    for source, name, time in pairs:
        target = results / f"{time}-{release}-{name}.json"
        data = json.loads(source.read_text())
        for outcome in (data.get("profiles") or {}).values():
            tasks = outcome.pop("tasks", None)
            if tasks:
                outcome["own"] = own_seconds(tasks)
        told = summary["profiles"].get(name, {}).get("tasks")
        if told and "outcome" in data:
            data["outcome"]["own"] = own_seconds(told)
        text = json.dumps(data, indent=1, sort_keys=True) + "\n"
        if not target.exists() or name == "summary":
            target.write_text(text)
            written.append(target)
    return written


def releases(results: Path) -> list[str]:
    """The releases that were measured, the one of the newest run last."""
    summaries = [json.loads(path.read_text()) for path in sorted(results.glob("*-summary.json"))]
    return list(dict.fromkeys(summary["proof"]["release"] for summary in reversed(summaries)))[::-1]


def newest(results: Path, release: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """A release's newest result of every profile that measured something, and its newest summary, merged over runs."""
    found: dict[str, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    for path in sorted(results.glob(f"*-{release}-*.json")):
        data = json.loads(path.read_text())
        if path.stem.endswith("-summary"):
            profiles = {**summary.get("profiles", {})}
            for name, outcome in data["profiles"].items():
                if outcome.get("ran") or name not in profiles:
                    profiles[name] = outcome
            summary = {**data, "profiles": profiles}
            continue
        if runs_of(data) and data["proof_profile"] in settings.PROFILES:
            found[str(data["proof_profile"])] = data
    return found, summary


def runs_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs with figures of a result's instance."""
    return [
        run
        for instance in (record.get("load") or {}).get("instances") or ()
        for run in instance.get("runs") or ()
        if run.get("figures")
    ]


def tries(results: Path, release: str) -> list[dict[str, Any]]:
    """A release's newest record of every trial of settings, oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(results.glob(f"*-{release}-try-*.json")):
        data = json.loads(path.read_text())
        found[str(data["proof_profile"])] = data
    return list(found.values())


def rate_of(record: Mapping[str, Any] | None, name: str) -> float | None:
    """Requests per second of the run with this name."""
    return next(
        (float(run["figures"]["requests_per_s"]) for run in runs_of(record or {}) if run["run"]["name"] == name), None
    )


def figure(record: Mapping[str, Any] | None, phase: str, concurrency: int, *path: str) -> float | None:
    """One figure of the run with this phase and concurrency; None when it was not run."""
    for run in runs_of(record or {}):
        if run["run"]["phase"] == phase and run["run"]["concurrency"] == concurrency:
            value: Any = run["figures"]
            for key in path:
                value = (value or {}).get(key)
            return None if value is None else float(value)
    return None


def concurrencies(records: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Concurrencies of warm runs, over all results."""
    return sorted(
        {
            run["run"]["concurrency"]
            for record in records.values()
            for run in runs_of(record)
            if run["run"]["phase"] == "warm"
        }
    )


def goals(records: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(goal, wanted, measured, verdict) lines; what lacks a figure is ``not run`` with the reason."""
    gpu, cpu, article = records.get("gpu"), records.get("cpu"), records.get("article")
    lines: list[tuple[str, str, str, str]] = []

    def ratio(
        name: str,
        wanted: str,
        top: float | None,
        below: float | None,
        holds: Any,
        missing: Sequence[str],
    ) -> None:
        if top is None or below is None or below == 0:
            reasons = [f"{profile}: {_reason(summary, profile)}" for profile in missing if profile not in records]
            lines.append((name, wanted, "-", f"not run ({'; '.join(reasons) or 'a run is missing'})"))
            return
        value = top / below
        # three digits: 1.595 is no 1.6
        lines.append((name, wanted, f"{value:.3f}x", "met" if holds(value) else "missed"))

    rate = ("requests_per_s",)
    busy = max([*concurrencies(records), 0]) if BUSY not in concurrencies(records) else BUSY
    quiet = min([*concurrencies(records), 0]) if QUIET not in concurrencies(records) else QUIET
    ratio(
        f"requests/s at {busy}, warm, profile cpu against gpu", f">= {GOAL_RATE}x",
        figure(cpu, "warm", busy, *rate), figure(gpu, "warm", busy, *rate), lambda v: v >= GOAL_RATE, ["gpu", "cpu"],
    )  # fmt: skip
    ratio(
        "the same against the article's hand settings (chunk 32, buffer 20)", f">= {GOAL_ARTICLE}x",
        figure(cpu, "warm", busy, *rate), figure(article, "warm", busy, *rate), lambda v: v >= GOAL_ARTICLE,
        ["cpu", "article"],
    )  # fmt: skip
    ratio(
        f"mean TTFT at {quiet}, profile gpu against cpu, warm", f">= {GOAL_TTFT:g}x",
        figure(gpu, "warm", quiet, "ttft", "mean"), figure(cpu, "warm", quiet, "ttft", "mean"),
        lambda v: v >= GOAL_TTFT, ["gpu", "cpu"],
    )  # fmt: skip
    ratio(
        f"requests/s at {busy}, cold, profile cpu against gpu", f">= {1 - GOAL_COLD:g}x",
        figure(cpu, "populate", busy, *rate), figure(gpu, "populate", busy, *rate), lambda v: v >= 1 - GOAL_COLD,
        ["gpu", "cpu"],
    )  # fmt: skip
    for name, record in records.items():
        planned, seen = (
            _instance(record).get("gpu_kv_tokens"),
            (record.get("outcome", {}).get("engine") or {}).get("kv_tokens"),
        )
        if planned and seen:
            error = abs(planned - seen) / seen
            lines.append(
                (
                    f"GPU KV tokens, profile {name}", f"within {GOAL_TOKENS:.0%}",
                    f"{planned} planned, {seen:.0f} logged ({error:.1%})", "met" if error <= GOAL_TOKENS else "missed",
                )
            )  # fmt: skip
        own = (record.get("outcome", {}).get("own") or {}).get("own")
        if own is not None:
            lines.append(
                (
                    f"kvfleet's own time, profile {name}",
                    f"< {GOAL_OWN_S:g} s",
                    f"{own:.0f} s",
                    "met" if own < GOAL_OWN_S else "missed",
                )
            )
    return lines


def pays(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, str, str, str]]:
    """(profile, concurrency, what the plan says, ratio of warm requests/s to profile gpu, agreement)."""
    lines = []
    for name in settings.PROFILES:
        tier, base = name.partition("-")[0], settings.BASELINES.get(name, "gpu")
        if tier not in ("cpu", "disk") or name not in records or base not in records:
            continue
        said = ((_instance(records[name]).get("tiers") or {}).get(tier) or {}).get("pays")
        for many in concurrencies(records):
            now, then = (figure(records[key], "warm", many, "requests_per_s") for key in (name, base))
            if now is None or not then:
                continue
            value = now / then
            verdict = (
                "unknown"
                if said not in (True, False, "yes", "no")
                else ("agrees" if (said in (True, "yes")) == (value >= 1) else "DISAGREES")
            )
            lines.append((name, many, str(said), f"{value:.2f}x", verdict))
    return lines


def _instance(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter((record.get("plan") or {}).get("instances") or [{}]))


def _reason(summary: Mapping[str, Any], profile: str) -> str:
    outcome = (summary.get("profiles") or {}).get(profile) or {}
    if outcome.get("ran") and not outcome.get("result"):
        return (
            "its budget ended first" if outcome.get("status") == 124 else f"status {outcome.get('status')}, no result"
        )
    return str(outcome.get("reason") or outcome.get("line") or "not asked for")


def render(
    records: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any], trials: Sequence[Mapping[str, Any]] = ()
) -> str:
    """One release's part of the section."""
    proof, services = summary["proof"], summary.get("services") or {}
    some = next(iter(records.values()), {})
    environment: Mapping[str, Any] = next(
        (record["environment"] for record in records.values() if record.get("environment")), {}
    )
    models = Counter(environment.get("gpus") or [])
    gpus = ", ".join(f"{many} x {name}" if many > 1 else name for name, many in models.items()) or "no GPU"
    times = sorted(str(record.get("time") or record["outcome"]["time"]) for record in records.values())
    load: Mapping[str, Any] = next((run["run"] for run in runs_of(some) if run["run"]["phase"] == "warm"), {})
    lines = [
        f"### {proof['release']}",
        "",
        f"`scripts/gpu-proof`, {' to '.join(dict.fromkeys([times[0], times[-1]])) if times else 'no date'}, commit {proof['commit']}, "
        f"{gpus}, driver {environment.get('driver')}, {environment.get('cpus')} CPUs, "
        f"{environment.get('os')}, Python {proof['python']}.",
        "",
        f"Load: {load.get('requests')} requests, {load.get('prefixes')} prefixes of {load.get('prefix_tokens')} + {load.get('suffix_tokens')} tokens, "
        f"{load.get('output_tokens')} out, the same seed in every run; a cold pass, then warm ones. Engine pool {_instance(some).get('gpu_kv_tokens')} tokens, "
        f"`max_num_seqs` {_instance(some).get('max_num_seqs')}; Llama-3-8B's shape with random weights, CUDA graphs on.",
        "",
        "| profile | pass | concurrency | requests | req/s | against gpu | mean TTFT ms | p99 TTFT ms | mean TPOT ms | failed | disk read GB | disk written GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for profile in settings.PROFILES:
        record = records.get(profile)
        if record is None:
            lines.append(f"| {profile} | | | | not run: {_reason(summary, profile)} | | | | | | | |")
            continue
        lines += [_row(profile, run, records.get(settings.BASELINES.get(profile, "gpu"))) for run in runs_of(record)]
    lines += [
        "",
        *(f"![{chart.title}](measured/gpu/{chart.name}.svg)" for chart in charts(proof["release"], records, trials)),
    ]
    lines += ["", "| goal | wanted | measured | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(line)} |" for line in goals(records, summary)]
    told = pays(records)
    if told:
        lines += ["", "| profile | concurrency | plan says it pays | measured against gpu | |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(map(str, line))} |" for line in told]
    lines += ["", "| profile | RAM planned GiB | RAM more in use GiB | engine start s | proof s | load s | kvfleet's own s | verdict |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    idle = summary.get("idle") or {}
    for profile, record in records.items():
        outcome = record["outcome"]
        ram = ((record.get("plan") or {}).get("host") or {}).get("ram") or {}
        planned = sum(float(ram.get(key) or 0) for key in ("buffers_gib", "engine_gib", "lmcache_gib"))
        now = outcome.get("memory") or {}
        used = (
            f"{(now['total_gib'] - now['available_gib']) - (idle['total_gib'] - idle['available_gib']):.1f}"
            if now and idle
            else "-"
        )
        own = outcome.get("own") or {}
        lines.append(
            f"| {profile} | {planned:.1f} | {used} | {own.get('engine', 0):.0f} | {own.get('proof', 0):.0f} "
            f"| {own.get('load', 0):.0f} | {own.get('own', 0):.0f} | {outcome.get('line') or outcome.get('verdict') or '-'} |"
        )
    for more in (_predictions(records), _trials(trials, records), _circumstances(summary, services)):
        lines += ["", *more] if more else []
    return "\n".join(lines) + "\n"


def charts(release: str, records: Mapping[str, Mapping[str, Any]], trials: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Requests per second and TTFT against concurrency, warm passes: the profiles of one GPU and its pool, and what
    was tried in place of ``gpu`` (such as the engine's own offload).
    """
    from kvfleet.plots import ACCENT, STYLES, Line, against_concurrency

    drawn = [
        Line(name, (), colour, marker, style)
        for name, (colour, marker, style) in {**STYLES, "article": (ACCENT, "D", "--")}.items()
        if name in records
    ]
    drawn += [
        Line(trial["proof_profile"], (), ACCENT, marker, ":", hollow=True)
        for trial, marker in zip((trial for trial in trials if trial["base"] == "gpu"), cycle("vP*Xd"), strict=False)
    ]
    sources = {**records, **{trial["proof_profile"]: trial for trial in trials}}
    made = []
    for name, words, unit, path in (
        ("requests", "Requests per second", "requests/s", ("requests_per_s",)),
        ("ttft", "Mean time to the first token", "ms", ("ttft", "mean")),
    ):
        lines = []
        for line in drawn:
            record = sources[line.label]
            pairs = [(many, figure(record, "warm", many, *path)) for many in concurrencies({"": record})]
            points = [(float(many), value) for many, value in pairs if value is not None]
            lines += [replace(line, points=points)] if points else []
        made.append(
            against_concurrency(f"{release}-{name}", f"{words}, {release}", "requests at a time, warm", unit, lines)
        )
    return made


def section(results: Path) -> str:
    """The page's section: every release that was measured, each compared with its own profile ``gpu`` only."""
    parts = [render(*newest(results, release), tries(results, release)) for release in releases(results)]
    return "\n".join(parts) or "Not run yet.\n"


def _row(profile: str, run: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """One line of the table of figures."""
    shape, figures, disk = run["run"], run["figures"], run.get("disk") or {}
    below = rate_of(base, shape["name"])
    cells = [
        profile, "cold" if shape["phase"] == "populate" else "warm", shape["concurrency"], shape["requests"],
        f"{figures['requests_per_s']:.2f}", f"{figures['requests_per_s'] / below:.2f}x" if below else "-",
        _ms(figures["ttft"]["mean"]), _ms(figures["ttft"]["p99"]), _ms(figures["tpot"]["mean"], 2), figures["failed"],
        f"{disk.get('read_bytes', 0) / 1e9:.1f}", f"{disk.get('written_bytes', 0) / 1e9:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _predictions(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the plan said before a start beside what was measured, with the error in percent of the measured value."""
    lines = ["| profile | what | planned | measured | error |", "|---|---|---|---|---|"]
    for name, record in records.items():
        planned = _instance(record)
        engine = (record.get("outcome") or {}).get("engine") or {}
        truth: Mapping[str, Any] = next(iter((record.get("truth") or {}).get("instances") or [{}]))
        needed = next((tier.get("needed_bytes_per_s") for tier in (planned.get("tiers") or {}).values()), None)
        # what a tier holds of a token, over all ranks: the plan's need was made with it
        per_token = planned.get("kv_bytes_per_token_stored")
        for what, said, seen in (
            ("GPU KV tokens", planned.get("gpu_kv_tokens"), engine.get("kv_tokens")),
            ("prefill tokens/s (the break-even is made of it)", needed / per_token if needed and per_token else None,
             truth.get("prefill_tokens_per_s")),
            ("weights GiB per GPU", (planned.get("weights_bytes_per_rank") or 0) / 2**30 or None, engine.get("model_gib")),
        ):  # fmt: skip
            if said and seen:
                lines.append(f"| {name} | {what} | {said:,.5g} | {seen:,.5g} | {(said - seen) / seen:+.1%} |")
    return lines if len(lines) > 2 else []


def _trials(found: Sequence[Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Settings that were tried by hand on top of a profile, against that profile and against ``gpu``."""
    if not found:
        return []
    lines = [
        "Settings tried by hand on top of a deployed profile (`gpu-proof try`); nothing of it is what kvfleet renders:",
        "",
        "| trial | on | change | pass | concurrency | req/s | against its profile | against gpu | mean TTFT ms | mean TPOT ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for trial in found:
        change = trial["change"]
        words = [*change["flags"], *change["environment"], *(f"{k}: {v}" for k, v in change["lmcache"].items())]
        if change.get("server_flags"):
            words += ["server:", *change["server_flags"]]
        name = str(trial["proof_profile"]).removeprefix("try-")
        head = f"| {name} | {trial['base']} | `{' '.join(words)}` "
        if not runs_of(trial):
            why = (trial.get("errors") or ["it did not get ready in its time"])[-1]
            lines.append(f"{head}| | | not run: {why[:160]} | | | | |")
        for run in runs_of(trial):
            shape, figures = run["run"], run["figures"]
            ratios = []
            for other in (trial["base"], "gpu"):
                below = rate_of(records.get(other), shape["name"])
                ratios.append(f"{figures['requests_per_s'] / below:.2f}x" if below else "-")
            lines.append(
                f"{head}| {'cold' if shape['phase'] == 'populate' else 'warm'} | {shape['concurrency']} "
                f"| {figures['requests_per_s']:.2f} | {' | '.join(ratios)} "
                f"| {_ms(figures['ttft']['mean'])} | {_ms(figures['tpot']['mean'], 2)} |"
            )
    return lines


def _circumstances(summary: Mapping[str, Any], services: Mapping[str, Any]) -> list[str]:
    """How the units ran, what the disk was, what was left out."""
    proof = summary["proof"]
    lines = [f"Units ran through {services.get('kind')} {services.get('version', '')} ({services.get('reason')})."]
    if services.get("not_enforced"):
        lines += ["Not enforced there:", "", *(f"- {line}" for line in services["not_enforced"])]
    disk = summary.get("disk") or {}
    if disk:
        told = ", ".join(
            f"{word} {disk[key] / 1e9:.2f} GB/s" for word, key in (("writes", "write_bytes_per_s"), ("reads", "read_bytes_per_s"))
            if disk.get(key)
        )  # fmt: skip
        below = (
            "O_DIRECT reaches the file below" if disk.get("direct_io_below") else "the file below is in the page cache"
        )
        lines += [
            "",
            f"The cache disk was a loop device of {disk.get('size_gib')} GiB ({below}; O_DIRECT {told or 'not measured'}).",
        ]
    speeds = summary.get("speeds") or {}
    if speeds:
        lines.append(
            f"PyTorch copied {speeds['to_gpu'] / 1e9:.1f} GB/s to the GPU and {speeds['to_host'] / 1e9:.1f} GB/s back (pinned memory)."
        )
    if proof.get("reduced"):
        lines += [
            "",
            f"The release used torch and {len(proof['provided']) - 1} more packages of the host's image (`engine_base_python`); left out: {', '.join(proof['left_out'])}.",
        ]
    return lines


def _ms(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def replace_section(page: str, text: str) -> str:
    """``page`` with the text between the two marks replaced; the marks are added at its end when it has none."""
    body = f"{BEGIN}\n{text}{END}\n"
    if BEGIN not in page:
        return f"{page.rstrip()}\n\n## kvfleet's own playbooks on a GPU\n\n{body}"
    before, _, rest = page.partition(BEGIN)
    return before + body + rest.partition(END)[2].lstrip("\n")


def main(collected: Sequence[Path], results: Path | None, document: Path | None) -> int:
    """Store what was collected, then write the section; exit status 0."""
    results = results or ROOT / "docs" / "measured" / "gpu"
    document = document or ROOT / "docs" / "benchmarks.md"
    for folder in collected:
        for path in store(folder, results):
            print(path)
    from kvfleet.plots import as_file

    for release in releases(results):
        for chart in charts(release, newest(results, release)[0], tries(results, release)):
            (results / f"{chart.name}.svg").write_text(as_file(chart))
    document.write_text(replace_section(document.read_text(), section(results)))
    print(document)
    return 0
