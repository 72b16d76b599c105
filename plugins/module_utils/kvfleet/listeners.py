"""The sockets that the plan promises against those that our units hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .findings import Finding

#: Addresses that mean every interface.
_ANY = frozenset(["0.0.0.0", "::"])  # noqa: S104 - compared, not bound


def is_loopback(address: str) -> bool:
    """Whether ``address`` is reachable from its own host only."""
    return address in ("::1", "localhost") or address.startswith("127.")


def compare(
    planned: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Return what is wrong, and the sockets of our units that the plan does not name but that only loopback reaches.

    ``planned`` holds ``{"unit", "address", "port", "purpose"}``, ``found`` what :func:`hostfacts.listeners` returns. A
    planned entry with ``ports`` is a range that may be used or not, on any address up to the planned one.
    Wrong is a planned socket that its unit does not hold (KVF-SVC-010), one that is bound wider than planned (-011),
    and one that the plan does not name and that other hosts can reach (-012).
    """
    findings: list[Finding] = []
    inner: list[dict[str, Any]] = []
    ours = [entry for entry in found if str(entry.get("unit") or "").startswith("kvfleet-")]
    expected: set[tuple[str, int]] = set()
    for want in planned:
        unit, address, port = str(want["unit"]), str(want["address"]), int(want["port"])
        if want.get("ports"):
            expected.update((unit, port + offset) for offset in range(int(want["ports"])))
            continue
        expected.add((unit, port))
        held = [str(entry["address"]) for entry in ours if entry["unit"] == unit and int(entry["port"]) == port]
        if not held:
            findings.append(
                Finding(
                    "KVF-SVC-010",
                    f"{unit} does not listen on {address}:{port} ({want['purpose']}), which the plan says.",
                    f"Read journalctl -u {unit}.",
                    {"unit": unit, "address": address, "port": port},
                )
            )
        wide = [other for other in held if is_loopback(address) and not is_loopback(other)]
        if wide:
            findings.append(
                Finding(
                    "KVF-SVC-011",
                    f"{unit} listens on {wide[0]}:{port} ({want['purpose']}), but the plan says {address}.",
                    "Stop the unit and look at its ExecStart and drop-ins; other hosts can reach it.",
                    {"unit": unit, "address": wide[0], "port": port},
                )
            )
    for entry in ours:
        unit, address, port = str(entry["unit"]), str(entry["address"]), int(entry["port"])
        if (unit, port) in expected:
            continue
        if is_loopback(address):
            inner.append({"unit": unit, "address": address, "port": port})
            continue
        where = "every interface" if address in _ANY else address
        findings.append(
            Finding(
                "KVF-SVC-012",
                f"{unit} listens on {where}, port {port}, which the plan does not name.",
                "Close it: look at the unit's flags and drop-ins; other hosts can reach it.",
                {"unit": unit, "address": address, "port": port},
            )
        )
    return findings, inner
