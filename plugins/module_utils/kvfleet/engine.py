"""Release directories on a host: build one beside the others, prove it, switch to it, drop old ones.

A release directory has its final name only when it is complete and every gate passed: it is built and proved as
``<name>.partial-<n>`` and renamed. The marker ``.kvfleet-release.json`` in it says which lock it holds and what the
gates found; an unchanged run reads it and imports nothing. ``current`` is a link that is replaced in one step.

A release whose lock changed under the same id gets its own directory (``<id>+<digest>``): a running one is never
touched. Everything is reached through a :class:`Layout` and a command runner, so that tests work in any folder.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bundlefile import BundleIndex, read_manifest, unpack, unpacked, wheel_names
from .command import CommandResult, CommandRunner
from .findings import Finding, KvfleetError, refuse
from .lockfile import Lock, Sources, missing_wheels, normalise, pip_sources, uv_source_arguments
from .versions import Range, Version

MARKER = ".kvfleet-release.json"
#: path configuration file of a release that uses packages of another environment (site.html of Python's library)
BASE_LINK = "kvfleet-base.pth"
#: the flat page of torch's CPU builds, asked only when they are nowhere else
TORCH_CPU_LINKS = "https://download.pytorch.org/whl/cpu/torch/"
#: a release takes about this many times the size of its wheels (measured: 531 MB of wheels, 2.6 GB with bytecode)
_UNPACKED_FACTOR = 5
_INSTALL_LIMIT_S = 3600.0
_GATE_LIMIT_S = 600.0


@dataclass(frozen=True)
class Layout:
    """Where releases live on a host; ``root`` is ``/opt/kvfleet`` but in tests."""

    root: Path

    @property
    def releases(self) -> Path:
        """One directory a release."""
        return self.root / "releases"

    @property
    def current(self) -> Path:
        """The link to the release in use."""
        return self.root / "current"

    @property
    def bundles(self) -> Path:
        """Unpacked bundles without their wheels, one directory a release id."""
        return self.root / "bundles"

    @property
    def wheels(self) -> Path:
        """The wheels of all unpacked bundles."""
        return self.root / "wheels"

    @property
    def offered(self) -> Path:
        """The wheels of the bundle that is being installed, and no others."""
        return self.root / "wheels-offered"

    @property
    def incoming(self) -> Path:
        """Where parts of bundles arrive."""
        return self.root / "incoming"

    @property
    def tools(self) -> Path:
        """uv."""
        return self.root / "tools"

    @property
    def history(self) -> Path:
        """Ids of proved releases in the order in which the host left them."""
        return self.root / "proved-history.json"

    @property
    def uv_cache(self) -> Path:
        """uv's cache, on the releases' file system so that files are linked and not copied."""
        return self.root / "uv-cache"


@dataclass(frozen=True)
class Gate:
    """One proof of a release: its name, whether it passed, what was seen, and how long it took in seconds."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the marker and a module's return value."""
        return {"gate": self.name, "ok": self.ok, "detail": self.detail, "seconds": round(self.seconds, 1)}


# ------------------------------------------------------------------------------------------------ state


def gates_digest(row: Mapping[str, Any]) -> str:
    """sha256 over the fields of a row that the gates prove; a changed field makes them run again."""
    keys = (
        "id",
        "vllm",
        "lmcache",
        "torch",
        "distribution",
        "mode",
        "connector",
        "connector_module_path",
        "abi_probe",
        "jit",
        "metadata_alias",
    )
    return hashlib.sha256(json.dumps({key: row.get(key) for key in keys}, sort_keys=True).encode()).hexdigest()


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a release directory; None when there is none that can be read."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and marker.get("schema") == 1 else None


def release_directories(layout: Layout) -> dict[Path, dict[str, Any]]:
    """Every complete release on the host with its marker."""
    if not layout.releases.is_dir():
        return {}
    found = {}
    for folder in sorted(layout.releases.iterdir()):
        marker = read_marker(folder) if folder.is_dir() and ".partial-" not in folder.name else None
        if marker is not None:
            found[folder] = marker
    return found


def current_directory(layout: Layout) -> Path | None:
    """What the link points to, when that is a complete release."""
    try:
        target = layout.current.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return target if read_marker(target) is not None else None


def find_installed(layout: Layout, release: str, lock_digest: str) -> Path | None:
    """The directory that holds just this lock of this release, with its interpreter and packages still there."""
    for folder, marker in release_directories(layout).items():
        if marker.get("release") == release and marker.get("lock_sha256") == lock_digest and _intact(folder, marker):
            return folder
    return None


def _site_packages(folder: Path) -> Path:
    for path in sorted((folder / "lib").glob("python3.*/site-packages")):
        return path
    return folder / "lib" / "python3" / "site-packages"


def _distributions(folder: Path) -> list[str]:
    return sorted(path.name for path in _site_packages(folder).glob("*.dist-info"))


def _intact(folder: Path, marker: Mapping[str, Any]) -> bool:
    """Cheap signs that nobody changed the directory by hand: interpreter, and the list of installed distributions."""
    python = folder / "bin" / "python"
    return os.access(python, os.X_OK) and _distributions(folder) == marker.get("distributions")


