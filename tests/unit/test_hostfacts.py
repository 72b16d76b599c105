"""Describing hosts from files and tool outputs: recorded cards, broken drivers, MIG, virtual machines, speed."""

import json
import os
import time
from pathlib import Path

import pytest

from kvfleet.core.command import CommandResult
from kvfleet.core.gpus import sysfs_address
from kvfleet.core.hostfacts import gather

DATA = Path(__file__).parent.parent / "data"
MEMINFO = """MemTotal:       65798412 kB
MemFree:            1000 kB
MemAvailable:   61234567 kB
HugePages_Total:       4
Hugepagesize:       2048 kB
"""
LSBLK = json.dumps(
    {
        "blockdevices": [
            {"name": "loop0", "path": "/dev/loop0", "type": "loop", "size": 4096, "rota": False},
            {"name": "sr0", "path": "/dev/sr0", "type": "rom", "size": 1024},
            {
                "name": "nvme0n1", "path": "/dev/nvme0n1", "type": "disk", "size": 960197124096, "rota": False,
                "rm": False, "ro": False, "model": "SAMSUNG MZQL2960HCJR-00A07", "serial": "S64FNE0R102938",
                "tran": "nvme",
                "log-sec": 512, "phy-sec": 4096, "disc-max": 2199023255040, "mountpoints": [None],
                "children": [
                    {"name": "nvme0n1p1", "mountpoints": ["/"]},
                    {"name": "nvme0n1p2", "mountpoints": ["/boot/efi"]},
                ],
            },
            {
                "name": "nvme1n1", "path": "/dev/nvme1n1", "type": "disk", "size": 1920383410176, "rota": "0",
                "mountpoint": None,
            },
        ]
    }
)  # fmt: skip


class Tools:
    """Answers commands as a recorded folder of tests/data/nvidia-smi says."""

    def __init__(self, case=None, lsblk=LSBLK):
        self.case = DATA / "nvidia-smi" / case if case else None
        self.lsblk = lsblk
        self.calls = []

    def __call__(self, argv, *, stdin=None, timeout_s=60.0):
        self.calls.append(list(argv))
        if argv[0] == "lsblk":
            return (
                CommandResult(0, self.lsblk, "")
                if self.lsblk is not None
                else CommandResult(127, "", "lsblk: not found")
            )
        if self.case is None:
            return CommandResult(127, "", "nvidia-smi: not found")
        if "-L" in argv:
            return CommandResult(0, (self.case / "list.txt").read_text(), "")
        rows = (self.case / "query.csv").read_text()
        fields = argv[1].split("=")[1].split(",")
        if "driver" not in rows.lower() and rows[:1].isdigit() and len(rows.splitlines()[0].split(", ")) < len(fields):
            return CommandResult(2, f'Field "{fields[-1]}" is not a valid field to query.\n\n', "")
        status = int((self.case / "status").read_text())
        return CommandResult(status, rows, (self.case / "query.err").read_text())


