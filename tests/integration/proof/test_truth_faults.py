"""Faults of the running service that the truth checks catch: each injected for real, each with its code."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from proof_host import ProofHost, codes, result_codes

pytestmark = pytest.mark.root

HERE = Path(__file__).parent
VLLM, SERVER = "kvfleet-vllm@tiny", "kvfleet-lmcache@0"
UNIT = "/etc/systemd/system/{}.service"
DROP_IN = "/etc/systemd/system/{}.service.d/fault.conf"


def tier(host: ProofHost) -> str:
    """Directory of the disk tier's files."""
    return host.ssh("ls -d /var/cache/kvfleet/data/0/*").strip()


def fails_with(host: ProofHost, *expected: str, **values) -> dict:
    """Prove; the play must stop at a verdict that names ``expected``, and the result must be kept."""
    before = len(host.records())
    status, text = host.prove(**values)
    assert status != 0, text
    assert codes(text) >= set(expected), text
    records = host.records()
    assert len(records) == before + 1
    assert records[-1]["verdict"] == "fail"
    assert result_codes(records[-1]) >= set(expected)
    # the proof that stood is not replaced by a failure
    assert json.loads(host.ssh("cat /var/lib/kvfleet/proved.json"))["verdict"] in ("pass", "degrade")
    return records[-1]


def unit_command(host: ProofHost, unit: str, leave_out: str, instead: str = "") -> str:
    """A drop-in's text that starts ``unit`` with ``instead`` for what matches ``leave_out`` in its command line."""
    text = host.ssh(f"cat {UNIT.format(unit)}")
    start = re.search(r"^ExecStart=(.*?[^\\])$", text, re.MULTILINE | re.DOTALL)[1]
    changed = re.sub(leave_out, instead, start)
    assert changed != start
    return f"[Service]\nExecStart=\nExecStart={changed}\n"


@contextlib.contextmanager
def drop_in(host: ProofHost, unit: str, text: str):
    """A drop-in of ``unit`` while the block runs; the unit runs with it, and without it afterwards."""
    host.put(DROP_IN.format(unit), text)
    host.ssh(f"systemctl daemon-reload && systemctl restart {unit} && systemctl start {VLLM}")
    try:
        yield
    finally:
        host.ssh(f"rm -r {DROP_IN.format(unit).rsplit('/', 1)[0]} && systemctl daemon-reload")
        host.ssh(f"systemctl restart {unit} && systemctl start {VLLM}")


@contextlib.contextmanager
def saboteur(host: ProofHost, action: str):
    """Cache files are damaged as they are written."""
    host.put("/root/saboteur.py", (HERE / "saboteur.py").read_text())
    host.ssh(f"systemd-run --quiet --unit=saboteur python3 /root/saboteur.py {action} {tier(host)}")
    try:
        yield
    finally:
        host.ssh("systemctl stop saboteur; systemctl reset-failed saboteur 2>/dev/null; true")


def outer_pids(host: ProofHost, word: str) -> list[int]:
    """Processes of the host with ``word`` in their command line, as this machine numbers them."""
    inner = set(host.ssh(f"pgrep -f -- {word}").split())
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            numbers = re.search(r"^NSpid:\t\d+\t(\d+)$", status.read_text(), re.MULTILINE)
            command = (status.parent / "cmdline").read_text().replace("\0", " ")
            if numbers and numbers[1] in inner and word in command:
                found.append(int(status.parent.name))
    return found


@contextlib.contextmanager
def slow_reads(host: ProofHost, bytes_per_s: int):
    """The LMCache server may read this much of the cache disk a second; the kernel of this machine throttles it."""
    source = host.ssh("findmnt --noheadings --output SOURCE /var/cache/kvfleet").strip()
    # limits hold for whole disks only
    disk = host.ssh(f"lsblk --noheadings --output PKNAME {source}").strip()
    device = host.ssh(f"cat /sys/class/block/{disk}/dev").strip()
    pids = outer_pids(host, "bin/lmcache")
    assert pids
    root = Path("/sys/fs/cgroup/blkio")
    if root.is_dir():
        group = root / f"{host.name}-slow-reads"
        group.mkdir()
        try:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_s}")
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
            yield
        finally:
            for pid in (group / "cgroup.procs").read_text().split():
                (root / "cgroup.procs").write_text(pid)
            group.rmdir()
        return
    # one hierarchy: the server's own group takes the limit
    own = Path("/proc", str(pids[0]), "cgroup").read_text().rpartition("::")[2].strip()
    limit = Path("/sys/fs/cgroup", own.lstrip("/"), "io.max")
    limit.write_text(f"{device} rbps={bytes_per_s}")
    try:
        yield
    finally:
        limit.write_text(f"{device} rbps=max")


