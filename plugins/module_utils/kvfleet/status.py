"""What runs on a host against what the inventory wants: one :class:`Item` a thing, and drift named by it.

:func:`observe` looks (files, systemd, metrics; it changes nothing and generates nothing), :func:`compare` judges and is
pure. The wanted side is the plan of this very run, so a value changed in the inventory shows before it is deployed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from . import engine, metrics, proof, serving
from .command import CommandRunner
from .disk_probe import HostPaths, parse_mountinfo, read_record, record_path
from .host_access import base_url, server_url
from .http import HttpClient, HttpFailure
from .units import GIB, human_bytes
from .versions import Version

#: the states of an item; ``unknown`` = the host could not tell
OK, DRIFT, UNKNOWN = "ok", "drift", "unknown"
#: prefixes of the units that belong to kvfleet
OWNED_PREFIXES = ("kvfleet-vllm@", "kvfleet-lmcache@")
#: left on a root or release file system below this, the next release does not fit (a release takes about 2.6 GiB)
LOW_SPACE_BYTES = 4 * GIB
#: a look takes at most some deadlines of 30 s; one that is older than this means that nobody looks any more
STALE_LOOK_S = 300
#: what the watcher finds in a unit that answers; a queue is no fault
WELL = ("ok", "busy")
#: mount options of a file system that takes no writes; the last two are ext4's own after an error, since Linux 6.15
READ_ONLY = {"ro", "emergency_ro", "shutdown"}
#: states of a unit that systemd is working on
MOVING = ("activating", "deactivating", "reloading")

#: a line of our part of nginx's configuration that says where requests go
_PROXY_PASS = re.compile(r"^\s*proxy_pass http://127\.0\.0\.1:(\d+);", re.MULTILINE)

Fetch = Callable[[str, str], str]


@dataclass(frozen=True)
class Item:
    """One compared thing: ``area`` (plan, release, settings, unit, health, mount, disk, driver, space, tier, proxy,
    verdict, traffic), ``name`` within it, ``state`` (ok, drift, unknown), and both sides as text; ``note`` says more
    where both do not suffice."""

    area: str
    name: str
    state: str
    wanted: str
    found: str
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain data for a module's result."""
        return {name: str(getattr(self, name)) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        text = f"{self.area} {self.name}".strip()
        sides = f"{self.found}" if self.wanted in ("", self.found) else f"{self.found}, wanted {self.wanted}"
        return f"{text}: {sides}" + (f" ({self.note})" if self.note else "")


# ---------------------------------------------------------------------------------------------- reading unit files


def unit_file_words(text: str) -> tuple[list[str], dict[str, str]]:
    """Arguments of ``ExecStart=`` and the variables of ``Environment=`` of a unit file, unquoted as systemd does.

    Continuation lines are joined; ``$$`` and ``%%`` become ``$`` and ``%``. Without ``ExecStart=`` the list is empty.
    """
    joined = text.replace("\\\n", " ")
    command: list[str] = []
    environment: dict[str, str] = {}
    for line in joined.splitlines():
        name, equals, value = line.strip().partition("=")
        if not equals or name not in ("ExecStart", "Environment"):
            continue
        try:
            words = shlex.split(value)
        except ValueError:
            words = value.split()
        words = [word.replace("$$", "$").replace("%%", "%") for word in words]
        if name == "ExecStart":
            command = words
        else:
            environment.update(dict(word.split("=", 1) for word in words if "=" in word))
    return command, environment


def options(command: Sequence[str]) -> dict[str, str]:
    """A command line as option -> value; words before the first option stand under ``command``.

    An option that comes several times keeps all values, in order, separated by blanks.
    """
    found: dict[str, str] = {}
    name = "command"
    for word in command:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.setdefault(name, "")
            word = value
            if not equals:
                continue
        found[name] = f"{found.get(name, '')} {word}".strip()
    return found


# ---------------------------------------------------------------------------------------------------------- looking


def observe(
    plan: Mapping[str, Any],
    run: CommandRunner,
    *,
    serial: str = "",
    driver: str | None = None,
    proxy: bool = False,
    paths: HostPaths | None = None,
    layout: engine.Layout | None = None,
    helper: str = "/opt/kvfleet/libexec/kvfleet-unit",
    run_directory: Path = Path("/run/kvfleet"),
    watch_directory: Path = Path("/run/kvfleet-watch"),
    proxy_file: Path = serving.PROXY,
    fetch: Fetch | None = None,
) -> dict[str, Any]:
    """Everything that :func:`compare` needs, as plain data; reads only, never raises for what is missing.

    ``serial`` is the inventory's ``cache_disk_serial``, ``driver`` the host's NVIDIA driver version, ``proxy`` says
    whether the inventory wants the API proxy; ``fetch(base_url, path)`` returns a body and raises HttpFailure.
    """
    paths = paths or HostPaths()
    where = plan.get("paths") or {}
    etc = Path(str(where.get("etc", "/etc/kvfleet")))
    state = Path(str(where.get("state", "/var/lib/kvfleet")))
    units = Path(paths.systemd)
    layout = layout or engine.Layout(Path(str(where.get("releases", "/opt/kvfleet/releases"))).parent)
    names = proof.unit_names(plan) if "servers" in plan and "instances" in plan else []
    fetch = fetch or _fetch
    return {
        "release": engine.overview(layout),
        "plan": _read_json(etc / "plan.json"),
        "units": {name: _unit(name, run, units, run_directory, helper) for name in names},
        "strays": sorted(
            path.name for path in units.glob("kvfleet-*@*.service")
            if path.name.startswith(OWNED_PREFIXES) and path.name not in names
        ),
        "health": _health(watch_directory / "health.json"),
        "target": _show(run, "kvfleet.target", "LoadState,UnitFileState").get("UnitFileState", ""),
        "mount": _mount(str(where.get("cache_mount", "/var/cache/kvfleet")), paths),
        "data": _ownership(str(where.get("cache_data", ""))),
        "disk": _disk(plan, serial, paths),
        "driver": driver,
        "space": _spaces([str(layout.root), str(state), str(where.get("cache_mount", ""))]),
        "tiers": {server["name"]: _tier(server, fetch) for server in plan.get("servers") or []},
        "instances": {one["name"]: _instance(one, fetch) for one in plan.get("instances") or []},
        "proof": _proof(plan, state, units),
        "readiness": serving.told(plan) if where.get("releases") else None,
        "proxy": _proxy(proxy, proxy_file, run),
    }  # fmt: skip


def _fetch(url: str, path: str) -> str:
    return HttpClient(url).get_text(path, timeout_s=5)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _show(run: CommandRunner, unit: str, properties: str) -> dict[str, str]:
    shown = run(["systemctl", "show", f"--property={properties}", unit])
    return dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)


