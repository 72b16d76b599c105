"""What a proof leaves behind whatever happens to it: nothing secret, nothing running, no lock, a host that serves."""

import contextlib

import pytest
from proof_host import LONG_LOAD, ProofHost, codes, finished, wait_for, wait_for_load
from test_truth_faults import VLLM, drop_in

pytestmark = pytest.mark.root

KEY, TOKEN = "canary-api-key-5f1c", "canary-token-9b2e"
SNAPSHOT = "/etc/kvfleet/proved/snapshot.json"


#: keeps every command line that any process of the host has
WATCH = """
import pathlib, time
seen = set()
with open("/root/seen", "w", buffering=1) as file:
    while True:
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_text(errors="replace").replace(chr(0), " ")
            except OSError:
                continue
            if words not in seen:
                seen.add(words)
                print(words, file=file)
        time.sleep(0.1)
"""


@contextlib.contextmanager
def command_lines(host: ProofHost):
    """The host's command lines are watched while the block runs."""
    host.put("/root/watch.py", WATCH)
    host.ssh("systemd-run --quiet --unit=watch-commands python3 /root/watch.py")
    try:
        yield
    finally:
        host.ssh("systemctl stop watch-commands; systemctl reset-failed watch-commands 2>/dev/null; true")


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
        with command_lines(host):
            status, text = host.prove("-vvv", smoke_benchmark_api_key=KEY, smoke_benchmark_report=True)
        assert status == 0, text
        seen = host.ssh("cat /root/seen")
        assert "vllm.entrypoints.cli.main" in seen
        assert "canary" not in seen
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
        # what a failed rollout returns to holds the units' own drop-ins: for root alone
        assert left.split() == [SNAPSHOT, "0"]
        assert host.ssh(f"stat -c '%a %U' {SNAPSHOT}").split() == ["600", "root"]


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
