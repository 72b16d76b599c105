"""config.json with values of a wrong kind: one sentence that names the key, never a traceback, never another size."""

import copy
import json

import pytest
from planner_hosts import LLAMA_8B

from kvfleet.core import models
from kvfleet.core.findings import KvfleetError
from kvfleet.core.models import kv_size, loaded_weight_bytes, parse_config, weights_per_rank

BAD = [None, "x", "8", -1, 0, 10**30, 1.5, [], {}, True, [None], [1], {"a": 1}, float("inf")]
#: Every key that some family reads, with a value of its kind.
MANY = {
    **LLAMA_8B,
    "head_dim": 128, "sliding_window": 4096, "attention_chunk_size": 8192, "no_rope_layers": [1, 0],
    "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8192},
    "quantization_config": {
        "quant_method": "compressed-tensors", "bits": 4, "group_size": 128,
        "kv_cache_scheme": {"type": "float", "num_bits": 8}, "config_groups": {"g": {"weights": {"num_bits": 4}}},
    },
    "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 100, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [1],
    "interleave_moe_layer_step": 1, "moe_layers": [1], "intermediate_size_mlp": 100, "architectures": ["X"],
    "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 6, "num_kv_shared_layers": 0,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_head_dim": 128,
    "attn_config": {"kv_n_heads": 8}, "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 100},
    "hybrid_override_pattern": "M*", "attn_layer_indices": [1], "full_attn_idxs": [1], "hybrid_layer_ids": [1],
    "linear_attn_config": {"full_attn_layers": [1]}, "attn_layer_period": 8, "attn_layer_offset": 4,
    "attn_type_list": [1], "full_attention_interval": 4,
}  # fmt: skip
#: One of every way in which the layers or parameters are read.
TYPES = (
    "llama", "qwen2", "gemma2", "gemma3_text", "gemma3n_text", "llama4_text", "gpt_oss", "mpt", "dbrx", "falcon",
    "chatglm", "minicpm3", "deepseek_v3", "deepseek_v32", "jamba", "nemotron_h", "qwen3_next", "bamba", "kimi_linear",
    "lfm2", "zamba2", "minimax", "unheard_of",
)  # fmt: skip


def places(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("model_type", TYPES)
def test_no_value_ends_in_a_traceback(model_type):
    mla = {"kv_lora_rank": 512} if model_type.startswith("deepseek") else {}
    base = {**MANY, "model_type": model_type, **mla}
    for path in places(base):
        for value in BAD:
            config = copy.deepcopy(base)
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            try:
                shape = parse_config(config, "/m")
            except KvfleetError:
                continue
            assert kv_size(shape, 2).stored_per_token > 0
            assert weights_per_rank(shape, loaded_weight_bytes(shape, 0), 2) >= 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", "8"),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", [8] * 32),
        ("num_key_value_heads", True),
        ("head_dim", "128"),
        ("head_dim", -128),
        ("num_hidden_layers", 32.5),
        ("max_position_embeddings", "131072"),
        ("sliding_window", -1),
        ("vocab_size", "128256"),
        ("quantization_config", "awq"),
        ("rope_scaling", [4]),
        ("architectures", "LlamaForCausalLM"),
        ("intermediate_size", []),
    ],
)
def test_a_size_of_a_wrong_kind_is_named_and_not_passed_over(key, value):
    with pytest.raises(KvfleetError) as refused:
        parse_config({**LLAMA_8B, key: value}, "/m")
    (finding,) = refused.value.findings
    assert finding.code == "KVF-MODEL-004"
    assert f"{key} in config.json is " in finding.message


def test_null_is_a_missing_value():
    plain = parse_config(LLAMA_8B)
    nulls = dict.fromkeys(("sliding_window", "rope_scaling", "quantization_config", "head_dim", "layer_types"))
    assert parse_config({**LLAMA_8B, **nulls}) == plain


def test_the_widest_of_listed_mlps_counts_for_a_step():
    assert parse_config({**LLAMA_8B, "intermediate_size": [8192, 16384, 8192]}).intermediate_size == 16384


def test_every_type_above_is_known_or_meant_to_be_unknown():
    known = models._PLAIN_TYPES | models._MLA_TYPES | models._SSM_TYPES | {"minicpm3", "unheard_of"}
    assert set(TYPES) <= known


def read(files, index):
    texts = {"/m/config.json": json.dumps(LLAMA_8B), "/m/model.safetensors.index.json": index}
    sizes = {"config.json": 1, "model.safetensors.index.json": 1, **files}
    return models.read_model("/m", texts.get, lambda _: sizes)


INDEX = json.dumps(
    {"metadata": {"total_size": 16_000_000_000}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
)


def test_index_alone_and_whole_models_are_read():
    assert read({}, INDEX)["weight_bytes"] == 16_000_000_000
    whole = {"1.safetensors": 8_000_000_100, "2.safetensors": 8_000_000_100}
    assert read(whole, INDEX)["weight_source"] == "index"
    without = json.dumps({"weight_map": {"a": "1.safetensors"}})
    assert read({"1.safetensors": 5}, without)["weight_bytes"] == 5


@pytest.mark.parametrize(
    ("files", "index", "words"),
    [
        ({"1.safetensors": 8_000_000_000}, INDEX, "lacks 1 of its 2 weight files (2.safetensors)"),
        ({"1.safetensors": 135, "2.safetensors": 135}, INDEX, "have 270 B, its index says 14.9 GiB"),
        ({}, "version https://git-lfs.github.com/spec/v1", "is no index"),
        ({}, "[]", "is no index"),
        ({}, '{"weight_map": null}', "is no index"),
        ({}, '{"weight_map": {"a": [1]}}', "is no index"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(files, index, words):
    with pytest.raises(KvfleetError) as refused:
        read(files, index)
    assert refused.value.findings[0].code == "KVF-MODEL-020"
    assert words in str(refused.value)


@pytest.mark.parametrize("total", ["1e999", "null", "-5", '"x"', "{}"])
def test_a_nonsense_total_falls_back_to_the_files(total):
    index = f'{{"metadata": {{"total_size": {total}}}, "weight_map": {{"a": "1.safetensors"}}}}'
    assert read({"1.safetensors": 7}, index)["weight_source"] == "files"
