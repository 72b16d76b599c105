"""What the roles hand to host_files is, byte for byte, what a template or copy task of each file's own would write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_services import plan

from kvfleet.core import services

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("service_user", "cache_disk", "lmcache_server", "vllm_instance", "host_plan")


def files_of(role: str, tasks: str) -> Any:
    """The argument ``files`` of the only task with host_files in a task file that always runs."""
    found = yaml.safe_load((ROOT / "roles" / role / "tasks" / tasks).read_text())
    (files,) = [task["host_files"]["files"] for task in found if "host_files" in task and "when" not in task]
    return files


def template(role: str, name: str, target: str, **more: Any) -> dict[str, Any]:
    """A task as the roles had one for each file."""
    words = {"src": f"{ROOT}/templates/{role}/{name}.j2", "dest": "{{ out }}/" + target, "mode": "0600"}
    return {"name": name, "ansible.builtin.template": words, **more}


def over(what: str, variable: str) -> dict[str, Any]:
    return {"loop": "{{ kvfleet_plan['" + what + "'] }}", "loop_control": {"loop_var": variable}}


@pytest.fixture(scope="module", params=["server", "in_process"])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What the roles render in one variable each, and a folder in which Ansible's own tasks rendered the same."""
    folder = tmp_path_factory.mktemp("rendered")
    mode = {"mode": "in_process"} if request.param == "in_process" else {}
    made = plan(profile="disk", **mode)
    made["instances"].append({**made["instances"][0], "name": "second", "port": 8001})
    services.attach_commands(made)
    # text that JSON, YAML and Jinja would each read in their own way
    record = json.dumps({"plan": made, "text": "{{ no template }} é \\ 'x'"}, sort_keys=True)
    names = ["kvfleet.target", "kvfleet-watch.service", "kvfleet-watch.timer", "kvfleet-watch.json"]
    trim = ["kvfleet-trim", "kvfleet-trim.service", "kvfleet-trim.timer"]
    facts = {"kvfleet_plan": made, "host_plan__result": {"record": record}}
    tasks = [
        # as on a host: what a module answered is never a template
        {"name": "facts", "ansible.builtin.set_fact": {
            name: f"{{{{ (lookup('ansible.builtin.file', '{folder}/facts') | from_json)['{name}'] }}}}"
            for name in facts}},
        template("lmcache_server", "kvfleet-lmcache.service", "kvfleet-lmcache@{{ server['name'] }}.service",
                 **over("servers", "server")),
        template("vllm_instance", "kvfleet-vllm.service", "kvfleet-vllm@{{ instance['name'] }}.service",
                 **over("instances", "instance")),
        *(template("vllm_instance", name, name) for name in names),
        *(template("cache_disk", name, name) for name in trim),
        {"name": "settings", **over("instances", "instance"), "when": "instance['lmcache_config'] is truthy",
         "ansible.builtin.copy": {"content": "{{ instance['lmcache_config'] | to_nice_json }}\n",
                                  "dest": "{{ out }}/kvfleet-vllm@{{ instance['name'] }}.lmcache.yaml"}},
        {"name": "record", "ansible.builtin.copy": {"content": "{{ host_plan__result['record'] }}\n",
                                                    "dest": "{{ out }}/plan.json"}},
        {"name": "what the roles ask for", "ansible.builtin.copy": {"content": "{{ ours | to_json }}",
                                                                    "dest": "{{ out }}/ours.json"}},
        {"name": "the roles' own", "host_files": {"files": "{{ here }}"}},
    ]  # fmt: skip
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars_files": [
            str(path)
            for role in ROLES
            for path in (ROOT / "roles" / role / "defaults/main.yml", ROOT / "roles" / role / "vars/main.yml")
            if path.is_file()
        ],
        "vars": {
            "out": str(folder),
            "role_path": str(ROOT / "roles" / "service_user"),
            "vllm_instance_api_key": "canary",
            "ours": {
                "servers": "{{ __lmcache_server_files }}",
                "instances": "{{ __vllm_instance_files }}",
                "trim": files_of("cache_disk", "trim.yml"),
                "record": files_of("host_plan", "record.yml"),
                "helper": files_of("service_user", "main.yml"),
            },
            # the same files, but in a folder of their own and of this user
            "here": "{%- set files = [] -%}"
            "{%- for file in ours.values() | flatten -%}"
            "{%- set _ = files.append(file | combine({'path': out ~ '/ours/' ~ file['path'] | basename,"
            f" 'owner': '{os.geteuid()}', 'group': '{os.getegid()}'}})) -%}}"
            "{%- endfor -%}{{ files }}",
        },
        "tasks": tasks,
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    (folder / "ours").mkdir()
    (folder / "facts").write_text(json.dumps(facts))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", "-c", "local",
         "-e", f"ansible_python_interpreter={sys.executable}", folder / "play.yml"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "ours.json").read_text()), folder


