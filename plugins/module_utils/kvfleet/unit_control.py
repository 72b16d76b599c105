"""Bring systemd units to the state that their files describe, and say why one does not come up.

The decision to restart comes from comparing what a running unit was started with against what is on disk now
(``kvfleet-unit digest``), never from "this run changed a file": a run that dies between rendering and restarting
would otherwise leave the old process running for ever.
"""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .command import CommandRunner
from .findings import KvfleetError, refuse

#: lines that only tell that something else failed; the cause stands in another line
_CONSEQUENCES = ("See root cause above", "Engine core initialization failed", "the process ended before")
_NAMED_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception)\b: .+")
_ANY_ERROR = re.compile(r"\bERROR\b.*|kvfleet-unit: .+")


@dataclass(frozen=True)
class UnitState:
    """What systemd and the unit's own record say of one unit."""

    name: str
    active: bool
    enabled: bool
    needs_reload: bool
    started_with: str | None
    wanted: str


@dataclass
class UnitActions:
    """What has to be done, in order; all empty = nothing."""

    reload: bool = False
    remove: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    enable: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether anything has to be done at all."""
        return bool(self.reload or self.remove or self.stop or self.enable or self.start)

    def describe(self) -> list[str]:
        """One line an action, for diff output and check mode."""
        lines = ["daemon-reload"] if self.reload else []
        for verb in ("remove", "stop", "enable", "start"):
            lines += [f"{verb} {name}" for name in getattr(self, verb)]
        return lines


def decide(
    states: Sequence[UnitState],
    strays: Sequence[str],
    target_enabled: bool,
    target: str,
    target_active: bool = True,
) -> UnitActions:
    """Turn what is into what has to be done.

    ``states`` come in start order. A unit that runs with something else than what is on disk is stopped, and so is
    every later unit that depends on an earlier one (systemd propagates it); everything that does not run is started.
    ``strays`` are units of ours on the host that the plan does not name any more.
    """
    actions = UnitActions(remove=list(strays))
    actions.reload = bool(strays) or any(state.needs_reload for state in states)
    stale = [state for state in states if state.active and state.started_with != state.wanted]
    # last started, first stopped
    actions.stop = [state.name for state in reversed(stale)]
    actions.enable = [state.name for state in states if not state.enabled]
    if not target_enabled:
        actions.enable.append(target)
    actions.start = [state.name for state in states if not state.active or state in stale]
    if not target_active:
        # systemctl stop of a target that is not active stops nothing, whatever is PartOf= it
        actions.start.append(target)
    return actions


class UnitControl:
    """Systemd as seen through an injected command runner."""

    def __init__(
        self,
        run: CommandRunner,
        helper: str,
        unit_directory: Path = Path("/etc/systemd/system"),
        run_directory: Path = Path("/run/kvfleet"),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._helper = helper
        self._unit_directory = unit_directory
        self._run_directory = run_directory
        self._sleep = sleep

    def state(self, unit: str) -> UnitState:
        """Ask systemd for ``unit`` and compare its last start with what is on disk."""
        shown = self._show(unit, "ActiveState", "UnitFileState", "NeedDaemonReload", "LoadState")
        digest = self._run([self._helper, "digest", unit])
        if not digest.ok:
            raise refuse("KVF-SVC-001", f"The digest of {unit} could not be computed: {digest.stderr.strip()}.", "")
        record = self._run_directory / f"{unit}.digest"
        return UnitState(
            name=unit,
            active=shown.get("ActiveState") == "active",
            enabled=shown.get("UnitFileState") == "enabled",
            needs_reload=shown.get("NeedDaemonReload") == "yes" or shown.get("LoadState") != "loaded",
            started_with=record.read_text().strip() if record.is_file() else None,
            wanted=digest.stdout.strip(),
        )

    def is_active(self, unit: str) -> bool:
        """Whether systemd calls ``unit`` active."""
        return self._show(unit, "ActiveState").get("ActiveState") == "active"

    def is_enabled(self, unit: str) -> bool:
        """Whether ``unit`` is enabled for exactly what its file names: systemd says so after the first link already.

        ``systemctl enable`` leaves the links of an earlier version of the file.
        """
        if self._show(unit, "UnitFileState").get("UnitFileState") != "enabled":
            return False
        path = self._unit_directory / unit
        lines = path.read_text().splitlines() if path.is_file() else []
        wanted = [word for line in lines if line.startswith("WantedBy=") for word in line[len("WantedBy=") :].split()]
        return self._links(unit) == {self._unit_directory / f"{other}.wants" / unit for other in wanted}

    def _links(self, unit: str) -> set[Path]:
        """Links by which others want ``unit``."""
        return {path for path in self._unit_directory.glob(f"*.wants/{glob.escape(unit)}") if path.is_symlink()}

    def strays(self, owned_prefixes: Sequence[str], wanted: Sequence[str]) -> list[str]:
        """Unit files of ours that are not wanted; an instance before the server that it needs."""
        found = [
            path.name
            for prefix in owned_prefixes
            for path in sorted(self._unit_directory.glob(f"{prefix}*"))
            if path.is_file()  # neither drop-in folders nor the .wants of the target
        ]
        # a timer that is wanted needs the service that it starts
        served = {f"{name[: -len('.timer')]}.service" for name in wanted if name.endswith(".timer")}
        return [name for name in found if name not in wanted and name not in served]

    def apply(self, actions: UnitActions, timeout_s: float, cache: tuple[str, str] | None = None) -> None:
        """Do what :func:`decide` found; raises :class:`KvfleetError` with the journal's cause when a unit fails.

        With ``cache`` (data directory and mount point of the cache partition) a removed unit's tier and settings go
        too; without it everything that it stored stays.
        """
        for unit in actions.remove:
            self._systemctl("disable", "--now", unit, timeout_s=timeout_s)
            (self._unit_directory / unit).unlink()
            (self._run_directory / f"{unit}.digest").unlink(missing_ok=True)
            if cache is not None and "@" in unit:
                forgotten = self._run([self._helper, "forget", unit, *cache])
                if not forgotten.ok:
                    raise refuse(
                        "KVF-SVC-004",
                        f"{unit} is removed, but not what it stored: {forgotten.stderr.strip()}.",
                        f"Look at {cache[0]}.",
                    )
        if actions.reload:
            self._systemctl("daemon-reload")
        for unit in actions.stop:
            self._systemctl("stop", unit, timeout_s=timeout_s)
        for unit in actions.enable:
            for link in self._links(unit):
                link.unlink()
        if actions.enable:
            self._systemctl("enable", *actions.enable)
        for unit in actions.start:
            self._run(["systemctl", "reset-failed", unit])
            self._start(unit, timeout_s)

    def settle(self, units: Sequence[str], seconds: float) -> None:
        """Watch that the main processes of ``units`` stay the same for ``seconds``: "started" is not "running"."""
        before = {unit: self._show(unit, "MainPID", "NRestarts") for unit in units}
        self._sleep(seconds)
        for unit in units:
            after = self._show(unit, "MainPID", "NRestarts", "ActiveState")
            if after.get("ActiveState") != "active" or {k: after[k] for k in before[unit]} != before[unit]:
                raise self._failure(unit, f"did not stay up for {seconds:g} s")

    def _start(self, unit: str, timeout_s: float) -> None:
        result = self._run(["systemctl", "start", unit], timeout_s=timeout_s)
        if not result.ok:
            raise self._failure(unit, "did not start")
        if unit.endswith(".timer"):
            # a service records its own start; a timer runs nothing when it is started
            self._run([self._helper, "started", unit])

    def _failure(self, unit: str, what: str) -> KvfleetError:
        lines = self._run(["journalctl", "-u", unit, "-n", "400", "-o", "cat", "--no-pager"]).stdout.splitlines()
        cause = root_cause(lines)
        # a unit that cannot come up must not burn the host until somebody looks
        self._run(["systemctl", "stop", unit], timeout_s=120)
        return refuse(
            "KVF-SVC-002",
            f"{unit} {what}: {cause}.",
            f"Read more with: journalctl -u {unit}",
            unit=unit,
            journal_tail=lines[-30:],
        )

    def _systemctl(self, *arguments: str, timeout_s: float = 90) -> None:
        result = self._run(["systemctl", *arguments], timeout_s=timeout_s)
        if not result.ok:
            raise refuse(
                "KVF-SVC-003",
                f"systemctl {' '.join(arguments)} failed with status {result.returncode}: {result.stderr.strip()}.",
                "Look at the unit with systemctl status and run again.",
            )

    def _show(self, unit: str, *properties: str) -> dict[str, str]:
        result = self._run(["systemctl", "show", unit, f"--property={','.join(properties)}"])
        return dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)


def root_cause(journal: Sequence[str]) -> str:
    """The line that tells why a service failed: the last error that is not only the consequence of another one."""
    lines = [line.strip() for line in journal if not any(text in line for text in _CONSEQUENCES)]
    for pattern, candidates in ((_NAMED_ERROR, lines), (_ANY_ERROR, lines), (_ANY_ERROR, journal)):
        found = [match.group(0) for match in map(pattern.search, candidates) if match]
        if found:
            return found[-1].strip().rstrip(".")
    return journal[-1].strip().rstrip(".") if journal else "its journal is empty"
