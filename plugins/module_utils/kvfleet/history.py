"""Results on the controller: one JSON file per run, never overwritten, and what earlier ones say about a new one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .findings import refuse

SCHEMA = 1

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
    text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n"
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


def load_records(results_dir: Path, host: str | None = None) -> list[dict[str, Any]]:
    """All readable results, oldest first, each with its ``path``; files that are no result are left out."""
    pattern = f"{safe_name(host)}/*.json" if host else "*/*.json"
    records = []
    for path in sorted(results_dir.glob(pattern)):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("host"):
            records.append({**record, "path": str(path)})
    return sorted(records, key=lambda record: (str(record["time"]), str(record["path"])))


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
    return "\n".join(lines)
