"""The command lines and units that a plan turns into."""

import copy
import json
import shlex

import pytest

from kvfleet.core import services


def plan(profile="disk", mode="mp", accelerator="cuda"):
    """A plan with one server and one two-GPU instance, written by hand after docs/architecture.md."""
    return {
        "profile": profile,
        "release": {
            "id": "r1",
            "vllm": "0.32.0",
            "lmcache": "0.5.6",
            "mode": mode,
            "connector": "LMCacheMPConnector" if mode == "mp" else "LMCacheConnectorV1",
            "connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector" if mode == "mp" else None,
        },
        "host": {"accelerator": accelerator, "disk": {"quota_gib": 100.0, "floor_gib": 20.0}},
        "paths": {
            "current": "/opt/kvfleet/current",
            "etc": "/etc/kvfleet",
            "state": "/var/lib/kvfleet",
            "cache_mount": "/var/cache/kvfleet",
            "cache_data": "/var/cache/kvfleet/data",
        },
        "servers": [
            {
                "name": "0",
                "instances": ["llama8b"],
                "l1_gib": 40.0,
                "quota_gib": 800.5 if profile == "disk" else None,
                "eviction_trigger_watermark": 0.75,
                "eviction_ratio": 0.2,
                "l2_eviction_trigger_watermark": 0.8,
                "l2_eviction_ratio": 0.1,
                "chunk_tokens": 256,
                "port": 5555,
                "http_port": 8080,
                "shm_name": "kvfleet-0",
            }
        ]
        if mode == "mp" and profile != "gpu"
        else [],
        "instances": [
            {
                "name": "llama8b",
                "model": "/data/models/Llama 3",
                "served_model_name": "llama8b",
                "profile": profile,
                "gpus": [{"index": 0, "uuid": "GPU-aa"}, {"index": 1, "uuid": "GPU-bb"}],
                "tensor_parallel_size": 2,
                "port": 8000,
                "internal_port": 20000,
                "max_model_len": 32768,
                "max_num_seqs": 32,
                "block_size_tokens": 16,
                "gpu_memory_utilization": 0.9,
                "kv_cache_memory_bytes": None,
                "server": "0" if mode == "mp" and profile != "gpu" else None,
                "buffer_gib_per_gpu": 20,
                "quota_gib": 800.5,
                "chunk_tokens": 256,
            }
        ],
    }


def option(command, name):
    return command[command.index(name) + 1]


def test_every_client_of_a_server_has_its_own_thread():
    p = plan()
    other = {**copy.deepcopy(p["instances"][0]), "name": "other", "tensor_parallel_size": 4, "port": 8001}
    elsewhere = {**copy.deepcopy(p["instances"][0]), "name": "elsewhere", "server": "1", "port": 8002}
    p["instances"] += [other, elsewhere]
    p["servers"][0]["instances"] = ["llama8b", "other"]
    services.attach_commands(p)
    # 2 + 4 ranks store and load, two schedulers look up
    assert option(p["servers"][0]["command"], "--max-gpu-workers") == "6"
    assert option(p["servers"][0]["command"], "--max-cpu-workers") == "2"


def test_server_bounds_its_disk_tier():
    p = plan()
    services.attach_commands(p)
    server = p["servers"][0]
    adapter = json.loads(option(server["command"], "--l2-adapter"))
    assert adapter["max_capacity_gb"] == 800.5
    # without this block LMCache only counts (LMCache issue 4725)
    assert adapter["eviction"] == {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.1}
    assert option(server["command"], "--eviction-trigger-watermark") == "0.75"
    assert adapter["base_path"].startswith("/var/cache/kvfleet/data/0/")
    assert option(server["command"], "--l1-size-gb") == "40"
    assert option(server["command"], "--host") == option(server["command"], "--http-host") == "127.0.0.1"


