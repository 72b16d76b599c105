"""Debian packages for a bundle, for hosts without a mirror: what a release and the roles need, with dependencies."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfleet.checkout import cache_directory
from kvfleet.core.command import CommandResult, CommandRunner, run_command
from kvfleet.core.findings import refuse

#: what roles install on a host besides the packages of its release (cache_disk: partitions, file systems, speed)
ROLE_PACKAGES = ("gdisk", "util-linux", "e2fsprogs", "xfsprogs", "fio", "nginx")
_INSTALL = re.compile(r"^Inst (?P<name>\S+) \((?P<version>\S+) ", re.MULTILINE)
_LIMIT_S = 900.0


def own_suite(os_release: Path = Path("/etc/os-release")) -> str | None:
    """Code name of the distribution that the controller runs, such as ``bookworm``."""
    try:
        lines = os_release.read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    return values.get("VERSION_CODENAME", "").strip('"') or None


def collect(row: Mapping[str, Any], source: str, run: CommandRunner = run_command) -> list[Path]:
    """The ``.deb`` files for a release and the roles: those in the folder ``source``, or fetched for that suite.

    A suite has to be the controller's own, whose apt knows its packages and checks their signatures. Raises KVF-REL-065
    when there are none to be had.
    """
    folder = Path(source)
    if folder.is_dir():
        found = sorted(folder.glob("*.deb"))
        if not found:
            raise refuse("KVF-REL-065", f"{folder} holds no .deb files.", "Give --debian a folder with them.")
        return found
    suite = own_suite()
    if source != suite:
        raise refuse(
            "KVF-REL-065",
            f"--debian {source} is neither a folder nor this machine's suite ({suite or 'not a Debian system'}).",
            "Fetch the packages on a machine of that suite and give --debian the folder with them.",
        )
    wanted = [*(row["system_packages"].get("debian") or []), *ROLE_PACKAGES]
    return _fetch(wanted, cache_directory() / "debs" / suite, run)


def _fetch(wanted: Sequence[str], folder: Path, run: CommandRunner) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    closure = _closure(wanted, run)
    missing = [pin for pin in closure if not list(folder.glob(_pattern(*pin)))]
    if missing:
        names = [f"{name}={version}" for name, version in missing]
        _must(run(["env", "-C", str(folder), "apt-get", "download", *names], timeout_s=_LIMIT_S), wanted)
    return sorted(path for pin in closure for path in folder.glob(_pattern(*pin)))


def _closure(wanted: Sequence[str], run: CommandRunner) -> list[tuple[str, str]]:
    """The packages with everything that they depend on, as apt would install them on an empty system."""
    with tempfile.NamedTemporaryFile(prefix="kvfleet-empty-") as nothing:
        arguments = ["apt-get", "--simulate", "-o", f"Dir::State::status={nothing.name}", "--no-install-recommends"]
        answer = run([*arguments, "install", *wanted], timeout_s=_LIMIT_S)
    return [(match["name"], match["version"]) for match in _INSTALL.finditer(_must(answer, wanted).stdout)]


def _pattern(name: str, version: str) -> str:
    # apt writes the colon of an epoch as %3a
    return f"{name}_{version.replace(':', '%3a')}_*.deb"


def _must(answer: CommandResult, wanted: Sequence[str]) -> CommandResult:
    if not answer.ok:
        words = " ".join((answer.stderr or answer.stdout).split())[-500:]
        raise refuse(
            "KVF-REL-065",
            f"apt could not get {', '.join(wanted)} (status {answer.returncode}): {words}",
            "Run apt-get update, or give --debian a folder with the .deb files.",
        )
    return answer
