#!/usr/bin/env -S sh -c 'exec "$(dirname "$(readlink -f "$0")")/../.venv/bin/python" "$0" "$@"'
"""Measure what a fleet of N hosts costs the controller: planning, and a run in which nothing changes.

Each of the N hosts of the inventory is a real local connection whose Python runs in a folder of its own (chroot with
the machine's /usr), with recorded facts and a state that site.yml's own roles wrote. Nothing of the machine is changed;
two things are not real: systemctl says that every unit runs, and one small HTTP server answers for all engines.

Told apart are the controller (kvfleet, Ansible and its workers) and the module processes, which on a real fleet run on
the hosts. Needs root. Prints one line of JSON a step and a Markdown table at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvfleet.core import engine
from kvfleet.core.lockfile import parse_lock
from kvfleet.matrix import find_release, load_matrix

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


RELEASE = "cpu-0.32.0-0.5.6"
#: a host with 64 GiB of RAM and eight cores, as the module host_facts describes one
HOST: dict[str, Any] = {
    "hostname": "sim", "gpus": [], "driver_version": None,
    "memory": {"total_bytes": 64 * 1024**3, "available_bytes": 60 * 1024**3},
    "numa": [{"node": 0, "cpus": "0-7", "memory_bytes": 64 * 1024**3}],
    "cpus": 8, "disks": [], "shm_bytes": 32 * 1024**3, "python": "3.11.2", "pythons": ["3.11"], "glibc": "2.36",
    "kernel": "6.1.0", "os": "Debian GNU/Linux 12 (bookworm)", "os_id": "debian", "os_version": "12",
    "machine": "x86_64", "kvfleet": {"units": ["kvfleet-vllm@tiny.service"], "memory_bytes": 0}, "listeners": [],
    "unavailable": [],
}  # fmt: skip
SYSTEMCTL = """#!/bin/sh
# every unit is loaded, enabled and runs; what a start would do is nothing here, and enabling makes the links alone
case "$*" in
  enable*) shift
    for unit in "$@"; do
      for other in $(sed -n 's/^WantedBy=//p' "/etc/systemd/system/$unit"); do
        mkdir -p "/etc/systemd/system/$other.wants"
        ln -sf "/etc/systemd/system/$unit" "/etc/systemd/system/$other.wants/$unit"
      done
    done ;;
  *is-enabled*) echo enabled ;;
  *show*) printf 'Id=x\\nLoadState=loaded\\nActiveState=active\\nSubState=running\\nUnitFileState=enabled\\n'
          printf 'NeedDaemonReload=no\\nNRestarts=0\\nMainPID=1\\nInvocationID=\\nResult=success\\n' ;;
esac
"""
#: the first run of the real roles on the first host, and the record that a proof would leave
BUILD = """
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.include_role: {name: host_plan}
    - ansible.builtin.include_role: {name: service_user}
    - ansible.builtin.include_role: {name: engine, tasks_from: activate}
      vars:
        __engine_state: {install: false, path: "{{ kvfleet_plan['paths']['releases'] }}/%(release)s"}
    - ansible.builtin.include_role: {name: lmcache_server}
    - ansible.builtin.include_role: {name: vllm_instance}
    - ansible.builtin.include_role: {name: host_plan, tasks_from: record.yml}
    - proof_state:
        plan: "{{ kvfleet_plan }}"
        record: {verdict: pass, time: "2026-01-01T00-00-00Z", release: "%(release)s", profile: smoke, line: simulated}
    - host_traffic: {state: serving, plan: "{{ kvfleet_plan }}"}
