"""What a proof measured, in the words that the next plan reads: speeds of the tiers, and how much the disk is written.

Pure functions; the record they speak of is ``proved.json`` (see ``proof.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .health import SmartLog, endurance_days

DAY_S = 86400.0


def speeds(
    plan: Mapping[str, Any], truth: Sequence[Mapping[str, Any]], load: Mapping[str, Any] | None
) -> dict[str, Any]:
    """``{prefill_tokens_per_s, cpu, disk, instances}`` of a proof; what was not measured is ``None``.

    ``cpu`` and ``disk`` are bytes per second that the tier delivered, the best that any instance saw in the repeated
    prompt (hit bytes / TTFT) or in a warm run (hit bytes / duration). Both hold the computing around the load, so
    they are lower bounds, and so is the larger one. Runs whose disk hits came from the page cache say nothing about
    the disk. ``instances`` has the prefill and decode speed of each with its model and its number of ranks;
    ``prefill_tokens_per_s`` stands above them when there is only one.
    """
    per_token = {
        str(entry["name"]): float(entry.get("kv_bytes_per_token_stored") or entry["kv_bytes_per_token"])
        for entry in plan["instances"]
    }
    planned = {str(entry["name"]): entry for entry in plan["instances"]}
    found: dict[str, list[float]] = {"cpu": [], "disk": []}
    instances: dict[str, Any] = {}
    for proof in truth:
        name = str(proof["name"])
        instances[name] = {
            "model": planned[name].get("model"),
            "tensor_parallel_size": planned[name].get("tensor_parallel_size"),
            "prefill_tokens_per_s": proof.get("prefill_tokens_per_s"),
            "decode_ms_per_token": proof.get("decode_ms_per_token"),
        }
        for tier, label in (("cpu", "ram"), ("disk", "disk")):
            tokens = (proof.get("hit_tokens") or {}).get(label)
            ttft_ms = (proof.get("ttft_ms") or {}).get(label)
            if tokens and ttft_ms:
                found[tier].append(tokens * per_token[name] / ttft_ms * 1000)
    for entry in (load or {}).get("instances") or ():
        for run in entry.get("runs") or ():
            duration_s = (run.get("figures") or {}).get("duration_s")
            if not duration_s or run["run"]["phase"] != "warm":
                continue
            for tier in ("cpu", "disk"):
                counted = run.get("tokens") or {}
                # a lookup is no load: what the engine's own cache held was looked up and never fetched
                tokens = min(float(counted.get(f"tier_{tier}") or 0), float(counted.get("external") or 0))
                if tokens and not (tier == "disk" and (run.get("disk") or {}).get("served_by") != "device"):
                    found[tier].append(tokens * per_token[str(entry["name"])] / duration_s)
    alone = next(iter(instances.values())) if len(instances) == 1 else {}
    return {
        "prefill_tokens_per_s": alone.get("prefill_tokens_per_s"),
        **{tier: round(max(values)) if values else None for tier, values in found.items()},
        "instances": instances,
    }


def disk_writes(
    last: Mapping[str, Any] | None, serial: str, smart: SmartLog | None, now_s: float
) -> dict[str, Any] | None:
    """The first reading of the cache disk's own write counter: ``{serial, written_bytes, at_s}``.

    ``last`` is the record of the proof before; its reading stays while disk and counter are the same ones, so that
    the rate is measured over all proofs. ``now_s`` is Unix time.
    """
    if smart is None:
        return None
    first = (last or {}).get("disk_writes") or {}
    if (
        first.get("serial") == serial
        and float(first.get("written_bytes", 0)) <= smart.data_written_bytes
        # a clock that was set back would make the rate negative
        and float(first.get("at_s", 0)) <= now_s
    ):
        return dict(first)
    return {"serial": serial, "written_bytes": smart.data_written_bytes, "at_s": round(now_s)}


def endurance(
    last: Mapping[str, Any] | None, serial: str, smart: SmartLog | None, why_no_log: str, now_s: float
) -> tuple[float | None, str]:
    """Days until the cache disk's endurance is used up at the write rate between its first proof and now, and why.

    ``None`` with a reason where that cannot be known: no health log (``why_no_log``), no proof yet, less than a day of
    history.
    """
    if smart is None:
        return None, why_no_log
    first = (last or {}).get("disk_writes") or {}
    if first.get("serial") != serial:
        return None, "its write rate is measured from the first proof on"
    seconds = now_s - float(first["at_s"])
    written = smart.data_written_bytes - float(first["written_bytes"])
    if seconds < DAY_S or written < 0:
        return None, "its write rate is measured over a day at least"
    days, basis = endurance_days(smart, write_bytes_per_day=written / seconds * DAY_S)
    return (None if days is None else round(days, 1)), basis
