"""What kvfleet tells people: a stable code, one clear sentence, and the change that helps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One error or warning.

    ``code`` is stable (``KVF-RAM-001``); ``message`` is one sentence with the numbers in it; ``fix`` names the
    variable to change and how; ``numbers`` holds the same figures for machines (names end in their unit).
    """

    code: str
    message: str
    fix: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data for a plan, a result or a module's return value."""
        return {"code": self.code, "message": self.message, "fix": self.fix, "numbers": dict(self.numbers)}

    def __str__(self) -> str:
        return f"{self.code}: {self.message} {self.fix}".strip()


class KvfleetError(Exception):
    """A refusal or a failure that carries its findings; ``str()`` is what a person reads."""

    def __init__(self, *findings: Finding) -> None:
        self.findings: tuple[Finding, ...] = findings
        super().__init__("\n".join(str(finding) for finding in findings))


def refuse(code: str, message: str, fix: str, **numbers: Any) -> KvfleetError:
    """Build the error for one finding: ``raise refuse("KVF-DISK-004", "...", "Set cache_disk_serial ...")``."""
    return KvfleetError(Finding(code, message, fix, numbers))
