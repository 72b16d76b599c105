"""A host's traffic and its way back: drain before a restart, return after a proof, restore the last proved state.

What was proved last lies in one file that only root reads (:data:`SNAPSHOT`): the whole plan, the release's directory,
and the text of every unit and settings file. A restore writes those texts back, so that the fingerprint of the last
proof holds again and one generation shows it.
"""

from __future__ import annotations

import datetime
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from . import engine, metrics, proof
from .command import CommandRunner
from .findings import refuse
from .host_access import base_url
from .http import HttpClient, HttpFailure
from .unit_control import UnitControl, decide

#: below the plan's etc directory
SNAPSHOT = Path("proved") / "snapshot.json"
#: below the root of the releases: ``ready`` exists while the host takes traffic, ``state.json`` says why not
TRAFFIC = "traffic"
_STATE = "state.json"
#: our part of nginx's configuration (role api_proxy)
PROXY = Path("/etc/nginx/conf.d/kvfleet.conf")
_TARGET = "kvfleet.target"
_WATCH = "kvfleet-watch.timer"

Fetch = Callable[[str, str], str]


@dataclass(frozen=True)
class Hooks:
    """The inventory's commands (argument lists, no shell) around a restart, and their limits in seconds."""

    drain: tuple[str, ...] = ()
    undrain: tuple[str, ...] = ()
    command_limit_s: float = 60.0
    #: how long a load balancer may take to see that the readiness file is gone
    notice_s: float = 0.0
    #: how long to wait for requests in flight after that
    deadline_s: float = 60.0


def traffic_directory(plan: Mapping[str, Any]) -> Path:
    """Where the readiness file lies; anybody on the host may read it."""
    return Path(str(plan["paths"]["releases"])).parent / TRAFFIC


def snapshot_path(plan: Mapping[str, Any]) -> Path:
    """The file with the last proved state."""
    return Path(str(plan["paths"]["etc"])) / SNAPSHOT


# ---------------------------------------------------------------------------------------------------------- traffic


def will_move(
    control: UnitControl, units: Sequence[str], owned_prefixes: Sequence[str], helper: str, takes_traffic: bool
) -> list[str]:
    """Units that bringing ``units`` to what is on disk would stop or, where the host takes traffic, start.

    Empty on a host that serves nothing: there is nobody to take away. A service that comes back or is new beside
    others is not proved, so a host that takes traffic must not get any while it starts.
    """
    if not os.access(helper, os.X_OK):
        return []
    strays = control.strays(owned_prefixes, units)
    actions = decide([control.state(unit) for unit in units], strays, True, _TARGET)
    services = [unit for unit in actions.start if "@" in unit and unit not in actions.stop] if takes_traffic else []
    return actions.stop + list(strays) + services


def in_flight(plan: Mapping[str, Any], fetch: Fetch | None = None) -> int:
    """Requests that the host's instances run or hold waiting; an instance that does not answer has none."""
    fetch = fetch or _fetch
    total = 0.0
    for instance in plan["instances"]:
        try:
            sampled = metrics.parse(fetch(base_url(instance), "/metrics"))
        except (HttpFailure, ValueError):
            continue
        total += sampled.total("vllm:num_requests_running") + sampled.total("vllm:num_requests_waiting")
    return int(total)


def _fetch(url: str, path: str) -> str:
    return HttpClient(url).get_text(path, timeout_s=5)