def directory_for(layout: Layout, release: str, lock_digest: str) -> Path:
    """Where a new installation goes: ``<id>``, or beside a complete directory of this id that holds another lock."""
    plain = layout.releases / release
    return plain if read_marker(plain) is None else layout.releases / f"{release}+{lock_digest[:8]}"


def missing_packages(packages: Sequence[str], run: CommandRunner) -> list[str]:
    """Debian packages of the list that are not installed; empty on systems without dpkg."""
    if not packages:
        return []
    answer = run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages])
    if answer.returncode == 127:
        return []
    installed = {line.split()[0] for line in answer.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in packages if package not in installed]


def interpreter(version: str, run: CommandRunner) -> str:
    """Path of the system's Python of this minor version; refuse (KVF-ENG-001) when there is none."""
    for candidate in (f"/usr/bin/python{version}", f"/usr/local/bin/python{version}", sys.executable):
        answer = run([candidate, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix)"])
        if answer.ok and answer.stdout.split()[:1] == [version]:
            real = Path(answer.stdout.split(maxsplit=1)[1].strip()) / "bin" / f"python{version}"
            return str(real) if real.exists() else candidate
    raise refuse(
        "KVF-ENG-001",
        f"The release needs Python {version}, which this host does not have.",
        f"Install python{version}, or set kvfleet_release to a row for the host's own Python.",
    )


@dataclass(frozen=True)
class BaseEnvironment:
    """Another environment of the host whose packages a release may use: interpreter below it, and its packages."""

    python: str
    site_packages: tuple[str, ...]

    def attach(self, site_packages: Path) -> None:
        """Let the release in ``site_packages`` see these packages, after its own."""
        (site_packages / BASE_LINK).write_text("".join(f"{path}\n" for path in self.site_packages))


_BASE_SCRIPT = (
    "import json, os, site, sys; print(json.dumps({'version': '%d.%d' % sys.version_info[:2], 'base': sys.base_prefix, "
    "'paths': [path for path in site.getsitepackages() if os.path.isdir(path)]}))"
)


def base_environment(base_python: str, version: str, run: CommandRunner) -> BaseEnvironment:
    """What the interpreter ``base_python`` provides; refuse (KVF-ENG-009) one that is missing or of another version."""
    answer = run([base_python, "-c", _BASE_SCRIPT])
    try:
        found = json.loads(answer.stdout) if answer.ok else {}
    except ValueError:
        found = {}
    if found.get("version") != version or not found.get("paths"):
        have = found.get("version") or answer.stderr.strip()[-200:] or f"status {answer.returncode}"
        raise refuse(
            "KVF-ENG-009",
            f"engine_base_python {base_python} is no environment of Python {version} ({have}).",
            "Set it to the interpreter of an environment that holds the packages, or leave it out.",
        )
    real = Path(found["base"]) / "bin" / f"python{version}"
    return BaseEnvironment(str(real) if real.exists() else base_python, tuple(found["paths"]))


def provided_gate(folder: Path, lock: Lock, run: CommandRunner) -> Gate:
    """Whether the release sees every package that its lock leaves to the base environment, in the versions named."""
    start = time.monotonic()
    script = (
        "import importlib.metadata as m, json, sys\n"
        "have = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    try: have[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: have[name] = None\n"
        "print(json.dumps(have))"
    )
    names = json.dumps([name for name, _ in lock.provided])
    answer = run([str(folder / "bin" / "python"), "-c", script, names])
    try:
        have = json.loads(answer.stdout)
    except ValueError:
        return Gate("provided", False, _last_words(answer), time.monotonic() - start)
    # the local part (+cu130) belongs to the build, which the gate "torch" checks
    wrong = [
        f"{name} {have.get(name) or 'missing'}{f' instead of {version}' if version else ''}"
        for name, version in lock.provided
        if not have.get(name) or (version and str(have[name]).split("+")[0] != version.split("+")[0])
    ]
    detail = ", ".join(wrong) or ", ".join(f"{name} {have[name]}" for name, _ in lock.provided)
    return Gate("provided", not wrong, detail[:600], time.monotonic() - start)


def state(
    layout: Layout,
    row: Mapping[str, Any],
    lock: Lock,
    run: CommandRunner,
    *,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """What is there and what a run would have to do; reads only.

    ``path``: directory of the release or None. ``install``: it has to be built. ``prove``: its gates have to run again
    (the row changed). ``current``: id in use. ``bundle_sha256``: sum of the manifest of the unpacked bundle.
    """
    folder = find_installed(layout, str(row["id"]), lock.digest)
    marker = read_marker(folder) if folder else None
    manifest = unpacked(layout.bundles / str(row["id"]), layout.wheels)
    return {
        "path": str(folder) if folder else None,
        "install": folder is None,
        "prove": bool(marker) and (marker or {}).get("gates_sha256") != gates_digest(row),
        "gates": (marker or {}).get("gates", []),
        "bundle_sha256": manifest["_sha256"] if manifest else None,
        "packages_missing": missing_packages(packages, run),
        **overview(layout),
    }


def overview(layout: Layout) -> dict[str, Any]:
    """What the host holds, whatever is planned: ``releases``, ``current``, ``current_path``, ``rollback_to`` (ids)."""
    now = current_directory(layout)
    marker = read_marker(now) if now else None
    return {
        "current": marker["release"] if marker else None,
        "current_path": str(now) if now else None,
        "rollback_to": rollback_target(layout),
        "releases": [
            {"path": str(path), "release": found["release"], "installed": found.get("installed")}
            for path, found in release_directories(layout).items()
        ],
    }


@contextmanager
def exclusive(layout: Layout) -> Iterator[None]:
    """Hold the host's releases for one run; refuse (KVF-ENG-002) when another run holds them."""
    layout.root.mkdir(parents=True, exist_ok=True)
    with (layout.root / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise refuse(
                "KVF-ENG-002",
                "Another run is installing a release on this host.",
                "Wait for it to end, then run again.",
            ) from None
        yield


# ------------------------------------------------------------------------------------------------ installing


def check_lock(row: Mapping[str, Any], lock: Lock) -> None:
    """Refuse (KVF-ENG-003) a lock that is not the row's, before anything is changed."""
    pins = {pin.name: pin.version for pin in lock.pins}
    pins.update({name: version for name, version in lock.provided if version})
    wanted = {normalise(str(row["distribution"])): str(row["vllm"])}
    if row.get("lmcache"):
        wanted["lmcache"] = str(row["lmcache"])
    torch = Version(str(row["torch"]))
    wanted["torch"] = str(torch) if torch.local == "cpu" else torch.public
    wrong = [
        f"{name} {pins.get(name, 'missing')} instead of {version}"
        for name, version in wanted.items()
        if pins.get(name) is None or Version(pins[name]) != Version(version)
    ]
    if lock.release != row["id"]:
        wrong.insert(0, f"made for {lock.release}")
    if wrong:
        raise refuse(
            "KVF-ENG-003",
            f"The lock of {row['id']} does not hold its versions: {', '.join(wrong)}.",
            f"Make it again with: kvfleet lock {row['id']}.",
        )


def install(
    layout: Layout,
    row: Mapping[str, Any],
    lock: Lock,
    lock_text: str,
    run: CommandRunner,
    *,
    tools_lock_text: str = "",
    bundle: BundleIndex | None = None,
    bundle_folder: Path | None = None,
    packages: Sequence[str] = (),
    commands: Sequence[tuple[str, Sequence[str]]] = (),
    base_python: str = "",
) -> dict[str, Any]:
    """Build the release, prove it, give it its name; return ``path`` and ``gates``.

    ``base_python`` is the interpreter of another environment whose packages the release may use beside its own; a lock
    that leaves packages to it needs one (KVF-ENG-009).

    With ``bundle`` everything comes from its parts in ``bundle_folder`` (or was unpacked before) and no index
    is asked; else uv takes the wheels from where the host's pip is configured to look. Nothing of another release is
    touched. Raises KvfleetError: -001 to -009 before the build, -010 when uv fails, -020 with every gate that failed.
    """
    check_lock(row, lock)
    if lock.provided and not base_python:
        raise refuse(
            "KVF-ENG-009",
            f"The lock of {row['id']} leaves {len(lock.provided)} packages to another environment of the host.",
            "Set engine_base_python to that environment's interpreter, or engine_lock to a complete lock.",
        )
    with exclusive(layout):
        existing = find_installed(layout, str(row["id"]), lock.digest)
        if existing is not None:
            return {"path": str(existing), "gates": (read_marker(existing) or {}).get("gates", []), "changed": False}
        _sweep(layout)
        base = base_environment(base_python, str(row["engine_python"]), run) if base_python else None
        python = base.python if base else interpreter(str(row["engine_python"]), run)
        if Version(str(row["engine_python"])).minor not in Range(str(row["python"])):
            raise refuse(
                "KVF-ENG-001",
                f"{row['id']} needs Python {row['python']}, the plan says {row['engine_python']}.",
                "Set kvfleet_release to a row for the host's own Python.",
            )
        _check_room(layout, lock, bundle)
        manifest = _open_bundle(layout, row, lock, bundle, bundle_folder)
        if manifest is not None:
            install_debs(layout.bundles / str(row["id"]) / "debs", packages, run)
        uv = _uv(layout, run, python, tools_lock_text, manifest)
        wheels = _offered_wheels(layout, manifest) if manifest is not None else None
        target = directory_for(layout, str(row["id"]), lock.digest)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        try:
            _build(layout, row, lock_text, run, uv=uv, python=python, partial=partial, wheels=wheels)
            if base is not None:
                base.attach(_site_packages(partial))
            provided = [provided_gate(partial, lock, run)] if lock.provided else []
            gates = provided + prove(partial, row, run, commands)
            _write_marker(partial, row, lock, gates, python, base)
            if target.exists():  # only a directory without a marker can lie there: it was never complete
                shutil.rmtree(target)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(layout.offered, ignore_errors=True)
        # parts that an earlier run brought for a release that nobody asked for again
        shutil.rmtree(layout.incoming, ignore_errors=True)
        return {"path": str(target), "gates": [gate.as_dict() for gate in gates], "changed": True}


def _sweep(layout: Layout) -> None:
    """Remove what interrupted runs left; called under the lock, so nobody works there."""
    for parent in (layout.releases, layout.bundles):
        for leftover in parent.glob("*.partial-*") if parent.is_dir() else ():
            shutil.rmtree(leftover)


def _check_room(layout: Layout, lock: Lock, bundle: BundleIndex | None) -> None:
    layout.releases.mkdir(parents=True, exist_ok=True)
    needed = lock.size_bytes * _UNPACKED_FACTOR + (bundle.size_bytes if bundle else 0)
    free = shutil.disk_usage(layout.releases).free
    if free < needed:
        raise refuse(
            "KVF-ENG-004",
            f"{layout.releases} has {free / 1e9:.1f} GB free, {lock.release} needs about {needed / 1e9:.1f} GB.",
            "Make room there, or set engine_keep_releases lower.",
            free_bytes=free,
            needed_bytes=needed,
        )


def _open_bundle(
    layout: Layout,
    row: Mapping[str, Any],
    lock: Lock,
    bundle: BundleIndex | None,
    folder: Path | None,
) -> dict[str, Any] | None:
    """A bundle's manifest, after unpacking it when that was not done yet; None without a bundle."""
    if bundle is None:
        return None
    target = layout.bundles / str(row["id"])
    manifest = unpacked(target, layout.wheels)
    if manifest is None or manifest["_sha256"] != bundle.manifest_sha256:
        layout.bundles.mkdir(parents=True, exist_ok=True)
        manifest = unpack(bundle, folder or layout.incoming, target, layout.wheels)
        if folder is not None and folder == layout.incoming / bundle.name:
            shutil.rmtree(folder)
    if manifest["release"] != row["id"] or manifest["lock_sha256"] != lock.digest:
        others = missing_wheels(lock, {str(entry["sha256"]): str(entry["path"]) for entry in manifest["files"]})
        differ = f": it holds no {', '.join(others[:5])} with the sha256 of the lock" if others else ""
        raise refuse(
            "KVF-ENG-005",
            f"Bundle {bundle.name} was made from another lock than the one of {row['id']} in this checkout{differ}.",
            f"Build it again with: kvfleet bundle {row['id']}.",
        )
    return manifest


def bring_packages(
    layout: Layout,
    row: Mapping[str, Any],
    lock: Lock,
    run: CommandRunner,
    *,
    bundle: BundleIndex,
    bundle_folder: Path,
    packages: Sequence[str],
) -> bool:
    """Unpack a bundle and install its Debian packages when one of ``packages`` is missing; whether that was needed.

    The release itself is installed later, from what is unpacked now. Raises like :func:`install`.
    """
    if not missing_packages(packages, run):
        return False
    check_lock(row, lock)
    with exclusive(layout):
        _check_room(layout, lock, bundle)
        _open_bundle(layout, row, lock, bundle, bundle_folder)
        return install_debs(layout.bundles / str(row["id"]) / "debs", packages, run)


def _offered_wheels(layout: Layout, manifest: Mapping[str, Any]) -> Path:
    """A folder with links to the wheels of one bundle.

    The store may hold another build of the same version, which uv would prefer and then refuse for its hash. The
    folder is always the same one, because uv knows a wheel that it unpacked before by its path and time.
    """
    shutil.rmtree(layout.offered, ignore_errors=True)
    layout.offered.mkdir(parents=True)
    for name in wheel_names(manifest):
        os.link(layout.wheels / name, layout.offered / name)
    return layout.offered


def install_debs(folder: Path, packages: Sequence[str], run: CommandRunner) -> bool:
    """Install a bundle's Debian packages when one of ``packages`` is missing; whether that was needed.

    Raises KVF-ENG-008 when dpkg refuses them. Without packages in the bundle nothing is done: the caller did it.
    """
    debs = _newer_debs(folder, run) if folder.is_dir() and missing_packages(packages, run) else []
    if not debs:
        return False
    _must(
        run(
            [
                *("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "--yes", "--no-install-recommends"),
                # without sources apt knows only these files; --no-download makes it lose the path of some of them
                *("-o", "Dir::Etc::SourceList=/dev/null", "-o", "Dir::Etc::SourceParts=/dev/null"),
                *("-o", "Dpkg::Options::=--force-confold", *debs),
            ],
            timeout_s=_INSTALL_LIMIT_S,
        ),
        "KVF-ENG-008",
        "The bundle's Debian packages could not be installed",
        "Build the bundle with --debian for this host's suite.",
    )
    return True


def _newer_debs(folder: Path, run: CommandRunner) -> list[str]:
    """Packages of a folder that are not installed in this version or a newer one: apt is not to downgrade."""
    answer = run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status} ${Version}\n"])
    installed = {}
    for line in answer.stdout.splitlines():
        words = line.split()
        if len(words) == 3 and words[1] == "installed":
            installed[words[0]] = words[2]
    newer = []
    for path in sorted(folder.glob("*.deb")):
        name, version = path.name.split("_")[:2]
        have = installed.get(name)
        if have is None or not run(["dpkg", "--compare-versions", have, "ge", version.replace("%3a", ":")]).ok:
            newer.append(str(path))
    return newer


def _uv(
    layout: Layout, run: CommandRunner, python: str, tools_lock_text: str, manifest: Mapping[str, Any] | None
) -> str:
    """Path of uv: out of its wheel in the bundle, else installed with the host's pip from its hashed pin."""
    if manifest is not None:
        name = str(manifest["uv"])
        if name not in wheel_names(manifest):
            raise refuse("KVF-ENG-006", "The bundle holds no uv.", "Build it again with kvfleet bundle.")
        target = layout.tools / name.split("-")[1] / "uv"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(layout.wheels / name) as wheel:
                member = next(name for name in wheel.namelist() if name.endswith(".data/scripts/uv"))
                beside = target.with_name(f"uv.new-{os.getpid()}")
                beside.write_bytes(wheel.read(member))
            beside.chmod(0o755)
            beside.replace(target)
        return str(target)
    digest = hashlib.sha256(tools_lock_text.encode()).hexdigest()[:12]
    home = layout.tools / f"index-{digest}"
    uv = home / "bin" / "uv"
    if not uv.exists():
        shutil.rmtree(home, ignore_errors=True)
        layout.tools.mkdir(parents=True, exist_ok=True)
        wanted = layout.tools / "tools.txt"
        wanted.write_text(tools_lock_text)
        _must(
            run([python, "-m", "venv", str(home)], timeout_s=300),
            "KVF-ENG-007",
            "The host's Python cannot make a virtual environment",
            "Install python3-venv, or set engine_source: bundle.",
        )
        _must(
            run(
                [
                    *(str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
                    *("--no-deps", "--require-hashes", "--only-binary=:all:", "--retries", "5"),
                    *("--requirement", str(wanted)),
                ],
                timeout_s=_INSTALL_LIMIT_S,
            ),
            "KVF-ENG-007",
            "pip could not install uv",
            "Give the host an index (pip's configuration), or set engine_source: bundle.",
        )
    return str(uv)


def _must(answer: CommandResult, code: str, what: str, fix: str) -> CommandResult:
    if not answer.ok:
        words = " ".join((answer.stderr or answer.stdout).split())[-1500:]
        raise refuse(code, f"{what} (status {answer.returncode}): {words}.", fix)
    return answer


def _environment(home: Path, *assignments: str) -> list[str]:
    """A clean environment for uv and the gates: what the host's root has set must not decide what is installed."""
    keep = [
        f"{name}={os.environ[name]}"
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy", "SSL_CERT_FILE")
        if name in os.environ
    ]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return ["env", "-i", f"PATH={path}", "LC_ALL=C.UTF-8", f"HOME={home}", *keep, *assignments]


def _build(
    layout: Layout,
    row: Mapping[str, Any],
    lock_text: str,
    run: CommandRunner,
    *,
    uv: str,
    python: str,
    partial: Path,
    wheels: Path | None,
) -> None:
    """Fill a directory: virtual environment, all wheels in one transaction, metadata alias, file modes."""
    environment = _environment(
        layout.tools,
        f"UV_CACHE_DIR={layout.uv_cache}",
        "UV_NO_CONFIG=1",
        "UV_PYTHON_DOWNLOADS=never",
        "UV_LINK_MODE=hardlink",
    )
    # uv makes its lock files writable for everybody; nobody else gets to them
    layout.uv_cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    layout.uv_cache.chmod(0o700)
    # a relocatable environment finds itself through its own path, so that the rename at the end breaks nothing
    _must(
        run([*environment, uv, "venv", "--quiet", "--relocatable", "--python", python, str(partial)], timeout_s=300),
        "KVF-ENG-010",
        "uv could not make the virtual environment",
        "See the message; the old release is untouched.",
    )
    lock_path = partial / "lock.txt"
    lock_path.write_text(lock_text)
    base = [
        *environment,
        *(uv, "pip", "sync", "--quiet", "--python", str(partial / "bin" / "python"), "--require-hashes"),
        *("--only-binary", ":all:", "--compile-bytecode"),
    ]
    if wheels is not None:
        attempts = [["--offline", "--no-index", "--find-links", str(wheels)]]
    else:
        sources = _host_sources(layout, run)
        attempts = [uv_source_arguments(sources)]
        if sources.extra_index_urls:
            attempts.append(uv_source_arguments(sources, extra=True))
        if row["accelerator"] == "cpu":
            attempts.append([*uv_source_arguments(sources), "--find-links", TORCH_CPU_LINKS])
    for arguments in attempts:
        answer = run([*base, *arguments, str(lock_path)], timeout_s=_INSTALL_LIMIT_S)
        if answer.ok:
            break
    _must(
        answer,
        "KVF-ENG-010",
        f"uv could not install {row['id']}",
        "A hash that does not match means another file than the lock's. The old release is untouched.",
    )
    alias = row.get("metadata_alias")
    if alias:
        write_alias(_site_packages(partial), str(alias["name"]), str(alias["version"]))
    _set_modes(partial)


def _host_sources(layout: Layout, run: CommandRunner) -> Sources:
    for home in sorted(layout.tools.glob("index-*")):
        answer = run([str(home / "bin" / "python"), "-m", "pip", "config", "list"])
        if answer.ok:
            return pip_sources(answer.stdout)
    return Sources()


def write_alias(site_packages: Path, name: str, version: str) -> None:
    """Metadata of a distribution that is installed under another name, in the form of an installed package."""
    folder = site_packages / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("kvfleet\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in ("INSTALLER", "METADATA", "RECORD")))


def _set_modes(folder: Path) -> None:
    """Readable for all, writable for root alone: wheels carry whatever modes their makers had."""
    for base, _directories, files in os.walk(folder):
        paths = [Path(base), *(Path(base) / file for file in files)]
        for path in paths:
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode):
                continue
            mode = stat.S_IMODE(found.st_mode)
            wanted = (mode | 0o444) & ~0o022
            if stat.S_ISDIR(found.st_mode) or mode & 0o100:
                wanted |= 0o111
            if wanted != mode:
                path.chmod(wanted)


def _write_marker(
    folder: Path,
    row: Mapping[str, Any],
    lock: Lock,
    gates: Sequence[Gate],
    python: str,
    base: BaseEnvironment | None = None,
) -> None:
    marker = {
        "schema": 1,
        "release": row["id"],
        "platform": lock.platform,
        "lock_sha256": lock.digest,
        "gates_sha256": gates_digest(row),
        "gates": [gate.as_dict() for gate in gates],
        "distributions": _distributions(folder),
        "python": python,
        "base_packages": list(base.site_packages) if base else [],
        "installed": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds"),
    }
    path = folder / MARKER
    beside = path.with_name(f"{MARKER}.new")
    with beside.open("w") as stream:
        json.dump(marker, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    beside.chmod(0o644)
    beside.replace(path)


# ------------------------------------------------------------------------------------------------ gates

# runs in the release's own interpreter; argument: the row as JSON; last line of output: JSON
_GATE_SCRIPT = r"""
import importlib, importlib.metadata, json, sys, time
row = json.loads(sys.argv[1])
found = []
def gate(name, call):
    start = time.monotonic()
    try:
        detail, ok = call(), True
    except BaseException as error:
        detail, ok = "%s: %s" % (type(error).__name__, error), False
    found.append({"gate": name, "ok": ok, "detail": str(detail)[:600], "seconds": time.monotonic() - start})
def public(version):
    return version.split("+")[0]
def versions():
    names = {row["distribution"]: row["vllm"], "vllm": row["vllm"]}
    if row["lmcache"]:
        names["lmcache"] = row["lmcache"]
    have = {name: importlib.metadata.version(name) for name in names}
    wrong = [n for n in names if names[n] not in (have[n], public(have[n]))]
    if wrong:
        raise RuntimeError(", ".join("%s %s instead of %s" % (n, have[n], names[n]) for n in wrong))
    return ", ".join("%s %s" % item for item in sorted(have.items()))
def torch():
    import torch
    if torch.__version__ != row["torch"]:
        raise RuntimeError("torch %s instead of %s" % (torch.__version__, row["torch"]))
    return "torch %s" % torch.__version__
def abi():
    import torch
    module = importlib.import_module(row["abi_probe"])
    return "%s loads next to torch %s" % (module.__name__, torch.__version__)
def connector():
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    settings = {"kv_connector": row["connector"], "kv_role": "kv_both"}
    if row["connector_module_path"]:
        settings["kv_connector_module_path"] = row["connector_module_path"]
    cls = KVConnectorFactory.get_connector_class(KVTransferConfig(**settings))
    if isinstance(cls, tuple):
        cls = cls[0]
    if row["mode"] == "in_process":
        importlib.import_module("lmcache.integration.vllm.vllm_v1_adapter")
    return "%s.%s" % (cls.__module__, cls.__qualname__)
gate("versions", versions)
gate("torch", torch)
if row["abi_probe"]:
    gate("abi", abi)
if row["connector"]:
    gate("connector", connector)
print()
print(json.dumps(found))
"""

# parses each command line with the release's own parser, as its command would, and stops before serving
_ARGUMENTS_SCRIPT = r"""
import contextlib, io, json, sys
import vllm.entrypoints.cli.main as cli
import vllm.entrypoints.cli.serve as serve
serve.ServeSubcommand.cmd = staticmethod(lambda arguments: None)
for name, words in json.loads(sys.argv[1]):
    sys.argv = ["vllm", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as end:
        if end.code:
            lines = said.getvalue().strip().splitlines() or ["status %s" % end.code]
            raise SystemExit("%s: %s" % (name, lines[-1]))
"""

_QUIET = (
    "VLLM_NO_USAGE_STATS=1",
    "DO_NOT_TRACK=1",
    "LMCACHE_TRACK_USAGE=false",
    "LMCACHE_DISABLE_BANNER=1",
    "HF_HUB_OFFLINE=1",
    "TRANSFORMERS_OFFLINE=1",
    "PYTHONDONTWRITEBYTECODE=1",
)


def prove(
    folder: Path, row: Mapping[str, Any], run: CommandRunner, commands: Sequence[tuple[str, Sequence[str]]] = ()
) -> list[Gate]:
    """Run every gate of a release directory in its own interpreter; raise KVF-ENG-020 with all that failed.

    ``commands``: names of instances with the words after ``vllm`` that will start them.

    Gates: versions equal the row, torch and its build, the ABI probe, the connector class through vLLM's own loader,
    the ``vllm`` command's version and its parser against ``commands`` (a flag that a release dropped ends an instance
    at once), LMCache's server command (mode mp), and the prerequisites of run-time compilation.
    """

    def timed(argv: Sequence[str]) -> tuple[CommandResult, float]:
        start = datetime.datetime.now(datetime.timezone.utc)
        # whatever the packages write at import belongs to nobody
        with tempfile.TemporaryDirectory(prefix="kvfleet-gate-") as home:
            answer = run([*_environment(Path(home)), *_QUIET, *argv], timeout_s=_GATE_LIMIT_S)
        return answer, (datetime.datetime.now(datetime.timezone.utc) - start).total_seconds()

    programs: dict[str, list[str]] = {
        "python": [str(folder / "bin" / "python"), "-c", _GATE_SCRIPT, json.dumps(dict(row))],
        "vllm": [str(folder / "bin" / "vllm"), "--version"],
    }
    if row["mode"] == "mp":
        programs["lmcache"] = [str(folder / "bin" / "lmcache"), "server", "--help"]
    if commands:
        programs["arguments"] = [str(folder / "bin" / "python"), "-c", _ARGUMENTS_SCRIPT, json.dumps(list(commands))]
    with ThreadPoolExecutor(max_workers=len(programs)) as pool:
        answers = dict(zip(programs, pool.map(timed, programs.values())))
    gates = _script_gates(*answers["python"])
    answer, seconds = answers["vllm"]
    printed = answer.stdout.strip().splitlines()[-1:] if answer.ok else []
    good = bool(printed) and printed[0].split("+")[0] == row["vllm"]
    gates.append(Gate("vllm", good, printed[0] if printed else _last_words(answer), seconds))
    if "lmcache" in answers:
        answer, seconds = answers["lmcache"]
        good = answer.ok and "--l1-size-gb" in answer.stdout
        detail = "lmcache server takes its arguments" if good else _last_words(answer)
        gates.append(Gate("lmcache", good, detail, seconds))
    if "arguments" in answers:
        answer, seconds = answers["arguments"]
        detail = f"vllm takes the command lines of {len(commands)} instance(s)" if answer.ok else _last_words(answer)
        gates.append(Gate("arguments", answer.ok, detail, seconds))
    gates += jit_gates(folder, row, run)
    failed = [gate for gate in gates if not gate.ok]
    if failed:
        raise KvfleetError(
            *(
                Finding(
                    "KVF-ENG-020",
                    f"Release {row['id']} fails its gate {gate.name}: {gate.detail}.",
                    "The old release stays in use. Compare the lock with the row, or take another release.",
                    {"gate": gate.name},
                )
                for gate in failed
            )
        )
    return gates


def _script_gates(answer: CommandResult, seconds: float) -> list[Gate]:
    try:
        found = json.loads(answer.stdout.strip().splitlines()[-1])
        return [Gate(one["gate"], one["ok"], one["detail"], one["seconds"]) for one in found]
    except (IndexError, ValueError, KeyError, TypeError):
        return [
            Gate("python", False, f"the interpreter ended with {answer.returncode}: {_last_words(answer)}", seconds)
        ]


def _last_words(answer: CommandResult) -> str:
    lines = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    return (lines[-1].strip() if lines else f"status {answer.returncode} without a word")[:600]


def jit_gates(
    folder: Path, row: Mapping[str, Any], run: CommandRunner, toolkits: Path = Path("/usr/local")
) -> list[Gate]:
    """What a release compiles at run time with: ``compiler`` a C compiler, ``kernels`` nvcc or prebuilt kernels."""
    gates = []
    for need in row.get("jit") or []:
        if need == "compiler":
            found = next((name for name in ("gcc", "cc", "clang") if run([name, "--version"]).ok), None)
            gates.append(Gate("compiler", bool(found), found or "no C compiler: install gcc"))
        elif need == "kernels":
            site = _site_packages(folder)
            nvcc = [*site.glob("nvidia/*/bin/nvcc"), *toolkits.glob("cuda*/bin/nvcc")]
            prebuilt = [*site.glob("flashinfer_cubin-*.dist-info"), *site.glob("flashinfer_jit_cache-*.dist-info")]
            if nvcc or prebuilt:
                detail = str((nvcc or prebuilt)[0])
            elif run(["nvcc", "--version"]).ok:
                detail = "nvcc"
            else:
                detail = ""
            gates.append(
                Gate("kernels", bool(detail), detail or "neither nvcc nor prebuilt kernels: install the toolkit")
            )
    return gates


def prove_again(
    layout: Layout,
    folder: Path,
    row: Mapping[str, Any],
    lock: Lock,
    run: CommandRunner,
    commands: Sequence[tuple[str, Sequence[str]]] = (),
) -> list[Gate]:
    """Run the gates of an installed release whose row changed, and remember the result."""
    with exclusive(layout):
        gates = prove(folder, row, run, commands)
        marker = read_marker(folder) or {}
        paths = tuple(str(path) for path in marker.get("base_packages") or ())
        python = str(marker.get("python", ""))
        _write_marker(folder, row, lock, gates, python, BaseEnvironment(python, paths) if paths else None)
        return gates


# ------------------------------------------------------------------------------------------------ switching


def read_history(layout: Layout) -> list[str]:
    """Ids of proved releases, the one left last at the end."""
    try:
        found = json.loads(layout.history.read_text())
    except (OSError, ValueError):
        return []
    return [str(one) for one in found] if isinstance(found, list) else []


def rollback_target(layout: Layout) -> str | None:
    """Id of the proved release that the host left last and still holds, other than the current one; else None."""
    now = current_directory(layout)
    current = (read_marker(now) or {}).get("release") if now else None
    installed = {str(marker["release"]) for marker in release_directories(layout).values()}
    for release in reversed(read_history(layout)):
        if release != current and release in installed:
            return release
    return None


def _remember(layout: Layout, release: str) -> None:
    history = [*[one for one in read_history(layout) if one != release][-9:], release]
    beside = layout.history.with_name(f".{layout.history.name}.{os.getpid()}")
    beside.write_text(json.dumps(history) + "\n")
    beside.replace(layout.history)


def newest_of(layout: Layout, release: str) -> Path:
    """The newest complete directory of a release id; refuse (KVF-ENG-030) when there is none."""
    found = {path: marker for path, marker in release_directories(layout).items() if marker["release"] == release}
    if not found:
        have = ", ".join(sorted({str(marker["release"]) for marker in release_directories(layout).values()})) or "none"
        raise refuse(
            "KVF-ENG-030",
            f"Release {release} is not on this host (complete releases: {have}).",
            "Install it first (role engine); current stays as it is.",
        )
    return max(found, key=lambda path: str(found[path].get("installed", "")))


def proved_releases(files: Iterable[Path]) -> list[str]:
    """Ids of the releases that proof files name; a file that is not there or cannot be read names none."""
    found = []
    for path in files:
        try:
            release = json.loads(path.read_text()).get("release")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(release, dict):
            release = release.get("id")
        if release:
            found.append(str(release))
    return found


def switch(layout: Layout, folder: Path, *, proved: Iterable[str] = (), dry_run: bool = False) -> bool:
    """Point ``current`` at a complete release in one step; whether it pointed elsewhere before.

    A release that is left and whose id is in ``proved`` is remembered as one to return to.
    """
    if read_marker(folder) is None and not dry_run:
        raise refuse(
            "KVF-ENG-030",
            f"{folder} is no complete release.",
            "Install it first (role engine); current stays as it is.",
        )
    if layout.current.is_symlink() and layout.current.resolve() == folder.resolve():
        return False
    if layout.current.exists() and not layout.current.is_symlink():
        raise refuse("KVF-ENG-031", f"{layout.current} is no link.", "Move it away; kvfleet does not replace it.")
    if dry_run:
        return True
    left = current_directory(layout)
    left_id = str((read_marker(left) or {}).get("release")) if left else ""
    if left_id in set(proved):
        _remember(layout, left_id)
    beside = layout.root / f".current.{os.getpid()}"
    beside.unlink(missing_ok=True)
    # relative: the tree can be mounted elsewhere and still holds together
    beside.symlink_to(os.path.relpath(folder, layout.root))
    beside.replace(layout.current)
    return True


def to_prune(layout: Layout, keep: int, protected: Iterable[str], using: Path | None = None) -> list[Path]:
    """Releases to drop: all but the ``keep`` newest, never the one in use nor one whose id is protected (proved)."""
    if keep < 1:
        raise refuse("KVF-ENG-032", f"engine_keep_releases is {keep}.", "Set it to 1 or more.")
    guarded = {*protected, rollback_target(layout)}
    current = using or current_directory(layout)
    found = release_directories(layout)
    newest = sorted(found, key=lambda path: (path == current, str(found[path].get("installed", ""))), reverse=True)
    stay = set(newest[:keep])
    return sorted(
        path for path in found if path not in stay and path != current and found[path]["release"] not in guarded
    )


def prune(
    layout: Layout, keep: int, protected: Iterable[str], *, using: Path | None = None, dry_run: bool = False
) -> list[str]:
    """Drop old releases, their unpacked bundles, and files of uv's cache that no release shares; return their paths."""
    doomed = to_prune(layout, keep, protected, using)
    if dry_run or not doomed:
        return [str(path) for path in doomed]
    with exclusive(layout):
        for path in doomed:
            # the marker first: an interrupted removal must not look like a release
            (path / MARKER).unlink(missing_ok=True)
            shutil.rmtree(path)
        left = {str(marker["release"]) for marker in release_directories(layout).values()}
        _drop_bundles(layout, left)
        trim_uv_cache(layout)
    return [str(path) for path in doomed]


def _drop_bundles(layout: Layout, stay: set[str]) -> None:
    """Drop unpacked bundles of releases that are gone, and wheels that no bundle names."""
    if not layout.bundles.is_dir():
        return
    named: set[str] = set()
    for bundle in layout.bundles.iterdir():
        if bundle.name in stay:
            named |= wheel_names(read_manifest(bundle) or {"files": []})
        else:
            shutil.rmtree(bundle)
    for wheel in layout.wheels.iterdir() if layout.wheels.is_dir() else ():
        if wheel.name not in named:
            wheel.unlink()


def trim_uv_cache(layout: Layout) -> int:
    """Drop uv's unpacked wheels that no release links to any more; return the bytes freed.

    uv never forgets by itself, and its cache would grow with every release. An unpacked wheel of which no file has a
    second link is used by nobody.
    """
    freed = 0
    archives = layout.uv_cache.glob("archive-v*/*") if layout.uv_cache.is_dir() else ()
    for archive in archives:
        sizes: list[int] = []
        shared = False
        for base, _directories, files in os.walk(archive):
            for file in files:
                found = (Path(base) / file).lstat()
                shared = shared or found.st_nlink > 1
                sizes.append(found.st_size)
        if not shared:
            shutil.rmtree(archive)
            freed += sum(sizes)
    return freed
