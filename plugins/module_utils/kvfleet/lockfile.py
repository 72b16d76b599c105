"""Locks: the exact wheels of a release on one platform, with a hash each, as a requirements file.

A lock names no index and no path, so that every machine takes the files from where it is configured to look; the hash
decides whether the right file came. Lines after a pin that start with ``# `` and a wheel's file name and size in bytes
are kept by the parser: a bundle needs them, an installer ignores them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .findings import KvfleetError, refuse
from .versions import Version

_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)(?P<rest>(?:\s.*)?)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_WHEEL = re.compile(r"#\s+(\S+\.whl)(?:\s+(\d+))?\s*$")
_HEADER = re.compile(r"#\s*(release|platform|glibc):\s*(\S+)\s*$")
_PROVIDED = re.compile(r"#\s*provided:\s*([A-Za-z0-9][A-Za-z0-9._-]*)(?:==(\S+))?\s*$")


@dataclass(frozen=True)
class Pin:
    """One package of a lock: normalised name, version, the allowed sha256 sums, and the wheel (name, size in bytes)."""

    name: str
    version: str
    hashes: tuple[str, ...]
    wheel: str | None = None
    size_bytes: int = 0

    @property
    def requirement(self) -> str:
        """``name==version``."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Lock:
    """A parsed lock; ``release``, ``platform`` and ``glibc`` come from its header.

    ``provided``: packages that the lock leaves to another environment of the host (``engine_base_python``), with the
    exact version they must have there, or None where any will do.
    """

    release: str
    platform: str
    glibc: str
    pins: tuple[Pin, ...]
    provided: tuple[tuple[str, str | None], ...] = ()

    @property
    def digest(self) -> str:
        """sha256 over what would be installed; comments and order do not count."""
        lines = sorted(f"{pin.requirement} {' '.join(sorted(pin.hashes))}" for pin in self.pins)
        lines += sorted(f"provided {name} {version or ''}" for name, version in self.provided)
        return hashlib.sha256("\n".join([self.release, self.platform, *lines]).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Sum of the wheels' sizes, as far as they are known."""
        return sum(pin.size_bytes for pin in self.pins)


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_name(release: str, platform: str) -> str:
    """File name of a lock below ``locks/``."""
    return f"{release}-{platform}.txt"


def parse_lock(text: str, name: str) -> Lock:
    """Read a lock; refuse (KVF-REL-050), by file and line, what is not one exact version with its sha256 sums.

    ``name`` is the file's name for the message. A text without anything is a lock that was not found (KVF-REL-056).
    """
    if not text.strip():
        raise refuse(
            "KVF-REL-056", f"There is no lock {name}, or it is empty.", "Make it with kvfleet lock, or set engine_lock."
        )
    header = {"release": "", "platform": "", "glibc": ""}
    pins: list[Pin] = []
    provided: list[tuple[str, str | None]] = []
    pending, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#") and not pending:
            known, wheel = _HEADER.match(line), _WHEEL.match(line)
            given = _PROVIDED.match(line)
            if known:
                header[known[1]] = known[2]
            elif given:
                provided.append((normalise(given[1]), given[2]))
            elif wheel and pins:
                last = pins[-1]
                pins[-1] = Pin(last.name, last.version, last.hashes, wheel[1], int(wheel[2] or 0))
            continue
        if not line and not pending:
            continue
        first = first or number
        pending += " " + line.rstrip("\\").strip()
        if line.endswith("\\"):
            continue
        pins.append(_parse_pin(pending.strip(), name, first))
        pending, first = "", 0
    if pending:
        raise _bad_line(name, first, pending.strip())
    names = [pin.name for pin in pins]
    twice = sorted({pin for pin in names if names.count(pin) > 1})
    if not pins or twice:
        what = f"names {', '.join(twice)} twice" if twice else "holds no package"
        raise refuse("KVF-REL-050", f"Lock {name} {what}.", "Restore it, or make it again with kvfleet lock.")
    if not header["release"] or not header["platform"]:
        raise refuse(
            "KVF-REL-050",
            f"Lock {name} does not say its release and platform.",
            "Restore it, or make it again with kvfleet lock.",
        )
    return Lock(header["release"], header["platform"], header["glibc"], tuple(pins), tuple(provided))


def _parse_pin(line: str, name: str, number: int) -> Pin:
    match = _PIN.fullmatch(line)
    hashes = _HASH.findall(match["rest"]) if match else []
    if match is None or not hashes or _HASH.sub("", match["rest"]).strip():
        raise _bad_line(name, number, line)
    try:
        Version(match["version"])
    except ValueError:
        raise _bad_line(name, number, line) from None
    return Pin(normalise(match["name"]), match["version"], tuple(hashes))


def _bad_line(name: str, number: int, line: str) -> KvfleetError:
    return refuse(
        "KVF-REL-050",
        f"Lock {name}, line {number}: {line[:80]!r} is not one exact version with its sha256 sum.",
        "Restore the file from version control, or make it again with kvfleet lock.",
    )


def render_lock(lock: Lock, refresh: str) -> str:
    """The text of a lock file; ``refresh`` is the command that makes it again."""
    lines = [
        f"# release: {lock.release}",
        f"# platform: {lock.platform}",
        f"# glibc: {lock.glibc}",
        f"# made by: {refresh}",
        "# One wheel a package, for this platform alone. Review changes as a diff; do not edit by hand.",
        *(f"# provided: {name}{f'=={version}' if version else ''}" for name, version in sorted(lock.provided)),
    ]
    for pin in sorted(lock.pins, key=lambda pin: pin.name):
        sums = " \\\n".join(f"    --hash=sha256:{digest}" for digest in pin.hashes)
        lines.append(f"{pin.requirement} \\\n{sums}")
        if pin.wheel:
            lines.append(f"    # {pin.wheel} {pin.size_bytes}")
    return "\n".join(lines) + "\n"


def differences(old: Lock | None, new: Lock) -> list[str]:
    """What a refreshed lock changes, one line a package, for review."""
    before = {pin.name: pin for pin in old.pins} if old else {}
    after = {pin.name: pin for pin in new.pins}
    lines = []
    for name in sorted({*before, *after}):
        was, now = before.get(name), after.get(name)
        if was is None and now is not None:
            lines.append(f"+ {now.requirement}")
        elif now is None and was is not None:
            lines.append(f"- {was.requirement}")
        elif was is not None and now is not None and was.version != now.version:
            lines.append(f"~ {name} {was.version} -> {now.version}")
        elif was is not None and now is not None and set(was.hashes) != set(now.hashes):
            lines.append(f"! {name}=={now.version}: other file ({now.wheel or 'unnamed'})")
    return lines


def reduce_lock(lock: Lock, provided: Mapping[str, str | None], left_out: Iterable[str] = ()) -> Lock:
    """``lock`` without the packages that another environment provides or that the load at hand does without.

    ``provided`` maps names to the exact version wanted there, or None. Refuses (KVF-REL-050) names the lock lacks.
    """
    gone = {normalise(name) for name in (*provided, *left_out)}
    unknown = sorted(gone - {pin.name for pin in lock.pins})
    if unknown:
        raise refuse(
            "KVF-REL-050",
            f"The lock of {lock.release} has no {', '.join(unknown)}.",
            "Name packages of the lock.",
        )
    kept = tuple(pin for pin in lock.pins if pin.name not in gone)
    given = tuple(sorted((normalise(name), version) for name, version in provided.items()))
    return Lock(lock.release, lock.platform, lock.glibc, kept, given)


# ------------------------------------------------------------------------------------- where packages come from


@dataclass(frozen=True)
class Sources:
    """Where a machine's pip is configured to look."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()


_CONFIG = re.compile(r"(?P<section>[\w:]*)\.(?P<key>[\w-]+)=(?P<quote>['\"])(?P<value>.*)(?P=quote)")


def pip_sources(config_list: str) -> Sources:
    """The sources in the output of ``pip config list``; the environment wins over files, as in pip."""
    found: dict[str, str] = {}
    for line in config_list.splitlines():
        match = _CONFIG.fullmatch(line.strip())
        if match is None or match["section"] not in ("global", "install", "download", ":env:"):
            continue
        if match["section"] == ":env:" or f":env:{match['key']}" not in found:
            found[match["key"]] = match["value"].replace("\\n", " ")
            if match["section"] == ":env:":
                found[f":env:{match['key']}"] = match["value"]
    return Sources(
        index_url=found.get("index-url") or None,
        extra_index_urls=tuple(found.get("extra-index-url", "").split()),
        find_links=tuple(found.get("find-links", "").split()),
    )


def uv_source_arguments(sources: Sources, *, extra: bool = False) -> list[str]:
    """The same sources as arguments of ``uv pip``, which does not read pip's configuration.

    ``extra`` adds the extra indexes, with pip's rule that the best version of all indexes wins; without it uv looks at
    the main index and the links alone.
    """
    arguments: list[str] = []
    if sources.index_url:
        arguments += ["--default-index", sources.index_url]
    for link in sources.find_links:
        arguments += ["--find-links", link]
    if extra and sources.extra_index_urls:
        for url in sources.extra_index_urls:
            arguments += ["--index", url]
        arguments += ["--index-strategy", "unsafe-best-match"]
    return arguments


def missing_wheels(lock: Lock, available: Mapping[str, str]) -> list[str]:
    """Names of the pins for which no file with an allowed sum is there; ``available`` maps sum to file name."""
    return [pin.wheel or pin.requirement for pin in lock.pins if not any(h in available for h in pin.hashes)]


def overrides(leave_out: Iterable[str]) -> str:
    """Override lines that drop packages: a marker that is never true."""
    return "".join(f'{name}; sys_platform == "never"\n' for name in leave_out)


def requirements_of(row: Mapping[str, object]) -> Sequence[str]:
    """What a row asks an installer for.

    A CUDA build from PyPI carries no local part in its metadata; ``===`` keeps a ``+cpu`` build that lies around on the
    machine from being taken for it.
    """
    if row.get("requirements"):
        return [str(requirement) for requirement in row["requirements"]]  # type: ignore[attr-defined]
    torch = Version(str(row["torch"]))
    pins = [f"{row['distribution']}=={row['vllm']}"]
    if row.get("lmcache"):
        pins.append(f"lmcache=={row['lmcache']}")
    pins.append(f"torch==={torch if torch.local == 'cpu' else torch.public}")
    return pins
