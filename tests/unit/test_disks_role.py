"""The role's own guard and the command's text; everything that looks at a disk is in the module."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kvfleet.commands.disks import inventory_lines, show_host, verdict

ROOT = Path(__file__).resolve().parents[2]


def provision(tmp_path: Path, hosts: dict[str, dict[str, Any]], *words: str) -> str:
    """A check run of the role on hosts that all are this machine; returns its output."""
    values = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "cache_disk_device": "/dev/disk/by-id/nvme-no-such-disk_NOSUCH",
        "cache_disk_mount_point": str(tmp_path / "cache"),
        "kvfleet_plan": {"paths": {"state": str(tmp_path)}},
    }
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"all": {"vars": values, "hosts": hosts}}))
    playbook = tmp_path / "play.yml"
    role = {"name": "Include the role", "ansible.builtin.include_role": {"name": "cache_disk"}}
    playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [role]}]))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "--check", "-i", inventory, playbook, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(ROOT / "roles")},
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_one_serial_on_two_hosts_is_refused_before_any_disk_is_looked_at(tmp_path: Path) -> None:
    output = provision(tmp_path, {"a": {"cache_disk_serial": "SAME"}, "b": {"cache_disk_serial": "SAME"}, "c": {}})
    assert "KVF-DISK-056" in output
    assert "SAME" in output
    assert "Bring the cache disk in" not in output


def test_serial_from_the_command_line_is_refused_for_several_hosts(tmp_path: Path) -> None:
    output = provision(tmp_path, {"a": {}, "b": {}}, "-e", "cache_disk_serial=SAME")
    assert "KVF-DISK-056" in output


def test_different_serials_pass_the_guard(tmp_path: Path) -> None:
    output = provision(tmp_path, {"a": {"cache_disk_serial": "ONE"}, "b": {"cache_disk_serial": "TWO"}})
    assert "KVF-DISK-056" not in output
    # the module was asked and knows that the link is not there
    assert "KVF-DISK-010" in output


BLANK = {
    "device": "/dev/disk/by-id/nvme-M_S1",
    "kernel_name": "nvme1n1",
    "model": "M",
    "serial": "S1",
    "size_bytes": 1_920_383_410_176,
    "content": "blank",
    "here": True,
    "eligible": True,
    "reasons": [],
}
USED = {
    **BLANK,
    "device": "/dev/disk/by-id/nvme-M_S2",
    "kernel_name": "nvme0n1",
    "serial": "S2",
    "content": "recognised",
    "eligible": False,
    "reasons": ["/dev/disk/by-id/nvme-M_S2 is occupied: ext4 'x' on nvme0n1."],
}


def test_lines_to_paste_are_yaml_that_names_the_disk() -> None:
    assert yaml.safe_load("\n".join(inventory_lines(BLANK))) == {
        "cache_disk_device": "/dev/disk/by-id/nvme-M_S1",
        "cache_disk_serial": "S1",
        "cache_disk_format": True,
    }
    # a disk in service needs no permission to be formatted
    assert "cache_disk_format" not in "".join(inventory_lines({**BLANK, "content": "ours"}))


def test_verdicts() -> None:
    assert verdict(BLANK) == "blank: usable"
    assert verdict(USED) == "is occupied: ext4 'x' on nvme0n1."


@pytest.mark.parametrize(
    ("disks", "words"), [([USED, BLANK], "cache_disk_serial: S1"), ([USED], "no disk that could be")]
)
def test_text_for_a_host(disks: list[dict[str, Any]], words: str) -> None:
    out = io.StringIO()
    show_host(Console(file=out, width=120), "gpu1", [*disks, {**USED, "here": False, "kernel_name": "loop9"}])
    text = out.getvalue()
    assert words in text
    assert "1.75 TiB" in text
    assert "loop9" not in text
    assert "1 more belong" in text
