"""Throw-away hosts that the fleet's tests share: made, given a model, listed in one inventory, removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TESTHOST = ROOT / "scripts" / "testhost"

#: the smallest deploy there is: the tiny model in float32, wheels from the controller
VALUES: dict[str, Any] = {
    "kvfleet_profile": "disk",
    "kvfleet_release": "cpu-0.32.0-0.5.6",
    "kvfleet_dtype": "float32",
    "kvfleet_kv_pool_gib": 0.25,
    "kvfleet_buffer_gib_per_gpu": 0.5,
    "kvfleet_enforce_eager": True,
    "kvfleet_instances": [
        {"name": "tiny", "model": "/data/models/tiny", "port": 8000, "max_model_len": 4096, "max_num_seqs": 4}
    ],
    "cache_disk_format": True,
    "cache_disk_measure_speed": "never",
    "engine_source": "bundle",
    "smoke_benchmark_report": False,
    "smoke_benchmark_budget_s": 10,
}


def tool(*words: str, **options: Any) -> str:
    """``scripts/testhost``; its message is in the exception when it fails."""
    done = subprocess.run([str(TESTHOST), *words], text=True, capture_output=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ssh(host: str, command: str) -> str:
    """Run a command on the host."""
    return tool("ssh", host, command)


def carry_model(host: str, folder: Path) -> None:
    """Make the tiny model in ``folder`` and copy it to the host."""
    subprocess.run([sys.executable, ROOT / "scripts" / "tinymodel", "--size", "tiny", folder / "model"], check=True)
    with subprocess.Popen(["tar", "-C", folder / "model", "-cf", "-", "."], stdout=subprocess.PIPE) as archive:
        tool(
            "ssh", host, "mkdir -p /data/models/tiny && tar -C /data/models/tiny --no-same-owner -xf -",
            stdin=archive.stdout,
        )  # fmt: skip


def write_inventory(folder: Path, hosts: list[str], changes: dict[str, dict[str, Any]] | None = None) -> Path:
    """An inventory folder with the hosts as they are, common values, and ``changes`` for single hosts."""
    target = folder / "inventory"
    (target / "group_vars").mkdir(parents=True, exist_ok=True)
    entries = "".join("".join(f"    {line}\n" for line in tool("inventory", host).splitlines()) for host in hosts)
    (target / "hosts.yml").write_text("all:\n  hosts:\n" + entries)
    (target / "group_vars" / "all.yml").write_text(json.dumps(VALUES))
    (target / "host_vars").mkdir(exist_ok=True)
    for host in hosts:
        (target / "host_vars" / f"{host}.yml").write_text(json.dumps((changes or {}).get(host, {})))
    return target


def kvfleet(*words: str, timeout_s: float = 590) -> subprocess.CompletedProcess[str]:
    """The command, as people run it."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "kvfleet"), *words],
        cwd=ROOT, text=True, capture_output=True, check=False, timeout=timeout_s,
        env=dict(os.environ, COLUMNS="200"),
    )  # fmt: skip


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line of ``--json``: the run's result."""
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    result = json.loads(lines[-1])
    assert result["kind"] == "result", done.stdout[-2000:] + done.stderr
    return dict(result)


def untouched(host: str) -> bool:
    """Whether the host has nothing that a deploy makes."""
    listed = ssh(
        host, "ls -d /opt/kvfleet /etc/kvfleet /var/lib/kvfleet /etc/systemd/system/kvfleet* 2>/dev/null; true"
    )
    return listed.strip() == ""
