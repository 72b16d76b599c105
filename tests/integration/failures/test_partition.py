"""Trouble of the cache partition: answers stay right, the root file system stays as it is, status says it."""

import json
import subprocess

import pytest
from failing import DATA, ENGINE, HOST, MOUNT, SERVER, fill, tool

pytestmark = pytest.mark.root


def trouble(host, breaks, mends):
    """Break the partition under load, mend it when the watcher says so; what clients saw, and what it said."""
    host.begin()
    injected = host.now()
    host.sh(breaks)
    host.wait("the watcher says it", lambda: host.health(SERVER).get("state") == "degraded")
    reason = host.health(SERVER)["reason"]
    host.sh(mends)
    host.wait("well", host.well)
    return host.end(injected), reason


def test_partition_full(ready, record):
    outcome, reason = trouble(
        ready, f"dd if=/dev/zero of={MOUNT}/filler bs=4M 2>/dev/null; true", f"rm -f {MOUNT}/filler"
    )
    record("cache partition full", outcome, f"status: {reason}; nothing new is stored")


def test_partition_read_only(ready, record):
    outcome, reason = trouble(ready, f"mount -o remount,ro {MOUNT}", f"mount -o remount,rw {MOUNT}")
    record("partition remounted read-only", outcome, f"status: {reason}")


def test_partition_unmounted_while_serving(ready, record):
    ready.begin()
    injected = ready.now()
    ready.sh(f"umount -l {MOUNT}")
    ready.wait("the watcher says it or the services stop", lambda: ready.health(SERVER).get("state") != "ok")
    state = ready.health(SERVER)
    ready.sh("sleep 5")
    under = ready.sh(f"ls -A {MOUNT}", check=False).split()
    ready.sh("systemctl start var-cache-kvfleet.mount kvfleet.target")
    ready.wait("well", ready.well)
    outcome = ready.end(injected)
    assert under == []
    record(
        "partition unmounted while serving (`umount -l`)", outcome,
        f"status: {state['state']} {state['reason']}; nothing was written below the mount point; by hand: `systemctl"
        " start var-cache-kvfleet.mount kvfleet.target`", None,
    )  # fmt: skip


def test_partition_stopped_and_mounted_again(ready, record):
    """The services go with the partition and come back with it; nothing of them runs on the bare directory."""
    ready.begin()
    injected = ready.now()
    ready.sh("systemctl stop var-cache-kvfleet.mount")
    assert ready.sh(f"systemctl is-active {SERVER} {ENGINE}", check=False).split() == ["inactive"] * 2
    ready.wait("the watcher says it", lambda: ready.health(SERVER).get("state") == "blocked")
    said = ready.health(ENGINE)["reason"]
    assert ready.harm()["below the mount point"] == []
    mounted = ready.now()
    ready.sh("systemctl start var-cache-kvfleet.mount")
    ready.wait("well without a hand", ready.well)
    outcome = ready.end(injected)
    outcome.recovery_s = round(outcome.recovery_s - (mounted - injected), 1)
    record(
        "partition stopped (`systemctl stop var-cache-kvfleet.mount`), started again", outcome,
        f"both services stop with it (status: {said}) and start with it; the figure counts from the mount",
    )  # fmt: skip


def test_owner_of_the_cache_directory_changed(ready, record):
    tier = ready.sh(f"ls -d {DATA}/0/*").split()[0]
    outcome, reason = trouble(
        ready,
        f"chown root:root {tier} && chmod 0700 {tier}",
        f"chown kvfleet:kvfleet {tier} && chmod 0750 {tier}",
    )
    record("owner of the cache directory changed", outcome, f"status: {reason}; by hand: give it back")


def test_disk_reports_errors(ready, record, tmp_path):
    """The file under the disk is cut short and locked, so that accesses behind its end are I/O errors."""
    listed = json.loads(tool("list", "--json").stdout)
    disk = next(disk for host in listed if host["name"] == HOST for disk in host["disks"] if disk["role"] == "cache")
    path, part = disk["file"], f"{disk['by_id']}-part1"

    def outside(*words):
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    loop = outside("losetup", "--noheadings", "--output", "NAME", "--associated", path)

    fill(ready)
    ready.sh("sync")
    outside("cp", "--sparse=always", path, tmp_path / "copy")
    # without it the kernel reads zeros behind the end
    outside("losetup", "--direct-io=on", loop)
    ready.begin()
    injected = ready.now()
    outside("truncate", "--size=16M", path)
    outside("chattr", "+i", path)
    try:
        ready.wait("the watcher says it", lambda: ready.health(SERVER).get("state") == "degraded")
        said = ready.degraded(SERVER, "the cache disk reports errors")
        ready.wait("every prompt answered", lambda: int(ready.sh("wc -l < /root/load.jsonl")) >= 18)
        outcome = ready.end(injected)
        direct = ready.sh(
            f"find {DATA} -name '*.data' -exec dd if={{}} of=/dev/null iflag=direct \\; 2>&1", check=False
        )
        assert "Input/output error" in direct
    finally:
        try:
            # stopping only the target does not wait for its services, and their own view of the mount keeps the disk
            ready.sh(
                f"systemctl stop kvfleet.target {ENGINE} {SERVER};"
                f" for i in $(seq 30); do mountpoint -q {MOUNT} || break; umount {MOUNT}; sleep 1; done;"
                f" ! mountpoint -q {MOUNT}"
            )
        finally:
            outside("chattr", "-i", path)
            outside("cp", "--sparse=always", tmp_path / "copy", path)
            outside("losetup", "--direct-io=off", loop)
        ready.sh(f"blockdev --flushbufs {part}; e2fsck -fy {part}; test $? -le 2")
        ready.sh("systemctl start var-cache-kvfleet.mount kvfleet.target")
    ready.wait("well with the repaired disk", ready.well)
    record(
        "I/O errors of the cache disk", outcome,
        f"status: {said}; by hand: `systemctl stop var-cache-kvfleet.mount`, `e2fsck` or another disk, then"
        " `systemctl start var-cache-kvfleet.mount kvfleet.target`",
    )  # fmt: skip
