"""Throw-away hosts for real: up, ssh, disks, reboot, swap, trim, crash, down. Needs root; some ten seconds a test.

sudo .venv/bin/pytest tests/integration/testhost             # container hosts
sudo .venv/bin/pytest tests/integration/testhost --qemu      # also the virtual machine: minutes
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTHOST = str(Path(__file__).resolve().parents[3] / "scripts" / "testhost")
STATE = Path("/var/tmp/kvfleet-testhost-integration")
ENV = {**os.environ, "KVFLEET_TESTHOST_STATE": str(STATE)}

pytestmark = pytest.mark.root


def tool(*words: str, check: bool = True) -> str:
    done = subprocess.run([TESTHOST, *words], env=ENV, capture_output=True, text=True, check=False)
    if check:
        assert done.returncode == 0, done.stderr
    return done.stdout if check else done.stderr


def on_host(name: str, command: str) -> str:
    return tool("ssh", name, command).strip()


def leftovers() -> dict[str, list[str]]:
    """Everything on this machine that could belong to a host of this state folder, seen without the tool."""
    loops = json.loads(subprocess.check_output(["losetup", "--list", "--json"], text=True) or "{}")
    found = {
        "loop devices": [loop["name"] for loop in loops.get("loopdevices", []) if str(STATE) in loop["back-file"]],
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(STATE) in line],
        "namespaces": [path.name for path in Path("/run/netns").glob("th-it*")],
        "cgroups": [str(path) for path in Path("/sys/fs/cgroup").glob("**/th-it*")],
        "files": [str(path) for path in STATE.glob("it*")],
    }
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(STATE).encode() in words:
                processes.append(words.replace(b"\0", b" ").decode())
    return {key: value for key, value in {**found, "processes": processes}.items() if value}


@pytest.fixture
def name() -> Iterator[str]:
    host = f"it{os.getpid() % 10000}"
    assert leftovers() == {}
    yield host
    tool("down", host)
    assert leftovers() == {}


def disks_of(name: str) -> list[dict[str, Any]]:
    (host,) = [host for host in json.loads(tool("list", "--json")) if host["name"] == name]
    return list(host["disks"])


def allocated(name: str, role: str) -> int:
    rows = json.loads(tool("disk-usage", name, "--json"))
    return next(int(row["allocated_bytes"]) for row in rows if row["role"] == role)


def boot_id(name: str) -> str:
    return on_host(name, "cat /proc/sys/kernel/random/boot_id")


FORMAT = """set -e
apt-get update -qq >/dev/null 2>&1
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gdisk >/dev/null 2>&1
sgdisk -n 1:0:0 {disk} >/dev/null
for i in $(seq 100); do [ -b {disk}-part1 ] && break; sleep 0.1; done
mkfs.ext4 -q -m 0 {disk}-part1
mkdir -p /mnt/cache
echo "UUID=$(blkid -s UUID -o value {disk}-part1) /mnt/cache ext4 noatime 0 2" >> /etc/fstab
systemctl daemon-reload
systemctl start mnt-cache.mount
echo kept > /mnt/cache/mark
"""


def story(name: str, backend: str) -> None:
    """What every host must do, whatever it is made of."""
    tool("up", name, "--backend", backend, "--size", "1G")
    assert on_host(name, "systemctl is-system-running") == "running"
    system, cache = disks_of(name)
    links = set(on_host(name, "ls /dev/disk/by-id/ | cat").split())
    wanted = {Path(system["by_id"]).name, f"{Path(system['by_id']).name}-part1", Path(cache["by_id"]).name}
    assert wanted <= links
    assert on_host(name, f"lsblk --noheadings --nodeps --output SERIAL {cache['by_id']}") == cache["serial"]
    # the strict known_hosts of the record is what let us in
    config = tool("ssh-config", name).strip()
    assert "StrictHostKeyChecking yes" in Path(config).read_text()

    on_host(name, FORMAT.format(disk=cache["by_id"]))
    first = boot_id(name)
    tool("reboot", name)
    second = boot_id(name)
    assert second != first
    assert on_host(name, "cat /mnt/cache/mark") == "kept"
    where = on_host(name, "findmnt --noheadings --output SOURCE /mnt/cache")
    assert where == on_host(name, f"readlink -f {cache['by_id']}-part1")

    # the kernel's names change places, the links and the mount stay right
    names = on_host(name, f"readlink -f {system['by_id']} {cache['by_id']}").split()
    tool("swap", name)
    tool("reboot", name)
    assert on_host(name, f"readlink -f {system['by_id']} {cache['by_id']}").split() == names[::-1]
    assert on_host(name, "cat /mnt/cache/mark") == "kept"

    # discarded blocks leave the backing file
    on_host(name, "head -c 150M /dev/urandom > /mnt/cache/big && sync")
    full = allocated(name, "cache")
    on_host(name, "rm /mnt/cache/big && sync && systemctl start fstrim.service")
    assert full - allocated(name, "cache") >= 140 * 2**20
    assert on_host(name, "systemctl is-active fstrim.timer") == "active"
    assert "unchanged" in tool("verify-system-disk", name)

    # and a disk that was touched is told
    on_host(name, f"echo overwritten | dd of={system['by_id']} bs=1M seek=900 conv=notrunc,fsync status=none")
    assert "was changed" in tool("verify-system-disk", name, check=False)


def test_container_host(name: str) -> None:
    story(name, "nspawn")


def test_a_disk_that_is_missing_at_one_boot_is_back_at_the_next(name: str) -> None:
    tool("up", name, "--size", "1G")
    cache = disks_of(name)[1]
    on_host(name, f"echo kept | dd of={cache['by_id']} conv=fsync status=none")
    tool("unplug", name)
    assert on_host(name, f"readlink -e {cache['by_id']}"), "it goes at the next boot, not before"
    tool("reboot", name)
    assert cache["serial"] not in on_host(name, "ls /dev/disk/by-id /sys/block /run/testhost/disks; lsblk -o SERIAL")
    tool("plug", name)
    tool("reboot", name)
    assert on_host(name, f"head -c 5 {cache['by_id']}") == "kept"


def test_virtual_machine(name: str) -> None:
    story(name, "qemu")


def test_the_machines_own_disks_have_no_node_inside(name: str) -> None:
    tool("up", name)
    system, cache = (Path(on_host(name, f"readlink -f {disk['by_id']}")).name for disk in disks_of(name))
    nodes = set(on_host(name, "cd /dev && for node in *; do [ ! -b $node ] || echo $node; done").split())
    # a node of the container's own disks, and no other
    assert nodes == {system, f"{system}p1", cache}


def test_up_and_down_can_be_repeated(name: str) -> None:
    tool("up", name)
    first = boot_id(name)
    assert "add --reuse" in tool("up", name, check=False)
    tool("up", name, "--reuse")
    assert boot_id(name) == first
    tool("down", name)
    assert leftovers() == {}
    tool("down", name)


def test_a_host_that_died_is_started_again_with_its_files(name: str) -> None:
    tool("up", name)
    on_host(name, "echo kept > /root/mark && sync")
    for entry in Path("/proc").iterdir():
        # what a restart of the machine or the kernel's memory killer would do, in the worst order
        if entry.name.isdigit():
            try:
                marked = f"KVFLEET_TESTHOST_HOST={STATE}/{name}".encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if marked:
                os.kill(int(entry.name), signal.SIGKILL)
    assert "is stopped" in tool("up", name, check=False)
    tool("up", name, "--reuse")
    assert on_host(name, "cat /root/mark") == "kept"


def test_a_host_whose_folder_was_deleted_can_be_removed(name: str) -> None:
    tool("up", name)
    folder = STATE / name
    subprocess.run(["umount", "--lazy", str(folder / "root"), str(folder / "lower")], check=True)
    shutil.rmtree(folder)
    assert leftovers() != {}
    tool("down", name)
    assert leftovers() == {}


def test_a_host_that_powered_off_is_stopped_and_starts_again(name: str) -> None:
    tool("up", name)
    first = boot_id(name)
    tool("ssh", name, "systemctl poweroff", check=False)
    for _ in range(100):
        (host,) = [host for host in json.loads(tool("list", "--json")) if host["name"] == name]
        if host["state"] == "stopped":
            break
        time.sleep(0.2)
    assert host["state"] == "stopped"
    tool("up", name, "--reuse")
    assert boot_id(name) != first


@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.6, 1.0])
def test_a_killed_up_leaves_nothing_that_the_next_one_does_not_clean(name: str, after_s: float) -> None:
    first = subprocess.Popen([TESTHOST, "up", name], env=ENV, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    first.kill()
    first.wait()
    tool("up", name, "--reuse")
    assert on_host(name, "systemctl is-system-running") == "running"


def test_two_hosts_side_by_side(name: str) -> None:
    other = f"{name}b"
    runs = [subprocess.Popen([TESTHOST, "up", host], env=ENV) for host in (name, other)]
    try:
        assert [run.wait() for run in runs] == [0, 0]
        assert on_host(name, "hostname") == name
        assert on_host(other, "hostname") == other
        tool("reboot", other)
        assert on_host(name, "systemctl is-system-running") == "running"
    finally:
        tool("down", other)
