"""Which versions belong together: the release matrix, the choice for a host, the judgement of any pair.

The matrix itself is data (``releases.yml``). A *source* is either that whole document (a mapping with ``releases`` and
the tables of facts) or only its list of rows; only the whole document can judge pairs that no row names.

Public: :func:`load_rows`, :func:`resolve`, :func:`check`, :func:`advisories_of`, :func:`platform_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from .findings import Finding, KvfleetError, refuse
from .versions import Range, Version, parse, parse_range

Source = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]
Row = dict[str, Any]

STATUSES = ("default", "supported", "test_only", "forbidden")
MODES = ("mp", "in_process", "none")
ACCELERATORS = ("cuda", "cpu")

# type of each field: "text", "text?" (null allowed), "list", "range"
_FIELDS = {
    "id": "text",
    "status": "text",
    "reason": "text",
    "source": "list",
    "accelerator": "text",
    "distribution": "text",
    "vllm": "text",
    "lmcache": "text?",
    "torch": "text",
    "cuda": "text?",
    "min_driver": "text?",
    "compute_capability": "text?",
    "python": "range",
    "engine_python": "text",
    "glibc": "text",
    "machines": "list",
    "mode": "text",
    "connector": "text?",
    "connector_module_path": "text?",
    "abi_probe": "text?",
    "flags_line": "text",
    "jit": "list",
    "leave_out": "list",
    "metadata_alias": "alias",
    "advisories": "list",
    "system_packages": "packages",
}
#: What each entry of the tables of facts must have.
_FACT_FIELDS = {
    "advisories": ("id", "package", "affected", "summary"),
    "vllm_builds": ("vllm", "torch", "cuda", "min_driver", "python", "glibc", "compute_capability"),
    "lmcache_builds": ("lmcache", "torch", "cuda", "python", "glibc", "wheel"),
    "connectors": ("vllm", "lmcache", "mode", "connector", "module_path"),
    "cpu_pairs": ("vllm", "lmcache"),
}
_FORBIDDEN_FIELDS = {
    "id": "text",
    "status": "text",
    "reason": "text",
    "source": "list",
    "accelerator": "text?",
    "vllm": "range",
    "lmcache": "range",
    # null: whichever way the two are connected
    "mode": "text?",
    "use_instead": "text?",
}


@dataclass(frozen=True)
class Release:
    """One row of the matrix, validated; ``row`` is the plain data."""

    id: str
    status: str
    accelerator: str | None
    row: Row = field(compare=False, hash=False)

    @property
    def forbidden(self) -> bool:
        """Whether the row names versions that must never be installed together."""
        return self.status == "forbidden"

    @property
    def advisories(self) -> list[str]:
        """Ids of the known weaknesses of this release."""
        return list(self.row.get("advisories", []))

    @property
    def age_key(self) -> tuple[Version, Version]:
        """Sorts older before newer: by vLLM, then by LMCache."""
        return (Version(self.row["vllm"]), Version(self.row["lmcache"] or "0"))


@dataclass(frozen=True)
class Resolution:
    """The release of a host: its row with this host's ``platform``, why it is no newer one, warnings."""

    row: Row
    reasons: list[str]
    warnings: list[Finding]


