"""What a user may set: names, types and limits of the ``kvfleet_*`` variables, and help for the ones that do not
exist.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .findings import Finding, KvfleetError, refuse

PROFILES = ("gpu", "cpu", "disk")
#: How weights come into the engine; ``dummy`` makes random ones for measurements on hosts without a checkpoint.
LOAD_FORMATS = ("auto", "dummy")

#: Nothing that a host has comes near this; bytes written as GiB do.
_LARGEST_GIB = 1024.0**2

#: Settings of one instance; each is also a host-wide default under the name with ``kvfleet_`` in front.
#: name -> (type, smallest, largest); ``None`` means no limit.
INSTANCE_OPTIONS: dict[str, tuple[str, float | None, float | None]] = {
    "model": ("str", None, None),
    "gpus": ("gpus", None, None),
    "port": ("int", 1, 65535),
    "served_model_name": ("str", None, None),
    "profile": ("profile", None, None),
    "tensor_parallel_size": ("int", 1, 64),
    "max_model_len": ("int", 1, 10**9),
    "max_num_seqs": ("int", 1, 65536),
    "gpu_memory_utilization": ("float", 0.05, 0.99),
    "kv_cache_dtype": ("str", None, None),
    "dtype": ("str", None, None),
    "kv_pool_gib": ("float", 0.0, _LARGEST_GIB),
    "buffer_gib_per_gpu": ("float", 0.0, _LARGEST_GIB),
    "quota_gib": ("float", 0.0, _LARGEST_GIB),
    "working_set_gib": ("float", 0.0, _LARGEST_GIB),
    "chunk_tokens": ("int", 1, 65536),
    "enforce_eager": ("bool", None, None),
    "trust_remote_code": ("bool", None, None),
    "prefill_tokens_per_s": ("float", 0.0, 1e9),
    "engine_flags": ("flags", None, None),
    "load_format": ("load_format", None, None),
}
#: Settings of the whole host, under their full names.
HOST_OPTIONS: dict[str, tuple[str, float | None, float | None]] = {
    "kvfleet_release": ("str", None, None),
    "kvfleet_instances": ("list", None, None),
    "kvfleet_host": ("address", None, None),
    "kvfleet_lmcache_port": ("int", 1, 65535),
    "kvfleet_lmcache_http_port": ("int", 1, 65535),
    "kvfleet_ram_reserve_gib": ("float", 0.0, _LARGEST_GIB),
    "kvfleet_allow_advisories": ("bool", None, None),
    "kvfleet_releases_extra": ("list", None, None),
    "kvfleet_ram_bytes_per_s": ("float", 0.0, 1e15),
    "kvfleet_disk_bytes_per_s": ("float", 0.0, 1e15),
    "kvfleet_server_flags": ("flags", None, None),
    "cache_disk_device": ("str", None, None),
    "cache_disk_serial": ("str", None, None),
    "cache_disk_spare_percent": ("float", 0.0, 50.0),
}
#: Public variables of other parts; the planner only has to know that they exist.
OTHER_NAMES = frozenset(
    [
        "kvfleet_api_key",
        "kvfleet_api_proxy",
        "kvfleet_batches",
        "kvfleet_drain_command",
        "kvfleet_drain_deadline_s",
        "kvfleet_drain_notice_s",
        "kvfleet_host_facts_file",
        "kvfleet_max_fail_percentage",
        "kvfleet_model_config_file",
        "kvfleet_packages_from_bundle",
        "kvfleet_plan",
        "kvfleet_service_user",
        "kvfleet_skip_unreachable",
        "kvfleet_support_dir",
        "kvfleet_templates_dir",
        "kvfleet_undrain_command",
    ]
)

#: Names from the article (and the real ones of LMCache) with the variable that does the job here.
_LMCACHE_NAMES: dict[str, tuple[str, str]] = {
    "LMCACHE_ENABLED": ("kvfleet_profile", "cpu (RAM tier) or disk (RAM and NVMe tier); gpu switches offload off"),
    "LMCACHE_CPU_OFFLOAD_BUFFER_SIZE": (
        "kvfleet_buffer_gib_per_gpu",
        "{value}: GiB of host RAM for each GPU, not GPU memory",
    ),
    "LMCACHE_MAX_LOCAL_CPU_SIZE": ("kvfleet_buffer_gib_per_gpu", "{value}: GiB of host RAM for each GPU"),
    "LMCACHE_LOCAL_CPU": ("kvfleet_profile", "cpu or disk"),
    "LMCACHE_DISK_OFFLOAD_ENABLED": ("kvfleet_profile", "disk"),
    "LMCACHE_DISK_OFFLOAD_DIR": (
        "cache_disk_device",
        "the /dev/disk/by-id link of the disk; kvfleet mounts it at /var/cache/kvfleet",
    ),
    "LMCACHE_LOCAL_DISK": (
        "cache_disk_device",
        "the /dev/disk/by-id link of the disk; kvfleet mounts it at /var/cache/kvfleet",
    ),
    "LMCACHE_MAX_DISK_SIZE": ("kvfleet_quota_gib", "{value}: GiB for the whole host"),
    "LMCACHE_MAX_LOCAL_DISK_SIZE": ("kvfleet_quota_gib", "{value} times the number of ranks: GiB for the whole host"),
    "LMCACHE_CHUNK_SIZE": ("kvfleet_chunk_tokens", "256 (the default here); {value} tokens only with a reason"),
}


@dataclass(frozen=True)
class InstanceSettings:
    """What the user set for one instance; ``None`` = computed. ``own`` holds the names that the user set."""

    name: str
    values: Mapping[str, Any]
    own: frozenset[str]

    def get(self, key: str, default: Any = None) -> Any:
        """The user's value of ``key``, or ``default`` when there is none."""
        value = self.values.get(key)
        return default if value is None else value


