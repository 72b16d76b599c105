"""Running commands through an object that tests can replace: the only way logic reaches a tool."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CommandResult:
    """What a command left: exit status (127 = not found, 124 = ran past its limit) and its two outputs."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether the exit status is zero."""
        return self.returncode == 0


class CommandRunner(Protocol):
    """Anything that runs an argument list and returns a :class:`CommandResult`; never raises for a failing command."""

    def __call__(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        """Run ``argv`` without a shell."""


def run_command(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
    """Run ``argv`` for real, in the C locale, with no terminal and no inherited standard input.

    A missing program is status 127 and a command that ran past ``timeout_s`` seconds is killed and status 124,
    so that callers treat every trouble the same way: by looking at the status.
    """
    environment = dict(os.environ, LC_ALL="C", LANG="C")
    try:
        done = subprocess.run(
            list(argv),
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except FileNotFoundError as error:
        return CommandResult(127, "", f"{argv[0]}: not found ({error.strerror})")
    except PermissionError as error:
        return CommandResult(126, "", f"{argv[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return CommandResult(124, "", f"{argv[0]}: no answer within {timeout_s:g} s")
    return CommandResult(done.returncode, done.stdout, done.stderr)
