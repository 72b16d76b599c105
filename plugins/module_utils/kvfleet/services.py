"""From the plan's numbers to what the units execute: argument lists and environments of servers and instances.

Flags are those of vLLM 0.19 - 0.32 and LMCache 0.4.4 - 0.5.6 as their own ``--help`` prints them. Templates print
what this module returns and add nothing, so that the sum in the plan is the sum in the units.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from . import flags

#: No instance may answer for longer than this while it stops; the unit's stop timeout must exceed it.
DEFAULT_SHUTDOWN_TIMEOUT_S = 20
#: A first start compiles kernels: 214 s were seen on an H200, so the deadline is far above it.
DEFAULT_STARTUP_DEADLINE_S = 900

#: LMCache loses a server that restarts faster than the heartbeat; 3 s keeps that window small.
_HEARTBEAT_INTERVAL_S = 3
_MESSAGE_TIMEOUT_S = 30

_NO_TELEMETRY = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false"}


def attach_commands(plan: dict[str, Any]) -> None:
    """Add ``command``, ``environment`` and, for in-process releases, ``lmcache_config`` to every service of ``plan``.

    Also sets every server's ``base_path`` (disk profile) because the directory's name carries the fingerprint of what
    makes old KV unusable. Changes ``plan`` in place; needs the keys of docs/architecture.md, "The plan".
    """
    instances = {instance["name"]: instance for instance in plan["instances"]}
    for server in plan["servers"]:
        served = [instances[name] for name in server["instances"]]
        if server.get("quota_gib"):
            server["base_path"] = (
                f"{plan['paths']['cache_data']}/{server['name']}/{tier_fingerprint(plan, server, served)}"
            )
        else:
            server["base_path"] = None
        server["command"] = server_command(plan, server, served)
        server["exec_start"] = exec_start(server["command"])
        server["environment"] = server_environment(plan)
        server["numa_directives"] = numa_directives(plan, server.get("numa_nodes") or [], strict=True)
    servers = {server["name"]: server for server in plan["servers"]}
    for instance in plan["instances"]:
        instance.setdefault("host", "127.0.0.1")
        instance.setdefault("startup_deadline_s", DEFAULT_STARTUP_DEADLINE_S)
        instance.setdefault("shutdown_timeout_s", DEFAULT_SHUTDOWN_TIMEOUT_S)
        instance["lmcache_config"] = in_process_config(plan, instance)
        instance["environment"] = instance_environment(plan, instance)
        instance["command"] = instance_command(plan, instance, servers.get(instance.get("server") or ""))
        instance["exec_start"] = exec_start(instance["command"])
        instance["after"] = start_after(plan, instance)
        # the CPU engine binds its own threads
        nodes = (instance.get("numa_nodes") or []) if instance["gpus"] else []
        instance["numa_directives"] = numa_directives(plan, nodes, strict=False)
    plan["watch"] = watched_units(plan)


def start_after(plan: dict[str, Any], instance: dict[str, Any]) -> list[str]:
    """Units of instances that must be ready before ``instance`` starts.

    vLLM measures free memory while it starts and fails when another process changes it meanwhile, so instances that
    share a GPU (or the CPU host's RAM) start one after the other, in the plan's order.
    """
    mine = {gpu["uuid"] for gpu in instance["gpus"]}
    units = []
    for other in plan["instances"]:
        if other["name"] == instance["name"]:
            break
        if mine & {gpu["uuid"] for gpu in other["gpus"]} or not (mine or other["gpus"]):
            units.append(f"kvfleet-vllm@{other['name']}.service")
    return units


def numa_directives(plan: dict[str, Any], nodes: list[int], strict: bool) -> list[str]:
    """Lines for a unit that keep CPU and memory on ``nodes``; none on a host with one node or unknown nodes.

    ``strict`` binds memory (the planner has checked that it fits there); otherwise the node is preferred, since the
    page cache of weights may take more than a node holds. Several nodes are interleaved.
    """
    if int(plan["host"].get("numa_nodes") or 1) < 2 or not nodes:
        return []
    mask = ",".join(str(node) for node in nodes)
    policy = "interleave" if len(nodes) > 1 else "bind" if strict else "preferred"
    return [f"NUMAPolicy={policy}", f"NUMAMask={mask}", "CPUAffinity=numa"]


def watched_units(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """What the health watcher asks: every server and instance with the address that answers."""
    units: list[dict[str, Any]] = []
    for server in plan["servers"]:
        entry = {"unit": f"kvfleet-lmcache@{server['name']}.service", "http_port": server["http_port"]}
        if server["base_path"]:
            entry.update(mount_point=plan["paths"]["cache_mount"], base_path=server["base_path"])
        units.append(entry)
    for instance in plan["instances"]:
        units.append(
            {
                "unit": f"kvfleet-vllm@{instance['name']}.service",
                "address": instance["host"],
                "port": instance["port"],
                "model": instance["served_model_name"],
            }
        )
    return units


def tier_fingerprint(plan: dict[str, Any], server: dict[str, Any], served: list[dict[str, Any]]) -> str:
    """Name of the disk tier's directory: 16 hex digits over everything that makes stored KV unusable.

    LMCache's file names hold model, rank, chunk hash and salt, but neither dtype, weights revision, chunk size nor
    version, and files have no checksum (``native_connector_l2_adapter.py`` of LMCache 0.5.6).
    """
    parts = {
        "vllm": plan["release"]["vllm"],
        "lmcache": plan["release"]["lmcache"],
        "chunk_tokens": server["chunk_tokens"],
        "instances": [
            {
                key: instance.get(key)
                for key in (
                    "model",
                    "model_digest",
                    "dtype",
                    "kv_cache_dtype",
                    "tensor_parallel_size",
                    "block_size_tokens",
                )
            }
            for instance in sorted(served, key=lambda instance: str(instance["name"]))
        ],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def server_command(plan: dict[str, Any], server: dict[str, Any], served: list[dict[str, Any]]) -> list[str]:
    """Argument list of one LMCache server for the instances ``served``.

    Sizes in GiB, and loopback only: its ports know no authentication.
    """
    command = [
        f"{plan['paths']['current']}/bin/lmcache",
        "server",
        "--host", "127.0.0.1",
        "--port", str(server["port"]),
        "--http-host", "127.0.0.1",
        "--http-port", str(server["http_port"]),
        "--l1-size-gb", _number(server["l1_gib"]),
        "--chunk-size", str(server["chunk_tokens"]),
        "--eviction-policy", "LRU",
        "--eviction-trigger-watermark", _number(server["eviction_trigger_watermark"]),
        "--eviction-ratio", _number(server["eviction_ratio"]),
        # every rank of an instance is a client of its own for stores and loads, its scheduler one for lookups
        # (lmcache 0.5.6, v1/multiprocess/affinity_pool.py); fewer threads and they wait for each other
        "--max-gpu-workers", str(max(1, sum(int(instance["tensor_parallel_size"]) for instance in served))),
        "--max-cpu-workers", str(max(1, len(served))),
    ]  # fmt: skip
    if plan["host"]["accelerator"] == "cpu":
        # the CPU engine picks engine_driven transfers, which the server's default mode refuses without a word
        command += ["--supported-transfer-mode", "auto"]
        if server.get("shm_name"):
            command += ["--shm-name", server["shm_name"]]
    if server.get("base_path"):
        adapter = {
            "type": "fs_native",
            "base_path": server["base_path"],
            "num_workers": 4,
            "use_odirect": bool(server.get("use_odirect", True)),
            "max_capacity_gb": server["quota_gib"],
            # without this block max_capacity_gb only counts and deletes nothing
            "eviction": {
                "eviction_policy": "LRU",
                "trigger_watermark": server["l2_eviction_trigger_watermark"],
                "eviction_ratio": server["l2_eviction_ratio"],
            },
        }
        command += ["--l2-adapter", _compact_json(adapter)]
    return command + flags.words(server.get("server_flags") or {})


def server_environment(plan: dict[str, Any]) -> dict[str, str]:
    """Environment of an LMCache server."""
    return {
        **_home_environment(plan),
        **_NO_TELEMETRY,
        "LMCACHE_DISABLE_BANNER": "1",
        # the same seed in every process that hashes prompts
        "PYTHONHASHSEED": "0",
    }


def instance_command(plan: dict[str, Any], instance: dict[str, Any], server: dict[str, Any] | None) -> list[str]:
    """Argument list of one vLLM instance; ``server`` is its LMCache server, if its profile has one."""
    command = [
        f"{plan['paths']['current']}/bin/vllm",
        "serve",
        instance["model"],
        "--host", instance["host"],
        "--port", str(instance["port"]),
        "--served-model-name", instance["served_model_name"],
        "--tensor-parallel-size", str(instance["tensor_parallel_size"]),
        "--max-model-len", str(instance["max_model_len"]),
        "--max-num-seqs", str(instance["max_num_seqs"]),
        "--kv-cache-dtype", instance.get("kv_cache_dtype", "auto"),
        "--dtype", instance.get("dtype", "auto"),
        "--block-size", str(instance["block_size_tokens"]),
        "--disable-access-log-for-endpoints", "/health,/metrics",
    ]  # fmt: skip
    understood = flags.engine_flags(str(plan["release"]["vllm"]))
    if understood is None or "--shutdown-timeout" in understood:
        # without it (vLLM before 0.18) running requests are cut at a stop
        command += ["--shutdown-timeout", str(instance["shutdown_timeout_s"])]
    if instance.get("kv_cache_memory_bytes"):
        command += ["--kv-cache-memory-bytes", str(instance["kv_cache_memory_bytes"])]
    else:
        command += ["--gpu-memory-utilization", _number(instance["gpu_memory_utilization"])]
    if instance.get("enforce_eager"):
        command.append("--enforce-eager")
    if instance.get("load_format", "auto") != "auto":
        command += ["--load-format", instance["load_format"]]
    if instance.get("trust_remote_code"):
        command.append("--trust-remote-code")
    transfer = kv_transfer_config(plan, instance, server)
    if transfer:
        command += ["--kv-transfer-config", _compact_json(transfer)]
    return command + flags.words(instance.get("engine_flags") or {})


def kv_transfer_config(
    plan: dict[str, Any], instance: dict[str, Any], server: dict[str, Any] | None
) -> dict[str, Any] | None:
    """vLLM's ``--kv-transfer-config``: the release names the connector; ``None`` for profile ``gpu``."""
    release = plan["release"]
    if instance["profile"] == "gpu" or release["mode"] == "none":
        return None
    config: dict[str, Any] = {
        "kv_connector": release["connector"],
        "kv_role": "kv_both",
        "engine_id": f"kvfleet-{instance['name']}",
        # a cache that cannot deliver must cost time, not the request
        "kv_load_failure_policy": "recompute",
    }
    if release.get("connector_module_path"):
        config["kv_connector_module_path"] = release["connector_module_path"]
    if server is not None:
        config["kv_connector_extra_config"] = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": server["port"],
            "lmcache.mp.mq_timeout": _MESSAGE_TIMEOUT_S,
            "lmcache.mp.heartbeat_interval": _HEARTBEAT_INTERVAL_S,
        }
    return config


