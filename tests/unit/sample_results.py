"""Results for the report's tests, built through the library's own functions; times follow a first GPU measurement."""

from __future__ import annotations

import math
import random

from kvfleet.core import bench, history, metrics

RELEASES = {
    "cu13-0.32.0-0.5.6": {"vllm": "0.32.0", "lmcache": "0.5.6", "torch": "2.13.0", "cuda": "13", "mode": "mp"},
    "cu13-0.31.0-0.5.6": {"vllm": "0.31.0", "lmcache": "0.5.6", "torch": "2.13.0", "cuda": "13", "mode": "mp"},
}

#: requests/s, mean TTFT ms, mean TPOT ms at concurrency 8, 16 and 32 as measured on an H200, others filled in
ARTICLE = {
    "gpu": {1: (1.21, 152, 5.1), 4: (4.4, 178, 5.6), 8: (8.0, 235, 6.0), 16: (11.73, 327, 7.9), 32: (12.0, 1376, 9.1)},
    "cpu": {1: (1.49, 24, 5.0), 4: (5.7, 26, 5.2), 8: (10.74, 30.5, 5.6), 16: (16.1, 96, 6.1), 32: (18.81, 734, 6.8)},
    "disk": {1: (1.42, 61, 5.0), 4: (5.1, 66, 5.3), 8: (8.9, 88, 5.9), 16: (11.1, 402, 7.6), 32: (10.6, 1914, 9.8)},
}


def figures(requests, rate, ttft, tpot, output, rng):
    ttfts = [ttft * math.exp(rng.gauss(-0.06, 0.35)) for _ in range(requests)]
    tpots = [tpot * math.exp(rng.gauss(0, 0.08)) for _ in range(requests)]
    e2e = [first + each * (output - 1) for first, each in zip(ttfts, tpots, strict=True)]
    return {
        "completed": requests,
        "failed": 0,
        "duration_s": requests / rate,
        "requests_per_s": rate,
        "output_tokens_per_s": rate * output,
        "total_tokens_per_s": rate * (output + 2048),
        "input_tokens": requests * 2048,
        "output_tokens": requests * output,
        "ttft": bench.summary(ttfts),
        "tpot": bench.summary(tpots),
        "itl": bench.summary(tpots),
        "e2e": bench.summary(e2e),
    }


def series(seconds, rng, profile):
    samples = []
    for step in range(max(3, int(seconds / 2))):
        at = step * 2.0
        samples.append(
            {
                "at_s": at,
                "kv_usage": min(1.0, 0.55 + 0.35 * math.sin(at / 5) ** 2 + rng.random() * 0.05),
                "running": 16,
                "waiting": 2 if step % 3 else 0,
                "ram_bytes": 0 if profile == "gpu" else min(18, 2 + at / 4) * 1024**3,
                "disk_bytes": 0 if profile != "disk" else min(40, 2 + at / 3) * 1024**3,
                "ram_evicted_chunks": step * 4 if profile == "disk" else 0,
                "disk_loaded_chunks": 0,
                "root_used_bytes": 20 * 1024**3,
                "iowait_percent": 3 + 4 * rng.random(),
                "cache_disk_busy_percent": 60 + 40 * rng.random() if profile == "disk" else 0,
                "root_disk_busy_percent": 2 * rng.random(),
                "gpus": [{"index": i, "memory_mib": 71000 + 300 * i + at, "utilization_percent": 97} for i in (0, 1)],
                "cache_disk_read_bytes_per_s": 2.1e9 * rng.random() if profile == "disk" else 0,
                "cache_disk_written_bytes_per_s": 1.4e9 * rng.random() if profile == "disk" else 0,
            }
        )
    return samples


def one_run(run, rate, ttft, tpot, rng, profile):
    total = run.requests * run.prompt_tokens
    cached = int(total * 0.95) if run.phase == "warm" and profile != "gpu" else 0
    tokens = {
        "computed": total - cached,
        "engine_cache": 0,
        "external": cached,
        "tier_requested": total,
        "tier_cpu": int(cached * (0.4 if profile == "disk" else 1)),
        "tier_disk": int(cached * 0.6) if profile == "disk" else 0,
        "ram_evicted_chunks": 0,
        "disk_evicted_chunks": 0,
    }
    samples = series(run.requests / rate, rng, profile)
    advice = metrics.advise(samples, buffer_gib=20, buffer_needed_gib=30, max_num_seqs=32)
    return {
        "run": bench.run_as_dict(run),
        "figures": figures(run.requests, rate, ttft, tpot, run.output_tokens, rng),
        "tokens": tokens,
        "disk": {
            "read_bytes": tokens["tier_disk"] * 131072,
            "written_bytes": 0,
            "hit_bytes": tokens["tier_disk"] * 131072,
            "served_by": "device" if tokens["tier_disk"] else None,
        },
        "advice": advice.as_dict(),
        "series": metrics.thin_out(samples, 240),
    }