"""


class Engine(BaseHTTPRequestHandler):
    """Answers for every engine of the fleet."""

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Models, health and metrics."""
        models = {"data": [{"id": "tiny", "root": "/data/models/tiny"}]}
        self._send(b"\n" if self.path != "/v1/models" else json.dumps(models).encode())

    def do_POST(self) -> None:
        """A completion of as many tokens as were asked for."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked.get("max_tokens", 1)
        answer = {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": tokens}}
        self._send(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Fleet:
    """N folders that are hosts, and an inventory of them."""

    def __init__(self, folder: Path, hosts: int, port: int, forks: int) -> None:
        self.folder, self.count, self.port, self.forks = folder, hosts, port, forks
        self.names = [f"sim{number:04d}" for number in range(1, hosts + 1)]
        self.cpu_log = folder / "modules.cpu"
        self.inventory = folder / "inventory"

    def root(self, name: str) -> Path:
        """The folder that is the host's ``/``."""
        return self.folder / "hosts" / name

    def skeleton(self, root: Path) -> None:
        """What a chroot needs, and the fakes."""
        for name in ("etc/systemd/system", "var/lib", "run/kvfleet", "tmp", "proc", "dev", "usr", "opt", "root", "sys"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if not (root / name).is_symlink():
                (root / name).symlink_to(f"usr/{name}")
        for name in (
            "passwd",
            "group",
            "shadow",
            "gshadow",
            "login.defs",
            "nsswitch.conf",
            "ld.so.cache",
            "machine-id",
        ):
            source = Path("/etc") / name
            if source.exists():
                shutil.copy(source, root / "etc" / name)
        fakes = root / "opt" / "fakes"
        fakes.mkdir()
        (fakes / "systemctl").write_text(SYSTEMCTL)
        (fakes / "journalctl").write_text("#!/bin/sh\n")
        for fake in fakes.iterdir():
            fake.chmod(0o755)
        model = root / "data" / "models" / "tiny"
        model.mkdir(parents=True)
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 3072,
            "vocab_size": 1024, "torch_dtype": "float32", "max_position_embeddings": 8192,
        }  # fmt: skip
        (model / "config.json").write_text(json.dumps(config))

    def mount(self, root: Path) -> None:
        """The machine's programs, read-only, and its processes."""
        for source, name in (("/usr", "usr"), ("/proc", "proc"), ("/dev", "dev")):
            subprocess.run(["mount", "--bind", source, root / name], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", root / "usr"], check=True)

    def release(self, root: Path) -> None:
        """A complete, empty release directory, as an installation leaves it."""
        row = find_release(load_matrix(None, None), RELEASE).row
        lock_file = ROOT / "locks" / f"{RELEASE}-cp311-x86_64.txt"
        lock = parse_lock(lock_file.read_text(), lock_file.name)
        folder = root / "opt" / "kvfleet" / "releases" / RELEASE
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to("/usr/bin/python3")
        marker = {
            "schema": 1, "release": RELEASE, "lock_sha256": lock.digest, "gates_sha256": engine.gates_digest(row),
            "distributions": [], "gates": [], "installed": "2026-01-01T00:00:00Z",
        }  # fmt: skip
        (folder / engine.MARKER).write_text(json.dumps(marker))

    def interpreter(self, root: Path) -> Path:
        """Python inside the host; each start adds its CPU seconds to the log."""
        path = root.parent / f"{root.name}.python"
        path.write_text(
            "#!/bin/sh\n"
            f'PATH=/opt/fakes:/usr/sbin:/usr/bin TMPDIR=/tmp chroot {root} /usr/bin/python3 "$@"\n'
            "rc=$?\n"
            # not in a pipe: a subshell has no children of its own
            f"times >> {self.cpu_log}\n"
            "exit $rc\n"
        )
        path.chmod(0o755)
        return path

    def write_inventory(self, names: list[str], folder: Path) -> Path:
        """An inventory of the hosts ``names``."""
        (folder / "group_vars").mkdir(parents=True, exist_ok=True)
        facts = self.folder / "host.json"
        facts.write_text(json.dumps(HOST))
        hosts = {name: {"ansible_python_interpreter": str(self.interpreter(self.root(name)))} for name in names}
        (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        values = {
            "ansible_connection": "local", "ansible_user": "root", "ansible_pipelining": True,
            "ansible_remote_tmp": str(self.folder / "tmp"),
            "kvfleet_host_facts_file": str(facts), "kvfleet_profile": "cpu", "kvfleet_release": RELEASE,
            "kvfleet_dtype": "float32", "kvfleet_kv_pool_gib": 1, "kvfleet_buffer_gib_per_gpu": 2,
            "kvfleet_instances": [{"name": "tiny", "model": "/data/models/tiny", "port": self.port,
                                   "max_model_len": 4096, "max_num_seqs": 4}],
            "engine_packages": [], "rollout_allow_recorded": True,
            "smoke_benchmark_report": False, "vllm_instance_settle_s": 0,
            # one server of this process answers for all engines, so no unit holds a socket
            "vllm_instance_listeners": [],
        }  # fmt: skip
        (folder / "group_vars" / "all.json").write_text(json.dumps(values))
        return folder

    def build(self) -> None:
        """Deploy the first host with the real roles, then copy what they wrote."""
        first = self.names[0]
        root = self.root(first)
        self.skeleton(root)
        self.release(root)
        self.mount(root)
        # Ansible puts files there that modules inside have to see
        outside, inside = self.folder / "tmp", root / str(self.folder / "tmp").lstrip("/")
        outside.mkdir(exist_ok=True)
        inside.mkdir(parents=True)
        subprocess.run(["mount", "--bind", outside, inside], check=True)
        inventory = self.write_inventory([first], self.folder / "first")
        (self.folder / "build.yml").write_text(BUILD % {"release": RELEASE})
        environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))
        built = subprocess.run(
            [BIN / "ansible-playbook", "-i", inventory, self.folder / "build.yml"],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if built.returncode:
            sys.exit(
                f"simulate-fleet: the first host could not be built:\n{built.stdout[-3000:]}{built.stderr[-2000:]}"
            )
        subprocess.run(["umount", inside], check=True)
        self.start_records(root)
        for name in self.names[1:]:
            target = self.root(name)
            target.mkdir(parents=True)
            parts = ["etc", "var", "run", "opt", "data", "bin", "sbin", "lib", "lib64"]
            subprocess.run(["cp", "-a", *(root / part for part in parts), target], check=True)
            for part in ("tmp", "proc", "dev", "usr", "root", "sys"):
                (target / part).mkdir()
            self.mount(target)
        self.write_inventory(self.names, self.inventory)

    def start_records(self, root: Path) -> None:
        """What the units' own start would have written: the digest that each was started with."""
        helper = "/opt/kvfleet/libexec/kvfleet-unit"
        units = root / "etc/systemd/system"
        for unit in (*units.glob("kvfleet-*@*.service"), units / "kvfleet-watch.timer"):
            digest = subprocess.run(
                ["chroot", root, "/usr/bin/python3", "-I", helper, "digest", unit.name],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            (root / "run" / "kvfleet" / f"{unit.name}.digest").write_text(digest)

    def remove(self) -> None:
        """Unmount everything below the folder, then delete it."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for point in reversed([point for point in mounts if point.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", point], check=False)
        left = [line for line in Path("/proc/mounts").read_text().splitlines() if f" {self.folder}/" in line]
        if left:
            sys.exit(
                f"simulate-fleet: {len(left)} mounts are still busy below {self.folder}; unmount them, then delete it"
            )
        shutil.rmtree(self.folder)


class MemoryWatch(threading.Thread):
    """The largest sum of proportional memory of the controller's processes, sampled twice a second."""

    def __init__(self, root_pid: int) -> None:
        super().__init__(daemon=True)
        self.root_pid, self.peak_bytes = root_pid, 0
        self.done = threading.Event()

    def run(self) -> None:
        """Sample until told to stop."""
        while not self.done.wait(0.5):
            self.peak_bytes = max(self.peak_bytes, self.sample())

    def sample(self) -> int:
        """Bytes of kvfleet and every ansible process below it; a page that several share counts once."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        ours = {self.root_pid}
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in ours} - ours
            ours |= more
            grown = bool(more)
        total = 0
        for pid in ours:
            with contextlib.suppress(OSError, ValueError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"/bin/ansible-playbook" in command or b"/bin/kvfleet" in command:
                    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                        if line.startswith("Pss:"):
                            total += int(line.split()[1]) * 1024
        return total


def module_seconds(log: Path) -> float:
    """CPU seconds of all module processes: every second line of sh's ``times``, its children's user and system time."""
    total = 0.0
    for line in log.read_text().splitlines()[1::2] if log.exists() else []:
        for word in line.split():
            minutes, _, seconds = word.rstrip("s").partition("m")
            total += 60 * int(minutes) + float(seconds)
    return total


def measure(fleet: Fleet, action: str) -> dict[str, Any]:
    """One run of ``kvfleet ACTION`` over all hosts."""
    fleet.cpu_log.unlink(missing_ok=True)
    out = fleet.folder / "out.jsonl"
    environment = dict(os.environ, ANSIBLE_FORKS=str(fleet.forks), COLUMNS="200")
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with out.open("w") as stream:
        child = subprocess.Popen(
            [str(BIN / "kvfleet"), action, "-i", str(fleet.inventory), "--json"],
            cwd=ROOT, env=environment, stdout=stream,
        )  # fmt: skip
        watch = MemoryWatch(child.pid)
        watch.start()
        status = child.wait()
    wall = time.monotonic() - began
    watch.done.set()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    modules = module_seconds(fleet.cpu_log)
    result = json.loads(out.read_text().splitlines()[-1])
    tasks = [host["tasks"] for host in result["hosts"].values()]
    changed = sum(len(host["changed"]) for host in result["hosts"].values())
    return {
        "action": action, "hosts": fleet.count, "exit": status, "changed": changed,
        "tasks_min": min(tasks), "tasks_max": max(tasks), "wall_s": round(wall, 1),
        "controller_cpu_s": round(cpu - modules, 1),
        "controller_cpu_s_per_host": round((cpu - modules) / fleet.count, 3),
        "controller_peak_mib": round(watch.peak_bytes / 1024**2), "module_cpu_s": round(modules, 1),
    }  # fmt: skip


@contextlib.contextmanager
def engines() -> Iterator[int]:
    """The HTTP server that answers for all engines; yields its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.request_queue_size = 256
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def own_mounts() -> None:
    """A mount namespace of our own: whatever happens, no mount is left on the machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):
        sys.exit(f"simulate-fleet: no mount namespace ({os.strerror(ctypes.get_errno())})")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| run | hosts | tasks a host | wall | controller CPU | a host | controller peak | module CPU (apart) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tasks = (
            str(row["tasks_max"]) if row["tasks_min"] == row["tasks_max"] else f"{row['tasks_min']}-{row['tasks_max']}"
        )
        lines.append(
            f"| {row['action']} | {row['hosts']} | {tasks} | {row['wall_s']} s | {row['controller_cpu_s']} s "
            f"| {1000 * row['controller_cpu_s_per_host']:.0f} ms | {row['controller_peak_mib']} MiB "
            f"| {row['module_cpu_s']} s |"
        )
    return "\n".join(lines)


def main() -> None:
    """Build each fleet, measure, remove it."""
    parser = argparse.ArgumentParser(prog="scripts/simulate-fleet", description=__doc__.splitlines()[0])
    parser.add_argument("hosts", nargs="+", type=int, metavar="N", help="sizes of the fleet, such as 10 100")
    parser.add_argument("--run", nargs="+", default=["plan", "status", "deploy"], choices=["plan", "status", "deploy"])
    parser.add_argument("--forks", type=int, default=25)
    parser.add_argument("--folder", type=Path, help="where the hosts' folders go (default: the temporary folder)")
    parser.add_argument("--keep-going", action="store_true", help="report runs that did not end as they should")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("simulate-fleet: chroot and mounts need root")
    own_mounts()
    rows = []
    for count in arguments.hosts:
        folder = Path(tempfile.mkdtemp(prefix="simulate-fleet-", dir=arguments.folder))
        with engines() as port:
            fleet = Fleet(folder, count, port, arguments.forks)
            try:
                fleet.build()
                for action in arguments.run:
                    row = measure(fleet, action)
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    good = row["exit"] in ((0, 4) if action == "status" else (0,)) and row["changed"] == 0
                    if not good and not arguments.keep_going:
                        sys.exit(
                            f"simulate-fleet: {action} ended with {row['exit']} and {row['changed']} changes; see above"
                        )
            finally:
                fleet.remove()
    print(table(rows))


if __name__ == "__main__":
    main()
