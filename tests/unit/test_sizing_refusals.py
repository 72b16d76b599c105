"""What a plan must not pass over in silence, and refusals whose words have to be true."""

import re

import pytest
from planner_hosts import LLAMA_8B, TINY, codes, gpu, host, plan

from kvfleet.core.findings import KvfleetError
from kvfleet.core.planning import make_plan
from kvfleet.core.settings import parse_settings
from kvfleet.matrix import load_matrix


def found(made, code):
    return next(entry for entry in made["errors"] + made["warnings"] if entry["code"] == code)


def lost(reason):
    return {"unavailable": [{"field": "gpus", "reason": reason}]}


def test_a_driver_without_gpus_is_no_cpu_host():
    made = plan(host(0, driver_version="580.1", **lost("a GPU has fallen off the bus")))
    assert "fallen off the bus" in found(made, "KVF-GPU-010")["message"]


def test_gpus_on_the_bus_without_a_driver_are_said():
    made = plan(host(0, **lost("nvidia-smi is not installed; the PCI bus has 2 NVIDIA GPU(s)")), TINY)
    assert "2 NVIDIA GPU(s)" in found(made, "KVF-GPU-011")["message"]
    assert not codes(plan(host(0), TINY)["warnings"]) & {"KVF-GPU-011"}


def test_all_gpus_does_not_shrink_when_one_is_lost():
    where = host(1, **lost("the driver does not show the GPU(s) at 0000:3b:00.0"))
    assert "0000:3b:00.0" in found(plan(where), "KVF-GPU-010")["message"]
    made = plan(where, gpus=[0])
    assert not made["errors"]
    assert "KVF-GPU-011" in codes(made["warnings"])


def test_gpus_of_different_sizes_are_said():
    made = plan(host([gpu(0), gpu(1, mib=24564)]))
    assert found(made, "KVF-GPU-012")["numbers"] == {"smallest_mib": 24564, "largest_mib": 81920}
    assert "KVF-GPU-012" not in codes(plan(host([gpu(0, mib=81559), gpu(1, mib=81920)]))["warnings"])


@pytest.mark.parametrize("broken", [{"chunk_tokens": 100}, {"model": ""}, {"gpus": [0, 0]}, {"gpus": [0, 7]}])
def test_gpus_and_ports_of_a_refused_instance_count(broken):
    first = {"name": "a", "gpus": [0], "port": 8000, **broken}
    made = plan(host(2), instances=[first, {"name": "b", "gpus": [0], "port": 8000}])
    assert "instances a and b" in found(made, "KVF-GPU-008")["message"]
    assert "instance a and by instance b" in found(made, "KVF-NET-001")["message"]


def test_gpus_and_ports_of_an_instance_with_an_unreadable_model_count():
    made = make_plan(
        {
            "kvfleet_profile": "cpu",
            "kvfleet_instances": [
                {"name": "a", "model": "/typo", "gpus": [0], "port": 8000},
                {"name": "b", "model": "/typo2", "gpus": [0], "port": 8000},
            ],
        },
        load_matrix(),
        host(2),
        read_text=lambda _: None,
        list_sizes=lambda _: None,
    )
    assert sorted(codes(made["errors"])) == ["KVF-GPU-008", "KVF-MODEL-001", "KVF-NET-001"]


@pytest.mark.parametrize("length", [1, 15, 17, 1000, 8191, 8193, 131071])
@pytest.mark.parametrize("gpus", [1, 0])
def test_a_length_that_is_no_multiple_of_the_block_is_fine(length, gpus):
    made = plan(host(gpus, ram_gib=512), LLAMA_8B, max_model_len=length)
    assert not made["errors"]
    assert made["instances"][0]["max_model_len"] == length


def test_a_length_above_the_models_own_is_one_error_with_a_true_reason():
    made = plan(host(2), max_model_len=131073)
    assert codes(made["errors"]) == {"KVF-MODEL-017"}


def test_a_pool_of_ones_own_that_is_too_small_is_called_that():
    made = plan(host(2), kv_pool_gib=0.0001)
    assert codes(made["errors"]) == {"KVF-VRAM-004"}
    assert "kvfleet_kv_pool_gib" in found(made, "KVF-VRAM-004")["fix"]
    assert "at most 0" not in found(made, "KVF-VRAM-004")["fix"]


