"""Version numbers and ranges as Python packages write them (PEP 440), with the standard library alone.

Hosts have no ``packaging`` outside the release they are about to install, so order and ranges are worked out here.
Source of the rules: https://packaging.python.org/en/latest/specifications/version-specifiers/ ; the unit tests compare
with the ``packaging`` library.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from .findings import refuse

_PATTERN = re.compile(
    r"""
    v?(?:(?P<epoch>[0-9]+)!)?
    (?P<release>[0-9]+(?:\.[0-9]+)*)
    (?:[-_.]?(?P<pre_name>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<pre>[0-9]+)?)?
    (?P<post_part>-(?P<post_plain>[0-9]+)|[-_.]?(?:post|rev|r)[-_.]?(?P<post>[0-9]+)?)?
    (?P<dev_part>[-_.]?dev[-_.]?(?P<dev>[0-9]+)?)?
    (?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_PRE_NAMES = {"alpha": "a", "a": "a", "beta": "b", "b": "b", "c": "rc", "pre": "rc", "preview": "rc", "rc": "rc"}
_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*([^\s,]+)")

# a part that is absent sorts before or after every part that is present
_BEFORE: tuple[int, Any] = (-1, ())
_AFTER: tuple[int, Any] = (1, ())


@functools.total_ordering
class Version:
    """One version in PEP 440's order (``0.5.7rc2 < 0.5.7 < 0.5.7.post1``, ``2.13.0 < 2.13.0+cpu``)."""

    def __init__(self, text: str) -> None:
        match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        self.epoch = int(match["epoch"] or 0)
        self.release: tuple[int, ...] = tuple(int(part) for part in match["release"].split("."))
        self.pre: tuple[str, int] | None = (
            (_PRE_NAMES[match["pre_name"].lower()], int(match["pre"] or 0)) if match["pre_name"] else None
        )
        self.post: int | None = int(match["post_plain"] or match["post"] or 0) if match["post_part"] else None
        self.dev: int | None = int(match["dev"] or 0) if match["dev_part"] else None
        self.local: str | None = re.sub(r"[-_]", ".", match["local"].lower()) if match["local"] else None

    @property
    def is_prerelease(self) -> bool:
        """Whether it is an alpha, beta, release candidate or development version."""
        return self.pre is not None or self.dev is not None

    @property
    def public(self) -> str:
        """The version without its local part: ``2.13.0`` for ``2.13.0+cu130``."""
        return str(self).split("+", 1)[0]

    @property
    def minor(self) -> str:
        """The first two numbers: ``3.11`` for ``3.11.2``."""
        return ".".join(str(part) for part in (*self.release, 0)[:2])

    def without_local(self) -> Version:
        """The same version without its local part."""
        return Version(self.public)

    @property
    def _key(self) -> tuple[Any, ...]:
        release = self.release
        while len(release) > 1 and release[-1] == 0:
            release = release[:-1]
        if self.pre is not None:
            pre: tuple[int, Any] = (0, self.pre)
        elif self.post is None and self.dev is not None:
            pre = _BEFORE  # 1.0.dev1 comes before 1.0a1
        else:
            pre = _AFTER
        post = _BEFORE if self.post is None else (0, self.post)
        dev = _AFTER if self.dev is None else (0, self.dev)
        local: tuple[int, Any] = _BEFORE
        if self.local is not None:
            # numbers sort after words, and numerically
            local = (0, tuple((1, int(p), "") if p.isdigit() else (0, 0, p) for p in self.local.split(".")))
        return (self.epoch, release, pre, post, dev, local)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Version) else NotImplemented

    def __lt__(self, other: Version) -> bool:
        return self._key < other._key if isinstance(other, Version) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        text = f"{self.epoch}!" if self.epoch else ""
        text += ".".join(str(part) for part in self.release)
        if self.pre is not None:
            text += f"{self.pre[0]}{self.pre[1]}"
        if self.post is not None:
            text += f".post{self.post}"
        if self.dev is not None:
            text += f".dev{self.dev}"
        return f"{text}+{self.local}" if self.local else text

    def __repr__(self) -> str:
        return f"Version({str(self)!r})"