@dataclass(frozen=True)
class Settings:
    """All settings of one host, checked and typed; ``notes`` are warnings to show."""

    profile: str
    release: str
    instances: tuple[InstanceSettings, ...]
    host: str
    lmcache_port: int | None
    lmcache_http_port: int | None
    ram_reserve_gib: float | None
    allow_advisories: bool
    quota_gib: float | None
    ram_bytes_per_s: float | None
    disk_bytes_per_s: float | None
    cache_disk_device: str | None
    cache_disk_serial: str | None
    cache_disk_spare_percent: float
    server_flags: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Finding, ...] = field(default_factory=tuple)


def known_names() -> frozenset[str]:
    """Every public variable that starts with ``kvfleet_`` or ``cache_disk_`` and that the planner reads or knows of."""
    return frozenset(HOST_OPTIONS) | {f"kvfleet_{name}" for name in INSTANCE_OPTIONS} | OTHER_NAMES


def check_names(names: Iterable[str]) -> list[Finding]:
    """Errors (KVF-SET-001) for ``kvfleet_*`` names that do not exist, with the nearest one that does."""
    known = known_names()
    errors = []
    for name in sorted(set(names)):
        if not name.startswith("kvfleet_") or name.startswith("kvfleet__") or name in known:
            continue
        errors.append(_unknown(name, sorted(known), "variable"))
    return errors


def check_article_names(values: Mapping[str, Any]) -> list[Finding]:
    """Warnings (KVF-SET-010) for ``LMCACHE_*`` names: they do nothing here, and which variable does."""
    notes = []
    for name, value in sorted(values.items()):
        upper = str(name).upper()
        if not upper.startswith("LMCACHE_") or str(name).startswith("lmcache_server"):
            continue
        if upper in _LMCACHE_NAMES:
            variable, advice = _LMCACHE_NAMES[upper]
            fix = f"Set {variable}: {advice.format(value=value)}."
        else:
            fix = "Remove it; kvfleet renders LMCache's settings from the plan."
        notes.append(Finding("KVF-SET-010", f"{name}={value} is set, but nothing reads it.", fix, {"name": str(name)}))
    return notes


