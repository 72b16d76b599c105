"""The report: one HTML file that needs nothing else, a Markdown summary for a ticket, JUnit XML for a CI system."""

from __future__ import annotations

import argparse
import math
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from kvfleet import article, plots, results
from kvfleet.core import history
from kvfleet.core.findings import KvfleetError, refuse
from kvfleet.core.units import human_bytes
from kvfleet.results import PROFILES, Record

#: hosts that get a section of their own; a fleet's page must stay one that people open
DETAILED_HOSTS = 24

#: what a finding's code belongs to, in words; JUnit's cases
CHECKS: dict[str, str] = {
    "001": "instance answers", "002": "instance answers", "003": "instance answers", "004": "instance answers",
    "005": "first pass is cold", "006": "RAM tier serves", "007": "disk tier serves", "008": "answers are the same",
    "009": "bytes on disk", "010": "tiers store", "011": "pool is displaced", "012": "load fits", "013": "hits "
    "are loaded",
    "014": "pool is displaced", "030": "units run", "031": "units were not restarted", "032": "journal is clean",
    "034": "cache is on its own disk", "035": "cache is on its own disk", "042": "tiers are fast", "043": "limits hold",
    "044": "no regression", "045": "offload pays", "047": "instance answers", "048": "disk tier serves",
    "049": "disk tier serves",
}  # fmt: skip


# -- numbers for people ------------------------------------------------------------------------------------------------


def number(value: Any, digits: int = 3) -> str:
    """A number with ``digits`` significant digits and no exponent; a dash for what was not measured."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def milliseconds(value: Any) -> str:
    """Milliseconds as people read them: ``41.2 ms``, ``1.85 s``."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{number(value / 1000)} s" if value >= 1000 else f"{number(value)} ms"


def clock(text: str) -> str:
    """``20261129T202232Z`` as ``2026-11-29 20:22 UTC``."""
    if len(text) < 13:
        return text
    return f"{text[:4]}-{text[4:6]}-{text[6:8]} {text[9:11]}:{text[11:13]} UTC"


def percent(value: float, signed: bool = False) -> str:
    """A share as a whole percentage."""
    return f"{value * 100:+.0f} %" if signed else f"{value * 100:.0f} %"


# -- what the page shows ---------------------------------------------------------------------------------------------


def model(records: Sequence[Record], now: float | None = None) -> dict[str, Any]:
    """Everything that the page shows, as plain data; ``records`` oldest first."""
    newest = history.latest_per_host(records)
    order = {"fail": 0, "degrade": 1, "pass": 2}
    rows = sorted(newest.values(), key=lambda record: (order.get(str(record["verdict"]), 0), str(record["host"])))
    counts = {level: sum(record["verdict"] == level for record in rows) for level in order}
    return {
        "generated": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)),
        "counts": counts,
        "rows": rows,
        "hosts": [host_model(records, record) for record in rows[:DETAILED_HOSTS]],
        "omitted": max(0, len(rows) - DETAILED_HOSTS),
        "results": len(records),
    }


def host_model(records: Sequence[Record], record: Record) -> dict[str, Any]:
    """One host's section."""
    mine = [entry for entry in records if entry["host"] == record["host"]]
    sets = results.setups(mine, _load_record(mine, record))
    previous = results.previous_release(mine, record)
    differences, notes = results.compare(previous, record) if previous else ([], [])
    return {
        "record": record,
        "anchor": history.safe_name(str(record["host"])),
        "instances": [_instance_model(record, entry) for entry in (record.get("truth") or {}).get("instances") or ()],
        "load_notes": _load_notes(record),
        "runs": [_run_model(name, run) for name, run in results.runs(record)],
        "matrix": _matrix(sets),
        "charts": _matrix_charts(str(record["host"]), sets),
        "setups": sets,
        "setup_notes": _load_notes(_load_record(mine, record)),
        "beside_article": _beside_article(sets) if _load_record(mine, record)["profile"] == "article" else [],
        "timeline": _timeline(record),
        "advice": _advice(record),
        "previous": previous,
        "differences": differences,
        "difference_notes": notes,
        "plan": _plan_rows(record),
        "environment": _environment_rows(record),
        "count": len(mine),
    }