def _unit(name: str, run: CommandRunner, units: Path, run_directory: Path, helper: str) -> dict[str, Any]:
    shown = _show(run, name, "LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,NRestarts,Result")
    try:
        command, environment = unit_file_words((units / name).read_text(encoding="utf-8", errors="replace"))
        # with an API key the helper hands it over and becomes the engine: what the plan names stands behind
        if command[:3] == [helper, "exec", "--"]:
            command = command[3:]
        present = True
    except OSError:
        command, environment, present = [], {}, False
    started = on_disk = None
    if present:
        digest = run([helper, "digest", name])
        on_disk = digest.stdout.strip() if digest.ok else None
        record = run_directory / f"{name}.digest"
        started = record.read_text().strip() if record.is_file() else None
    return {
        "present": present,
        "active": shown.get("ActiveState", ""),
        "sub": shown.get("SubState", ""),
        "enabled": shown.get("UnitFileState", ""),
        "needs_reload": shown.get("NeedDaemonReload") == "yes",
        "restarts": int(shown.get("NRestarts") or 0),
        "result": shown.get("Result", ""),
        "command": command,
        "environment": environment,
        "started_with": started,
        "on_disk": on_disk,
    }


def _proxy(wanted: bool, file: Path, run: CommandRunner) -> dict[str, Any]:
    """nginx's state and the loopback ports that our part of its configuration sends to; None without that part."""
    try:
        text: str | None = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = None
    shown = _show(run, "nginx.service", "ActiveState,UnitFileState") if wanted or text is not None else {}
    return {
        "wanted": wanted,
        "ports": None if text is None else sorted({int(port) for port in _PROXY_PASS.findall(text)}),
        "active": shown.get("ActiveState", ""),
        "enabled": shown.get("UnitFileState", ""),
    }


