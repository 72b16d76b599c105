"""The ``kvfleet`` command: puts the commands of :mod:`kvfleet.commands` together."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer
from rich.console import Console

from kvfleet import commands
from kvfleet.core.findings import KvfleetError
from kvfleet.exits import Exit

app = typer.Typer(
    name="kvfleet",
    help="Bare GPU hosts to proved vLLM servers whose KV cache overflows into host RAM and NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Bare GPU hosts to proved vLLM servers whose KV cache overflows into host RAM and NVMe."""


for _command in sorted(module.name for module in pkgutil.iter_modules(commands.__path__)):
    importlib.import_module(f"{commands.__name__}.{_command}").register(app)


def main() -> None:
    """Run the command line; map refusals and wrong usage to their exit statuses."""
    errors = Console(stderr=True, highlight=False)
    try:
        status = app(standalone_mode=False)
    except KvfleetError as refusal:
        for finding in refusal.findings:
            errors.print(f"[bold red]{finding.code}[/]  {finding.message}\n  {finding.fix}", soft_wrap=True)
        sys.exit(Exit.REFUSED)
    except typer.TyperException as usage:
        show = getattr(usage, "show", None)
        if show is not None:
            show()
        sys.exit(Exit.WRONG_USAGE)
    sys.exit(status if isinstance(status, int) else 0)
