"""The Python API: verdicts from what a run saw, and real runs of small playbooks through ansible-runner."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvfleet import fleet, runs
from kvfleet.core import rollout
from kvfleet.core.findings import Finding, KvfleetError
from kvfleet.exits import Exit
from kvfleet.fleet import Action, FleetEvent, Verdict, judge, rotate, summarise, total
from kvfleet.runs import HostRun, PlaybookRun

PROVED = {"bench_verdict": {"accepted": True, "line": "h pass 3 req/s"}}
STANDS = {"proof_state": {"proved": True, "line": "unchanged"}}
BACK = {"rollout_outcome": "restored"}
PLAN = {"release": {"id": "r1"}, "profile": "disk", "errors": []}


def host(name: str = "h", **fields: Any) -> HostRun:
    return HostRun(name, **fields)


@pytest.mark.parametrize(
    ("action", "fields", "verdict"),
    [
        (Action.DEPLOY, {"answers": PROVED, "changed": ["x"]}, Verdict.PROVED),
        (Action.DEPLOY, {"answers": STANDS}, Verdict.PROVED),
        (Action.DEPLOY, {"answers": {"proof_state": {"proved": False}}}, Verdict.NOT_STARTED),
        (Action.DEPLOY, {"answers": {**STANDS, "bench_verdict": {}}, "changed": ["x"]}, Verdict.FAILED),
        (Action.DEPLOY, {"changed": ["x"]}, Verdict.FAILED),
        (Action.DEPLOY, {}, Verdict.NOT_STARTED),
        (Action.DEPLOY, {"facts": {"kvfleet_plan": {"errors": [{}]}}}, Verdict.REFUSED),
        (Action.DEPLOY, {"failures": ["no"]}, Verdict.REFUSED),
        (Action.DEPLOY, {"failures": ["no"], "changed": ["x"]}, Verdict.FAILED),
        (Action.DEPLOY, {"answers": STANDS, "failures": ["no"], "changed": ["x"]}, Verdict.FAILED),
        (Action.DEPLOY, {"facts": BACK, "failures": ["no"], "changed": ["x"]}, Verdict.RESTORED),
        (Action.DEPLOY, {"facts": {"rollout_outcome": "failed"}, "failures": ["no"], "changed": ["x"]}, Verdict.FAILED),
        (Action.DEPLOY, {"facts": BACK, "unreachable": True}, Verdict.UNREACHABLE),
        (Action.UPGRADE, {"facts": BACK, "failures": ["no"]}, Verdict.RESTORED),
        (Action.UPGRADE, {"answers": PROVED, "changed": ["x"]}, Verdict.PROVED),
        (Action.ROLLBACK, {"answers": PROVED, "changed": ["x"]}, Verdict.PROVED),
        (Action.ROLLBACK, {"failures": ["KVF-ENG-042"]}, Verdict.REFUSED),
        (Action.PLAN, {"facts": {"kvfleet_plan": PLAN}}, Verdict.PLANNED),
        (Action.PLAN, {}, Verdict.REFUSED),
        (Action.STATUS, {"answers": {"host_status": {"state": "ok"}}}, Verdict.AS_WANTED),
        (Action.STATUS, {"answers": {"host_status": {"state": "drift"}}}, Verdict.DRIFT),
        (Action.STATUS, {}, Verdict.DRIFT),
        (Action.STATUS, {"failures": ["no"]}, Verdict.DRIFT),
        (Action.STATUS, {"answers": {"host_status": {"state": "ok"}}, "failures": ["no"]}, Verdict.DRIFT),
    ],
)  # fmt: skip
def test_verdicts(action: Action, fields: dict[str, Any], verdict: Verdict) -> None:
    assert judge(action, host(**fields), complete=True) is verdict


@pytest.mark.parametrize("action", list(Action))
def test_a_run_without_final_statistics_is_never_good(action: Action) -> None:
    good = {**STANDS, "host_status": {"state": "ok"}}
    seen = host(answers=good, facts={"kvfleet_plan": PLAN})
    assert judge(action, seen, complete=False) not in (Verdict.PROVED, Verdict.PLANNED, Verdict.AS_WANTED)
    run = PlaybookRun("successful", 0, 1.0, {"h": seen}, complete=False)
    assert total(action, run, summarise(action, run)) == Exit.NEEDS_A_PERSON


def finished(*hosts: HostRun, rc: int = 0) -> PlaybookRun:
    return PlaybookRun("successful" if rc == 0 else "failed", rc, 1.0, {one.name: one for one in hosts}, True)


@pytest.mark.parametrize(
    ("hosts", "rc", "status"),
    [
        ([host("a", answers=STANDS), host("b", answers=STANDS)], 0, 0),
        # Ansible says it failed although every host is well: nobody knows what did
        ([host("a", answers=STANDS)], 2, 4),
        ([host("a", facts={"kvfleet_plan": {"errors": [{}]}}), host("b")], 2, 2),
        ([host("a", unreachable=True, failures=["unreachable: gone"]), host("b")], 4, 2),
        ([host("a", unreachable=True, failures=["unreachable: gone"]), host("b", answers=STANDS)], 4, 4),
        ([host("a", facts=BACK, failures=["no"], changed=["x"]), host("b")], 2, 3),
        ([host("a", answers=PROVED, changed=["x"]), host("b")], 2, 4),
        ([], 1, 2),
    ],
)
def test_the_exit_status_of_a_rollout(hosts: list[HostRun], rc: int, status: int) -> None:
    run = finished(*hosts, rc=rc)
    assert total(Action.DEPLOY, run, summarise(Action.DEPLOY, run)) == status


def test_a_host_whose_status_could_not_be_asked_needs_a_person_and_says_why() -> None:
    said = "Plan what the inventory wants: Missing sudo password"
    run = finished(host("a", failures=[said]), host("b", answers={"host_status": {"state": "ok"}}), rc=2)
    found = summarise(Action.STATUS, run)
    assert (found["a"].verdict, found["a"].reasons) == (Verdict.DRIFT, (said,))
    assert total(Action.STATUS, run, found) == Exit.NEEDS_A_PERSON
    alone = finished(host("a", failures=[said]), rc=2)
    assert total(Action.STATUS, alone, summarise(Action.STATUS, alone)) == Exit.NEEDS_A_PERSON


def test_a_host_that_did_not_have_its_turn_says_who_stopped_it() -> None:
    run = finished(host("a", failures=["Prove it: no"], changed=["x"]), host("b"), rc=2)
    assert summarise(Action.DEPLOY, run)["b"].reasons == ("the run stopped at a",)


def test_what_the_gate_says_against_a_host_is_that_hosts_reason() -> None:
    table = rollout.table([("b", Finding("KVF-ENG-040", "Nothing runs.", "Deploy it."))], 2)
    run = finished(host("a", gate=table), host("b"), rc=2)
    found = summarise(Action.UPGRADE, run)
    assert found["b"].verdict is Verdict.REFUSED
    assert found["b"].reasons == ("KVF-ENG-040: Nothing runs. Deploy it.",)
    assert found["a"].verdict is Verdict.NOT_STARTED
    assert "1 of 2 hosts cannot be deployed" in found["a"].reasons[0]
    everybody = rollout.table([("all hosts", Finding("KVF-SET-040", "Bad size.", "Set it."))], 2)
    found = summarise(Action.DEPLOY, finished(host("a", gate=everybody), host("b"), rc=2))
    assert {one.reasons for one in found.values()} == {("KVF-SET-040: Bad size. Set it.",)}


def test_results_carry_no_secret() -> None:
    canary = "canary-Zx81-never-to-be-seen"
    plan = {**PLAN, "instances": [{"environment": {"VLLM_API_KEY": canary}}]}
    run = finished(host(facts={"kvfleet_plan": plan}, failures=[f"the engine said {canary}"], changed=["x"]), rc=2)
    assert canary not in json.dumps(summarise(Action.DEPLOY, run)["h"].as_dict(whole=True))


def run_folder(base: Path, day: int, action: str = "status") -> Path:
    path = base / f"2026-01-{day:02d}T00-00-00-000000Z-{action}-17-4242"
    path.mkdir()
    return path


def test_only_the_newest_runs_stay(tmp_path: Path) -> None:
    made = [run_folder(tmp_path, day) for day in range(1, 6)]
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / "2025-my-own-folder").mkdir()
    assert rotate(tmp_path, 2) == made[:3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2025-my-own-folder", made[3].name, made[4].name, "note.txt",
    ]  # fmt: skip
    assert rotate(tmp_path / "none", 2) == []


def test_looking_often_takes_no_support_bundle_away(tmp_path: Path) -> None:
    deployed = run_folder(tmp_path, 1, "deploy")
    (deployed / "support-h.tar.gz").write_text("why")
    for day in range(2, 28):
        run_folder(tmp_path, day)
    assert len(rotate(tmp_path, 20)) == 6
    assert (deployed / "support-h.tar.gz").exists()


def test_a_run_that_goes_on_keeps_its_folder(tmp_path: Path) -> None:
    mine, other, ended = (run_folder(tmp_path, day) for day in (1, 2, 3))
    run_folder(tmp_path, 4)
    hold = "import sys; from pathlib import Path; from kvfleet.fleet import held\nwith held(Path(sys.argv[1])):\n"
    command = [sys.executable, "-c", hold + "    print('held', flush=True); sys.stdin.read()", other]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process, fleet.held(mine):
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert rotate(tmp_path, 1) == [ended]
        assert mine.is_dir()
        assert other.is_dir()
        # also one that is killed lets go
        process.kill()
        process.wait()
        assert rotate(tmp_path, 1) == [other]
    assert rotate(tmp_path, 1) == [mine]


# ------------------------------------------------------------------------------------------ real runs of ansible-runner

CANARY = "canary-Qq17-in-no-file"

PLAYBOOK = """
- name: First part
  hosts: all
  gather_facts: false
  tasks:
    - name: Use the secret
      ansible.builtin.command:
        argv: [sh, -c, 'cat > /dev/null; cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\\0" " " > {{ folder }}/argv']
        stdin: "{{ smoke_benchmark_api_key }}"
      no_log: true
    - name: Wait
      ansible.builtin.command: sleep {{ seconds | default(0) }}
      changed_when: false
