"""The fleet from Python: plan, deploy, prove, upgrade, return and look, with one result object a host.

>>> from kvfleet import fleet
>>> done = fleet.deploy("inventories/local", on_event=print)       # doctest: +SKIP
>>> done.exit, {name: host.verdict for name, host in done.hosts.items()}   # doctest: +SKIP

Every call is one run of a playbook through ansible-runner in a fresh private folder (mode 0700, removed afterwards);
extra variables are neither written to a disk nor put on a command line. Calls are independent of each other and may run
in threads, one an inventory. A run without Ansible's final statistics is never a success. What is kept of a run (result
and Ansible's own text, secrets removed) lies below ``results/runs`` and is rotated, each action for itself.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvfleet.checkout import ROOT
from kvfleet.core.findings import refuse
from kvfleet.core.redact import clean, clean_text, secrets_of
from kvfleet.exits import Exit
from kvfleet.runs import Event, HostRun, PlaybookRun, run_playbook


class Action(StrEnum):
    """What a run does; each is one playbook."""

    PLAN = "plan"
    DEPLOY = "deploy"
    BENCHMARK = "benchmark"
    UPGRADE = "upgrade"
    ROLLBACK = "rollback"
    STATUS = "status"


class Verdict(StrEnum):
    """What became of one host."""

    #: what the inventory wants runs, and the proof of it stands
    PROVED = "proved"
    #: plan: it holds; nothing was changed
    PLANNED = "planned"
    #: status: everything is as the inventory wants it
    AS_WANTED = "as wanted"
    #: status: something differs or could not be asked
    DRIFT = "drift"
    #: refused before any change on this host
    REFUSED = "refused"
    #: another host stopped the rollout before this one's turn
    NOT_STARTED = "not started"
    #: it failed, and the release and settings from before are back and proved
    RESTORED = "restored"
    #: the host could not be reached, so what it runs is not known
    UNREACHABLE = "unreachable"
    #: it failed and needs a person
    FAILED = "failed"


#: the exit status that a verdict stands for
EXITS: Mapping[Verdict, Exit] = {
    Verdict.PROVED: Exit.PROVED,
    Verdict.PLANNED: Exit.PROVED,
    Verdict.AS_WANTED: Exit.PROVED,
    Verdict.DRIFT: Exit.NEEDS_A_PERSON,
    Verdict.REFUSED: Exit.REFUSED,
    Verdict.NOT_STARTED: Exit.REFUSED,
    Verdict.RESTORED: Exit.RESTORED,
    Verdict.UNREACHABLE: Exit.NEEDS_A_PERSON,
    Verdict.FAILED: Exit.NEEDS_A_PERSON,
}

_PLAYBOOKS: Mapping[Action, str] = {
    Action.PLAN: "playbooks/plan.yml",
    Action.DEPLOY: "site.yml",
    Action.BENCHMARK: "playbooks/benchmark.yml",
    Action.UPGRADE: "playbooks/upgrade.yml",
    Action.ROLLBACK: "playbooks/rollback.yml",
    Action.STATUS: "playbooks/status.yml",
}
#: names that :func:`_folder` gives; they begin with the time, so their order is that of the runs
_RUN_NAME = re.compile(r"\d{4}-\d\d-\d\dT[\d-]+Z-(?P<action>[a-z]+)-\d+-\d+")
#: fact that the playbooks set to say what a failure left behind
_OUTCOME_FACT = "rollout_outcome"


@dataclass(frozen=True)
class FleetEvent:
    """One step of a run, for progress; ``at_s`` counts seconds from the start of the run.

    ``kind``: ``play`` (a part of the run begins; with ``batch`` of ``batches`` in a rollout, and ``eta_s`` seconds that
    the remaining batches will take at the pace of the last one), ``start`` (a host begins ``task``), ``host`` (it ended
    it, with ``state`` ok, changed, skipped, failed or unreachable and, for failures, ``message``).
    """

    kind: str
    at_s: float
    play: str = ""
    task: str = ""
    host: str = ""
    state: str = ""
    message: str = ""
    batch: int = 0
    batches: int = 0
    eta_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data without empty fields."""
        return {
            name: value for name, value in asdict(self).items() if value not in ("", None) and (value or name == "at_s")
        }


