"""What the host does while a load runs: its disks, its memory, its GPUs, and where the cache's files really lie."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from .command import CommandRunner

#: /proc/diskstats counts in sectors of this size, whatever the device's own is (Documentation/admin-guide/iostats.rst)
SECTOR_BYTES = 512
#: flag of an open file that bypasses the page cache, as /proc/<pid>/fdinfo shows it (x86_64 and aarch64 differ)
_O_DIRECT = getattr(os, "O_DIRECT", 0o40000)


@dataclass(frozen=True)
class DiskCounters:
    """One line of /proc/diskstats: bytes read and written, and milliseconds with at least one request in flight."""

    read_bytes: int
    written_bytes: int
    busy_ms: int
    queue_ms: int


def parse_diskstats(text: str) -> dict[str, DiskCounters]:
    """Counters by kernel name."""
    disks: dict[str, DiskCounters] = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) >= 14:
            disks[parts[2]] = DiskCounters(
                int(parts[5]) * SECTOR_BYTES, int(parts[9]) * SECTOR_BYTES, int(parts[12]), int(parts[13])
            )
    return disks


def disk_of(path: str, sys_block: Path = Path("/sys/dev/block")) -> str:
    """Kernel name of the block device (partition or whole disk) that holds ``path``; "" for memory and network."""
    try:
        device = Path(path).stat().st_dev
        return (sys_block / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True).name
    except OSError:
        return ""


def iowait_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Share (0 to 1) of processor time that waited for disks between two readings of /proc/stat's first line."""
    spent = [late - early for early, late in zip(before, after)]
    total = sum(spent[:8])
    return spent[4] / total if total > 0 else 0.0