- name: Second part
  hosts: all
  gather_facts: false
  tasks:
    - name: Break where told
      ansible.builtin.command: "{{ command | default('true') }}"
      changed_when: false
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory of two local hosts, and a small playbook in the place of deploying."""
    (tmp_path / "hosts.ini").write_text(
        "".join(f"h{n} ansible_connection=local ansible_python_interpreter={sys.executable}\n" for n in (1, 2))
    )
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    monkeypatch.setattr(fleet, "_PLAYBOOKS", {Action.DEPLOY: str(tmp_path / "play.yml")})
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


def variables(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "smoke_benchmark_api_key": CANARY, **more}


def test_a_real_run_reports_and_leaves_no_secret(small: Path) -> None:
    events: list[FleetEvent] = []
    done = fleet.deploy(
        small / "hosts.ini", variables=variables(small), on_event=events.append, artifacts=small / "runs"
    )
    assert done.complete
    # nothing proved anything, so nothing is good
    assert {one.verdict for one in done.hosts.values()} == {Verdict.FAILED}
    assert done.exit == Exit.NEEDS_A_PERSON
    assert [event.play for event in events if event.kind == "play"] == ["First part", "Second part"]
    # the event of a task with no_log tells nothing, Ansible's final count does
    assert {(event.host, event.state) for event in events if event.task == "Use the secret" and event.state} == {
        ("h1", "ok"),
        ("h2", "ok"),
    }
    assert done.hosts["h1"].changed == ("a task whose output is hidden",)
    assert done.artifacts is not None
    assert done.artifacts.stat().st_mode & 0o777 == 0o700
    assert json.loads((done.artifacts / "result.json").read_text())["hosts"]["h1"]["verdict"] == "failed"
    assert "kvfleet" in (small / "argv").read_text(), "the list of processes must be there, or it proves nothing"
    found = subprocess.run(["grep", "-rl", CANARY, str(small), "/dev/shm"], capture_output=True, text=True, check=False)
    assert found.stdout == "", "the secret stands in a file or on a command line"
    assert list((small / "tmp").glob("kvfleet-run-*")) == []


def test_a_failing_host_is_not_hidden(small: Path) -> None:
    done = fleet.deploy(small / "hosts.ini", limit="h1", variables=variables(small, command="false"), keep=0)
    assert list(done.hosts) == ["h1"]
    assert "Break where told" in done.hosts["h1"].reasons[0]
    assert done.artifacts is None


def left_of(folder: Path) -> list[str]:
    """Command lines of processes that a run in ``folder`` started: they have its TMPDIR in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_cancel_and_timeout_end_a_run(small: Path) -> None:
    cancel = threading.Event()

    def stop(event: FleetEvent) -> None:
        if event.task == "Wait":
            cancel.set()

    done = fleet.deploy(
        small / "hosts.ini", variables=variables(small, seconds=120), on_event=stop, cancel=cancel, keep=0
    )
    assert (done.ended, done.complete, done.exit) == ("canceled", False, Exit.NEEDS_A_PERSON)
    assert done.seconds < 60
    # Ansible's workers lead sessions of their own: they must not go on with their task, nor the module that they run
    assert left_of(small) == []
    late = fleet.deploy(small / "hosts.ini", variables=variables(small, seconds=120), timeout_s=8, keep=0)
    assert (late.ended, late.exit) == ("timeout", Exit.NEEDS_A_PERSON)
    assert left_of(small) == []


