"""Names and texts of the units, and the trim script run for real against a stand-in of fstrim."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jinja2
import pytest

from kvfleet.core.mount_unit import (
    device_unit_name,
    escape_path,
    mount_unit_name,
    render_device_timeout,
    render_mount_unit,
)

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "disks" / "tools" / "systemd-escape.tsv"
UUID = "7e63a49b-80e9-44b1-aca5-fc5e10a617af"


@pytest.mark.parametrize("line", RECORDED.read_text().splitlines())
def test_names_as_systemd_escape_makes_them(line: str) -> None:
    path, escaped = line.split("\t")
    assert escape_path(path) == escaped


def test_unit_names() -> None:
    assert mount_unit_name("/var/cache/kvfleet") == "var-cache-kvfleet.mount"
    assert device_unit_name(UUID) == (
        "dev-disk-by\\x2duuid-7e63a49b\\x2d80e9\\x2d44b1\\x2daca5\\x2dfc5e10a617af.device"
    )


def _section(text: str, name: str) -> dict[str, str]:
    part = text.split(f"[{name}]\n")[1].split("\n[")[0]
    return dict(line.split("=", 1) for line in part.splitlines() if "=" in line and not line.startswith("#"))


def test_mount_unit() -> None:
    mount = _section(render_mount_unit("/var/cache/kvfleet", UUID, "ext4"), "Mount")
    assert mount["What"] == f"/dev/disk/by-uuid/{UUID}"
    assert mount["Where"] == "/var/cache/kvfleet"
    options = mount["Options"].split(",")
    assert {"noatime", "nofail"} <= set(options)
    assert "discard" not in options
    # systemd's own default is 90 seconds
    timeout = _section(render_device_timeout(), "Unit")["JobRunningTimeoutSec"]
    assert int(timeout) < 90


def test_a_disk_that_appears_after_the_boot_is_mounted() -> None:
    install = _section(render_mount_unit("/var/cache/kvfleet", UUID, "ext4"), "Install")
    assert install["WantedBy"].split() == ["local-fs.target", device_unit_name(UUID)]


def _render(name: str, **values: object) -> str:
    # unit files are no HTML
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    environment.filters["quote"] = lambda text: "'" + str(text).replace("'", "'\"'\"'") + "'"
    return environment.from_string((ROOT / "templates" / "cache_disk" / f"{name}.j2").read_text()).render(
        ansible_managed="Ansible managed", **values
    )


@pytest.fixture
def trim(tmp_path: Path) -> Path:
    """The rendered script, with a folder of stand-ins first on its path."""
    tools = tmp_path / "bin"
    tools.mkdir()
    text = _render(
        "kvfleet-trim",
        cache_disk_mount_point="/var/cache/kvfleet",
        cache_disk_trim_metrics=str(tmp_path / "metrics" / "trim.prom"),
    )
    script = tmp_path / "kvfleet-trim"
    script.write_text(text.replace("PATH=/usr/sbin", f"PATH={tools}:/usr/sbin"))
    script.chmod(0o755)
    return script


def _fstrim(script: Path, body: str) -> None:
    tool = script.parent / "bin" / "fstrim"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


def _metrics(script: Path) -> dict[str, float]:
    lines = (script.parent / "metrics" / "trim.prom").read_text().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in pairs}


def test_trim_keeps_result_and_bytes(trim: Path) -> None:
    # fstrim of util-linux 2.38 as it was seen on a booted host
    _fstrim(trim, 'echo "/var/cache/kvfleet: 1.8 GiB (1922617344 bytes) trimmed on /dev/loop4p1"')
    done = subprocess.run([str(trim)], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    metrics = _metrics(trim)
    assert metrics["kvfleet_trim_bytes"] == 1922617344
    assert metrics["kvfleet_trim_success"] == 1
    assert metrics["kvfleet_trim_last_run_timestamp_seconds"] > 1_700_000_000


def test_failing_trim_fails_and_says_so(trim: Path) -> None:
    _fstrim(trim, 'echo "fstrim: /var/cache/kvfleet: FITRIM ioctl failed: Input/output error" >&2; exit 32')
    done = subprocess.run([str(trim)], capture_output=True, text=True, check=False)
    assert done.returncode == 32
    assert "FITRIM ioctl failed" in done.stdout
    metrics = _metrics(trim)
    assert (metrics["kvfleet_trim_success"], metrics["kvfleet_trim_bytes"]) == (0, 0)


def test_trim_trims_only_this_mount(trim: Path) -> None:
    _fstrim(trim, f'echo "$@" > {trim.parent}/asked')
    subprocess.run([str(trim)], capture_output=True, check=False)
    assert (trim.parent / "asked").read_text().split() == ["--verbose", "/var/cache/kvfleet"]


def test_trim_units() -> None:
    service = _render(
        "kvfleet-trim.service",
        cache_disk_mount_point="/var/cache/kvfleet",
        kvfleet_service_user="kvfleet",
        kvfleet_plan={"paths": {"state": "/var/lib/kvfleet"}},
    )
    assert _section(service, "Unit")["ConditionPathIsMountPoint"] == "/var/cache/kvfleet"
    settings = _section(service, "Service")
    assert settings["CapabilityBoundingSet"] == settings["AmbientCapabilities"] == "CAP_SYS_ADMIN"
    timer = _section(
        _render("kvfleet-trim.timer", cache_disk_trim_calendar="weekly", cache_disk_trim_randomized_delay="6h"), "Timer"
    )
    assert timer["OnCalendar"] == "weekly"
    assert (timer["RandomizedDelaySec"], timer["FixedRandomDelay"]) == ("6h", "true")
    assert "fstrim.timer" not in service