@dataclass(frozen=True)
class Verdict:
    """The judgement of a pair.

    ``ok``: no condition is violated. ``derived``: no row names the pair, the tables of facts answered. ``row``: the
    row, or what a row would say. ``nearest``: rows of good releases, nearest first.
    """

    ok: bool
    derived: bool
    row: Row | None
    violations: list[Finding]
    warnings: list[Finding]
    nearest: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--format json``."""
        return {
            "ok": self.ok,
            "derived": self.derived,
            "row": self.row,
            "violations": [finding.as_dict() for finding in self.violations],
            "warnings": [finding.as_dict() for finding in self.warnings],
            "nearest": [
                {key: row[key] for key in ("id", "vllm", "lmcache", "torch", "status")} for row in self.nearest
            ],
        }


# ----------------------------------------------------------------------------------------------- loading


def _rows_of(source: Source) -> list[Mapping[str, Any]]:
    rows = source.get("releases") if isinstance(source, Mapping) else source
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise refuse(
            "KVF-REL-003",
            "The release matrix is not a list of rows.",
            "Give the document of releases.yml (with its key releases); kvfleet_releases_extra is a list of rows.",
        )
    return list(rows)


def _facts(source: Source, name: str) -> list[Mapping[str, Any]]:
    """A table of facts; refuses (KVF-REL-003) one that lacks what answers are taken from."""
    found = (source.get(name) if isinstance(source, Mapping) else None) or []
    if not isinstance(found, list):
        raise _bad_table(name, "it is not a list")
    for number, fact in enumerate(found, start=1):
        missing = [key for key in _FACT_FIELDS[name] if not isinstance(fact, Mapping) or key not in fact]
        if missing:
            raise _bad_table(name, f"entry {number} lacks {', '.join(missing)}")
    return list(found)


def _bad_table(name: str, message: str) -> KvfleetError:
    return refuse(
        "KVF-REL-003",
        f"The table {name} of the release matrix cannot be used: {message}.",
        "Compare with releases.yml of the project.",
    )


def _bad_row(name: str, message: str, fix: str) -> KvfleetError:
    return refuse("KVF-REL-004", f"Release row {name}: {message}.", fix)


def _check_field(name: str, key: str, value: Any, kind: str) -> None:
    where = f"{key} of release {name}"
    if kind.endswith("?") and value is None:
        return
    if kind == "range":
        parse_range(value, where)
    elif kind.startswith("text") and (not isinstance(value, str) or not value):
        raise _bad_row(
            name, f"{key} is {value!r}, not text", f"Write {key} as quoted text (YAML reads 2.28 as a number)."
        )
    elif kind == "list" and (not isinstance(value, list) or not all(isinstance(item, str) for item in value)):
        raise _bad_row(name, f"{key} is {value!r}, not a list of texts", f"Write {key} as a list, [] for none.")
    elif kind == "alias" and not (value is None or (isinstance(value, Mapping) and {"name", "version"} <= set(value))):
        raise _bad_row(name, f"{key} is {value!r}", f"Give {key} a name and a version, or null.")
    elif kind == "packages" and not (isinstance(value, Mapping) and all(isinstance(v, list) for v in value.values())):
        raise _bad_row(name, f"{key} is {value!r}", f"Give {key} one list a family, such as {{debian: [libnuma1]}}.")


def load_rows(source: Source) -> list[Release]:
    """Validate every row; refuse (KVF-REL-001 to -004) what is incomplete or contradicts itself.

    Rows are returned in the order given. With the whole document each row's ``advisories`` are completed from the
    table, so that a row of a user cannot fall below a floor unnoticed.
    """
    releases: list[Release] = []
    seen: set[str] = set()
    for number, raw in enumerate(_rows_of(source), start=1):
        name = str(raw.get("id") or f"number {number}")
        status = raw.get("status")
        if status not in STATUSES:
            raise _bad_row(name, f"status is {status!r}", f"Use one of {', '.join(STATUSES)}.")
        fields = _FORBIDDEN_FIELDS if status == "forbidden" else _FIELDS
        missing = [key for key in fields if key not in raw]
        unknown = [key for key in raw if key not in fields]
        if missing or unknown:
            parts = []
            if missing:
                parts.append("missing " + ", ".join(missing))
            if unknown:
                parts.append("unknown " + ", ".join(unknown))
            raise _bad_row(name, "; ".join(parts), "Give every field of a row in releases.yml and no other.")
        for key, kind in fields.items():
            _check_field(name, key, raw[key], kind)
        if name in seen:
            raise _bad_row(name, "its id is used twice", "Give each row its own id.")
        seen.add(name)
        if raw["accelerator"] not in ACCELERATORS and not (status == "forbidden" and raw["accelerator"] is None):
            raise _bad_row(name, f"accelerator is {raw['accelerator']!r}", f"Use one of {', '.join(ACCELERATORS)}.")
        row = dict(raw)
        if status == "forbidden" and row["mode"] not in (None, *MODES):
            raise _bad_row(name, f"mode is {row['mode']!r}", f"Use null or one of {', '.join(MODES)}.")
        if status != "forbidden":
            _check_values(name, row)
            known = [advisory["id"] for advisory in advisories_of(source, row["vllm"], row["lmcache"], row["mode"])]
            row["advisories"] = list(dict.fromkeys([*row["advisories"], *known]))
        releases.append(Release(name, status, row["accelerator"], row))
    return releases


def _check_values(name: str, row: Row) -> None:
    """The rules of a row that may be installed."""
    if not all(part.isalnum() or part in ".-_" for part in name) or name.startswith((".", "-")):
        raise _bad_row(name, "its id does not fit a directory name", "Use letters, digits, dots and dashes.")
    for key in ("vllm", "torch", "glibc", "engine_python"):
        parse(row[key], f"{key} of release {name}")
    for key in ("lmcache", "cuda", "min_driver", "compute_capability"):
        if row[key] is not None:
            parse(row[key], f"{key} of release {name}")
    if row["mode"] not in MODES:
        raise _bad_row(name, f"mode is {row['mode']!r}", f"Use one of {', '.join(MODES)}.")
    if row["mode"] == "none" and (row["lmcache"] or row["connector"]):
        raise _bad_row(name, "mode none has an LMCache or a connector", "Set lmcache and connector to null.")
    if row["mode"] != "none" and not (row["lmcache"] and row["connector"]):
        raise _bad_row(name, f"mode {row['mode']} needs LMCache and a connector", "Set lmcache and connector.")
    if row["engine_python"] not in Range(row["python"]):
        raise _bad_row(
            name,
            f"engine_python {row['engine_python']} is outside python {row['python']}",
            "Make the interpreter one that the range allows.",
        )
    tag = Version(row["torch"]).local or ""
    if row["accelerator"] == "cpu":
        if tag != "cpu" or row["cuda"] or row["min_driver"]:
            raise _bad_row(name, f"a CPU row has torch {row['torch']}", "Use a +cpu build, cuda and min_driver null.")
    elif not row["cuda"] or not row["min_driver"] or tag != "cu" + row["cuda"].replace(".", ""):
        raise _bad_row(
            name, f"torch {row['torch']} does not match cuda {row['cuda']}", "Name the build, such as 2.13.0+cu130."
        )


def advisories_of(source: Source, vllm: str, lmcache: str | None, mode: str | None) -> list[dict[str, Any]]:
    """Rows of the table ``advisories`` that concern these versions, connected in this mode (None: in any mode)."""
    found = []
    for advisory in _facts(source, "advisories"):
        version = vllm if advisory["package"] == "vllm" else lmcache
        if version is None or (mode and advisory.get("mode") and advisory["mode"] != mode):
            continue
        if version in parse_range(advisory["affected"], f"affected of {advisory['id']}"):
            found.append(dict(advisory))
    return found


# ----------------------------------------------------------------------------------------------- conditions


def platform_of(python: str, machine: str) -> str:
    """The name of a platform in file names: interpreter and processor, such as ``cp311-x86_64``."""
    return f"cp{parse(python, 'python').minor.replace('.', '')}-{machine}"


def _host_conditions(
    row: Mapping[str, Any],
    *,
    driver: str | None = None,
    compute_capability: str | None = None,
    glibc: str | None = None,
    python: str | None = None,
    machine: str | None = None,
) -> list[Finding]:
    """Every condition of a row that the named host facts violate; a fact that is not known violates nothing."""
    name = row.get("id") or f"vLLM {row['vllm']}"
    found: list[Finding] = []

    def too_low(code: str, what: str, need: str | None, have: str | None, fix: str) -> None:
        if need is not None and have is not None and parse(have, f"the host's {what}") < Version(need):
            found.append(
                Finding(
                    code,
                    f"{name} needs {what} {need} or newer, the host has {have}.",
                    fix,
                    {"needed": need, "found": have},
                )
            )

    too_low(
        "KVF-REL-021",
        "NVIDIA driver",
        row.get("min_driver"),
        driver,
        f"Install driver {row.get('min_driver')} or newer, or take a row for an older CUDA (kvfleet_release).",
    )
    too_low(
        "KVF-REL-022",
        "compute capability",
        row.get("compute_capability"),
        compute_capability,
        "Take a row that still carries code for this GPU (kvfleet_release).",
    )
    too_low(
        "KVF-REL-023",
        "glibc",
        row.get("glibc"),
        glibc,
        "Use a newer distribution, or take a row whose wheels need an older glibc (kvfleet_release).",
    )
    if python is not None and parse(python, "the host's Python").minor not in Range(row["python"]):
        found.append(
            Finding(
                "KVF-REL-024",
                f"{name} needs Python {row['python']}, the host has {python}.",
                "Use a distribution with such an interpreter, or take a row that fits this one (kvfleet_release).",
                {"needed": row["python"], "found": python},
            )
        )
    if machine is not None and row.get("machines") and machine not in row["machines"]:
        found.append(
            Finding(
                "KVF-REL-025",
                f"{name} has wheels for {', '.join(row['machines'])}, the host is {machine}.",
                "Take a row with wheels for this processor (kvfleet_release).",
                {"needed": list(row["machines"]), "found": machine},
            )
        )
    return found


def _host_facts(host: Mapping[str, Any]) -> dict[str, str | None]:
    """The facts that rows have conditions on, from a host description (docs/architecture.md)."""
    capabilities = [str(gpu["compute_capability"]) for gpu in host.get("gpus") or [] if gpu.get("compute_capability")]
    return {
        "driver": host.get("driver_version"),
        "compute_capability": min(capabilities, key=Version) if capabilities else None,
        "glibc": host.get("glibc"),
        "python": host.get("python"),
        "machine": host.get("machine"),
    }


def _pair_conditions(source: Source, releases: Iterable[Release], release: Release) -> list[Finding]:
    """What the pair of a row violates by itself: a row of somebody's own must not bring back what is known to break.

    A local part in the version of LMCache (``0.5.6+torch2.14``) says that the wheel is not the one on PyPI; nothing is
    known about it then, and the gates after the installation decide.
    """
    row = release.row
    if release.accelerator != "cuda" or not row["lmcache"] or Version(row["lmcache"]).local:
        return []
    vllm, lmcache = Version(row["vllm"]), Version(row["lmcache"])
    forbidding = _forbidding(releases, "cuda", vllm, lmcache, row["mode"])
    if forbidding:
        return [_forbidden_finding(forbidding[0], row["vllm"], row["lmcache"])]
    _, found = _derive(source, vllm, lmcache, Version(row["torch"]))
    return [finding for finding in found if finding.code != "KVF-REL-044"]


def _forbidding(
    releases: Iterable[Release], accelerator: str, vllm: Version, lmcache: Version, mode: str | None = None
) -> list[Release]:
    """Rows that forbid this pair, connected in this mode (None: rows for one mode alone say nothing)."""
    return [
        release
        for release in releases
        if release.forbidden
        and release.accelerator in (None, accelerator)
        and release.row["mode"] in (None, mode)
        and vllm in Range(release.row["vllm"])
        and lmcache in Range(release.row["lmcache"])
    ]


def _forbidden_finding(release: Release, vllm: str, lmcache: str) -> Finding:
    return Finding(
        "KVF-REL-012",
        f"vLLM {vllm} with LMCache {lmcache} is forbidden: {release.row['reason']}",
        _instead(release.row),
        {"row": release.id},
    )


def _accelerator(host: Mapping[str, Any]) -> str:
    return "cuda" if host.get("driver_version") or host.get("gpus") else "cpu"


def _weaknesses(release: Release) -> str:
    """Number and first ids: a list of ten ids hides what the sentence is about."""
    ids = release.advisories
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"{len(ids)} known weakness{'es' if len(ids) > 1 else ''} ({', '.join(ids[:3])}{more})"


def _advisory_finding(release: Release) -> Finding:
    return Finding(
        "KVF-REL-031",
        f"{release.id} has {_weaknesses(release)}.",
        "Services of such a release listen on loopback only; move to a release without them when the host allows it.",
        {"advisories": release.advisories},
    )


# ----------------------------------------------------------------------------------------------- choice


def resolve(source: Source, requested: str, host: Mapping[str, Any], *, allow_advisories: bool = False) -> Resolution:
    """The release of a host.

    ``requested`` is ``auto`` (newest row that fits and is below no advisory floor) or the id of a row; ``host`` is a
    host description. A host without driver and GPUs is a CPU host: there ``auto`` takes the CPU rows, which are
    ``test_only``. The returned row carries ``engine_python`` and ``platform`` of this host and ``loopback_only`` (a
    known weakness was allowed). Raises KvfleetError with every violated condition when nothing fits.
    """
    releases = load_rows(source)
    accelerator = _accelerator(host)
    facts = _host_facts(host)
    if requested != "auto":
        return _named(source, releases, requested, host, facts, allow_advisories)
    usable = ("default", "supported") if accelerator == "cuda" else ("default", "supported", "test_only")
    reasons: list[str] = []
    blocked_by_advisory: list[Release] = []
    refused: list[str] = []
    for release in releases:
        if _newer_but_forbidden(release, releases, accelerator):
            reasons.append(f"{release.id}: {release.row['reason']}")
    candidates = [r for r in releases if r.status in usable and r.accelerator == accelerator]
    for release in sorted(candidates, key=lambda r: (r.age_key, r.status == "default"), reverse=True):
        findings = _pair_conditions(source, releases, release) + _host_conditions(release.row, **facts)
        if findings:
            refused.append(" ".join(finding.message for finding in findings))
        elif release.advisories and not allow_advisories:
            blocked_by_advisory.append(release)
            refused.append(f"{release.id} fits but has {_weaknesses(release)}.")
        else:
            return _resolution(release, host, reasons + refused)
    raise _nothing_fits(accelerator, refused, blocked_by_advisory)


def _newer_but_forbidden(forbidden: Release, releases: Iterable[Release], accelerator: str) -> bool:
    """Whether a forbidden row is worth a word to people who wonder why they do not get the newest vLLM."""
    if not forbidden.forbidden or forbidden.accelerator not in (None, accelerator):
        return False
    newest = max(
        (r.age_key[0] for r in releases if not r.forbidden and r.accelerator == accelerator), default=Version("0")
    )
    first = forbidden.row["vllm"].split(",")[0].strip()
    return first.startswith(">=") and Version(first[2:]) > newest


def _nothing_fits(accelerator: str, refused: list[str], blocked: list[Release]) -> KvfleetError:
    kind = "with an NVIDIA GPU" if accelerator == "cuda" else "without a GPU"
    message = f"No release fits this host {kind}. " + (" ".join(refused) or "The matrix has no row for it.")
    if blocked:
        best = blocked[0]
        fix = (
            f"Change the host to fit, or set kvfleet_release: {best.id} with kvfleet_allow_advisories: true "
            "to accept these weaknesses (its services then listen on loopback only)."
        )
    else:
        fix = "Change the host to fit one of these rows, or add a row of your own (kvfleet_releases_extra)."
    return refuse("KVF-REL-030", message, fix, allowed_by_advisories=[release.id for release in blocked])


def _named(
    source: Source,
    releases: list[Release],
    requested: str,
    host: Mapping[str, Any],
    facts: dict[str, str | None],
    allow_advisories: bool,
) -> Resolution:
    """The row that a person asked for, when the host carries it."""
    by_id = {release.id: release for release in releases}
    release = by_id.get(requested)
    if release is None:
        names = ", ".join(r.id for r in releases if not r.forbidden)
        raise refuse(
            "KVF-REL-010",
            f"kvfleet_release is {requested!r}, which no row names.",
            f"Set it to auto or one of {names}.",
        )
    if release.forbidden:
        raise refuse(
            "KVF-REL-011",
            f"kvfleet_release {requested} is forbidden: {release.row['reason']}",
            f"Set kvfleet_release: {release.row['use_instead'] or 'auto'}.",
        )
    findings: list[Finding] = []
    accelerator = _accelerator(host)
    if release.accelerator != accelerator:
        findings.append(
            Finding(
                "KVF-REL-020",
                f"{requested} is for a {release.accelerator} host, this one is a {accelerator} host.",
                "Set kvfleet_release: auto, or repair the driver when this host has a GPU.",
                {"needed": release.accelerator, "found": accelerator},
            )
        )
    findings += _pair_conditions(source, releases, release)
    findings += _host_conditions(release.row, **facts)
    if release.advisories and not allow_advisories:
        findings.append(
            Finding(
                "KVF-REL-032",
                f"{requested} has {_weaknesses(release)}.",
                "Set kvfleet_allow_advisories: true to accept them (its services then listen on loopback only), or "
                "kvfleet_release: auto.",
                {"advisories": release.advisories},
            )
        )
    if findings:
        raise KvfleetError(*findings)
    return _resolution(release, host, [f"{requested} was asked for by kvfleet_release."])


def _resolution(release: Release, host: Mapping[str, Any], reasons: list[str]) -> Resolution:
    row: Row = dict(release.row)
    if host.get("python"):
        row["engine_python"] = parse(host["python"], "the host's Python").minor
    row["platform"] = platform_of(row["engine_python"], host.get("machine") or row["machines"][0])
    row["loopback_only"] = bool(release.advisories)
    warnings = [_advisory_finding(release)] if release.advisories else []
    if release.status == "test_only":
        warnings.append(
            Finding("KVF-REL-033", f"{release.id} is for tests only: {row['reason']}", "Do not serve users with it.")
        )
    return Resolution(row, reasons, warnings)


# ----------------------------------------------------------------------------------------------- any pair


def check(
    source: Source,
    vllm: str,
    lmcache: str,
    torch: str | None = None,
    driver: str | None = None,
    python: str | None = None,
    glibc: str | None = None,
    *,
    compute_capability: str | None = None,
) -> Verdict:
    """Judge any pair, by its row or else from the tables of facts (then marked as derived).

    A local part ``+cpu`` of vLLM or torch asks about the CPU backend. Raises KVF-REL-001 for a text that is no version.
    """
    asked_vllm, asked_lmcache = parse(vllm, "--vllm"), parse(lmcache, "--lmcache")
    asked_torch = parse(torch, "--torch") if torch is not None else None
    for name, text in (("--driver", driver), ("--python", python), ("--glibc", glibc)):
        if text is not None:
            parse(text, name)
    releases = load_rows(source)
    # vLLM's own build decides; torch's is asked only where it does not say
    cpu = (asked_vllm.local or (asked_torch.local if asked_torch else None)) == "cpu"
    accelerator = "cpu" if cpu else "cuda"
    facts = {"driver": driver, "python": python, "glibc": glibc, "compute_capability": compute_capability}

    forbidding = _forbidding(releases, accelerator, asked_vllm, asked_lmcache)
    violations = [_forbidden_finding(release, vllm, lmcache) for release in forbidding[:1]]
    named = _row_of_pair(releases, accelerator, asked_vllm, asked_lmcache)
    if named is not None:
        row: Row | None = dict(named.row)
        violations += _torch_conditions(named.row["torch"], asked_torch, vllm)
    elif cpu:
        row, found = _derive_cpu(source, releases, asked_vllm, asked_lmcache)
        violations += found
    else:
        row, found = _derive(source, asked_vllm, asked_lmcache, asked_torch)
        # "nothing is known" adds nothing to the row that forbids the pair
        violations += [f for f in found if not (forbidding and f.code == "KVF-REL-044")]
    violations += _build_conditions(row, asked_vllm, asked_lmcache, cpu)
    if row is not None:
        violations += _host_conditions(row, **facts)
    mode = row["mode"] if row else None
    warnings = [
        Finding(
            "KVF-REL-031",
            f"{advisory['id']}: {advisory['package']} {advisory['affected']}: {advisory['summary']}.",
            "Take a release without it, or set kvfleet_allow_advisories: true and stay on loopback.",
            {"advisory": advisory["id"]},
        )
        for advisory in advisories_of(source, asked_vllm.public, asked_lmcache.public, mode)
    ]
    if named is not None and named.status == "test_only":
        warnings.append(Finding("KVF-REL-033", f"{named.id} is for tests only.", "Do not serve users with it."))
    nearest = _nearest(releases, accelerator, asked_vllm, asked_lmcache, facts)
    return Verdict(not violations, named is None and not forbidding, row, violations, warnings, nearest)


def _instead(row: Mapping[str, Any]) -> str:
    return f"Use {row['use_instead']}." if row.get("use_instead") else "Take one of the nearest good pairs."


def _row_of_pair(releases: Iterable[Release], accelerator: str, vllm: Version, lmcache: Version) -> Release | None:
    for release in releases:
        if release.forbidden or release.accelerator != accelerator or release.row["lmcache"] is None:
            continue
        if (
            Version(release.row["vllm"]) == vllm.without_local()
            and Version(release.row["lmcache"]) == lmcache.without_local()
        ):
            return release
    return None


def _torch_conditions(pinned: str, asked: Version | None, vllm: str) -> list[Finding]:
    """vLLM pins torch exactly; a build for another CUDA major does not load either."""
    if asked is None:
        return []
    pin = Version(pinned)
    found = []
    if asked.without_local() != pin.without_local():
        found.append(
            Finding(
                "KVF-REL-042",
                f"vLLM {vllm} pins torch {pin.public}, asked for {asked}.",
                f"Use torch {pinned}; torch cannot be chosen apart from vLLM.",
                {"needed": pinned, "found": str(asked)},
            )
        )
    have, need = _cuda_major(asked), _cuda_major(pin)
    if have is not None and need is not None and have != need:
        found.append(_cuda_finding(f"vLLM {vllm}", need, f"torch {asked}", have))
    return found


def _build_conditions(row: Row | None, vllm: Version, lmcache: Version, cpu: bool) -> list[Finding]:
    """What the local parts say: rows and tables speak of the wheels on PyPI, another build is another thing."""
    found = []
    have, need = _cuda_major(vllm), _cuda_major(Version(row["torch"])) if row else None
    if have is not None and need is not None and have != need:
        found.append(_cuda_finding(f"the wheel of vLLM {vllm.public} on PyPI", need, f"vLLM {vllm}", have))
    if lmcache.local and not (cpu and lmcache.local == "cpu"):
        found.append(
            Finding(
                "KVF-REL-044",
                f"Nothing is known about the build {lmcache.local} of LMCache {lmcache.public}.",
                "Ask without it for the wheel on PyPI; a build of your own needs a row (kvfleet_releases_extra).",
                {"version": str(lmcache)},
            )
        )
    return found


def _cuda_major(version: Version) -> int | None:
    """13 for ``+cu130``, 12 for ``+cu128``, 0 for ``+cpu``, None when the version does not say."""
    local = version.local or ""
    if local == "cpu":
        return 0
    if local.startswith("cu") and local[2:].isdigit() and len(local) >= 5:
        return int(local[2:-1])
    return None


def _cuda_finding(one: str, need: int, other: str, have: int) -> Finding:
    word = {0: "no CUDA"}
    return Finding(
        "KVF-REL-041",
        f"{one} is built for {word.get(need, f'CUDA {need}')}, {other} brings {word.get(have, f'CUDA {have}')}.",
        "Both need the same CUDA major; PyPI has one build of each version.",
        {"needed": need, "found": have},
    )


def _unknown(what: str, version: Version, known: list[Mapping[str, Any]], key: str) -> Finding:
    ranges = ", ".join(str(fact[key]) for fact in known)
    return Finding(
        "KVF-REL-044",
        f"Nothing is known about {what} {version}.",
        f"Take a version of one of these series: {ranges or 'none (give the whole releases.yml)'}.",
        {"version": str(version)},
    )


def _first(facts: list[Mapping[str, Any]], key: str, version: Version) -> Mapping[str, Any] | None:
    for fact in facts:
        if version.without_local() in parse_range(fact[key], f"{key} in releases.yml"):
            return fact
    return None


def _derive(source: Source, vllm: Version, lmcache: Version, torch: Version | None) -> tuple[Row | None, list[Finding]]:
    """What a row for this pair would say, and every condition that the pair itself violates."""
    vllm_builds, lmcache_builds = _facts(source, "vllm_builds"), _facts(source, "lmcache_builds")
    engine, cache = _first(vllm_builds, "vllm", vllm), _first(lmcache_builds, "lmcache", lmcache)
    found: list[Finding] = []
    if engine is None:
        found.append(_unknown("vLLM", vllm, vllm_builds, "vllm"))
    if cache is None:
        found.append(_unknown("LMCache", lmcache, lmcache_builds, "lmcache"))
    if engine is None or cache is None:
        return None, found
    pinned = Version(engine["torch"])
    found += _torch_conditions(f"{pinned}+cu{engine['cuda'].replace('.', '')}", torch, str(vllm))
    used = torch.without_local() if torch is not None else pinned
    if str(used) not in cache["torch"]:
        windows = ", ".join(cache["torch"])
        found.append(
            Finding(
                "KVF-REL-040",
                f"LMCache {lmcache} was built against torch {windows}; its extension does not load with torch {used}.",
                "Take an LMCache built against this torch; pip installs this pair without a word and it serves slowly.",
                {"needed": list(cache["torch"]), "found": str(used)},
            )
        )
    if not cache["wheel"]:
        found.append(
            Finding(
                "KVF-REL-045",
                f"LMCache {lmcache} has no wheel on PyPI.",
                "Take a version with a wheel; kvfleet never compiles an engine on a host.",
            )
        )
    engine_major = int(engine["cuda"].split(".")[0])
    if cache["cuda"] is not None and cache["cuda"] != engine_major:
        found.append(_cuda_finding(f"LMCache {lmcache}", cache["cuda"], f"vLLM {vllm}", engine_major))
    if cache.get("transformers") and not engine.get("transformers_5"):
        found.append(
            Finding(
                "KVF-REL-046",
                f"LMCache {lmcache} needs transformers {cache['transformers']}, vLLM {vllm} needs it below 5.",
                "Take vLLM 0.19.1 or newer, or LMCache 0.4.4 or older.",
            )
        )
    connector = _connector(source, vllm, lmcache)
    if connector is None:
        found.append(
            Finding(
                "KVF-REL-043",
                f"No connector is known that both vLLM {vllm} and LMCache {lmcache} understand.",
                "Take one of the nearest good pairs.",
            )
        )
    row: Row = {
        "id": None,
        "status": "derived",
        "accelerator": "cuda",
        "distribution": "vllm",
        "vllm": str(vllm),
        "lmcache": str(lmcache),
        "torch": f"{pinned}+cu{engine['cuda'].replace('.', '')}",
        "cuda": engine["cuda"],
        "min_driver": engine["min_driver"],
        "compute_capability": engine["compute_capability"],
        "python": _both(engine["python"], cache["python"]),
        "glibc": max([engine["glibc"], *([cache["glibc"]] if cache["glibc"] else [])], key=Version),
        "mode": connector["mode"] if connector else None,
        "connector": connector["connector"] if connector else None,
        "connector_module_path": connector["module_path"] if connector else None,
    }
    return row, found


def _both(one: str, other: str) -> str:
    """The conditions of both ranges, of each kind only the tighter one."""
    lowest: list[Version] = []
    below: list[Version] = []
    for clause in [*one.split(","), *other.split(",")]:
        (lowest if clause.startswith(">=") else below).append(Version(clause.lstrip("<>=")))
    parts = ([f">={max(lowest)}"] if lowest else []) + ([f"<{min(below)}"] if below else [])
    return ",".join(parts)


def _connector(source: Source, vllm: Version, lmcache: Version) -> Mapping[str, Any] | None:
    for fact in _facts(source, "connectors"):
        if vllm.without_local() in Range(fact["vllm"]) and lmcache.without_local() in Range(fact["lmcache"]):
            return fact
    return None


def _derive_cpu(
    source: Source, releases: Iterable[Release], vllm: Version, lmcache: Version
) -> tuple[Row | None, list[Finding]]:
    """The same for vLLM's CPU backend, where nothing but a trial says whether a pair works."""
    base = next((r.row for r in releases if r.accelerator == "cpu" and not r.forbidden), None)
    for fact in _facts(source, "cpu_pairs"):
        if base and vllm.without_local() in Range(fact["vllm"]) and str(lmcache.without_local()) in fact["lmcache"]:
            engine = _first(_facts(source, "vllm_builds"), "vllm", vllm)
            python = _both(engine["python"], "<3.14") if engine else base["python"]
            return {
                **{key: base[key] for key in ("accelerator", "distribution", "cuda", "min_driver", "glibc", "mode")},
                **{key: base[key] for key in ("connector", "connector_module_path", "compute_capability")},
                "id": None,
                "status": "derived",
                "vllm": vllm.public,
                "lmcache": lmcache.public,
                "torch": f"{engine['torch']}+cpu" if engine else base["torch"],
                "python": python,
            }, []
    return None, [
        Finding(
            "KVF-REL-044",
            f"Nobody tried vLLM {vllm.public} with LMCache {lmcache.public} on the CPU backend.",
            "Take one of the pairs that were tried (cpu_pairs in releases.yml).",
        )
    ]


def _nearest(
    releases: Iterable[Release], accelerator: str, vllm: Version, lmcache: Version, facts: Mapping[str, str | None]
) -> list[Row]:
    """Up to three rows that the named host facts allow: with one of the two versions first, then the closest vLLM."""

    def distance(release: Release) -> tuple[Any, ...]:
        have = Version(release.row["vllm"])
        shared = (have == vllm.without_local()) + (Version(release.row["lmcache"] or "0") == lmcache.without_local())
        steps = abs((have.release[0] - vllm.release[0]) * 1000 + _second(have) - _second(vllm))
        return (-shared, release.status == "test_only", steps, bool(release.advisories))

    good = [
        release
        for release in releases
        if not release.forbidden and release.accelerator == accelerator and not _host_conditions(release.row, **facts)
    ]
    return [release.row for release in sorted(good, key=distance)[:3]]


def _second(version: Version) -> int:
    return version.release[1] if len(version.release) > 1 else 0
