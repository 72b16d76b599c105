"""What a model's ``config.json`` says about memory: KV bytes per token, weights, parameters.

The page of one attention layer is ``kv_heads_per_rank x tokens x (head_dim_k + head_dim_v) x bytes`` (vLLM 0.32,
``v1/kv_cache_interface.py``); with MLA it is ``tokens x (kv_lora_rank + qk_rope_head_dim) x bytes`` on every rank.
What this module does not know it refuses; it never guesses without saying so (``ModelShape.notes``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from .findings import Finding, refuse
from .modelcheck import check_kinds
from .units import human_bytes

#: Bytes of one number, by the names that configurations and vLLM use.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
}
#: Bytes per layer and token of the packed MLA cache formats (vLLM 0.33, ``v1/kv_cache_interface.py``).
_PACKED_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
#: Values of ``kvfleet_kv_cache_dtype`` whose size is known.
KV_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
)

#: Where multimodal configurations keep the language model, in the order in which they are tried.
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "lm_config", "llm_cfg")

#: Multi-head latent attention: one vector per token and layer, a full copy on every rank
#: (vLLM 0.32, ``transformers_utils/model_arch_config_convertor.py``, ``is_deepseek_mla``).
_MLA_TYPES = frozenset(
    [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_vl_v2",
        "kimi_k2",
        "kimi_linear",
        "longcat_flash",
        "pangu_ultra_moe",
        "glm_moe_dsa",
        "glm4_moe_lite",
        "axk1",
    ]
)
#: MLA models whose sparse attention keeps a second cache, the indexer's: 128 fp8 values and one fp32 scale.
_INDEXER_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
#: Types whose cache layout is known to differ from everything below.
_REFUSED_TYPES: dict[str, str] = {
    "deepseek_v4": "its compressed caches have several page formats",
    "deepseek_v41": "its compressed caches have several page formats",
    "minimax_m1": "its lightning attention keeps states of a size that this planner does not know",
    "mamba": "it has no attention layers and so no KV to keep",
    "mamba2": "it has no attention layers and so no KV to keep",
    "falcon_mamba": "it has no attention layers and so no KV to keep",
    "rwkv": "it has no attention layers and so no KV to keep",
    "bert": "it is an encoder and keeps no KV",
    "roberta": "it is an encoder and keeps no KV",
    "xlm-roberta": "it is an encoder and keeps no KV",
    "modernbert": "it is an encoder and keeps no KV",
    "t5": "encoder-decoder models keep cross-attention KV that depends on the input",
    "whisper": "encoder-decoder models keep cross-attention KV that depends on the input",
    "bart": "encoder-decoder models keep cross-attention KV that depends on the input",
}
#: Plain decoders: every layer is attention with one K and one V per token (some have windows, see below).
_PLAIN_TYPES = frozenset(
    [
        "llama",
        "mistral",
        "mistral3",
        "ministral",
        "ministral3",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n_text",
        "phi",
        "phi3",
        "phimoe",
        "gpt2",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "gpt_oss",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "chatglm",
        "baichuan",
        "internlm2",
        "internlm3",
        "cohere",
        "cohere2",
        "command-r",
        "starcoder2",
        "stablelm",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "granite",
        "granitemoe",
        "dbrx",
        "exaone",
        "exaone4",
        "deepseek",
        "glm",
        "glm4",
        "glm4_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "seed_oss",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama4",
        "llama4_text",
        "nemotron",
        "nemotron-nas",
        "smollm3",
        "arctic",
        "persimmon",
        "minicpm",
        "minimax_m2",
        "apertus",
        "hunyuan",
        "bitnet",
        "dots1",
        "mistral_large",
        "qwen3_omni_moe_text",
        "voxtral",
        "pixtral",
        "arcee",
    ]
)
#: Hybrids with state-space or linear-attention layers.
_SSM_TYPES = frozenset(
    [
        "jamba",
        "bamba",
        "zamba2",
        "falcon_h1",
        "granitemoehybrid",
        "nemotron_h",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "lfm2",
        "lfm2_moe",
        "kimi_linear",
        "plamo2",
        "minimax",
    ]
)

#: What transformers fills in when a multimodal configuration leaves it out (transformers 5.16, ``configuration_*.py``).
_CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}

_FULL, _SLIDING, _CHUNKED, _STATE, _NONE = "full", "sliding", "chunked", "state", "none"
_LAYER_WORDS = {
    "full_attention": _FULL,
    "attention": _FULL,
    "global": _FULL,
    "sliding_attention": _SLIDING,
    "local_attention": _SLIDING,
    "local": _SLIDING,
    "chunked_attention": _CHUNKED,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
    "recurrent": _STATE,
    "moe": _NONE,
    "mlp": _NONE,
}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep KV in the same way.

    ``kind`` is ``full``, ``sliding``, ``chunked`` or ``state`` (no KV per token); ``window_tokens`` bounds what
    sliding and chunked layers keep; ``kv_heads`` and the head sizes are those of the whole model, not of a rank.
    """

    kind: str
    layers: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window_tokens: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """A model as far as memory is concerned; built by :func:`parse_config`."""

    model_type: str
    layers: int
    hidden_size: int
    attention_heads: int
    groups: tuple[LayerGroup, ...]
    mla_dim: int | None
    indexer_bytes_per_layer: int
    dtype: str
    checkpoint_kv_dtype: str | None
    vocab_size: int
    max_position: int | None
    quantization: str | None
    parameters: int | None
    active_parameters: int | None
    weight_bytes_from_shape: int | None
    replicated_parameters: int
    intermediate_size: int
    notes: tuple[Finding, ...] = field(default_factory=tuple)

    @property
    def has_state(self) -> bool:
        """Whether some layers keep a state (SSM, linear attention, convolution) instead of KV."""
        return any(group.kind == _STATE for group in self.groups)

    @property
    def has_chunked(self) -> bool:
        """Whether some layers use chunked local attention (Llama 4)."""
        return any(group.kind == _CHUNKED for group in self.groups)