def _health(path: Path) -> dict[str, Any] | None:
    """What the watcher wrote at its last look, with that look's age by the host's own clock."""
    found = _read_json(path)
    if found is None or not isinstance(found.get("units"), list):
        return None
    units = {str(one.get("unit")): one for one in found["units"] if isinstance(one, dict)}
    return {"age_s": max(0.0, time.time() - float(found.get("time") or 0)), "units": units}


def _mount(point: str, paths: HostPaths) -> dict[str, Any] | None:
    """The last mount on ``point`` (the one that is seen), with its device number and options; None if there is none."""
    try:
        text = (Path(paths.proc) / "self" / "mountinfo").read_text(errors="replace")
    except OSError:
        return None
    found = None
    for line, (number, _, where, fstype, source) in zip(_mount_lines(text), parse_mountinfo(text)):
        if where == point:
            flags = {*line.split()[5].split(","), *line.split(" - ", 1)[1].split()[2].split(",")}
            found = {"number": number, "fstype": fstype, "source": source, "read_only": bool(flags & READ_ONLY)}
    return found


def _mount_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        if len(left.split()) >= 6 and len(right.split()) >= 2:
            yield line


def _ownership(path: str) -> dict[str, Any] | None:
    try:
        found = Path(path).stat() if path else None
    except OSError:
        return None
    return {"uid": found.st_uid, "mode": f"{found.st_mode & 0o7777:04o}"} if found else None


def _disk(plan: Mapping[str, Any], serial: str, paths: HostPaths) -> dict[str, Any]:
    planned = (plan.get("host") or {}).get("disk") or {}
    serial = str(planned.get("serial") or serial)
    device = str(planned.get("device") or "")
    record = read_record(serial, paths) if serial else None
    number = None
    if record is not None:
        try:
            found = (Path(paths.by_uuid) / record.filesystem_uuid).stat()
            number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
        except OSError:
            number = None
    return {
        "serial": serial,
        "device": device,
        "device_present": bool(device) and Path(device).exists(),
        "record": str(record_path(serial, paths)) if record is not None else None,
        "filesystem_uuid": record.filesystem_uuid if record is not None else None,
        "filesystem_number": number,
    }


def _spaces(paths: Sequence[str]) -> dict[str, dict[str, int]]:
    found = {}
    for path in paths:
        try:
            room = os.statvfs(path)
        except OSError:
            continue
        found[path] = {"total_bytes": room.f_blocks * room.f_frsize, "free_bytes": room.f_bavail * room.f_frsize}
    return found


def _tier(server: Mapping[str, Any], fetch: Fetch) -> dict[str, Any]:
    try:
        sampled = metrics.parse(fetch(server_url(server), "/metrics"))
    except (HttpFailure, ValueError) as error:
        return {"error": str(error)}
    # a gauge that is not there yet has seen no traffic
    return {
        "l1_bytes": sampled.total("lmcache_mp_l1_memory_usage_bytes"),
        "l2_bytes": sampled.total("lmcache_mp_l2_usage_bytes"),
    }


def _instance(instance: Mapping[str, Any], fetch: Fetch) -> dict[str, Any]:
    url = base_url(instance)
    try:
        fetch(url, "/health")
        sampled = metrics.parse(fetch(url, "/metrics"))
    except (HttpFailure, ValueError) as error:
        return {"error": str(error)}
    return {
        "pool_share": sampled.highest("vllm:kv_cache_usage_perc"),
        "running": sampled.total("vllm:num_requests_running"),
        "waiting": sampled.total("vllm:num_requests_waiting"),
    }


def _proof(plan: Mapping[str, Any], state: Path, units: Path) -> dict[str, Any]:
    record = proof.read_record(state)
    try:
        reason = proof.difference(record, proof.fingerprint(plan, proof.unit_files(plan, units)), "smoke")
    except (KeyError, OSError) as error:
        reason = f"the plan cannot be compared ({error})"
    kept = ("time", "release", "profile", "plan_profile", "verdict", "line", "fingerprint")
    return {"record": {key: record.get(key) for key in kept} if record else None, "reason": reason}


