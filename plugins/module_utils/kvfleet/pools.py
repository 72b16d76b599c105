"""The engine's own KV memory: what vLLM will find free, how many blocks and tokens that is, how many requests fit.

GPU: ``utilisation x usable memory - weights - what one large step needs - CUDA graphs`` (vLLM 0.32,
``v1/worker/gpu_worker.py``); blocks and tokens follow ``v1/core/kv_cache_utils.py``. An explicit
``kv_cache_memory_bytes`` makes the result exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .models import KvSize, LayerGroup, ModelShape, window_tokens_bound
from .units import GIB, MIB

#: Block size of vLLM's CPU backend; the GPU backends' default.
CPU_BLOCK_TOKENS = 128
GPU_BLOCK_TOKENS = 16
#: vLLM's default of --gpu-memory-utilization since 0.12.
DEFAULT_UTILIZATION = 0.92
#: What the LMCache server takes on every GPU it serves: its CUDA context and 8 MiB; four staged chunks come on top
#: (lmcache 0.5.6: 0.5-0.6 GiB context seen, LMCache issues 4019 and 4287).
LMCACHE_CONTEXT_BYTES = int(0.65 * GIB)
LMCACHE_STAGED_CHUNKS = 4
#: Memory that the engine's own CUDA context needs outside of its utilisation.
ENGINE_CONTEXT_BYTES = int(0.6 * GIB)
#: Buffers outside torch's allocator: cuBLAS and attention workspaces; NCCL adds more with several ranks.
NON_TORCH_BYTES = int(0.25 * GIB)
NCCL_BYTES = int(0.75 * GIB)
#: CUDA graphs of the default capture sizes, profiled into the budget since vLLM 0.21.
GRAPH_BYTES = int(0.6 * GIB)


def usable_gpu_bytes(gpu: Mapping[str, Any]) -> int:
    """Memory of a GPU that CUDA shows, in bytes: ``nvidia-smi``'s total less what the driver keeps.

    H100 80 GB: 81,559 MiB and 79.1-79.2 GiB; RTX 4090: 24,564 MiB and 23.6 GiB; H200: 143,771 MiB and 139.8 GiB.
    """
    total = int(gpu["memory_mib"]) * MIB
    return total - 256 * MIB - total // 250


def batched_tokens(gpu: Mapping[str, Any] | None) -> int:
    """vLLM's default of ``max_num_batched_tokens`` for an API server on this card (vLLM 0.33, "
    "``engine/arg_utils.py``)."""
    if gpu is None:
        return 2048
    gib = int(gpu["memory_mib"]) / 1024
    if gib >= 160:
        return 16384
    return 8192 if gib >= 70 and "a100" not in str(gpu.get("name", "")).lower() else 2048


def step_bytes(shape: ModelShape, tokens: int, sequences: int, tensor_parallel_size: int) -> int:
    """Peak of one step's temporary tensors: the widest layer over all ``tokens``, and sampling over the vocabulary."""
    width = 2 * shape.intermediate_size // tensor_parallel_size + 4 * shape.hidden_size
    layers = tokens * width * 2
    # float32 logits, a sorted copy, probabilities and 64-bit indices of every sequence
    sampling = min(sequences, tokens) * shape.vocab_size * (4 + 4 + 4 + 8)
    return max(layers, sampling) + layers // 4


def lmcache_gpu_bytes(chunk_bytes_per_rank: int) -> int:
    """What one LMCache server takes on one GPU, outside of vLLM's utilisation."""
    return LMCACHE_CONTEXT_BYTES + LMCACHE_STAGED_CHUNKS * chunk_bytes_per_rank + 8 * MIB


def largest_utilization(usable_bytes: int, lmcache_bytes: int) -> float:
    """Highest utilisation, in whole hundredths, that leaves room for the engine's context and the LMCache server."""
    return math.floor((usable_bytes - ENGINE_CONTEXT_BYTES - lmcache_bytes) / usable_bytes * 100) / 100