@dataclass(frozen=True)
class HostResult:
    """One host at the end of a run.

    ``release`` and ``profile`` are those of the plan; ``figure`` is the deciding line of the last proof; ``reasons``
    say why the verdict is not a good one; ``tasks`` counts executed tasks (skipped ones apart), ``changed`` names those
    that changed something; ``seconds`` is when this host was done; ``plan`` is the whole plan, ``status`` the compared
    items (:mod:`kvfleet.core.status`) of a status run; ``artifacts`` is the folder with the run's files, support
    bundles included unless ``kvfleet_support_dir`` is set.
    """

    name: str
    verdict: Verdict
    release: str = ""
    profile: str = ""
    figure: str = ""
    reasons: tuple[str, ...] = ()
    tasks: int = 0
    skipped: int = 0
    changed: tuple[str, ...] = ()
    seconds: float = 0.0
    plan: dict[str, Any] | None = None
    status: dict[str, Any] | None = None
    artifacts: Path | None = None

    @property
    def exit(self) -> Exit:
        """The exit status that this host alone would give."""
        return EXITS[self.verdict]

    def as_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """Plain data; the plan only when ``whole``."""
        data = asdict(self)
        data["artifacts"] = str(self.artifacts) if self.artifacts else None
        data["changed"], data["reasons"] = list(self.changed), list(self.reasons)
        if not whole:
            data.pop("plan")
        return data


@dataclass(frozen=True)
class FleetResult:
    """A whole run: ``exit`` is what ``kvfleet`` ends with, ``complete`` whether Ansible gave its final statistics.

    ``ended`` is ``finished``, ``canceled`` or ``timeout``. ``hosts`` holds every host of the inventory (within the
    limit) that the run knew of, also those that were never reached.
    """

    action: Action
    inventory: str
    exit: Exit
    hosts: dict[str, HostResult]
    seconds: float
    complete: bool
    ended: str = "finished"
    artifacts: Path | None = None
    #: the last lines that Ansible printed, when no host did anything
    tail: str = ""

    @property
    def ok(self) -> bool:
        """Whether every host is as it should be."""
        return self.exit == Exit.PROVED

    def as_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """Plain data; the hosts' plans only when ``whole``."""
        return {
            "action": str(self.action),
            "inventory": self.inventory,
            "exit": int(self.exit),
            "ended": self.ended,
            "complete": self.complete,
            "seconds": round(self.seconds, 1),
            "artifacts": str(self.artifacts) if self.artifacts else None,
            "hosts": {name: host.as_dict(whole=whole) for name, host in sorted(self.hosts.items())},
        }


@dataclass
class _Progress:
    """Turns ansible-runner's events into :class:`FleetEvent` objects."""

    report: Callable[[FleetEvent], None]
    started: float = field(default_factory=time.monotonic)
    play: str = ""
    batch: int = 0
    batches: int = 0
    batch_began: float = 0.0

    def __call__(self, event: Event) -> None:
        data = event.get("event_data") or {}
        kind = str(event.get("event", ""))
        at = time.monotonic() - self.started
        result = data.get("res") or {}
        task = str(data.get("task", ""))
        host = str(data.get("host", ""))
        if kind == "playbook_on_play_start":
            self._begin(str(data.get("name") or data.get("play") or ""), at)
        elif kind == "runner_on_start":
            self.report(FleetEvent("start", at, self.play, task, host, batch=self.batch, batches=self.batches))
        elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable", "runner_on_skipped"):
            if data.get("task_action") == "rollout_gate" and isinstance(result.get("batches"), int):
                self.batches = result["batches"]
            state = kind.removeprefix("runner_on_")
            if state == "ok" and result.get("changed"):
                state = "changed"
            message = str(result.get("msg", "")) if state in ("failed", "unreachable") else ""
            self.report(
                FleetEvent("host", at, self.play, task, host, state, clean_text(message), self.batch, self.batches)
            )

    def _begin(self, name: str, at: float) -> None:
        again = name == self.play
        took = at - self.batch_began
        self.batch = self.batch + 1 if again else 1
        self.play, self.batch_began = name, at
        left = self.batches - self.batch + 1
        eta = took * left if again and left > 0 else None
        self.report(FleetEvent("play", at, name, batch=self.batch, batches=self.batches, eta_s=eta))