def plan(profile, release, cpu_only=False):
    server = None if profile == "gpu" else "0"
    instance = {
        "name": "llama8b",
        "model": "/data/models/Meta-Llama-3-8B-Instruct",
        "served_model_name": "llama8b",
        "profile": profile,
        "gpus": [] if cpu_only else [{"index": 0, "uuid": "GPU-0"}, {"index": 1, "uuid": "GPU-1"}],
        "tensor_parallel_size": 2,
        "port": 8000,
        "max_model_len": 32768,
        "max_num_seqs": 32,
        "kv_bytes_per_token": 131072,
        "gpu_kv_tokens": 32768,
        "block_size_tokens": 16,
        "chunk_tokens": 256,
        "buffer_gib_per_gpu": 20,
        "server": server,
        "environment": {"HF_TOKEN": "canary-environment"},
        "command": ["/opt/kvfleet/current/bin/vllm", "serve", "--api-key", "canary-command"],
        "exec_start": "vllm serve --api-key canary-exec-start",
        "lmcache_config": None,
    }
    servers = [
        {
            "name": "0",
            "l1_gib": 40,
            "quota_gib": 300 if profile == "disk" else None,
            "environment": {"KEY": "canary-server"},
        }
    ]
    return {
        "schema": 1,
        "fingerprint": "f" * 64,
        "profile": profile,
        "release": {"id": release, **RELEASES[release]},
        "host": {"hostname": "h", "accelerator": "cuda"},
        "servers": servers if server else [],
        "instances": [instance],
    }


ENVIRONMENT = {
    "kernel": "6.8.0-45-generic",
    "machine": "x86_64",
    "cpus": 64,
    "cpu_model": "AMD EPYC 7543 32-Core Processor",
    "memory_bytes": 512 * 1024**3,
    "os": "Ubuntu 24.04.1 LTS",
    "driver": "580.159",
    "gpus": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"],
}


def truth(profile, findings=(), cold=412.0, ram=21.0, disk=118.0):
    return {
        "duration_s": 24.0,
        "instances": [
            {
                "name": "llama8b",
                "profile": profile,
                "salt": "kvfleet-proof-0",
                "ttft_ms": {
                    "cold": cold,
                    "engine_cache": 9.0 if profile == "gpu" else None,
                    "ram": None if profile == "gpu" else ram,
                    "disk": disk if profile == "disk" else None,
                },
                "hit_tokens": {
                    "engine_cache": 6144 if profile == "gpu" else None,
                    "ram": None if profile == "gpu" else 6144,
                    "disk": 6144 if profile == "disk" else None,
                },
                "bytes": {"ram": 0, "disk": 805306368 if profile == "disk" else None, "disk_files": 24},
                "identical": not findings,
                "max_logprob_difference": 0.0625,
                "tolerance": {"logprob": 0.25, "tie": 0.25},
                "prompt_tokens": 6192,
                "notes": [],
                "findings": list(findings),
            }
        ],
        "unit_findings": [],
    }


def record(
    host, at, profile, release="cu13-0.32.0-0.5.6", load="smoke", findings=(), factor=1.0, earlier=(), limits=None
):
    rng = random.Random(f"{host}{at}{profile}")  # noqa: S311
    own_plan = plan(profile, release)
    room = bench.Capacity(32768, 327680, 2457600 if profile == "disk" else 0, 256, 32768, 32)
    speed = bench.Speed(15000, 6)
    loads = bench.article_runs(room, 7) if load == "article" else bench.smoke_runs(room, speed, 7, 70)
    runs = []
    for run in loads.runs:
        base = ARTICLE["gpu" if run.phase != "warm" else profile]
        rate, ttft, tpot = base[run.concurrency]
        runs.append(one_run(run, rate / factor, ttft * factor, tpot * factor, rng, profile))
    done = None
    if not findings:
        entry = {
            "name": "llama8b",
            "profile": profile,
            "notes": list(loads.notes),
            "scale": loads.scale,
            "shape": bench.shape_of(loads),
            "runs": runs,
            "findings": [],
        }
        done = {"duration_s": 95.0, "profile": load, "instances": [entry]}
    checked = truth(profile, findings)
    verdict = bench.judge(checked["instances"], [], done, limits or bench.Thresholds())
    made = history.build_record(host, at, own_plan, load, checked, done, verdict, ENVIRONMENT)
    changes = [change.as_dict() for change in history.regressions(made, earlier)]
    payoff = history.payoff(made, earlier).as_dict()
    made.update(bench.judge_history(verdict, changes, payoff), changes=changes, payoff=payoff)
    return made


FINDING = {
    "code": "KVF-BENCH-008",
    "message": "Instance llama8b: Served from disk, the same prompt gives another answer: token 3 differs and is "
    "no near-tie "
    "(gap 1.9, allowed 0.25).",
    "fix": "Do not serve from this cache: wipe the tier, and check versions, dtype and the disk's health.",
    "numbers": {"max_logprob_difference": 2.71},
}


def fleet():
    """Four hosts: the article's three set-ups, an upgraded host, a failing one, and one that lost to its baseline."""
    made = []
    for profile, at in (("gpu", "20261128T101500Z"), ("cpu", "20261128T103000Z"), ("disk", "20261128T104500Z")):
        made.append(record("gpu-a01", at, profile, load="article", earlier=made))
    made.append(record("gpu-a02", "20261120T090000Z", "cpu", release="cu13-0.31.0-0.5.6", factor=1.12))
    made.append(record("gpu-a02", "20261129T090000Z", "cpu"))
    made.append(record("gpu-b01", "20261129T091000Z", "disk", findings=[FINDING]))
    base = record("gpu-b02", "20261127T080000Z", "gpu")
    made.append(base)
    made.append(record("gpu-b02", "20261129T092000Z", "cpu", factor=1.9, earlier=[base]))
    return made
