"""``kvfleet results``: list, show and compare what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from kvfleet import results as selection
from kvfleet.checkout import ROOT
from kvfleet.core import history

#: columns below which a result takes two lines instead of a row of narrow columns
_TABLE_WIDTH = 110
_STYLES = {"pass": "green", "degrade": "yellow", "fail": "red"}

ResultsDir = Annotated[Path, typer.Option("--results", help="Directory of the results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for another program.")]


def list_results(
    host: Annotated[str | None, typer.Option(help="Only this host.")] = None,
    results_dir: ResultsDir = ROOT / "results",
    as_json: AsJson = False,
) -> int:
    """List all results, oldest first."""
    records = history.load_records(results_dir, host)
    say_damaged(results_dir, host)
    rows = [
        {
            "id": selection.record_id(record),
            **{key: record[key] for key in ("host", "time", "release", "plan_profile", "profile", "verdict")},
            "deciding": record["deciding"]["message"],
        }
        for record in records
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return 0
    console = Console(highlight=False)
    if not rows:
        console.print(f"No results below {results_dir}.")
        return 0
    if console.width < _TABLE_WIDTH:
        for row in rows:
            style = _STYLES.get(row["verdict"], "")
            console.print(f"[{style}]{row['verdict']}[/]  {row['id']}", soft_wrap=True)
            console.print(Padding(f"{row['plan_profile']}, {row['profile']}: {row['deciding']}", (0, 0, 0, 4)))
        return 0
    table = Table(
        Column("id", no_wrap=True, overflow="fold"),
        "profile",
        "load",
        "verdict",
        "deciding figure",
        box=None,
        pad_edge=False,
    )
    for row in rows:
        style = _STYLES.get(row["verdict"], "")
        table.add_row(row["id"], row["plan_profile"], row["profile"], f"[{style}]{row['verdict']}[/]", row["deciding"])
    console.print(table)
    return 0


def say_damaged(results_dir: Path, host: str | None = None) -> None:
    """Name the files that look like results and cannot be read, so that none is missed in silence."""
    for path in history.damaged_files(results_dir, host):
        typer.echo(f"KVF-BENCH-049  {path} is no readable result and is left out; restore or remove it.", err=True)


def show(
    name: Annotated[str, typer.Argument(help="Id, a unique part of it, a file, or a host (its newest result).")],
    results_dir: ResultsDir = ROOT / "results",
    as_json: AsJson = False,
) -> int:
    """Show one result: verdict, reasons, figures."""
    from kvfleet.report import markdown

    record = selection.find(history.load_records(results_dir), name)
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        Console(highlight=False, soft_wrap=True).print(markdown([record]), markup=False)
    return 0


def compare(
    first: Annotated[str, typer.Argument(help="A result, as in show.")],
    second: Annotated[str, typer.Argument(help="Another result.")],
    results_dir: ResultsDir = ROOT / "results",
    as_json: AsJson = False,
) -> int:
    """Compare two results, figure by figure."""
    records = history.load_records(results_dir)
    left, right = selection.find(records, first), selection.find(records, second)
    differences, notes = selection.compare(left, right)
    if as_json:
        rows = [
            {
                "where": entry.where,
                "figure": entry.figure,
                "unit": entry.unit,
                "first": entry.first,
                "second": entry.second,
                "change": entry.change,
                "better": entry.better,
            }
            for entry in differences
        ]
        typer.echo(json.dumps({"notes": notes, "differences": rows}, indent=1))
        return 0
    console = Console(highlight=False)
    table = Table(
        "what", "figure", selection.record_id(left), selection.record_id(right), "change", box=None, pad_edge=False
    )
    for entry in differences:
        style = {True: "green", False: "red", None: "dim"}[entry.better]
        table.add_row(
            entry.where,
            f"{entry.figure} ({entry.unit})",
            f"{entry.first:.4g}",
            f"{entry.second:.4g}",
            f"[{style}]{entry.change:+.1%}[/]",
        )
    console.print(table if differences else "The two results have no figure in common.")
    for note in notes:
        console.print(f"[dim]{note}[/]", soft_wrap=True)
    return 0


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(name="results", help="List, show and compare what was measured.", no_args_is_help=True)
    group.command("list")(list_results)
    group.command("show")(show)
    group.command("compare")(compare)
    app.add_typer(group)