def judge(action: Action, host: HostRun, *, complete: bool) -> Verdict:
    """The verdict of one host from what the run saw of it.

    Being told nothing is never good: a host counts as proved only when the proof's own module said so in this run.
    """
    said = host.facts.get(_OUTCOME_FACT)
    if host.unreachable:
        return Verdict.UNREACHABLE
    if said == "failed":
        return Verdict.FAILED
    if said == "restored":
        return Verdict.RESTORED
    if action is Action.STATUS:
        # nothing would have been changed, so nothing is refused: a host that could not be asked needs a person
        state = (host.answers.get("host_status") or {}).get("state")
        return Verdict.AS_WANTED if complete and state == "ok" and not host.failures else Verdict.DRIFT
    if host.failures:
        return Verdict.REFUSED if not host.changed else Verdict.FAILED
    if not host.changed and errors_of(host):
        return Verdict.REFUSED
    if action is Action.PLAN:
        return Verdict.PLANNED if complete and host.facts.get("kvfleet_plan") else Verdict.REFUSED
    if proof_of(host) and complete:
        return Verdict.PROVED
    return Verdict.FAILED if host.changed else Verdict.NOT_STARTED


def errors_of(host: HostRun) -> list[Any]:
    """The errors of the host's plan."""
    return list((host.facts.get("kvfleet_plan") or {}).get("errors") or [])


def proof_of(host: HostRun) -> bool:
    """Whether the proof of this run was accepted, or the last one still stands and the host answered."""
    judged = host.answers.get("bench_verdict")
    if judged is not None:
        return bool(judged.get("accepted"))
    return bool((host.answers.get("proof_state") or {}).get("proved"))


def summarise(action: Action, run: PlaybookRun, artifacts: Path | None = None) -> dict[str, HostResult]:
    """One result a host; hosts that only the gate knows of (unreachable from the start) included."""
    secrets = secrets_of([host.facts for host in run.hosts.values()])
    results = {}
    for name, host in run.hosts.items():
        plan = host.facts.get("kvfleet_plan") or (host.answers.get("kv_plan") or {}).get("plan")
        # benchmark asks too, but before its proof; that state is no answer of the run
        status = host.answers.get("host_status") if action is Action.STATUS else None
        verdict = judge(action, host, complete=run.complete)
        refused = gate_lines(name, run) if verdict is Verdict.NOT_STARTED else []
        if refused:
            verdict = Verdict.REFUSED
        results[name] = HostResult(
            name=name,
            verdict=verdict,
            release=str(((plan or {}).get("release") or {}).get("id") or ""),
            profile=str((plan or {}).get("profile") or ""),
            figure=_figure(host),
            reasons=tuple(clean_text(text, secrets) for text in refused or _reasons(verdict, host, run, secrets)),
            tasks=host.executed,
            skipped=host.skipped,
            changed=tuple(host.changed),
            seconds=round(host.seconds, 1),
            plan=clean(plan, secrets) if plan else None,
            status={key: clean(status.get(key), secrets) for key in ("state", "items", "seen")} if status else None,
            artifacts=artifacts,
        )
    return results


def gate_lines(name: str, run: PlaybookRun) -> list[str]:
    """What the gate before the first change said against host ``name``, or against all: lines of its table."""
    said = next((host.gate for host in run.hosts.values() if host.gate), "")
    lines = said.splitlines()[1:]
    return [line.split("  ", 2)[-1].strip() for line in lines if line.startswith((f"  {name} ", "  all hosts "))]


def _figure(host: HostRun) -> str:
    for module in ("bench_verdict", "proof_state"):
        line = (host.answers.get(module) or {}).get("line")
        if line:
            return str(line)
    return ""


