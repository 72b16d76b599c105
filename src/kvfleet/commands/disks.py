"""``kvfleet disks``: every host's disks, and the lines that name one of them in the inventory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvfleet.checkout import ROOT
from kvfleet.core.findings import refuse
from kvfleet.core.units import human_bytes
from kvfleet.exits import Exit
from kvfleet.runs import Event, run_playbook

Disk = Mapping[str, Any]

#: what the content of an eligible disk means to a reader
USABLE = {
    "blank": "blank: usable",
    "ours": "this host's cache disk",
    "ours_unfinished": "a format of this host that was cut short: usable",
}


def disks(
    inventory: Annotated[
        Path, typer.Option("--inventory", "-i", help="Inventory file or folder.", exists=True, resolve_path=True)
    ],
    limit: Annotated[str | None, typer.Option(help="Only these hosts (Ansible's pattern).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show the disks of every host, why each can or cannot be the cache disk, and the lines to paste."""
    found: dict[str, list[Disk]] = {}

    def collect(event: Event) -> None:
        data = event.get("event_data") or {}
        candidates = (data.get("res") or {}).get("candidates")
        if event.get("event") == "runner_on_ok" and candidates is not None:
            found[data["host"]] = candidates

    run = run_playbook(ROOT / "playbooks" / "disks.yml", inventory, limit=limit, on_event=collect)
    if not run.hosts:
        raise refuse(
            "KVF-DISK-060",
            f"No host of {inventory} was asked.",
            "Check the inventory and --limit with: ansible-inventory --graph -i INVENTORY.",
        )
    failures = {name: host.failures for name, host in sorted(run.hosts.items()) if not host.ok}
    if as_json:
        sys.stdout.write(json.dumps({"hosts": dict(sorted(found.items())), "failures": failures}, indent=2) + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        for name, listed in sorted(found.items()):
            show_host(console, name, listed)
        for name, reasons in failures.items():
            console.print(f"[bold red]{name}[/]: {'; '.join(reasons)}")
    return Exit.PROVED if run.ok and not failures else Exit.NEEDS_A_PERSON


def show_host(console: Console, name: str, listed: Sequence[Disk]) -> None:
    """One host: its disks as a table, then the lines for each disk that could be the cache disk."""
    table = Table(box=SIMPLE_HEAD, title=f"[bold]{name}[/]", title_justify="left", pad_edge=False)
    for heading in ("Disk now", "Model", "Serial", "Size", "Verdict"):
        table.add_column(heading, overflow="fold")
    here = [disk for disk in listed if disk["here"]]
    for disk in sorted(here, key=lambda item: not item["eligible"]):
        table.add_row(
            str(disk["kernel_name"]),
            str(disk["model"] or "-"),
            str(disk["serial"] or "-"),
            human_bytes(disk["size_bytes"]),
            f"[green]{verdict(disk)}[/]" if disk["eligible"] else verdict(disk),
        )
    console.print(table)
    if len(here) < len(listed):
        console.print(f"{len(listed) - len(here)} more belong to other hosts on the same kernel (--json lists them).")
    usable = [disk for disk in listed if disk["eligible"]]
    if not usable:
        console.print(f"{name} has no disk that could be the cache disk as it is.\n")
        return
    console.print(f"For {name} in the inventory (one of):\n")
    for disk in usable:
        console.print("\n".join(inventory_lines(disk)) + "\n")


def verdict(disk: Disk) -> str:
    """Why the disk can or cannot be the cache disk, in one sentence; the link itself is left out of it."""
    if disk["eligible"]:
        return USABLE.get(str(disk["content"]), str(disk["content"]))
    # one reason is enough for a table; --json has all of them
    reason = str(disk["reasons"][0])
    return reason.replace(f"{disk['device']} ", "", 1) if disk["device"] else reason


def inventory_lines(disk: Disk) -> list[str]:
    """The lines that name this disk, ready for a host's variables."""
    lines = [f"cache_disk_device: {disk['device']}", f"cache_disk_serial: {disk['serial']}"]
    if disk["content"] != "ours":
        lines.append("cache_disk_format: true   # only for the run that may format it")
    return lines


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(disks)
