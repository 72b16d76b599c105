"""``kvfleet deploy``, ``upgrade``, ``rollback``, ``benchmark``, ``status``: the fleet from the command line."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from kvfleet import fleet
from kvfleet.exits import Exit
from kvfleet.progress import show_result, watcher

InventoryOption = Annotated[Path, typer.Option("--inventory", "-i", help="Inventory file or folder.")]
LimitOption = Annotated[str | None, typer.Option("--limit", "-l", help="Only these hosts (Ansible's pattern).")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Events and the result as JSON, one object a line, for machines.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--extra", "-e", metavar="NAME=VALUE", help="A variable that wins over the inventory; YAML value."),
]
TimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds after which the run is ended.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show Ansible's own output.")]


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and a lost terminal (SIGHUP) set, so that the run ends with a result.

    A second Ctrl-C or SIGTERM ends the program as usual, its run with it. SIGHUP stays ignored under nohup.
    """
    cancel = threading.Event()
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def stop(number: int, _: Any) -> None:
        cancel.set()
        # both raise KeyboardInterrupt: dying on the spot would leave Ansible behind
        signal.signal(number, signal.default_int_handler)

    def hang_up(number: int, _: Any) -> None:
        cancel.set()
        # the kernel and the shell both send it
        signal.signal(number, signal.SIG_IGN)
        # writing to a terminal that is gone fails, which would end the run before its result is kept
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in terminals:
            os.dup2(nowhere, terminal)
        os.close(nowhere)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield cancel
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def variables_of(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs as variables; values are YAML."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"-e {pair!r}: write NAME=VALUE")
        try:
            values[name.strip()] = yaml.safe_load(text) if text.strip() else ""
        except yaml.YAMLError as error:
            raise typer.BadParameter(f"-e {name}: the value is no YAML ({error})") from error
    return values


def perform(
    action: fleet.Action,
    inventory: Path,
    *,
    limit: str | None = None,
    variables: dict[str, Any] | None = None,
    as_json: bool = False,
    verbose: bool = False,
    timeout_s: float = 6 * 3600,
    details: Callable[[fleet.FleetResult], None] | None = None,
) -> int:
    """Run ``action``, show progress and result (``details`` prints before it, for people), return the exit status."""
    console = Console(highlight=False)
    with stopped_by_signals() as cancel, watcher(console, as_json) as watch:
        done = fleet.run(
            action,
            inventory,
            limit=limit,
            variables=variables,
            on_event=None if verbose and not as_json else watch,
            cancel=cancel,
            timeout_s=timeout_s,
            show_output=verbose and not as_json,
        )
    if as_json:
        # the plans are what planning is for; elsewhere they would bury the result
        whole = action is fleet.Action.PLAN
        sys.stdout.write(json.dumps({"kind": "result", **done.as_dict(whole=whole)}) + "\n")
    else:
        if details is not None:
            details(done)
        show_result(console, done, most_reasons=40 if action is fleet.Action.STATUS else 6)
    return done.exit


def deploy(
    inventory: InventoryOption,
    limit: LimitOption = None,
    extra: SetOption = None,
    timeout: TimeoutOption = 6 * 3600,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Plan, provision, deploy and prove: the canary first, then growing batches; stop at the first failure."""
    return perform(
        fleet.Action.DEPLOY, inventory, limit=limit, variables=variables_of(extra or []), as_json=as_json,
        verbose=verbose, timeout_s=timeout,
    )  # fmt: skip


def upgrade(
    inventory: InventoryOption,
    release: Annotated[str | None, typer.Option(help="Id of a row. Default: what the inventory says.")] = None,
    limit: LimitOption = None,
    allow_advisories: Annotated[
        bool, typer.Option("--allow-advisories", help="Accept known weaknesses; services stay on loopback.")
    ] = False,
    extra: SetOption = None,
    timeout: TimeoutOption = 6 * 3600,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Install the release beside the one that serves, go over, prove, return where it fails; canary, then batches."""
    variables = variables_of(extra or [])
    if release:
        variables["kvfleet_release"] = release
    if allow_advisories:
        variables["kvfleet_allow_advisories"] = True
    return perform(
        fleet.Action.UPGRADE, inventory, limit=limit, variables=variables, as_json=as_json, verbose=verbose,
        timeout_s=timeout,
    )  # fmt: skip


def rollback(
    inventory: InventoryOption,
    release: Annotated[
        str | None, typer.Option(help="Id of a release that the hosts hold. Default: the last proved of each.")
    ] = None,
    limit: LimitOption = None,
    extra: SetOption = None,
    timeout: TimeoutOption = 6 * 3600,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Return to the proved release that each host left last, canary first, then in batches."""
    variables = variables_of(extra or [])
    if release:
        variables["upgrade_rollback_release"] = release
    return perform(
        fleet.Action.ROLLBACK, inventory, limit=limit, variables=variables, as_json=as_json, verbose=verbose,
        timeout_s=timeout,
    )  # fmt: skip


def benchmark(
    inventory: InventoryOption,
    limit: LimitOption = None,
    profile: Annotated[str | None, typer.Option(help="smoke, article, long or custom.")] = None,
    if_changed: Annotated[bool, typer.Option("--if-changed", help="Not where the last proof still stands.")] = False,
    extra: SetOption = None,
    timeout: TimeoutOption = 6 * 3600,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> int:
    """Prove the hosts again and keep the figures."""
    variables = variables_of(extra or [])
    variables["smoke_benchmark_force"] = not if_changed
    if profile:
        variables["smoke_benchmark_profile"] = profile
    return perform(
        fleet.Action.BENCHMARK, inventory, limit=limit, variables=variables, as_json=as_json, verbose=verbose,
        timeout_s=timeout,
    )  # fmt: skip


def status(
    inventory: InventoryOption,
    limit: LimitOption = None,
    extra: SetOption = None,
    timeout: TimeoutOption = 1800,
    as_json: JsonOption = False,
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
    verbose: VerboseOption = False,
) -> int:
    """Compare what runs with what the inventory wants, and name every difference; changes nothing."""
    if output not in ("table", "json"):
        raise typer.BadParameter("--format: table or json")
    if output == "json":
        with stopped_by_signals() as cancel:
            done = fleet.status(
                inventory, limit=limit, variables=variables_of(extra or []), timeout_s=timeout, cancel=cancel
            )
        sys.stdout.write(json.dumps(done.as_dict(), indent=2) + "\n")
        return Exit(done.exit)
    return perform(
        fleet.Action.STATUS, inventory, limit=limit, variables=variables_of(extra or []), as_json=as_json,
        verbose=verbose, timeout_s=timeout,
    )  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(deploy)
    app.command()(upgrade)
    app.command()(rollback)
    app.command()(benchmark)
    app.command()(status)
