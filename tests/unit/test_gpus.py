"""Reading nvidia-smi, choosing GPUs, peak speeds."""

from pathlib import Path

import pytest
from planner_hosts import gpu

from kvfleet.core import gpus
from kvfleet.core.findings import KvfleetError

DATA = Path(__file__).parent.parent / "data" / "nvidia-smi"


def recorded(name):
    return (DATA / name / "query.csv").read_text()


def test_two_h200_as_recorded():
    first, second = gpus.parse_query(recorded("h200x2-580.159.04"))
    assert (first["index"], first["memory_mib"], first["memory_reserved_mib"]) == (0, 143771, 616)
    assert first["uuid"] == "GPU-a492423d-b271-c68b-7365-f92dbc35b343"
    assert (first["pcie_gen"], first["pcie_width"], first["compute_capability"]) == (5, 16, "9.0")
    assert second["pci_bus_id"] == "0000:00:07.0"
    assert first["driver_version"] == "580.159.04"
    assert first["mig"] is False


def test_eight_a100_of_an_older_driver():
    found = gpus.parse_query(recorded("a100x8-535.104.05"))
    assert [entry["index"] for entry in found] == list(range(8))
    assert found[7]["pci_bus_id"] == "0000:bd:00.0"


def test_driver_that_knows_fewer_fields():
    (card,) = gpus.parse_query(recorded("t4-470.223.02"), gpus.BASIC_FIELDS)
    assert (card["name"], card["memory_mib"]) == ("Tesla T4", 15109)
    assert card["compute_capability"] is None
    assert card["memory_reserved_mib"] is None
    assert gpus.parse_query(recorded("t4-470.223.02")) == [], "rows of another width are no GPUs"


def test_what_a_card_does_not_tell_is_none():
    (card,) = gpus.parse_query(recorded("unified-memory-gb10"))
    assert (card["memory_mib"], card["memory_reserved_mib"], card["mig"]) == (None, None, False)


def test_mig_devices_belong_to_their_gpu():
    listed = gpus.parse_list((DATA / "mig-a100-525.147.05" / "list.txt").read_text())
    devices = listed["GPU-9c73eb7b-8d6d-6c0e-dc13-97873e2ede40"]
    assert [device["name"] for device in devices] == ["1g.10gb", "1g.10gb"]
    assert devices[0]["uuid"].startswith("MIG-a686709d")
    assert listed["GPU-c92e2d5d-4a69-f1cd-4df0-305f8606705a"] == []


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (127, "", "not installed"),
        (18, "Failed to initialize NVML: Driver/library version mismatch", "reboot"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "kernel module"),
        (6, "No devices were found", "no devices"),
        (15, "x\nUnable to determine the device handle for GPU 0000:3B:00.0: Unknown Error", "0000:3B:00.0"),
        (124, "nvidia-smi: no answer within 20 s", "in time"),
        (255, "odd", "status 255: odd"),
    ],
)
def test_failures_are_told_apart(status, text, says):
    assert says in gpus.explain_failure(status, text)


CARDS = [gpu(0), gpu(1), gpu(2, mig=True)]


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ([0, 1], [0, 1]),
        ("1", [1]),
        ("0,1", [0, 1]),
        (["GPU-00000001-aaaa-bbbb-cccc-ddddeeeeffff"], [1]),
        (["gpu-00000001"], [1]),
        ([1, 0], [1, 0]),
    ],
)
def test_choosing(wanted, indices):
    assert [card["index"] for card in gpus.select_gpus(CARDS, wanted, "x")] == indices


def test_choosing_all():
    assert [card["index"] for card in gpus.select_gpus(CARDS[:2], "all", "x")] == [0, 1]


@pytest.mark.parametrize(
    ("wanted", "code", "says"),
    [
        ([3], "KVF-GPU-001", "it has 3: 0"),
        (["GPU-0000000"], "KVF-GPU-001", "several"),
        (["GPU-9"], "KVF-GPU-001", "is not on this host"),
        ([0, "GPU-00000000"], "KVF-GPU-002", "twice"),
        (["MIG-a686709d"], "KVF-GPU-003", "MIG device"),
        ([2], "KVF-GPU-003", "MIG mode"),
        ("all", "KVF-GPU-003", "MIG mode"),
    ],
)
def test_refusals(wanted, code, says):
    with pytest.raises(KvfleetError, match=says) as caught:
        gpus.select_gpus(CARDS, wanted, "x")
    assert caught.value.findings[0].code == code


@pytest.mark.parametrize(
    ("name", "tflops"),
    # dense bf16/fp16 tensor figures of NVIDIA's data sheets
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65),
        ("NVIDIA B200", 2250),
        ("Something New", None),
    ],
)
def test_dense_peaks(name, tflops):
    assert gpus.dense_tflops(name) == tflops
