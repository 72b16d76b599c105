"""The proxy where nginx refuses a change, and how it goes again: Ansible runs on this machine, nginx is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.root

#: refuses a configuration that names a certificate that is not there, as nginx does
NGINX = """#!/bin/sh
grep -q missing.pem "$KVFLEET_TEST_CONF" || exit 0
echo 'nginx: [emerg] cannot load certificate "/missing.pem"' >&2
exit 1
"""
#: notes what it is asked for; nginx runs
SYSTEMCTL = """#!/bin/sh
echo "$*" >> "$KVFLEET_TEST_CONF.calls"
case "$*" in
  *show*) printf 'LoadState=loaded\\nActiveState=active\\nSubState=running\\nUnitFileState=enabled\\n' ;;
  *is-enabled*) echo enabled ;;
esac
exit "${KVFLEET_TEST_SYSTEMCTL:-0}"
"""


def play(tmp_path: Path, task: dict[str, Any], values: dict[str, Any], **environment: str) -> tuple[int, str]:
    """Run one task on this machine, with stand-ins for nginx and systemctl; status and output."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in (("nginx", NGINX), ("systemctl", SYSTEMCTL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "values.json").write_text(json.dumps({"ansible_python_interpreter": sys.executable, **values}))
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", "-c", "local",
         "-e", f"@{tmp_path / 'values.json'}", tmp_path / "play.yml"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
             "ANSIBLE_NOCOLOR": "1", "PATH": f"{tools}:{os.environ['PATH']}",
             "KVFLEET_TEST_CONF": str(tmp_path / "kvfleet.conf"), **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def run_role(tmp_path: Path, certificate: str, **environment: str) -> tuple[int, str]:
    """Run the role against a folder of this machine."""
    values = {
        "kvfleet_packages_from_bundle": True,
        "kvfleet_plan": {"paths": {"releases": "/opt/kvfleet/releases"}, "instances": [{"name": "a", "port": 8000}]},
        "api_proxy_allow": ["10.0.0.0/8"],
        "api_proxy_certificate": certificate,
        "api_proxy_certificate_key": "/k.pem",
        "__api_proxy_file": str(tmp_path / "kvfleet.conf"),
        "__api_proxy_default_page": str(tmp_path / "default"),
    }
    role = {"name": "Include the role", "ansible.builtin.include_role": {"name": "api_proxy"}}
    return play(tmp_path, role, values, **environment)


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("kvfleet.conf*") if path.suffix != ".calls")


def test_a_mistyped_certificate_leaves_what_serves(tmp_path: Path) -> None:
    conf = tmp_path / "kvfleet.conf"
    status, text = run_role(tmp_path, "/good.pem")
    assert status == 0, text
    good = conf.read_text()
    assert "/good.pem" in good

    status, text = run_role(tmp_path, "/missing.pem")
    assert status == 2, text
    assert "KVF-NET-011" in text
    assert "cannot load certificate" in text
    assert conf.read_text() == good
    assert left(tmp_path) == ["kvfleet.conf"]

    # put right, it is rendered and reloaded, and the text before is gone
    status, text = run_role(tmp_path, "/better.pem")
    assert status == 0, text
    assert "/better.pem" in conf.read_text()
    assert "reload nginx.service" in (tmp_path / "kvfleet.conf.calls").read_text()
    assert left(tmp_path) == ["kvfleet.conf"]


def test_a_first_configuration_that_nginx_refuses_goes_away(tmp_path: Path) -> None:
    status, text = run_role(tmp_path, "/missing.pem")
    assert status == 2, text
    assert "KVF-NET-011" in text
    assert left(tmp_path) == []


def test_a_configuration_that_did_not_change_stays_when_nginx_refuses_it(tmp_path: Path) -> None:
    status, text = run_role(tmp_path, "/good.pem")
    assert status == 0, text
    good = (tmp_path / "kvfleet.conf").read_text()
    # somebody else's site is broken
    status, text = run_role(tmp_path, "/good.pem", KVFLEET_TEST_SYSTEMCTL="1")
    assert status == 2, text
    assert (tmp_path / "kvfleet.conf").read_text() == good


@pytest.mark.parametrize("present", [True, False])
def test_uninstalling_takes_our_part_away_and_leaves_nginx(tmp_path: Path, present: bool) -> None:
    conf = tmp_path / "kvfleet.conf"
    if present:
        conf.write_text("server {}\n")
    task = {"name": "Remove", "ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/remove_proxy.yml")}
    status, text = play(tmp_path, task, {"uninstall_proxy_file": str(conf)})
    assert status == 0, text
    assert not conf.exists()
    calls = tmp_path / "kvfleet.conf.calls"
    # a stopped nginx stays stopped, and a host without one has nothing to reload
    assert (calls.read_text() if calls.exists() else "") == ("try-reload-or-restart nginx.service\n" if present else "")


def test_uninstalling_a_host_includes_the_proxy() -> None:
    tasks = yaml.safe_load((ROOT / "playbooks" / "uninstall.yml").read_text())[0]["tasks"]
    assert "tasks/remove_proxy.yml" in [task.get("ansible.builtin.include_tasks") for task in tasks]


def restore(tmp_path: Path, proxy: str, text: str) -> tuple[int, str, str]:
    (tmp_path / "kvfleet.conf").write_text(text)
    task = {"name": "Restore", "ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/restore_proxy.yml")}
    status, output = play(tmp_path, task, {"rollout_restored": {"proxy": proxy}})
    calls = tmp_path / "kvfleet.conf.calls"
    return status, output, calls.read_text() if calls.exists() else ""


# a proxy that came with the failed change leaves a stopped nginx stopped
@pytest.mark.parametrize(("proxy", "word"), [("wanted", "reload-or-restart"), ("removed", "try-reload-or-restart")])
def test_nginx_follows_a_restore(tmp_path: Path, proxy: str, word: str) -> None:
    status, output, calls = restore(tmp_path, proxy, "ssl_certificate /good.pem;\n")
    assert status == 0, output
    assert calls == f"{word} nginx.service\n"


def test_nginx_is_not_touched_when_it_refuses_what_was_restored(tmp_path: Path) -> None:
    status, _, calls = restore(tmp_path, "wanted", "ssl_certificate /missing.pem;\n")
    assert status == 2
    assert calls == ""


def test_a_restore_includes_the_proxy_before_its_proof() -> None:
    tasks = yaml.safe_load((ROOT / "playbooks" / "tasks" / "restore_proved.yml").read_text())
    names = [
        task["name"] for task in next(task for task in tasks if task["name"] == "Return to the proved state")["block"]
    ]
    assert names.index("Bring servers and instances to the proved state") < names.index("Let the proxy follow")
    assert names.index("Let the proxy follow") < names.index("Prove it")
