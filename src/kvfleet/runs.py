"""Run a playbook through ansible-runner and keep what it did per host, as counts and sentences."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner

from kvfleet.checkout import ROOT

Event = Mapping[str, Any]


@dataclass
class HostRun:
    """What one host saw of a run: tasks executed (skipped ones apart) and the names of those that changed something."""

    name: str
    executed: int = 0
    skipped: int = 0
    changed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unreachable: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed for good on this host."""
        return not self.failures and not self.unreachable


@dataclass
class PlaybookRun:
    """A finished run: ``status`` and ``rc`` as ansible-runner gave them, and one :class:`HostRun` a host.

    A run without final statistics (killed, lost) is never a success, whatever its return code says.
    """

    status: str
    rc: int
    seconds: float
    hosts: dict[str, HostRun]
    complete: bool
    #: the last lines that Ansible itself printed, for runs that ended before any host did anything
    tail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the run ended, and every host with it."""
        return self.complete and self.rc == 0 and all(host.ok for host in self.hosts.values())


def run_playbook(
    playbook: Path,
    inventory: Path,
    *,
    extra_vars: Mapping[str, Any] | None = None,
    limit: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    show_output: bool = False,
) -> PlaybookRun:
    """Run ``playbook`` against ``inventory`` and return what happened; never raises for a failing host.

    The private directory is fresh and removed afterwards: nothing of one run can leak into the next, and no variable
    is left on disk. ``on_event`` gets every event of ansible-runner; ``show_output`` lets Ansible's own text through.
    """
    hosts: dict[str, HostRun] = {}
    complete = False

    def collect(event: Event) -> bool:
        nonlocal complete
        data = event.get("event_data") or {}
        kind = event.get("event", "")
        if kind == "playbook_on_stats":
            complete = True
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_skipped", "runner_on_unreachable"):
            _count(hosts.setdefault(data["host"], HostRun(data["host"])), kind, data)
        if on_event is not None:
            on_event(event)
        return False  # ansible-runner need not keep the event on disk

    private = Path(tempfile.mkdtemp(prefix="kvfleet-run-"))
    started = time.monotonic()
    try:
        runner = ansible_runner.run(
            private_data_dir=str(private),
            project_dir=str(ROOT),
            playbook=str(playbook),
            inventory=str(inventory),
            extravars=dict(extra_vars or {}),
            limit=limit,
            event_handler=collect,
            quiet=not show_output,
            suppress_env_files=True,
            envvars={
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                # ansible-playbook of this very environment, not another one on the PATH
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            },
            settings={"idle_timeout": 3600, "job_timeout": 6 * 3600, "pexpect_timeout": 30},
        )
        tail = "".join(runner.stdout.readlines()[-20:])
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return PlaybookRun(str(runner.status), int(runner.rc), time.monotonic() - started, hosts, complete, tail)


def _count(host: HostRun, kind: str, data: Event) -> None:
    result = data.get("res") or {}
    if kind == "runner_on_skipped":
        host.skipped += 1
        return
    host.executed += 1
    if kind == "runner_on_unreachable":
        host.unreachable = True
        host.failures.append(f"unreachable: {result.get('msg', 'no reason given')}")
    elif kind == "runner_on_failed" and not data.get("ignore_errors"):
        host.failures.append(f"{data.get('task', '?')}: {result.get('msg', 'no reason given')}")
    elif result.get("changed"):
        host.changed.append(str(data.get("task", "?")))
    facts = result.get("ansible_facts")
    if isinstance(facts, dict):
        host.facts.update(facts)
