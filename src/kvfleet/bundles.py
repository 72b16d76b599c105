"""Build air-gap bundles on the controller: fetch a lock's wheels once, pack them with their sums."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from kvfleet.checkout import cache_directory
from kvfleet.core.bundlefile import (
    MANIFEST,
    BundleIndex,
    Part,
    bundle_name,
    part_problem,
    read_index,
    sha256_of,
    sums_text,
    unpack,
)
from kvfleet.core.command import CommandRunner, run_command
from kvfleet.core.findings import refuse
from kvfleet.core.lockfile import Lock, Pin, lock_name, normalise, parse_lock
from kvfleet.locks import TORCH_CPU_LINKS, target_platforms
from kvfleet.matrix import LOCKS

#: wheels of one pip call; small enough for a bar that moves, large enough that starting pip does not count
_BATCH = 12
#: seconds that one batch may take; a batch of a CUDA release holds several GB
_BATCH_LIMIT_S = 3600.0

Progress = Callable[[str, int, int], None]
"""Called with what happens now, the bytes done and the bytes in all."""


def _silent(_what: str, _done: int, _total: int) -> None:
    return


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk: its index file and what the index says; ``built`` is False when it was already there."""

    index_path: Path
    index: BundleIndex
    built: bool


def tools_lock_name(machine: str) -> str:
    """Name of the lock with uv, which installs every release on hosts."""
    return lock_name("tools", f"py3-{machine}")


def read_lock(release: str, platform: str, locks: Path = LOCKS) -> tuple[Lock, str]:
    """A stored lock and its text; refuse (KVF-REL-056) with the command that makes it when there is none."""
    path = locks / lock_name(release, platform)
    if not path.exists():
        python = f"{platform[2]}.{platform.split('-')[0][3:]}" if platform.startswith("cp") else ""
        raise refuse(
            "KVF-REL-056",
            f"There is no lock for release {release} on {platform} ({path.name}).",
            f"Make it with: kvfleet lock {release}{f' --python {python}' if python else ''}.",
        )
    text = path.read_text()
    lock = parse_lock(text, path.name)
    if (lock.release, lock.platform) != (release, platform):
        raise refuse(
            "KVF-REL-050",
            f"Lock {path.name} is for {lock.release} on {lock.platform}.",
            "Restore it, or make it again with kvfleet lock.",
        )
    return lock, text


# ------------------------------------------------------------------------------------------------ wheels


def wheelhouse() -> Path:
    """Where fetched wheels are kept."""
    return cache_directory() / "wheels"


def fetch_wheels(lock: Lock, cache: Path | None = None, progress: Progress = _silent) -> dict[Pin, Path]:
    """Every wheel of a lock, from the cache or fetched with pip (which knows the machine's indexes and proxies).

    Raises KVF-REL-054 with all wheels that could not be had, and why, in one refusal. What was fetched stays in the
    cache, so that a second call goes on from there.
    """
    cache = wheelhouse() if cache is None else cache
    cache.mkdir(parents=True, exist_ok=True)
    have: dict[Pin, Path] = {}
    with FileLock(str(cache / ".lock")):
        for pin in lock.pins:
            path = cache / (pin.wheel or f"{pin.name}-{pin.version}")
            if path.is_file() and sha256_of(path) in pin.hashes:
                have[pin] = path
        missing = [pin for pin in lock.pins if pin not in have]
        done, total = sum(pin.size_bytes for pin in have), lock.size_bytes
        failures: dict[Pin, str] = {}
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            progress(
                f"fetching {batch[0].name} and {len(batch) - 1} more" if len(batch) > 1 else batch[0].name, done, total
            )
            got, trouble = _download(batch, lock, cache)
            have.update(got)
            if trouble:
                # one bad package hides the others of its batch: ask for each alone, so that all are named
                for pin in batch:
                    if pin not in have:
                        alone, why = _download_one(pin, lock, cache)
                        have.update(alone)
                        if pin not in alone:
                            failures[pin] = why
            done += sum(pin.size_bytes for pin in batch if pin in have)
        progress("wheels are there", done, total)
    if failures:
        listing = "; ".join(f"{pin.wheel or pin.requirement}: {why}" for pin, why in failures.items())
        raise refuse(
            "KVF-REL-054",
            f"{len(failures)} of {len(lock.pins)} wheels of {lock.release} for {lock.platform} are missing: {listing}.",
            "Make them available to pip (index-url, extra-index-url, find-links), or refresh the lock (kvfleet lock).",
            missing=[pin.requirement for pin in failures],
        )
    return have