def _reasons(verdict: Verdict, host: HostRun, run: PlaybookRun, secrets: Sequence[str]) -> list[str]:
    found = list(host.failures)
    if verdict is Verdict.DRIFT:
        found += [str(line) for line in (host.answers.get("host_status") or {}).get("drift") or []]
        found = found or ["no answer"]
    if verdict is Verdict.RESTORED:
        found = found or host.rescued
    if verdict is Verdict.REFUSED and not found:
        found = [str((host.answers.get("kv_plan") or {}).get("error_text") or "")]
    if verdict is Verdict.NOT_STARTED:
        culprits = sorted(
            name for name, other in run.hosts.items() if not other.ok or other.rescued or errors_of(other)
        )
        gate = next((other.gate for other in run.hosts.values() if other.gate), "")
        if culprits:
            found.append(f"the run stopped at {', '.join(culprits)}")
        else:
            found.append(gate.splitlines()[0] if gate else "the run ended before its turn")
    if not run.complete:
        found.append("the run did not end: what it left is proved or marked by the next run")
    return [clean_text(text, secrets) for text in found if text]


def total(action: Action, run: PlaybookRun, hosts: Mapping[str, HostResult]) -> Exit:
    """The exit status of the whole run: its worst host; nothing that did not end is good.

    A refusal means that nothing was changed anywhere; where another host was changed, a person has to look.
    """
    if not run.complete and (hosts or run.status in ("canceled", "timeout")):
        return Exit.NEEDS_A_PERSON
    if not hosts:
        return Exit.REFUSED
    worst = max(host.exit for host in hosts.values())
    if worst == Exit.REFUSED and any(host.changed for host in hosts.values()):
        return Exit.NEEDS_A_PERSON
    if worst == Exit.PROVED and run.rc != 0:
        return Exit.NEEDS_A_PERSON
    if action is not Action.STATUS and worst == Exit.NEEDS_A_PERSON and _untouched(hosts):
        return Exit.REFUSED
    return worst


def _untouched(hosts: Mapping[str, HostResult]) -> bool:
    """Whether the only trouble is hosts out of reach and nothing was changed or proved on any host."""
    harmless = (Verdict.REFUSED, Verdict.NOT_STARTED, Verdict.UNREACHABLE, Verdict.PLANNED)
    return all(host.verdict in harmless and not host.changed for host in hosts.values())


def rotate(folder: Path, keep: int) -> list[Path]:
    """Remove runs below ``folder``, of each action all but the ``keep`` newest; returns what was removed.

    A run that still goes on (:func:`held`) is never removed. Each action counts for itself: looking at a fleet often
    must not take away the support bundle of a deploy that failed. What is not named like a run is not ours.
    """
    runs: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        named = _RUN_NAME.fullmatch(path.name)
        if named and path.is_dir():
            runs.setdefault(named["action"], []).append(path)
    return [path for of in runs.values() for path in of[: max(0, len(of) - keep)] if _remove(path)]


def _remove(path: Path) -> bool:
    """Remove the folder of a run; not that of one which goes on, nor one of which this cannot be known."""
    try:
        with held(path):
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    return not path.exists()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Mark ``folder`` as that of a run that goes on, until the block or this process ends, however it ends.

    Raises BlockingIOError where another run holds it, OSError where the file system has no locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _folder(action: Action, artifacts: Path) -> Path:
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H-%M-%S-%fZ")
    artifacts.mkdir(parents=True, exist_ok=True)
    # the thread's id keeps parallel runs apart that begin in the same microsecond
    folder = artifacts / f"{now}-{action}-{os.getpid()}-{threading.get_ident() % 10**6}"
    folder.mkdir(mode=0o700)
    return folder