def in_process_config(plan: dict[str, Any], instance: dict[str, Any]) -> dict[str, Any] | None:
    """LMCache's settings for releases that run it inside vLLM; both sizes are GiB per rank there."""
    if plan["release"]["mode"] != "in_process" or instance["profile"] == "gpu":
        return None
    config: dict[str, Any] = {
        "chunk_size": instance["chunk_tokens"],
        "local_cpu": True,
        "max_local_cpu_size": instance["buffer_gib_per_gpu"],
        "pre_caching_hash_algorithm": "sha256_cbor",
    }
    if instance["profile"] == "disk":
        config["local_disk"] = f"file://{plan['paths']['cache_data']}/{instance['name']}/"
        config["max_local_disk_size"] = (instance["quota_gib"] or 0) / instance["tensor_parallel_size"]
        config["extra_config"] = {"use_odirect": bool(instance.get("use_odirect", True))}
    return config


def instance_environment(plan: dict[str, Any], instance: dict[str, Any]) -> dict[str, str]:
    """Environment of one vLLM instance: its GPUs, its port range, its caches, and no way to the network."""
    environment = {
        **_home_environment(plan),
        **_NO_TELEMETRY,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        # first port of the engine's internal range; instances would race for the same ones otherwise
        "VLLM_PORT": str(instance["internal_port"]),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(instance["startup_deadline_s"]),
    }
    if instance["profile"] != "gpu":
        # read by nobody: it shows in the unit what the plan gave each rank
        environment["KVFLEET_BUFFER_GIB_PER_GPU"] = _number(instance["buffer_gib_per_gpu"] or 0)
    if instance["gpus"]:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu["uuid"] for gpu in instance["gpus"])
    if int(instance["tensor_parallel_size"]) > 1:
        # all ranks are on this host: NCCL and Gloo meet on the host's own address otherwise, where anyone can speak to
        # them without a password (8 open ports of an instance on two GPUs, seen with vLLM 0.32.0 on two H200s)
        environment["NCCL_SOCKET_IFNAME"] = "lo"
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if instance.get("enforce_eager"):
        # vLLM compiles its logprobs kernel even when eager: without a C++ compiler the first request that asks for
        # logprobs kills the engine (seen with 0.32.0 on CPU)
        environment["TORCH_COMPILE_DISABLE"] = "1"
    if instance.get("lmcache_config"):
        # The second model runner starts a step of single tokens without a forward context, and LMCache inside the
        # engine then loads nothing: a prompt that a tier holds to its end is answered from blocks nobody filled (seen
        # with 0.25.1 + 0.5.3 on an H200; `start_load_kv` of LMCache's vllm_v1_adapter, `pre_forward` of vLLM's
        # v1/worker/gpu/kv_connector.py).
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        environment["LMCACHE_CONFIG_FILE"] = f"{plan['paths']['etc']}/kvfleet-vllm@{instance['name']}.lmcache.yaml"
    return environment


