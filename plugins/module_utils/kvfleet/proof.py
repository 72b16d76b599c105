"""What was proved, and whether it still stands: fingerprint, record, restart counts and the journal's alarm lines."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .command import CommandRunner
from .findings import Finding

#: file names below the plan's state directory
RECORD_NAME = "proved.json"
PREVIOUS_NAME = "proved.previous.json"

UNIT_DIRECTORY = Path("/etc/systemd/system")

#: Lines that mean "it runs, but not as deployed": pattern, what it means. Texts of LMCache 0.5.x and vLLM 0.2x - 0.32.
ALARMS: Sequence[tuple[str, str]] = (
    (r"compiled extension not found", "LMCache runs without its compiled part: wrong torch for this LMCache"),
    (r"Fallback to python backend", "LMCache fell back to Python code"),
    (r"pin_memory failed", "host memory could not be pinned: copies are slow"),
    (r"Unknown configuration key", "a setting that LMCache does not know was ignored"),
    (r"degraded mode", "the engine lost its LMCache server"),
    (r"No supported cpu connector found", "this LMCache has no connector for the engine's device"),
    (r"did not respond to register_kv_caches", "the engine could not register at its LMCache server"),
    (r"reservations failed with out-of-memory", "the RAM tier is too small to stage what was asked for"),
    (r"No space left on device", "a file system is full"),
    # vLLM warns of a low limit with the same words as an example ("fd limit errors like `OSError: ...`")
    (r"(?<!`OSError: \[Errno 24\] )Too many open files", "the unit's file limit is too low"),
    (r"Input/output error", "a device failed to read or write"),
    (r"Structure needs cleaning", "a file system is damaged"),
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ALARMS = [(re.compile(pattern, re.IGNORECASE), meaning) for pattern, meaning in ALARMS]
#: how many different alarm lines of one unit are kept
_ALARM_LIMIT = 5


def unit_names(plan: Mapping[str, Any]) -> list[str]:
    """Units that the plan runs, servers first."""
    return [f"kvfleet-lmcache@{server['name']}.service" for server in plan["servers"]] + [
        f"kvfleet-vllm@{instance['name']}.service" for instance in plan["instances"]
    ]


def unit_files(plan: Mapping[str, Any], unit_directory: Path = UNIT_DIRECTORY) -> list[Path]:
    """Files that a start of the plan's units reads: unit, drop-ins, settings; those that exist, sorted."""
    etc = Path(str(plan["paths"]["etc"]))
    found: list[Path] = []
    for unit in unit_names(plan):
        stem = unit.rsplit(".", 1)[0]
        found += [unit_directory / unit, *(unit_directory / f"{unit}.d").glob("*.conf"), *etc.glob(f"{stem}.*")]
    return sorted({path for path in found if path.is_file()})


def fingerprint(plan: Mapping[str, Any], files: Sequence[Path]) -> dict[str, str]:
    """Digest of all that decides what runs: the plan, the release that ``current`` points to, units and settings.

    Returns the parts by name and their sum under ``all``, so that a difference can be named.
    """
    parts = {
        "plan": str(plan["fingerprint"]),
        "release": os.path.realpath(str(plan["paths"]["current"])),
        **{str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }
    parts["all"] = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return parts


def read_record(state: Path) -> dict[str, Any] | None:
    """The last proof's record below ``state``; ``None`` when there is none or it is no JSON object."""
    try:
        record = json.loads((state / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def write_record(state: Path, record: Mapping[str, Any]) -> None:
    """Replace the record atomically and keep the one before as ``proved.previous.json`` (for a rollback to name)."""
    state.mkdir(parents=True, exist_ok=True)
    target = state / RECORD_NAME
    handle, name = tempfile.mkstemp(prefix=f".{RECORD_NAME}.", dir=str(state))
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o640)
        if target.exists():
            previous = Path(name + ".previous")
            previous.write_bytes(target.read_bytes())
            previous.chmod(0o640)
            previous.replace(state / PREVIOUS_NAME)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def difference(record: Mapping[str, Any] | None, now: Mapping[str, str], profile: str) -> str:
    """Why the record does not prove the present state; "" when it does.

    ``profile`` is the load profile asked for: any recorded proof covers ``smoke``, others only themselves.
    """
    if record is None:
        return "this host was never proved"
    if record.get("verdict") not in ("pass", "degrade"):
        return f"the last proof's verdict is {record.get('verdict')}"
    before = record.get("parts") or {}
    changed = sorted(name for name in {*before, *now} - {"all"} if before.get(name) != now.get(name))
    if changed:
        return "changed since the last proof: " + ", ".join(changed)
    if profile not in ("smoke", record.get("profile")):
        return f"the last proof ran profile {record.get('profile')}, not {profile}"
    return ""


def unit_states(plan: Mapping[str, Any], run: CommandRunner) -> dict[str, dict[str, str]]:
    """``systemctl show`` of every unit of the plan: ActiveState, NRestarts, InvocationID, Result."""
    states: dict[str, dict[str, str]] = {}
    for unit in unit_names(plan):
        shown = run(["systemctl", "show", "--property=ActiveState,SubState,NRestarts,InvocationID,Result", unit])
        states[unit] = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    return states


def check_units(plan: Mapping[str, Any], run: CommandRunner) -> tuple[dict[str, Any], list[Finding]]:
    """Every unit runs, was never restarted by systemd, and its journal since this start holds no alarm line."""
    findings: list[Finding] = []
    report: dict[str, Any] = {}
    for unit, state in unit_states(plan, run).items():
        restarts = int(state.get("NRestarts") or 0)
        invocation = state.get("InvocationID", "")
        alarms: list[tuple[str, str]] = []
        if state.get("ActiveState") != "active":
            findings.append(
                Finding(
                    "KVF-BENCH-030",
                    f"{unit} is {state.get('ActiveState') or 'unknown'} ({state.get('Result') or 'no result'}).",
                    f"Read journalctl -u {unit}.",
                )
            )
        if restarts:
            findings.append(
                Finding(
                    "KVF-BENCH-031",
                    f"systemd restarted {unit} {restarts} times since it was started.",
                    f"Find the reason in journalctl -u {unit}; systemctl reset-failed {unit} and a restart clear "
                    "the count.",
                    {"restarts": restarts},
                )
            )
        if invocation:
            journal = run(["journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager", "--quiet"])
            alarms = alarm_lines(journal.stdout)
        for line, meaning in alarms:
            findings.append(
                Finding(
                    "KVF-BENCH-032",
                    f"The journal of {unit} says: {line!r} ({meaning}).",
                    f"Read journalctl -u {unit} around that line.",
                )
            )
        report[unit] = {
            "active": state.get("ActiveState"),
            "restarts": restarts,
            "alarms": [line for line, _ in alarms],
        }
    return report, findings


def alarm_lines(journal: str) -> list[tuple[str, str]]:
    """Different lines of ``journal`` that match :data:`ALARMS`, with its meaning; uncoloured, cut, at most five."""
    found: dict[str, str] = {}
    for raw in journal.splitlines():
        meaning = next((text for pattern, text in _ALARMS if pattern.search(raw)), None)
        if meaning is not None:
            found.setdefault(_COLOUR.sub("", raw).strip()[:240], meaning)
        if len(found) == _ALARM_LIMIT:
            break
    return list(found.items())
