"""What the drive says about itself, and what fio measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfleet.core.command import CommandResult
from kvfleet.core.disk_actions import DiskRun, read_health
from kvfleet.core.disk_speed import block_bytes, file_bytes, fio_argv, measure, parse_fio
from kvfleet.core.disks import DiskProbe, DiskSettings
from kvfleet.core.health import (
    KNOWN_BAD_FIRMWARE,
    HealthLimits,
    SmartLog,
    assess,
    bad_firmware,
    check_firmware,
    endurance_days,
    parse_id_ctrl,
    parse_smart_log,
)
from kvfleet.core.units import GIB, KIB, MIB

DATA = Path(__file__).resolve().parents[1] / "data" / "disks" / "tools"
LINK = "/dev/disk/by-id/nvme-X"
TERABYTE = 10**12
# a drive in its prime: 40 TB written in a year, 2 % used
WELL = SmartLog(0, 100, 10, 2, 0, 40 * TERABYTE, 8760, 41)


LIMITS = HealthLimits()


def codes(smart: SmartLog, limits: HealthLimits = LIMITS) -> tuple[list[str], list[str]]:
    errors, warnings = assess(LINK, smart, limits)
    return [item.code for item in errors], [item.code for item in warnings]


def test_a_well_drive_has_nothing_to_say() -> None:
    assert codes(WELL) == ([], [])


def test_recorded_controller_of_a_virtual_machine() -> None:
    """nvme-cli 2.3 on QEMU's controller, which reports 50 C and neither spare nor capacity."""
    smart = parse_smart_log((DATA / "nvme-smart-log-qemu.json").read_text())
    assert (smart.temperature_c, smart.available_spare_percent, smart.spare_threshold_percent) == (50, 0, 0)
    assert codes(smart) == ([], [])
    controller = parse_id_ctrl((DATA / "nvme-id-ctrl-qemu.json").read_text())
    assert (controller.model, controller.serial, controller.capacity_bytes) == ("QEMU NVMe Ctrl", "THCDVM03", 0)


@pytest.mark.parametrize(("bit", "stops"), [(0, True), (1, False), (2, True), (3, True), (4, False), (5, False)])
def test_critical_warnings(bit: int, stops: bool) -> None:
    expected = (["KVF-DISK-045"], []) if stops else ([], ["KVF-DISK-045"])
    assert codes(replace(WELL, critical_warning=1 << bit)) == expected


def test_thresholds() -> None:
    assert codes(replace(WELL, used_percent=91)) == ([], ["KVF-DISK-046"])
    assert codes(replace(WELL, used_percent=91), HealthLimits(max_used_percent=95)) == ([], [])
    assert codes(replace(WELL, available_spare_percent=9)) == ([], ["KVF-DISK-046"])
    assert codes(replace(WELL, media_errors=1)) == ([], ["KVF-DISK-046"])


def test_a_drive_that_reports_no_spare_at_all_is_not_worn_out() -> None:
    """Emulated controllers show spare 0 % with threshold 0 %."""
    assert codes(replace(WELL, available_spare_percent=0, spare_threshold_percent=0)) == ([], [])
    assert codes(replace(WELL, available_spare_percent=0, spare_threshold_percent=10)) == ([], ["KVF-DISK-046"])


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"critical_warning": {"value": 4, "available_spare": 0}}, "critical_warning", 4),
        ({"percent_used": 3}, "used_percent", 3),
        (
            {"data_units_written": "340282366920938463463374607431768211455"},
            "data_written_bytes",
            (2**128 - 1) * 512000,
        ),
        ({"media_errors": "1,234"}, "media_errors", 1234),
    ],
)
def test_spellings_of_nvme_cli(change: dict[str, Any], field: str, value: int) -> None:
    plain = {"critical_warning": 0, "temperature": 314, "avail_spare": 100, "spare_thresh": 10, "percent_used": 0}
    assert getattr(parse_smart_log(json.dumps({**plain, **change})), field) == value


def test_other_output_is_refused() -> None:
    for text in ("[]", "{}", "nvme: command failed", ""):
        with pytest.raises(ValueError, match=r".+"):
            parse_smart_log(text)
        with pytest.raises(ValueError, match=r".+"):
            parse_id_ctrl(text)


def test_endurance_from_the_drives_own_scale() -> None:
    days, basis = endurance_days(WELL)
    # 2 % in 365 days: the other 98 % last 49 times as long
    assert days == pytest.approx(365 * 49)
    assert "lifetime mean" in basis
    # at four times the write rate a quarter of that
    faster, basis = endurance_days(WELL, write_bytes_per_day=4 * 40 * TERABYTE / 365)
    assert faster == pytest.approx(365 * 49 / 4)
    assert "measured rate" in basis


def test_endurance_from_the_data_sheet() -> None:
    # 1 DWPD over five years of a 1.92 TB drive is 3504 TB; 40 TB are gone; 10 TB a day
    days, _basis = endurance_days(WELL, write_bytes_per_day=10 * TERABYTE, rated_bytes=3504 * TERABYTE)
    assert days == pytest.approx(346.4)


def test_endurance_that_cannot_be_known() -> None:
    assert endurance_days(replace(WELL, used_percent=0))[0] is None
    assert endurance_days(replace(WELL, power_on_hours=3))[0] is None
    assert endurance_days(WELL, write_bytes_per_day=0)[0] is None