def _home_environment(plan: dict[str, Any]) -> dict[str, str]:
    """Every cache that the engine and its libraries write, in the service's own directory, kept across restarts."""
    state = plan["paths"]["state"]
    return {
        "HOME": state,
        "XDG_CACHE_HOME": f"{state}/cache",
        "HF_HOME": f"{state}/cache/huggingface",
        "VLLM_CACHE_ROOT": f"{state}/cache/vllm",
        "TRITON_CACHE_DIR": f"{state}/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{state}/cache/inductor",
        "NUMBA_CACHE_DIR": f"{state}/cache/numba",
    }


def exec_start(command: list[str]) -> str:
    """``command`` as the value of a unit's ``ExecStart=``: quoted for systemd, an option and its value on a line."""
    lines: list[str] = []
    for word in command:
        # an option starts a line; the program, its subcommand and positional words stay together
        if word.startswith("--") or not lines:
            lines.append(systemd_quote(word))
        else:
            lines[-1] += " " + systemd_quote(word)
    return " \\\n  ".join(lines)


def systemd_quote(word: str) -> str:
    """One word of a command line as systemd reads it (systemd.syntax(7), "Quoting"; ``%`` and ``$`` doubled).

    Raises ``ValueError`` for control characters, which no unit file can carry safely.
    """
    if any(ord(character) < 32 for character in word):
        raise ValueError(f"a command line cannot hold control characters: {word!r}")
    escaped = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if word and not set(word) & set(" \t\"';\\"):
        return escaped
    return "'" + escaped.replace("'", "\\'") + "'"


def _number(value: float) -> str:
    """A number as the shortest text that means the same: ``1``, ``0.25``."""
    return f"{value:g}"


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