def test_a_listener_that_raises_ends_the_run(small: Path) -> None:
    seen: list[str] = []

    def stop(event: FleetEvent) -> None:
        if event.task == "Wait":
            seen.extend(left_of(small))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fleet.deploy(small / "hosts.ini", variables=variables(small, seconds=120), on_event=stop, keep=0)
    assert seen, "the run's processes must be found while it runs, or finding none proves nothing"
    assert left_of(small) == []


#: says whether the process that evaluates it, a worker, would collect garbage
COLLECTS = """
import gc
from ansible.plugins.lookup import LookupBase
class LookupModule(LookupBase):
    def run(self, terms, variables=None, **options):
        return [gc.isenabled()]
"""


def test_workers_leave_the_controllers_memory_shared(small: Path) -> None:
    (small / "lookup_plugins").mkdir()
    (small / "lookup_plugins" / "collects.py").write_text(COLLECTS)
    (small / "ask.yml").write_text(
        "- hosts: h1\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.set_fact: {asked: \"{{ lookup('collects') }}\"}\n"
    )
    done = runs.run_playbook(small / "ask.yml", small / "hosts.ini")
    assert done.hosts["h1"].facts == {"asked": False}
    # by itself ansible-playbook finds the plugin through ansible.cfg
    environment = dict(os.environ, ANSIBLE_CONFIG=str(runs.ROOT / "ansible.cfg"))
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", small / "hosts.ini", small / "ask.yml", "-v"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "asked: false" in shown.stdout