def test_a_buffer_that_holds_no_chunks_is_refused():
    # 256 tokens x 128 KiB over two ranks = 16 MiB a chunk, four of them are 64 MiB
    made = plan(host(2), buffer_gib_per_gpu=0.05)
    assert "16 MiB" in found(made, "KVF-RAM-009")["message"]
    assert "KVF-RAM-009" not in codes(plan(host(2), buffer_gib_per_gpu=0.0625)["errors"])


def test_a_chunk_that_no_request_fills_is_said():
    assert "KVF-MODEL-021" in codes(plan(host(1), max_model_len=128)["warnings"])
    assert "KVF-MODEL-021" not in codes(plan(host(1), max_model_len=256)["warnings"])
    assert "KVF-MODEL-021" not in codes(plan(host(1), max_model_len=128, profile="gpu")["warnings"])


def test_chunks_larger_than_the_gpu_are_not_blamed_on_the_weights():
    made = plan(host([gpu(0, mib=24564)]), chunk_tokens=65536)
    assert "chunks of 65536 tokens" in found(made, "KVF-VRAM-002")["message"]
    assert not made["instances"]


def test_times_as_many_objects_is_the_quotient():
    assert "5.33 times" in found(plan(host(1), chunk_tokens=48), "KVF-MODEL-016")["message"]


def test_own_buffers_are_refused_with_every_term_of_the_sum():
    message = found(plan(host(4, ram_gib=128), buffer_gib_per_gpu=30), "KVF-RAM-002")["message"]
    limit = float(re.search(r"has ([\d.]+) GiB for them", message).group(1))
    terms = [float(number) for number in re.findall(r"[\d.]+(?= (?:GiB, less|for the sys|for vLLM|for LMC))", message)]
    assert len(terms) == 4
    assert terms[0] - sum(terms[1:]) == pytest.approx(limit, abs=0.2)


def test_servers_get_no_port_above_the_last():
    two = [{"name": "a", "gpus": [0]}, {"name": "b", "gpus": [1]}]
    made = plan(host(2, nodes=2), lmcache_port=65535, instances=two)
    assert "65534" in found(made, "KVF-NET-004")["fix"]
    assert "KVF-NET-004" not in codes(plan(host(2, nodes=2), lmcache_port=65534, instances=two)["errors"])


def test_one_server_with_both_ports_equal_says_which_two():
    made = plan(host(1), lmcache_port=8080, lmcache_http_port=8080)
    assert "(requests) and by LMCache server 0 (HTTP)" in found(made, "KVF-NET-001")["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kvfleet_max_num_seqs", float("inf")),
        ("kvfleet_kv_pool_gib", 1e308),
        ("kvfleet_prefill_tokens_per_s", 1e308),
        ("kvfleet_disk_bytes_per_s", 1e308),
        ("kvfleet_buffer_gib_per_gpu", 40 * 1024**3),
        ("kvfleet_chunk_tokens", 10**9),
        ("kvfleet_model", ["/m"]),
        ("kvfleet_model", {"a": 1}),
        ("kvfleet_model", True),
        ("kvfleet_served_model_name", "a\nb"),
        ("kvfleet_host", "not an address"),
        ("kvfleet_host", "0.0.0.0;"),
        ("kvfleet_gpus", True),
        ("kvfleet_gpus", 1.5),
        ("kvfleet_gpus", [""]),
        ("kvfleet_gpus", [None]),
        ("kvfleet_gpus", {"a": 1}),
    ],
)
def test_values_of_a_wrong_kind_are_named(name, value):
    with pytest.raises(KvfleetError) as refused:
        parse_settings({"kvfleet_model": "/m", name: value})
    assert [finding.code for finding in refused.value.findings] == ["KVF-SET-002"]
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("ALL", "all"), ("[0, 1]", ["0", "1"]), ("0,1", ["0", "1"]), ("['GPU-a']", ["GPU-a"]), (1, [1]), ("[]", [])],
)
def test_gpus_as_a_command_line_writes_them(value, wanted):
    assert parse_settings({"kvfleet_gpus": value}).instances[0].get("gpus") == wanted


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "::", "::1", "fe80::1", "gpu-7.example.com", "localhost"])
def test_addresses_that_can_be_listened_on(address):
    assert parse_settings({"kvfleet_host": address}).host == address


@pytest.mark.parametrize(("sessions", "context"), [(0, 5), (5, -1)])
def test_sessions_that_are_none_are_refused(sessions, context):
    with pytest.raises(KvfleetError, match="must be at least 1"):
        make_plan(
            {"kvfleet_model": "/m"}, load_matrix(), host(1), read_text=lambda _: None, list_sizes=lambda _: None,
            sessions=sessions, context=context,
        )  # fmt: skip
