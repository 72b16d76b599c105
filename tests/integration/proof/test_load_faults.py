"""Faults during the load, and what a proof leaves behind: nothing secret, nothing running, no lock."""

import contextlib
import json
import subprocess
import time

import pytest
from proof_host import ProofHost, codes, result_codes
from test_truth_faults import SERVER, VLLM, drop_in, unit_command

pytestmark = pytest.mark.root

KEY, TOKEN = "canary-api-key-5f1c", "canary-token-9b2e"


def wait_for(what: str, condition, limit_s: float = 240) -> None:
    """Until ``condition()`` is true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {limit_s} s"
        time.sleep(1)


def wait_for_load(host: ProofHost, process: subprocess.Popen) -> None:
    """Until the load of a started playbook has requests in flight."""
    waiting = host.background("python3 /root/ask.py wait 300")
    try:
        while waiting.poll() is None:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.5)
    finally:
        waiting.kill()
    assert waiting.returncode == 0


def finished(process: subprocess.Popen, limit_s: float = 480) -> tuple[int, str]:
    """Status and output of a started playbook."""
    try:
        text, _ = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, text


#: a load that lasts long enough to put something into it
LONG_LOAD = {
    "smoke_benchmark_report": False,
    "smoke_benchmark_force": True,
    "smoke_benchmark_profile": "custom",
    "smoke_benchmark_custom_runs": [
        {
            "name": "steady", "dataset": "random", "requests": 120, "input_tokens": 256, "output_tokens": 32,
            "concurrency": 2,
        }
    ],
}  # fmt: skip


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


def test_a_benchmark_that_is_ended_takes_its_load_with_it(host):
    """The message of a refused second one names the process to end."""
    process = host.start("playbooks/benchmark.yml", **LONG_LOAD)
    try:
        wait_for_load(host, process)
        host.ssh("kill -TERM $(cat /run/kvfleet/bench.lock)")
    finally:
        status, _ = finished(process)
    assert status != 0
    tool = "pgrep -f 'vllm[.]entrypoints.cli.main'"
    wait_for("the end of the load", lambda: not host.ssh(tool, check=False).strip(), 30)


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


def test_a_model_without_its_tokenizer(host):
    host.ssh("mkdir -p /root/away && mv /data/models/tiny/tokenizer* /root/away/")
    try:
        status, text = host.prove()
    finally:
        host.ssh("mv /root/away/* /data/models/tiny/")
    assert status != 0
    assert "KVF-BENCH-018" in codes(text), text


def test_nothing_secret_is_kept_and_a_wrong_key_is_named(host):
    secrets = f"[Service]\nEnvironment=VLLM_API_KEY={KEY} HF_TOKEN={TOKEN}\nSetCredential=api_key:{KEY}\n"
    host.put("/root/api-key", KEY, "0600")
    with drop_in(host, VLLM, secrets), contextlib.ExitStack() as ends:
        ends.callback(lambda: host.ssh("rm /root/api-key"))
        status, text = host.prove(smoke_benchmark_api_key="wrong")
        assert status != 0
        assert "KVF-BENCH-002" in codes(text), text
        watcher = host.background(
            f"for i in $(seq 600); do grep -sl '{KEY}\\|{TOKEN}' /proc/[0-9]*/cmdline; sleep 0.5; done"
            " | grep -v self | sort -u | head -5"
        )
        status, text = host.prove("-vvv", smoke_benchmark_api_key=KEY, smoke_benchmark_report=True)
        watcher.kill()
        assert status == 0, text
        # the report's four files and the results on the controller
        for path in [path for path in host.results.rglob("*") if path.is_file()]:
            assert "canary" not in path.read_text(), path
        assert {"report.html", "report.md", "report.junit.xml"} <= {path.name for path in host.results.iterdir()}
        assert KEY not in text
        assert TOKEN not in text
        left = host.ssh(
            f"grep -rlI '{KEY}\\|{TOKEN}' /etc/kvfleet /var/lib/kvfleet /run/kvfleet /tmp /var/tmp /root/.ansible "
            "/var/log 2>/dev/null; journalctl --no-pager -o cat | grep -c '{KEY}\\|{TOKEN}'",
            check=False,
        )
        assert left.strip() == "0"


def test_a_host_that_dies_under_its_proof(deployed):
    """The last one: the host is switched off in the middle, and serves again after the next start."""
    deployed.wait_until_serving()
    before = len(deployed.records())
    process = deployed.start("playbooks/benchmark.yml", **LONG_LOAD)
    try:
        wait_for_load(deployed, process)
        deployed.ssh("systemctl poweroff --force --force", check=False)
    finally:
        status, text = finished(process)
    assert status != 0
    assert "KVF-BENCH-047" in codes(text), text
    assert len(deployed.records()) == before + 1
    deployed.tool("up", deployed.name, "--reuse", "--size", "2G")
    wait_for("the units", lambda: "inactive" not in deployed.ssh(f"systemctl is-active {VLLM}", check=False))
    deployed.wait_until_serving()
    deployed.assert_unharmed()
