"""Does a ``config.json`` hold the kinds of values that the planner reads? Checked before a number is taken from it.

A size that is written as text would otherwise be passed over, and the plan would be one of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .findings import refuse

_Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _size(value: Any) -> bool:
    return _count(value) and value > 0


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(_count(item) or isinstance(item, bool) for item in value)


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


#: words of a kind -> (its check, the keys that have it)
_KINDS: Mapping[str, tuple[_Check, tuple[str, ...]]] = {
    "a whole number above 0": (
        _size,
        (
            "num_hidden_layers", "n_layer", "num_layers", "n_layers", "hidden_size", "n_embd", "d_model", "model_dim",
            "dim", "n_head", "n_heads", "num_heads", "head_dim", "kv_channels", "attention_head_dim",
            "hidden_size_per_head", "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num",
            "num_attention_groups", "vocab_size", "kv_n_heads", "n_heads_in_group", "decoder_sparse_step",
            "interleave_moe_layer_step", "attn_layer_period", "full_attention_interval", "no_rope_layer_interval",
        ),
    ),
    "a whole number": (
        _count,
        (
            "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim",
            "sliding_window", "attention_chunk_size", "max_window_layers", "num_kv_shared_layers", "attn_layer_offset",
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
            "model_max_length", "original_max_position_embeddings", "num_local_experts", "num_experts",
            "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_topk", "moe_k", "experts_per_token",
            "moe_top_k", "moe_intermediate_size", "n_shared_experts", "num_shared_experts",
            "shared_expert_intermediate_size", "first_k_dense_replace", "moe_layer_start_index",
            "intermediate_size_mlp", "ffn_hidden_size", "n_inner", "ffn_dim",
        ),
    ),
    "a whole number above 0, or a list of them": (
        lambda value: _size(value) or (_counts(value) and bool(value) and all(value)),
        ("intermediate_size", "num_attention_heads"),
    ),
    "a whole number, or a list of them": (lambda value: _count(value) or _counts(value), ("moe_layer_freq",)),
    "a whole number above 0, or a text of letters": (
        lambda value: _size(value) or (isinstance(value, str) and value.isalpha()),
        ("sliding_window_pattern", "_sliding_window_pattern"),
    ),
    "a list of whole numbers": (
        _counts,
        ("no_rope_layers", "mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "full_attn_layers",
         "hybrid_layer_ids", "attn_type_list", "cross_attention_layers"),
    ),
    "a list of texts": (_texts, ("architectures", "layer_types", "layers_block_type")),
    "a list": (lambda value: isinstance(value, list), ("block_configs",)),
    "an object": (
        _mapping,
        ("quantization_config", "rope_scaling", "rope_parameters", "attn_config", "ffn_config", "linear_attn_config",
         "kv_cache_scheme", "config_groups", "weights", "attention"),
    ),
    "a number": (_number, ("factor", "bits", "w_bit", "group_size", "q_group_size", "num_bits")),
    "text": (
        lambda value: isinstance(value, str),
        ("model_type", "quant_method", "hybrid_override_pattern", "torch_dtype", "rope_type", "kv_cache_quant_algo"),
    ),
}  # fmt: skip
_BY_KEY = {key: (words, check) for words, (check, keys) in _KINDS.items() for key in keys}
#: Objects inside a configuration that are read too, beside each of `config_groups`.
_INSIDE = frozenset(
    ["quantization_config", "config_groups", "weights", "kv_cache_scheme", "rope_scaling", "rope_parameters",
     "attn_config", "ffn_config", "linear_attn_config"]
)  # fmt: skip


def check_kinds(config: Mapping[str, Any], name: str) -> None:
    """Refuse (KVF-MODEL-004) a configuration in which a value that the planner reads has a wrong kind; null is none.

    ``config`` is the part that describes the language model; ``name`` is how messages call the model.
    """
    _check(config, name, "")


def _check(part: Mapping[str, Any], name: str, prefix: str) -> None:
    for key, value in part.items():
        if value is None:
            continue
        if key in _BY_KEY:
            words, check = _BY_KEY[key]
            if not check(value):
                shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
                raise refuse(
                    "KVF-MODEL-004",
                    f"{name}: {prefix}{key} in config.json is {shown}, not {words}.",
                    "Use the config.json that belongs to the weights.",
                    key=f"{prefix}{key}",
                )
        if isinstance(value, Mapping) and (key in _INSIDE or prefix.endswith("config_groups.")):
            _check(value, name, f"{prefix}{key}.")