def test_cpu_host_accepts_the_engines_transfer_mode():
    p = plan(accelerator="cpu")
    services.attach_commands(p)
    assert option(p["servers"][0]["command"], "--supported-transfer-mode") == "auto"
    assert option(p["servers"][0]["command"], "--shm-name") == "kvfleet-0"
    gpu = plan()
    services.attach_commands(gpu)
    assert "--shm-name" not in gpu["servers"][0]["command"]


def test_instance_names_its_connector_by_module_path_and_recomputes_lost_blocks():
    p = plan()
    services.attach_commands(p)
    transfer = json.loads(option(p["instances"][0]["command"], "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "lmcache.integration.vllm.lmcache_mp_connector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"]["lmcache.mp.port"] == 5555


def test_profile_gpu_has_no_connector():
    p = plan(profile="gpu")
    services.attach_commands(p)
    assert "--kv-transfer-config" not in p["instances"][0]["command"]


def test_gpus_are_named_by_uuid_in_bus_order():
    p = plan()
    services.attach_commands(p)
    environment = p["instances"][0]["environment"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-aa,GPU-bb"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_ranks_of_an_instance_meet_where_no_other_host_can_speak_to_them():
    p = plan()
    p["instances"][0]["tensor_parallel_size"] = 2
    services.attach_commands(p)
    # the names are NCCL's and PyTorch's own
    environment = p["instances"][0]["environment"]
    assert (environment["NCCL_SOCKET_IFNAME"], environment["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")


def test_explicit_pool_replaces_utilisation():
    p = plan()
    p["instances"][0]["kv_cache_memory_bytes"] = 268435456
    services.attach_commands(p)
    command = p["instances"][0]["command"]
    assert option(command, "--kv-cache-memory-bytes") == "268435456"
    assert "--gpu-memory-utilization" not in command


def test_eager_compiles_nothing():
    # found by a request for logprobs that killed the engine: "InvalidCxxCompiler: No working C++ compiler found"
    p = plan(accelerator="cpu")
    p["instances"][0]["enforce_eager"] = True
    services.attach_commands(p)
    assert p["instances"][0]["environment"]["TORCH_COMPILE_DISABLE"] == "1"
    compiled = plan()
    services.attach_commands(compiled)
    assert "TORCH_COMPILE_DISABLE" not in compiled["instances"][0]["environment"]


def test_an_in_process_plan_without_a_quota_still_tells_its_errors():
    # a disk that is too small leaves no quota; the plan's own error says so
    p = plan(mode="in_process")
    p["instances"][0]["quota_gib"] = None
    services.attach_commands(p)
    assert p["instances"][0]["lmcache_config"]["max_local_disk_size"] == 0


def test_in_process_release_gets_sizes_per_rank():
    p = plan(mode="in_process")
    services.attach_commands(p)
    config = p["instances"][0]["lmcache_config"]
    # both are per rank in LMCache 0.4.4; the quota is the instance's, over two ranks
    assert config["max_local_cpu_size"] == 20
    assert config["max_local_disk_size"] == 800.5 / 2
    assert p["instances"][0]["environment"]["LMCACHE_CONFIG_FILE"].endswith("kvfleet-vllm@llama8b.lmcache.yaml")


def test_only_an_engine_that_holds_lmcache_keeps_the_first_model_runner():
    inside = plan(mode="in_process")
    services.attach_commands(inside)
    assert inside["instances"][0]["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    for other in (plan(), plan(mode="in_process", profile="gpu")):
        services.attach_commands(other)
        assert "VLLM_USE_V2_MODEL_RUNNER" not in other["instances"][0]["environment"]


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("release", "lmcache", "0.5.5"),
        ("release", "vllm", "0.31.0"),
        ("server", "chunk_tokens", 512),
        ("instance", "kv_cache_dtype", "fp8"),
        ("instance", "model", "/data/models/other"),
        ("instance", "dtype", "float32"),
    ],
)
def test_tier_directory_changes_with_all_that_makes_old_kv_unusable(where, key, value):
    before, after = plan(), plan()
    target = {"release": after["release"], "server": after["servers"][0], "instance": after["instances"][0]}[where]
    target[key] = value
    services.attach_commands(before)
    services.attach_commands(after)
    assert before["servers"][0]["base_path"] != after["servers"][0]["base_path"]


def test_tier_directory_survives_what_leaves_kv_usable():
    before, after = plan(), plan()
    after["servers"][0]["l1_gib"] = 64
    after["instances"][0]["max_num_seqs"] = 8
    services.attach_commands(before)
    services.attach_commands(after)
    assert before["servers"][0]["base_path"] == after["servers"][0]["base_path"]


def systemd_words(line):
    """What systemd makes of an ExecStart value: shell-like quoting plus its own ``%%`` and ``$$``."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.replace("\\\n", " "))]


@pytest.mark.parametrize("word", ["plain", "two words", '{"a":"b"}', "100%", "$HOME", "semi;colon", "--flag"])
def test_quoting_gives_the_word_back(word):
    assert systemd_words(services.exec_start(["/bin/x", word])) == ["/bin/x", word]


def test_quoting_refuses_a_line_break():
    with pytest.raises(ValueError, match="control characters"):
        services.systemd_quote("a\nb")


def test_exec_start_is_the_command():
    p = plan()
    services.attach_commands(p)
    for service in (*p["servers"], *p["instances"]):
        assert systemd_words(service["exec_start"]) == service["command"]


def test_attaching_twice_changes_nothing():
    once = plan()
    services.attach_commands(once)
    twice = copy.deepcopy(once)
    services.attach_commands(twice)
    assert twice == once


def test_numa_lines_only_on_hosts_with_nodes():
    p = plan()
    p["servers"][0]["numa_nodes"] = p["instances"][0]["numa_nodes"] = [1]
    services.attach_commands(p)
    assert p["servers"][0]["numa_directives"] == []
    p["host"]["numa_nodes"] = 2
    services.attach_commands(p)
    assert p["servers"][0]["numa_directives"] == ["NUMAPolicy=bind", "NUMAMask=1", "CPUAffinity=numa"]
    assert p["instances"][0]["numa_directives"] == ["NUMAPolicy=preferred", "NUMAMask=1", "CPUAffinity=numa"]
    p["servers"][0]["numa_nodes"] = [0, 1]
    services.attach_commands(p)
    assert p["servers"][0]["numa_directives"][0] == "NUMAPolicy=interleave"


def test_instances_that_share_a_gpu_start_one_after_the_other():
    p = plan()
    p["instances"] += [{**copy.deepcopy(p["instances"][0]), "name": name} for name in ("b", "c")]
    p["instances"][2]["gpus"] = [{"index": 3, "uuid": "GPU-dd"}]
    services.attach_commands(p)
    assert [instance["after"] for instance in p["instances"]] == [[], ["kvfleet-vllm@llama8b.service"], []]


def test_buffer_stands_in_the_environment():
    p = plan()
    services.attach_commands(p)
    assert p["instances"][0]["environment"]["KVFLEET_BUFFER_GIB_PER_GPU"] == "20"


def test_watcher_knows_every_unit_and_the_disk_tier():
    p = plan()
    services.attach_commands(p)
    server, instance = p["watch"]
    assert (server["unit"], server["http_port"], server["mount_point"]) == (
        "kvfleet-lmcache@0.service", 8080, "/var/cache/kvfleet",
    )  # fmt: skip
    assert (instance["unit"], instance["port"], instance["model"]) == ("kvfleet-vllm@llama8b.service", 8000, "llama8b")


def test_own_flags_come_last():
    p = plan()
    p["instances"][0]["engine_flags"] = {"enable-prefix-caching": False}
    services.attach_commands(p)
    assert p["instances"][0]["command"][-1] == "--no-enable-prefix-caching"
