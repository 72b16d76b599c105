"""``kvfleet report``: the results as one HTML file, a Markdown summary and JUnit XML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvfleet.checkout import ROOT
from kvfleet.commands.results import say_damaged


def report(
    results: Annotated[Path, typer.Option(help="Directory of the results.")] = ROOT / "results",
    output: Annotated[Path | None, typer.Option(help="The HTML file. Default: report.html in the results.")] = None,
    host: Annotated[str | None, typer.Option(help="Only this host.")] = None,
) -> int:
    """Write the report of all hosts: HTML (one file, no network), Markdown and JUnit XML beside it."""
    from kvfleet.report import write

    console = Console(highlight=False, soft_wrap=True)
    say_damaged(results, host)
    for form, path in write(results, output, host).items():
        console.print(f"{form:9}{path}")
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)
