"""Is a recorded host description what ``host_facts`` returns? Checked before any number is computed from it.

A file that people edit or that another program wrote may hold anything; what the planner reads has to have its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .findings import refuse
from .versions import Version

#: One problem of a value in words ("not a whole number"), ``None`` when the value is fine.
_Check = Callable[[Any], "str | None"]

#: A GPU with more is bytes or KiB written as MiB; a host with less is GiB or MiB written as bytes.
_LARGEST_GPU_MIB = 4 * 1024**2
_SMALLEST_HOST_BYTES, _LARGEST_HOST_BYTES = 256 * 1024**2, 1024**5
#: Problems that a message lists.
_SHOWN = 5


def _whole(smallest: int, largest: int | None = None) -> _Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return "not a whole number"
        if value < smallest:
            return f"below {smallest}"
        return f"above {largest}" if largest is not None and value > largest else None

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "not text"


def _version(value: Any) -> str | None:
    try:
        Version(value)
    except ValueError:
        return "not a version in quotes"
    return None


def _truth(value: Any) -> str | None:
    return None if isinstance(value, bool) else "neither true nor false"


def _texts(value: Any) -> str | None:
    return None if isinstance(value, list) and all(isinstance(item, str) for item in value) else "not a list of texts"


#: field -> (its check, whether it must be there); null and a missing field are the same.
_Fields = Mapping[str, "tuple[_Check, bool]"]
_HOST: _Fields = {
    "hostname": (_text, False),
    "driver_version": (_version, False),
    "cpus": (_whole(1), False),
    "shm_bytes": (_whole(0), False),
    "python": (_version, False),
    "glibc": (_version, False),
    "kernel": (_text, False),
    "os": (_text, False),
    "os_id": (_text, False),
    "os_version": (_text, False),
    "machine": (_text, False),
}
_PARTS: Mapping[str, _Fields] = {
    "memory": {
        "total_bytes": (_whole(_SMALLEST_HOST_BYTES, _LARGEST_HOST_BYTES), True),
        "available_bytes": (_whole(0), True),
    },
    "kvfleet": {"units": (_texts, False), "memory_bytes": (_whole(0), False)},
}
_LISTS: Mapping[str, _Fields] = {
    "gpus": {
        "index": (_whole(0), True),
        "uuid": (_text, True),
        "name": (_text, False),
        "memory_mib": (_whole(1, _LARGEST_GPU_MIB), False),
        "memory_used_mib": (_whole(0, _LARGEST_GPU_MIB), False),
        "memory_reserved_mib": (_whole(0, _LARGEST_GPU_MIB), False),
        "numa_node": (_whole(-1), False),
        "compute_capability": (_version, False),
        "pcie_gen": (_whole(0), False),
        "pcie_width": (_whole(0), False),
        "mig": (_truth, False),
    },
    "numa": {"node": (_whole(0), True), "memory_bytes": (_whole(0, _LARGEST_HOST_BYTES), False)},
    "disks": {
        "by_id": (_text, False),
        "by_ids": (_texts, False),
        "serial": (_text, False),
        "size_bytes": (_whole(0), True),
    },
    "listeners": {"port": (_whole(0, 65535), True), "unit": (_text, False), "pid": (_whole(0), False)},
    "unavailable": {"field": (_text, False), "reason": (_text, False)},
}
#: Fields whose value tells the entries of a list apart.
_UNIQUE = {"gpus": ("index", "uuid"), "numa": ("node",)}


def check_recorded(host: Any) -> dict[str, Any]:
    """Return ``host``, or refuse it (KVF-HOST-003) with every field that is missing, of a wrong kind or there twice."""
    if not isinstance(host, Mapping):
        raise _refuse([f"it is {_kind(host)}, not an object"])
    problems = [f"{name} is missing" for name in ("gpus", "memory") if name not in host]
    problems += _check_fields(host, _HOST, "")
    for name, fields in _PARTS.items():
        part = host.get(name)
        if isinstance(part, Mapping):
            problems += _check_fields(part, fields, f"{name}.")
        elif part is not None or (name == "memory" and name in host):
            problems.append(f"{name} is {_kind(part)}, not an object")
    for name, fields in _LISTS.items():
        problems += _check_list(name, host.get(name), fields)
    for number, gpu in enumerate((host.get("gpus") or []) if not problems else []):
        if (gpu.get("memory_reserved_mib") or 0) >= (gpu.get("memory_mib") or _LARGEST_GPU_MIB):
            problems.append(f"gpus[{number}].memory_reserved_mib is not below memory_mib")
    if problems:
        raise _refuse(problems)
    return dict(host)


def _check_list(name: str, entries: Any, fields: _Fields) -> list[str]:
    if entries is None:
        return []
    if not isinstance(entries, list):
        return [f"{name} is {_kind(entries)}, not a list"]
    problems = []
    for number, entry in enumerate(entries):
        if isinstance(entry, Mapping):
            problems += _check_fields(entry, fields, f"{name}[{number}].")
        else:
            problems.append(f"{name}[{number}] is {_kind(entry)}, not an object")
    if not problems:
        for field in _UNIQUE.get(name, ()):
            values = [entry[field] for entry in entries]
            twice = sorted({str(value) for value in values if values.count(value) > 1})
            problems += [f"{name} has the {field} {value} more than once" for value in twice]
    return problems


def _check_fields(entry: Mapping[str, Any], fields: _Fields, prefix: str) -> list[str]:
    problems = []
    for name, (check, needed) in fields.items():
        value = entry.get(name)
        if value is None:
            if needed:
                problems.append(f"{prefix}{name} is missing")
            continue
        wrong = check(value)
        if wrong:
            problems.append(f"{prefix}{name} is {_kind(value)}, {wrong}")
    return problems


def _kind(value: Any) -> str:
    """A value as a message shows it: short, containers by their kind only."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse(problems: list[str]) -> Exception:
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return refuse(
        "KVF-HOST-003",
        f"The host description is not what host_facts returns: {'; '.join(problems[:_SHOWN])}{more}.",
        "Record it again with the module host_facts, or correct these fields (--host, kvfleet_host_facts_file).",
        problems=problems,
    )
