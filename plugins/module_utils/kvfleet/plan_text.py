"""A plan for people: the same few lines in a terminal, in a playbook's output and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .units import human_bytes

Row = tuple[str, str, str]


def host_rows(plan: Mapping[str, Any]) -> list[Row]:
    """What is said about the host: (name, value, why)."""
    host, release = plan["host"], plan["release"]
    ram = host["ram"]
    versions = f"vLLM {release['vllm']}, LMCache {release['lmcache'] or '-'}, torch {release['torch']}"
    rows: list[Row] = [
        ("release", f"{release['id']} ({versions})" if release["id"] else "none fits", "; ".join(release["reasons"])),
        (
            "profile",
            str(plan["profile"]),
            {"gpu": "no offload", "cpu": "host RAM", "disk": "host RAM and NVMe"}[plan["profile"]],
        ),
        (
            "RAM",
            f"{ram['available_gib']:.1f} of {ram['total_gib']:.1f} GiB available",
            f"{ram['reserved_gib']:.1f} system + {ram['engine_gib']:.1f} vLLM + {ram['lmcache_gib']:.1f} LMCache + "
            f"{ram['buffers_gib']:.1f} buffers, {ram['free_gib']:.1f} left",
        ),
    ]
    disk = host["disk"]
    if disk:
        rows.append(
            (
                "disk",
                f"{disk['partition_gib']:.1f} GiB partition on {disk['serial']}",
                f"{disk['quota_gib']:.1f} quota, {disk['floor_gib']:g} stay free, {disk['spare_gib']:.1f} "
                f"unpartitioned; {_endurance(disk)}",
            )
        )
    for server in plan["servers"]:
        tier = f", disk tier {server['quota_gib']:g} GiB" if server["quota_gib"] else ""
        rows.append(
            (
                f"server {server['name']}",
                f"L1 {server['l1_gib']:g} GiB{tier}",
                f"chunks of {server['chunk_tokens']} tokens, port {server['port']}, serves "
                f"{', '.join(server['instances'])}",
            )
        )
    return rows


def _endurance(disk: Mapping[str, Any]) -> str:
    days = disk["endurance_days"]
    return f"endurance {'unknown' if days is None else f'{days:,.0f} days'}: {disk['endurance_reason']}"


def instance_rows(instance: Mapping[str, Any]) -> list[Row]:
    """What is said about one instance: (name, value, why)."""
    reasons = instance["reasons"]
    ranks = instance["tensor_parallel_size"]
    gpus = ", ".join(str(gpu["index"]) for gpu in instance["gpus"]) or "none (CPU)"
    rows: list[Row] = [
        ("GPUs", gpus, f"tensor parallel size {ranks}, port {instance['port']}"),
        (
            "KV per token",
            human_bytes(instance["kv_bytes_per_token"]),
            f"{human_bytes(instance['kv_bytes_per_token_per_rank'])} on each rank; one chunk is "
            f"{human_bytes(instance['chunk_bytes_per_rank'])} there",
        ),
        (
            "weights per rank",
            human_bytes(instance["weights_bytes_per_rank"]),
            reasons.get("weights_bytes_per_rank", ""),
        ),
        (
            "KV pool per rank",
            f"{human_bytes(instance['gpu_kv_pool_bytes_per_rank'])} = {instance['gpu_kv_tokens']:,} tokens",
            reasons.get("gpu_kv_pool_bytes_per_rank", ""),
        ),
        (
            "longest request",
            f"{instance['max_model_len']:,} tokens",
            f"{reasons.get('max_model_len', '')}; {instance['max_concurrency_at_max_len']:g} of them fit the pool, "
            f"{instance['max_num_seqs']} run at most",
        ),
    ]
    if instance["gpu_memory_utilization"] is not None and instance["kv_cache_memory_bytes"] is None:
        rows.append(
            ("utilisation", f"{instance['gpu_memory_utilization']:g}", reasons.get("gpu_memory_utilization", ""))
        )
    if instance["profile"] != "gpu":
        rows.append(
            (
                "buffer per GPU" if instance["gpus"] else "buffer",
                f"{instance['buffer_gib_per_gpu']:g} GiB",
                f"{reasons.get('buffer_gib_per_gpu', '')}; {instance['l1_gib']:g} GiB in all",
            )
        )
    if instance["quota_gib"]:
        rows.append(("quota", f"{instance['quota_gib']:g} GiB", reasons.get("quota_gib", "")))
    for tier, report in instance["tiers"].items():
        needed, measured = report["needed_bytes_per_s"], report["measured_bytes_per_s"]
        rows.append(
            (
                f"{tier} tier pays",
                str(report["pays"]),
                f"needs {_speed(needed)}, measured {_speed(measured)}"
                + (f"; from {report['break_even_tokens']} tokens on" if report["break_even_tokens"] else "")
                + (f"; {reasons['tiers']}" if reasons.get("tiers") else ""),
            )
        )
    return rows


def session_rows(sessions: Mapping[str, Any]) -> list[Row]:
    """What is said about a number of long conversations."""
    if sessions["kv_bytes_total"] is None:
        return []
    rows: list[Row] = [
        (
            "sessions",
            f"{sessions['sessions']:,} x {sessions['context']:,} tokens",
            f"{human_bytes(sessions['kv_bytes_total'])} of KV",
        )
    ]
    for tier, fits in sessions["fits"].items():
        held = sessions["sessions_held"][tier]
        rows.append((f"held by {tier}", "yes" if fits else "no", f"{held:,} of {sessions['sessions']:,} fit"))
    return rows


def page_parts(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plan as titled tables: ``[{"title", "rows": [[name, value, why], ...]}, ...]``, host first."""
    parts = [{"title": "Host", "rows": [list(row) for row in host_rows(plan)]}]
    for instance in plan["instances"]:
        title = f"Instance {instance['name']}: {instance['model']}"
        parts.append({"title": title, "rows": [list(row) for row in instance_rows(instance)]})
    if plan.get("sessions"):
        parts.append({"title": "Long conversations", "rows": [list(row) for row in session_rows(plan["sessions"])]})
    return parts


def summary_lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan as lines of text: host, instances, sessions, then errors and warnings."""
    lines = [f"{plan['host']['hostname']}:"]
    lines += _table(host_rows(plan))
    for instance in plan["instances"]:
        lines.append(f"  {instance['name']} ({instance['model']}):")
        lines += _table(instance_rows(instance), indent=4)
    if plan.get("sessions"):
        lines += _table(session_rows(plan["sessions"]))
    for kind in ("errors", "warnings"):
        for entry in plan[kind]:
            lines.append(f"  {kind[:-1].upper()} {entry['code']}: {entry['message']} {entry['fix']}")
    return lines


def _table(rows: Sequence[Row], indent: int = 2) -> list[str]:
    width = max((len(name) for name, _, _ in rows), default=0)
    return [f"{'':{indent}}{name:<{width}}  {value}{f'  ({why})' if why else ''}" for name, value, why in rows]


def _speed(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
