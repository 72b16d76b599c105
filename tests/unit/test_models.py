"""KV sizes, parameters and weights of public models against their published numbers."""

import json

import pytest

from kvfleet.core.findings import KvfleetError
from kvfleet.core.models import (
    check_tensor_parallel,
    kv_size,
    loaded_weight_bytes,
    parse_config,
    read_model,
    resolve_dtype,
    weight_files_bytes,
    weights_per_rank,
)


def plain(model_type, layers, hidden, heads, kv_heads, inter, vocab, *, head_dim=None, **more):
    """A configuration as the hub has it; ``None`` leaves a key out, as many publishers do."""
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inter,
        "vocab_size": vocab,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **more,
    }
    return {key: value for key, value in config.items() if value is not None}


def layers_with_kv(shape):
    return sum(group.layers for group in shape.groups if group.kind != "state")


DEEPSEEK_V3 = plain(
    "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
    qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
    n_shared_experts=1, first_k_dense_replace=3, tie_word_embeddings=False, max_position_embeddings=163840,
    quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
)  # fmt: skip
DEEPSEEK_V2_LITE = plain(
    "deepseek_v2", 27, 2048, 16, 16, 10944, 102400, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
    first_k_dense_replace=1, tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS_120B = plain(
    "gpt_oss", 36, 2880, 64, 8, 2880, 201088, head_dim=64, sliding_window=128, num_local_experts=128,
    num_experts_per_tok=4, tie_word_embeddings=False, max_position_embeddings=131072,
    layer_types=["sliding_attention", "full_attention"] * 18,
    quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
LLAMA4_SCOUT = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": plain(
        "llama4_text", 48, 5120, 40, 8, 8192, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, attention_chunk_size=8192, interleave_moe_layer_step=1, tie_word_embeddings=False,
    ),
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
    },
}  # fmt: skip
#: google/gemma-3-4b-it leaves the numbers of heads out: transformers' defaults are 8, 4 and 256.
GEMMA3_4B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240,
        "sliding_window": 1024,
    },
}  # fmt: skip

