"""The benchmark alone refuses to prove what is not deployed; Ansible runs it here against this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import sample_results

ROOT = Path(__file__).resolve().parents[2]


def test_a_plan_that_is_not_deployed_is_refused_before_the_proof(tmp_path: Path) -> None:
    plan = sample_results.plan("cpu", "cu13-0.32.0-0.5.6")
    plan["instances"][0]["port"] = plan["servers"][0]["http_port"] = 1
    names = ("releases", "current", "etc", "state", "cache_mount", "cache_data", "run")
    plan["paths"] = {name: str(tmp_path / "host" / name) for name in names}
    values = tmp_path / "values.json"
    values.write_text(json.dumps({"kvfleet_plan": plan, "ansible_become": False}))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", "-c", "local",
         "-e", f"ansible_python_interpreter={sys.executable}", "-e", f"@{values}", "playbooks/benchmark.yml"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "KVF-BENCH-051" in done.stdout, done.stdout
    assert "never deployed" in done.stdout
    assert "Deploy first" in done.stdout
    assert "Ask whether the last proof still stands" not in done.stdout
