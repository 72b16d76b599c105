"""What an NVMe drive says about itself, and what to make of it: pure parsing and judging.

Field names are those of ``nvme smart-log`` and ``nvme id-ctrl`` of nvme-cli 1.x and 2.x with ``--output-format=json``;
their meaning is in the NVMe Base Specification 2.0, "SMART / Health Information" and "Identify Controller".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .findings import Finding

#: One "data unit" of the SMART log: 1000 blocks of 512 bytes.
DATA_UNIT_BYTES = 512_000

#: Bits of "critical warning": name, and whether a new cache may still be put on such a drive.
CRITICAL_BITS: tuple[tuple[int, str, bool], ...] = (
    (0, "its spare blocks are below the drive's own threshold", False),
    (1, "its temperature is outside the drive's limits", True),
    (2, "its reliability is degraded by media or internal errors", False),
    (3, "its media are read-only", False),
    (4, "its volatile memory backup has failed", True),
    (5, "its persistent memory region is read-only or unreliable", True),
)


@dataclass(frozen=True)
class BadFirmware:
    """One firmware known to be bad. ``model`` is a regular expression on the whole model name."""

    model: str
    firmware: str
    what: str
    fixed_in: str
    source: str


KNOWN_BAD_FIRMWARE: tuple[BadFirmware, ...] = (
    BadFirmware(
        r"Samsung SSD 980 PRO .*",
        "3B2QGXA7",
        "turns read-only after a growing number of media errors",
        "5B2QGXA7",
        "Puget Systems, January 2023, confirmed by Samsung",
    ),
    BadFirmware(
        r"Samsung SSD 990 PRO .*",
        "0B2QJXD7",
        "wears its health value down far faster than its flash",
        "1B2QJXD7",
        "Samsung's firmware release of February 2023",
    ),
    BadFirmware(
        r"KINGSTON SA2000M8.*",
        "S5Z42105",
        "stops answering in its deepest power state",
        "S5Z42109",
        "Kingston's release notes of S5Z42109; Linux nvme quirk for the A2000",
    ),
)


@dataclass(frozen=True)
class HealthLimits:
    """From when on a drive is worth a warning; percentages of the drive's own scale."""

    max_used_percent: float = 90.0
    min_spare_percent: float = 10.0
    max_media_errors: int = 0


@dataclass(frozen=True)
class SmartLog:
    """The fields of the SMART log that matter here."""

    critical_warning: int
    available_spare_percent: int
    spare_threshold_percent: int
    used_percent: int
    media_errors: int
    data_written_bytes: int
    power_on_hours: int
    temperature_c: int


@dataclass(frozen=True)
class Controller:
    """Identity of the controller; ``capacity_bytes`` is 0 where the drive does not report it."""

    model: str
    serial: str
    firmware: str
    capacity_bytes: int


def _whole(value: Any) -> int:
    """A number of the log: plain, a decimal text (128-bit counters), or an object with the raw ``value`` in it."""
    if isinstance(value, Mapping):
        value = value.get("value", 0)
    if isinstance(value, str):
        value = value.replace(",", "").split()[0] if value.strip() else 0
    return int(value or 0)


def parse_smart_log(text: str) -> SmartLog:
    """Read ``nvme smart-log --output-format=json``. Raises ``ValueError`` if the output is something else."""
    data = json.loads(text)
    if not isinstance(data, dict) or "critical_warning" not in data:
        raise ValueError("no SMART log in the output")
    used = data.get("percent_used", data.get("percentage_used"))
    return SmartLog(
        critical_warning=_whole(data["critical_warning"]),
        available_spare_percent=_whole(data.get("avail_spare")),
        spare_threshold_percent=_whole(data.get("spare_thresh")),
        used_percent=_whole(used),
        media_errors=_whole(data.get("media_errors")),
        data_written_bytes=_whole(data.get("data_units_written")) * DATA_UNIT_BYTES,
        power_on_hours=_whole(data.get("power_on_hours")),
        # the log is in kelvin
        temperature_c=_whole(data.get("temperature")) - 273,
    )


def parse_id_ctrl(text: str) -> Controller:
    """Read ``nvme id-ctrl --output-format=json``. Raises ``ValueError`` if the output is something else."""
    data = json.loads(text)
    if not isinstance(data, dict) or "sn" not in data:
        raise ValueError("no controller identity in the output")
    return Controller(
        str(data.get("mn", "")).strip(),
        str(data["sn"]).strip(),
        str(data.get("fr", "")).strip(),
        _whole(data.get("tnvmcap")),
    )


