"""``kvfleet releases``: show the matrix, judge any pair of versions."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvfleet.core.releases import Verdict, check, load_rows
from kvfleet.exits import Exit
from kvfleet.matrix import load_matrix

releases = typer.Typer(help="The matrix of matched versions.", no_args_is_help=True)


class Format(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Print for people or for machines.")]
ReleasesOption = Annotated[Path | None, typer.Option("--releases", help="Another releases.yml.")]
ExtraOption = Annotated[Path | None, typer.Option(help="File with rows of your own.")]


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


@releases.command("list")
def list_releases(
    output: FormatOption = Format.TABLE, releases_file: ReleasesOption = None, extra: ExtraOption = None
) -> int:
    """Every row: versions, what it needs, and whether it may be used."""
    rows = load_rows(load_matrix(releases_file, extra))
    if output is Format.JSON:
        _print_json([release.row for release in rows])
        return Exit.PROVED
    # a matrix that lost its right half helps nobody: wider than a narrow terminal rather than cut
    console = Console(highlight=False, width=max(Console().width, 108))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("release", "status", "torch", "driver", "Python", "glibc", "mode", "weak"):
        table.add_column(heading, no_wrap=True)
    for release in rows:
        row = release.row
        if not release.forbidden:
            table.add_row(
                release.id,
                release.status.replace("_", " "),
                row["torch"],
                row["min_driver"] or "-",
                row["python"],
                row["glibc"],
                row["mode"].replace("_", "-"),
                str(len(row["advisories"])) if row["advisories"] else "-",
            )
    console.print(table)
    for release in rows:
        if release.forbidden:
            pair = f"vLLM {release.row['vllm']} with LMCache {release.row['lmcache']}"
            console.print(f"forbidden: {pair}: {release.row['reason']}", soft_wrap=True)
    return Exit.PROVED


@releases.command("check")
def check_pair(
    vllm: Annotated[str, typer.Option(help="vLLM's version, +cpu for its CPU backend.")],
    lmcache: Annotated[str, typer.Option(help="LMCache's version.")],
    torch: Annotated[str | None, typer.Option(help="torch's version, such as 2.13.0+cu130.")] = None,
    driver: Annotated[str | None, typer.Option(help="The host's NVIDIA driver.")] = None,
    python: Annotated[str | None, typer.Option(help="The host's Python.")] = None,
    glibc: Annotated[str | None, typer.Option(help="The host's glibc.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Known weaknesses count as violations.")] = False,
    output: FormatOption = Format.TABLE,
    releases_file: ReleasesOption = None,
    extra: ExtraOption = None,
) -> int:
    """Say whether two versions fit each other and a host; exit 2 with every violated condition when they do not."""
    verdict = check(load_matrix(releases_file, extra), vllm, lmcache, torch, driver, python, glibc)
    good = verdict.ok and not (strict and verdict.warnings)
    if output is Format.JSON:
        _print_json({**verdict.as_dict(), "ok": good})
    else:
        _print_verdict(verdict, good, vllm, lmcache)
    return Exit.PROVED if good else Exit.REFUSED


def _print_verdict(verdict: Verdict, good: bool, vllm: str, lmcache: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    origin = "derived from the tables of facts" if verdict.derived else "named by the matrix"
    colour = "green" if good else "red"
    console.print(f"[bold {colour}]{'good' if good else 'refused'}[/]  vLLM {vllm} with LMCache {lmcache} ({origin})")
    if verdict.row is not None:
        console.print(f"  {_needs(verdict.row)}")
    for finding in verdict.violations:
        console.print(f"  [red]{finding.code}[/]  {finding.message}\n      {finding.fix}")
    for finding in verdict.warnings:
        console.print(f"  [yellow]{finding.code}[/]  {finding.message}")
    if not good and verdict.nearest:
        console.print("  nearest good releases:")
        for row in verdict.nearest:
            console.print(f"    {row['id']}: vLLM {row['vllm']}, LMCache {row['lmcache']}, torch {row['torch']}")


def _needs(row: Mapping[str, Any]) -> str:
    parts = [f"torch {row['torch']}", f"Python {row['python']}", f"glibc >= {row['glibc']}"]
    if row.get("min_driver"):
        parts.insert(1, f"driver >= {row['min_driver']}")
    if row.get("connector"):
        module = row.get("connector_module_path")
        parts.append(f"{row['connector']}{f' from {module}' if module else ' (bundled)'}, mode {row['mode']}")
    name = f"{row['id']}: " if row.get("id") else ""
    return name + ", ".join(parts)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(releases, name="releases")