# ---------------------------------------------------------------------------------------------------------- judging


def compare(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> list[Item]:
    """Every compared thing of a host, in the order in which a person would look; pure."""
    items: list[Item] = []
    items += _compare_plan(plan, seen)
    items += _compare_release(plan, seen)
    for unit in seen.get("units") or {}:
        items += _compare_unit(plan, unit, seen["units"][unit])
    items += _compare_strays(seen)
    if seen.get("units"):
        target = str(seen.get("target") or "absent")
        items.append(Item("unit", "kvfleet.target", OK if target == "enabled" else DRIFT, "enabled", target))
    items += _compare_health(plan, seen)
    items += _compare_disk(plan, seen)
    items += _compare_driver(plan, seen)
    items += _compare_space(plan, seen)
    items += _compare_tiers(plan, seen)
    items += _compare_instances(plan, seen)
    items += _compare_proxy(plan, seen)
    items.append(_compare_verdict(seen))
    ready = seen.get("readiness")
    if ready is not None and not ready.get("ready", True):
        items.append(Item("traffic", "readiness", DRIFT, "ready", "drained", str(ready.get("reason", ""))))
    return items


def undeployed(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> list[Item]:
    """What a deploy of ``plan`` would change of what runs: a proof taken now would be one of something else; pure.

    The plan that was deployed last, the release in use, the units' own files, and units that were started with other
    ones. What is merely broken, drained or not proved is no part of it: that is what a proof is for.
    """
    items = [*_compare_plan(plan, seen), *_compare_release(plan, seen)]
    for unit, found in (seen.get("units") or {}).items():
        items += _compare_unit_files(plan, unit, found)
    items += _compare_strays(seen)
    return [item for item in items if item.state == DRIFT]


def _compare_strays(seen: Mapping[str, Any]) -> Iterator[Item]:
    for name in seen.get("strays") or []:
        yield Item("unit", name, DRIFT, "absent", "present", "no instance of the inventory has it")


def _compare_plan(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    for error in plan.get("errors") or []:
        yield Item("plan", str(error["code"]), DRIFT, "a plan without errors", str(error["message"]), str(error["fix"]))
    deployed = seen.get("plan")
    if deployed is None:
        yield Item("plan", "deployed", DRIFT, "a deployed plan", "none", "this host was never deployed")
        return
    same = deployed.get("fingerprint") == plan.get("fingerprint")
    yield Item(
        "plan", "fingerprint", OK if same else DRIFT,
        str(plan.get("fingerprint", ""))[:12], str(deployed.get("fingerprint", ""))[:12],
    )  # fmt: skip
    if deployed.get("profile") != plan.get("profile"):
        yield Item("plan", "profile", DRIFT, str(plan.get("profile")), str(deployed.get("profile")))


def _compare_release(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    wanted = str((plan.get("release") or {}).get("id", ""))
    found = str((seen.get("release") or {}).get("current") or "none")
    yield Item("release", "in use", OK if found == wanted else DRIFT, wanted, found)


def _compare_unit(plan: Mapping[str, Any], unit: str, seen: Mapping[str, Any]) -> Iterator[Item]:
    if seen["present"]:
        yield from _compare_unit_state(unit, seen)
    yield from _compare_unit_files(plan, unit, seen)


def _compare_unit_state(unit: str, seen: Mapping[str, Any]) -> Iterator[Item]:
    notes = []
    if seen["restarts"]:
        notes.append(f"systemd restarted it {seen['restarts']} times")
    active = seen["active"] == "active"
    if not active and seen["result"] not in ("", "success"):
        notes.append(f"result {seen['result']}")
    yield Item("unit", unit, OK if active else DRIFT, "active", seen["active"] or "unknown", "; ".join(notes))
    if seen["enabled"] != "enabled":
        yield Item("unit", f"{unit} at boot", DRIFT, "enabled", seen["enabled"] or "unknown")


def _compare_unit_files(plan: Mapping[str, Any], unit: str, seen: Mapping[str, Any]) -> Iterator[Item]:
    """The unit's file against the plan, and what it was started with against what lies on disk."""
    if not seen["present"]:
        yield Item("unit", unit, DRIFT, "present", "absent")
        return
    if seen["active"] == "active" and seen["on_disk"] and seen["started_with"] != seen["on_disk"]:
        yield Item("unit", f"{unit} restart", DRIFT, "what lies on disk", "what it was started with before", "stale")
    service = service_of(plan, unit)
    if service is None:
        return
    wanted, found = options(service["command"]), options(seen["command"])
    yield from _differences(unit, wanted, found)
    yield from _differences(unit, {str(k): str(v) for k, v in service["environment"].items()}, seen["environment"])


def _compare_health(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    """The watcher's word on each unit: a service may run and yet serve with less than the plan promises."""
    watched = [str(entry["unit"]) for entry in plan.get("watch") or []]
    running = [unit for unit in watched if (seen.get("units") or {}).get(unit, {}).get("present")]
    health = seen.get("health")
    if running and health is None:
        yield Item("health", "watcher", DRIFT, "looks at every unit", "no look yet", "kvfleet-watch.timer")
    if not running or health is None:
        return
    if health["age_s"] > STALE_LOOK_S:
        age = f"last look {health['age_s']:.0f} s ago"
        yield Item("health", "watcher", DRIFT, "looks at every unit", age, "kvfleet-watch.timer")
        return
    for unit in running:
        entry = health["units"].get(unit) or {}
        found = str(entry.get("state") or "not looked at")
        state = OK if found in WELL else UNKNOWN if found in (*MOVING, "unknown", "not looked at") else DRIFT
        yield Item("health", unit, state, found if state == OK else "ok", found, str(entry.get("reason") or ""))


def _differences(unit: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Item]:
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            yield Item("settings", f"{unit} {name}", DRIFT, _side(wanted.get(name)), _side(found.get(name)))


def _side(value: str | None) -> str:
    if value is None:
        return "absent"
    return value or "set"


def service_of(plan: Mapping[str, Any], unit: str) -> Mapping[str, Any] | None:
    """The plan's server or instance that ``unit`` runs."""
    kind, _, rest = unit.partition("@")
    name = rest.rsplit(".", 1)[0]
    group = plan.get("servers" if kind == "kvfleet-lmcache" else "instances") or []
    return next((one for one in group if one["name"] == name and one.get("command")), None)


def _compare_disk(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    if plan.get("profile") != "disk":
        return
    disk, mount = seen["disk"], seen["mount"]
    serial = disk["serial"] or "the inventory's disk"
    if disk["device"]:
        present = "present" if disk["device_present"] else "missing"
        yield Item("disk", serial, OK if disk["device_present"] else DRIFT, "present", present, disk["device"])
    elif not (plan.get("host") or {}).get("disk"):
        yield Item("disk", serial, DRIFT, "present", "not usable", "see the plan's errors")
    if disk["record"] is None:
        yield Item("disk", f"{serial} record", DRIFT, "made by this host", "no record")
    point = str((plan.get("paths") or {}).get("cache_mount", ""))
    if mount is None:
        yield Item("mount", point, DRIFT, "mounted", "not mounted")
        return
    if disk["filesystem_number"] is not None and disk["filesystem_number"] != mount["number"]:
        yield Item("mount", point, DRIFT, f"file system {disk['filesystem_uuid']}", mount["source"])
    elif mount["read_only"]:
        yield Item("mount", point, DRIFT, "read-write", "read-only", mount["source"])
    else:
        yield Item("mount", point, OK, "mounted", "mounted", mount["source"])
    data = seen.get("data")
    if data is None or data["mode"] != "0750" or data["uid"] == 0:
        found = "absent" if data is None else f"mode {data['mode']}, uid {data['uid']}"
        yield Item("mount", str(plan["paths"]["cache_data"]), DRIFT, "mode 0750 of the service user", found)


def _compare_driver(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    wanted = (plan.get("release") or {}).get("min_driver")
    found = seen.get("driver")
    if not wanted or (plan.get("host") or {}).get("accelerator") == "cpu":
        return
    if not found:
        yield Item("driver", "NVIDIA", UNKNOWN, f">= {wanted}", "unknown")
        return
    good = Version(str(found)) >= Version(str(wanted))
    yield Item("driver", "NVIDIA", OK if good else DRIFT, f">= {wanted}", str(found))


def _compare_space(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    mount = str((plan.get("paths") or {}).get("cache_mount", ""))
    floor = ((plan.get("host") or {}).get("disk") or {}).get("floor_gib")
    for path, room in (seen.get("space") or {}).items():
        if path == mount and (plan.get("profile") != "disk" or seen["mount"] is None):
            continue
        least = int(float(floor or 0) * GIB) if path == mount else LOW_SPACE_BYTES
        free = room["free_bytes"]
        yield Item(
            "space", path, OK if free >= least else DRIFT, f"at least {human_bytes(least)} free", human_bytes(free)
        )


def _compare_tiers(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    for server in plan.get("servers") or []:
        use = (seen.get("tiers") or {}).get(server["name"]) or {"error": "not asked"}
        limits = {"l1": server.get("l1_gib"), "l2": server.get("quota_gib")}
        for tier, name in (("l1", "cpu"), ("l2", "disk")):
            if limits[tier] is None:
                continue
            limit = int(float(limits[tier]) * GIB)
            label = f"{name} of server {server['name']}"
            if "error" in use:
                yield Item("tier", label, UNKNOWN, f"at most {human_bytes(limit)}", "unknown", use["error"])
                continue
            used = int(use[f"{tier}_bytes"])
            share = f"{100 * used / limit:.0f} % of {human_bytes(limit)}" if limit else human_bytes(used)
            # LMCache starts evicting below the limit and may pass it for a moment: a twentieth is no drift
            good = used <= limit * 1.05
            yield Item("tier", label, OK if good else DRIFT, f"at most {human_bytes(limit)}", human_bytes(used), share)


def _compare_instances(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    for one in plan.get("instances") or []:
        use = (seen.get("instances") or {}).get(one["name"]) or {"error": "not asked"}
        if "error" in use:
            yield Item("tier", f"gpu of instance {one['name']}", UNKNOWN, "answers", "no answer", use["error"])
            continue
        share = use["pool_share"]
        text = "unknown" if share is None else f"{100 * share:.0f} % of the pool"
        yield Item("tier", f"gpu of instance {one['name']}", OK, text, text,
                   f"{use['running']:.0f} running, {use['waiting']:.0f} waiting")  # fmt: skip


def _compare_proxy(plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[Item]:
    """The API proxy: a host whose proxy is dead is well and yet answers nobody."""
    proxy = seen.get("proxy") or {}
    if not proxy.get("wanted"):
        if proxy.get("ports") is not None:
            note = "the API is still let through; remove /etc/nginx/conf.d/kvfleet.conf and reload nginx"
            yield Item("proxy", "configuration", DRIFT, "absent", "present", note)
        return
    if proxy["ports"] is None:
        yield Item("proxy", "configuration", DRIFT, "present", "absent")
    else:
        wanted = ", ".join(str(port) for port in sorted(int(one["port"]) for one in plan.get("instances") or []))
        found = ", ".join(str(port) for port in proxy["ports"]) or "none"
        yield Item("proxy", "ports", OK if found == wanted else DRIFT, wanted, found)
    active = proxy["active"] == "active"
    yield Item("proxy", "nginx.service", OK if active else DRIFT, "active", proxy["active"] or "unknown")
    if proxy["enabled"] != "enabled":
        yield Item("proxy", "nginx.service at boot", DRIFT, "enabled", proxy["enabled"] or "unknown")


def _compare_verdict(seen: Mapping[str, Any]) -> Item:
    known = seen.get("proof") or {}
    record = known.get("record")
    if record is None:
        return Item("verdict", "last", DRIFT, "proved", "never proved")
    found = f"{record['verdict']} at {record['time']} on {record['release']}"
    if known.get("reason"):
        return Item("verdict", "last", DRIFT, "a proof of what runs now", found, str(known["reason"]))
    return Item("verdict", "last", OK, found, found)


def verdict(items: Sequence[Item]) -> str:
    """The host in one word: ``unknown`` when anything could not be asked and nothing drifted."""
    states = {item.state for item in items}
    return DRIFT if DRIFT in states else UNKNOWN if UNKNOWN in states else OK
