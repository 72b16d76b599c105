"""A support bundle: what a person needs who was not there, without secrets, in one archive of bounded size."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import proof
from .command import CommandRunner
from .redact import clean, clean_text, secrets_of

#: the end of each text is kept; an error stands at the end
LIMIT_BYTES = 512 * 1024
_COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nvidia-smi.txt", ("nvidia-smi",)),
    ("nvidia-smi-q.txt", ("nvidia-smi", "-q")),
    ("lsblk.json", ("lsblk", "--json", "-O")),
    ("findmnt.txt", ("findmnt", "--real")),
    ("df.txt", ("df", "-h")),
    ("free.txt", ("free", "-m")),
    ("ss.txt", ("ss", "-ltnp")),
    ("units.txt", ("systemctl", "list-units", "--all", "--no-pager", "kvfleet*")),
    ("kernel.txt", ("journalctl", "-k", "-n", "300", "--no-pager")),
    ("os.txt", ("uname", "-a")),
)


def collect(
    plan: Mapping[str, Any], reason: str, run: CommandRunner, unit_directory: Path = proof.UNIT_DIRECTORY
) -> dict[str, str]:
    """Name -> text of everything in the bundle, secrets removed; a tool that is missing leaves its message."""
    known = secrets_of(dict(plan))
    texts: dict[str, str] = {"reason.txt": reason + "\n", "plan.json": json.dumps(clean(plan, known), indent=1) + "\n"}
    state = Path(str(plan["paths"]["state"]))
    for path in proof.unit_files(plan, unit_directory):
        texts[f"files{path}"] = _read(path)
    for path in (state / proof.RECORD_NAME, state / proof.PREVIOUS_NAME, Path(str(plan["paths"]["etc"])) / "plan.json"):
        if path.is_file():
            texts[f"files{path}"] = _read(path)
    for unit in proof.unit_names(plan):
        texts[f"status/{unit}.txt"] = _run(run, ("systemctl", "status", "--no-pager", "-l", unit))
        texts[f"journal/{unit}.txt"] = _run(
            run, ("journalctl", "-u", unit, "-n", "2000", "-o", "short-iso", "--no-pager")
        )
    for name, command in _COMMANDS:
        texts[name] = _run(run, command)
    return {name: clean_text(text[-LIMIT_BYTES:], known) for name, text in texts.items()}


def _run(run: CommandRunner, command: tuple[str, ...]) -> str:
    answer = run(list(command), timeout_s=30)
    return answer.stdout + (f"\n[{command[0]}: {answer.stderr.strip()}]\n" if answer.stderr.strip() else "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"[{error}]\n"


def pack(texts: Mapping[str, str], root: str) -> bytes:
    """The texts as a gzipped tar with everything below the folder ``root``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in sorted(texts):
            data = texts[name].encode("utf-8", errors="replace")
            entry = tarfile.TarInfo(f"{root}/{name.lstrip('/')}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