def parse_settings(values: Mapping[str, Any], variable_names: Sequence[str] = ()) -> Settings:
    """Check and type what the user wrote.

    ``values`` holds ``kvfleet_*``, ``cache_disk_*`` and ``LMCACHE_*`` variables (others are ignored); values may be
    strings, as ``--set`` and ``--extra-vars`` give them. ``variable_names`` are further names to check for spelling.
    Raises ``KvfleetError`` with every finding at once: KVF-SET-001 (unknown name), -002 (wrong value), -003
    (instance list), -004 (two instances with one name), -005 (name that no unit can have).
    """
    errors = check_names([*values, *variable_names])
    notes = check_article_names(values)
    typed: dict[str, Any] = {}
    options = {**HOST_OPTIONS, **{f"kvfleet_{name}": option for name, option in INSTANCE_OPTIONS.items()}}
    for name, option in options.items():
        if values.get(name) is None or values[name] == "":
            continue
        try:
            typed[name] = _convert(name, values[name], option)
        except KvfleetError as error:
            errors.extend(error.findings)
    defaults = {name: typed[f"kvfleet_{name}"] for name in INSTANCE_OPTIONS if f"kvfleet_{name}" in typed}
    defaults.setdefault("profile", "disk")
    instances = _instances(typed.get("kvfleet_instances"), defaults, errors, notes)
    if errors:
        raise KvfleetError(*errors)
    return Settings(
        profile=defaults["profile"],
        release=str(typed.get("kvfleet_release", "auto")),
        instances=tuple(instances),
        host=str(typed.get("kvfleet_host", "127.0.0.1")),
        lmcache_port=typed.get("kvfleet_lmcache_port"),
        lmcache_http_port=typed.get("kvfleet_lmcache_http_port"),
        ram_reserve_gib=typed.get("kvfleet_ram_reserve_gib"),
        allow_advisories=bool(typed.get("kvfleet_allow_advisories", False)),
        quota_gib=defaults.get("quota_gib"),
        ram_bytes_per_s=typed.get("kvfleet_ram_bytes_per_s"),
        disk_bytes_per_s=typed.get("kvfleet_disk_bytes_per_s"),
        cache_disk_device=typed.get("cache_disk_device"),
        cache_disk_serial=typed.get("cache_disk_serial"),
        cache_disk_spare_percent=float(typed.get("cache_disk_spare_percent", 7.0)),
        server_flags=typed.get("kvfleet_server_flags", {}),
        notes=tuple(notes),
    )


def _instances(
    listed: list[Any] | None, defaults: Mapping[str, Any], errors: list[Finding], notes: list[Finding]
) -> list[InstanceSettings]:
    # a quota for the host is divided among the instances by the planner, it is no default of each
    shared = {name: value for name, value in defaults.items() if name != "quota_gib"}
    if not listed:
        return [InstanceSettings("default", shared, frozenset(shared) - {"profile"})]
    found: list[InstanceSettings] = []
    for number, entry in enumerate(listed):
        if not isinstance(entry, Mapping):
            errors.append(
                Finding(
                    "KVF-SET-003",
                    f"kvfleet_instances[{number}] is {type(entry).__name__}, not a mapping.",
                    "Write each instance as name, model, gpus, port.",
                )
            )
            continue
        name = str(entry.get("name") or ("default" if len(listed) == 1 else ""))
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,62}", name):
            errors.append(
                Finding(
                    "KVF-SET-005",
                    f"kvfleet_instances[{number}]: {name!r} cannot name a service.",
                    "Set name to lower-case letters, digits, '-', '_' and '.', at most 63 of them (no '@', '/' or "
                    "spaces).",
                )
            )
            continue
        if any(other.name == name for other in found):
            errors.append(
                Finding(
                    "KVF-SET-004",
                    f"Two instances are called {name}.",
                    "Give every instance in kvfleet_instances its own name.",
                )
            )
            continue
        values = dict(shared)
        own = set()
        article = {key: value for key, value in entry.items() if str(key).upper().startswith("LMCACHE_")}
        notes.extend(check_article_names(article))
        for key, value in entry.items():
            if key == "name" or key in article or value is None:
                continue
            if key not in INSTANCE_OPTIONS:
                errors.append(_unknown(str(key), sorted(INSTANCE_OPTIONS), f"setting of instance {name}"))
                continue
            try:
                values[key] = _convert(f"{key} of instance {name}", value, INSTANCE_OPTIONS[key])
            except KvfleetError as error:
                errors.extend(error.findings)
            own.add(key)
        found.append(InstanceSettings(name, values, frozenset(own | (set(shared) - {"profile"}))))
    return found