def test_what_nobody_reads_of_an_answer_is_not_kept() -> None:
    collector = runs.Collector()
    plan = {"fingerprint": "f"}
    answer = {"plan": plan, "error_text": "", "page": [], "host": {}, "invocation": {"module_args": {"releases": "x"}}}
    for action, result in (
        ("kv_plan", answer),
        ("ansible.builtin.set_fact", {"ansible_facts": {"kvfleet_plan": plan}}),
    ):
        collector({"event": "runner_on_ok", "event_data": {"host": "h", "task_action": action, "res": result}})
    assert collector.hosts["h"].answers == {"kv_plan": {"error_text": ""}}
    assert collector.hosts["h"].facts == {"kvfleet_plan": plan}


def test_a_host_that_was_lost_for_a_while_is_judged_by_what_became_of_it() -> None:
    lost = {"event": "runner_on_unreachable", "event_data": {"host": "h", "task": "Ask", "res": {"msg": "timed out"}}}
    failed = {"event": "runner_on_failed", "event_data": {"host": "h", "task": "Judge", "res": {"msg": "not proved"}}}
    back = {"event": "runner_on_ok", "event_data": {"host": "h", "res": {"ansible_facts": BACK}}}
    collector = runs.Collector()
    for event in (lost, failed, back):
        collector(event)
    collector.settle({"ok": {"h": 2}, "ignored": {"h": 1}, "rescued": {"h": 1}, "dark": {}, "failures": {}})
    ended = collector.hosts["h"]
    assert judge(Action.DEPLOY, ended, complete=True) is Verdict.RESTORED
    assert ended.failures == []
    assert ended.rescued == ["unreachable: timed out", "Judge: not proved"]
    # what failed for good besides is not forgiven with it
    collector = runs.Collector()
    for event in (lost, failed):
        collector(event)
    collector.settle({"ok": {"h": 1}, "ignored": {"h": 1}, "failures": {"h": 1}})
    assert (collector.hosts["h"].unreachable, collector.hosts["h"].failures) == (False, ["Judge: not proved"])
    gone = runs.Collector()
    gone(lost)
    gone.settle({"dark": {"h": 1}})
    assert judge(Action.DEPLOY, gone.hosts["h"], complete=True) is Verdict.UNREACHABLE


