"""Exit statuses of the ``kvfleet`` command (docs/architecture.md, "Exit and errors")."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the caller of ``kvfleet`` may rely on."""

    PROVED = 0
    REFUSED = 2
    RESTORED = 3
    NEEDS_A_PERSON = 4
    WRONG_USAGE = 64