def _download_one(pin: Pin, lock: Lock, cache: Path) -> tuple[dict[Pin, Path], str]:
    got, trouble = _download([pin], lock, cache)
    if pin not in got and pin.version.endswith("+cpu"):
        got, trouble = _download([pin], lock, cache, ["--find-links", TORCH_CPU_LINKS])
    return got, trouble


def _download(pins: Sequence[Pin], lock: Lock, cache: Path, extra: Sequence[str] = ()) -> tuple[dict[Pin, Path], str]:
    """Fetch some wheels into the cache; return those that came and pip's complaint, if any."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as name:
        folder = Path(name)
        wanted = folder / "wanted.txt"
        wanted.write_text(
            "".join(f"{pin.requirement} {' '.join(f'--hash=sha256:{h}' for h in pin.hashes)}\n" for pin in pins)
        )
        files = folder / "files"
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"),
                    *("--quiet", "--retries", "5", "--timeout", "60", "--disable-pip-version-check"),
                    *_platform_arguments(lock),
                    *extra,
                    *("--dest", str(files), "--requirement", str(wanted)),
                ],
                capture_output=True,
                text=True,
                check=False,
                timeout=_BATCH_LIMIT_S,
                # constraints of the machine concern what is installed here, not what a host gets
                env=os.environ | {"PIP_CONSTRAINT": os.devnull, "LC_ALL": "C"},
            )
            trouble = "" if done.returncode == 0 else _complaint(done.stderr)
        except subprocess.TimeoutExpired:
            trouble = f"no end within {_BATCH_LIMIT_S:g} s"
        got: dict[Pin, Path] = {}
        for path in sorted(files.iterdir()) if files.is_dir() else []:
            digest = sha256_of(path)
            for pin in pins:
                if digest in pin.hashes:
                    target = cache / (pin.wheel or path.name)
                    path.replace(target)
                    got[pin] = target
                    break
        return got, trouble


def _platform_arguments(lock: Lock) -> list[str]:
    """pip's words for a lock's platform, so that any controller fetches what the host needs."""
    tag, machine = lock.platform.split("-", 1)
    arguments: list[str] = []
    for platform in target_platforms(lock.glibc, machine):
        arguments += ["--platform", platform]
    if tag.startswith("cp"):
        arguments += ["--python-version", f"{tag[2]}.{tag[3:]}", "--implementation", "cp"]
        arguments += ["--abi", tag, "--abi", "abi3", "--abi", "none"]
    return arguments


def _complaint(stderr: str) -> str:
    """The sentence of pip's output that says what is wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        return "the file found has another sha256 than the lock allows"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors[-1] if errors else lines[-1] if lines else "pip failed without a word")[:300]


# ------------------------------------------------------------------------------------------------ packing


