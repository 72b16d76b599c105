"""What ``kvfleet upgrade`` tells its caller, from what the playbooks leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from rich.console import Console

from kvfleet.checkout import ROOT
from kvfleet.commands.upgrade import _STEPS, judge, outcome, show_steps
from kvfleet.exits import Exit
from kvfleet.runs import HostRun, PlaybookRun


def host(said: str | None, *, changed: bool = False, failed: bool = False, unreachable: bool = False) -> HostRun:
    return HostRun(
        "h",
        changed=["Copy each part once"] if changed else [],
        failures=["a task: broke"] if failed else [],
        unreachable=unreachable,
        facts={} if said is None else {"upgrade_outcome": said},
    )


def run(*hosts: HostRun, complete: bool = True) -> PlaybookRun:
    named = {f"h{number}": one for number, one in enumerate(hosts)}
    return PlaybookRun("successful", 0, 1.0, named, complete)


@pytest.mark.parametrize(
    ("said", "options", "expected"),
    [
        ("proved", {}, 0),
        ("proved", {"changed": True}, 0),
        # proved, and then a later task failed: nobody can say what serves now
        ("proved", {"failed": True}, 4),
        ("kept", {"failed": True, "changed": True}, 3),
        ("restored", {"failed": True, "changed": True}, 3),
        ("failed", {"failed": True, "changed": True}, 4),
        (None, {"failed": True}, 2),
        (None, {"failed": True, "changed": True}, 4),
        (None, {"unreachable": True}, 4),
        # lost on the way: what serves now is not known
        ("kept", {"unreachable": True}, 4),
    ],
)
def test_the_exit_status_says_what_serves(said: str | None, options: dict[str, Any], expected: int) -> None:
    assert outcome(host(said, **options)) == expected


def test_the_worst_host_decides() -> None:
    status, hosts = judge(run(host("proved"), host("restored", failed=True)))
    assert status == Exit.RESTORED
    assert hosts == {"h0": Exit.PROVED, "h1": Exit.RESTORED}
    assert judge(run(host("proved"), host("failed", failed=True)))[0] == Exit.NEEDS_A_PERSON


def test_a_run_that_did_not_end_is_never_good() -> None:
    assert judge(run(host("proved"), complete=False))[0] == Exit.NEEDS_A_PERSON


def test_no_host_at_all_is_a_refusal() -> None:
    assert judge(run())[0] == Exit.REFUSED


def names_of(tasks: list[dict[str, Any]]) -> set[str]:
    """Names of tasks, those in blocks too."""
    found = set()
    for task in tasks:
        found.add(task.get("name", ""))
        for part in ("block", "rescue"):
            found |= names_of(task.get(part, []))
    return found


def test_every_step_that_is_shown_is_a_task_of_the_playbooks() -> None:
    tasks = set()
    for path in (ROOT / "playbooks" / "tasks").glob("*.yml"):
        tasks |= names_of(yaml.safe_load(path.read_text()))
    assert set(_STEPS) <= tasks


def test_steps_are_printed_when_they_begin(capsys: pytest.CaptureFixture[str]) -> None:
    show = show_steps(Console())
    show({"event": "playbook_on_task_start", "event_data": {"task": "Prove it"}})
    show({"event": "playbook_on_task_start", "event_data": {"task": "Keep the new plan"}})
    show({"event": "runner_on_ok", "event_data": {"task": "Switch the link"}})
    assert capsys.readouterr().out == "  0:00  Prove it\n"
