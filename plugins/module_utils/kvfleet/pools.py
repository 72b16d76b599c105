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
#: What CUDA takes on a GPU before vLLM counts: its context, and NCCL's buffers with several ranks (0.51 and 1.53 GiB
#: on an H200, vLLM 0.26). It lies outside of the utilisation.
ENGINE_CONTEXT_BYTES = int(0.55 * GIB)
NCCL_BYTES = int(1.05 * GIB)
#: Workspaces outside of torch's allocator (0.22 GiB seen).
NON_TORCH_BYTES = int(0.25 * GIB)
#: CUDA graphs of the default sizes: 0.37 GiB with 16 layers, 0.54 with 28, 0.59 with 32. In the budget since 0.27.
GRAPH_BYTES, GRAPH_BYTES_PER_LAYER = int(0.25 * GIB), 10 * MIB


def usable_gpu_bytes(gpu: Mapping[str, Any]) -> int:
    """Memory of a GPU that CUDA shows, in bytes: ``nvidia-smi``'s total less what the driver reserves.

    H200: 143,771 - 616 MiB is exactly torch's total. Drivers before 510 do not tell the reserve; the estimate then is
    256 MiB and 0.4 % (H100 80 GB: 81,559 MiB and 79.1-79.2 GiB; RTX 4090: 24,564 MiB and 23.6 GiB).
    """
    total = int(gpu["memory_mib"]) * MIB
    if gpu.get("memory_reserved_mib") is not None:
        return total - int(gpu["memory_reserved_mib"]) * MIB
    return total - 256 * MIB - total // 250


def engine_context_bytes(ranks: int) -> int:
    """What CUDA and NCCL take on each GPU outside of vLLM's utilisation."""
    return ENGINE_CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)


def graph_bytes(shape: ModelShape) -> int:
    """Memory of the CUDA graphs on each GPU."""
    return GRAPH_BYTES + GRAPH_BYTES_PER_LAYER * shape.layers


def batched_tokens(gpu: Mapping[str, Any] | None) -> int:
    """vLLM's default of ``max_num_batched_tokens`` for an API server on this card (vLLM 0.33,
    ``engine/arg_utils.py``).
    """
    if gpu is None:
        return 2048
    gib = int(gpu["memory_mib"]) / 1024
    if gib >= 160:
        return 16384
    return 8192 if gib >= 70 and "a100" not in str(gpu.get("name", "")).lower() else 2048


def in_flight_tokens(gpu: Mapping[str, Any] | None) -> int:
    """Tokens that are scheduled but not settled: two steps, since scheduling overlaps computing."""
    return 2 * batched_tokens(gpu)


def step_bytes(shape: ModelShape, tokens: int, sequences: int, tensor_parallel_size: int) -> int:
    """Peak of one step's temporary tensors: the widest layer over all ``tokens``, or sampling over the vocabulary.

    ``2 bytes x (3 x intermediate / ranks + 4 x hidden)`` a token: 0.91 GiB for 8,192 tokens of Llama-3-8B, of which
    0.88 were seen eager and 1.10 compiled; a tenth is added for the latter.
    """
    width = 3 * shape.intermediate_size // tensor_parallel_size + 4 * shape.hidden_size
    layers = tokens * width * 2 * 11 // 10
    # float32 logits and one copy (0.24 GiB seen for 256 sequences of Llama-3-8B in steps of 2,048 tokens)
    sampling = min(sequences, tokens) * shape.vocab_size * 8
    return max(layers, sampling)


def lmcache_gpu_bytes(chunk_bytes_per_rank: int) -> int:
    """What one LMCache server takes on one GPU, outside of vLLM's utilisation."""
    return LMCACHE_CONTEXT_BYTES + LMCACHE_STAGED_CHUNKS * chunk_bytes_per_rank + 8 * MIB


def largest_utilization(usable_bytes: int, lmcache_bytes: int, ranks: int) -> float:
    """Highest utilisation, in whole hundredths, that leaves room for CUDA, NCCL and the LMCache server."""
    return math.floor((usable_bytes - engine_context_bytes(ranks) - lmcache_bytes) / usable_bytes * 100) / 100


@dataclass(frozen=True)
class Pool:
    """The KV memory of one rank: bytes, blocks, tokens as vLLM's log counts them, and requests of full length."""

    bytes_per_rank: int
    blocks: int
    tokens: int
    max_concurrency: float
    block_tokens: int


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
    return Pool(max(0, pool_bytes), blocks, int(concurrency * max_model_len), concurrency, block_tokens)


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
    low, high = 0, max(1, math.ceil(limit / block_tokens))
    while low < high:
        middle = (low + high + 1) // 2
        tokens = min(limit, middle * block_tokens)
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