def test_a_task_that_ignores_a_lost_host_does_not_count_it_as_lost(small: Path) -> None:
    (small / "lost.ini").write_text("h1 ansible_host=127.0.0.1 ansible_port=1\n")
    (small / "lose.yml").write_text(
        "- hosts: h1\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.raw: 'true'\n      ignore_unreachable: true\n"
        "    - ansible.builtin.set_fact: {rollout_outcome: restored}\n"
    )
    done = runs.run_playbook(small / "lose.yml", small / "lost.ini")
    assert done.complete
    assert done.hosts["h1"].rescued[0].startswith("unreachable: ")
    assert done.hosts["h1"].ok
    assert judge(Action.DEPLOY, done.hosts["h1"], complete=True) is Verdict.RESTORED


def test_runs_in_threads_do_not_mix(small: Path) -> None:
    results: dict[str, fleet.FleetResult] = {}

    def one(name: str) -> None:
        results[name] = fleet.deploy(
            small / "hosts.ini", limit=name, variables=variables(small), artifacts=small / "runs"
        )

    threads = [threading.Thread(target=one, args=(name,)) for name in ("h1", "h2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: list(result.hosts) for name, result in results.items()} == {"h1": ["h1"], "h2": ["h2"]}
    assert len({result.artifacts for result in results.values()}) == 2


def test_a_long_run_outlives_many_that_ended_meanwhile(small: Path) -> None:
    base = small / "runs"

    def look(event: FleetEvent) -> None:
        if event.kind == "play" and event.play == "Second part":
            for day in range(1, 4):
                later = run_folder(base, day, "deploy")
                later.rename(later.with_name(later.name.replace("2026", "9026")))
            rotate(base, 1)

    done = fleet.deploy(
        small / "hosts.ini", variables=variables(small), on_event=look, artifacts=base, keep=1, limit="h1"
    )
    assert done.artifacts is not None
    assert {path.name for path in done.artifacts.iterdir()} == {"ansible.log", "result.json"}
    # it ended: now it is one among others
    rotate(base, 1)
    assert not done.artifacts.exists()


def test_who_says_where_support_bundles_go(small: Path) -> None:
    tasks = fleet.ROOT / "playbooks" / "tasks"
    fetched = next(
        task["ansible.builtin.fetch"]["dest"]
        for task in yaml.safe_load((tasks / "support.yml").read_text())
        if "ansible.builtin.fetch" in task
    )
    told = next(
        task["vars"]["rollout_support_dir"]
        for task in yaml.safe_load((tasks / "restore_proved.yml").read_text())
        if "rollout_support_dir" in task.get("vars", {})
    )
    content = json.dumps([fetched, told])
    copy = {"ansible.builtin.copy": {"content": content, "dest": str(small / "said")}}
    (small / "play.yml").write_text(json.dumps([{"hosts": "h1", "gather_facts": False, "tasks": [copy]}]))

    def said() -> list[str]:
        return list(json.loads((small / "said").read_text()))

    def deployed(**extra: str) -> str:
        done = fleet.deploy(small / "hosts.ini", variables=extra, artifacts=small / "runs")
        return str(done.artifacts)

    folder = deployed()
    assert said() == [f"{folder}/support-h1.tar.gz", folder]
    (small / "group_vars").mkdir()
    (small / "group_vars" / "all.yml").write_text("kvfleet_support_dir: /inventory\n")
    deployed()
    assert said() == ["/inventory/support-h1.tar.gz", "/inventory"]
    deployed(kvfleet_support_dir="/caller")
    assert said() == ["/caller/support-h1.tar.gz", "/caller"]
    # by itself ansible-playbook has no folder of a run
    (small / "group_vars" / "all.yml").unlink()
    runs.run_playbook(small / "play.yml", small / "hosts.ini")
    assert said() == [f"{small}/../results/support/support-h1.tar.gz", f"{small}/../results/support"]


def test_a_missing_inventory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvfleetError, match="KVF-HOST-070"):
        fleet.plan(tmp_path / "none")


def test_an_inventory_without_hosts_is_no_success(small: Path) -> None:
    (small / "empty.ini").write_text("")
    done = fleet.deploy(small / "empty.ini", variables=variables(small), keep=0)
    assert done.hosts == {}
    assert done.exit == Exit.REFUSED


def test_variables_are_gone_after_the_run() -> None:
    with runs.variables_without_trace({"a": CANARY}) as words:
        path = Path(words[1].removeprefix("@"))
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert CANARY not in " ".join(words)
    assert not path.parent.exists()


def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path: Path) -> None:
    leave = (
        "import os, signal, sys; from pathlib import Path; from kvfleet.runs import private_folder\n"
        "with private_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'vars.json').write_text('{}'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", leave, tmp_path], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    with runs.private_folder(tmp_path) as other, runs.private_folder(tmp_path) as folder:
        assert not left.exists()
        assert other.is_dir(), "that of a living process stays"
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_events_and_result_as_json(small: Path) -> None:
    from kvfleet.cli import app

    done = CliRunner().invoke(
        app,
        [
            "deploy",
            "-i",
            str(small / "hosts.ini"),
            "--json",
            "-e",
            f"folder={small}",
            "-e",
            "smoke_benchmark_api_key=x",
        ],
        standalone_mode=False,
        env={**os.environ},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kind"] for line in lines} == {"play", "start", "host", "result"}
    assert lines[-1]["exit"] == 4
    assert done.return_value == Exit.NEEDS_A_PERSON


def test_ansible_finds_this_checkout_whatever_another_tool_exports():
    found = runs.plugin_paths({"ANSIBLE_ACTION_PLUGINS": "/ara/plugins/action", "HOME": "/root"})
    root = str(Path(__file__).resolve().parents[2])
    assert found["ANSIBLE_ACTION_PLUGINS"] == f"{root}/plugins/action:/ara/plugins/action"
    assert found["ANSIBLE_LIBRARY"] == f"{root}/plugins/modules"
    # as ansible.cfg names them for people who call ansible-playbook
    text = (Path(root) / "ansible.cfg").read_text()
    named = {
        line.split(" = ")[1] for line in text.splitlines() if line.split(" = ")[-1].startswith(("plugins/", "roles"))
    }
    assert {value.split(":")[0].removeprefix(f"{root}/") for value in found.values()} == named
