"""``kvfleet upgrade`` and ``kvfleet rollback``: over to another release, host by host, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvfleet.checkout import ROOT
from kvfleet.exits import Exit
from kvfleet.runs import HostRun, PlaybookRun, run_playbook

InventoryOption = Annotated[Path, typer.Option("--inventory", "-i", help="Inventory file or folder.")]
LimitOption = Annotated[str | None, typer.Option("--limit", "-l", help="Only these hosts.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show Ansible's own output.")]

#: tasks that a person wants to see pass, by their names in playbooks/tasks
_STEPS = (
    "Install and prove the new release beside the one that serves",
    "Switch the link",
    "Render the instances and restart what is stale",
    "Prove it",
    "Drop releases that nothing needs any more",
    "Return to the old release",
    "Render the instances of the old release and restart them",
    "Prove the old release",
)

_WORDS = {
    Exit.PROVED: "[bold green]proved[/]",
    Exit.REFUSED: "[bold yellow]refused[/]",
    Exit.RESTORED: "[bold yellow]old release serves[/]",
    Exit.NEEDS_A_PERSON: "[bold red]needs a person[/]",
}


def show_steps(console: Console) -> Callable[[Mapping[str, Any]], None]:
    """A listener for a run's events that prints each step when it begins, with the time since the listener was made."""
    started = time.monotonic()

    def show(event: Mapping[str, Any]) -> None:
        task = (event.get("event_data") or {}).get("task")
        if event.get("event") == "playbook_on_task_start" and task in _STEPS:
            minutes, seconds = divmod(int(time.monotonic() - started), 60)
            console.print(f"  {minutes}:{seconds:02d}  {task}")

    return show


def outcome(host: HostRun) -> Exit:
    """What became of one host, from the fact ``upgrade_outcome`` that the playbooks set.

    ``proved``: the wanted release serves. ``kept``: the new one failed before anything moved. ``restored``: it failed
    after that and the old one is proved again. Without the fact nothing was changed, unless a task says otherwise.
    """
    said = host.facts.get("upgrade_outcome")
    if said == "proved" and host.ok:
        return Exit.PROVED
    if said in ("kept", "restored") and not host.unreachable:
        return Exit.RESTORED
    if said is None and not host.changed and not host.unreachable:
        return Exit.REFUSED
    return Exit.NEEDS_A_PERSON


def judge(run: PlaybookRun) -> tuple[Exit, dict[str, Exit]]:
    """The exit status of a whole run (its worst host) and that of each host; a run that did not end is never good."""
    hosts = {name: outcome(host) for name, host in run.hosts.items()}
    if not hosts:
        return Exit.REFUSED, hosts
    worst = max(hosts.values())
    return (worst if run.complete else max(worst, Exit.NEEDS_A_PERSON)), hosts


def _run(playbook: str, inventory: Path, limit: str | None, variables: dict[str, Any], verbose: bool) -> int:
    console = Console(highlight=False, soft_wrap=True)
    run = run_playbook(
        ROOT / "playbooks" / playbook,
        inventory,
        extra_vars=variables,
        limit=limit,
        show_output=verbose,
        on_event=None if verbose else show_steps(console),
    )
    status, hosts = judge(run)
    for name, one in sorted(hosts.items()):
        host = run.hosts[name]
        plan = host.facts.get("kvfleet_plan") or {}
        release = (plan.get("release") or {}).get("id", "no release planned")
        console.print(f"{name}  {_WORDS[one]}  {release}")
        for failure in host.failures[-1:]:
            console.print(f"  {failure}", markup=False)
    if not hosts:
        console.print(f"No host of {inventory} was reached.")
    return status


def upgrade(
    inventory: InventoryOption,
    release: Annotated[str | None, typer.Option(help="Id of a row. Default: what the inventory says.")] = None,
    limit: LimitOption = None,
    allow_advisories: Annotated[
        bool, typer.Option("--allow-advisories", help="Accept known weaknesses; services stay on loopback.")
    ] = False,
    verbose: VerboseOption = False,
) -> int:
    """Install the release beside the one that serves, go over, prove; return to the old one when it fails (exit 3)."""
    variables: dict[str, Any] = {}
    if release:
        variables["kvfleet_release"] = release
    if allow_advisories:
        variables["kvfleet_allow_advisories"] = True
    return _run("upgrade.yml", inventory, limit, variables, verbose)


def rollback(
    inventory: InventoryOption,
    release: Annotated[
        str | None, typer.Option(help="Id of a release that the host holds. Default: the last proved.")
    ] = None,
    limit: LimitOption = None,
    verbose: VerboseOption = False,
) -> int:
    """Return to the proved release that each host left last."""
    variables = {"upgrade_rollback_release": release} if release else {}
    return _run("rollback.yml", inventory, limit, variables, verbose)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(upgrade)
    app.command()(rollback)
