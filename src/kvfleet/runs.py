"""Run a playbook through ansible-runner and keep what it did per host, as counts and sentences."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner

from kvfleet.checkout import ROOT

Event = Mapping[str, Any]

#: our modules whose last answer per host is kept, because verdicts and reasons are read from them
ANSWERS = ("kv_plan", "proof_state", "bench_verdict", "host_status", "host_traffic", "rollout_gate")
#: what of an answer nobody reads; it would be most of a large run's memory
_NEEDLESS = ("invocation", "host", "page", "summary", "record")

#: how the failure of a host that was out of reach begins; names of tasks begin with a capital
_LOST = "unreachable: "


@dataclass
class HostRun:
    """What one host saw of a run: tasks executed (skipped ones apart) and the names of those that changed something."""

    name: str
    executed: int = 0
    skipped: int = 0
    changed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    #: failures that a rescue took care of
    rescued: list[str] = field(default_factory=list)
    unreachable: bool = False
    #: what the gate of the rollout said, on the host for which it ran
    gate: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    #: the last result of each of our modules in :data:`ANSWERS`
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: seconds from the start of the run to this host's last task
    seconds: float = 0.0

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


class Collector:
    """Turns the events of one run into :class:`HostRun` objects; one object a run, fed by one thread."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.hosts: dict[str, HostRun] = {}
        self.complete = False
        #: the process id of ansible-playbook; known with its first event, which comes before its first worker
        self.pid: int | None = None
        self._on_event = on_event
        self._started = time.monotonic()

    def __call__(self, event: Event) -> bool:
        """Take one event; False tells ansible-runner that it need not keep the event on disk."""
        data = event.get("event_data") or {}
        self.pid = self.pid or event.get("pid")
        kind = str(event.get("event", ""))
        if kind == "playbook_on_stats":
            self.complete = True
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_skipped", "runner_on_unreachable"):
            name = str(data["host"])
            host = self.hosts.setdefault(name, HostRun(name))
            host.seconds = time.monotonic() - self._started
            _count(host, kind, data)
        if self._on_event is not None:
            self._on_event(event)
        return False

    def settle(self, stats: Event) -> None:
        """Let Ansible's final counts correct ours.

        A host that it counts as not failed had its failures rescued. One that it does not count as dark was lost for a
        while only, in a task with ``ignore_unreachable``. A task with ``no_log`` hides in its event that it changed
        something; the count does not.
        """
        for name, host in self.hosts.items():
            hidden = int((stats.get("changed") or {}).get(name, 0)) - len(host.changed)
            host.changed += ["a task whose output is hidden"] * max(0, hidden)
            if host.unreachable and name not in (stats.get("dark") or {}):
                host.unreachable = False
                host.rescued += [text for text in host.failures if text.startswith(_LOST)]
                host.failures = [text for text in host.failures if not text.startswith(_LOST)]
            if name not in (stats.get("failures") or {}) and (stats.get("rescued") or {}).get(name):
                host.rescued += host.failures
                host.failures = []


def processes() -> dict[int, tuple[int, str]]:
    """Every process: its parent's id and its start time, which tells it from a later one with the same id."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,lstart="], capture_output=True, text=True, check=True)
        rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
        return {int(pid): (int(parent), started) for pid, parent, started in rows}
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # one that ends meanwhile is not there any more
            with suppress(OSError):
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if words[0] != "Z":
                    found[int(entry.name)] = (int(words[1]), words[19])
    return found


def end_run(pid: int, mark: str, patience_s: float = 5) -> None:
    """End ansible-playbook ``pid`` and all that it started, and nothing else.

    Ansible's workers lead sessions of their own, so a signal to its process group does not reach them. It hands
    SIGTERM on to them; what is still there after ``patience_s`` seconds is killed by its id. ``mark`` stands in the
    environment of the run's processes and of no other: it finds those that lost their parent meanwhile.
    """
    known: dict[int, str] = {pid: processes().get(pid, (0, ""))[1]}

    def left() -> list[int]:
        every = processes()
        ours = {one for one, (_, started) in every.items() if known.get(one) == started or _has(one, mark)}
        while more := {one for one, (parent, _) in every.items() if parent in ours} - ours:
            ours |= more
        known.update({one: every[one][1] for one in ours})
        return sorted(ours)

    left()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + patience_s
    while left() and time.monotonic() < end:
        time.sleep(0.1)
    end = time.monotonic() + 5
    while (rest := left()) and time.monotonic() < end:
        for one in rest:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.1)


def _has(pid: int, mark: str) -> bool:
    """Whether ``mark`` stands in the environment of process ``pid``; unknown, thus no, where it cannot be read."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@contextmanager
def private_folder(base: Path) -> Iterator[Path]:
    """A fresh folder below ``base`` for this user alone (0700), gone when the block ends.

    Those of processes that were killed before their block ended go with the next call.
    """
    for left in base.glob("kvfleet-run-*"):
        with suppress(OSError, ValueError):
            if left.stat().st_uid == os.getuid() and not _alive(int(left.name.split("-")[2])):
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=f"kvfleet-run-{os.getpid()}-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def variables_without_trace(extra_vars: Mapping[str, Any] | None) -> Iterator[list[str]]:
    """Arguments of ansible-playbook for ``extra_vars``, which stand neither in them nor on a disk.

    The variables lie in memory, in a file of this user alone that is gone when the block ends.
    """
    if not extra_vars:
        yield []
        return
    memory = Path("/dev/shm")  # noqa: S108 - its folder below is made for this call with mode 0700
    with private_folder(memory if memory.is_dir() else Path(tempfile.gettempdir())) as folder:
        path = folder / "vars.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dict(extra_vars)))
        yield ["-e", f"@{path}"]


