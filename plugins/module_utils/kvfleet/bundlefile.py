"""Air-gap bundles: what their files are, and how to check and unpack them.

A bundle is one uncompressed tar, whole or cut into parts, and an index beside it (``<name>.json``) with the size and
sha256 of every part. Inside: ``manifest.json`` (first member: release, platform, lock digest, every file with its sum),
``lock.txt``, ``SHA256SUMS``, ``wheels/``, and ``debs/`` when Debian packages are included.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .findings import Finding, KvfleetError, refuse

_CHUNK = 1024 * 1024
_FOLDERS = ("wheels", "debs")
_TOP = ("lock.txt", "SHA256SUMS")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Part:
    """One file of a bundle as it travels."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class BundleIndex:
    """What lies beside a bundle: enough to know whether all of it arrived before anything is opened."""

    name: str
    release: str
    platform: str
    manifest_sha256: str
    parts: tuple[Part, ...]
    debs: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Size of the whole tar."""
        return sum(part.size_bytes for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """The content of the index file."""
        return {
            "schema": 1,
            "name": self.name,
            "release": self.release,
            "platform": self.platform,
            "manifest_sha256": self.manifest_sha256,
            "debs": list(self.debs),
            "parts": [{"name": p.name, "size_bytes": p.size_bytes, "sha256": p.sha256} for p in self.parts],
        }


def bundle_name(release: str, platform: str) -> str:
    """Base name of a bundle's files."""
    return f"kvfleet-bundle-{release}-{platform}"


def read_index(data: Mapping[str, Any], where: str) -> BundleIndex:
    """An index from its data; refuse (KVF-REL-060) what is none. ``where`` names the file in the message."""
    try:
        parts = tuple(
            Part(_plain(str(part["name"])), int(part["size_bytes"]), str(part["sha256"])) for part in data["parts"]
        )
        index = BundleIndex(
            _plain(str(data["name"])),
            str(data["release"]),
            str(data["platform"]),
            str(data["manifest_sha256"]),
            parts,
            tuple(str(deb) for deb in data.get("debs", [])),
        )
        if data["schema"] != 1 or not parts:
            raise ValueError("schema")
    except (KeyError, TypeError, ValueError):
        raise refuse(
            "KVF-REL-060", f"{where} is not the index of a bundle.", "Build the bundle again with kvfleet bundle."
        ) from None
    return index


