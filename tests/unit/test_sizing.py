"""The plan: the article's numbers, refusals, sharing, stability."""

import copy
import itertools
import re

import pytest
from planner_hosts import (
    GIB,
    IN_PROCESS,
    LLAMA_8B,
    QWEN_7B,
    TINY,
    codes,
    gpu,
    host,
    plan,
)

from kvfleet.checkout import ROOT
from kvfleet.core import services, sizing
from kvfleet.core.models import kv_size, parse_config
from kvfleet.core.pools import build_pool, usable_gpu_bytes

H200 = {"mib": 143771, "name": "NVIDIA H200", "memory_reserved_mib": 616}


def h200(count, **more):
    return host([gpu(index, **H200) for index in range(count)], 256, **more)


# --- KV memory of the engine -------------------------------------------------------------------------------------


def test_explicit_pool_is_exact():
    # 4 GiB / 131,072 B = 32,768 tokens: the engine's own log line on an H200 (vLLM 0.26)
    made = plan(h200(1), profile="gpu", kv_pool_gib=4, max_model_len=8192)["instances"][0]
    assert made["kv_cache_memory_bytes"] == 4 * GIB
    assert made["gpu_kv_tokens"] == 32768


def test_tokens_of_a_length_that_is_no_multiple_of_the_block():
    # vLLM logs int(blocks / blocks of one request x length): 2048 blocks of 16, 626 for 10,001 tokens
    made = plan(h200(1), profile="gpu", kv_pool_gib=4, max_model_len=10001)["instances"][0]
    assert made["gpu_kv_tokens"] == int(2048 / 626 * 10001)


@pytest.mark.parametrize(
    ("config", "count", "settings", "seen_gib", "seen_tokens"),
    # "Available KV cache memory" and "GPU KV cache size" of vLLM 0.26 on H200s, 8,192 tokens a step, 256 sequences
    [
        (LLAMA_8B, 1, {"gpu_memory_utilization": 0.92}, 112.33, 920_192),
        (LLAMA_8B, 1, {"gpu_memory_utilization": 0.92, "enforce_eager": True}, 112.56, 922_064),
        (LLAMA_8B, 1, {"gpu_memory_utilization": 0.75, "enforce_eager": True, "max_num_seqs": 32}, 88.79, 727_376),
        (LLAMA_8B, 2, {"gpu_memory_utilization": 0.92}, 120.46, 1_973_536),
        (QWEN_7B, 1, {"gpu_memory_utilization": 0.92}, 112.98, 2_115_552),
    ],
    ids=["8B graphs", "8B eager", "8B 0.75 eager", "8B on two GPUs", "7B graphs"],
)
def test_pool_within_five_per_cent_of_the_engines_log(config, count, settings, seen_gib, seen_tokens):
    made = plan(h200(count), config, profile="gpu", max_model_len=8192, **settings)["instances"][0]
    assert made["gpu_kv_pool_bytes_per_rank"] / GIB == pytest.approx(seen_gib, rel=0.05)
    assert made["gpu_kv_tokens"] == pytest.approx(seen_tokens, rel=0.05)