def run(
    action: Action,
    inventory: str | Path,
    *,
    limit: str | None = None,
    variables: Mapping[str, Any] | None = None,
    on_event: Callable[[FleetEvent], None] | None = None,
    cancel: threading.Event | None = None,
    timeout_s: float = 6 * 3600,
    artifacts: Path | None = None,
    keep: int = 20,
    show_output: bool = False,
    arguments: Sequence[str] = (),
) -> FleetResult:
    """One run of ``action`` against ``inventory``; the other functions of this module only name the action.

    ``limit``: Ansible's host pattern. ``variables``: extra variables, which win over the inventory's. ``on_event`` gets
    progress from the thread of this call; what it raises ends the run. ``cancel``: set it from another thread to end
    the run. ``timeout_s``: seconds after which it is ended. ``artifacts``: folder that keeps the last ``keep`` runs
    of each action, and all that go on (default ``results/runs``; 0 keeps nothing). ``arguments``: more words for
    ansible-playbook, such as ``--forks=50``.

    Never raises for what happens on hosts. Raises KvfleetError: KVF-HOST-070 without such an inventory.
    """
    inventory = Path(inventory)
    if not inventory.exists():
        raise refuse("KVF-HOST-070", f"There is no inventory {inventory}.", "Name an inventory file or folder with -i.")
    inventory = inventory.resolve()
    base = artifacts if artifacts is not None else ROOT / "results" / "runs"
    folder = _folder(action, base) if keep > 0 else None
    with ExitStack() as going:
        if folder is not None:
            # without locks no run is ever removed, but this one goes on
            with suppress(OSError):
                going.enter_context(held(folder))
        cancel = cancel or threading.Event()
        done = run_playbook(
            ROOT / _PLAYBOOKS[action],
            inventory,
            # a support bundle of a host that failed belongs to this run, unless kvfleet_support_dir says otherwise
            extra_vars={**(variables or {}), **({"rollout_run_dir": str(folder)} if folder else {})},
            limit=limit,
            on_event=_Progress(on_event) if on_event else None,
            show_output=show_output,
            cancel=cancel,
            timeout_s=timeout_s,
            arguments=arguments,
            keep_output=folder / "ansible.log" if folder else None,
        )
        hosts = summarise(action, done, folder)
        ended = {"canceled": "canceled", "timeout": "timeout"}.get(done.status, "finished")
        result = FleetResult(
            action, str(inventory), total(action, done, hosts), hosts, done.seconds, done.complete, ended, folder,
            "" if hosts else clean_text(done.tail),
        )  # fmt: skip
        if folder is not None:
            known = secrets_of(dict(variables or {}))
            log = folder / "ansible.log"
            log.write_text(clean_text(log.read_text(), known))
            log.chmod(0o600)
            record = folder / "result.json"
            record.touch(mode=0o600)
            record.write_text(json.dumps(clean(result.as_dict(whole=True), known), indent=1) + "\n")
            rotate(base, keep)
    return result


def plan(inventory: str | Path, **options: Any) -> FleetResult:
    """Plan every host; changes nothing. Hosts end ``planned`` or ``refused``. Options: see :func:`run`."""
    return run(Action.PLAN, inventory, **options)


def deploy(inventory: str | Path, **options: Any) -> FleetResult:
    """Plan, provision, deploy and prove, canary first, then in batches. Options: see :func:`run`.

    Hosts end ``proved``, ``refused``, ``restored``, ``not started``, ``unreachable`` or ``failed``.
    """
    return run(Action.DEPLOY, inventory, **options)


def benchmark(inventory: str | Path, *, force: bool = True, **options: Any) -> FleetResult:
    """Prove the hosts again, also (``force``) where nothing changed since the last proof. Options: see :func:`run`."""
    variables = {**(options.pop("variables", None) or {}), "smoke_benchmark_force": force}
    return run(Action.BENCHMARK, inventory, variables=variables, **options)


def upgrade(inventory: str | Path, *, release: str | None = None, **options: Any) -> FleetResult:
    """Go over to ``release`` (default: what the inventory says), canary first, then in batches; return where it fails.

    Hosts end as with :func:`deploy`; one on which nothing runs is refused. Options: see :func:`run`.
    """
    variables = {**(options.pop("variables", None) or {}), **({"kvfleet_release": release} if release else {})}
    return run(Action.UPGRADE, inventory, variables=variables, **options)


def rollback(inventory: str | Path, *, release: str | None = None, **options: Any) -> FleetResult:
    """Return to the proved release that each host left last, or to ``release``, which it must hold; in waves too.

    Hosts end as with :func:`deploy`; one that holds no such release is refused. Options: see :func:`run`.
    """
    variables = {**(options.pop("variables", None) or {}), **({"upgrade_rollback_release": release} if release else {})}
    return run(Action.ROLLBACK, inventory, variables=variables, **options)


def status(inventory: str | Path, **options: Any) -> FleetResult:
    """Compare what runs with what the inventory wants; changes nothing. Hosts end ``as wanted`` or ``drift``."""
    return run(Action.STATUS, inventory, **options)