def _plain(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(name)
    return name


def sha256_of(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def part_problem(part: Part, folder: Path) -> str | None:
    """What is wrong with a part in ``folder``, in words; None when it is complete and untouched."""
    path = folder / part.name
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != part.size_bytes:
        return f"has {size} of {part.size_bytes} bytes"
    if sha256_of(path) != part.sha256:
        return "has another sha256 than when it was made"
    return None


def verify_parts(index: BundleIndex, folder: Path) -> None:
    """Refuse (KVF-REL-061, one finding a part) a bundle with a missing, short or altered part, by its name."""
    findings = []
    for part in index.parts:
        problem = part_problem(part, folder)
        if problem:
            findings.append(
                Finding(
                    "KVF-REL-061", f"Bundle part {part.name} {problem}.", "Copy it again, or build the bundle anew."
                )
            )
    if findings:
        raise KvfleetError(*findings)


class JoinedParts(io.RawIOBase):
    """The parts of a bundle read as one stream, without joining them on disk; checks each part's sum on the way.

    Reading past the end of a part whose size or sum differs raises KvfleetError with the part's name.
    """

    def __init__(self, index: BundleIndex, folder: Path) -> None:
        super().__init__()
        self._parts = iter(index.parts)
        self._folder = folder
        self._part: Part | None = None
        self._stream: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._next()

    def _next(self) -> None:
        self._part = next(self._parts, None)
        self._digest = hashlib.sha256()
        if self._part is None:
            self._stream = None
            return
        path = self._folder / self._part.name
        size = path.stat().st_size if path.is_file() else -1
        if size != self._part.size_bytes:
            self._refuse("is missing" if size < 0 else f"has {size} of {self._part.size_bytes} bytes")
        self._stream = path.open("rb")

    def _refuse(self, problem: str) -> None:
        name = self._part.name if self._part else ""
        raise refuse("KVF-REL-061", f"Bundle part {name} {problem}.", "Copy it again, or build the bundle anew.")

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes, across parts."""
        pieces: list[bytes] = []
        wanted = size if size >= 0 else 1 << 62
        while wanted > 0 and self._stream is not None and self._part is not None:
            chunk = self._stream.read(min(wanted, _CHUNK))
            if chunk:
                self._digest.update(chunk)
                pieces.append(chunk)
                wanted -= len(chunk)
                continue
            self._stream.close()
            if self._digest.hexdigest() != self._part.sha256:
                self._refuse("has another sha256 than when it was made")
            self._next()
        return b"".join(pieces)

    def close(self) -> None:
        """Close the part that is open."""
        if self._stream is not None:
            self._stream.close()
        super().close()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an unpacked bundle with its own sha256 as ``_sha256``; None when there is none."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    manifest["_sha256"] = hashlib.sha256(text).hexdigest()
    return manifest


def unpack(index: BundleIndex, folder: Path, target: Path, store: Path) -> dict[str, Any]:
    """Unpack the parts in ``folder`` to ``target``, wheels into ``store``, checking every file; return the manifest.

    Bundles share one store, and a wheel that lies there already stays as it is: uv knows a wheel by its path and time,
    and links the files of one that it unpacked before instead of writing them again.

    Works beside the target and renames at the end, so that a target is always whole. Refuses KVF-REL-061 for a bad
    part, KVF-REL-062 for a bad file inside, each by name.
    """
    beside = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        manifest = _unpack(index, folder, beside)
        _store_wheels(manifest, beside / "wheels", store)
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def _store_wheels(manifest: Mapping[str, Any], fresh: Path, store: Path) -> None:
    store.mkdir(parents=True, exist_ok=True)
    for name, entry in _wheels(manifest).items():
        kept = store / name
        if not kept.is_file() or sha256_of(kept) != entry["sha256"]:
            (fresh / name).replace(kept)
    shutil.rmtree(fresh, ignore_errors=True)


def _wheels(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {entry["path"].split("/", 1)[1]: entry for entry in manifest["files"] if entry["path"].startswith("wheels/")}


def wheel_names(manifest: Mapping[str, Any]) -> set[str]:
    """File names of a bundle's wheels."""
    return set(_wheels(manifest))


def unpacked(folder: Path, store: Path) -> dict[str, Any] | None:
    """The manifest of an unpacked bundle when all its wheels still lie in the store, else None."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for name, entry in _wheels(manifest).items():
        path = store / name
        if not path.is_file() or path.stat().st_size != entry["size_bytes"]:
            return None
    return manifest


def _unpack(index: BundleIndex, folder: Path, target: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = {}
    expected: dict[str, Mapping[str, Any]] = {}
    joined = JoinedParts(index, folder)
    try:
        with tarfile.open(fileobj=joined, mode="r|") as tar:
            for member in tar:
                name = member.name
                if not member.isreg() or not _allowed(name):
                    raise _bad_file(index, name, "does not belong into a bundle")
                stream = tar.extractfile(member)
                if stream is None:
                    raise _bad_file(index, name, "cannot be read")
                path = target / name
                path.parent.mkdir(exist_ok=True)
                found = _copy(stream, path)
                if not manifest:
                    if name != MANIFEST or found != index.manifest_sha256:
                        raise _bad_file(index, name, "is not the manifest that the index names")
                    manifest = json.loads(path.read_text())
                    expected = {entry["path"]: entry for entry in manifest["files"]}
                    continue
                if name not in expected or found != expected[name]["sha256"]:
                    raise _bad_file(index, name, "has another sha256 than the manifest says")
                del expected[name]
        # what follows the tar's end marker belongs to a part too: read on, so that every sum is checked
        while joined.read(_CHUNK):
            pass
    except (tarfile.TarError, EOFError) as error:
        raise _bad_file(index, index.parts[-1].name, f"is no complete tar ({error})") from None
    finally:
        joined.close()
    if expected:
        raise _bad_file(index, ", ".join(sorted(expected)), "is missing")
    return manifest


def _allowed(name: str) -> bool:
    parts = name.split("/")
    if len(parts) == 1:
        return name == MANIFEST or name in _TOP
    return len(parts) == 2 and parts[0] in _FOLDERS and bool(parts[1]) and not parts[1].startswith(".")


def _copy(stream: IO[bytes], path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
            out.write(chunk)
    path.chmod(0o644)
    return digest.hexdigest()


def _bad_file(index: BundleIndex, name: str, problem: str) -> KvfleetError:
    return refuse(
        "KVF-REL-062", f"Bundle {index.name}: {name} {problem}.", "Build the bundle anew with kvfleet bundle."
    )


def sums_text(entries: Iterable[Mapping[str, Any]]) -> str:
    """``SHA256SUMS`` as ``sha256sum --check`` reads it."""
    return "".join(f"{entry['sha256']}  {entry['path']}\n" for entry in entries)
