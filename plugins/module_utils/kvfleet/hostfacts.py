"""Describe a host: GPUs, RAM, NUMA, disks, ports, versions. Whatever cannot be read becomes null and says why.

Files are read below ``root`` and tools run through the given runner, so that recorded hosts replay in tests.
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any, Callable

from . import gpus
from .command import CommandResult, CommandRunner, run_command

_NVIDIA_TIMEOUT_S = 20.0
_LSBLK_COLUMNS = "NAME,PATH,TYPE,SIZE,ROTA,RM,RO,MODEL,SERIAL,WWN,TRAN,FSTYPE,MOUNTPOINTS,LOG-SEC,PHY-SEC,DISC-MAX"
#: Every unit of ours; what they hold is not foreign use.
_OUR_UNIT = re.compile(r"kvfleet-[A-Za-z0-9:_.\\@-]+\.service")


def gather(
    run: CommandRunner,
    root: str = "/",
    shm_bytes: Callable[[], int | None] | None = None,
) -> dict[str, Any]:
    """Return the host description of docs/architecture.md.

    ``run`` starts tools (``nvidia-smi``, ``lsblk``); ``root`` is where ``/proc``, ``/sys``, ``/etc`` and ``/dev`` are;
    ``shm_bytes`` replaces the question for the size of ``/dev/shm``. Never raises for what is missing: the field is
    ``None`` or empty and ``unavailable`` has ``{"field", "reason"}``.
    """
    probe = _Probe(run, Path(root))
    processes = probe.our_processes()
    memory = probe.memory()
    system = probe.os_release()
    host: dict[str, Any] = {
        "hostname": probe.hostname(),
        "gpus": probe.gpus(),
        "driver_version": probe.driver_version,
        "memory": memory,
        "numa": probe.numa(),
        "cpus": probe.cpus(),
        "disks": probe.disks(),
        "shm_bytes": (shm_bytes or probe.shm_bytes)(),
        "python": platform.python_version(),
        "pythons": probe.pythons(),
        "glibc": probe.glibc(),
        "kernel": probe.kernel(),
        "os": system.get("PRETTY_NAME") or None,
        "os_id": system.get("ID") or None,
        "os_version": system.get("VERSION_ID") or None,
        "machine": platform.machine(),
        "hypervisor": probe.hypervisor(),
        "kvfleet": probe.our_memory(processes),
        "listeners": probe.listeners(),
        "unavailable": probe.unavailable,
    }
    if host["shm_bytes"] is None:
        probe.missing("shm_bytes", "no file system is mounted at /dev/shm")
    if not system:
        probe.missing("os", "/etc/os-release cannot be read")
    return host


def listeners(root: str = "/") -> list[dict[str, Any]]:
    """TCP ports that somebody listens on: ``{"port", "address", "process", "unit", "pid"}``, as ``ss -ltnp`` has them.

    The owner is known where this user may see it. IPv6 addresses other than any and loopback are called ``ipv6``.
    """
    return _Probe(run_command, Path(root)).listeners()


class _Probe:
    """One look at one host."""

    def __init__(self, run: CommandRunner, root: Path) -> None:
        self.run = run
        self.root = root
        self.unavailable: list[dict[str, str]] = []
        self.driver_version: str | None = None

    def missing(self, field: str, reason: str) -> None:
        """Note that ``field`` is not known and why."""
        self.unavailable.append({"field": field, "reason": reason})

    def text(self, path: str) -> str | None:
        """Text of a file below the root; ``None`` when it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Names in a directory below the root, sorted; empty when there is none."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def hostname(self) -> str:
        """The kernel's host name."""
        return (self.text("proc/sys/kernel/hostname") or platform.node()).strip()

    def kernel(self) -> str:
        """The running kernel's release."""
        return (self.text("proc/sys/kernel/osrelease") or platform.release()).strip()

    def os_release(self) -> dict[str, str]:
        """The assignments of ``/etc/os-release``."""
        found = {}
        for line in (self.text("etc/os-release") or self.text("usr/lib/os-release") or "").splitlines():
            key, equals, value = line.partition("=")
            if equals and key.isidentifier():
                found[key] = value.strip().strip("\"'")
        return found

    def glibc(self) -> str | None:
        """Version of the C library that this interpreter runs on."""
        try:
            answer = os.confstr("CS_GNU_LIBC_VERSION") or ""
        except (ValueError, OSError):
            answer = ""
        if answer.startswith("glibc "):
            return answer.split(" ", 1)[1]
        self.missing("glibc", "the C library does not say that it is glibc")
        return None

    def pythons(self) -> list[dict[str, str]]:
        """Interpreters that the host has beside the one that runs this module, by their names (``python3.12``)."""
        found = {}
        for folder in ("usr/local/bin", "usr/bin"):
            for name in self.names(folder):
                match = re.fullmatch(r"python(3\.\d+)", name)
                if match and match.group(1) not in found:
                    found[match.group(1)] = {"version": match.group(1), "path": f"/{folder}/{name}"}
        return sorted(found.values(), key=lambda python: [int(part) for part in python["version"].split(".")])

    def cpus(self) -> int:
        """CPUs that are online."""
        text = self.text("proc/cpuinfo") or ""
        return len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or os.cpu_count() or 1

    def hypervisor(self) -> bool:
        """Whether the CPU says that it is virtual."""
        flags = re.search(r"^flags\s*:.*$", self.text("proc/cpuinfo") or "", re.MULTILINE)
        return bool(flags and " hypervisor" in flags.group(0))

    def memory(self) -> dict[str, int]:
        """RAM in bytes: total and available, within the limit of the container's control group if there is one."""
        fields = {}
        for line in (self.text("proc/meminfo") or "").splitlines():
            match = re.match(r"(\w+):\s+(\d+)(?: kB)?", line)
            if match:
                fields[match.group(1)] = int(match.group(2))
        total, available = fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024
        if not total:
            self.missing("memory", "/proc/meminfo cannot be read")
        limit = (self.text("sys/fs/cgroup/memory.max") or "").strip()
        if limit.isdigit() and int(limit) < total:
            used = int((self.text("sys/fs/cgroup/memory.current") or "0").strip() or 0)
            cache = _stat_field(self.text("sys/fs/cgroup/memory.stat") or "", "inactive_file")
            total = int(limit)
            available = max(0, min(available, total - max(0, used - cache)))
        return {
            "total_bytes": total,
            "available_bytes": available,
            "hugepages_bytes": fields.get("HugePages_Total", 0) * fields.get("Hugepagesize", 0) * 1024,
        }

    def numa(self) -> list[dict[str, Any]]:
        """The NUMA nodes that have memory."""
        nodes = []
        for name in self.names("sys/devices/system/node"):
            match = re.fullmatch(r"node(\d+)", name)
            if not match:
                continue
            folder = f"sys/devices/system/node/{name}"
            total = re.search(r"MemTotal:\s+(\d+) kB", self.text(f"{folder}/meminfo") or "")
            if total and int(total.group(1)):
                cpus = (self.text(f"{folder}/cpulist") or "").strip()
                nodes.append({"node": int(match.group(1)), "cpus": cpus, "memory_bytes": int(total.group(1)) * 1024})
        if not nodes:
            self.missing("numa", "the kernel shows no NUMA nodes")
        return sorted(nodes, key=lambda node: int(node["node"]))

    def shm_bytes(self) -> int | None:
        """Size of the file system at ``/dev/shm``."""
        path = self.root / "dev/shm"
        try:
            status = os.statvfs(path)
        except OSError:
            return None
        return status.f_blocks * status.f_frsize

    # --- GPUs ---

    def gpus(self) -> list[dict[str, Any]]:
        """GPUs that the driver shows, with their place in the machine; an empty list on a CPU host."""
        cards = self._nvidia_pci()
        fields: tuple[str, ...] = gpus.QUERY_FIELDS
        answer = self._query(fields)
        if "is not a valid field" in answer.stdout + answer.stderr:
            fields = gpus.BASIC_FIELDS
            answer = self._query(fields)
        found = gpus.parse_query(answer.stdout, fields)
        if not answer.ok or not found:
            reason = gpus.explain_failure(answer.returncode, answer.stdout + "\n" + answer.stderr)
            if cards or answer.returncode != 127:
                count = f"; the PCI bus has {len(cards)} NVIDIA GPU(s)" if cards else ""
                self.missing("gpus", reason + count)
            if answer.returncode == 127:
                self.missing("driver_version", reason)
        elif "Unable to determine the device handle" in answer.stdout + answer.stderr:
            self.missing("gpus", gpus.explain_failure(answer.returncode, answer.stderr + "\n" + answer.stdout))
        self.driver_version = next((gpu["driver_version"] for gpu in found if gpu["driver_version"]), None)
        if self.driver_version is None:
            loaded = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", self.text("proc/driver/nvidia/version") or "")
            self.driver_version = loaded.group(1) if loaded else None
        seen = {gpu["pci_bus_id"] for gpu in found}
        lost = [card for card in cards if card not in seen]
        if found and lost:
            self.missing("gpus", f"the driver does not show the GPU(s) at {', '.join(lost)}")
        if any(gpu["mig"] for gpu in found):
            listed = gpus.parse_list(self.run(["nvidia-smi", "-L"], timeout_s=_NVIDIA_TIMEOUT_S).stdout)
            for gpu in found:
                gpu["mig_devices"] = listed.get(gpu["uuid"], [])
        for gpu in found:
            node = (self.text(f"sys/bus/pci/devices/{gpu['pci_bus_id']}/numa_node") or "").strip()
            gpu["numa_node"] = int(node) if node.isdigit() else None
            del gpu["driver_version"]
        return found

    def _query(self, fields: tuple[str, ...]) -> CommandResult:
        return self.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            timeout_s=_NVIDIA_TIMEOUT_S,
        )

    def _nvidia_pci(self) -> list[str]:
        """PCI addresses of NVIDIA's display and 3D controllers."""
        cards = []
        for address in self.names("sys/bus/pci/devices"):
            folder = f"sys/bus/pci/devices/{address}"
            if (self.text(f"{folder}/vendor") or "").strip() == "0x10de" and (
                self.text(f"{folder}/class") or ""
            ).startswith("0x03"):
                cards.append(address)
        return cards

    # --- disks ---

    def disks(self) -> list[dict[str, Any]]:
        """Whole disks with their stable names; nothing is opened or written."""
        answer = self.run(["lsblk", "--json", "--bytes", "--tree", "-o", _LSBLK_COLUMNS], timeout_s=30.0)
        if not answer.ok:
            answer = self.run(
                ["lsblk", "--json", "--bytes", "-o", _LSBLK_COLUMNS.replace("MOUNTPOINTS", "MOUNTPOINT")],
                timeout_s=30.0,
            )
        try:
            devices = json.loads(answer.stdout)["blockdevices"] if answer.ok else None
        except (ValueError, KeyError):
            devices = None
        if devices is None:
            self.missing(
                "disks", f"lsblk gave no list: {(answer.stderr or answer.stdout).strip() or answer.returncode}"
            )
            return []
        links = self._by_id()
        disks = []
        for device in devices:
            if device.get("type") not in ("disk", "loop") or not _integer(device.get("size")):
                continue
            name = str(device["name"])
            mounts = sorted(_mountpoints(device))
            if device["type"] == "loop" and not links.get(name):
                continue
            sysfs = f"sys/block/{name}/device"
            disks.append(
                {
                    "name": name,
                    "path": device.get("path") or f"/dev/{name}",
                    "by_id": next(iter(links.get(name, [])), None),
                    "by_ids": links.get(name, []),
                    "serial": device.get("serial") or (self.text(f"{sysfs}/serial") or "").strip() or None,
                    "model": (device.get("model") or self.text(f"{sysfs}/model") or "").strip() or None,
                    "size_bytes": _integer(device["size"]),
                    "rotational": _truth(device.get("rota")),
                    "removable": _truth(device.get("rm")),
                    "read_only": _truth(device.get("ro")),
                    "transport": device.get("tran"),
                    "logical_sector_bytes": _integer(device.get("log-sec")),
                    "physical_sector_bytes": _integer(device.get("phy-sec")),
                    "discard_max_bytes": _integer(device.get("disc-max")),
                    "filesystem": device.get("fstype"),
                    "mountpoints": mounts,
                    "partitions": len(device.get("children") or []),
                }
            )
        return disks

    def _by_id(self) -> dict[str, list[str]]:
        """``/dev/disk/by-id`` links by kernel name, the most telling first (NVMe and ATA names before WWNs)."""
        links: dict[str, list[str]] = {}
        folder = self.root / "dev/disk/by-id"
        for name in self.names("dev/disk/by-id"):
            try:
                target = (folder / name).readlink().name
            except OSError:
                continue
            links.setdefault(target, []).append(f"/dev/disk/by-id/{name}")
        for names in links.values():
            names.sort(
                key=lambda link: (Path(link).name.startswith(("wwn-", "nvme-eui", "nvme-nvme.", "nvme-uuid")), link)
            )
        return links

    # --- what runs already ---

    def our_processes(self) -> dict[str, list[int]]:
        """Process ids of our units, by unit (from the control groups; ids only, nothing is signalled)."""
        units: dict[str, list[int]] = {}
        for name in self.names("proc"):
            if not name.isdigit():
                continue
            unit = _unit_of(self.text(f"proc/{name}/cgroup") or "")
            if unit:
                units.setdefault(unit, []).append(int(name))
        return units

    def our_memory(self, processes: dict[str, list[int]]) -> dict[str, Any]:
        """RAM in bytes that our running units hold and would give back: anonymous and shared memory of their groups."""
        total = 0
        for unit, pids in processes.items():
            group = (self.text(f"proc/{pids[0]}/cgroup") or "").strip().rsplit("::", 1)[-1]
            folder = group[: group.find(unit) + len(unit)] if unit in group else group
            stat = self.text(f"sys/fs/cgroup/{folder.lstrip('/')}/memory.stat")
            if stat:
                total += _stat_field(stat, "anon") + _stat_field(stat, "shmem")
            else:
                total += sum(self._resident(pid) for pid in pids)
        return {"units": sorted(processes), "memory_bytes": total}

    def _resident(self, pid: int) -> int:
        status = self.text(f"proc/{pid}/status") or ""
        match = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return int(match.group(1)) * 1024 if match else 0

    def listeners(self) -> list[dict[str, Any]]:
        """TCP ports that somebody listens on, with the owner where this user may see it."""
        sockets: dict[str, dict[str, Any]] = {}
        for table in ("proc/net/tcp", "proc/net/tcp6"):
            for line in (self.text(table) or "").splitlines()[1:]:
                cells = line.split()
                if len(cells) > 9 and cells[3] == "0A":
                    address, _, port = cells[1].rpartition(":")
                    sockets[cells[9]] = {
                        "port": int(port, 16),
                        "address": _address(address),
                        "process": None,
                        "unit": None,
                        "pid": None,
                    }
        self._owners(sockets)
        unique = {(entry["port"], entry["address"]): entry for entry in sockets.values()}
        return [unique[key] for key in sorted(unique)]

    def _owners(self, sockets: dict[str, dict[str, Any]]) -> None:
        open_inodes = set(sockets)
        for name in self.names("proc"):
            if not open_inodes:
                return
            if not name.isdigit():
                continue
            try:
                descriptors = list((self.root / "proc" / name / "fd").iterdir())
            except OSError:
                continue
            for descriptor in descriptors:
                try:
                    target = str(descriptor.readlink())
                except OSError:
                    continue
                inode = target[8:-1] if target.startswith("socket:[") else ""
                if inode in open_inodes:
                    open_inodes.discard(inode)
                    sockets[inode]["pid"] = int(name)
                    sockets[inode]["process"] = (self.text(f"proc/{name}/comm") or "").strip() or None
                    sockets[inode]["unit"] = _unit_of(self.text(f"proc/{name}/cgroup") or "", any_unit=True)


def _unit_of(cgroup: str, any_unit: bool = False) -> str | None:
    """The systemd service of a process from its ``/proc/<pid>/cgroup``; only ours unless ``any_unit``."""
    ours = _OUR_UNIT.search(cgroup)
    if ours:
        return ours.group(0)
    if any_unit:
        other = re.findall(r"([^/\s]+\.service)", cgroup)
        return other[-1] if other else None
    return None


def _stat_field(text: str, name: str) -> int:
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def _address(text: str) -> str:
    """An address of ``/proc/net/tcp``: ``0100007F`` is ``127.0.0.1``; IPv6 is told apart as any, loopback or other."""
    if len(text) == 8:
        return ".".join(str(int(text[index : index + 2], 16)) for index in (6, 4, 2, 0))
    if set(text) == {"0"}:
        return "::"
    return "::1" if text.endswith("01000000") and set(text[:-8]) == {"0"} else "ipv6"


def _mountpoints(device: dict[str, Any]) -> set[str]:
    found = {mount for mount in (device.get("mountpoints") or [device.get("mountpoint")]) if mount}
    for child in device.get("children") or []:
        found |= _mountpoints(child)
    return found


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _truth(value: Any) -> bool:
    return value is True or str(value) in ("1", "true")