def _load_record(mine: Sequence[Record], record: Record) -> Record:
    """The result whose set-ups are shown: the newest ``article`` of its release, else itself."""
    for other in reversed(mine):
        if other["profile"] == "article" and other["release"] == record["release"] and results.runs(other):
            return other
    return record


def _instance_model(record: Record, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt from every tier, with the bar's length as a share of the cold pass."""
    times = entry["ttft_ms"]
    cold = times.get("cold") or 0
    passes = []
    for tier in ("cold", "engine_cache", "ram", "disk"):
        value = times.get(tier)
        if value is None:
            continue
        hits = (entry.get("hit_tokens") or {}).get(tier)
        passes.append(
            {
                "tier": tier,
                "words": {
                    "cold": "computed (cold)",
                    "engine_cache": "engine's own cache",
                    "ram": "RAM tier",
                    "disk": "disk tier",
                }[tier],
                "ms": value,
                "share": max(0.004, value / cold) if cold else 0,
                "gain": cold / value if tier != "cold" and value else None,
                "hits": hits,
            }
        )
    findings = entry.get("findings") or []
    return {**entry, "passes": passes, "proved": not findings, "plan": _plan_instance(record, str(entry["name"]))}


def _plan_instance(record: Record, name: str) -> Mapping[str, Any]:
    return next((entry for entry in record["plan"]["instances"] if entry["name"] == name), {})


def _load_notes(record: Record) -> list[str]:
    """What to know about the load's sizes."""
    notes: list[str] = []
    for entry in (record.get("load") or {}).get("instances") or ():
        notes += entry.get("notes") or ()
    return list(dict.fromkeys(notes))


def _run_model(name: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """One run's line: its figures, and where its prompt tokens came from."""
    figures, tokens = run["figures"], run.get("tokens") or {}
    tail, tail_name = results.tail_words(figures["ttft"])
    ram, disk = tokens.get("tier_cpu", 0), tokens.get("tier_disk", 0)
    external = tokens.get("external", 0)
    # the tiers' lookups count what the engine's cache already held too: scale them to what was really loaded
    found = ram + disk
    parts = {
        "computed": tokens.get("computed", 0),
        "engine": tokens.get("engine_cache", 0),
        "ram": external * ram / found if found else external,
        "disk": external * disk / found if found else 0,
    }
    total = sum(parts.values())
    return {
        "instance": name,
        "run": run["run"],
        "figures": figures,
        "tail": tail,
        "tail_name": tail_name,
        "sources": {key: value / total for key, value in parts.items()} if total else {},
        "served_by": (run.get("disk") or {}).get("served_by"),
    }


#: rows of the article's tables: key, words, unit, path in the figures, whether it is a latency
TABLES: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("ttft_mean_ms", "TTFT mean", ("ttft", "mean"), True),
    ("ttft_tail_ms", "TTFT p99", ("ttft",), True),
    ("tpot_mean_ms", "TPOT mean", ("tpot", "mean"), True),
    ("requests_per_s", "requests per second", ("requests_per_s",), False),
    ("output_tokens_per_s", "output tokens per second", ("output_tokens_per_s",), False),
)
LOADS = {
    "rag": "prompts that repeat a prefix (RAG)",
    "random": "random prompts (the article's own load)",
    "custom": "custom runs",
}


def _points(record: Record, load: str) -> dict[int, Mapping[str, Any]]:
    """Runs of one load by concurrency; warm or single ones, of the first instance that has them."""
    found: dict[int, Mapping[str, Any]] = {}
    for _, run in results.runs(record):
        if run["run"]["phase"] != "populate" and run["run"].get("load", "rag") == load:
            found.setdefault(int(run["run"]["concurrency"]), run)
    return found


def _matrix(sets: Mapping[str, Record]) -> list[dict[str, Any]]:
    """The article's tables: per load and figure, one row a concurrency and one column a profile."""
    tables = []
    for load, words in LOADS.items():
        by_profile = {profile: _points(record, load) for profile, record in sets.items()}
        concurrencies = sorted({many for points in by_profile.values() for many in points})
        # with one set-up and two concurrencies the load's own table says it all
        if len(concurrencies) < 3 and len(by_profile) < 2:
            continue
        for key, title, path, latency in TABLES:
            rows = []
            for many in concurrencies:
                cells = {profile: _cell(points.get(many), key, path) for profile, points in by_profile.items()}
                known = [cell["value"] for cell in cells.values() if cell["value"] is not None]
                best = (min(known) if latency else max(known)) if len(set(known)) > 1 else None
                rows.append({"concurrency": many, "cells": cells, "best": best})
            if rows:
                tables.append(
                    {"load": load, "load_words": words, "key": key, "title": title, "latency": latency, "rows": rows}
                )
    return tables


def _cell(run: Mapping[str, Any] | None, key: str, path: tuple[str, ...]) -> dict[str, Any]:
    if run is None:
        return {"value": None, "note": ""}
    if key == "ttft_tail_ms":
        value, name = results.tail_words(run["figures"]["ttft"])
        return {"value": value, "note": "" if name == "p99" else name}
    return {"value": results.figure(run, path), "note": ""}


def _beside_article(sets: Mapping[str, Record]) -> list[dict[str, Any]]:
    """What the article says, line by line, and what was measured at the same concurrency with prompts that repeat."""
    if len(sets) < 2:
        return []
    by_profile = {profile: _points(record, "rag") for profile, record in sets.items()}
    paths = {key: (path, latency) for key, _, path, latency in TABLES}
    rows = []
    for words, key, many, *said in article.STATEMENTS:
        path, latency = paths[key]
        cells = {profile: _cell(points.get(many), key, path) for profile, points in by_profile.items()}
        if any(cell["value"] is not None for cell in cells.values()):
            rows.append({"words": words, "said": said, "cells": cells, "latency": latency})
    return rows


def _matrix_charts(host: str, sets: Mapping[str, Record]) -> list[dict[str, str]]:
    """TTFT and throughput against concurrency, one line a profile, for every load that was measured."""
    charts = []
    for load, words in LOADS.items():
        points = {profile: _points(record, load) for profile, record in sets.items()}
        if max(map(len, points.values()), default=0) < (2 if len(points) > 1 else 3):
            continue
        for key, title, path, unit in (
            ("ttft_mean_ms", "Mean TTFT", ("ttft", "mean"), "ms"),
            ("requests_per_s", "Throughput", ("requests_per_s",), "requests per second"),
            ("output_tokens_per_s", "Output", ("output_tokens_per_s",), "output tokens per second"),
        ):
            measured = {
                profile: [
                    (float(many), value)
                    for many, run in sorted(entry.items())
                    for value in [results.figure(run, path)]
                    if value is not None
                ]
                for profile, entry in points.items()
            }
            chart = plots.by_concurrency(
                f"{host}-{load}-{key}", f"{title} against concurrency, {words}", unit, measured
            )
            charts.append({"caption": f"{title}, {words}", "svg": plots.draw(chart)})
    return charts


def _timeline(record: Record) -> list[dict[str, str]]:
    """The tiers and the disk over the whole load, with a mark where each run begins."""
    samples: list[dict[str, Any]] = []
    marks: list[tuple[float, str]] = []
    offset = 0.0
    for _, run in results.runs(record):
        own = run.get("series") or []
        if not own:
            continue
        marks.append((offset, str(run["run"]["name"])))
        samples += [{**entry, "at_s": offset + float(entry["at_s"])} for entry in own]
        offset += float(own[-1]["at_s"]) + 1
    if len(samples) < 3:
        return []
    host = str(record["host"])
    charts = [
        (
            plots.timeline(
                f"{host}-usage",
                "Use of the engine's KV pool over the load",
                "percent",
                [plots.Line("KV pool", plots.series(samples, "kv_usage", 100), plots.GPU)],
                marks,
                (0, 105),
            ),
            "Use of the engine's KV pool",
        ),
        (
            plots.timeline(
                f"{host}-tiers",
                "Bytes in the tiers over the load",
                "GiB",
                [
                    plots.Line("RAM tier", plots.series(samples, "ram_bytes", 1 / 1024**3), plots.CPU),
                    plots.Line("disk tier", plots.series(samples, "disk_bytes", 1 / 1024**3), plots.DISK, style="--"),
                ],
                marks,
            ),
            "Bytes in the tiers",
        ),
        (
            plots.timeline(
                f"{host}-device",
                "Traffic of the cache disk over the load",
                "MB/s",
                [
                    plots.Line("read", plots.series(samples, "cache_disk_read_bytes_per_s", 1e-6), plots.DISK),
                    plots.Line(
                        "written",
                        plots.series(samples, "cache_disk_written_bytes_per_s", 1e-6),
                        plots.ACCENT,
                        style="--",
                    ),
                ],
                marks,
            ),
            "Traffic of the cache disk",
        ),
        (
            plots.timeline(
                f"{host}-busy",
                "Busy disks and waiting processors over the load",
                "percent",
                [
                    plots.Line("cache disk", plots.series(samples, "cache_disk_busy_percent"), plots.DISK),
                    plots.Line("root disk", plots.series(samples, "root_disk_busy_percent"), plots.GPU, style="--"),
                    plots.Line("iowait", plots.series(samples, "iowait_percent"), plots.ACCENT, style=":"),
                ],
                marks,
                (0, 105),
            ),
            "Busy disks, iowait",
        ),
        (
            plots.timeline(
                f"{host}-gpu",
                "GPU memory over the load",
                "GiB",
                _gpu_lines(samples, "memory_mib", 1 / 1024),
                marks,
            ),
            "GPU memory",
        ),
        (
            plots.timeline(
                f"{host}-gpu-busy",
                "Busy GPUs over the load",
                "percent",
                _gpu_lines(samples, "utilization_percent"),
                marks,
                (0, 105),
            ),
            "Busy GPUs",
        ),
    ]
    return [
        {"caption": caption, "svg": plots.draw(chart)}
        for chart, caption in charts
        if any(len(line.points) > 2 and any(y for _, y in line.points) for line in chart.lines)
    ]


def _gpu_lines(samples: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> list[plots.Line]:
    """One line a GPU; of more than three those with the highest values, since the others lie over each other."""
    points: dict[int, list[tuple[float, float]]] = {}
    for entry in samples:
        for gpu in entry.get("gpus") or ():
            if key in gpu and "index" in gpu:
                points.setdefault(int(gpu["index"]), []).append((float(entry["at_s"]), gpu[key] * factor))
    highest = sorted(points, key=lambda index: -max(value for _, value in points[index]))[:3]
    looks = ((plots.GPU, "-"), (plots.CPU, "--"), (plots.DISK, ":"))
    return [
        plots.Line(f"GPU {index}", points[index], colour, style=style)
        for index, (colour, style) in zip(sorted(highest), looks, strict=False)
    ]


def _advice(record: Record) -> list[Mapping[str, Any]]:
    """What the series say, one entry a pattern, the busiest run last."""
    found: dict[str, Mapping[str, Any]] = {}
    for _, run in results.runs(record):
        advice = run.get("advice") or {}
        if advice.get("pattern") not in (None, "short"):
            found[str(advice["pattern"])] = {**advice, "run": run["run"]["name"]}
    return list(found.values())


def _plan_rows(record: Record) -> list[tuple[str, str]]:
    """The plan's numbers that explain the figures."""
    plan = record["plan"]
    rows = [
        ("release", str(record["release"])),
        (
            "vLLM / LMCache / torch",
            " / ".join(str(plan["release"].get(key) or "–") for key in ("vllm", "lmcache", "torch")),
        ),
        ("profile", str(record["plan_profile"])),
    ]
    for entry in plan["instances"]:
        name = entry["name"]
        gpus = ", ".join(str(gpu.get("index")) for gpu in entry.get("gpus") or ()) or "none (CPU)"
        rows += [
            (f"{name}: model", str(entry.get("model"))),
            (f"{name}: GPUs", f"{gpus}, tensor parallel {entry.get('tensor_parallel_size', 1)}"),
            (f"{name}: KV pool", f"{number(entry.get('gpu_kv_tokens'), 6)} tokens"),
            (f"{name}: KV per token", human_bytes(float(entry.get("kv_bytes_per_token") or 0))),
            (f"{name}: buffer per GPU", f"{number(entry.get('buffer_gib_per_gpu'))} GiB"),
            (f"{name}: chunk", f"{number(entry.get('chunk_tokens'), 6)} tokens"),
            (
                f"{name}: max_model_len, max_num_seqs",
                f"{number(entry.get('max_model_len'), 7)}, {number(entry.get('max_num_seqs'), 5)}",
            ),
        ]
    for server in plan["servers"]:
        quota = server.get("quota_gib")
        rows.append(
            (
                f"server {server['name']}",
                f"RAM {number(server.get('l1_gib'))} GiB, disk quota {number(quota) + ' GiB' if quota else 'none'}",
            )
        )
    return rows


def _environment_rows(record: Record) -> list[tuple[str, str]]:
    """What it was measured on."""
    found = record.get("environment") or {}
    gpus = found.get("gpus") or []
    rows = [
        ("operating system", found.get("os")),
        ("kernel", found.get("kernel")),
        (
            "processor",
            f"{found.get('cpu_model') or found.get('machine') or ''}, {found.get('cpus', '?')} cores"
            if found
            else None,
        ),
        ("memory", human_bytes(float(found["memory_bytes"])) if found.get("memory_bytes") else None),
        ("GPUs", f"{len(gpus)} x {gpus[0]}" if gpus else None),
        ("driver", found.get("driver")),
    ]
    return [(name, str(value)) for name, value in rows if value]


# -- the three forms ---------------------------------------------------------------------------------------------------


def html(records: Sequence[Record], now: float | None = None) -> str:
    """The whole page."""
    folder = files("kvfleet") / "report_templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        number=number,
        ms=milliseconds,
        clock=clock,
        sentence=lambda text: text[:1].upper() + text[1:],
        percent=percent,
        signed=lambda value: percent(value, signed=True),
        bytes=lambda value: human_bytes(float(value)),
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        **model(records, now),
        profiles=PROFILES,
        article=article,
        record_id=results.record_id,
        css="".join((folder / name).read_text(encoding="utf-8") for name in ("palette.css", "report.css")),
    )


def markdown(records: Sequence[Record]) -> str:
    """A summary for a ticket: a line a host, then the reasons of those that did not pass."""
    newest = sorted(history.latest_per_host(records).values(), key=lambda record: str(record["host"]))
    lines = [
        "| host | release | profile | verdict | deciding figure | measured |",
        "|---|---|---|---|---|---|",
    ]
    for record in newest:
        lines.append(
            f"| {_cell_text(record['host'])} | {_cell_text(record['release'])} | {record['plan_profile']} | "
            f"**{record['verdict']}** | "
            f"{_cell_text(record['deciding']['message'])} | {clock(str(record['time']))} |"
        )
    for record in newest:
        if record["reasons"]:
            lines += ["", f"### {record['host']}: {record['verdict']}"]
            lines += [f"- `{reason['code']}` {reason['message']} _{reason['fix']}_" for reason in record["reasons"]]
        rows = [_run_model(name, run) for name, run in results.runs(record)]
        if rows:
            lines += [
                "",
                f"Load `{record['profile']}` on {record['host']}:",
                "",
                "| run | at a time | TTFT mean | TTFT tail | TPOT | requests/s | output tokens/s |",
                "|---|---|---|---|---|---|---|",
            ]
            lines += [
                f"| {row['run']['name']} | {row['run']['concurrency']} | "
                f"{milliseconds(row['figures']['ttft']['mean'])} | "
                f"{milliseconds(row['tail'])} ({row['tail_name']}) | {milliseconds(row['figures']['tpot']['mean'])} | "
                f"{number(row['figures']['requests_per_s'])} | {number(row['figures']['output_tokens_per_s'])} |"
                for row in rows
            ]
    return "\n".join(lines) + "\n"


def _cell_text(value: Any) -> str:
    """Text that cannot end a table's cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def junit(records: Sequence[Record]) -> str:
    """JUnit XML: a suite a host, a case a check, a failure a reason; ``degrade`` shows as a failure of that type."""
    root = ElementTree.Element("testsuites", name="kvfleet")
    for record in sorted(history.latest_per_host(records).values(), key=lambda entry: str(entry["host"])):
        suite = ElementTree.SubElement(root, "testsuite", name=str(record["host"]), timestamp=_iso(str(record["time"])))
        failures: dict[str, list[Mapping[str, Any]]] = {}
        for reason in record["reasons"]:
            if reason["level"] == "note":
                continue
            check = CHECKS.get(str(reason["code"])[-3:], "the proof ran")
            failures.setdefault(check, []).append(reason)
        names = list(dict.fromkeys([*CHECKS.values(), "the proof ran"]))
        for name in names:
            case = ElementTree.SubElement(suite, "testcase", name=name, classname=f"kvfleet.{record['host']}")
            for reason in failures.get(name, ()):
                failure = ElementTree.SubElement(
                    case, "failure", type=str(reason["level"]), message=_xml(f"{reason['code']}: {reason['message']}")
                )
                failure.text = _xml(str(reason["fix"]))
        suite.set("tests", str(len(names)))
        suite.set("failures", str(len(failures)))
        suite.set("errors", "0")
        suite.set(
            "time", f"{sum(float((record.get(part) or {}).get('duration_s') or 0) for part in ('truth', 'load')):.1f}"
        )
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Text without the control characters that XML 1.0 cannot hold (a journal's line may bring them)."""
    return "".join(character for character in text if character in "\t\n\r" or ord(character) >= 32)


def _iso(text: str) -> str:
    return f"{text[:4]}-{text[4:6]}-{text[6:8]}T{text[9:11]}:{text[11:13]}:{text[13:15]}" if len(text) >= 15 else text


def write(
    results_dir: Path, output: Path | None = None, host: str | None = None, now: float | None = None
) -> dict[str, Path]:
    """Write ``report.html``, ``report.md`` and ``report.junit.xml``; returns their paths by form.

    ``output`` is the HTML file (default: in ``results_dir``), the other two lie beside it. Raises KVF-BENCH-037 when
    there is no result.
    """
    records = history.load_records(results_dir, host)
    if not records:
        raise refuse(
            "KVF-BENCH-037",
            f"No results {'of ' + host + ' ' if host else ''}below {results_dir}.",
            "Run site.yml or playbooks/benchmark.yml first, or name the directory with --results.",
        )
    page = output or results_dir / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    paths = {"html": page, "markdown": page.with_suffix(".md"), "junit": page.with_suffix(".junit.xml")}
    for form, text in (("html", html(records, now)), ("markdown", markdown(records)), ("junit", junit(records))):
        temporary = paths[form].with_name(f".{paths[form].name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(paths[form])
    return paths


def main() -> None:
    """What the role calls: ``python -m kvfleet.report --results DIR``; prints where the report is."""
    parser = argparse.ArgumentParser(prog="kvfleet.report")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    try:
        print(f"report: {write(arguments.results, arguments.output)['html']}")
    except KvfleetError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