def drain(
    plan: Mapping[str, Any],
    reason: str,
    hooks: Hooks,
    run: CommandRunner,
    *,
    fetch: Fetch | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Take the host out of traffic and wait for what it has accepted; returns ``in_flight`` left and ``waited_s``.

    The readiness file goes first, then the hook runs, so a balancer that polls and a router that is told both know.
    A host that took traffic gets ``notice_s`` before the wait begins: until its next poll a balancer sends more.
    Raises KVF-SVC-050 when the hook fails. A host that took traffic goes on serving then: its readiness file is back,
    and the hook's counterpart was called, because a hook that fails late may have told the router already. A host
    that was out of traffic stays out.
    """
    folder = traffic_directory(plan)
    was_ready = is_ready(folder)
    began = clock()
    _say(folder, ready=False, reason=reason)
    if hooks.drain:
        answer = run(list(hooks.drain), timeout_s=hooks.command_limit_s)
        if not answer.ok:
            if was_ready:
                _say(folder, ready=True, reason="")
                if hooks.undrain:
                    run(list(hooks.undrain), timeout_s=hooks.command_limit_s)
            raise refuse(
                "KVF-SVC-050",
                f"kvfleet_drain_command ended with status {answer.returncode}: "
                f"{_last(answer.stderr or answer.stdout)}.",
                "Repair the command; nothing was restarted and the host still takes traffic."
                if was_ready
                else "Repair the command; nothing was restarted and the host stays out of traffic, as it was.",
            )
    if was_ready:
        sleep(max(0.0, began + hooks.notice_s - clock()))
    deadline = clock() + hooks.deadline_s
    quiet = 0
    left = in_flight(plan, fetch)
    while clock() < deadline:
        # twice: a request may be between the balancer and the engine
        quiet = quiet + 1 if left == 0 else 0
        if quiet >= 2:
            break
        sleep(0.5)
        left = in_flight(plan, fetch)
    return {"in_flight": left, "waited_s": round(clock() - began, 1)}


def serve(plan: Mapping[str, Any], hooks: Hooks, run: CommandRunner) -> bool:
    """Return the host to traffic; says whether it was out of it. Raises KVF-SVC-051 when the hook fails."""
    folder = traffic_directory(plan)
    if is_ready(folder):
        return False
    if hooks.undrain:
        answer = run(list(hooks.undrain), timeout_s=hooks.command_limit_s)
        if not answer.ok:
            raise refuse(
                "KVF-SVC-051",
                f"kvfleet_undrain_command ended with status {answer.returncode}: "
                f"{_last(answer.stderr or answer.stdout)}.",
                "Repair the command and run again; the host is proved but takes no traffic.",
            )
    _say(folder, ready=True, reason="")
    return True


def is_ready(folder: Path) -> bool:
    """Whether the host takes traffic as far as the readiness file says."""
    return (folder / "ready").is_file()


def told(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """``ready`` as a load balancer sees it, ``reason`` and ``since`` of its last change; None before the first."""
    folder = traffic_directory(plan)
    try:
        said = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return None
    return {"ready": is_ready(folder), "reason": str(said.get("reason", "")), "since": str(said.get("since", ""))}


def _say(folder: Path, *, ready: bool, reason: str) -> None:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    _write(folder / _STATE, json.dumps({"ready": ready, "reason": reason, "since": now}) + "\n", 0o644)
    if ready:
        _write(folder / "ready", "ready\n", 0o644)
    else:
        (folder / "ready").unlink(missing_ok=True)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it said nothing"


# --------------------------------------------------------------------------------------------------------- snapshots


def take(
    plan: Mapping[str, Any], unit_directory: Path = proof.UNIT_DIRECTORY, proxy_file: Path = PROXY
) -> dict[str, Any] | None:
    """The present state as a snapshot, when the last proof covers it; None when it does not."""
    record = proof.read_record(Path(str(plan["paths"]["state"])))
    files = proof.unit_files(plan, unit_directory)
    parts = proof.fingerprint(plan, files)
    if record is None or proof.difference(record, parts, "smoke"):
        return None
    etc = Path(str(plan["paths"]["etc"]))
    extra = [unit_directory / _TARGET, etc / "plan.json", *_watch_files(etc, unit_directory), proxy_file]
    return {
        "schema": 1,
        "fingerprint": parts["all"],
        "current": parts["release"],
        "plan": dict(plan),
        # a file that is not there says nothing: older snapshots did not look for this one
        "proxy": proxy_file.is_file(),
        "files": [_file(path) for path in [*files, *(path for path in extra if path.is_file())]],
    }


def _watch_files(etc: Path, unit_directory: Path) -> list[Path]:
    """Files of the watcher: no proof covers them, but what is restored has to be watched as before."""
    return [unit_directory / "kvfleet-watch.service", unit_directory / _WATCH, etc / "kvfleet-watch.json"]


def _file(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {
        "path": str(path),
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "text": path.read_text(encoding="utf-8"),
    }


def keep(
    plan: Mapping[str, Any],
    unit_directory: Path = proof.UNIT_DIRECTORY,
    *,
    dry_run: bool = False,
    proxy_file: Path = PROXY,
) -> bool:
    """Keep the present, proved state as the one to return to; says whether it was another one before."""
    made = take(plan, unit_directory, proxy_file)
    before = read_snapshot(plan)
    if made is None:
        return False
    if before is not None and all(before.get(key) == made[key] for key in ("fingerprint", "files", "proxy")):
        return False
    if not dry_run:
        path = snapshot_path(plan)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, json.dumps(made, sort_keys=True) + "\n", 0o600)
    return True


def read_snapshot(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that was proved last; None when there is none that can be read."""
    try:
        found = json.loads(snapshot_path(plan).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == 1 else None


def restore(
    plan: Mapping[str, Any], unit_directory: Path = proof.UNIT_DIRECTORY, *, proxy_file: Path = PROXY
) -> dict[str, Any]:
    """Put the last proved release and settings back on disk; starting them is the caller's next step.

    Returns the snapshot's ``plan``, its ``units`` in start order, the ``files`` that were written or removed, and what
    nginx has to follow: ``proxy`` is ``wanted`` (our part of its configuration lies there as proved), ``removed`` (it
    came with the change) or ``untouched``.
    Raises KVF-HOST-083 when the host has no proved state, KVF-HOST-084 when its release is gone.
    """
    found = read_snapshot(plan)
    if found is None:
        raise refuse(
            "KVF-HOST-083",
            "The host holds no proved state to return to.",
            "Repair what the run complained about and run again; journalctl -u 'kvfleet-*' says more.",
        )
    layout = engine.Layout(Path(str(plan["paths"]["releases"])).parent)
    release = Path(found["current"])
    if engine.read_marker(release) is None:
        raise refuse(
            "KVF-HOST-084",
            f"The release that was proved last, {release}, is not on the host any more.",
            "Run site.yml with kvfleet_release set to it.",
        )
    touched = []
    wanted = {entry["path"]: entry for entry in found["files"]}
    # a drop-in or settings file that came later would change what the old units run
    for path in {*proof.unit_files(found["plan"], unit_directory), *proof.unit_files(plan, unit_directory)}:
        if str(path) not in wanted and path.suffix != ".service":
            path.unlink()
            touched.append(str(path))
    for name, entry in wanted.items():
        path = Path(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != entry["text"]:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            _write(path, entry["text"], entry["mode"], entry["uid"], entry["gid"])
            touched.append(name)
    proxy = "wanted" if found.get("proxy") else "untouched"
    if found.get("proxy") is False and proxy_file.is_file():
        proxy_file.unlink()
        touched.append(str(proxy_file))
        proxy = "removed"
    if engine.switch(layout, release):
        touched.append(str(layout.current))
    # the change that failed may have stopped the watcher
    watch = [_WATCH] if (unit_directory / _WATCH).is_file() else []
    units = proof.unit_names(found["plan"]) + watch
    return {"plan": found["plan"], "units": units, "files": sorted(touched), "proxy": proxy}


def _write(path: Path, text: str, mode: int, uid: int | None = None, gid: int | None = None) -> None:
    """Replace ``path`` in one step, never readable by more than ``mode`` says."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=str(path.parent))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if uid is not None and gid is not None and (uid, gid) != (os.getuid(), os.getgid()):
            os.chown(name, uid, gid)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