@dataclass(frozen=True)
class Pool:
    """The KV memory of one rank: bytes, blocks, tokens as vLLM's log counts them, and requests of full length."""

    bytes_per_rank: int
    blocks: int
    tokens: int
    max_concurrency: float
    block_tokens: int
    blocks_per_request: int


def build_pool(
    shape: ModelShape,
    kv: KvSize,
    pool_bytes: int,
    max_model_len: int,
    block_tokens: int,
    hybrid_manager: bool,
    in_flight_tokens: int,
) -> Pool:
    """Divide ``pool_bytes`` of one rank into blocks.

    ``tokens`` is what the engine logs as "KV cache size": concurrency at ``max_model_len`` times that length; with one
    kind of layer and a length that is a multiple of the block that is blocks x block size.
    """
    block_bytes, per_request = _blocks(shape, kv, max_model_len, block_tokens, hybrid_manager, in_flight_tokens)
    blocks = max(0, pool_bytes) // block_bytes if block_bytes else 0
    concurrency = blocks / per_request if per_request else 0.0
    return Pool(max(0, pool_bytes), blocks, int(concurrency * max_model_len), concurrency, block_tokens, per_request)


def smallest_pool_bytes(
    shape: ModelShape,
    kv: KvSize,
    max_model_len: int,
    block_tokens: int,
    hybrid_manager: bool,
    in_flight_tokens: int,
    requests: int = 1,
) -> int:
    """Bytes per rank for ``requests`` requests of full length and the one block that is never usable."""
    block_bytes, per_request = _blocks(shape, kv, max_model_len, block_tokens, hybrid_manager, in_flight_tokens)
    return (per_request * requests + 1) * block_bytes


def longest_len(
    shape: ModelShape,
    kv: KvSize,
    pool_bytes: int,
    block_tokens: int,
    hybrid_manager: bool,
    in_flight_tokens: int,
    limit: int,
) -> int:
    """Longest request in whole blocks, at most ``limit`` tokens, that the pool holds; 0 when not even one block."""
    low, high = 0, max(1, limit // block_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * block_tokens
        if smallest_pool_bytes(shape, kv, tokens, block_tokens, hybrid_manager, in_flight_tokens) <= pool_bytes:
            low = middle
        else:
            high = middle - 1
    return min(limit, low * block_tokens)


def _blocks(
    shape: ModelShape, kv: KvSize, max_model_len: int, block_tokens: int, hybrid: bool, in_flight: int
) -> tuple[int, int]:
    """Bytes of one block of the shared pool, and the blocks that one request of full length takes from it.

    Several kinds of layers share a pool of equally large blocks: each kind is cut into groups of the smallest kind's
    number of layers (the largest one's, when they differ by less than half), every group has its own block table.
    """
    attention = [group for group in shape.groups if group.kind != "state"]
    full_blocks = math.ceil(max_model_len / block_tokens)
    kinds: dict[tuple[str, int | None], list[LayerGroup]] = {}
    for group in attention:
        kinds.setdefault((group.kind, group.window_tokens) if hybrid else ("full", None), []).append(group)
    if len(kinds) <= 1:
        block_bytes = kv.stored_per_token_per_rank * block_tokens
        only = attention[0] if attention else None
        if hybrid and only is not None and only.kind != "full":
            return block_bytes, window_tokens_bound(only, in_flight, max_model_len, block_tokens)
        return block_bytes, full_blocks
    counts = [sum(group.layers for group in groups) for groups in kinds.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    layer_bytes = kv.stored_per_token_per_rank * block_tokens // sum(counts)
    per_request = 0
    for (kind, _), groups in kinds.items():
        tables = math.ceil(sum(group.layers for group in groups) / size)
        each = full_blocks if kind == "full" else window_tokens_bound(groups[0], in_flight, max_model_len, block_tokens)
        per_request += tables * each
    return layer_bytes * size, per_request