def build(
    row: Mapping[str, Any],
    python: str | None = None,
    machine: str = "x86_64",
    *,
    output: Path | None = None,
    split_bytes: int | None = None,
    cache: Path | None = None,
    locks: Path = LOCKS,
    debs: Sequence[Path] = (),
    progress: Progress = _silent,
) -> Bundle:
    """Build the bundle of a release for one platform in ``output`` (default: the cache).

    The bundle is reproducible: the same lock and packages give the same bytes. An existing one with the same content is
    left as it is. ``split_bytes`` cuts it into parts of at most that size. ``debs`` are Debian packages to carry along.
    """
    platform = f"cp{(python or row['engine_python']).replace('.', '')}-{machine}"
    lock, lock_text = read_lock(row["id"], platform, locks)
    tools, _ = read_lock("tools", f"py3-{machine}", locks)
    output = cache_directory() / "bundles" if output is None else output
    name = bundle_name(row["id"], platform)
    wheels = fetch_wheels(lock, cache, progress)
    uv = fetch_wheels(tools, cache, progress)
    contents: list[tuple[str, Path | bytes]] = [("lock.txt", lock_text.encode())]
    contents += [(f"wheels/{path.name}", path) for path in sorted({*wheels.values(), *uv.values()})]
    contents += [(f"debs/{path.name}", path) for path in sorted(debs)]
    entries = [_entry(member, data) for member, data in contents]
    contents.insert(1, ("SHA256SUMS", sums_text(entries).encode()))
    entries.insert(1, _entry(*contents[1]))
    manifest = {
        "schema": 1,
        "release": row["id"],
        "platform": platform,
        "glibc": lock.glibc,
        "lock_sha256": lock.digest,
        "uv": next(pin.wheel for pin in tools.pins if pin.name == normalise("uv")),
        "files": entries,
    }
    manifest_bytes = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    digest = hashlib.sha256(manifest_bytes).hexdigest()

    output.mkdir(parents=True, exist_ok=True)
    index_path = output / f"{name}.json"
    present = _present(index_path, digest, split_bytes)
    if present is not None:
        return Bundle(index_path, present, built=False)
    index_path.unlink(missing_ok=True)
    for stale in output.glob(f"{name}.tar*"):
        stale.unlink()
    total = sum(entry["size_bytes"] for entry in entries)
    with _part_writer(output, f"{name}.tar", split_bytes) as writer:
        with tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            done = 0
            for member, data in [(MANIFEST, manifest_bytes), *contents]:
                done += _add(tar, member, data)
                progress(f"packing {member}", done, total)
        parts = writer.finish()
    index = BundleIndex(name, row["id"], platform, digest, parts, tuple(path.name for path in sorted(debs)))
    beside = index_path.with_suffix(".json.new")
    beside.write_text(json.dumps(index.as_dict(), indent=1) + "\n")
    beside.replace(index_path)
    return Bundle(index_path, index, built=True)