@dataclass(frozen=True)
class KvSize:
    """KV bytes of one token.

    ``per_token`` and ``per_token_per_rank`` grow with every token in the engine's pool (window layers left out while
    the hybrid manager bounds them); ``stored_per_token`` (``_per_rank``) is what a tier keeps: every attention layer.
    ``element_bytes`` is the size of one number in the cache; ``dtype`` its resolved name.
    """

    per_token: int
    per_token_per_rank: int
    stored_per_token: int
    stored_per_token_per_rank: int
    dtype: str
    element_bytes: float
    replicas: int


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``config`` that describes the language model (multimodal configurations nest it)."""
    while True:
        inner = [config.get(key) for key in _TEXT_KEYS]
        nested = next((part for part in inner if isinstance(part, Mapping) and part), None)
        if nested is None:
            return config
        config = nested


def parse_config(config: Mapping[str, Any], name: str = "the model") -> ModelShape:
    """Read a ``config.json`` (as a mapping) into a :class:`ModelShape`.

    ``name`` is how messages call the model, usually its path. Raises ``KvfleetError`` (KVF-MODEL-0xx) for whatever
    would make a number wrong: missing sizes, unknown layer kinds, layouts that are not plain K and V.
    """
    if not isinstance(config, Mapping) or not config:
        raise refuse(
            "KVF-MODEL-003",
            f"{name}: config.json does not hold a JSON object.",
            "Set model to a directory with the model's own config.json.",
        )
    text = text_config(config)
    for part in (config, text):
        check_kinds(part, name)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    if text is not config and model_type in _CLASS_DEFAULTS:
        text = {**_CLASS_DEFAULTS[model_type], **text}
    _refuse_known_strangers(config, text, model_type, name)

    layers = _integer(text, ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), "the number of layers", name)
    hidden = _integer(text, ("hidden_size", "n_embd", "d_model", "model_dim", "dim"), "the hidden size", name)
    heads = _attention_heads(text, name)
    head_dim = _head_dim(text, hidden, heads, name)
    dtype = _dtype(config, text)
    mla = text.get("kv_lora_rank") and model_type in _MLA_TYPES
    if text.get("kv_lora_rank") and model_type not in _MLA_TYPES and model_type != "minicpm3":
        raise refuse(
            "KVF-MODEL-005",
            f"{name}: model_type {model_type!r} has kv_lora_rank, but whether the engine keeps it as latent attention "
            "is not known here.",
            "Use profile gpu with kvfleet_kv_pool_gib, or report the model so that it can be added.",
        )
    mla_dim = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0) if mla else None
    notes: list[Finding] = []
    if model_type not in _PLAIN_TYPES | _MLA_TYPES | _SSM_TYPES | {"minicpm3"}:
        _refuse_strange_keys(text, model_type, name)
        notes.append(
            Finding(
                "KVF-MODEL-010",
                f"{name}: model_type {model_type or '(none)'!r} is not in the planner's list; its {layers} layers are "
                "counted as ordinary attention.",
                "Compare kv_bytes_per_token with the engine's log line 'KV cache size' after the first start.",
                {"layers": layers},
            )
        )
    groups = _groups(text, model_type, layers, heads, head_dim, name)
    if all(group.kind == _STATE for group in groups):
        raise refuse(
            "KVF-MODEL-005",
            f"{name}: by its config.json no layer of {model_type!r} is attention, so there is no KV to keep.",
            "Use the config.json that belongs to the weights, or serve this model without kvfleet.",
        )
    indexer = 0
    if model_type in _INDEXER_TYPES:
        index_dim = int(text.get("index_head_dim") or 128)
        indexer = index_dim + index_dim // 128 * 4
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    parameters, active, replicated, bits = _parameters(text, model_type, layers, hidden, heads, head_dim, quantization)
    return ModelShape(
        model_type=model_type,
        layers=layers,
        hidden_size=hidden,
        attention_heads=heads,
        groups=groups,
        mla_dim=mla_dim,
        indexer_bytes_per_layer=indexer,
        dtype=dtype,
        checkpoint_kv_dtype=_checkpoint_kv_dtype(quantization),
        vocab_size=int(text.get("vocab_size") or config.get("vocab_size") or 0),
        max_position=_max_position(text),
        quantization=str(quantization.get("quant_method")) if quantization else None,
        parameters=parameters,
        active_parameters=active,
        weight_bytes_from_shape=bits,
        replicated_parameters=replicated,
        intermediate_size=_widest_mlp(text, hidden),
        notes=tuple(notes),
    )


def kv_size(
    shape: ModelShape,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
    hybrid_manager: bool = True,
) -> KvSize:
    """KV bytes of one token of ``shape``, over all ranks and on each.

    ``hybrid_manager`` false counts window layers like full ones, which is what vLLM does when a connector without
    support for it (or a CPU, or chunked local attention) switches the manager off. Tensor parallel sizes above the
    number of KV heads replicate them (``max(1, kv_heads // TP)`` on each rank); MLA is kept whole on every rank and
    its ``per_token`` counts one copy, as a cache stores it. Raises ``KvfleetError`` KVF-MODEL-006 for a
    ``kv_cache_dtype`` of unknown size.
    """
    cache_dtype = resolve_kv_dtype(shape, kv_cache_dtype, dtype)
    if cache_dtype in _PACKED_MLA_BYTES:
        if shape.mla_dim is None:
            raise refuse(
                "KVF-MODEL-006",
                f"kv_cache_dtype {cache_dtype} is a format of latent attention (MLA), which {shape.model_type} does "
                "not use.",
                "Set kvfleet_kv_cache_dtype to auto or fp8.",
            )
        element = 0.0
    else:
        element = DTYPE_BYTES[cache_dtype]
    growing = whole = growing_rank = whole_rank = 0
    replicas = 1
    for group in shape.groups:
        if group.kind == _STATE:
            continue
        if shape.mla_dim is not None:
            layer = _PACKED_MLA_BYTES.get(cache_dtype) or int(shape.mla_dim * element)
            size = size_rank = group.layers * (layer + shape.indexer_bytes_per_layer)
            replicas = tensor_parallel_size
        else:
            heads_rank = max(1, group.kv_heads // tensor_parallel_size)
            per_head = int((group.head_dim_k + group.head_dim_v) * element)
            size_rank = group.layers * heads_rank * per_head
            size = size_rank * tensor_parallel_size
            replicas = max(replicas, heads_rank * tensor_parallel_size // group.kv_heads)
        whole += size
        whole_rank += size_rank
        if group.kind == _FULL or not hybrid_manager:
            growing += size
            growing_rank += size_rank
    return KvSize(growing, growing_rank, whole, whole_rank, cache_dtype, element, replicas)


def window_tokens_bound(group: LayerGroup, in_flight_tokens: int, max_model_len: int, block_size: int) -> int:
    """Blocks that one request holds at most in a window group (vLLM 0.32, ``max_admission_blocks_per_request``)."""
    window = group.window_tokens or 0
    if group.kind == _SLIDING:
        return math.ceil(min(window - 1 + in_flight_tokens, max_model_len) / block_size) + 1
    return math.ceil(min(window + in_flight_tokens, max_model_len) / block_size)


def resolve_kv_dtype(shape: ModelShape, kv_cache_dtype: str = "auto", dtype: str = "auto") -> str:
    """Name of the number format in the KV cache: the setting, else the checkpoint's own scheme, else the model's
    dtype.
    """
    if kv_cache_dtype != "auto":
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise refuse(
                "KVF-MODEL-006",
                f"kv_cache_dtype {kv_cache_dtype!r} has no known size.",
                f"Set kvfleet_kv_cache_dtype to one of {', '.join(KV_CACHE_DTYPES)}.",
            )
        return kv_cache_dtype
    if shape.checkpoint_kv_dtype:
        return shape.checkpoint_kv_dtype
    return resolve_dtype(shape, dtype)


def resolve_dtype(shape: ModelShape, dtype: str = "auto") -> str:
    """Number format of the activations: the setting, else the checkpoint's; vLLM runs 32-bit checkpoints in 16 bits."""
    if dtype != "auto":
        if DTYPE_BYTES.get(dtype) not in (2, 4):
            raise refuse(
                "KVF-MODEL-006",
                f"dtype {dtype!r} has no known size.",
                "Set kvfleet_dtype to auto, bfloat16, float16 or float32.",
            )
        return dtype
    return "bfloat16" if shape.dtype in ("float32", "float") else shape.dtype


def loaded_weight_bytes(shape: ModelShape, file_bytes: int, dtype: str = "auto") -> int:
    """Bytes of the weights in memory: files hold them in their own format, the engine converts to its ``dtype``.

    ``file_bytes`` 0 means that only ``config.json`` is known. Quantised weights stay as they are. 0 when nothing is
    known.
    """
    size = file_bytes or shape.weight_bytes_from_shape or 0
    if not size or not shape.parameters or shape.quantization:
        return size
    stored = size / shape.parameters
    # a checkpoint in 16 or 32 bits; towers of multimodal models shift the quotient a little
    if not 1.5 <= stored <= 5:
        return size
    return int(size * DTYPE_BYTES[resolve_dtype(shape, dtype)] / (4 if stored > 3 else 2))


def weights_per_rank(shape: ModelShape, weight_bytes: int, tensor_parallel_size: int) -> int:
    """Bytes of weights on one rank: everything divides but the replicated part (latent projections, extra KV heads)."""
    if tensor_parallel_size == 1:
        return weight_bytes
    share = 0.0
    if shape.parameters:
        share = min(1.0, shape.replicated_parameters / shape.parameters)
    replicated = weight_bytes * share
    extra = 0.0
    kv_heads = min((group.kv_heads for group in shape.groups if group.kv_heads), default=0)
    if shape.parameters and shape.mla_dim is None and 0 < kv_heads < tensor_parallel_size:
        group = shape.groups[0]
        kv_parameters = sum(
            g.layers * g.kv_heads * (g.head_dim_k + g.head_dim_v) * shape.hidden_size
            for g in shape.groups
            if g.kind != _STATE
        )
        copies = tensor_parallel_size / max(1, group.kv_heads) - 1
        extra = weight_bytes * kv_parameters / shape.parameters * copies / tensor_parallel_size
    return math.ceil((weight_bytes - replicated) / tensor_parallel_size + replicated + extra)


def check_tensor_parallel(shape: ModelShape, tensor_parallel_size: int, name: str) -> None:
    """Refuse a tensor parallel size that does not divide the heads (vLLM stops at start with the same rule)."""
    if shape.attention_heads % tensor_parallel_size:
        divisors = [n for n in (1, 2, 4, 8, 16) if shape.attention_heads % n == 0]
        raise refuse(
            "KVF-MODEL-007",
            f"Instance {name}: tensor parallel size {tensor_parallel_size} does not divide the model's "
            f"{shape.attention_heads} attention heads.",
            f"Set tensor_parallel_size (or the number of gpus) to one of {', '.join(map(str, divisors))}.",
            attention_heads=shape.attention_heads,
            tensor_parallel_size=tensor_parallel_size,
        )
    for group in shape.groups:
        if (
            shape.mla_dim is None
            and group.kv_heads
            and group.kv_heads % tensor_parallel_size
            and tensor_parallel_size % group.kv_heads
        ):
            raise refuse(
                "KVF-MODEL-007",
                f"Instance {name}: tensor parallel size {tensor_parallel_size} neither divides the model's "
                f"{group.kv_heads} "
                "KV heads nor is a multiple of them.",
                "Set tensor_parallel_size to a divisor or a multiple of the number of KV heads.",
                kv_heads=group.kv_heads,
                tensor_parallel_size=tensor_parallel_size,
            )


def read_model(
    path: str,
    read_text: Callable[[str], str | None],
    list_sizes: Callable[[str], dict[str, int] | None],
) -> dict[str, Any]:
    """Read what the planner needs of the model at ``path`` through the two given functions.

    ``read_text(path)`` returns a file's text or ``None``; ``list_sizes(directory)`` returns ``{file name: bytes}`` or
    ``None`` when it is no directory. Returns ``{"config", "weight_bytes", "weight_source", "digest"}``; weights are 0
    with source ``shape`` when there are no weight files. Raises KVF-MODEL-001 (no such directory), -002 (no
    ``config.json``), -003 (not JSON), -020 (weights that are not all there).
    """
    files = list_sizes(path)
    config_path = path
    if files is not None:
        config_path = f"{path.rstrip('/')}/config.json"
        if "config.json" not in files:
            raise refuse(
                "KVF-MODEL-002",
                f"{path} has no config.json, so it is not a model directory.",
                "Set model (in kvfleet_instances, or kvfleet_model) to the directory that holds config.json and the "
                "weights.",
            )
    text = read_text(config_path)
    if text is None:
        raise refuse(
            "KVF-MODEL-001",
            f"The model {path} does not exist or cannot be read.",
            "Set model (in kvfleet_instances, or kvfleet_model) to a model directory on the host.",
        )
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(
            "KVF-MODEL-003",
            f"{config_path} is not valid JSON ({error}).",
            "Copy the model's config.json again.",
        ) from error
    weight_bytes, source = 0, "shape"
    if files is not None:
        index = (
            read_text(f"{path.rstrip('/')}/model.safetensors.index.json")
            if "model.safetensors.index.json" in files
            else None
        )
        if index is not None:
            check_weight_files(path, files, index)
        weight_bytes, source = weight_files_bytes(files, index)
    return {
        "config": config,
        "weight_bytes": weight_bytes,
        "weight_source": source,
        "digest": model_digest(config, files or {}),
    }


def weight_files_bytes(files: Mapping[str, int], index_text: str | None = None) -> tuple[int, str]:
    """Bytes of a model's weights and where the figure comes from (``index``, ``files`` or ``shape`` = none found)."""
    if index_text:
        try:
            total = int(json.loads(index_text)["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError, OverflowError):
            total = 0
        if total > 0:
            return total, "index"
    for endings in ((".safetensors",), (".bin", ".pt", ".pth")):
        total = sum(
            size
            for name, size in files.items()
            if name.endswith(endings)
            and not name.startswith(("training_args", "optimizer", "scheduler", "consolidated"))
        )
        if total:
            return total, "files"
    return 0, "shape"


def check_weight_files(path: str, files: Mapping[str, int], index_text: str) -> None:
    """Refuse (KVF-MODEL-020) an index that is none, or whose files are there in part: the engine would fail with them.

    No file of the index at all is fine: sizes can be planned from ``config.json`` and the index alone.
    """
    fix = "Copy the model again (git lfs pull, if it was cloned); compare with model.safetensors.index.json."
    try:
        index = json.loads(index_text)
        shards = set(index["weight_map"].values())
        missing = sorted(shard for shard in shards if shard not in files)
        present = sum(files[shard] for shard in shards if shard in files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise refuse(
            "KVF-MODEL-020", f"{path}/model.safetensors.index.json is no index of weight files.", fix
        ) from None
    if missing and len(missing) < len(shards):
        raise refuse(
            "KVF-MODEL-020",
            f"{path} lacks {len(missing)} of its {len(shards)} weight files ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}).",
            fix,
            missing=missing,
        )
    total, _ = weight_files_bytes({}, index_text)
    # some indexes count weights twice that the files hold once; pointer files and cut-off copies are far below
    if not missing and present < total // 2:
        raise refuse(
            "KVF-MODEL-020",
            f"The weight files of {path} have {human_bytes(present)}, its index says {human_bytes(total)}.",
            fix,
            present_bytes=present,
            total_bytes=total,
        )


def model_digest(config: Mapping[str, Any], files: Mapping[str, int]) -> str:
    """16 hex digits over the configuration and the sizes of the weight files: changes when the weights are
    exchanged.
    """
    weights = sorted(
        (name, size) for name, size in files.items() if name.endswith((".safetensors", ".bin", ".pt", ".pth"))
    )
    text = json.dumps([config, weights], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- reading the configuration ------------------------------------------------------------------------------------


def _refuse_known_strangers(config: Mapping[str, Any], text: Mapping[str, Any], model_type: str, name: str) -> None:
    reason = _REFUSED_TYPES.get(model_type)
    if reason is None and (config.get("is_encoder_decoder") or text.get("is_encoder_decoder")):
        reason = _REFUSED_TYPES["t5"]
    if reason is None and text.get("compress_ratios"):
        reason = _REFUSED_TYPES["deepseek_v4"]
    if reason is not None:
        raise refuse(
            "KVF-MODEL-005",
            f"{name}: KV sizes of model_type {model_type!r} are not known here: {reason}.",
            "Choose another model, or serve this one without kvfleet.",
        )


_STRANGE_KEYS = (
    "ssm_cfg",
    "mamba_d_state",
    "ssm_state_size",
    "linear_num_value_heads",
    "attn_type_list",
    "hybrid_override_pattern",
    "block_configs",
    "compress_ratios",
    "linear_attn_config",
    "kv_lora_rank",
    "cross_attention_layers",
    "num_kv_shared_layers",
)


def _refuse_strange_keys(text: Mapping[str, Any], model_type: str, name: str) -> None:
    strange = [key for key in _STRANGE_KEYS if text.get(key)]
    if strange:
        raise refuse(
            "KVF-MODEL-005",
            f"{name}: model_type {model_type!r} is not known here and its config.json has {', '.join(strange)}, which "
            "changes what the KV cache holds.",
            "Choose another model, or report this one so that it can be added.",
        )


def _integer(text: Mapping[str, Any], names: Sequence[str], what: str, model: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, bool):
            continue
        if isinstance(value, int) and value > 0:
            return value
    raise refuse(
        "KVF-MODEL-004",
        f"{model}: config.json does not say {what} (none of {', '.join(names)}).",
        "Use the config.json that belongs to the weights.",
    )


def _attention_heads(text: Mapping[str, Any], name: str) -> int:
    value = text.get("num_attention_heads")
    if isinstance(value, list):  # OpenELM and relatives: one number a layer
        raise refuse(
            "KVF-MODEL-005",
            f"{name}: the number of attention heads differs from layer to layer, which is not supported here.",
            "Choose another model, or serve this one without kvfleet.",
        )
    return _integer(
        text, ("num_attention_heads", "n_head", "n_heads", "num_heads"), "the number of attention heads", name
    )


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int, name: str) -> int:
    for key in ("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head"):
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if hidden % heads and not text.get("kv_lora_rank"):
        raise refuse(
            "KVF-MODEL-004",
            f"{name}: config.json has no head_dim, and the hidden size {hidden} is no multiple of its {heads} heads.",
            "Use the config.json that belongs to the weights.",
        )
    return hidden // heads


def _kv_heads(text: Mapping[str, Any], model_type: str, heads: int) -> int:
    """Number of KV heads; missing means one for every attention head (vLLM's rule), with the exceptions it knows."""
    nested = text.get("attn_config")
    attention: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    if model_type == "falcon" and not text.get("new_decoder_architecture"):
        return 1 if text.get("multi_query", True) else heads
    if model_type == "gpt_bigcode":
        return 1 if text.get("multi_query", True) else heads
    if model_type == "mpt":
        return int(attention.get("kv_n_heads") or heads)
    if model_type == "dbrx":
        return int(attention.get("kv_n_heads") or heads)
    if model_type == "chatglm" and not text.get("multi_query_attention", True):
        return heads
    for key in ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"):
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return heads


def _layer_kinds(text: Mapping[str, Any], model_type: str, layers: int, name: str) -> list[str]:
    """The kind of each layer, first to last."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list) and listed:
        kinds = []
        for word in listed[:layers]:
            if word not in _LAYER_WORDS:
                raise refuse(
                    "KVF-MODEL-005",
                    f"{name}: config.json lists layers of type {word!r}, which is not known here.",
                    "Choose another model, or report this one so that it can be added.",
                )
            kinds.append(_LAYER_WORDS[word])
        if len(kinds) != layers:
            raise refuse(
                "KVF-MODEL-004",
                f"{name}: config.json lists {len(kinds)} layer types for {layers} layers.",
                "Use the config.json that belongs to the weights.",
            )
        # Mistral-style checkpoints write the list but no window
        if _SLIDING in kinds and not text.get("sliding_window"):
            kinds = [_FULL if kind == _SLIDING else kind for kind in kinds]
        if _CHUNKED in kinds and not text.get("attention_chunk_size"):
            kinds = [_FULL if kind == _CHUNKED else kind for kind in kinds]
        return kinds
    window = text.get("sliding_window") or 0
    if model_type in _SSM_TYPES:
        return _hybrid_kinds(text, model_type, layers, name)
    if model_type in ("llama4", "llama4_text"):
        flags = text.get("no_rope_layers") or []
        step = int(text.get("no_rope_layer_interval") or 4)
        if not flags:
            flags = [int((index + 1) % step != 0) for index in range(layers)]
        return [_CHUNKED if flag and text.get("attention_chunk_size", 8192) else _FULL for flag in flags]
    if model_type in ("gemma2", "gpt_oss"):
        return [_SLIDING if index % 2 == 0 and window else _FULL for index in range(layers)]
    if model_type in ("gemma3", "gemma3_text", "cohere2", "olmo3", "exaone4", "gemma3n_text"):
        default = {"gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5}.get(model_type, 4)
        pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or default
        window = window or {"gemma3": 4096, "gemma3_text": 4096, "gemma3n_text": 512}.get(model_type, 0)
        if isinstance(pattern, str):  # EXAONE 4 writes "LLLG"
            return [
                _FULL if pattern[index % len(pattern)] == "G" or not window else _SLIDING for index in range(layers)
            ]
        return [_SLIDING if window and (index + 1) % int(pattern) else _FULL for index in range(layers)]
    if not window:
        return [_FULL] * layers
    if "use_sliding_window" in text:  # Qwen: the window exists but is off, or starts at a layer
        if not text["use_sliding_window"]:
            return [_FULL] * layers
        first = int(text.get("max_window_layers") or 0)
        return [_SLIDING if index >= first else _FULL for index in range(layers)]
    longest = text.get("max_position_embeddings") or 0
    if longest and int(window) >= int(longest):
        return [_FULL] * layers
    return [_SLIDING] * layers


def _hybrid_kinds(text: Mapping[str, Any], model_type: str, layers: int, name: str) -> list[str]:
    if model_type == "jamba":
        period, offset = int(text.get("attn_layer_period") or 8), int(text.get("attn_layer_offset") or 4)
        return [_FULL if index % period == offset else _STATE for index in range(layers)]
    if model_type == "nemotron_h":
        pattern = str(text.get("hybrid_override_pattern") or "")
        words = {"*": _FULL, "M": _STATE, "-": _NONE, "E": _NONE}
        if len(pattern) == layers and set(pattern) <= set(words):
            return [words[letter] for letter in pattern]
    if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        step = int(text.get("full_attention_interval") or 4)
        return [_FULL if (index + 1) % step == 0 else _STATE for index in range(layers)]
    if model_type == "bamba" and isinstance(text.get("attn_layer_indices"), list):
        return [_FULL if index in text["attn_layer_indices"] else _STATE for index in range(layers)]
    if model_type == "falcon_h1":
        return [_FULL] * layers + [_STATE] * layers
    if model_type == "kimi_linear":
        linear = text.get("linear_attn_config") or {}
        if linear.get("full_attn_layers"):
            return [_FULL if index + 1 in linear["full_attn_layers"] else _STATE for index in range(layers)]
    if model_type in ("lfm2", "lfm2_moe") and isinstance(text.get("full_attn_idxs"), list):
        return [_FULL if index in text["full_attn_idxs"] else _STATE for index in range(layers)]
    if model_type == "zamba2" and isinstance(text.get("hybrid_layer_ids"), list):
        return [_STATE] * layers + [_FULL] * len(text["hybrid_layer_ids"])
    if model_type == "minimax" and isinstance(text.get("attn_type_list"), list):
        return [_FULL if kind else _STATE for kind in text["attn_type_list"]]
    raise refuse(
        "KVF-MODEL-005",
        f"{name}: config.json of the hybrid {model_type!r} does not say which layers are attention.",
        "Use the config.json that belongs to the weights.",
    )


def _groups(
    text: Mapping[str, Any], model_type: str, layers: int, heads: int, head_dim: int, name: str
) -> tuple[LayerGroup, ...]:
    if model_type == "nemotron-nas" or text.get("block_configs"):
        return _block_groups(text, heads, head_dim, name)
    kv_heads = _kv_heads(text, model_type, heads)
    kinds = _layer_kinds(text, model_type, layers, name)
    shared = int(text.get("num_kv_shared_layers") or 0)
    if shared and model_type == "gemma3n_text":
        kinds = kinds[: layers - shared]  # the last layers read the KV of earlier ones
    if model_type == "zamba2":
        head_dim = 2 * head_dim if not text.get("attention_head_dim") else head_dim
    head_dim_v = head_dim
    if model_type == "minicpm3":
        # vLLM keeps full heads: nope + rope for K, and V padded to the same size
        head_dim = head_dim_v = int(text.get("qk_nope_head_dim") or 0) + int(text.get("qk_rope_head_dim") or 0)
    if isinstance(text.get("v_head_dim"), int) and model_type not in _MLA_TYPES and model_type != "minicpm3":
        head_dim_v = int(text["v_head_dim"])
    order: list[str] = []
    for kind in kinds:
        if kind not in order and kind != _NONE:
            order.append(kind)
    windows = {
        _SLIDING: int(
            text.get("sliding_window") or {"gemma3_text": 4096, "gemma3": 4096, "gemma3n_text": 512}.get(model_type, 0)
        ),
        _CHUNKED: int(text.get("attention_chunk_size") or 8192),
    }
    return tuple(
        LayerGroup(
            kind,
            kinds.count(kind),
            0 if kind == _STATE else kv_heads,
            0 if kind == _STATE else head_dim,
            0 if kind == _STATE else head_dim_v,
            windows.get(kind),
        )
        for kind in order
    )


def _block_groups(text: Mapping[str, Any], heads: int, head_dim: int, name: str) -> tuple[LayerGroup, ...]:
    """Nemotron-NAS: every layer has its own number of KV heads, or no attention at all."""
    counts: dict[int, int] = {}
    for block in text.get("block_configs") or []:
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise refuse(
                "KVF-MODEL-005",
                f"{name}: block_configs has blocks that this planner cannot read.",
                "Choose another model, or report this one so that it can be added.",
            )
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        kv_heads = heads // int(attention["n_heads_in_group"])
        counts[kv_heads] = counts.get(kv_heads, 0) + 1
    if not counts:
        raise refuse(
            "KVF-MODEL-005",
            f"{name}: block_configs has no attention layer.",
            "Use the config.json that belongs to the weights.",
        )
    return tuple(LayerGroup(_FULL, count, kv, head_dim, head_dim) for kv, count in sorted(counts.items()))


def _widest_mlp(text: Mapping[str, Any], hidden: int) -> int:
    """Width of the widest layer's MLP; some configurations (Gemma 3n) list one a layer."""
    width = text.get("intermediate_size") or text.get("ffn_hidden_size") or text.get("n_inner") or 4 * hidden
    return max(int(item) for item in width) if isinstance(width, list) else int(width)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for source in (text, config):
        value = source.get("torch_dtype") or source.get("dtype")
        if isinstance(value, str) and value.replace("torch.", "") in DTYPE_BYTES:
            return value.replace("torch.", "")
    # transformers' own default for a configuration that names none; vLLM then runs it in 16 bits
    return "float32"


def _max_position(text: Mapping[str, Any]) -> int | None:
    """Longest request that vLLM derives from the configuration, position scaling included."""
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
    )
    found = [text[name] for name in names if isinstance(text.get(name), int) and not isinstance(text[name], bool)]
    longest = next((int(value) for value in found if value > 0), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if longest is None or not isinstance(scaling, Mapping):
        return longest
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind in (None, "default", "su", "longrope", "llama3", "mrope") or not isinstance(factor, (int, float)):
        return longest
    if kind == "yarn":
        longest = int(scaling.get("original_max_position_embeddings") or longest)
    return int(longest * factor)


def _checkpoint_kv_dtype(quantization: Mapping[str, Any]) -> str | None:
    """The KV format that the checkpoint asks for (vLLM 0.32, ``get_kv_cache_quant_algo_string``), if any."""
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8:
        return "fp8"
    algorithm = quantization.get("kv_cache_quant_algo")
    if isinstance(algorithm, str) and algorithm.upper() == "FP8":
        return "fp8"
    return None


# --- parameters ----------------------------------------------------------------------------------------------------


def _parameters(
    text: Mapping[str, Any],
    model_type: str,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    quantization: Mapping[str, Any],
) -> tuple[int | None, int | None, int, int | None]:
    """Count parameters: (all, those that one token uses, those that every rank keeps, bytes of the weights).

    ``(None, None, 0, None)`` when the configuration does not allow it. Norms, biases and routers are counted where
    they matter to a per mille; encoders of multimodal models are not counted.
    """
    vocab = int(text.get("vocab_size") or 0)
    if model_type in _SSM_TYPES or not vocab or text.get("block_configs"):
        return None, None, 0, None
    kv_heads = _kv_heads(text, model_type, heads)
    intermediate = (
        text.get("intermediate_size") or text.get("ffn_hidden_size") or text.get("n_inner") or text.get("ffn_dim")
    )
    if isinstance(intermediate, list):
        intermediate = intermediate[0]
    intermediate = int(intermediate or 4 * hidden)
    if model_type == "llama4_text" and text.get("intermediate_size_mlp"):
        dense_intermediate = int(text["intermediate_size_mlp"])
    else:
        dense_intermediate = intermediate
    gated = model_type not in (
        "gpt2",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "starcoder2",
        "nemotron",
        "persimmon",
    )
    matrices = 3 if gated else 2
    replicated = 0
    if text.get("kv_lora_rank"):
        q_rank = int(text.get("q_lora_rank") or 0)
        kv_rank = int(text["kv_lora_rank"])
        rope, nope, value = (int(text.get(key) or 0) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
        attention = query + hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
        replicated = layers * (hidden * q_rank + hidden * (kv_rank + rope))
    else:
        attention = hidden * heads * head_dim * 2 + 2 * hidden * kv_heads * head_dim
    experts = int(
        text.get("num_local_experts")
        or text.get("num_experts")
        or text.get("n_routed_experts")
        or text.get("moe_num_experts")
        or 0
    )
    if model_type == "dbrx" and isinstance(text.get("ffn_config"), Mapping):
        experts = int(text["ffn_config"].get("moe_num_experts") or 0)
        intermediate = int(text["ffn_config"].get("ffn_hidden_size") or intermediate)
    used = int(
        text.get("num_experts_per_tok")
        or text.get("moe_topk")
        or text.get("moe_k")
        or text.get("experts_per_token")
        or 0
    )
    if model_type == "dbrx" and isinstance(text.get("ffn_config"), Mapping):
        used = int(text["ffn_config"].get("moe_top_k") or 0)
    moe_layers = 0
    expert_parameters = shared_parameters = 0
    if experts > 1:
        width = int(text.get("moe_intermediate_size") or intermediate)
        moe_layers = layers - _dense_layers(text, model_type, layers)
        expert_parameters = 3 * hidden * width
        shared = int(text.get("n_shared_experts") or text.get("num_shared_experts") or 0)
        shared_width = int(text.get("shared_expert_intermediate_size") or 0)
        if model_type == "llama4_text":
            shared, shared_width = 1, width
        shared_parameters = 3 * hidden * (shared_width if shared_width else shared * width)
        shared_parameters += hidden * experts
    dense = (layers - moe_layers) * matrices * hidden * dense_intermediate
    tied = text.get("tie_word_embeddings")
    if tied is None:
        tied = model_type.startswith("gemma") or model_type in (
            "gpt2",
            "bloom",
            "cohere",
            "cohere2",
            "falcon",
            "opt",
            "mpt",
            "gpt_bigcode",
        )
    embeddings = vocab * hidden * (1 if tied else 2)
    norms = 2 * layers * hidden + hidden
    everything = (
        layers * attention + dense + moe_layers * (experts * expert_parameters + shared_parameters) + embeddings + norms
    )
    active = layers * attention + dense + moe_layers * (used * expert_parameters + shared_parameters) + vocab * hidden
    return (
        everything,
        active,
        replicated,
        _weight_bytes(text, everything, embeddings + norms, quantization, moe_layers * experts * expert_parameters),
    )


def _dense_layers(text: Mapping[str, Any], model_type: str, layers: int) -> int:
    """Layers of a mixture-of-experts model that have an ordinary MLP."""
    first = int(text.get("first_k_dense_replace") or text.get("moe_layer_start_index") or 0)
    if model_type == "llama4_text":
        step = int(text.get("interleave_moe_layer_step") or 1)
        listed = text.get("moe_layers")
        return layers - (len(listed) if isinstance(listed, list) else layers // step)
    if text.get("mlp_only_layers"):
        first = len(text["mlp_only_layers"])
    step = (
        int(text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1)
        if not isinstance(text.get("moe_layer_freq"), list)
        else 1
    )
    if step > 1:
        return layers - layers // step
    return first


def _weight_bytes(
    text: Mapping[str, Any], parameters: int, unquantized: int, quantization: Mapping[str, Any], expert_parameters: int
) -> int | None:
    """Bytes of ``parameters`` weights; ``None`` when the quantisation is not understood (then files are needed)."""
    dtype = _dtype(text, text)
    plain = 2 if dtype == "float32" else int(DTYPE_BYTES[dtype])
    if not quantization:
        return parameters * plain
    method = str(quantization.get("quant_method") or "")
    bits: float | None = None
    overhead = 0.0
    if method in ("awq", "gptq"):
        bits = float(quantization.get("bits") or quantization.get("w_bit") or 4)
        group = int(quantization.get("group_size") or quantization.get("q_group_size") or 128)
        overhead = (16 + bits) / group if group > 0 else 0.0  # scale and zero point of each group
    elif method == "fp8":
        bits = 8
    elif method == "mxfp4":
        # only the experts are packed: 4 bits and one 8-bit scale for 32 values
        return int((parameters - expert_parameters) * plain + expert_parameters * 4.25 / 8)
    elif method == "compressed-tensors":
        found: list[Any] = [
            (group.get("weights") or {}).get("num_bits")
            for group in (quantization.get("config_groups") or {}).values()
            if isinstance(group, Mapping)
        ]
        if found and all(isinstance(value, int) for value in found):
            bits = float(max(found))
            overhead = 16 / 128 if bits <= 4 else 0.0
    if bits is None:
        return None
    return int(unquantized * 2 + (parameters - unquantized) * (bits + overhead) / 8)