def _convert(name: str, value: Any, option: tuple[str, float | None, float | None]) -> Any:
    kind, smallest, largest = option
    try:
        if kind == "int":
            if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
                raise ValueError
            typed: Any = int(str(value).replace("_", "")) if not isinstance(value, (int, float)) else int(value)
        elif kind == "float":
            if isinstance(value, bool):
                raise ValueError
            typed = float(value)
            if typed != typed or typed in (float("inf"), float("-inf")):
                raise ValueError
        elif kind == "bool":
            typed = _boolean(value)
        elif kind == "list":
            if not isinstance(value, (list, tuple)):
                raise ValueError
            return list(value)
        elif kind == "flags":
            if not isinstance(value, Mapping):
                raise ValueError
            return {str(flag): setting for flag, setting in value.items()}
        elif kind == "profile":
            if value not in PROFILES:
                raise refuse(
                    "KVF-SET-002",
                    f"{name} is {value!r}, which is no profile.",
                    f"Set it to one of {', '.join(PROFILES)}.",
                )
            return value
        elif kind == "load_format":
            if value not in LOAD_FORMATS:
                raise refuse(
                    "KVF-SET-002",
                    f"{name} is {value!r}, which is no way to load weights.",
                    f"Set it to one of {', '.join(LOAD_FORMATS)}.",
                )
            return value
        elif kind == "gpus":
            return _gpus(value)
        else:
            return _text(value, kind)
    except (ValueError, OverflowError):
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "list": "a list",
            "flags": "a mapping of flags to values",
            "gpus": "all, or a list of indices and UUIDs",
            "str": "text on one line",
            "address": "an IP address or a host name",
        }
        raise refuse(
            "KVF-SET-002", f"{name} is {value!r}, but must be {words[kind]}.", f"Set {name} to {words[kind]}."
        ) from None
    if kind in ("int", "float"):
        if (smallest is not None and typed < smallest) or (largest is not None and typed > largest):
            # a limit that only catches mistakes of the unit is no range to tell people who are below it
            open_end = largest is None or (largest > 1e5 and smallest is not None and typed < smallest)
            limits = f"at least {smallest:g}" if open_end else f"from {smallest or 0:g} to {largest:.10g}"
            raise refuse("KVF-SET-002", f"{name} is {value}, but must be {limits}.", f"Set {name} to a value {limits}.")
        if name.endswith(("kv_pool_gib", "buffer_gib_per_gpu", "quota_gib")) and typed <= 0:
            raise refuse(
                "KVF-SET-002",
                f"{name} is {value}, but a tier cannot be empty.",
                "Leave it out to have it computed, or choose a smaller kvfleet_profile.",
            )
    return typed


def _gpus(value: Any) -> Any:
    """``all``, or the items of a list; a text has commas, and brackets or not (``-e kvfleet_gpus=[0,1]``)."""
    if isinstance(value, str):
        if value.strip().lower() == "all":
            return "all"
        text = value.strip()
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, str)) or not str(item).strip():
            raise ValueError
    return [item if isinstance(item, int) else item.strip() for item in items]


def _text(value: Any, kind: str) -> str:
    """A text that a command line and a unit can hold; numbers are taken as written."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError
    text = str(value)
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise ValueError
    if kind == "address" and not re.fullmatch(
        r"[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", text
    ):
        raise ValueError
    return text


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError


def _unknown(name: str, known: Sequence[str], what: str) -> Finding:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    fix = f"Did you mean {near[0]}?" if near else f"Known are: {', '.join(known)}."
    return Finding("KVF-SET-001", f"{name} is no {what} of kvfleet.", fix, {"name": name})
