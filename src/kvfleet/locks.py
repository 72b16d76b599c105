"""Make the lock of a release for one platform: resolve with uv, keep the one best wheel of each package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from kvfleet.core.findings import refuse
from kvfleet.core.lockfile import (
    Lock,
    Pin,
    Sources,
    normalise,
    overrides,
    pip_sources,
    requirements_of,
    uv_source_arguments,
)
from kvfleet.core.releases import platform_of
from kvfleet.core.versions import Version

#: what every host needs besides a release: the installer; kvfleet lock tools refreshes it
TOOLS_ROW: dict[str, Any] = {
    "id": "tools",
    "requirements": ["uv==0.13.9"],
    "accelerator": "none",
    "leave_out": [],
    "glibc": "2.31",
    "machines": ["x86_64"],
}
#: the flat page of torch's CPU builds: links of this one package, so that nothing else is taken from there
TORCH_CPU_LINKS = "https://download.pytorch.org/whl/cpu/torch/"

Say = Callable[[str], None]


def uv_path() -> str:
    """The uv of this environment, else the one on PATH."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise refuse("KVF-REL-052", "uv is not installed on the controller.", "Run scripts/setup again.")
    return found


def configured_sources() -> Sources:
    """Where this machine's pip looks."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, timeout=60
    )
    return pip_sources(done.stdout)


def target_platforms(glibc: str, machine: str) -> list[str]:
    """Platform tags that a host with this glibc takes, best first (PEP 600 and its older aliases)."""
    major, minor = (int(part) for part in glibc.split(".")[:2])
    aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    lowest = 5 if machine == "x86_64" else 17
    tags = []
    for number in range(minor, lowest - 1, -1):
        tags.append(f"manylinux_{major}_{number}_{machine}")
        if number in aliases:
            tags.append(f"{aliases[number]}_{machine}")
    return [*tags, f"linux_{machine}"]


def target_tags(python: str, glibc: str, machine: str) -> list[Tag]:
    """All wheel tags of a platform, best first."""
    version = tuple(int(part) for part in python.split(".")[:2])
    platforms = target_platforms(glibc, machine)
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]


def best_wheel(names: Sequence[str], tags: Sequence[Tag]) -> str | None:
    """The file that an installer would take on the platform of ``tags``; None when none of them fits."""
    order = {tag: index for index, tag in enumerate(tags)}
    ranked: list[tuple[int, tuple[int, str], str]] = []
    for name in names:
        try:
            _, _, build, wheel_tags = parse_wheel_filename(name)
        except InvalidWheelFilename:
            continue
        ranks = [order[tag] for tag in wheel_tags if tag in order]
        if ranks:
            # of two builds of the same file the later one repairs the earlier
            ranked.append((-min(ranks), build if build else (-1, ""), name))
    return max(ranked)[2] if ranked else None


def resolve_lock(
    row: Mapping[str, Any],
    python: str,
    machine: str,
    *,
    sources: Sources | None = None,
    say: Say = lambda _text: None,
) -> Lock:
    """Resolve a row's packages for one platform and return its lock.

    The machine's pip configuration says where to look; only when torch's CPU build is not there, its own public page is
    asked too. Raises KVF-REL-051 with uv's words when nothing fits, KVF-REL-053 with every package that has no wheel.
    """
    sources = configured_sources() if sources is None else sources
    attempts = [uv_source_arguments(sources)]
    if sources.extra_index_urls:
        attempts.append(uv_source_arguments(sources, extra=True))
    if row["accelerator"] == "cpu":
        attempts.append([*uv_source_arguments(sources), "--find-links", TORCH_CPU_LINKS])
    said = ""
    for arguments in attempts:
        say(f"resolving {row['id']} for {platform_of(python, machine)}")
        document, said = _compile(row, python, machine, arguments)
        if document is not None:
            return _lock_of(document, row, python, machine)
    raise refuse(
        "KVF-REL-051",
        f"uv found no set of wheels for {row['id']} on {platform_of(python, machine)}: {said}",
        "Make the missing package available to pip (index-url, extra-index-url or find-links), or correct the row.",
    )


def _compile(
    row: Mapping[str, Any], python: str, machine: str, arguments: Sequence[str]
) -> tuple[dict[str, Any] | None, str]:
    with tempfile.TemporaryDirectory(prefix="kvfleet-lock-") as folder:
        wanted, dropped, output = (Path(folder) / name for name in ("wanted.in", "dropped.txt", "pylock.toml"))
        wanted.write_text("\n".join(requirements_of(row)) + "\n")
        dropped.write_text(overrides(row["leave_out"]))
        done = subprocess.run(
            [
                uv_path(),
                "pip",
                "compile",
                str(wanted),
                *("--override", str(dropped)),
                *("--python-version", python),
                *("--python-platform", f"{machine}-manylinux_{row['glibc'].replace('.', '_')}"),
                *("--only-binary", ":all:", "--generate-hashes", "--no-header", "--quiet"),
                *("--format", "pylock.toml", "--output-file", str(output)),
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={key: value for key, value in os.environ.items() if not key.startswith("UV_")}
            | {"UV_PYTHON_DOWNLOADS": "never"},
        )
        if done.returncode != 0:
            return None, " ".join(done.stderr.split())[:1500]
        return tomllib.loads(output.read_text()), ""


def _lock_of(document: Mapping[str, Any], row: Mapping[str, Any], python: str, machine: str) -> Lock:
    tags = target_tags(python, row["glibc"], machine)
    pins: list[Pin] = []
    without: list[str] = []
    for package in document["packages"]:
        wheels = {_file_name(wheel): wheel for wheel in package.get("wheels", [])}
        best = best_wheel(list(wheels), tags)
        digest = wheels[best].get("hashes", {}).get("sha256") if best else None
        if best is None or digest is None:
            without.append(f"{package['name']}=={package['version']}")
            continue
        size = wheels[best].get("size") or _local_size(wheels[best])
        pins.append(Pin(normalise(package["name"]), package["version"], (digest,), best, size))
    torch = next((pin for pin in pins if pin.name == "torch"), None)
    if torch is not None and Version(torch.version).local not in (None, Version(row["torch"]).local):
        raise refuse(
            "KVF-REL-057",
            f"uv took torch {torch.version} for {row['id']}, which needs {row['torch']}.",
            "Remove that build from where pip is configured to look (find-links, extra-index-url), or correct the row.",
        )
    if without:
        raise refuse(
            "KVF-REL-053",
            f"No wheel with a sha256 sum fits {platform_of(python, machine)} for {', '.join(without)}.",
            "Take a version with wheels, or leave the package out (leave_out of the row).",
        )
    platform = f"py3-{machine}" if row is TOOLS_ROW else platform_of(python, machine)
    return Lock(row["id"], platform, row["glibc"], tuple(pins))


def _file_name(wheel: Mapping[str, Any]) -> str:
    location = wheel.get("name") or wheel.get("url") or wheel.get("path") or ""
    return unquote(Path(urlsplit(location).path).name)


def _local_size(wheel: Mapping[str, Any]) -> int:
    parts = urlsplit(wheel.get("url") or "")
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(wheel.get("path") or "")
    return path.stat().st_size if path.is_file() else 0
