"""``kvfleet plan``: the plan of a host from files alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvfleet import fleet
from kvfleet.commands.fleet import perform
from kvfleet.core.findings import refuse
from kvfleet.core.hostcheck import check_recorded
from kvfleet.core.plan_text import Row, host_rows, instance_rows, session_rows
from kvfleet.core.planning import make_plan
from kvfleet.exits import Exit
from kvfleet.matrix import load_matrix


class Format(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"


def plan(
    host: Annotated[
        Path | None, typer.Option(help="Host description, as the module host_facts returns it; or give -i.")
    ] = None,
    inventory: Annotated[
        Path | None, typer.Option("--inventory", "-i", help="Plan the hosts of this inventory; changes nothing.")
    ] = None,
    limit: Annotated[str | None, typer.Option("--limit", "-l", help="With -i: only these hosts.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With -i: events and the result as JSON, one object a line.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="With --host: model directory or its config.json; instances may name their own with --set."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A kvfleet_* variable; lists and instances in YAML or JSON."),
    ] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Number of conversations, with --context.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of each conversation, with --sessions.")] = None,
    output: Annotated[
        Format | None,
        typer.Option("--format", help="With --host: print for people or for machines.", show_default="table"),
    ] = None,
    releases_file: Annotated[Path | None, typer.Option("--releases", help="With --host: another releases.yml.")] = None,
) -> int:
    """Compute the plan of a host from its description, or of an inventory's hosts; exit status 2 with errors."""
    if (host is None) == (inventory is None):
        raise typer.BadParameter("give either --host (a description) or --inventory (hosts to ask)")
    if (sessions is None) != (context is None):
        raise typer.BadParameter("--sessions and --context go together")
    only_files = {"--model": model, "--format": output, "--releases": releases_file}
    only_fleet = {"--limit": limit, "--json": as_json or None}
    useless = [name for name, given in (only_fleet if inventory is None else only_files).items() if given is not None]
    if useless and inventory is not None:
        raise typer.BadParameter(
            f"{', '.join(useless)} only with --host; with -i the inventory and --set NAME=VALUE say what is planned, "
            "and --json prints for machines"
        )
    if useless:
        raise typer.BadParameter(f"{', '.join(useless)} only with -i; with --host, --format json prints for machines")
    values = read_settings(settings or [])
    if inventory is not None:
        if sessions is not None:
            values |= {"host_plan_sessions": sessions, "host_plan_context": context}
        return perform(fleet.Action.PLAN, inventory, limit=limit, variables=values, as_json=as_json, details=show_all)
    assert host is not None  # noqa: S101 - one of both was given, see above
    if model is not None:
        values.setdefault("kvfleet_model", str(model))
    made = make_plan(
        values,
        load_matrix(releases_file, None),
        read_host(host),
        read_text=read_text,
        list_sizes=list_sizes,
        sessions=sessions,
        context=context,
    )
    if output is Format.JSON:
        sys.stdout.write(json.dumps(made, indent=2) + "\n")
    else:
        show(made)
    return Exit.REFUSED if made["errors"] else Exit.PROVED


def read_settings(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs as variables; values are read as YAML, so lists and numbers keep their kind."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"--set {pair!r}: write NAME=VALUE")
        if not name.strip().upper().startswith(("KVFLEET_", "CACHE_DISK_", "LMCACHE_")):
            raise typer.BadParameter(f"--set {pair!r}: the plan reads kvfleet_* and cache_disk_* variables only")
        try:
            values[name.strip()] = yaml.safe_load(text) if text.strip() else ""
        except yaml.YAMLError as error:
            raise typer.BadParameter(f"--set {name}: the value is no YAML ({error})") from error
    return values


def read_host(path: Path) -> dict[str, Any]:
    """A recorded host description; also one inside the ``host`` key of a module's result."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"--host {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise refuse(
            "KVF-HOST-003", f"{path} is not JSON ({error}).", "Record it with the module host_facts."
        ) from error
    if isinstance(data, dict) and "gpus" not in data and isinstance(data.get("host"), dict):
        data = data["host"]
    return check_recorded(data)


def read_text(path: str) -> str | None:
    """A file's text, ``None`` when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def list_sizes(path: str) -> dict[str, int] | None:
    """Names and sizes of a directory's files, ``None`` when it is none."""
    try:
        return {entry.name: entry.stat().st_size for entry in Path(path).iterdir() if entry.is_file()}
    except OSError:
        return None


def show(made: dict[str, Any]) -> None:
    """Print a plan for people."""
    console = _console()
    _numbers(console, str(made["host"]["hostname"]), made)
    _findings(console, made, "errors", "bold red")
    _findings(console, made, "warnings", "yellow")


def show_all(done: fleet.FleetResult) -> None:
    """Print the plans of all hosts for people; their errors stand in the result as reasons."""
    console = _console()
    for name, result in sorted(done.hosts.items()):
        if result.plan:
            _numbers(console, name, result.plan)
            _findings(console, result.plan, "warnings", "yellow")


def _console() -> Console:
    return Console(highlight=False, width=max(Console().width, 120))


def _numbers(console: Console, title: str, made: Mapping[str, Any]) -> None:
    _rows(console, title, host_rows(made))
    for instance in made["instances"]:
        _rows(console, f"{instance['name']}: {instance['model']}", instance_rows(instance))
    if made.get("sessions"):
        _rows(console, "sessions", session_rows(made["sessions"]))


def _findings(console: Console, made: Mapping[str, Any], kind: str, style: str) -> None:
    for entry in made[kind]:
        console.print(
            f"[{style}]{entry['code']}[/]  {_plain(entry['message'])}\n  {_plain(entry['fix'])}", soft_wrap=True
        )


def _rows(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(
        title=_plain(title),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_header=False,
        pad_edge=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(style="bold")
    table.add_column(style="dim")
    for name, value, why in rows:
        table.add_row(_plain(name), _plain(value), _plain(why))
    console.print(table)


def _plain(text: str) -> str:
    """Text in which square brackets are no markup."""
    return text.replace("[", r"\[")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)
