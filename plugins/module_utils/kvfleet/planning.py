"""From what a user wrote to the plan: settings, host checks, release, models, disk, sizes, commands - in that order.

The one sequence behind the module ``kv_plan`` and the command ``kvfleet plan``. Everything that touches the machine
comes in as an argument.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import flags, services, sizing
from . import releases as release_matrix
from .disks import planned_layout
from .findings import Finding, KvfleetError, refuse
from .models import model_digest, read_model
from .settings import Settings, parse_settings

#: Systems that the roles are written and tested for.
SUPPORTED_SYSTEMS = {
    ("debian", "12"): "Debian 12",
    ("ubuntu", "22.04"): "Ubuntu 22.04",
    ("ubuntu", "24.04"): "Ubuntu 24.04",
}
#: Oldest interpreter that can run the modules.
OLDEST_PYTHON = (3, 9)

#: A release for the numbers of a host that no release fits: the plan then says so and cannot be deployed.
_NO_RELEASE: dict[str, Any] = {
    "id": None,
    "vllm": None,
    "lmcache": None,
    "torch": None,
    "cuda": None,
    "mode": "mp",
    "connector": "LMCacheMPConnector",
    "connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "abi_probe": None,
    "python": None,
}


def make_plan(
    values: Mapping[str, Any],
    releases: Any,
    host: Mapping[str, Any],
    *,
    read_text: Callable[[str], str | None],
    list_sizes: Callable[[str], dict[str, int] | None],
    variable_names: Sequence[str] = (),
    model_config: Mapping[str, Any] | None = None,
    check_disk: Callable[[Mapping[str, Any]], Sequence[Finding]] | None = None,
    previous: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
    endurance: Callable[[], tuple[float | None, str]] | None = None,
    sessions: int | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """Return the plan of ``host`` with the services' commands in it.

    ``values`` are the inventory's ``kvfleet_*``, ``cache_disk_*`` and ``LMCACHE_*`` variables, ``variable_names``
    further names to check for spelling; ``releases`` is the matrix (document or rows). Models are read through
    ``read_text`` and ``list_sizes`` unless ``model_config`` (a parsed ``config.json`` for all instances) is given.
    ``check_disk`` looks at the real cache disk and returns its findings, ``endurance`` how long it will last and why
    (:func:`measured.endurance`). Raises ``KvfleetError`` only for settings
    that cannot be understood; everything else ends in the plan's ``errors``.
    """
    settings = parse_settings(values, variable_names)
    for name, number in (("sessions", sessions), ("context", context)):
        if number is not None and number < 1:
            raise refuse(
                "KVF-SET-002", f"host_plan_{name} is {number}, but must be at least 1.", f"Set host_plan_{name}."
            )
    errors: list[Finding] = list(check_system(host))
    warnings: list[Finding] = []
    reasons: list[str] = []
    row = dict(_NO_RELEASE)
    try:
        resolution = release_matrix.resolve(
            releases, settings.release, host, allow_advisories=settings.allow_advisories
        )
        row, reasons = dict(resolution.row), list(resolution.reasons)
        warnings.extend(resolution.warnings)
    except KvfleetError as error:
        errors.extend(error.findings)
    models: dict[str, dict[str, Any]] = {}
    for instance in settings.instances:
        path = instance.get("model")
        if not path or str(path) in models:
            continue
        try:
            models[str(path)] = (
                recorded_model(model_config)
                if model_config is not None
                else read_model(str(path), read_text, list_sizes)
            )
        except KvfleetError as error:
            errors.extend(error.findings)
    disk = None
    if any(str(own.get("profile", settings.profile)) == "disk" for own in settings.instances):
        disk = _disk(host, settings, errors)
        if disk is not None and check_disk is not None:
            errors.extend(check_disk(values))
    if row["id"] is not None:
        _check_flags(settings, row, errors, warnings)
    plan = sizing.build_plan(
        host,
        settings,
        models,
        row,
        disk=disk,
        measured=measured,
        endurance=endurance() if endurance and disk else (None, "planned without looking at the disk"),
        previous=previous,
        reasons=reasons,
        warnings=warnings,
        errors=errors,
        sessions=sessions,
        context=context,
        skip=[own.name for own in settings.instances if own.get("model") and str(own.get("model")) not in models],
    )
    _attach_flags(plan, settings)
    plan["host"]["numa_nodes"] = len(host.get("numa") or [])
    if row["id"] is not None:
        services.attach_commands(plan)
        plan["fingerprint"] = sizing.fingerprint(plan)
    return plan


def _check_flags(settings: Settings, row: Mapping[str, Any], errors: list[Finding], warnings: list[Finding]) -> None:
    """Hold the user's own flags against the parsers of the release."""
    valid = flags.engine_flags(str(row["vllm"]))
    for instance in settings.instances:
        own = instance.get("engine_flags", {})
        wrong, notes = flags.check(own, valid, f"vllm serve {row['vllm']}", f"engine_flags of instance {instance.name}")
        errors.extend(wrong)
        warnings.extend(notes)
        if instance.get("trust_remote_code"):
            warnings.append(
                Finding(
                    "KVF-SET-024",
                    f"Instance {instance.name} runs Python code that came with its model, as the service's user.",
                    "Read that code, or set kvfleet_trust_remote_code to false.",
                    {"instance": instance.name},
                )
            )
    if settings.server_flags:
        wrong, notes = flags.check(
            settings.server_flags,
            flags.server_flags(str(row["lmcache"])),
            f"lmcache server {row['lmcache']}",
            "kvfleet_server_flags",
        )
        errors.extend(wrong)
        warnings.extend(notes)