def test_the_same_bytes(rendered: tuple[Any, Path]) -> None:
    ours, folder = rendered
    files = [file for kind in ("servers", "instances", "trim", "record") for file in ours[kind]]
    for file in files:
        name = Path(file["path"]).name
        assert (folder / "ours" / name).read_bytes() == (folder / name).read_bytes(), name
    in_process = not ours["servers"]
    assert sorted(Path(file["path"]).name for file in files) == sorted(
        path.name for path in folder.iterdir() if path.name not in ("play.yml", "facts", "ours", "ours.json")
    )
    assert len(files) == (2 + 2 + 4 + 3 + 1 if in_process else 1 + 2 + 4 + 3 + 1)


def test_the_helper_is_the_file_of_the_role(rendered: tuple[Any, Path]) -> None:
    written = (rendered[1] / "ours" / "kvfleet-unit").read_bytes()
    assert written == (ROOT / "roles/service_user/files/kvfleet-unit").read_bytes()


def test_places_and_rights(rendered: tuple[Any, Path]) -> None:
    ours, _ = rendered
    found = {
        file["path"]: (file.get("owner", "root"), file.get("group", "root"), file["mode"])
        for kind in ours.values()
        for file in kind
    }
    units, etc = "/etc/systemd/system", "/etc/kvfleet"
    expected = {
        "/opt/kvfleet/libexec/kvfleet-unit": ("root", "root", "0755"),
        "/usr/local/sbin/kvfleet-trim": ("root", "root", "0755"),
        f"{units}/kvfleet-trim.service": ("root", "root", "0644"),
        f"{units}/kvfleet-trim.timer": ("root", "root", "0644"),
        f"{units}/kvfleet-vllm@llama8b.service": ("root", "root", "0644"),
        f"{units}/kvfleet-vllm@second.service": ("root", "root", "0644"),
        f"{units}/kvfleet.target": ("root", "root", "0644"),
        f"{units}/kvfleet-watch.service": ("root", "root", "0644"),
        f"{units}/kvfleet-watch.timer": ("root", "root", "0644"),
        f"{etc}/kvfleet-watch.json": ("root", "root", "0644"),
        f"{etc}/plan.json": ("root", "root", "0644"),
    }
    if ours["servers"]:
        expected[f"{units}/kvfleet-lmcache@0.service"] = ("root", "root", "0644")
    else:
        for name in ("llama8b", "second"):
            expected[f"{etc}/kvfleet-vllm@{name}.lmcache.yaml"] = ("root", "kvfleet", "0640")
    assert found == expected


def test_no_key_in_what_is_shown(rendered: tuple[Any, Path]) -> None:
    assert all("canary" not in path.read_text() for path in (rendered[1] / "ours").iterdir())


def test_a_first_check_run_says_what_it_would_make_and_makes_nothing(tmp_path: Path) -> None:
    made = plan()
    services.attach_commands(made)
    made["paths"] = {**made["paths"], "etc": f"{tmp_path}/host/etc", "state": f"{tmp_path}/host/state"}
    (tmp_path / "plan.json").write_text(json.dumps({"kvfleet_plan": made}))
    tasks = [
        {"name": "include", "ansible.builtin.include_role": {"name": name}}
        for name in ("service_user", "lmcache_server")
    ]
    record = {"name": "host_plan", "tasks_from": "record.yml"}
    tasks.append({"name": "include", "ansible.builtin.include_role": record, "vars": {"host_plan__record": "{}"}})
    values = {
        # neither the user nor any folder of it is there
        "kvfleet_service_user": "nobody-has-this-name",
        "service_user_helper": f"{tmp_path}/host/libexec/kvfleet-unit",
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
    }
    play = {"hosts": "localhost", "gather_facts": False, "vars": values, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "--check", "--diff", "-i", "localhost,",
         "-e", f"@{tmp_path}/plan.json", tmp_path / "play.yml"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(ROOT / "roles")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # the user, its files, the units and the plan
    assert "changed=4 " in done.stdout
    assert "+ExecStart=" in done.stdout
    assert not (tmp_path / "host").exists()


@pytest.mark.parametrize(
    ("file", "environment", "said"),
    [
        ({"content": "x"}, {"ANSIBLE_ACTION_PLUGINS": "/nowhere"}, "KVF-HOST-067"),
        ({"template": "/nowhere/x.j2"}, {}, "The template /nowhere/x.j2 of"),
        ({"template": __file__, "content": "x"}, {}, "has a content too"),
    ],
)
def test_what_cannot_be_rendered_is_refused_at_the_first_call(
    file: dict[str, str], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    words = {**file, "path": str(tmp_path / "x"), "mode": "0644", "owner": str(os.geteuid())}
    play = {"hosts": "localhost", "gather_facts": False, "tasks": [{"name": "write", "host_files": {"files": [words]}}]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", "localhost,", "-c", "local",
         "-e", f"ansible_python_interpreter={sys.executable}", tmp_path / "play.yml"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **environment},
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stdout + done.stderr
    assert not (tmp_path / "x").exists()