def bad_firmware(model: str, firmware: str, rows: Sequence[BadFirmware] = KNOWN_BAD_FIRMWARE) -> BadFirmware | None:
    """The row that names this model and firmware, or ``None``."""
    for row in rows:
        if row.firmware == firmware.strip() and re.fullmatch(row.model, model.strip()):
            return row
    return None


def check_firmware(device: str, model: str, firmware: str) -> list[Finding]:
    """A warning if the drive runs a firmware that is known to be bad."""
    row = bad_firmware(model, firmware)
    if row is None:
        return []
    return [
        Finding(
            "KVF-DISK-044",
            f"{device} ({model}) runs firmware {firmware}, which {row.what} ({row.source}).",
            f"Update the drive's firmware to {row.fixed_in} or newer.",
        )
    ]


def assess(device: str, smart: SmartLog, limits: HealthLimits) -> tuple[list[Finding], list[Finding]]:
    """Judge a SMART log: (reasons against putting a new cache there, warnings).

    A drive that reports spare 0 with threshold 0 reports no spare at all (emulated controllers do).
    """
    errors: list[Finding] = []
    warnings: list[Finding] = []
    for bit, words, tolerable in CRITICAL_BITS:
        if smart.critical_warning >> bit & 1:
            finding = Finding(
                "KVF-DISK-045",
                f"{device} reports a critical warning: {words}.",
                "Cool or replace the drive." if bit == 1 else "Replace the drive.",
                {"critical_warning": smart.critical_warning},
            )
            (warnings if tolerable else errors).append(finding)
    if smart.used_percent > limits.max_used_percent:
        warnings.append(
            Finding(
                "KVF-DISK-046",
                f"{device} has used {smart.used_percent} % of its rated endurance; "
                f"the limit is {limits.max_used_percent:g} %.",
                "Plan its replacement, or raise cache_disk_health_max_used_percent.",
                {"used_percent": smart.used_percent},
            )
        )
    reported = smart.available_spare_percent > 0 or smart.spare_threshold_percent > 0
    if reported and smart.available_spare_percent < limits.min_spare_percent:
        warnings.append(
            Finding(
                "KVF-DISK-046",
                f"{device} has {smart.available_spare_percent} % of its spare blocks left; the limit is "
                f"{limits.min_spare_percent:g} %.",
                "Plan its replacement, or lower cache_disk_health_min_spare_percent.",
                {"available_spare_percent": smart.available_spare_percent},
            )
        )
    if smart.media_errors > limits.max_media_errors:
        warnings.append(
            Finding(
                "KVF-DISK-046",
                f"{device} has had {smart.media_errors} media errors; the limit is {limits.max_media_errors}.",
                "Watch the drive, or raise cache_disk_health_max_media_errors.",
                {"media_errors": smart.media_errors},
            )
        )
    return errors, warnings


def endurance_days(
    smart: SmartLog, write_bytes_per_day: float | None = None, rated_bytes: float | None = None
) -> tuple[float | None, str]:
    """Days until the rated endurance is used up, and how that was computed; ``None`` where it cannot be known.

    The write rate is the one given (bytes a day, measured), else the drive's lifetime mean. What is left comes from
    ``rated_bytes`` (the data sheet's TBW) if given, else from the drive's own scale: it wrote ``data_written_bytes``
    for ``used_percent``, so the rest lasts ``written * (100 - used) / used`` bytes at the same write amplification.
    """
    written = smart.data_written_bytes
    if write_bytes_per_day is None:
        if smart.power_on_hours < 24 or written <= 0:
            return None, "the drive is too new to have a write rate of its own"
        write_bytes_per_day = written / smart.power_on_hours * 24
        rate = "its lifetime mean"
    else:
        rate = "the measured rate"
    if write_bytes_per_day <= 0:
        return None, "nothing is being written"
    if rated_bytes is not None:
        left, scale = max(rated_bytes - written, 0.0), "the data sheet's endurance"
    elif smart.used_percent > 0 and written > 0:
        left, scale = written * max(100 - smart.used_percent, 0) / smart.used_percent, "the drive's own wear scale"
    else:
        return None, "the drive has not used a whole percent of its endurance yet"
    return left / write_bytes_per_day, f"{scale} at {rate}"