def _attach_flags(plan: dict[str, Any], settings: Settings) -> None:
    """Put the user's own flags into the plan, from which the command lines are made."""
    own = {instance.name: instance.get("engine_flags", {}) for instance in settings.instances}
    for instance in plan["instances"]:
        if own.get(instance["name"]):
            instance["engine_flags"] = dict(own[instance["name"]])
    for server in plan["servers"]:
        if settings.server_flags:
            server["server_flags"] = dict(settings.server_flags)


def recorded_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model of which only ``config.json`` is known: its weights are computed from the shape."""
    return {"config": dict(config), "weight_bytes": 0, "weight_source": "shape", "digest": model_digest(config, {})}


def check_system(host: Mapping[str, Any]) -> list[Finding]:
    """Errors for an operating system or an interpreter that the roles do not support (KVF-HOST-001, -002)."""
    errors = []
    system, version = host.get("os_id"), host.get("os_version")
    name = str(host.get("os") or "")
    if not system:
        words = name.split()
        system = words[0].lower() if words else None
        numbers = [word for word in words if word[:1].isdigit()]
        version = ".".join(numbers[0].split(".")[: 1 if system == "debian" else 2]) if numbers else None
    if (str(system), str(version)) not in SUPPORTED_SYSTEMS:
        errors.append(
            Finding(
                "KVF-HOST-001",
                f"{name or 'This operating system'} is not supported.",
                f"Use {', '.join(SUPPORTED_SYSTEMS.values())}.",
                {"os_id": system, "os_version": version},
            )
        )
    python = str(host.get("python") or "")
    parts = python.split(".")
    if len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit() and (int(parts[0]), int(parts[1])) < OLDEST_PYTHON:
        errors.append(
            Finding(
                "KVF-HOST-002",
                f"Python {python} runs the modules on this host, 3.9 is the oldest that can.",
                "Set ansible_python_interpreter to a newer interpreter.",
                {"python": python},
            )
        )
    return errors


def _disk(host: Mapping[str, Any], settings: Settings, errors: list[Finding]) -> dict[str, Any] | None:
    """The cache disk's sizes from the host description; the reason in ``errors`` when there are none."""
    device = settings.cache_disk_device
    if not device:
        return None
    name = Path(device).name
    found = [disk for disk in host.get("disks") or [] if device in _links(disk)]
    if not device.startswith("/dev/disk/by-id/"):
        match = next(
            (disk for disk in host.get("disks") or [] if disk.get("path") == device or disk.get("name") == name), None
        )
        link = match.get("by_id") if match else None
        errors.append(
            Finding(
                "KVF-DISK-104",
                f"{device} is a kernel name, which can belong to another disk after a reboot.",
                f"Set cache_disk_device: {link or '/dev/disk/by-id/...'} (see lsblk and /dev/disk/by-id).",
            )
        )
        return None
    if not found:
        links = [link for disk in host.get("disks") or [] for link in _links(disk)]
        near = difflib.get_close_matches(device, links, n=1, cutoff=0.3)
        errors.append(
            Finding(
                "KVF-DISK-100",
                f"The cache disk {device} is not on this host.",
                f"Set cache_disk_device to one of its disks{', for example ' + near[0] if near else ''}.",
            )
        )
        return None
    disk = found[0]
    if not settings.cache_disk_serial or str(disk.get("serial") or "") != settings.cache_disk_serial:
        errors.append(
            Finding(
                "KVF-DISK-105",
                f"The serial of {device} is {disk.get('serial') or 'not readable'}, cache_disk_serial says "
                f"{settings.cache_disk_serial or 'nothing'}.",
                "Set cache_disk_serial to the serial on the disk's label, after checking that it is the right disk.",
            )
        )
    try:
        layout = planned_layout(int(disk["size_bytes"]), settings.cache_disk_spare_percent)
    except ValueError as error:
        errors.append(
            Finding(
                "KVF-DISK-106",
                f"{device} cannot hold a cache partition: {error}.",
                "Choose a larger disk in cache_disk_device.",
            )
        )
        return None
    return {
        "device": device,
        "serial": disk.get("serial"),
        "size_bytes": int(disk["size_bytes"]),
        "partition_bytes": layout.partition_bytes,
        "spare_bytes": layout.spare_bytes,
    }


def _links(disk: Mapping[str, Any]) -> list[str]:
    links = list(disk.get("by_ids") or [])
    if disk.get("by_id"):
        links.append(str(disk["by_id"]))
    return links


def raise_errors(plan: Mapping[str, Any]) -> None:
    """Raise one ``KvfleetError`` with every error of the plan, if it has any."""
    if plan["errors"]:
        raise KvfleetError(
            *(Finding(entry["code"], entry["message"], entry["fix"], entry["numbers"]) for entry in plan["errors"])
        )
