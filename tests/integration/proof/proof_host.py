"""The throw-away host that the faults are injected into, and what the tests ask of it."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
RELEASE = "cpu-0.32.0-0.5.6"
TESTHOST = ROOT / "scripts" / "testhost"
BIN = Path(sys.executable).parent
UNITS = ("kvfleet-lmcache@0.service", "kvfleet-vllm@tiny.service")

#: the demo's settings with the smallest model; pool and prompts short enough that a proof takes seconds
SETTINGS = {
    "kvfleet_profile": "disk",
    "kvfleet_dtype": "float32",
    "kvfleet_kv_pool_gib": 0.02,
    "kvfleet_buffer_gib_per_gpu": 0.5,
    "kvfleet_instances": [
        {"name": "tiny", "model": "/data/models/tiny", "port": 8000, "max_model_len": 2048, "max_num_seqs": 4}
    ],
    "engine_source": "bundle",
    "cache_disk_format": True,
    "host_plan_output_dir": "",
    "smoke_benchmark_budget_s": 15,
    "smoke_benchmark_cold_limit_s": 10,
    "smoke_benchmark_settle_limit_s": 12,
}


#: asks the instance on the host, which has no curl: "generate" prints the tokens of a completion, "wait" ends as soon
#: as the load's tool has requests running
ASK = """
import json, pathlib, subprocess, sys, time, urllib.request
key = pathlib.Path("/root/api-key")
headers = {"Content-Type": "application/json"}
if key.exists():
    headers["Authorization"] = "Bearer " + key.read_text().strip()

def ask(path, data=None):
    request = urllib.request.Request("http://127.0.0.1:8000" + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()

if sys.argv[1] == "generate":
    body = {"model": "tiny", "prompt": "still there?", "max_tokens": 4, "ignore_eos": True}
    print(json.loads(ask("/v1/completions", json.dumps(body).encode()))["usage"]["completion_tokens"])
    sys.exit()
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    tool = subprocess.run(["pgrep", "-f", "vllm[.]entrypoints.cli.main"], stdout=subprocess.DEVNULL)
    rows = [line for line in ask("/metrics").splitlines() if line.startswith("vllm:num_requests_running")]
    if tool.returncode == 0 and sum(float(row.split()[-1]) for row in rows) > 0:
        sys.exit()
    time.sleep(0.2)
sys.exit("no load came")
"""


class ProofHost:
    """One host; ``folder`` holds its inventory and the results of its proofs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.results = folder / "results"

    # -- the host itself ----------------------------------------------------------------------------------------------

    def tool(self, *words: str, **options) -> str:
        """One command of scripts/testhost."""
        return subprocess.run([TESTHOST, *words], text=True, capture_output=True, check=True, **options).stdout

    def ssh(self, command: str, check: bool = True) -> str:
        """Output of a shell command on the host."""
        done = subprocess.run([TESTHOST, "ssh", self.name, command], text=True, capture_output=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def background(self, command: str) -> subprocess.Popen:
        """A shell command on the host that goes on while the test does something else."""
        return subprocess.Popen([TESTHOST, "ssh", self.name, command], stdout=subprocess.PIPE, text=True)

    def put(self, path: str, text: str, mode: str = "0644") -> None:
        """Write a file on the host."""
        folder, name = shlex.quote(str(Path(path).parent)), shlex.quote(path)
        command = f"mkdir -p {folder} && cat > {name} && chmod {mode} {name}"
        subprocess.run([TESTHOST, "ssh", self.name, command], text=True, input=text, check=True)

    def up(self) -> None:
        """Start it with its model and the release's bundle; a running one stays."""
        subprocess.run([BIN / "kvfleet", "bundle", RELEASE], check=True, stdout=subprocess.DEVNULL)
        self.tool("up", self.name, "--reuse", "--size", "2G")
        self.folder.mkdir(parents=True, exist_ok=True)
        model = self.folder / "model"
        subprocess.run([sys.executable, ROOT / "scripts" / "tinymodel", "--size", "tiny", model], check=True)
        self.put("/root/ask.py", ASK)
        self.ssh("mkdir -p /data/models/tiny")
        with subprocess.Popen(["tar", "-C", model, "-cf", "-", "."], stdout=subprocess.PIPE) as archive:
            self.tool(
                "ssh", self.name, "tar -C /data/models/tiny --no-same-owner -xf -", stdin=archive.stdout
            )  # fmt: skip
        entry = yaml.safe_load(self.tool("inventory", self.name))
        values = {**SETTINGS, "smoke_benchmark_results_dir": str(self.results)}
        inventory = {"all": {"hosts": {self.name: {**entry[self.name], **values}}}}
        (self.folder / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False))

    def down(self) -> None:
        """Remove it and everything of it."""
        self.tool("down", self.name)

    # -- Ansible ------------------------------------------------------------------------------------------------------

    def play(self, playbook: str, *arguments: str, limit_s: float = 480, **values) -> tuple[int, str]:
        """Status and output of a playbook of the product; ``values`` are extra variables."""
        return finished(self.start(playbook, *arguments, **values), limit_s)

    def start(self, playbook: str, *arguments: str, **values) -> subprocess.Popen:
        """The same, not waited for."""
        environment = {
            **os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        command = [
            str(BIN / "ansible-playbook"), "-i", str(self.folder / "hosts.yml"), "-e", json.dumps(values), *arguments,
            playbook,
        ]  # fmt: skip
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def prove(self, *arguments: str, **values) -> tuple[int, str]:
        """Run the proof alone, although nothing may have changed since the last one."""
        values = {"smoke_benchmark_report": False, "smoke_benchmark_force": True, **values}
        return self.play("playbooks/benchmark.yml", *arguments, **values)

    # -- what came out ------------------------------------------------------------------------------------------------

    def records(self) -> list[dict]:
        """All results so far, oldest first."""
        found = [json.loads(path.read_text()) for path in (self.results / self.name).glob("*.json")]
        return sorted(found, key=lambda record: record["time"])

    def wait_until_serving(self) -> None:
        """Wait until both units are active, which they are once a token came back; forget restarts of a fault."""
        self.ssh(f"systemctl start {' '.join(UNITS)} && systemctl reset-failed {' '.join(UNITS)}")
        states = self.ssh(f"systemctl is-active {' '.join(UNITS)}").split()
        assert states == ["active"] * len(UNITS)

    def assert_unharmed(self) -> None:
        """The service is as good as before: it generates, nothing of a benchmark runs, its lock is free."""
        assert self.ssh("python3 /root/ask.py generate").strip() == "4"
        assert self.ssh("ls -d /tmp/kvfleet-bench-* 2>/dev/null", check=False) == ""
        assert self.ssh("pgrep -fa 'vllm[.]entrypoints.cli.main'", check=False) == ""
        self.ssh("test ! -e /run/kvfleet/bench.lock || flock --nonblock /run/kvfleet/bench.lock true")


def codes(text: str) -> set[str]:
    """The benchmark's codes that an output names."""
    return set(re.findall(r"KVF-BENCH-\d{3}", text))


def result_codes(record: dict) -> set[str]:
    """The codes of a result's reasons."""
    return {reason["code"] for reason in record["reasons"]}


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
    """Status and output of a started playbook; one that takes too long is ended and shows how far it came."""
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"not done within {limit_s:g} s:\n{text}") from None
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