# name -> (config.json, layers that keep KV, KV heads, head size): the last three from the model's paper or card
PLAIN_MODELS = {
    "Llama-3-8B": (plain("llama", 32, 4096, 32, 8, 14336, 128256), 32, 8, 128),
    "Llama-3.1-70B": (plain("llama", 80, 8192, 64, 8, 28672, 128256), 80, 8, 128),
    "Llama-3.1-405B": (plain("llama", 126, 16384, 128, 8, 53248, 128256), 126, 8, 128),
    "Llama-3.2-1B": (plain("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True), 16, 8, 64),
    "Llama-3.2-3B": (plain("llama", 28, 3072, 24, 8, 8192, 128256, tie_word_embeddings=True), 28, 8, 128),
    "Llama-2-7B": (plain("llama", 32, 4096, 32, None, 11008, 32000), 32, 32, 128),
    "Llama-2-13B": (plain("llama", 40, 5120, 40, None, 13824, 32000), 40, 40, 128),
    "Mistral-7B-v0.2": (plain("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=None), 32, 8, 128),
    "Mistral-Nemo-12B": (plain("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128), 40, 8, 128),
    "Mistral-Large-2407": (plain("mistral", 88, 12288, 96, 8, 28672, 32768), 88, 8, 128),
    "Mixtral-8x7B": (
        plain("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        32,
        8,
        128,
    ),
    "Qwen2.5-0.5B": (
        plain("qwen2", 24, 896, 14, 2, 4864, 151936, use_sliding_window=False, sliding_window=32768,
            tie_word_embeddings=True),
        24,
        2,
        64,
    ),
    "Qwen2.5-7B": (
        plain("qwen2", 28, 3584, 28, 4, 18944, 152064, use_sliding_window=False, sliding_window=131072,
            max_window_layers=28),
        28,
        4,
        128,
    ),
    "Qwen2.5-72B": (plain("qwen2", 80, 8192, 64, 8, 29568, 152064, use_sliding_window=False), 80, 8, 128),
    "Qwen2-VL-7B": (
        plain("qwen2_vl", 28, 3584, 28, 4, 18944, 152064, use_sliding_window=False, vision_config={"depth": 32}),
        28,
        4,
        128,
    ),
    "Qwen3-0.6B": (plain("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True), 28, 8, 128),
    "Qwen3-8B": (plain("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 36, 8, 128),
    "Qwen3-32B": (plain("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128), 64, 8, 128),
    "Qwen3-30B-A3B": (
        plain(
            "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        48,
        4,
        128,
    ),
    "Qwen3-235B-A22B": (
        plain(
            "qwen3_moe", 94, 4096, 64, 4, 12288, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=1536, decoder_sparse_step=1, mlp_only_layers=[],
        ),
        94,
        4,
        128,
    ),
    "Gemma-7B": (plain("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 28, 16, 256),
    "Phi-3-medium-128k": (plain("phi3", 40, 5120, 40, 10, 17920, 32064, sliding_window=131072,
        max_position_embeddings=131072), 40, 10, 128),
    "Phi-4": (plain("phi3", 40, 5120, 40, 10, 17920, 100352, sliding_window=None), 40, 10, 128),
    "Falcon-7B": (
        {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
         "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024, "torch_dtype": "bfloat16"},
        32,
        1,
        64,
    ),
    "Falcon-40B": (
        {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
         "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True, "vocab_size": 65024,
             "torch_dtype": "bfloat16"},
        60,
        8,
        64,
    ),
    "GPT-2": ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}, 12, 12, 64),
    "StarCoder": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "multi_query": True,
            "vocab_size": 49152,
         "torch_dtype": "float16"},
        40,
        1,
        128,
    ),
    "GLM-4-9B": (
        {"model_type": "chatglm", "num_layers": 40, "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
         "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 13696, "vocab_size": 151552,
         "torch_dtype": "bfloat16"},
        40,
        2,
        128,
    ),
    "GLM-4.5": (
        plain(
            "glm4_moe", 92, 5120, 96, 8, 12288, 151552, head_dim=128, n_routed_experts=160, num_experts_per_tok=8,
            moe_intermediate_size=1536, n_shared_experts=1, first_k_dense_replace=3,
        ),
        92,
        8,
        128,
    ),
    "DBRX": (
        {"model_type": "dbrx", "n_layers": 40, "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8},
         "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752}, "vocab_size": 100352,
         "torch_dtype": "bfloat16", "tie_word_embeddings": False},
        40,
        8,
        128,
    ),
    "LLaVA-1.5-7B": (
        {"model_type": "llava", "torch_dtype": "float16",
         "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}},
        32,
        32,
        128,
    ),
    "Mistral-Small-3.1-24B": (
        {"model_type": "mistral3", "torch_dtype": "bfloat16",
         "text_config": plain("mistral", 40, 5120, 32, 8, 32768, 131072, head_dim=128)},
        40,
        8,
        128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_kv_of_plain_attention(name):
    config, layers, kv_heads, head_dim = PLAIN_MODELS[name]
    shape = parse_config(config, name)
    assert kv_size(shape).per_token == layers * kv_heads * (head_dim + head_dim) * 2
    assert kv_size(shape, kv_cache_dtype="fp8").per_token == layers * kv_heads * (head_dim + head_dim)
    assert kv_size(shape).stored_per_token == kv_size(shape).per_token
    assert not shape.notes


def test_there_are_enough_public_models():
    special = (DEEPSEEK_V3, DEEPSEEK_V2_LITE, GPT_OSS_120B, LLAMA4_SCOUT, GEMMA3_27B, GEMMA3_4B)
    assert len(PLAIN_MODELS) + len(special) >= 25


@pytest.mark.parametrize(
    ("name", "kib_per_token"),
    # "KV cache per token" of LMCache's calculator and its /status example, and of the models' papers
    [
        ("Llama-3-8B", 128),
        ("Llama-3.1-70B", 320),
        ("Qwen3-8B", 144),
        ("Qwen2.5-7B", 56),
        ("Qwen3-32B", 256),
        ("Llama-2-7B", 512),
    ],
)
def test_kv_against_other_peoples_numbers(name, kib_per_token):
    assert kv_size(parse_config(PLAIN_MODELS[name][0])).per_token == kib_per_token * 1024


# billions of parameters from the models' cards and papers
PARAMETERS = {
    "Llama-3-8B": 8.03, "Llama-3.1-70B": 70.55, "Llama-3.1-405B": 405.9, "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21,
    "Llama-2-7B": 6.74, "Llama-2-13B": 13.02, "Mistral-7B-v0.2": 7.24, "Mistral-Nemo-12B": 12.25,
    "Mistral-Large-2407": 122.6, "Mixtral-8x7B": 46.7, "Qwen2.5-0.5B": 0.494, "Qwen2.5-7B": 7.62, "Qwen2.5-72B": 72.7,
    "Qwen3-0.6B": 0.596, "Qwen3-8B": 8.19, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235.1,
    "Gemma-7B": 8.54, "Phi-3-medium-128k": 13.96, "Phi-4": 14.7, "GPT-2": 0.124, "GLM-4-9B": 9.4, "DBRX": 131.6,
    "LLaVA-1.5-7B": 6.74, "Mistral-Small-3.1-24B": 23.57, "Falcon-40B": 41.8,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_within_two_per_cent(name):
    shape = parse_config(PLAIN_MODELS[name][0], name)
    assert shape.parameters == pytest.approx(PARAMETERS[name] * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [
        (DEEPSEEK_V3, 671, 37),
        (DEEPSEEK_V2_LITE, 15.7, 2.4),
        (GPT_OSS_120B, 116.8, 5.1),
        (LLAMA4_SCOUT, 109, 17),
        (PLAIN_MODELS["Mixtral-8x7B"][0], 46.7, 12.9),
        (PLAIN_MODELS["Qwen3-30B-A3B"][0], 30.5, 3.3),
    ],
    ids=["DeepSeek-V3", "DeepSeek-V2-Lite", "gpt-oss-120b", "Llama-4-Scout", "Mixtral-8x7B", "Qwen3-30B-A3B"],
)
def test_parameters_of_mixtures_of_experts(config, billions, active_billions):
    shape = parse_config(config)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.03)
    # cards count the embedding table differently, so the active part is less exact
    assert shape.active_parameters == pytest.approx(active_billions * 1e9, rel=0.12)


def test_weights_of_checkpoints_whose_size_is_known():
    # sizes of the weight files on the hub, GB
    assert parse_config(PLAIN_MODELS["Llama-3-8B"][0]).weight_bytes_from_shape == pytest.approx(16.06e9, rel=0.01)
    assert parse_config(GPT_OSS_120B).weight_bytes_from_shape == pytest.approx(65.2e9, rel=0.03)
    assert parse_config(DEEPSEEK_V3).weight_bytes_from_shape == pytest.approx(688e9, rel=0.03)
    awq = {
        **PLAIN_MODELS["Llama-3-8B"][0],
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }
    assert parse_config(awq).weight_bytes_from_shape == pytest.approx(5.73e9, rel=0.03)


def test_mla_keeps_one_vector_and_is_not_divided():
    shape = parse_config(DEEPSEEK_V3)
    assert kv_size(shape).per_token == 61 * (512 + 64) * 2 == 70272
    eight = kv_size(shape, 8)
    assert eight.per_token_per_rank == 70272
    assert eight.per_token == 70272, "a tier keeps one copy"
    assert eight.replicas == 8
    assert kv_size(shape, kv_cache_dtype="fp8_ds_mla").per_token == 61 * 656 == 40016
    assert kv_size(shape, kv_cache_dtype="nvfp4_ds_mla").per_token == 61 * 352
    with pytest.raises(KvfleetError, match="KVF-MODEL-006"):
        kv_size(parse_config(PLAIN_MODELS["Llama-3-8B"][0]), kv_cache_dtype="fp8_ds_mla")


def test_sparse_attention_of_deepseek_v32_keeps_an_index_too():
    shape = parse_config({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128})
    assert kv_size(shape).per_token == 70272 + 61 * (128 + 4)


def test_sliding_window_layers_grow_only_without_the_hybrid_manager():
    shape = parse_config(GPT_OSS_120B)
    assert kv_size(shape, hybrid_manager=True).per_token == 18 * 8 * 128 * 2 == 36864
    assert kv_size(shape, hybrid_manager=False).per_token == 36 * 8 * 128 * 2 == 73728
    assert kv_size(shape, hybrid_manager=True).stored_per_token == 73728, "a tier stores every layer"
    assert {(group.kind, group.layers, group.window_tokens) for group in shape.groups} == {
        ("sliding", 18, 128),
        ("full", 18, None),
    }


def test_chunked_local_layers_of_llama_4():
    shape = parse_config(LLAMA4_SCOUT)
    assert {(group.kind, group.layers) for group in shape.groups} == {("chunked", 36), ("full", 12)}
    assert kv_size(shape, hybrid_manager=True).per_token == 49152
    assert kv_size(shape, hybrid_manager=False).per_token == 196608


@pytest.mark.parametrize(
    ("config", "full", "sliding", "kv_heads", "head_dim"),
    # Gemma 3: five local layers for every global one; 62 = 10 x 6 + 2
    [(GEMMA3_27B, 10, 52, 16, 128), (GEMMA3_4B, 5, 29, 4, 256)],
    ids=["27B", "4B"],
)
def test_gemma_3(config, full, sliding, kv_heads, head_dim):
    shape = parse_config(config)
    assert {(group.kind, group.layers) for group in shape.groups} == {("full", full), ("sliding", sliding)}
    assert kv_size(shape, hybrid_manager=False).per_token == (full + sliding) * kv_heads * 2 * head_dim * 2


def test_gemma_2_alternates_and_mistral_7b_v01_slides_everywhere():
    gemma = parse_config(plain("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256, sliding_window=4096))
    assert {(group.kind, group.layers) for group in gemma.groups} == {("sliding", 21), ("full", 21)}
    mistral = parse_config(
        plain("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096, max_position_embeddings=32768)
    )
    assert [(group.kind, group.layers) for group in mistral.groups] == [("sliding", 32)]


def test_qwen_window_only_above_its_first_layer():
    config = plain(
        "qwen2", 28, 3584, 28, 4, 18944, 152064, use_sliding_window=True, sliding_window=4096, max_window_layers=21
    )
    assert {(group.kind, group.layers) for group in parse_config(config).groups} == {("full", 21), ("sliding", 7)}


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        ({"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
          "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "vocab_size": 65536}, 4),
        ({"model_type": "nemotron_h", "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
          "num_key_value_heads": 8, "head_dim": 128, "hybrid_override_pattern": "M-M-M*-M", "vocab_size": 131072}, 1),
        ({"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
          "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936}, 12),
        ({"model_type": "kimi_linear", "num_hidden_layers": 4, "hidden_size": 2304, "num_attention_heads": 32,
          "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": {"full_attn_layers": [4]},
              "vocab_size": 9}, 1),
    ],
    ids=["jamba", "nemotron_h", "qwen3_next", "kimi_linear"],
)  # fmt: skip
def test_hybrids_know_their_attention_layers(config, attention):
    shape = parse_config(config)
    assert shape.has_state
    assert layers_with_kv(shape) == attention


def test_nemotron_nas_counts_each_blocks_own_heads():
    blocks = [
        {"attention": {"n_heads_in_group": 8, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"n_heads_in_group": 16, "no_op": False}},
    ]
    shape = parse_config(plain("nemotron-nas", 3, 8192, 64, None, 28672, 128256, block_configs=blocks))
    assert kv_size(shape).per_token == (8 + 4) * 2 * 128 * 2


def test_shared_layers_of_gemma_3n_keep_nothing():
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    shape = parse_config(
        plain(
            "gemma3n_text", 35, 2048, 8, 2, 16384, 262400, head_dim=256, sliding_window=512, num_kv_shared_layers=15,
            layer_types=kinds,
        )
    )  # fmt: skip
    assert layers_with_kv(shape) == 20


@pytest.mark.parametrize(
    ("tp", "per_rank", "total"),
    [(1, 131072, 131072), (2, 65536, 131072), (8, 16384, 131072), (16, 16384, 262144)],
)
def test_tensor_parallel_divides_then_replicates(tp, per_rank, total):
    size = kv_size(parse_config(PLAIN_MODELS["Llama-3-8B"][0]), tp)
    assert (size.per_token_per_rank, size.per_token) == (per_rank, total)


def test_checkpoint_says_fp8_kv():
    config = {
        **PLAIN_MODELS["Llama-3-8B"][0],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
    }
    assert kv_size(parse_config(config)).per_token == 65536
    assert kv_size(parse_config(config), kv_cache_dtype="bfloat16").per_token == 131072


def test_float32_checkpoints_run_in_sixteen_bits():
    shape = parse_config(PLAIN_MODELS["GPT-2"][0])
    assert resolve_dtype(shape) == "bfloat16"
    assert kv_size(shape).per_token == 12 * 12 * 128 * 2
    assert kv_size(shape, dtype="float32").per_token == 12 * 12 * 128 * 4


def test_weights_are_counted_in_the_engines_format():
    gpt2 = parse_config(PLAIN_MODELS["GPT-2"][0])
    # its file on the hub: 548 MB in 32 bits
    assert loaded_weight_bytes(gpt2, 548_105_171) == pytest.approx(274e6, rel=0.01)
    assert loaded_weight_bytes(gpt2, 548_105_171, "float32") == 548_105_171
    llama = parse_config(PLAIN_MODELS["Llama-3-8B"][0])
    assert loaded_weight_bytes(llama, 16_060_522_496) == 16_060_522_496
    assert loaded_weight_bytes(llama, 0) == pytest.approx(16.06e9, rel=0.01)
    assert loaded_weight_bytes(llama, 0, "float32") == pytest.approx(32.12e9, rel=0.01)


def test_weights_per_rank_divide_but_latent_projections_stay():
    llama = parse_config(PLAIN_MODELS["Llama-3-8B"][0])
    assert weights_per_rank(llama, 16_060_000_000, 2) == 8_030_000_000
    # 32 layers x 2 x 8 heads x 128 x 4096 hidden: eight more copies on 16 ranks
    extra = 32 * 2 * 8 * 128 * 4096 * 2
    assert weights_per_rank(llama, 16_060_000_000, 16) == pytest.approx((16.06e9 + extra) / 16, rel=0.01)
    deepseek = parse_config(DEEPSEEK_V3)
    assert weights_per_rank(deepseek, 688_000_000_000, 8) > 688e9 / 8


@pytest.mark.parametrize("tp", [3, 5, 6, 7])
def test_tensor_parallel_must_divide_the_heads(tp):
    with pytest.raises(KvfleetError, match=r"KVF-MODEL-007.*tensor_parallel_size"):
        check_tensor_parallel(parse_config(PLAIN_MODELS["Llama-3-8B"][0]), tp, "x")


def test_tensor_parallel_and_kv_heads_must_fit_each_other():
    check_tensor_parallel(parse_config(PLAIN_MODELS["Phi-4"][0]), 2, "x")
    with pytest.raises(KvfleetError, match="10 KV heads"):
        check_tensor_parallel(parse_config(PLAIN_MODELS["Phi-4"][0]), 4, "x")


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"num_hidden_layers": None}, "KVF-MODEL-004", "number of layers"),
        ({"num_attention_heads": None}, "KVF-MODEL-004", "attention heads"),
        ({"hidden_size": 4100}, "KVF-MODEL-004", "no head_dim"),
        ({"layer_types": ["full_attention"] * 3}, "KVF-MODEL-004", "3 layer types for 32"),
        ({"layer_types": ["retention"] * 32}, "KVF-MODEL-005", "retention"),
        ({"kv_lora_rank": 512}, "KVF-MODEL-005", "latent"),
        ({"model_type": "t5"}, "KVF-MODEL-005", "encoder-decoder"),
        ({"model_type": "mamba2"}, "KVF-MODEL-005", "no attention layers"),
        ({"model_type": "brandnew", "ssm_cfg": {"d": 1}}, "KVF-MODEL-005", "ssm_cfg"),
        ({"is_encoder_decoder": True}, "KVF-MODEL-005", "encoder-decoder"),
    ],
)
def test_what_it_does_not_know_it_refuses(change, code, says):
    config = {**PLAIN_MODELS["Llama-3-8B"][0], **change}
    with pytest.raises(KvfleetError, match=says) as caught:
        parse_config({key: value for key, value in config.items() if value is not None}, "m")
    assert caught.value.findings[0].code == code


def test_unknown_types_that_look_plain_are_counted_with_a_warning():
    shape = parse_config({**PLAIN_MODELS["Llama-3-8B"][0], "model_type": "brandnew"})
    assert kv_size(shape).per_token == 131072
    assert [note.code for note in shape.notes] == ["KVF-MODEL-010"]


# --- reading a directory ---


def files(**texts):
    return lambda path: texts.get(path.rsplit("/", 1)[-1].replace(".", "_").replace("-", "_"))


def test_weights_come_from_the_index_then_from_the_files():
    sizes = {"config.json": 10, "a.safetensors": 100, "b.safetensors": 200, "training_args.bin": 7}
    assert weight_files_bytes(sizes) == (300, "files")
    assert weight_files_bytes(sizes, '{"metadata": {"total_size": 290}}') == (290, "index")
    assert weight_files_bytes(sizes, '{"metadata": {}}') == (300, "files")
    assert weight_files_bytes({"pytorch_model.bin": 50, "training_args.bin": 7}) == (50, "files")
    assert weight_files_bytes({"config.json": 1}) == (0, "shape")


def test_reading_a_model_directory_and_a_bare_config():
    text = json.dumps(PLAIN_MODELS["Llama-3-8B"][0])
    found = read_model("/m/", files(config_json=text), lambda _: {"config.json": 9, "x.safetensors": 16})
    assert (found["weight_bytes"], found["weight_source"]) == (16, "files")
    bare = read_model("/m/config.json", files(config_json=text), lambda _: None)
    assert (bare["weight_bytes"], bare["weight_source"]) == (0, "shape")
    assert bare["digest"] != found["digest"], "other weights, other digest"


@pytest.mark.parametrize(
    ("text", "sizes", "code"),
    [
        (None, None, "KVF-MODEL-001"),
        (None, {"model.safetensors": 1}, "KVF-MODEL-002"),
        ("{", {"config.json": 1}, "KVF-MODEL-003"),
    ],
)
def test_bad_model_paths_name_the_variable(text, sizes, code):
    with pytest.raises(KvfleetError, match=code):
        read_model("/m", lambda _: text, lambda _: sizes)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 8192),
        ({"type": "linear", "factor": 2.0}, 16384),
        # Qwen2.5's card: YaRN with factor 4 over 32,768 positions
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ],
)
def test_longest_request_counts_position_scaling(scaling, longest):
    config = {**PLAIN_MODELS["Llama-3-8B"][0], "max_position_embeddings": 8192, "rope_scaling": scaling}
    assert parse_config(config).max_position == longest