class Range:
    """A set of conditions such as ``>=3.11,<3.14``; ``*`` or an empty text holds for every version.

    Unlike package installers a range takes pre-releases when their number lies inside: the callers ask about a version
    that somebody named, they do not choose from an index.
    """

    def __init__(self, text: str) -> None:
        self.text = text.strip() if isinstance(text, str) else ""
        if not isinstance(text, str):
            raise ValueError(f"not a version range: {text!r}")
        self._clauses: list[tuple[str, str]] = []
        if self.text in ("", "*"):
            return
        for part in self.text.split(","):
            match = _CLAUSE.fullmatch(part.strip())
            if match is None:
                raise ValueError(f"not a version range: {text!r}")
            operator, operand = match.groups()
            Version(operand[:-2] if operator in ("==", "!=") and operand.endswith(".*") else operand)
            self._clauses.append((operator, operand))

    def __contains__(self, version: object) -> bool:
        candidate = Version(version) if isinstance(version, str) else version
        if not isinstance(candidate, Version):
            return False
        return all(_holds(candidate, operator, operand) for operator, operand in self._clauses)

    def __str__(self) -> str:
        return self.text or "*"


def _holds(candidate: Version, operator: str, operand: str) -> bool:
    """Whether one condition of a range holds, with PEP 440's rules for local, pre- and post-releases."""
    if operand.endswith(".*"):
        inside = _has_prefix(candidate, operand[:-2])
        return inside if operator == "==" else not inside
    wanted = Version(operand)
    plain = candidate if wanted.local else candidate.without_local()
    if operator == "==":
        return plain == wanted
    if operator == "!=":
        return plain != wanted
    if operator == ">=":
        return plain >= wanted
    if operator == "<=":
        return plain <= wanted
    if operator == "~=":
        prefix = ".".join(str(part) for part in wanted.release[:-1])
        if wanted.epoch:
            prefix = f"{wanted.epoch}!{prefix}"
        return plain >= wanted and _has_prefix(candidate, prefix)
    if operator == "<":
        # 0.5.7rc2 is not "below 0.5.7" in the sense of a range, unless the limit is a pre-release itself
        return plain < (wanted if wanted.is_prerelease else Version(f"{wanted.public}.dev0"))
    # ">": a later build of the same release is not above it
    if wanted.post is None and wanted.dev is None and _same_release(candidate, wanted):
        return plain > wanted and candidate.pre != wanted.pre
    return plain > wanted


def _has_prefix(candidate: Version, prefix: str) -> bool:
    wanted = Version(prefix)
    padded = candidate.release + (0,) * len(wanted.release)
    return candidate.epoch == wanted.epoch and padded[: len(wanted.release)] == wanted.release


def _same_release(one: Version, other: Version) -> bool:
    width = max(len(one.release), len(other.release))
    pad = (0,) * width
    return one.epoch == other.epoch and (one.release + pad)[:width] == (other.release + pad)[:width]


def parse(text: object, what: str) -> Version:
    """The version in ``text``; ``what`` names the setting in the refusal (KVF-REL-001) of anything else."""
    try:
        return Version(text)  # type: ignore[arg-type]
    except ValueError:
        raise refuse(
            "KVF-REL-001",
            f"{what} is {text!r}, which is not a version number.",
            f"Give {what} as numbers with dots, such as 0.32.0, 0.8.5.post1 or 2.13.0+cu130 (quoted in YAML).",
        ) from None


def parse_range(text: object, what: str) -> Range:
    """The range in ``text``; ``what`` names the setting in the refusal (KVF-REL-002) of anything else."""
    try:
        return Range(text)  # type: ignore[arg-type]
    except ValueError:
        raise refuse(
            "KVF-REL-002",
            f"{what} is {text!r}, which is not a version range.",
            f"Give {what} as conditions with commas, such as '>=3.11,<3.14' (quoted in YAML).",
        ) from None