def parse_gpus(text: str) -> list[dict[str, float]]:
    """nvidia-smi's index, memory.used and utilization.gpu as CSV without units; ``[N/A]`` is left out."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3:
            values = {}
            for name, field in zip(("index", "memory_mib", "utilization_percent"), fields):
                try:
                    values[name] = float(field)
                except ValueError:
                    continue
            gpus.append(values)
    return gpus


@dataclass(frozen=True)
class OpenCacheFile:
    """A cache file that a server holds open: the device it lies on and whether it bypasses the page cache."""

    path: str
    device: int
    direct: bool


def open_cache_files(pid: int, proc: Path = Path("/proc")) -> list[OpenCacheFile]:
    """Regular ``.data`` files that process ``pid`` holds open now; empty when it is gone or not ours to look at."""
    found = []
    try:
        handles = list((proc / str(pid) / "fd").iterdir())
    except OSError:
        return []
    for handle in handles:
        try:
            target = str(handle.readlink())
            if not target.partition(" (deleted)")[0].partition(".tmp")[0].endswith(".data"):
                continue
            flags = (proc / str(pid) / "fdinfo" / handle.name).read_text()
            device = handle.stat().st_dev
        except OSError:
            # closed while we looked
            continue
        octal = next((line.split()[1] for line in flags.splitlines() if line.startswith("flags:")), "0")
        found.append(OpenCacheFile(target, device, bool(int(octal, 8) & _O_DIRECT)))
    return found


class HostProbe:
    """Samples the host; every call returns rates since the one before, so the first has none."""

    def __init__(
        self,
        base_paths: Sequence[str],
        server_pids: Sequence[int],
        with_gpus: bool,
        run: CommandRunner,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        """``base_paths``: directories of the disk tiers; ``server_pids``: their servers."""
        self._pids = list(server_pids)
        self._with_gpus = with_gpus
        self._run = run
        self._clock = clock
        self._proc = proc
        self.root_disk = disk_of("/")
        self.cache_disks = sorted({disk_of(path) for path in base_paths} - {""})
        self.root_device = Path("/").stat().st_dev
        self._last: tuple[float, dict[str, DiskCounters], list[int]] | None = None
        #: devices and O_DIRECT flags of all cache files seen open so far
        self.seen_devices: set[int] = set()
        self.seen_direct: set[bool] = set()

    def __call__(self) -> dict[str, Any]:
        """One sample; rates in bytes per second and percent."""
        now = self._clock()
        disks = parse_diskstats((self._proc / "diskstats").read_text())
        cpu = [int(field) for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
        sample: dict[str, Any] = {
            "load_1min": os.getloadavg()[0],
            "available_bytes": self._available_bytes(),
            "root_used_bytes": used_bytes("/"),
        }
        if self._last is not None:
            then, disks_before, cpu_before = self._last
            elapsed_s = max(1e-3, now - then)
            sample["iowait_percent"] = round(100 * iowait_share(cpu_before, cpu), 1)
            for label, names in (("cache_disk", self.cache_disks), ("root_disk", [self.root_disk])):
                sample.update(_rates(label, names, disks_before, disks, elapsed_s))
        self._last = (now, disks, cpu)
        for pid in self._pids:
            for file in open_cache_files(pid, self._proc):
                self.seen_devices.add(file.device)
                self.seen_direct.add(file.direct)
        if self._with_gpus:
            shown = self._run(
                ["nvidia-smi", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader,nounits"],
                timeout_s=10,
            )
            sample["gpus"] = parse_gpus(shown.stdout) if shown.ok else []
        return sample

    def cache_disk_counters(self) -> dict[str, int]:
        """Bytes read from and written to the devices of the disk tiers since boot."""
        disks = parse_diskstats((self._proc / "diskstats").read_text())
        return {
            "read_bytes": sum(disks[name].read_bytes for name in self.cache_disks if name in disks),
            "written_bytes": sum(disks[name].written_bytes for name in self.cache_disks if name in disks),
        }

    def _available_bytes(self) -> int:
        for line in (self._proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return 0


def _rates(
    label: str,
    names: Sequence[str],
    before: Mapping[str, DiskCounters],
    after: Mapping[str, DiskCounters],
    elapsed_s: float,
) -> dict[str, float]:
    """Rates of the named disks together; utilisation is the busiest one's."""
    known = [(before[name], after[name]) for name in names if name in before and name in after]
    if not known:
        return {}
    return {
        f"{label}_read_bytes_per_s": round(
            sum(late.read_bytes - early.read_bytes for early, late in known) / elapsed_s
        ),
        f"{label}_written_bytes_per_s": round(
            sum(late.written_bytes - early.written_bytes for early, late in known) / elapsed_s
        ),
        f"{label}_busy_percent": round(
            max(min(100.0, (late.busy_ms - early.busy_ms) / elapsed_s / 10) for early, late in known), 1
        ),
        f"{label}_queue": round(sum(late.queue_ms - early.queue_ms for early, late in known) / elapsed_s / 1000, 2),
    }


def used_bytes(path: str) -> int:
    """Bytes in use on the file system of ``path``."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def main_pids(units: Sequence[str], run: CommandRunner) -> list[int]:
    """Main processes of the units that run."""
    pids = []
    for unit in units:
        shown = run(["systemctl", "show", "--property=MainPID", "--value", unit])
        text = shown.stdout.strip()
        if shown.ok and text.isdigit() and int(text) > 0:
            pids.append(int(text))
    return pids


def environment(run: CommandRunner, with_gpus: bool) -> dict[str, Any]:
    """What the figures were measured on: kernel, processor, memory, driver; nothing secret."""
    uname = os.uname()
    found: dict[str, Any] = {
        "kernel": uname.release,
        "machine": uname.machine,
        "cpus": os.cpu_count(),
        "cpu_model": "",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": "",
        "driver": None,
        "gpus": [],
    }
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            found["cpu_model"] = line.split(":", 1)[1].strip()
            break
    for line in _lines("/etc/os-release"):
        if line.startswith("PRETTY_NAME="):
            found["os"] = line.split("=", 1)[1].strip().strip('"')
    if with_gpus:
        shown = run(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"], timeout_s=30)
        rows = [line.split(",", 1) for line in shown.stdout.splitlines() if "," in line] if shown.ok else []
        found["driver"] = rows[0][0].strip() if rows else None
        found["gpus"] = [row[1].strip() for row in rows]
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
