"""A throw-away host that serves one release, without any network from its first minute, with requests flowing."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import bad_releases
import yaml
from bundle_folder import prepare_bundle_folder

from kvfleet.checkout import ROOT, cache_directory

NAME = "releases"
OLD, NEW = "cpu-0.31.0-0.5.6", "cpu-0.32.0-0.5.6"
BIN = Path(sys.executable).parent
TESTHOST = ROOT / "scripts" / "testhost"
#: kept between the parts, so that the second goes on where the first ended
FOLDER = cache_directory() / "test-releases"
UNIT = "kvfleet-vllm@tiny.service"
STARTED, STOPPING = "39f53479d3a045ac8e11786248231fbf", "de5b426a63be47a7b6ac3eaac82e2f6f"

SETTINGS = {
    "kvfleet_profile": "disk",
    "kvfleet_instances": [
        {"name": "tiny", "model": "/data/models/tiny", "port": 8000, "max_model_len": 4096, "max_num_seqs": 4}
    ],
    "kvfleet_kv_pool_gib": 0.125,
    "kvfleet_dtype": "float32",
    "kvfleet_buffer_gib_per_gpu": 1,
    # the release one step back has known weaknesses
    "kvfleet_allow_advisories": True,
    "engine_source": "bundle",
    "smoke_benchmark_budget_s": 15,
    "smoke_benchmark_cold_limit_s": 15,
    "smoke_benchmark_report": False,
    "cache_disk_measure_speed": "never",
}


def run(*words, timeout_s=1200, check=True, **options):
    done = subprocess.run(
        [str(word) for word in words], text=True, capture_output=True, check=False, timeout=timeout_s, **options
    )
    assert not check or done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def ssh(command, **options):
    return run(TESTHOST, "ssh", NAME, command, **options).stdout


@dataclass
class Traffic:
    """What the client and the host's journal saw from some moment on."""

    requests: list[dict]
    looks: list[dict]
    #: from "systemd stops the instance" to "a token came back", as pairs of seconds since the epoch
    windows: list[tuple[float, float]]
    failed_outside: list[dict] = field(default_factory=list)

    @property
    def good(self):
        return [request for request in self.requests if request["error"] is None]


