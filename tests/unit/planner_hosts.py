"""Hosts, models and settings that the planner's tests share."""

from __future__ import annotations

from typing import Any

from kvfleet.core.models import model_digest
from kvfleet.core.settings import parse_settings
from kvfleet.core.sizing import build_plan

GIB = 1024**3

RELEASE = {
    "id": "test",
    "vllm": "0.32.0",
    "lmcache": "0.5.6",
    "torch": "2.13.0",
    "cuda": "13.0",
    "mode": "mp",
    "connector": "LMCacheMPConnector",
    "connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
}
IN_PROCESS = {
    **RELEASE,
    "id": "old",
    "mode": "in_process",
    "connector_module_path": None,
    "connector": "LMCacheConnectorV1",
}

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "torch_dtype": "bfloat16", "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 131072,
}  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 1024, "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip


def gpu(
    index: int, mib: int = 81920, node: int | None = 0, name: str = "NVIDIA A100-SXM4-80GB", **more: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index:08d}-aaaa-bbbb-cccc-ddddeeeeffff",
        "name": name,
        "memory_mib": mib,
        "numa_node": node,
        "compute_capability": "8.0",
        "pcie_gen": 4,
        "pcie_width": 16,
        **more,
    }


def host(
    gpus: int | list[dict[str, Any]] = 2,
    ram_gib: float = 512,
    available_gib: float | None = None,
    nodes: int = 1,
    **more: Any,
) -> dict[str, Any]:
    cards = (
        gpus if isinstance(gpus, list) else [gpu(index, node=index * nodes // max(1, gpus)) for index in range(gpus)]
    )
    available = ram_gib * 0.96 if available_gib is None else available_gib
    return {
        "hostname": "h",
        "gpus": cards,
        "driver_version": "580.159.04" if cards else None,
        "memory": {"total_bytes": int(ram_gib * GIB), "available_bytes": int(available * GIB)},
        "numa": [
            {"node": node, "cpus": f"{node * 16}-{node * 16 + 15}", "memory_bytes": int(ram_gib * GIB / nodes)}
            for node in range(nodes)
        ],
        "cpus": 16 * nodes,
        "disks": [],
        "shm_bytes": int(ram_gib * GIB / 2),
        "python": "3.12.3",
        "glibc": "2.39",
        "kernel": "6.8.0",
        "os": "Ubuntu 24.04.1 LTS",
        "os_id": "ubuntu",
        "os_version": "24.04",
        **more,
    }


def disk(size_gib: float = 1788.5) -> dict[str, Any]:
    size = int(size_gib * GIB)
    partition = int(size * 0.93)
    return {
        "device": "/dev/disk/by-id/nvme-x",
        "serial": "x",
        "size_bytes": size,
        "partition_bytes": partition,
        "spare_bytes": size - partition,
    }


def model(config: dict[str, Any]) -> dict[str, Any]:
    return {"config": config, "weight_bytes": 0, "weight_source": "shape", "digest": model_digest(config, {})}


def plan(
    where: dict[str, Any],
    config: dict[str, Any] = LLAMA_8B,
    *,
    release: dict[str, Any] = RELEASE,
    disk_size_gib: float | None = 1788.5,
    previous: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
    endurance: tuple[float | None, str] = (None, "not measured"),
    sessions: int | None = None,
    context: int | None = None,
    **values: Any,
) -> dict[str, Any]:
    """A plan for ``where``; keyword arguments are ``kvfleet_*`` variables without the prefix."""
    settings = parse_settings(
        {"kvfleet_model": "/m", "kvfleet_profile": "cpu", **{f"kvfleet_{key}": value for key, value in values.items()}}
    )
    paths = {str(own.get("model")) for own in settings.instances}
    return build_plan(
        where,
        settings,
        {path: model(config) for path in paths},
        release,
        disk=disk(disk_size_gib) if disk_size_gib else None,
        previous=previous,
        measured=measured,
        endurance=endurance,
        sessions=sessions,
        context=context,
    )


def codes(findings: list[dict[str, Any]]) -> set[str]:
    return {finding["code"] for finding in findings}
