"""What holds for every host: nothing is over-committed, more RAM never hurts, the sum printed is the sum rendered."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from planner_hosts import GIB, IN_PROCESS, LLAMA_8B, QWEN_7B, RELEASE, TINY, gpu, host, plan

from kvfleet.core import services
from kvfleet.core.pools import usable_gpu_bytes

CARDS = [
    {"mib": 15360, "name": "Tesla T4"},
    {"mib": 24564, "name": "NVIDIA GeForce RTX 4090"},
    {"mib": 46068, "name": "NVIDIA A40"},
    {"mib": 81920, "name": "NVIDIA A100-SXM4-80GB"},
    {"mib": 143771, "name": "NVIDIA H200", "memory_reserved_mib": 616},
]


@st.composite
def hosts(draw):
    count = draw(st.sampled_from([0, 1, 2, 4, 8]))
    card = draw(st.sampled_from(CARDS))
    nodes = draw(st.sampled_from([1, 2])) if count != 1 else 1
    ram = draw(st.integers(4, 2048))
    share = draw(st.floats(0.3, 1.0))
    cards = [gpu(index, node=index * nodes // max(1, count), **card) for index in range(count)]
    return host(cards, ram, ram * share, nodes=nodes)


@st.composite
def wishes(draw, cards):
    values = {"profile": draw(st.sampled_from(["gpu", "cpu", "disk"]))}
    for name, strategy in {
        "buffer_gib_per_gpu": st.sampled_from([1, 5, 20, 64.5]),
        "working_set_gib": st.integers(1, 2000),
        "quota_gib": st.integers(1, 3000),
        "gpu_memory_utilization": st.sampled_from([0.5, 0.75, 0.9, 0.97]),
        "kv_pool_gib": st.sampled_from([0.5, 4, 40]),
        "chunk_tokens": st.sampled_from([32, 256, 1024]),
        "max_model_len": st.sampled_from([2048, 8192, 32768]),
        "ram_reserve_gib": st.integers(0, 100),
        "kv_cache_dtype": st.sampled_from(["auto", "fp8"]),
    }.items():
        if draw(st.booleans()):
            values[name] = draw(strategy)
    if cards >= 2 and draw(st.booleans()):
        half = cards // 2
        values["instances"] = [
            {"name": "a", "model": "/m", "gpus": list(range(half))},
            {
                "name": "b",
                "model": "/m",
                "gpus": list(range(half, 2 * half)),
                "profile": draw(st.sampled_from(["gpu", "cpu"])),
            },
        ]
    return values


@st.composite
def cases(draw):
    where = draw(hosts())
    values = draw(wishes(len(where["gpus"])))
    return {
        "where": where,
        "config": draw(st.sampled_from([LLAMA_8B, QWEN_7B, TINY])),
        "release": draw(st.sampled_from([RELEASE, IN_PROCESS])),
        "disk_size_gib": draw(st.sampled_from([4, 100, 1788.5, 7000])),
        **values,
    }


def make(case):
    case = dict(case)
    return plan(case.pop("where"), case.pop("config"), **case)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_accepted_plan_exceeds_ram_vram_or_the_partition(case):
    made = make(case)
    if made["errors"]:
        return
    ram = made["host"]["ram"]
    assert ram["free_gib"] >= -0.05, "rounding only"
    assert (
        ram["reserved_gib"] + ram["engine_gib"] + ram["lmcache_gib"] + ram["buffers_gib"] <= ram["available_gib"] + 0.05
    )
    cards = {card["uuid"]: card for card in case["where"]["gpus"]}
    for one in made["instances"]:
        for card in one["gpus"]:
            assert one["weights_bytes_per_rank"] + one["gpu_kv_pool_bytes_per_rank"] <= usable_gpu_bytes(
                cards[card["uuid"]]
            )
        needed = one["max_model_len"] * one["kv_bytes_per_token_per_rank"]
        assert needed <= one["gpu_kv_pool_bytes_per_rank"], "one request of full length fits"
    sizes = {node["node"]: node["memory_bytes"] / GIB for node in case["where"]["numa"]}
    for server in made["servers"]:
        if server["name"] != "all":
            assert server["l1_gib"] <= sizes[int(server["name"])]
    disk = made["host"]["disk"]
    if disk:
        written = sum(one["quota_gib"] or 0 for one in made["instances"])
        assert written <= disk["quota_gib"] + 0.01
        assert disk["quota_gib"] + disk["floor_gib"] <= disk["partition_gib"] + 0.01
        assert disk["partition_gib"] + disk["spare_gib"] <= disk["size_gib"] + 0.02


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 1024))
def test_more_ram_never_shrinks_a_buffer(case, more_gib):
    small = make(case)
    memory = case["where"]["memory"]
    nodes = len(case["where"]["numa"])
    larger = {
        **case["where"],
        "memory": {key: value + more_gib * GIB for key, value in memory.items()},
        "numa": [
            {**node, "memory_bytes": node["memory_bytes"] + more_gib * GIB // nodes} for node in case["where"]["numa"]
        ],
    }
    large = make({**case, "where": larger})
    if small["errors"]:
        return
    before = {one["name"]: one["buffer_gib_per_gpu"] for one in small["instances"]}
    after = {one["name"]: one["buffer_gib_per_gpu"] for one in large["instances"]}
    assert all(after[name] >= before[name] for name in before)
    assert not {error["code"] for error in large["errors"] if error["code"].startswith("KVF-RAM")}


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_sum_printed_is_the_sum_rendered(case):
    made = make(case)
    services.attach_commands(made)
    rendered = 0.0
    quota = 0.0
    for server in made["servers"]:
        command = server["command"]
        rendered += float(command[command.index("--l1-size-gb") + 1])
        if "--l2-adapter" in command:
            quota += json.loads(command[command.index("--l2-adapter") + 1])["max_capacity_gb"]
    for one in made["instances"]:
        config = one["lmcache_config"]
        if config:
            rendered += config["max_local_cpu_size"] * one["tensor_parallel_size"]
            quota += config.get("max_local_disk_size", 0) * one["tensor_parallel_size"]
        command = one["command"]
        if "--kv-cache-memory-bytes" in command:
            assert int(command[command.index("--kv-cache-memory-bytes") + 1]) == one["gpu_kv_pool_bytes_per_rank"]
    assert abs(rendered - made["host"]["ram"]["buffers_gib"]) < 0.01
    if made["host"]["disk"]:
        assert abs(quota - made["host"]["disk"]["quota_gib"]) < 0.02


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(-0.02, 0.02))
def test_a_second_run_changes_nothing(case, drift):
    first = make(case)
    if first["errors"]:
        return
    memory = case["where"]["memory"]
    moved = {**memory, "available_bytes": int(memory["available_bytes"] * (1 + drift))}
    second = make({**case, "where": {**case["where"], "memory": moved}, "previous": first})
    if second["errors"] or second["host"]["ram"]["free_gib"] < 0:
        return
    shrank = any(
        now["buffer_gib_per_gpu"] < before["buffer_gib_per_gpu"]
        for now, before in zip(second["instances"], first["instances"], strict=True)
    )
    assert shrank or second["fingerprint"] == first["fingerprint"]
    assert not shrank or drift < 0
