"""``kvfleet lock``: make or refresh the lock of a release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvfleet.core.findings import KvfleetError, refuse
from kvfleet.core.lockfile import differences, lock_name, parse_lock, render_lock
from kvfleet.exits import Exit
from kvfleet.locks import TOOLS_ROW, resolve_lock
from kvfleet.matrix import LOCKS, find_release, load_matrix


def lock(
    release: Annotated[str, typer.Argument(help="Id of a row (kvfleet releases list), or tools for uv itself.")],
    python: Annotated[str | None, typer.Option(help="Interpreter, such as 3.11. Default: the row's.")] = None,
    machine: Annotated[str, typer.Option(help="Processor: x86_64 or aarch64.")] = "x86_64",
    output: Annotated[Path, typer.Option(help="Folder of the locks.", file_okay=False)] = LOCKS,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 2 when the lock would.")] = False,
    releases_file: Annotated[Path | None, typer.Option("--releases", help="Another releases.yml.")] = None,
    extra: Annotated[Path | None, typer.Option(help="File with rows of your own.")] = None,
) -> int:
    """Resolve a release for one platform and write its hashed lock; show what changes, for review."""
    console = Console(highlight=False, soft_wrap=True)
    tools = release == TOOLS_ROW["id"]
    row = TOOLS_ROW if tools else find_release(load_matrix(releases_file, extra), release).row
    python = python or ("3.11" if tools else row["engine_python"])
    if machine not in row["machines"]:
        raise refuse(
            "KVF-REL-025", f"{release} has no wheels for {machine}.", f"Use --machine {' or '.join(row['machines'])}."
        )
    new = resolve_lock(row, python, machine, say=lambda text: console.print(f"{text} ..."))
    path = output / lock_name(new.release, new.platform)
    old = None
    if path.exists():
        try:
            old = parse_lock(path.read_text(), path.name)
        except KvfleetError as broken:
            console.print(f"{path.name} cannot be read and is made anew: {broken}")
    changes = differences(old, new)
    for line in changes:
        console.print(f"  {line}")
    size = f"{new.size_bytes / 1e6:.0f} MB"
    if not changes:
        console.print(f"{path.name}: unchanged, {len(new.pins)} wheels, {size}")
        return Exit.PROVED
    if check:
        console.print(f"{path.name}: {len(changes)} changes, not written (--check)")
        return Exit.REFUSED
    output.mkdir(parents=True, exist_ok=True)
    flags = f"--machine {machine}" if tools else f"--python {python} --machine {machine}"
    path.write_text(render_lock(new, f"kvfleet lock {release} {flags}"))
    console.print(f"{path.name}: written, {len(new.pins)} wheels, {size}. Review it with git diff.")
    return Exit.PROVED


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(lock)