def write(root, path, text):
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/cpuinfo", "processor : 0\nflags : fpu avx512f\nprocessor : 1\n")
    write(tmp_path, "proc/sys/kernel/hostname", "gpu1\n")
    write(tmp_path, "proc/sys/kernel/osrelease", "6.8.0-60-generic\n")
    write(tmp_path, "etc/os-release", 'PRETTY_NAME="Ubuntu 24.04.2 LTS"\nID=ubuntu\nVERSION_ID="24.04"\n')
    for node, cpus in enumerate(("0-15", "16-31")):
        write(tmp_path, f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: 32899206 kB\n")
        write(tmp_path, f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
    by_id = tmp_path / "dev/disk/by-id"
    by_id.mkdir(parents=True)
    for link in ("wwn-0x1", "nvme-eui.0025", "nvme-SAMSUNG_MZQL21T9HCJR-00A07_S64GNE0T000001_1"):
        (by_id / link).symlink_to("../../nvme1n1")
    write(tmp_path, "sys/block/nvme1n1/device/serial", "S64GNE0T000001      \n")
    write(tmp_path, "usr/bin/python3.12", "")
    return tmp_path


def card(root, address, node, vendor="0x10de", kind="0x030200"):
    folder = f"sys/bus/pci/devices/{address}"
    write(root, f"{folder}/vendor", f"{vendor}\n")
    write(root, f"{folder}/class", f"{kind}\n")
    write(root, f"{folder}/numa_node", f"{node}\n")


def reasons(host, field):
    return [entry["reason"] for entry in host["unavailable"] if entry["field"] == field]


def test_memory_numa_disks_and_system(root):
    host = gather(Tools(), root=str(root), shm_bytes=lambda: 7)
    assert host["memory"] == {
        "total_bytes": 65798412 * 1024,
        "available_bytes": 61234567 * 1024,
        "hugepages_bytes": 4 * 2048 * 1024,
    }
    assert [(node["node"], node["cpus"]) for node in host["numa"]] == [(0, "0-15"), (1, "16-31")]
    assert (host["hostname"], host["kernel"], host["cpus"]) == ("gpu1", "6.8.0-60-generic", 2)
    assert (host["os"], host["os_id"], host["os_version"]) == ("Ubuntu 24.04.2 LTS", "ubuntu", "24.04")
    assert host["pythons"] == [{"version": "3.12", "path": "/usr/bin/python3.12"}]
    assert host["shm_bytes"] == 7
    assert host["hypervisor"] is False
    system, cache = host["disks"]
    assert system["mountpoints"] == ["/", "/boot/efi"]
    assert system["serial"] == "S64FNE0R102938"
    # lsblk without udev knows no serial: sysfs does; the model name is the link people should use
    assert cache["serial"] == "S64GNE0T000001"
    assert cache["by_id"] == "/dev/disk/by-id/nvme-SAMSUNG_MZQL21T9HCJR-00A07_S64GNE0T000001_1"
    assert len(cache["by_ids"]) == 3
    assert (cache["size_bytes"], cache["rotational"]) == (1920383410176, False)


def test_recorded_h200_of_a_virtual_machine_hide_their_node(root):
    for address in ("0000:00:06.0", "0000:00:07.0"):
        card(root, address, -1)
    write(root, "proc/cpuinfo", "processor : 0\nflags : fpu hypervisor\n")
    host = gather(Tools("h200x2-580.159.04"), root=str(root))
    assert [gpu["numa_node"] for gpu in host["gpus"]] == [None, None]
    assert host["driver_version"] == "580.159.04"
    assert host["hypervisor"] is True
    assert reasons(host, "gpus") == []


def test_gpus_of_two_nodes(root):
    for number, bus in enumerate(("07", "0f", "47", "4e", "87", "90", "b7", "bd")):
        card(root, f"0000:{bus}:00.0", number // 4)
    host = gather(Tools("a100x8-535.104.05"), root=str(root))
    assert [gpu["numa_node"] for gpu in host["gpus"]] == [0] * 4 + [1] * 4
    assert {"index", "uuid", "name", "memory_mib", "numa_node", "compute_capability", "pcie_gen", "pcie_width"} <= set(
        host["gpus"][0]
    )


def test_old_driver_is_asked_again_with_fewer_fields(root):
    tools = Tools("t4-470.223.02")
    host = gather(tools, root=str(root))
    assert [gpu["name"] for gpu in host["gpus"]] == ["Tesla T4"]
    assert host["driver_version"] == "470.223.02"
    assert sum(call[0] == "nvidia-smi" for call in tools.calls) == 2


def test_mig_is_named_with_its_devices(root):
    host = gather(Tools("mig-a100-525.147.05"), root=str(root))
    first, second = host["gpus"]
    assert (first["mig"], second["mig"]) == (True, False)
    assert [device["name"] for device in first["mig_devices"]] == ["1g.10gb", "1g.10gb"]


def test_one_lost_gpu_leaves_the_other(root):
    for address in ("0000:01:00.0", "0000:07:00.0"):
        card(root, address, 0)
    host = gather(Tools("one-of-two-lost"), root=str(root))
    assert [gpu["index"] for gpu in host["gpus"]] == [1]
    said = " ".join(reasons(host, "gpus"))
    assert "fallen off the bus" in said
    assert "0000:01:00.0" in said


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("all-lost", "fallen off the bus"),
        ("no-driver", "kernel module"),
        ("mismatch", "reboot"),
        ("no-devices", "no devices"),
    ],
)
def test_broken_drivers_never_fail_the_description(root, case, says):
    card(root, "0000:3b:00.0", 0)
    write(
        root,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
    )
    host = gather(Tools(case), root=str(root))
    assert host["gpus"] == []
    (reason,) = reasons(host, "gpus")
    assert says in reason
    assert "1 NVIDIA GPU" in reason
    assert host["driver_version"] == "580.95.05", "the loaded module still tells"


def test_cpu_host_is_no_fault(root):
    card(root, "0000:02:00.0", 0, vendor="0x1002")
    host = gather(Tools(), root=str(root))
    assert host["gpus"] == []
    assert reasons(host, "gpus") == []
    assert host["driver_version"] is None


def test_gpus_without_any_driver_are_noticed(root):
    card(root, "0000:3b:00.0", 0)
    host = gather(Tools(), root=str(root))
    assert "not installed; the PCI bus has 1 NVIDIA GPU" in reasons(host, "gpus")[0]


def test_missing_tools_and_files_are_listed(tmp_path):
    host = gather(Tools(lsblk=None), root=str(tmp_path), shm_bytes=lambda: None)
    assert {entry["field"] for entry in host["unavailable"]} >= {
        "memory",
        "numa",
        "disks",
        "shm_bytes",
        "os",
        "driver_version",
    }
    assert host["disks"] == []
    json.dumps(host)


def test_limit_of_a_container_is_the_ram(root):
    write(root, "sys/fs/cgroup/memory.max", f"{8 * 1024**3}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{3 * 1024**3}\n")
    write(root, "sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {1024**3}\n")
    memory = gather(Tools(), root=str(root))["memory"]
    assert memory["total_bytes"] == 8 * 1024**3
    assert memory["available_bytes"] == 6 * 1024**3
    write(root, "sys/fs/cgroup/memory.max", "max\n")
    assert gather(Tools(), root=str(root))["memory"]["total_bytes"] == 65798412 * 1024


def process(root, pid, cgroup, comm="vllm", sockets=(), anon_kb=0):
    write(root, f"proc/{pid}/cgroup", f"0::{cgroup}\n")
    write(root, f"proc/{pid}/comm", f"{comm}\n")
    write(root, f"proc/{pid}/status", f"Name: x\nRssAnon:\t {anon_kb} kB\n")
    folder = root / f"proc/{pid}/fd"
    folder.mkdir()
    for number, inode in enumerate(sockets):
        (folder / str(number)).symlink_to(f"socket:[{inode}]")


def listener(port, inode, address="0100007F"):
    zeros = "00000000:00000000 00:00000000 00000000     0        0"
    return f"   0: {address}:{port:04X} 00000000:0000 0A {zeros} {inode} 1\n"


def test_ports_and_their_owners(root):
    header = "  sl  local_address rem_address   st\n"
    established = listener(22, 9).replace(" 0A ", " 01 ")
    write(root, "proc/net/tcp", header + listener(8000, 11) + listener(80, 12, "00000000") + established)
    write(root, "proc/net/tcp6", header + listener(9100, 13, "0" * 32))
    process(root, 100, "/system.slice/system-kvfleet\\x2dvllm.slice/kvfleet-vllm@tiny.service", sockets=[11])
    process(root, 200, "/system.slice/nginx.service", "nginx", sockets=[12])
    found = {entry["port"]: entry for entry in gather(Tools(), root=str(root))["listeners"]}
    assert set(found) == {80, 8000, 9100}
    assert (found[8000]["unit"], found[8000]["address"], found[8000]["pid"]) == (
        "kvfleet-vllm@tiny.service",
        "127.0.0.1",
        100,
    )
    assert (found[80]["unit"], found[80]["process"], found[80]["address"]) == ("nginx.service", "nginx", "0.0.0.0")  # noqa: S104
    assert (found[9100]["address"], found[9100]["process"]) == ("::", None)


def test_memory_of_our_units_from_their_groups_or_their_processes(root):
    group = "/system.slice/kvfleet-lmcache@0.service"
    process(root, 100, group, "lmcache", anon_kb=1)
    process(root, 101, group + "/payload", "lmcache", anon_kb=1)
    process(root, 102, "/system.slice/kvfleet-vllm@a.service", anon_kb=2048)
    process(root, 103, "/system.slice/other.service", anon_kb=4096)
    write(root, f"sys/fs/cgroup{group}/memory.stat", "anon 1000\nfile 77\nshmem 500\n")
    ours = gather(Tools(), root=str(root))["kvfleet"]
    assert ours["units"] == ["kvfleet-lmcache@0.service", "kvfleet-vllm@a.service"]
    assert ours["memory_bytes"] == 1500 + 2048 * 1024


def test_bus_ids():
    assert sysfs_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert sysfs_address("0000000F:01:00.0") == "000f:01:00.0"


def test_eight_gpus_twentyfour_disks_two_thousand_processes_in_two_seconds(root):
    for number, bus in enumerate(("07", "0f", "47", "4e", "87", "90", "b7", "bd")):
        card(root, f"0000:{bus}:00.0", number // 4)
    disks = [
        {"name": f"nvme{n}n1", "path": f"/dev/nvme{n}n1", "type": "disk", "size": 1920383410176, "rota": False,
         "serial": f"S{n}", "children": [{"name": f"nvme{n}n1p1", "mountpoints": [None]}]}
        for n in range(24)
    ]  # fmt: skip
    for n in range(24):
        for kind in ("nvme-eui", "nvme-MODEL", "wwn"):
            (root / "dev/disk/by-id" / f"{kind}.{n}").symlink_to(f"../../nvme{n}n1")
    for pid in range(1000, 3000):
        process(root, pid, f"/system.slice/s{pid}.service", sockets=[pid * 10, pid * 10 + 1])
    write(root, "proc/net/tcp", "head\n" + "".join(listener(1024 + n, 10000 + 10 * n) for n in range(100)))
    write(root, "proc/net/tcp6", "head\n")
    start = time.perf_counter()
    host = gather(Tools("a100x8-535.104.05", json.dumps({"blockdevices": disks})), root=str(root))
    taken_s = time.perf_counter() - start
    assert (len(host["gpus"]), len(host["disks"]), len(host["listeners"])) == (8, 24, 100)
    assert taken_s < 2, f"{taken_s:.2f} s"


def test_this_machine_for_real():
    from kvfleet.core.command import run_command

    host = gather(run_command)
    with Path("/proc/meminfo").open() as lines:
        total = int(next(lines).split()[1]) * 1024
    assert 0 < host["memory"]["total_bytes"] <= total
    assert host["kernel"] == os.uname().release
    assert host["cpus"] == os.cpu_count()


def test_eight_gpus_and_24_disks_take_less_than_two_seconds(root):
    """The time of our own code: the tools' outputs are injected, so what remains is reading, parsing and /proc."""
    fields = "GPU-{0:08d}-aaaa-bbbb-cccc-ddddeeeeffff, NVIDIA H200, 143771, 0, 00000000:{0:02X}:00.0, 5, 16, 580.159.04"
    rows = [f"{index}, " + fields.format(index) + ", Disabled, 9.0, 616" for index in range(8)]
    names = [f"nvme{index}n1" for index in range(24)]
    for index in range(8):
        card(root, f"0000:{index:02x}:00.0", index // 4)
    for name in names:
        (root / f"dev/disk/by-id/nvme-DISK_{name}").symlink_to(f"../../{name}")
    devices = [
        {"name": name, "path": f"/dev/{name}", "type": "disk", "size": 1920383410176, "rota": False,
         "serial": f"S{name}", "model": "DISK"}
        for name in names
    ]  # fmt: skip

    def runner(argv, **_):
        if argv[0] == "lsblk":
            return CommandResult(0, json.dumps({"blockdevices": devices}), "")
        return CommandResult(0, "\n".join(rows) + "\n", "")

    start = time.perf_counter()
    host = gather(runner, root)
    seconds = time.perf_counter() - start
    assert (len(host["gpus"]), len(host["disks"])) == (8, 24)
    assert host["gpus"][7]["numa_node"] == 1
    print(f"host_facts: {seconds * 1000:.0f} ms")
    assert seconds < 2
