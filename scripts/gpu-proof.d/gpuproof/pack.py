"""On the controller: everything that the host needs, in one tar, cut into parts with their sums."""

from __future__ import annotations

import email.parser
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfleet import bundles
from kvfleet.checkout import ROOT, cache_directory
from kvfleet.core.bundlefile import BundleIndex, sha256_of
from kvfleet.core.findings import refuse
from kvfleet.core.lockfile import lock_name, normalise, parse_lock, reduce_lock, render_lock
from kvfleet.matrix import find_release, load_matrix

from . import settings

PACK = "kvfleet-gpu-proof"
INDEX = f"{PACK}.json"


def pack(
    release: str,
    output: Path,
    part_bytes: int,
    python: str,
    model: Path | None = None,
    debs: Path | None = None,
    complete: bool = False,
    locks: Path = ROOT / "locks",
    cache: Path | None = None,
) -> dict[str, Any]:
    """Write ``PACK.json`` and its parts into ``output``; return the index.

    ``python`` is the host's minor version. A release in :data:`settings.PROVIDED` goes without torch and CUDA's
    libraries unless ``complete``. ``model`` is a model directory to carry instead of the shape with random weights;
    ``debs`` a folder of Debian packages whose programs the host lacks. ``locks`` and ``cache`` (of wheels) are others
    in tests alone.
    """
    row = find_release(load_matrix(None, None), release).row
    platform = f"cp{python.replace('.', '')}-x86_64"
    with tempfile.TemporaryDirectory(prefix="kvfleet-pack-") as name:
        folder = Path(name)
        lock = _lock(row["id"], platform, folder / "locks", complete, locks)
        made = bundles.build(row, python, output=folder / "bundle", locks=folder / "locks", cache=cache, progress=_say)
        controller = _download(_controller_lines(), python, folder / "controller")
        stand_in = _download(
            [f"{settings.STAND_IN} --hash=sha256:{settings.STAND_IN_SHA256}"], "3.12", folder / "stand-in"
        )
        tree = folder / "tree.tar"
        with tree.open("wb") as stream:
            subprocess.run(["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD"], stdout=stream, check=True)
        description = {
            "schema": 1,
            "release": row["id"],
            "accelerator": row["accelerator"],
            "python": python,
            "platform": platform,
            "commit": _git("rev-parse", "--short", "HEAD"),
            "reduced": bool(lock.provided),
            "bundle": made.index_path.name,
            "lock": lock_name(row["id"], platform),
            "model": model.name if model else None,
            "provided": dict(lock.provided),
            "left_out": sorted(settings.LEFT_OUT.get(row["id"], ())) if lock.provided else [],
            "accepted": dict(settings.ACCEPTED),
            "carried": _requirements(cache or bundles.wheelhouse(), lock.pins) if lock.provided else {},
        }
        members: list[tuple[str, Path | bytes]] = [
            ("proof.json", json.dumps(description, indent=1).encode()),
            ("tree.tar", tree),
            (f"bundle/{made.index_path.name}", made.index_path),
            (f"bundle/{description['lock']}", folder / "locks" / str(description["lock"])),
        ]
        members += [(f"bundle/{part.name}", made.index_path.parent / part.name) for part in made.index.parts]
        members += [(f"controller/{path.name}", path) for path in controller]
        members += [(f"stand-in/{path.name}", path) for path in stand_in]
        members += [(f"debs/{path.name}", path) for path in sorted(debs.glob("*.deb"))] if debs else []
        members += [(f"model/{path.name}", path) for path in sorted(model.iterdir()) if path.is_file()] if model else []
        return _write(members, description, output, part_bytes)


def _say(what: str, done: int, total: int) -> None:
    if not what.startswith("packing"):
        print(f"pack: {what} ({done / 1e6:.0f} of {total / 1e6:.0f} MB)", flush=True)


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _lock(release: str, platform: str, folder: Path, complete: bool, locks: Path) -> Any:
    """The lock to install from, in ``folder`` beside that of uv: the release's own, or less than it."""
    folder.mkdir()
    source = locks / lock_name(release, platform)
    lock = parse_lock(source.read_text(), source.name)
    provided = settings.PROVIDED.get(release)
    if provided and not complete and not lock.provided:
        lock = reduce_lock(lock, provided, settings.LEFT_OUT[release])
    (folder / source.name).write_text(render_lock(lock, "scripts/gpu-proof pack"))
    tools = bundles.tools_lock_name("x86_64")
    (folder / tools).write_text((locks / tools).read_text())
    return parse_lock((folder / source.name).read_text(), source.name)


def _controller_lines() -> list[str]:
    """Pins with hashes of ansible-core and what it needs, out of the controller's own lock."""
    lines: list[str] = []
    wanted = False
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            wanted = normalise(line.split("==")[0].strip()) in settings.CONTROLLER_PACKAGES
        if wanted and not line.lstrip().startswith("#"):
            lines.append(line)
    return lines


def _download(lines: Sequence[str], python: str, folder: Path) -> list[Path]:
    """Wheels of hashed requirement lines for the host's interpreter."""
    folder.mkdir()
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(lines) + "\n")
    tag = f"cp{python.replace('.', '')}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary=:all:", "--python-version", python, "--implementation", "cp"),
            *("--abi", tag, "--abi", "abi3", "--abi", "none"),
            *(word for minor in (28, 27, 17) for word in ("--platform", f"manylinux_2_{minor}_x86_64")),
            *("--platform", "manylinux2014_x86_64", "--disable-pip-version-check"),
            *("--dest", str(folder), "--requirement", str(wanted)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PIP_CONSTRAINT": os.devnull},
    )
    if done.returncode:
        raise refuse(
            "KVF-REL-054",
            f"Wheels for the host's controller are missing: {done.stderr.strip()[-400:]}",
            "Make them available to pip (index-url, extra-index-url, find-links).",
        )
    return sorted(folder.glob("*.whl"))


def _requirements(wheels: Path, pins: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Version and requirements of every carried wheel, for the check on the host."""
    found = {}
    for pin in pins:
        with zipfile.ZipFile(wheels / pin.wheel) as wheel:
            member = next(
                name for name in wheel.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")
            )
            metadata = email.parser.Parser().parsestr(wheel.read(member).decode(errors="replace"))
        requires = [text for text in metadata.get_all("Requires-Dist") or [] if "extra ==" not in text]
        extras = [text for text in metadata.get_all("Requires-Dist") or [] if "extra ==" in text]
        found[pin.name] = {"version": pin.version, "requires": [*requires, *extras]}
    return found


def _write(
    members: Sequence[tuple[str, Path | bytes]], description: Mapping[str, Any], output: Path, part_bytes: int
) -> dict[str, Any]:
    output.mkdir(parents=True, exist_ok=True)
    for stale in output.glob(f"{PACK}*"):
        stale.unlink()
    with bundles._part_writer(output, f"{PACK}.tar", part_bytes) as writer:
        with tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.mode = 0o644
                info.size = len(data) if isinstance(data, bytes) else data.stat().st_size
                if isinstance(data, bytes):
                    tar.addfile(info, io.BytesIO(data))
                else:
                    with data.open("rb") as stream:
                        tar.addfile(info, stream)
        parts = writer.finish()
    sums = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    index = BundleIndex(PACK, str(description["release"]), str(description["platform"]), sums, parts).as_dict()
    index["proof"] = dict(description)
    (output / INDEX).write_text(json.dumps(index, separators=(",", ":")) + "\n")
    return index


__all__ = ["INDEX", "PACK", "cache_directory", "pack", "sha256_of"]