def _entry(member: str, data: Path | bytes) -> dict[str, Any]:
    if isinstance(data, bytes):
        return {"path": member, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {"path": member, "size_bytes": data.stat().st_size, "sha256": sha256_of(data)}


def _add(tar: tarfile.TarFile, member: str, data: Path | bytes) -> int:
    info = tarfile.TarInfo(member)
    info.mode = 0o644
    if isinstance(data, bytes):
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    else:
        info.size = data.stat().st_size
        with data.open("rb") as stream:
            tar.addfile(info, stream)
    return info.size


def _present(index_path: Path, manifest_sha256: str, split_bytes: int | None) -> BundleIndex | None:
    """The index of an existing bundle when it holds just this content, in these parts, undamaged."""
    try:
        index = read_index(json.loads(index_path.read_text()), index_path.name)
    except Exception:
        return None
    if index.manifest_sha256 != manifest_sha256:
        return None
    if any(part.size_bytes > (split_bytes or index.size_bytes) for part in index.parts):
        return None
    if split_bytes is None and len(index.parts) > 1:
        return None
    return None if any(part_problem(part, index_path.parent) for part in index.parts) else index


class _PartWriter(io.RawIOBase):
    """Writes a stream into files of limited size and remembers the size and sum of each."""

    def __init__(self, folder: Path, name: str, limit: int | None) -> None:
        super().__init__()
        self._folder, self._name, self._limit = folder, name, limit
        self._parts: list[Part] = []
        self._stream: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        written = 0
        while written < len(view):
            if self._stream is None:
                self._open()
            room = len(view) - written if self._limit is None else self._limit - self._size
            piece = view[written : written + room]
            assert self._stream is not None  # noqa: S101 - for the type checker
            self._stream.write(piece)
            self._digest.update(piece)
            self._size += len(piece)
            written += len(piece)
            if self._limit is not None and self._size >= self._limit:
                self._close_part()
        return written

    def _open(self) -> None:
        number = len(self._parts) + 1
        name = self._name if self._limit is None else f"{self._name}.part{number:03d}"
        self._path = self._folder / name
        self._stream = self._path.open("wb")
        self._digest, self._size = hashlib.sha256(), 0

    def _close_part(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._parts.append(Part(self._path.name, self._size, self._digest.hexdigest()))
            self._stream = None

    def finish(self) -> tuple[Part, ...]:
        """Close the last part and return all."""
        self._close_part()
        return tuple(self._parts)


@contextmanager
def _part_writer(folder: Path, name: str, limit: int | None) -> Iterator[_PartWriter]:
    """A writer whose files are removed again when the packing fails."""
    if limit is not None and limit < 1024 * 1024:
        raise refuse("KVF-REL-063", f"--split {limit} bytes is below 1 MiB.", "Give --split a size such as 2G or 700M.")
    free, writer = shutil.disk_usage(folder).free, _PartWriter(folder, name, limit)
    try:
        yield writer
    except OSError as error:
        for path in folder.glob(f"{name}*"):
            path.unlink()
        raise refuse(
            "KVF-REL-064",
            f"Packing into {folder} failed: {error.strerror} ({free / 1e9:.1f} GB were free).",
            "Make room, or give --output another folder.",
        ) from None


# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Comparison:
    """Seconds that uv and pip took to install the same wheels, bytecode included, and how many times faster uv was."""

    uv_s: float
    pip_s: float

    @property
    def ratio(self) -> float:
        """pip's time over uv's."""
        return self.pip_s / self.uv_s


def compare_installers(bundle: Bundle, python: str, run: CommandRunner = run_command) -> Comparison:
    """Install a bundle's wheels twice into throw-away environments: with uv as a host does, and with pip.

    Neither asks an index; both check every hash and compile bytecode. Raises KVF-REL-066 when one of them fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvfleet-compare-", dir=bundle.index_path.parent) as name:
        folder = Path(name)
        manifest = unpack(bundle.index, bundle.index_path.parent, folder / "bundle", folder / "wheels")
        with zipfile.ZipFile(folder / "wheels" / manifest["uv"]) as wheel:
            member = next(entry for entry in wheel.namelist() if entry.endswith(".data/scripts/uv"))
            (folder / "uv").write_bytes(wheel.read(member))
        (folder / "uv").chmod(0o755)
        lock, wheels = str(folder / "bundle" / "lock.txt"), str(folder / "wheels")
        offline = ["env", "UV_NO_CONFIG=1", "UV_PYTHON_DOWNLOADS=never", f"UV_CACHE_DIR={folder / 'uv-cache'}"]
        uv, target = str(folder / "uv"), str(folder / "with-uv")
        uv_s = _timed(
            run,
            [*offline, uv, "venv", "--quiet", "--python", python, target],
            [
                *(*offline, uv, "pip", "sync", "--quiet", "--offline", "--no-index", "--find-links", wheels),
                *("--require-hashes", "--compile-bytecode", "--python", f"{target}/bin/python", lock),
            ],
        )
        shutil.rmtree(target)
        target = str(folder / "with-pip")
        pip_s = _timed(
            run,
            [python, "-m", "venv", target],
            [
                *("env", "PIP_CONFIG_FILE=/dev/null", f"{target}/bin/python", "-m", "pip", "install", "--quiet"),
                *("--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--no-index", "--find-links", wheels),
                *("--require-hashes", "--requirement", lock),
            ],
        )
    return Comparison(uv_s, pip_s)


def _timed(run: CommandRunner, *commands: Sequence[str]) -> float:
    start = time.monotonic()
    for command in commands:
        answer = run(command, timeout_s=_BATCH_LIMIT_S)
        if not answer.ok:
            raise refuse(
                "KVF-REL-066",
                f"{command[-1]}: {' '.join(answer.stderr.split())[-500:]}",
                "Build the bundle for this machine's own interpreter (--python) to compare installers here.",
            )
    return time.monotonic() - start