def look(identity: CommandResult, **log: int) -> tuple[DiskRun, list[str]]:
    """Read the health of a drive with a namespace of 100 GB; ``identity`` is what its controller answers."""
    plain = {"critical_warning": 0, "temperature": 314, "avail_spare": 100, "spare_thresh": 10, "percent_used": 2}
    answers = {"smart-log": CommandResult(0, json.dumps({**plain, **log}), ""), "id-ctrl": identity}

    def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        assert argv[-1] == "/dev/nvme7n1"
        return answers[argv[1]]

    run = DiskRun(DiskSettings(device=LINK), runner)
    probe = DiskProbe(LINK, node="/dev/nvme7n1", kind="nvme", size_bytes=100 * 10**9)
    return run, [finding.code for finding in read_health(run, probe)]


def test_capacity_of_the_drive_is_its_own_word() -> None:
    # 1.92 TB as drives of that class count them
    run, _errors = look(CommandResult(0, '{"sn": "S1", "tnvmcap": "1920383410176"}', ""))
    assert run.health["capacity_bytes"] == 1920383410176
    assert run.health["capacity_basis"] == "the drive's own word"


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (CommandResult(0, '{"sn": "S1", "tnvmcap": 0}', ""), "the drive does not tell its own"),
        (CommandResult(1, "", "NVMe status: Invalid Field in Command"), "Invalid Field in Command"),
        (CommandResult(0, "no JSON", ""), "not understood"),
    ],
)
def test_size_of_a_namespace_is_not_passed_off_as_the_drives(identity: CommandResult, reason: str) -> None:
    run, _errors = look(identity)
    assert run.health["capacity_bytes"] == 100 * 10**9
    assert run.health["capacity_basis"].startswith("the namespace's size: ")
    assert reason in run.health["capacity_basis"]


def test_a_drive_that_tells_no_capacity_is_judged_all_the_same() -> None:
    """Its media are read-only, whatever its controller's identity answers."""
    run, errors = look(CommandResult(1, "", "failed"), critical_warning=8)
    assert errors == ["KVF-DISK-045"]
    assert run.health["available"] is True


def test_known_bad_firmware() -> None:
    row = bad_firmware("Samsung SSD 980 PRO 2TB ", "3B2QGXA7")
    assert row is not None
    assert row.fixed_in == "5B2QGXA7"
    assert bad_firmware("Samsung SSD 980 PRO 2TB", "5B2QGXA7") is None
    assert bad_firmware("Samsung SSD 970 PRO 2TB", "3B2QGXA7") is None
    (finding,) = check_firmware(LINK, "Samsung SSD 990 PRO 4TB", "0B2QJXD7")
    assert "1B2QJXD7" in finding.fix
    assert all(row.source and row.fixed_in != row.firmware for row in KNOWN_BAD_FIRMWARE)


def test_recorded_fio() -> None:
    for kind in ("write", "read", "randread"):
        rate, moved = parse_fio((DATA / f"fio-{kind}.json").read_text(), kind)
        job = json.loads((DATA / f"fio-{kind}.json").read_text())["jobs"][0]
        side = job["write" if kind == "write" else "read"]
        # fio's own bytes over its own milliseconds
        assert rate == pytest.approx(moved / side["runtime"] * 1000, rel=0.01)
    assert moved > 128 * MIB
    with pytest.raises(ValueError, match="error 5"):
        parse_fio('{"jobs": [{"error": 5}]}', "read")


def test_sizes_of_the_measurement() -> None:
    assert block_bytes(1) == 4 * KIB
    assert block_bytes(25000) == 28672
    assert file_bytes(100 * GIB) == GIB
    assert file_bytes(2 * GIB) == 512 * MIB
    assert file_bytes(100 * MIB) == 0


def test_measurement_reads_only_what_was_written_and_removes_its_file() -> None:
    asked: list[Sequence[str]] = []

    def runner(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        asked.append(argv)
        if argv[0] != "fio":
            return CommandResult(0, "", "")
        kind = argv[1].partition("=")[2]
        side = {"bw_bytes": 100 * MIB, "io_bytes": 300 * MIB}
        return CommandResult(0, "note: x\n" + json.dumps({"jobs": [{"error": 0, "write": side, "read": side}]}), kind)

    result = measure("/data", 100 * GIB, 400 * KIB, runner)
    assert result["available"] is True
    assert result["random_read_bytes_per_s"] == 100 * MIB
    assert [argument for argument in asked[0] if argument.startswith("--size")] == [f"--size={GIB}"]
    assert f"--size={300 * MIB}" in asked[1]
    assert f"--bs={400 * KIB}" in asked[2]
    assert asked[-1] == ["rm", "--force", "/data/.kvfleet-speed"]
    # a file below the folder, never a device
    assert all("--filename=/data/.kvfleet-speed" in argv for argv in asked[:-1])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (CommandResult(127, "", ""), "fio is not installed"),
        (CommandResult(1, "", "fio: io_u error"), "io_u error"),
        (CommandResult(0, "{}", ""), "not understood"),
    ],
)
def test_measurement_that_cannot_be_made(answer: CommandResult, reason: str) -> None:
    result = measure("/data", 100 * GIB, MIB, lambda argv, **_words: answer)
    assert result["available"] is False
    assert reason in result["reason"]


def test_three_measurements_stay_within_30_seconds() -> None:
    runtimes = [
        int(word.partition("=")[2])
        for kind in ("write", "read", "randread")
        for word in fio_argv(kind, "/x", GIB, MIB)
        if word.startswith("--runtime")
    ]
    assert sum(runtimes) <= 24