def test_cpu_pool_is_what_the_running_engine_tells():
    # "CPU KV cache size: 21,760 tokens, Maximum concurrency for 8,192 tokens per request: 2.66x", vLLM 0.32
    demo = {**TINY, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    made = plan(host([], 24), demo, profile="gpu", kv_pool_gib=0.25, max_model_len=8192, dtype="float32")["instances"][
        0
    ]
    assert (made["gpu_kv_tokens"], made["max_concurrency_at_max_len"]) == (21760, 2.66)


def test_cpu_pool_against_the_engines_own_metric():
    labels = (ROOT / "tests/data/metrics/vllm-0.32.0.txt").read_text()
    blocks, tokens, concurrency = (
        re.search(rf'vllm:cache_config_info{{.*{name}="([\d.]+)"', labels).group(1)
        for name in ("num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
    )
    shape = parse_config(TINY)
    pool = build_pool(shape, kv_size(shape), int(blocks) * 128 * 16384, 7680, 128, True, 2048)
    assert (pool.blocks, pool.tokens) == (int(blocks), int(tokens))
    assert pool.max_concurrency == pytest.approx(float(concurrency))


def test_usable_memory_is_what_torch_shows():
    # torch.cuda.get_device_properties(0).total_memory beside nvidia-smi's total and reserve, same machine
    assert usable_gpu_bytes(gpu(0, **H200)) == pytest.approx(150_109_880_320, abs=1024**2)
    # without the reserve: RTX 4090 23.64 GiB, H100 79.1-79.2 GiB
    assert usable_gpu_bytes({"memory_mib": 24564}) / GIB == pytest.approx(23.64, rel=0.01)
    assert usable_gpu_bytes({"memory_mib": 81559}) / GIB == pytest.approx(79.15, rel=0.01)


def test_server_is_reserved_on_each_gpu_outside_the_utilisation():
    small = host([gpu(0, 15360, name="Tesla T4")], 64)
    made = plan(small, TINY)["instances"][0]
    # 14.7 GiB usable, 0.66 of them for the server
    assert made["gpu_memory_utilization"] == pytest.approx(0.92 - 0.66 / 14.7, abs=0.011)
    alone = plan(small, TINY, profile="gpu")["instances"][0]
    assert alone["gpu_memory_utilization"] == 0.92
    refused = plan(small, TINY, gpu_memory_utilization=0.97)
    assert "KVF-VRAM-002" in codes(refused["errors"])


def test_model_that_does_not_fit_says_what_would():
    made = plan(host([gpu(0, 24564, name="NVIDIA GeForce RTX 4090")], 64), {**LLAMA_8B, "num_hidden_layers": 80})
    error = next(error for error in made["errors"] if error["code"] == "KVF-VRAM-001")
    assert "Use 2 such GPUs" in error["fix"]
    assert error["fix"].endswith("of weights.")


def test_length_that_the_pool_cannot_hold_is_refused_with_the_longest():
    made = plan(host(1), profile="gpu", kv_pool_gib=1, max_model_len=16384)
    error = next(error for error in made["errors"] if error["code"] == "KVF-VRAM-004")
    # 1 GiB = 512 blocks of 16 tokens, one of them never usable
    assert error["numbers"]["longest_tokens"] == 511 * 16
    assert "8176" in error["fix"]


def test_pool_with_windows_counts_groups_as_vllm_does():
    gpt_oss = {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088,
        "torch_dtype": "bfloat16", "sliding_window": 128, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_local_experts": 128, "num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    made = plan(h200(1), gpt_oss, profile="gpu", kv_pool_gib=8, max_model_len=131072)["instances"][0]
    # two groups of 18 layers share blocks of 18 x 16 x 2 KiB = 576 KiB; a request takes 8192 of the first and
    # ceil((127 + 2 x 8192) / 16) + 1 of the second
    blocks = 8 * GIB // (18 * 16 * 8 * 2 * 64 * 2)
    assert made["gpu_kv_tokens"] == int(blocks / (8192 + 1032 + 1) * 131072)
    assert made["kv_bytes_per_token"] == 36864
    assert made["chunk_bytes_per_rank"] == 256 * 73728


def test_more_local_than_global_layers_need_more_block_tables():
    # Gemma 3 27B: 10 global and 52 local layers make groups of 10, so six tables for the local ones
    gemma = {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
        "vocab_size": 262208, "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
    }  # fmt: skip
    made = plan(h200(1), gemma, profile="gpu", kv_pool_gib=20, max_model_len=131072)["instances"][0]
    blocks = 20 * GIB // (10 * 16 * 16 * 2 * 128 * 2)
    local = -(-(1023 + 2 * 8192) // 16) + 1
    assert made["gpu_kv_tokens"] == int(blocks / (8192 + 6 * local) * 131072)


# --- buffers and RAM ----------------------------------------------------------------------------------------------


def test_the_articles_rule():
    assert sizing.article_buffer_gib(81920, 0.75) == pytest.approx(19.8)
    made = plan(host(2), gpu_memory_utilization=0.75)
    assert made["instances"][0]["buffer_gib_per_gpu"] == 20
    assert made["instances"][0]["l1_gib"] == 40
    assert made["host"]["ram"]["buffers_gib"] == 40
    assert made["errors"] == []


@pytest.mark.parametrize("available", [118, 124, 128])
def test_four_times_twenty_on_128_gib_is_reduced_and_says_so(available):
    made = plan(host(4, 128, available), gpu_memory_utilization=0.75)
    assert made["errors"] == []
    assert made["instances"][0]["buffer_gib_per_gpu"] < 20
    assert "KVF-RAM-003" in codes(made["warnings"])
    assert made["host"]["ram"]["free_gib"] >= 0


def test_a_users_own_buffer_that_does_not_fit_is_refused_with_the_sum():
    made = plan(host(4, 128), buffer_gib_per_gpu=20, gpu_memory_utilization=0.75)
    error = next(error for error in made["errors"] if error["code"] == "KVF-RAM-002")
    assert "4 x 20 = 80 GiB" in error["message"]
    assert "kvfleet_buffer_gib_per_gpu" in error["fix"]


def test_two_instances_that_fit_alone_do_not_fit_together():
    instances = [
        {"name": name, "model": "/m", "gpus": [index], "buffer_gib_per_gpu": 150}
        for index, name in enumerate(("a", "b"))
    ]
    made = plan(host(2, 256), instances=instances)
    error = next(error for error in made["errors"] if error["code"] == "KVF-RAM-002")
    assert "1 x 150 + 1 x 150 = 300" in error["message"]


def test_numa_nodes_have_their_own_budget_and_server():
    instances = [
        {"name": "a", "model": "/m", "gpus": [0, 1], "buffer_gib_per_gpu": 60},
        {"name": "b", "model": "/m", "gpus": [2, 3], "buffer_gib_per_gpu": 5},
    ]
    made = plan(host(4, 256, nodes=2), instances=instances)
    assert [(server["name"], server["l1_gib"]) for server in made["servers"]] == [("0", 120), ("1", 10)]
    error = next(error for error in made["errors"] if error["code"] == "KVF-RAM-002")
    assert "NUMA node 0" in error["message"]


def test_an_instance_over_two_nodes_has_the_spanning_server():
    made = plan(host(2, nodes=2))
    assert [server["name"] for server in made["servers"]] == ["all"]
    assert made["servers"][0]["numa_nodes"] == [0, 1]


@pytest.mark.parametrize(("nodes", "name"), [(1, "0"), (2, "all")])
def test_gpus_that_hide_their_node(nodes, name):
    made = plan(host([gpu(0, node=None)], nodes=nodes))
    assert [server["name"] for server in made["servers"]] == [name]


def test_working_set_raises_the_buffer():
    made = plan(host(2), gpu_memory_utilization=0.75, working_set_gib=100)
    # the server evicts above 80 % of it: 125 GiB hold 100
    assert made["instances"][0]["l1_gib"] == 125
    inside = plan(host(2), release=IN_PROCESS, gpu_memory_utilization=0.75, working_set_gib=100)
    assert inside["host"]["ram"]["buffers_gib"] == 100
    assert plan(host(2, 128), gpu_memory_utilization=0.75, working_set_gib=500)["host"]["ram"]["free_gib"] >= 0


def test_too_little_ram_lists_every_part():
    made = plan(host([gpu(0, 24564)], 16, 14))
    error = next(error for error in made["errors"] if error["code"] == "KVF-RAM-001")
    assert "LMCache" in error["message"]
    assert "kvfleet_profile: gpu" in error["fix"]


def test_buffers_that_nobody_set_are_not_blamed():
    made = plan(host(0, 16, 12))
    codes = [error["code"] for error in made["errors"]]
    assert "KVF-RAM-001" in codes
    assert "KVF-RAM-002" not in codes


@pytest.mark.parametrize(("ram", "sequences"), [(32, 4), (32, 8), (64, 12)])
def test_24_gib_card_serves_a_7b_model(ram, sequences):
    card = host([gpu(0, 24564, name="NVIDIA GeForce RTX 4090")], ram, ram - 3)
    made = plan(card, QWEN_7B, profile="disk", max_num_seqs=sequences, max_model_len=8192)
    assert made["errors"] == []
    assert made["instances"][0]["gpu_kv_tokens"] >= sequences * 2176, (
        "4, 8, 12 requests of 2048 + 128 tokens run at once"
    )
    assert made["instances"][0]["buffer_gib_per_gpu"] >= 1


def test_in_process_releases_count_per_rank():
    made = plan(host(2), release=IN_PROCESS, profile="disk", gpu_memory_utilization=0.75)
    assert made["servers"] == []
    one = made["instances"][0]
    assert one["buffer_gib_per_gpu"] == 20
    services.attach_commands(made)
    assert (
        one["lmcache_config"]["max_local_cpu_size"] * one["tensor_parallel_size"] == made["host"]["ram"]["buffers_gib"]
    )
    assert (
        one["lmcache_config"]["max_local_disk_size"] * one["tensor_parallel_size"] == made["host"]["disk"]["quota_gib"]
    )


def test_cpu_host_of_the_demo():
    small = host([], 8, 7.5, shm_bytes=4 * GIB, cpus=2)
    made = plan(
        small,
        TINY,
        profile="disk",
        disk_size_gib=4,
        kv_pool_gib=0.25,
        buffer_gib_per_gpu=1,
        max_model_len=8192,
        max_num_seqs=4,
    )
    assert made["errors"] == []
    one = made["instances"][0]
    assert one["kv_bytes_per_token"] == 16384
    assert one["gpu_kv_tokens"] == 16384
    assert one["enforce_eager"] is True
    assert made["servers"][0]["shm_name"]
    # four prompts of 128 MiB in flight need half of the 1 GiB
    assert made["servers"][0]["eviction_trigger_watermark"] == 0.5


def test_cpu_pool_counts_the_block_that_is_never_usable():
    # 64 blocks of 128 tokens serve at most 8064 (seen on vLLM's CPU backend)
    made = plan(host([], 16), TINY, profile="gpu", kv_pool_gib=0.125, max_model_len=8192)
    error = next(error for error in made["errors"] if error["code"] == "KVF-VRAM-004")
    assert error["numbers"]["longest_tokens"] == 8064


def test_dev_shm_must_hold_l1_on_a_cpu_host():
    made = plan(host([], 16, shm_bytes=GIB), TINY, buffer_gib_per_gpu=2)
    error = next(error for error in made["errors"] if error["code"] == "KVF-RAM-004")
    assert "/dev/shm" in error["message"]


def test_l1_too_small_to_stage_a_long_prompt_is_said():
    made = plan(host(1), profile="disk", buffer_gib_per_gpu=4, max_model_len=32768)
    assert "KVF-RAM-007" in codes(made["warnings"])


# --- disk ---------------------------------------------------------------------------------------------------------


def test_quota_is_half_of_the_partition_above_the_floor():
    made = plan(host(2), profile="disk")
    disk = made["host"]["disk"]
    assert disk["quota_gib"] == pytest.approx((disk["partition_gib"] - disk["floor_gib"]) / 2, abs=0.02)


def test_quota_is_divided_among_writers():
    instances = [{"name": "a", "model": "/m", "gpus": [0]}, {"name": "b", "model": "/m", "gpus": [1, 2, 3, 4]}]
    made = plan(host(5), profile="disk", quota_gib=400, instances=instances)
    assert [one["quota_gib"] for one in made["instances"]] == [80, 320]
    assert made["servers"][0]["quota_gib"] == 400


def test_quota_beyond_what_eviction_needs_is_refused_and_outside_the_window_warned():
    refused = plan(host(2), profile="disk", quota_gib=1600)
    assert "KVF-DISK-102" in codes(refused["errors"])
    for quota in (200, 1200):
        assert "KVF-DISK-103" in codes(plan(host(2), profile="disk", quota_gib=quota)["warnings"])
    assert "KVF-DISK-103" not in codes(plan(host(2), profile="disk", quota_gib=700)["warnings"])


def test_profile_disk_without_a_disk_names_the_variables():
    made = plan(host(2), profile="disk", disk_size_gib=None)
    error = next(error for error in made["errors"] if error["code"] == "KVF-DISK-100")
    assert "cache_disk_device" in error["fix"]


# --- chunk, break-even, sessions ------------------------------------------------------------------------------------


def test_small_chunks_say_what_they_cost():
    made = plan(host(2), chunk_tokens=32)
    warning = next(entry for entry in made["warnings"] if entry["code"] == "KVF-MODEL-016")
    # Llama-3-8B on two ranks: 64 KiB a token and rank, 2 MiB in a file of 32
    assert "8 times" in warning["message"]
    assert "2 MiB" in warning["message"]
    refused = plan(host([], 64), TINY, chunk_tokens=64)
    assert "KVF-MODEL-015" in codes(refused["errors"])


@pytest.mark.parametrize("megabytes", [600, 900])
def test_the_articles_drive_loses_to_recompute(megabytes):
    made = plan(host(2), profile="disk", measured={"disk": megabytes * 1e6})
    tier = made["instances"][0]["tiers"]["disk"]
    assert tier["pays"] == "no"
    assert tier["needed_bytes_per_s"] > tier["measured_bytes_per_s"] == megabytes * 1e6
    assert tier["break_even_tokens"] is None


def test_nothing_measured_is_unknown():
    tiers = plan(host(2), profile="disk")["instances"][0]["tiers"]
    assert {tier["pays"] for tier in tiers.values()} == {"unknown"}
    assert tiers["disk"]["needed_bytes_per_s"] is not None


def test_a_fast_tier_pays_from_a_length_on():
    tiers = plan(host(2), measured={"cpu": 20e9})["instances"][0]["tiers"]
    assert tiers["cpu"]["pays"] == "yes"
    assert tiers["cpu"]["break_even_tokens"] % 256 == 0


def test_break_even_from_the_hosts_own_prefill_speed():
    # gpu-measurements: 15,000-20,000 tokens/s of 128 KiB are 2.0-2.6 GB/s
    tier = plan(host(1), profile="disk", prefill_tokens_per_s=20000)["instances"][0]["tiers"]["disk"]
    assert tier["needed_bytes_per_s"] == 20000 * 131072


def test_hundred_sessions_of_128k():
    made = plan(host(2), profile="disk", sessions=100, context=131072)
    assert made["sessions"]["kv_bytes_total"] == 100 * 131072 * 131072
    assert made["sessions"]["kv_bytes_total"] / 1024**4 == pytest.approx(1.56, abs=0.01)
    assert made["sessions"]["fits"] == {"gpu": False, "cpu": False, "disk": False}
    assert plan(host(2), profile="disk", sessions=1, context=8192)["sessions"]["fits"] == {
        "gpu": True,
        "cpu": True,
        "disk": True,
    }


# --- instances that share a host --------------------------------------------------------------------------------------


def two(first, second):
    return [{"name": "a", "model": "/m", **first}, {"name": "b", "model": "/m", **second}]


@pytest.mark.parametrize(
    ("instances", "code"),
    [
        (two({"gpus": [0]}, {"gpus": [0]}), "KVF-GPU-008"),
        (two({"gpus": [0, 0]}, {"gpus": [1]}), "KVF-GPU-002"),
        (two({"gpus": [0]}, {"gpus": [7]}), "KVF-GPU-001"),
        (two({"gpus": [0]}, {"gpus": ["MIG-1234"]}), "KVF-GPU-003"),
        (two({"gpus": [0], "port": 8000}, {"gpus": [1], "port": 8000}), "KVF-NET-001"),
        (two({"gpus": [0], "port": 5555}, {"gpus": [1], "port": 8080}), None),
        (two({"gpus": [0], "chunk_tokens": 256}, {"gpus": [1], "chunk_tokens": 512}), "KVF-MODEL-018"),
        (two({"gpus": [0]}, {"gpus": [1], "tensor_parallel_size": 2}), "KVF-GPU-006"),
        (two({"gpus": ["GPU-00000001"]}, {"gpus": ["GPU-00000000-aaaa-bbbb-cccc-ddddeeeeffff"]}), None),
        (two({"gpus": "all"}, {"gpus": [1]}), "KVF-GPU-008"),
    ],
)
def test_sharing(instances, code):
    made = plan(host(2), instances=instances)
    assert codes(made["errors"]) == ({code} if code else set())


def test_keys_that_cannot_tell_formats_apart():
    same = two({"gpus": [0]}, {"gpus": [1]})
    assert plan(host(2), instances=same)["errors"] == []
    assert codes(plan(host(2), instances=two({"gpus": [0]}, {"gpus": [1], "kv_cache_dtype": "fp8"}))["errors"]) == {
        "KVF-MODEL-019"
    }
    # the keys hold the number of ranks, and an instance without a tier stores nothing
    assert plan(host(3), instances=two({"gpus": [0]}, {"gpus": [1, 2]}))["errors"] == []
    alone = two({"gpus": [0]}, {"gpus": [1], "kv_cache_dtype": "fp8", "profile": "gpu"})
    assert plan(host(2), instances=alone)["errors"] == []


def test_fewer_ranks_than_gpus():
    made = plan(host(8), tensor_parallel_size=2)
    assert [gpu["index"] for gpu in made["instances"][0]["gpus"]] == [0, 1]
    assert "KVF-GPU-009" in codes(made["warnings"])
    assert codes(plan(host(2), tensor_parallel_size=3)["errors"]) == {"KVF-MODEL-007"}
    assert codes(plan(host(2), tensor_parallel_size=4)["errors"]) == {"KVF-GPU-006"}


def test_memory_that_others_hold_on_a_gpu():
    taken = host([gpu(0, memory_used_mib=40000)])
    error = next(error for error in plan(taken)["errors"] if error["code"] == "KVF-VRAM-005")
    assert "39.1 GiB of GPU 0" in error["message"]
    assert plan(taken, gpu_memory_utilization=0.4)["errors"] == []
    ours = host([gpu(0, memory_used_mib=70000)], kvfleet={"units": ["kvfleet-vllm@default.service"], "memory_bytes": 0})
    assert plan(ours)["errors"] == []


def test_ports_never_collide_with_each_other():
    made = plan(host(4), instances=[{"name": f"i{index}", "model": "/m", "gpus": [index]} for index in range(4)])
    ports = [listener["port"] for listener in made["host"]["listeners"]]
    assert len(ports) == len(set(ports))
    inner = sorted(one["internal_port"] for one in made["instances"])
    assert all(second - first >= 16 for first, second in itertools.pairwise(inner))


def test_port_of_a_foreign_process_is_refused_but_not_our_own():
    foreign = host(
        1, listeners=[{"port": 8000, "address": "127.0.0.1", "process": "nginx", "unit": "nginx.service", "pid": 7}]
    )
    error = next(error for error in plan(foreign)["errors"] if error["code"] == "KVF-NET-002")
    assert "nginx" in error["message"]
    ours = host(
        1,
        listeners=[
            {"port": 8000, "address": "127.0.0.1", "process": "vllm", "unit": "kvfleet-vllm@default.service", "pid": 7}
        ],
    )
    assert plan(ours)["errors"] == []
    unseen = [{"port": 8000, "address": "127.0.0.1", "process": None, "unit": None, "pid": None}]
    assert "KVF-NET-002" in codes(plan(host(1, listeners=unseen))["errors"])
    running = {"units": ["kvfleet-vllm@default.service"], "memory_bytes": 0}
    assert plan(host(1, listeners=unseen, kvfleet=running))["errors"] == []


def test_a_foreign_process_on_an_inner_port_is_no_matter_the_engine_takes_the_next():
    inner = plan(host(1))["instances"][0]["internal_port"]
    taken = [{"port": inner, "address": "0.0.0.0", "process": "other", "pid": 7, "unit": None}]  # noqa: S104
    assert plan(host(1, listeners=taken))["errors"] == []


def test_gpus_named_on_a_host_that_shows_none():
    broken = host([], 64, unavailable=[{"field": "gpus", "reason": "Driver/library version mismatch"}])
    error = next(error for error in plan(broken, gpus=[0])["errors"] if error["code"] == "KVF-GPU-004")
    assert "mismatch" in error["message"]


def test_hybrids_with_states_are_refused_with_a_connector_only():
    jamba = {"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 65536, "torch_dtype": "bfloat16"}  # fmt: skip
    assert "KVF-MODEL-013" in codes(plan(host(2), jamba)["errors"])
    alone = plan(host(2), jamba, profile="gpu")
    assert "KVF-MODEL-013" not in codes(alone["errors"])


def test_windows_without_a_connector_that_keeps_the_hybrid_manager():
    gemma = {"model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
             "sliding_window": 4096, "torch_dtype": "bfloat16", "max_position_embeddings": 8192}  # fmt: skip
    on = plan(host(1), gemma)["instances"][0]
    off = plan(host(1), gemma, release=IN_PROCESS)["instances"][0]
    assert (on["hybrid_kv_cache_manager"], off["hybrid_kv_cache_manager"]) == (True, False)
    assert off["kv_bytes_per_token"] == 2 * on["kv_bytes_per_token"]


# --- stability ---


def test_fingerprint_ignores_free_memory_and_measurements():
    first = plan(host(2, available_gib=480), measured={"disk": 1e9})
    second = plan(host(2, available_gib=470), measured={"disk": 2e9})
    assert first["fingerprint"] == second["fingerprint"]
    assert first["fingerprint"] != plan(host(2), buffer_gib_per_gpu=12)["fingerprint"]
    assert first["fingerprint"] != plan(host(2), release=IN_PROCESS)["fingerprint"]


def test_computed_values_stay_while_they_fit():
    before = plan(host(4, 128, 118), gpu_memory_utilization=0.75)
    assert before["instances"][0]["buffer_gib_per_gpu"] < 20
    # a little more memory is free now: the plan would give more, but nothing the user wrote has changed
    now = host(4, 128, 124)
    assert plan(now, gpu_memory_utilization=0.75)["fingerprint"] != before["fingerprint"]
    kept = plan(now, gpu_memory_utilization=0.75, previous=before)
    assert kept["fingerprint"] == before["fingerprint"]
    # when it does not fit any more, it shrinks
    assert plan(host(4, 128, 90), gpu_memory_utilization=0.75, previous=before)["fingerprint"] != before["fingerprint"]
    # and a change of the settings plans afresh
    assert plan(now, gpu_memory_utilization=0.74, previous=before)["inputs"] != before["inputs"]


def test_memory_of_our_own_units_counts_as_free():
    idle = plan(host([], 32, 14), TINY, kv_pool_gib=0.25)
    assert idle["instances"][0]["buffer_gib_per_gpu"] == 4
    running = host([], 32, 8, kvfleet={"units": ["kvfleet-lmcache@0.service"], "memory_bytes": 6 * GIB})
    assert plan(running, TINY, kv_pool_gib=0.25)["fingerprint"] == idle["fingerprint"]


def test_the_plan_has_the_keys_of_the_contract():
    made = plan(host(2), profile="disk", sessions=1, context=1024)
    top = {
        "release",
        "instances",
        "host",
        "errors",
        "warnings",
        "servers",
        "paths",
        "fingerprint",
        "profile",
        "sessions",
    }
    assert top <= set(made)
    assert {
        "name", "gpus", "tensor_parallel_size", "kv_bytes_per_token", "kv_bytes_per_token_per_rank",
        "weights_bytes_per_rank",
        "gpu_kv_pool_bytes_per_rank", "gpu_kv_tokens", "numa_nodes", "server", "buffer_gib_per_gpu", "l1_gib",
        "quota_gib",
        "chunk_tokens", "chunk_bytes_per_rank", "max_concurrency_at_max_len", "gpu_memory_utilization", "tiers",
        "model", "served_model_name", "profile", "port", "internal_port", "max_model_len", "max_num_seqs",
        "kv_cache_memory_bytes", "block_size_tokens", "kv_cache_dtype",
    } <= set(made["instances"][0])  # fmt: skip
    assert {"total_gib", "available_gib", "reserved_gib", "buffers_gib", "engine_gib", "free_gib"} <= set(
        made["host"]["ram"]
    )
    assert {"size_gib", "partition_gib", "spare_gib", "floor_gib", "quota_gib", "endurance_days"} <= set(
        made["host"]["disk"]
    )


def test_services_print_the_plans_numbers():
    made = plan(host(4, nodes=2), profile="disk", instances=two({"gpus": [0, 1]}, {"gpus": [2, 3]}))
    shown = copy.deepcopy(made)
    services.attach_commands(made)
    for before, after in zip(shown["servers"], made["servers"], strict=True):
        command = after["command"]
        assert float(command[command.index("--l1-size-gb") + 1]) == before["l1_gib"]
