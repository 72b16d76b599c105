"""``kvfleet bundle``: build or check an air-gap bundle of a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvfleet import bundles, debs
from kvfleet.checkout import cache_directory
from kvfleet.core.bundlefile import read_index, verify_parts
from kvfleet.core.command import run_command
from kvfleet.core.engine import interpreter
from kvfleet.core.findings import refuse
from kvfleet.core.units import parse_bytes
from kvfleet.exits import Exit
from kvfleet.matrix import find_release, load_matrix


def bundle(
    release: Annotated[str, typer.Argument(help="Id of a row, or with --verify the index file of a bundle.")],
    output: Annotated[Path | None, typer.Option(help="Folder for the bundle. Default: the cache.")] = None,
    split: Annotated[str | None, typer.Option(help="Largest size of a part, such as 2G or 700M.")] = None,
    python: Annotated[
        str | None, typer.Option(help="The host's interpreter, such as 3.11. Default: the row's.")
    ] = None,
    machine: Annotated[str, typer.Option(help="The host's processor: x86_64 or aarch64.")] = "x86_64",
    debian: Annotated[
        str | None,
        typer.Option(help="Suite whose Debian packages to carry along, such as bookworm; or a folder with .deb files."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also time uv against pip with these wheels, on this machine.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the parts beside an index file.")] = False,
    releases_file: Annotated[Path | None, typer.Option("--releases", help="Another releases.yml.")] = None,
    extra: Annotated[Path | None, typer.Option(help="File with rows of your own.")] = None,
) -> int:
    """Pack everything that a host needs to install a release without any network."""
    console = Console(highlight=False, soft_wrap=True)
    if verify:
        return _verify(Path(release), console)
    row = find_release(load_matrix(releases_file, extra), release).row
    split_bytes = _split_bytes(split)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=console
    )
    with progress:
        task = progress.add_task(f"bundle {release}", total=None)
        last = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal last
            progress.update(task, description=what[:48], completed=done, total=total or None)
            # without a terminal a bar is noise: one line a step instead
            if not console.is_terminal and what.split()[0] != last:
                last = what.split()[0]
                console.print(f"{what} ({done / 1e6:.0f} of {total / 1e6:.0f} MB)")

        packages = debs.collect(row, debian) if debian else []
        made = bundles.build(
            row,
            python,
            machine,
            output=output,
            split_bytes=split_bytes,
            debs=packages,
            progress=show,
        )
        progress.update(task, visible=False)
    parts = made.index.parts
    console.print(
        f"{made.index_path}: {'built' if made.built else 'already complete'}, {made.index.size_bytes / 1e6:.0f} MB in "
        f"{len(parts)} {'part' if len(parts) == 1 else 'parts'}"
    )
    console.print(f"Carry it with: {made.index_path.name} {' '.join(part.name for part in parts)}")
    if compare:
        wanted = python or row["engine_python"]
        console.print("installing the wheels with uv and with pip ...")
        found = bundles.compare_installers(made, interpreter(wanted, run_command))
        console.print(
            f"uv {found.uv_s:.0f} s, pip {found.pip_s:.0f} s, bytecode included: {found.ratio:.1f} times faster"
        )
    return Exit.PROVED


def _split_bytes(split: str | None) -> int | None:
    if split is None:
        return None
    try:
        return parse_bytes(split)
    except ValueError as error:
        raise refuse("KVF-REL-063", f"--split: {error}.", "Give --split a size such as 2G or 700M.") from None


def _verify(path: Path, console: Console) -> int:
    if not path.is_file():
        path = cache_directory() / "bundles" / path.name
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        raise refuse(
            "KVF-REL-060", f"{path} is not the index of a bundle.", "Name the .json file beside the bundle's parts."
        ) from None
    index = read_index(data, path.name)
    verify_parts(index, path.parent)
    console.print(
        f"{path.name}: {len(index.parts)} of {len(index.parts)} parts complete, {index.size_bytes / 1e6:.0f} MB"
    )
    return Exit.PROVED


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bundle)
