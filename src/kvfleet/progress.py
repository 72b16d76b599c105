"""Show a run of the fleet while it goes on: a live table on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvfleet.exits import Exit
from kvfleet.fleet import FleetEvent, FleetResult, Verdict

#: lines of the live table; the hosts that moved last are shown
_ROWS = 24
_STYLES = {
    Verdict.PROVED: "bold green",
    Verdict.PLANNED: "bold green",
    Verdict.AS_WANTED: "bold green",
    Verdict.DRIFT: "bold yellow",
    Verdict.REFUSED: "bold yellow",
    Verdict.NOT_STARTED: "yellow",
    Verdict.RESTORED: "bold yellow",
    Verdict.UNREACHABLE: "bold red",
    Verdict.FAILED: "bold red",
}


def clock(seconds: float) -> str:
    """Seconds as ``m:ss``, hours before them where there are any."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def heading(event: FleetEvent) -> str:
    """One line for the part of the run that begins."""
    text = event.play
    if event.batches > 1:
        text += f", batch {event.batch} of {max(event.batch, event.batches)}"
    if event.eta_s is not None:
        text += f", about {clock(event.eta_s)} left"
    return text


class PlainLines:
    """A line for each part of the run, and for each host that changed something or failed."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: FleetEvent) -> None:
        """Print what is worth a line."""
        if event.kind == "play":
            self._console.print(f"{clock(event.at_s)}  {heading(event)}", markup=False, soft_wrap=True)
        elif event.kind == "host" and event.state in ("changed", "failed", "unreachable"):
            line = f"{clock(event.at_s)}    {event.host}: {event.task} ({event.state})"
            self._console.print(line + (f": {event.message}" if event.message else ""), markup=False, soft_wrap=True)

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put back."""


class JsonLines:
    """Each event as one JSON object on a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: FleetEvent) -> None:
        """Write the event at once: a reader may wait for it."""
        self._stream.write(json.dumps(event.as_dict()) + "\n")
        self._stream.flush()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put back."""


@dataclass
class _Row:
    step: str = ""
    state: str = ""
    since: float = 0.0


@dataclass
class LiveTable:
    """A table with a line a host: step, state, seconds in this step."""

    console: Console
    rows: dict[str, _Row] = field(default_factory=dict)
    title: str = ""
    now: float = 0.0
    _live: Live | None = None

    def __call__(self, event: FleetEvent) -> None:
        """Keep the event; the table is drawn four times a second."""
        self.now = event.at_s
        if event.kind == "play":
            self.title = heading(event)
        elif event.host:
            row = self.rows.pop(event.host, _Row())
            if event.kind == "start":
                row.since = event.at_s
            row.step, row.state = event.task, event.state if event.kind == "host" else "running"
            # the hosts that moved last stand last, so the cut is at the top
            self.rows[event.host] = row

    def render(self) -> Table:
        """The table as it is now."""
        table = Table(title=f"{clock(self.now)}  {escape(self.title)}", title_justify="left", box=None, pad_edge=False)
        for name in ("host", "step", "", "s"):
            table.add_column(name, no_wrap=True)
        shown = list(self.rows.items())[-_ROWS:]
        if len(self.rows) > len(shown):
            table.caption = f"{len(self.rows) - len(shown)} more hosts"
        for name, row in sorted(shown):
            style = {"failed": "red", "unreachable": "red", "changed": "yellow", "running": "cyan"}.get(
                row.state, "dim"
            )
            table.add_row(escape(name), escape(row.step), f"[{style}]{row.state}[/]", f"{self.now - row.since:.0f}")
        return table

    def __enter__(self) -> LiveTable:
        self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4, transient=True)
        self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        """Take the table away; the result stands instead."""
        if self._live is not None:
            self._live.__exit__(*details)


def watcher(console: Console, as_json: bool) -> LiveTable | PlainLines | JsonLines:
    """What fits the place: JSON lines when asked for, a live table on a terminal, lines elsewhere."""
    if as_json:
        return JsonLines(sys.stdout)
    return LiveTable(console) if console.is_terminal else PlainLines(console)


def show_result(console: Console, result: FleetResult, *, most_reasons: int = 6) -> None:
    """One line a host: host, verdict, release, profile, deciding figure; reasons indented below it."""
    for name, host in sorted(result.hosts.items()):
        parts = [f"[bold]{escape(name)}[/]", f"[{_STYLES[host.verdict]}]{host.verdict}[/]"]
        parts += [escape(text) for text in (host.release, host.profile, host.figure) if text]
        console.print("  ".join(parts), soft_wrap=True)
        for reason in host.reasons[:most_reasons]:
            console.print(f"    {escape(reason)}", soft_wrap=True)
        if len(host.reasons) > most_reasons:
            console.print(f"    {len(host.reasons) - most_reasons} more (--json shows all)")
    if not result.hosts:
        console.print(f"No host of {result.inventory} was asked.\n{escape(result.tail)}", soft_wrap=True)
    counts: dict[str, int] = {}
    for host in result.hosts.values():
        counts[host.verdict] = counts.get(host.verdict, 0) + 1
    line = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    ended = "" if result.ended == "finished" else f"; the run was ended ({result.ended})"
    console.print(
        f"{line or 'nothing'} in {clock(result.seconds)}{ended}; exit {int(result.exit)} {_WORDS[result.exit]}"
    )
    if result.artifacts is not None and result.exit != Exit.PROVED:
        console.print(f"More: {result.artifacts}", soft_wrap=True)


_WORDS = {
    Exit.PROVED: "(as it should be)",
    Exit.REFUSED: "(refused, nothing was changed)",
    Exit.RESTORED: "(failed; what served before is back and proved)",
    Exit.NEEDS_A_PERSON: "(needs a person)",
    Exit.WRONG_USAGE: "(wrong usage)",
}