#: where Ansible finds what belongs to this checkout, by the environment variable that wins over ansible.cfg
_PLUGINS: Mapping[str, str] = {
    "ANSIBLE_ACTION_PLUGINS": "plugins/action",
    "ANSIBLE_CALLBACK_PLUGINS": "plugins/callback",
    "ANSIBLE_LIBRARY": "plugins/modules",
    "ANSIBLE_MODULE_UTILS": "plugins/module_utils",
    "ANSIBLE_ROLES_PATH": "roles",
}


def plugin_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Ansible's search paths with this checkout's folders first, then what ``environment`` names.

    A variable that is set for another tool (a callback that records runs, say) would hide ours otherwise, and
    ansible-runner itself sets the path of its callback.
    """
    return {
        name: os.pathsep.join([str(ROOT / folder), *filter(None, [environment.get(name)])])
        for name, folder in _PLUGINS.items()
    }


def run_playbook(
    playbook: Path,
    inventory: Path,
    *,
    extra_vars: Mapping[str, Any] | None = None,
    limit: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    show_output: bool = False,
    cancel: threading.Event | None = None,
    timeout_s: float = 6 * 3600,
    arguments: Sequence[str] = (),
    keep_output: Path | None = None,
) -> PlaybookRun:
    """Run ``playbook`` against ``inventory`` and return what happened; never raises for a failing host.

    The private directory is fresh, for this user alone (0700), and removed afterwards: nothing of one run can leak into
    the next, and no variable is left on disk. ``on_event`` gets every event of ansible-runner; what it raises ends the
    run. ``show_output`` lets Ansible's own text through. ``cancel`` ends the run soon after it is set, ``timeout_s``
    seconds after its start; both leave a run that is not complete, and no process of it on this machine.
    ``keep_output`` is a file for Ansible's own text. Safe to call from threads.
    """
    final: dict[str, Any] = {}

    def watch(event: Event) -> None:
        if event.get("event") == "playbook_on_stats":
            final.update(event.get("event_data") or {})
        if on_event is not None:
            on_event(event)

    collector = Collector(watch)
    deadline = time.monotonic() + timeout_s
    asked = cancel or threading.Event()
    late = False

    def stop() -> bool:
        nonlocal late
        late = late or time.monotonic() > deadline
        if (late or asked.is_set()) and collector.pid:
            # ansible-runner would kill the process group alone, which leaves the workers
            end_run(collector.pid, str(private))
        return late or asked.is_set()

    started = time.monotonic()
    with private_folder(Path(tempfile.gettempdir())) as private, variables_without_trace(extra_vars) as words:
        try:
            runner = ansible_runner.run(
                private_data_dir=str(private),
                project_dir=str(ROOT),
                playbook=str(playbook),
                inventory=str(inventory),
                cmdline=" ".join([*words, *arguments]) or None,
                limit=limit,
                event_handler=collector,
                # without it ansible-runner would take over the process's signals
                cancel_callback=stop,
                quiet=not show_output,
                suppress_env_files=True,
                envvars={
                    "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                    **plugin_paths(os.environ),
                    # ansible-playbook of this very environment, not another one on the PATH
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
                },
            )
            output = runner.stdout.read()
        except BaseException:
            if collector.pid:
                end_run(collector.pid, str(private))
            raise
    if keep_output is not None:
        keep_output.write_text(output)
    if final:
        collector.settle(final)
    status = "timeout" if late and runner.status == "canceled" else str(runner.status)
    tail = "".join(output.splitlines(keepends=True)[-20:])
    return PlaybookRun(status, int(runner.rc), time.monotonic() - started, collector.hosts, collector.complete, tail)


def _count(host: HostRun, kind: str, data: Event) -> None:
    result = data.get("res") or {}
    if kind == "runner_on_skipped":
        host.skipped += 1
        return
    host.executed += 1
    if kind == "runner_on_unreachable":
        host.unreachable = True
        host.failures.append(f"{_LOST}{result.get('msg', 'no reason given')}")
    elif kind == "runner_on_failed" and data.get("task_action") == "rollout_gate":
        # it runs once for all: what it says is about the rollout, not about the host that it ran for
        host.gate = str(result.get("msg", ""))
    elif kind == "runner_on_failed" and not data.get("ignore_errors"):
        host.failures.append(f"{data.get('task', '?')}: {result.get('msg', 'no reason given')}")
    elif result.get("changed"):
        host.changed.append(str(data.get("task", "?")))
    if data.get("task_action") in ANSWERS and kind == "runner_on_ok":
        host.answers[str(data["task_action"])] = {k: v for k, v in result.items() if k not in _NEEDLESS}
    facts = result.get("ansible_facts")
    if isinstance(facts, dict):
        host.facts.update(facts)
        if "kvfleet_plan" in facts:
            # the same plan: once is enough
            host.answers.get("kv_plan", {}).pop("plan", None)
