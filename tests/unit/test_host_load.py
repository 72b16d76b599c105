"""What the host does during a load, from recorded and from this machine's own /proc."""

import os
from pathlib import Path

import pytest

from kvfleet.core import host_access, host_load
from kvfleet.core.command import CommandResult
from kvfleet.core.findings import KvfleetError

# two readings, two seconds apart, of a disk that read 1000 sectors (512,000 bytes) and was busy for half a second
DISKSTATS = """   7       0 loop0 100 0 2000 50 10 0 400 20 0 {busy} 70 0 0 0 0 0 0
 259       0 nvme0n1 500 2 {sectors} 900 70 3 8000 300 0 {busy} 1200 0 0 0 0 0 0
"""


def reading(folder, sectors, busy, iowait):
    (folder / "diskstats").write_text(DISKSTATS.format(sectors=sectors, busy=busy))
    (folder / "stat").write_text(f"cpu  1000 0 500 8000 {iowait} 0 0 0 0 0\ncpu0 1 2 3\n")
    (folder / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   2048 kB\n")


def quiet(argv, **_options):
    raise AssertionError(f"nothing should be run: {argv}")


def test_rates_come_from_two_readings(tmp_path):
    clock = iter([10.0, 12.0])
    reading(tmp_path, 4000, 1000, 100)
    probe = host_load.HostProbe([], [], False, quiet, clock=lambda: next(clock), proc=tmp_path)
    probe.cache_disks = ["nvme0n1"]
    first = probe()
    assert "cache_disk_read_bytes_per_s" not in first
    assert first["available_bytes"] == 2 * 1024**2
    reading(tmp_path, 5000, 1500, 300)
    second = probe()
    assert second["cache_disk_read_bytes_per_s"] == 256_000
    assert second["cache_disk_busy_percent"] == 25.0
    # only iowait moved: 200 of 200 ticks
    assert second["iowait_percent"] == 100.0
    assert probe.cache_disk_counters() == {"read_bytes": 5000 * 512, "written_bytes": 8000 * 512}


def test_a_disk_of_a_path_is_what_df_says():
    disks = host_load.parse_diskstats(Path("/proc/diskstats").read_text())
    name = host_load.disk_of("/")
    assert name == "" or name in disks
    assert host_load.disk_of("/proc") == ""
    assert host_load.disk_of("/no/such/path") == ""


def test_open_cache_files_are_seen_with_their_device_and_flags(tmp_path):
    cached, other = tmp_path / "model@0@0@hash@salt.data", tmp_path / "log.txt"
    cached.write_bytes(b"\0" * 4096)
    other.write_text("x")
    handles = [os.open(cached, os.O_RDONLY), os.open(other, os.O_RDONLY)]
    try:
        found = host_load.open_cache_files(os.getpid())
        assert [(Path(file.path).name, file.device, file.direct) for file in found] == [
            (cached.name, tmp_path.stat().st_dev, False)
        ]
        try:
            handles.append(os.open(cached, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return
        assert {file.direct for file in host_load.open_cache_files(os.getpid())} == {False, True}
    finally:
        for handle in handles:
            os.close(handle)


def test_a_server_that_is_gone_has_no_files():
    assert host_load.open_cache_files(2**22 + 7) == []


def test_gpus_that_do_not_tell_everything_are_kept():
    # as nvidia-smi prints them; a MIG device has no utilisation
    text = "0, 71235, 98\n1, 1024, [N/A]\n"
    assert host_load.parse_gpus(text) == [
        {"index": 0, "memory_mib": 71235, "utilization_percent": 98},
        {"index": 1, "memory_mib": 1024},
    ]


def test_environment_names_driver_and_gpus_once():
    def run(argv, **_options):
        assert argv[0] == "nvidia-smi"
        return CommandResult(0, "580.159, NVIDIA H200\n580.159, NVIDIA H200\n", "")

    found = host_load.environment(run, with_gpus=True)
    assert found["driver"] == "580.159"
    assert found["gpus"] == ["NVIDIA H200", "NVIDIA H200"]
    assert found["kernel"] == os.uname().release
    assert host_load.environment(quiet, with_gpus=False)["driver"] is None


def test_main_pids_leave_out_what_does_not_run():
    answers = {"a.service": "123\n", "b.service": "0\n"}
    assert host_load.main_pids(
        ["a.service", "b.service"], lambda argv, **_: CommandResult(0, answers[argv[-1]], "")
    ) == [123]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (None, "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104
        ("10.0.0.5", "http://10.0.0.5:8000"),
        ("::", "http://[::1]:8000"),
    ],
)
def test_instances_are_reached_where_they_listen(host, url):
    assert host_access.base_url({"host": host, "port": 8000}) == url


@pytest.mark.parametrize(
    ("instance", "config", "dtype"),
    [
        ({}, '{"torch_dtype": "bfloat16"}', "bfloat16"),
        ({}, '{"dtype": "float16"}', "float16"),
        ({"dtype": "float32"}, "{}", "float32"),
        # vLLM's auto runs a float32 checkpoint in half precision on a GPU
        ({"gpus": [{"index": 0}]}, '{"torch_dtype": "float32"}', "float16"),
        ({"dtype": "float32", "kv_cache_dtype": "fp8"}, "{}", "bfloat16"),
    ],
)
def test_precision_decides_the_tolerance(tmp_path, instance, config, dtype):
    (tmp_path / "config.json").write_text(config)
    assert host_access.engine_dtype({"name": "a", "model": str(tmp_path), **instance}) == dtype


def test_vocabulary_of_a_multimodal_model_is_found(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 151936}}')
    assert host_access.vocabulary_size({"name": "a", "model": str(tmp_path)}) == 151936
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KvfleetError, match="vocab_size"):
        host_access.vocabulary_size({"name": "a", "model": str(tmp_path)})


def test_a_model_without_tokenizer_cannot_make_prompts(tmp_path):
    with pytest.raises(KvfleetError, match="KVF-BENCH-018"):
        host_access.require_tokenizer({"name": "a", "model": str(tmp_path)})
    (tmp_path / "tokenizer.model").touch()
    assert host_access.require_tokenizer({"name": "a", "model": str(tmp_path)}) == str(tmp_path)


def test_only_this_runs_files_count(tmp_path):
    (tmp_path / "0").mkdir()
    for name in ("m@0@0@h1@kvfleet-proof-1.data", "m@0@0@h2@kvfleet-proof-1.data", "m@0@0@h1@user.data"):
        (tmp_path / "0" / name).write_bytes(b"x" * 8192)
    size, count = host_access.tier_files(str(tmp_path), "kvfleet-proof-1")
    assert (size, count) == (16384, 2)
    assert host_access.tier_files(str(tmp_path / "none"), "kvfleet-proof-1") == (0, 0)
    host_access.drop_page_cache(str(tmp_path), "kvfleet-proof-1")
