"""Faults that the load shows: requests that fail, tiers that were not measured, limits, two proofs at once."""

import json

import pytest
from proof_host import LONG_LOAD, codes, finished, result_codes, wait_for_load
from test_truth_faults import SERVER, VLLM, drop_in, unit_command

pytestmark = pytest.mark.root


def test_requests_that_fail_in_the_middle(host):
    """The engine dies under load and systemd brings it back: the tool itself ends with status 0."""
    process = host.start("playbooks/benchmark.yml", **LONG_LOAD)
    try:
        wait_for_load(host, process)
        host.ssh(f"systemctl kill --kill-whom=all --signal=KILL {VLLM}")
    finally:
        status, text = finished(process)
    assert status != 0
    assert "KVF-BENCH-021" in codes(text), text
    assert host.records()[-1]["verdict"] == "fail"


def test_a_second_benchmark_and_a_clock_that_jumps(host):
    """The first one passes although the clock of its processes is set back an hour under it."""
    host.put("/root/clock/now", "0")
    host.put(
        "/root/clock/sitecustomize.py",
        "import time\nreal = time.time\ntime.time = lambda: real() + float(open('/root/clock/now').read() or 0)\n",
    )
    host.put("/root/clock/python", '#!/bin/sh\nPYTHONPATH=/root/clock exec python3 "$@"\n', "0755")
    inventory = host.folder / "clock.yml"
    inventory.write_text(
        json.dumps({"all": {"hosts": {host.name: {"ansible_python_interpreter": "/root/clock/python"}}}})
    )
    process = host.start("playbooks/benchmark.yml", "-i", str(inventory), **LONG_LOAD)
    try:
        wait_for_load(host, process)
        host.put("/root/clock/now", "-3600")
        second, said = host.prove()
    finally:
        status, text = finished(process)
    assert second != 0
    assert "KVF-BENCH-024" in codes(said), said
    assert status == 0, text
    runs = host.records()[-1]["load"]["instances"][0]["runs"]
    assert all(run["figures"]["duration_s"] < 240 for run in runs)
    assert all(sample["at_s"] >= 0 for run in runs for sample in run["series"])


def test_a_disk_tier_whose_reads_come_from_memory(host):
    """The server runs without O_DIRECT: every counter says disk, and the device reads next to nothing."""
    buffered = unit_command(host, SERVER, r'"use_odirect":true', '"use_odirect":false')
    with drop_in(host, SERVER, buffered):
        status, text = host.prove(smoke_benchmark_on_degrade="fail")
    assert status != 0
    assert "KVF-BENCH-049" in codes(text), text
    record = host.records()[-1]
    assert record["verdict"] == "degrade"
    from_disk = next(run for run in record["load"]["instances"][0]["runs"] if run["run"]["clear_ram"])
    assert from_disk["tokens"]["tier_disk"] > 0
    assert from_disk["disk"]["served_by"] == "page cache"


def test_a_limit_that_was_set(host):
    status, text = host.prove(smoke_benchmark_ttft_p99_ms=1, smoke_benchmark_requests_per_s=1_000_000)
    assert status != 0
    assert "KVF-BENCH-043" in codes(text), text
    reasons = [reason for reason in host.records()[-1]["reasons"] if reason["code"] == "KVF-BENCH-043"]
    assert {(reason["figure"], reason["limit"]) for reason in reasons} == {
        ("ttft_p99_ms", 1),
        ("requests_per_s", 1_000_000),
    }


def test_ram_that_holds_everything(host):
    """A host that may not be cleared: the disk tier stored and was never asked."""
    status, text = host.prove(smoke_benchmark_may_clear=False, smoke_benchmark_on_degrade="fail")
    assert status != 0
    assert "KVF-BENCH-048" in codes(text), text
    record = host.records()[-1]
    assert record["verdict"] == "degrade"
    assert "KVF-BENCH-048" in result_codes(record)
