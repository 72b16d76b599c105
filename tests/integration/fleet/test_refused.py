"""A rollout over three real hosts that must not begin, or must end at the canary; no engine is needed for either.

Every deploy here names a bundle that does not exist: should a refusal fail to come, it still ends before an engine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet_hosts import carry_model, kvfleet, result_of, ssh, tool, untouched, write_inventory

from kvfleet import fleet
from kvfleet.fleet import Verdict

pytestmark = pytest.mark.root

HOSTS = ["fleet-a", "fleet-b", "fleet-c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("fleet")
    try:
        for host in HOSTS:
            tool("up", host, "--reuse", "--size", "1G")
            carry_model(host, made)
        yield made
    finally:
        for host in HOSTS:
            subprocess.run(["scripts/testhost", "down", host], check=False, capture_output=True)


def deploy(folder: Path, changes: dict[str, dict[str, Any]] | None = None, *words: str) -> tuple[int, dict[str, Any]]:
    done = kvfleet(
        "deploy",
        "-i",
        str(write_inventory(folder, HOSTS, changes)),
        "--json",
        "-e",
        "engine_bundle=/nonexistent",
        *words,
    )
    return done.returncode, result_of(done)


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {name: host["verdict"] for name, host in result["hosts"].items()}


def test_planning_from_python_reaches_every_host(folder: Path) -> None:
    done = fleet.plan(write_inventory(folder, HOSTS), keep=0)
    assert {name: host.verdict for name, host in done.hosts.items()} == dict.fromkeys(HOSTS, Verdict.PLANNED)
    assert done.exit == 0
    # the planner's numbers came from the hosts themselves
    assert all(host.plan and host.plan["host"]["disk"]["serial"].startswith("THFLEET") for host in done.hosts.values())
    assert all(map(untouched, HOSTS))


def test_a_disk_missing_on_one_host_stops_all_before_any_change(folder: Path) -> None:
    gone = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_GONE"
    status, result = deploy(folder, {"fleet-b": {"cache_disk_device": gone, "cache_disk_serial": "GONE"}})
    assert status == 2
    assert verdicts(result) == {"fleet-a": "not started", "fleet-b": "refused", "fleet-c": "not started"}
    assert gone in result["hosts"]["fleet-b"]["reasons"][0]
    assert result["hosts"]["fleet-a"]["reasons"] == ["the run stopped at fleet-b"]
    assert all(map(untouched, HOSTS))


def test_an_unreachable_host_is_listed_and_stops_the_others(folder: Path) -> None:
    status, result = deploy(folder, {"fleet-c": {"ansible_port": 1}})
    assert status == 2
    assert verdicts(result) == {"fleet-a": "not started", "fleet-b": "not started", "fleet-c": "unreachable"}
    assert all(map(untouched, HOSTS))


def test_what_was_never_deployed_can_be_neither_upgraded_nor_returned(folder: Path) -> None:
    inventory = write_inventory(folder, HOSTS)
    done = fleet.upgrade(inventory, keep=0)
    assert done.exit == 2
    assert {name: host.verdict for name, host in done.hosts.items()} == dict.fromkeys(HOSTS, Verdict.REFUSED)
    assert {host.reasons[0][:11] for host in done.hosts.values()} == {"KVF-ENG-040"}
    done = fleet.rollback(inventory, keep=0)
    assert done.exit == 2
    assert {name: host.verdict for name, host in done.hosts.items()} == dict.fromkeys(HOSTS, Verdict.REFUSED)
    assert all("KVF-ENG-042" in host.reasons[0] for host in done.hosts.values())
    assert all(map(untouched, HOSTS))


def test_a_failing_canary_leaves_the_others_untouched(folder: Path) -> None:
    # the bundle is looked for after the first changes on the canary, so this failure is one in the middle
    status, result = deploy(folder)
    assert status == 4
    assert verdicts(result) == {"fleet-a": "failed", "fleet-b": "not started", "fleet-c": "not started"}
    reasons = " ".join(result["hosts"]["fleet-a"]["reasons"])
    assert "KVF-REL-060" in reasons
    assert "KVF-HOST-085" in reasons
    assert not untouched("fleet-a")
    assert untouched("fleet-b")
    assert untouched("fleet-c")
    bundle = Path(result["artifacts"]) / "support-fleet-a.tar.gz"
    listed = subprocess.run(["tar", "-tzf", bundle], capture_output=True, text=True, check=True).stdout
    assert "lsblk.json" in listed
    assert ssh("fleet-a", "ls /run/kvfleet-support.tar.gz 2>/dev/null; true") == ""


def test_the_inventory_says_who_is_the_canary(folder: Path) -> None:
    inventory = write_inventory(folder, HOSTS)
    with (inventory / "hosts.yml").open("a") as file:
        file.write("  children:\n    kvfleet_canary:\n      hosts:\n        fleet-c:\n")
    result = result_of(
        kvfleet("deploy", "-i", str(inventory), "--json", "-e", "engine_bundle=/nonexistent", "-l", "fleet-b,fleet-c")
    )
    assert verdicts(result) == {"fleet-b": "not started", "fleet-c": "failed"}
    assert untouched("fleet-b")


def test_status_names_what_is_missing_and_changes_nothing(folder: Path) -> None:
    done = fleet.status(write_inventory(folder, HOSTS), limit="fleet-b", keep=0)
    host = done.hosts["fleet-b"]
    assert host.verdict is Verdict.DRIFT
    assert any("never deployed" in reason for reason in host.reasons)
    assert host.changed == ()
    assert untouched("fleet-b")


def test_a_disk_that_fell_out_of_one_host_stops_all_before_any_change(folder: Path) -> None:
    state = Path(os.environ.get("KVFLEET_TESTHOST_STATE") or "/var/tmp/kvfleet-testhost")
    listed = subprocess.run(
        ["losetup", "-n", "-O", "NAME", "-j", state / "fleet-b" / "disk2.img"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    device = listed.stdout.strip()
    link = ssh("fleet-b", "ls /dev/disk/by-id/*THFLEETB02").strip()
    # gone from the kernel, and with it the link that udev made
    subprocess.run(["losetup", "-d", device], check=True)
    ssh("fleet-b", f"rm {link}")
    status, result = deploy(folder, None, "-l", "fleet-b,fleet-c")
    assert status == 2
    assert verdicts(result) == {"fleet-b": "refused", "fleet-c": "not started"}
    assert link in result["hosts"]["fleet-b"]["reasons"][0]
    assert untouched("fleet-b")
    assert result["hosts"]["fleet-c"]["changed"] == []