class Fleet:
    """One host, its inventory, and the commands that a person would type."""

    inventory = FOLDER / "hosts.yml"

    # ------------------------------------------------------------------------------------- making it

    def prepare(self):
        """Everything on the controller: model, bundles, locks, inventory."""
        prepare_bundle_folder(FOLDER)
        bad_releases.build(FOLDER / "bad", FOLDER / "bundles", FOLDER / "locks")
        suite = re.search(r"VERSION_CODENAME=(\S+)", Path("/etc/os-release").read_text())[1]
        bundle = [BIN / "kvfleet", "bundle", "--output", FOLDER / "bundles", "--split", "256M"]
        run(*bundle, OLD, "--debian", suite)
        run(*bundle, NEW)

    def write_inventory(self):
        entry = yaml.safe_load(run(TESTHOST, "inventory", NAME).stdout)
        release = "{{ kvfleet_plan['release']['id'] }}-{{ kvfleet_plan['release']['platform'] }}"
        values = {
            **SETTINGS,
            "cache_disk_format": True,
            "kvfleet_releases_extra": bad_releases.rows(),
            "engine_bundle": str(FOLDER / "bundles"),
            "engine_lock": f"{FOLDER}/locks/{release}.txt",
            "smoke_benchmark_results_dir": str(FOLDER / "results"),
            "host_plan_output_dir": str(FOLDER / "plans"),
        }
        self.inventory.write_text(yaml.safe_dump({"all": {"hosts": entry, "vars": values}}))

    def is_ready(self):
        """Whether an earlier part left the host as this one needs it."""
        listed = json.loads(run(TESTHOST, "list", "--json").stdout)
        if not any(host["name"] == NAME and host["state"] == "running" for host in listed):
            return False
        return self.state()["proved"] == OLD and self.state()["current"] == OLD

    def deploy(self):
        """From nothing, or from where an interrupted deploy ended, to requests that are answered."""
        run(TESTHOST, "up", NAME, "--size", "4G", "--reuse")
        self.cut_network()
        model = cache_directory() / "models" / "tiny"
        run(sys.executable, ROOT / "scripts" / "tinymodel", "--size", "tiny", model)
        self.copy(model, "/data/models/tiny")
        self.write_inventory()
        self.site(OLD)
        self.copy(Path(__file__).with_name("load.py"), "/root/load.py")
        service = "[Service]\nExecStart=/usr/bin/python3 /root/load.py\nRestart=always\n"
        unit = f"{service}[Install]\nWantedBy=multi-user.target\n"
        ssh(f"printf '{unit}' > /etc/systemd/system/load.service; systemctl enable --now load.service")

    def down(self):
        run(TESTHOST, "down", NAME)

    def copy(self, source, target):
        archive = subprocess.Popen(["tar", "-C", str(source.parent), "-cf", "-", source.name], stdout=subprocess.PIPE)
        parent, name = target.rsplit("/", 1)
        assert name == source.name
        ssh(f"mkdir -p {parent} && tar -C {parent} --no-same-owner -xf -", stdin=archive.stdout)
        assert archive.wait() == 0

    def cut_network(self):
        """Answers on the SSH port go out, nothing else does."""
        rules = "ip rule add pref 100 ipproto 6 sport 22 lookup main && ip rule add pref 101 unreachable"
        ssh(f"ip rule | grep -q unreachable || {{ {rules}; }}")

    # ------------------------------------------------------------------------------------- commands

    def site(self, release, *arguments):
        return run(
            BIN / "ansible-playbook", "-i", self.inventory, "site.yml", "-e", f"kvfleet_release={release}", *arguments,
            cwd=ROOT, env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            timeout_s=1800,
        ).stdout  # fmt: skip

    def kvfleet(self, command, *arguments):
        """Exit status and output of a kvfleet command; the output also goes to the test's own."""
        done = run(BIN / "kvfleet", command, "-i", self.inventory, *arguments, check=False, timeout_s=1800)
        print(f"$ kvfleet {command} {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}exit {done.returncode}")
        return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)

    # ------------------------------------------------------------------------------------- looking

    def now(self):
        return float(ssh("date +%s.%N"))

    def state(self):
        """What the host holds: ids in use, proved and complete, directories of the disk tier."""
        text = ssh(
            "cd /; basename $(readlink /opt/kvfleet/current || echo -); cat /var/lib/kvfleet/proved.json || echo '{}';"
            "echo; echo ---; ls /opt/kvfleet/releases; echo ---; ls /var/cache/kvfleet/data/*", check=False,
        )  # fmt: skip
        head, releases, tiers = text.split("---")
        current, proof = head.split("\n", 1)
        return {
            "current": current,
            "proved": json.loads(proof).get("release"),
            "releases": releases.split(),
            "tiers": tiers.split(),
        }

    def traffic(self, since):
        """Requests that began at ``since`` or later, and which of them failed outside a drain window."""
        # the newest request has to begin and end after what just happened
        time.sleep(3)
        entries = [json.loads(line) for line in ssh("cat /root/load.jsonl").splitlines() if line.endswith("}")]
        journal = ssh(f"journalctl --no-pager -o json _PID=1 UNIT={UNIT} --since=@{int(since) - 1}")
        marks = []
        for line in journal.splitlines():
            mark = json.loads(line)
            if mark.get("MESSAGE_ID") in (STARTED, STOPPING):
                marks.append((int(mark["__REALTIME_TIMESTAMP"]) / 1e6, mark["MESSAGE_ID"]))
        windows, opened = [], None
        for moment, kind in sorted(marks):
            if moment < since:
                continue
            if kind == STOPPING:
                opened = opened or moment
            elif opened is not None:
                windows.append((opened, moment))
                opened = None
        assert opened is None, "the instance did not come back"
        seen = Traffic(
            [one for one in entries if one["kind"] == "request" and one["start"] >= since],
            [one for one in entries if one["kind"] == "look" and one["time"] >= since],
            windows,
        )
        seen.failed_outside = [
            one
            for one in seen.requests
            if one["error"] and not any(begin <= one["start"] <= end for begin, end in windows)
        ]
        return seen