def test_an_instance_that_is_down_and_one_whose_connector_is_off(host):
    """First nothing answers; then vLLM and LMCache both run and are healthy, and nothing is ever stored."""
    host.ssh(f"systemctl stop {VLLM}")
    # nothing changed since the proof, but it does not answer: the verdict is kept all the same
    fails_with(host, "KVF-BENCH-001", "KVF-BENCH-030", smoke_benchmark_force=False)
    without = unit_command(host, VLLM, r" \\\n\s+--kv-transfer-config '[^\n]*'")
    with drop_in(host, VLLM, without):
        # the drop-in is part of the fingerprint, so the proof is due without being forced
        record = fails_with(host, "KVF-BENCH-006", smoke_benchmark_force=False)
    assert record["truth"]["instances"][0]["hit_tokens"]["ram"] == 0


def test_a_server_that_runs_without_its_disk_tier(host):
    """Everything is active and healthy, prompts are served from RAM: only nothing ever reaches the disk."""
    without = unit_command(host, SERVER, r" \\\n\s+--l2-adapter '[^\n]*'")
    with drop_in(host, SERVER, without):
        record = fails_with(host, "KVF-BENCH-007", "KVF-BENCH-009", "KVF-BENCH-010", smoke_benchmark_force=False)
    hits = record["truth"]["instances"][0]["hit_tokens"]
    assert hits["ram"] > 0
    assert hits["disk"] == 0


def test_a_disk_tier_that_may_not_write(host):
    folder = tier(host)
    host.ssh(f"chown root:root {folder} && chmod 0555 {folder}")
    try:
        fails_with(host, "KVF-BENCH-010", "KVF-BENCH-009")
    finally:
        host.ssh(f"chown kvfleet:kvfleet {folder} && chmod 0750 {folder}")


def test_a_file_system_that_refuses_o_direct(host):
    folder = tier(host)
    host.ssh(f"mount -t ramfs none {folder} && chown kvfleet:kvfleet {folder}")
    try:
        probe = f"dd if=/dev/zero of={folder}/x bs=4k count=1 oflag=direct 2>&1; rm -f {folder}/x"
        refused = host.ssh(probe, check=False)
        assert "Invalid argument" in refused
        fails_with(host, "KVF-BENCH-009")
    finally:
        host.ssh(f"umount --lazy {folder}")


def test_truncated_cache_files(host):
    with saboteur(host, "truncate"):
        record = fails_with(host, "KVF-BENCH-007")
    assert record["truth"]["instances"][0]["hit_tokens"]["disk"] == 0


def test_damaged_cache_files(host):
    with saboteur(host, "flip"):
        fails_with(host, "KVF-BENCH-008")


def test_a_slow_disk(host):
    with slow_reads(host, 1_000_000):
        # slower than computing, and slower than the deploy's own proof was
        record = fails_with(host, "KVF-BENCH-042", "KVF-BENCH-044")
    times = record["truth"]["instances"][0]["ttft_ms"]
    assert times["disk"] > times["cold"] / 1.3


def test_stale_hits_of_an_earlier_run(host):
    """Two clones of one machine draw the same random numbers: the second run meets the first one's prompts."""
    host.put("/root/clone/sitecustomize.py", "import random\nrandom.SystemRandom = lambda: random.Random(20261129)\n")
    host.put("/root/clone/python", '#!/bin/sh\nPYTHONPATH=/root/clone exec python3 "$@"\n', "0755")
    inventory = host.folder / "clone.yml"
    inventory.write_text(
        json.dumps({"all": {"hosts": {host.name: {"ansible_python_interpreter": "/root/clone/python"}}}})
    )
    try:
        status, text = host.play(str(HERE / "truth.yml"), "-i", str(inventory))
        assert status == 0, text
        before = len(host.records())
        status, text = host.prove("-i", str(inventory))
        assert status != 0
        assert "KVF-BENCH-005" in codes(text), text
        assert len(host.records()) == before + 1
    finally:
        host.ssh("rm -r /root/clone")


def test_another_model_name_than_the_plans(host):
    another = unit_command(host, VLLM, r"--served-model-name \S+", "--served-model-name another")
    # its start waits for an answer under the plan's name
    ready = re.search(r"^ExecStartPost=.*ready-instance .*$", host.ssh(f"cat {UNIT.format(VLLM)}"), re.MULTILINE)[0]
    another += "ExecStartPost=\n" + re.sub(r"(ready-instance \S+ \S+) \S+", r"\1 another", ready) + "\n"
    with drop_in(host, VLLM, another):
        fails_with(host, "KVF-BENCH-003", smoke_benchmark_force=False)


def test_a_plan_that_was_not_deployed_is_not_proved(host):
    """The inventory was edited and not deployed: nothing is measured, and the record stays one of what runs."""
    changed = [{"name": "tiny", "model": "/data/models/tiny", "port": 8000, "max_model_len": 2048, "max_num_seqs": 4}]
    before, proved = len(host.records()), host.ssh("cat /var/lib/kvfleet/proved.json")
    status, text = host.prove(kvfleet_instances=[{**changed[0], "served_model_name": "another"}])
    assert status != 0
    assert codes(text) == {"KVF-BENCH-051"}, text
    assert "--served-model-name" in text
    assert len(host.records()) == before
    assert host.ssh("cat /var/lib/kvfleet/proved.json") == proved
