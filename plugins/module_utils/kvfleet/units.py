"""Sizes: binary constants, reading what people write, printing what people read."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "t": TIB,
    "tib": TIB,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` (``"4G"``, ``"512 MiB"``, ``"1048576"``) names.

    Suffixes are binary. Raises ``ValueError`` with the accepted forms for anything else.
    """
    match = _SIZE.match(text)
    if not match or match.group(2).lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write a number with K, M, G or T, like 512M or 4G")
    return int(float(match.group(1)) * _FACTORS[match.group(2).lower()])


def human_bytes(size_bytes: float) -> str:
    """Bytes for people: ``"1.56 TiB"``, ``"128 MiB"``; three significant digits, binary units."""
    for name, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return (
                f"{size_bytes / factor:.3g} {name}"
                if size_bytes / factor < 1000
                else f"{size_bytes / factor:.0f} {name}"
            )
    return f"{size_bytes:.0f} B"
