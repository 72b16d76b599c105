"""How units run where PID 1 is not systemd: through docker-systemctl-replacement, and what that leaves out."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "stand-in"
BIN = Path("/usr/local/bin")
LOGS = Path("/var/log/journal")

#: Directives of our units that systemd would enforce and the stand-in does not; they stand in every report.
NOT_ENFORCED = (
    "hardening.conf as a whole (ProtectSystem, PrivateTmp, SystemCallFilter, CapabilityBoundingSet, ...)",
    "ReadWritePaths",
    "Restart= and StartLimit*: a service that dies stays dead",
    "TimeoutStartSec (the readiness check has its own deadline)",
    "Type=exec: a program that cannot be executed is noticed by the readiness check alone",
    "PartOf= and Requires= between units",
    "timers: recorded as enabled, never run",
    "limits of control groups (OOMPolicy and the like)",
    "credentials (LoadCredential)",
)
#: What it does enforce, or the stand-in's front adds.
ENFORCED = (
    "User, Group, SupplementaryGroups, WorkingDirectory, Environment, RuntimeDirectory, ExecStartPre, ExecStart,"
    " ExecStartPost, KillMode=mixed, TimeoutStopSec, AssertPathIsMountPoint",
    "LimitNOFILE, LimitMEMLOCK, UMask and ExecStartPost's result (by the front)",
    "the mount unit of the cache partition (mounted with its own options)",
)


def systemd_runs() -> bool:
    """Whether this host was booted with systemd (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()


def install(wheels: Path, target: Path) -> dict[str, Any]:
    """Provide ``systemctl`` and ``journalctl``; what runs the units and what is not enforced."""
    if systemd_runs():
        return {"kind": "systemd", "reason": "PID 1 is systemd", "not_enforced": [], "enforced": ["everything"]}
    why = "PID 1 is no systemd"
    if shutil.which("systemd-nspawn") is None or not Path("/usr/lib/systemd/systemd").exists():
        why += ", and no container can be booted: systemd-nspawn or systemd itself is not on this host"
    else:
        why += "; a booted container was not tried"
    wheel = next(wheels.glob("docker_systemctl_replacement-*.whl"))
    target.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        (target / "systemctl3.py").write_bytes(archive.read("systemctl2/systemctl3.py"))
    for name in ("systemctl", "journalctl"):
        text = (HERE / name).read_text().replace("@REPLACEMENT@", str(target / "systemctl3.py"))
        path = BIN / name
        path.write_text(text)
        path.chmod(0o755)
    LOGS.mkdir(parents=True, exist_ok=True)
    groups = Path("/sys/fs/cgroup")
    if not any((groups / name / "cgroup.procs").exists() for name in ("", "systemd", "unified")):
        subprocess.run(["mount", "-t", "cgroup2", "cgroup2", str(groups)], capture_output=True, check=False)
    Path("/etc/systemd/system").mkdir(parents=True, exist_ok=True)
    return {
        "kind": "docker-systemctl-replacement",
        "version": wheel.name.split("-")[1],
        "reason": why,
        "not_enforced": list(NOT_ENFORCED),
        "enforced": list(ENFORCED),
    }


def answers(port: int) -> bool:
    """Whether an instance answers on this port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def journals(lines: int = 20000) -> dict[str, list[str]]:
    """The last lines of every unit of ours."""
    found = {}
    for path in sorted(Path("/etc/systemd/system").glob("kvfleet-*@*.service")):
        shown = subprocess.run(
            ["journalctl", "-u", path.name, "-n", str(lines), "-o", "cat", "--no-pager"],
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        found[path.name] = shown.stdout.splitlines()
    return found
