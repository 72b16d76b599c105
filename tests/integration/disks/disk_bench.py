"""A private host over real loop devices on sparse files, for the cache disk's tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparse import sparse_digest

from kvfleet.core.disk_actions import DiskRun
from kvfleet.core.disk_probe import HostPaths
from kvfleet.core.disks import DiskSettings
from kvfleet.core.units import MIB


def sh(*argv: str, check: bool = True, stdin: str = "") -> str:
    done = subprocess.run(argv, capture_output=True, text=True, input=stdin, check=False)
    assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclass
class Disk:
    """One loop device with a serial of its own, known by its link."""

    file: Path
    node: str
    link: Path
    serial: str
    #: bytes [from, to) into which their holder writes of its own accord (an active swap area): left out of the checksum
    in_use: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        return Path(self.node).name

    @property
    def device(self) -> str:
        return f"/dev/disk/by-id/{self.link.name}"

    def checksum(self) -> str:
        """Sum of the whole disk but :attr:`in_use`, read from the backing file, where no cache hides anything."""
        with Path(self.node).open("rb") as device:
            os.fsync(device.fileno())
        return sparse_digest(self.file, self.in_use)

    def write(self, offset: int, data: bytes) -> None:
        with Path(self.node).open("r+b", buffering=0) as handle:
            handle.seek(offset)
            handle.write(data)
            os.fsync(handle.fileno())

    def partitions(self) -> None:
        """Let the kernel know the table; kernels without a parser need to be told."""
        sh("partx", "--add", self.node, check=False)

    def parts(self) -> list[str]:
        return sorted(f"/dev/{child.name}" for child in Path("/sys/block", self.name).glob(f"{self.name}p*"))


@dataclass
class Bench:
    """A private host: its own by-id folder, records, units and machine id over the machine's real devices."""

    root: Path
    disks: list[Disk] = field(default_factory=list)
    paths: HostPaths = field(default_factory=HostPaths)
    mounted: list[Path] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    kept: str = ""

    def disk(self, size_mib: int = 384, serial: str = "", read_only: bool = False, sector_bytes: int = 512) -> Disk:
        serial = serial or f"KVTEST{len(self.disks) + 1:02d}"
        file = self.root / f"disk{len(self.disks) + 1}.img"
        file.touch()
        os.truncate(file, size_mib * MIB)
        options = ["--read-only"] if read_only else []
        node = sh("losetup", "--find", "--show", f"--sector-size={sector_bytes}", *options, str(file)).strip()
        link = self.root / "by-id" / f"nvme-QEMU_NVMe_Ctrl_{serial}"
        link.unlink(missing_ok=True)
        link.symlink_to(node)
        disk = Disk(file, node, link, serial)
        self.disks.append(disk)
        return disk

    @property
    def mount_point(self) -> Path:
        return self.root / "var" / "cache"

    def settings(self, disk: Disk, **changes: object) -> DiskSettings:
        values: dict[str, object] = {
            "device": disk.device,
            "serial": disk.serial,
            "mount_point": str(self.mount_point),
            "owner": "daemon",
            "group": "daemon",
            **changes,
        }
        return DiskSettings(**values)  # type: ignore[arg-type]

    def run(self, disk: Disk, **changes: object) -> DiskRun:
        from kvfleet.core.command import run_command

        check_mode = bool(changes.pop("check_mode", False))
        return DiskRun(self.settings(disk, **changes), run_command, self.paths, check_mode=check_mode)

    def keep(self, text: str) -> None:
        """Put a file on the mounted cache that must survive, and let the file system come to rest."""
        (self.mount_point / "data" / "kept").write_text(text)
        self.kept = text
        sh("mount", "-o", "remount,noinit_itable", str(self.mount_point), check=False)
        os.sync()

    def background(self, argv: list[str], ready: str) -> subprocess.Popen[str]:
        """Start a process that lives until the test ends; wait for its line ``ready``."""
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == ready
        return process

    def close(self) -> None:
        """Give everything back, whatever state a test left behind."""
        for process in self.processes:
            process.kill()
            process.wait()
        for handle in self.handles:
            with contextlib.suppress(OSError):
                os.close(handle)
        for mount_point in self.mounted:
            subprocess.run(["umount", "--lazy", str(mount_point)], check=False, capture_output=True)
        for node in self.loops:
            subprocess.run(["losetup", "--detach", node], check=False, capture_output=True)
        for disk in self.disks:
            with contextlib.suppress(Exception):
                self.release(disk)

    def release(self, disk: Disk) -> None:
        """Unmount, forget the partitions, detach; a partition that outlives its disk would write into the next one."""
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            mount_point, source = line.split()[4], line.partition(" - ")[2].split()[1]
            if source == disk.node or source.startswith(disk.node + "p"):
                until(lambda where=mount_point: sh("umount", where, check=False) == "" and not os.path.ismount(where))
        for node in (*disk.parts(), disk.node):
            subprocess.run(["swapoff", node], check=False, capture_output=True)

        def no_partitions() -> bool:
            subprocess.run(["partx", "--delete", disk.node], check=False, capture_output=True)
            return not disk.parts()

        until(no_partitions)
        subprocess.run(["losetup", "--detach", disk.node], check=False, capture_output=True)
        until(lambda: str(disk.file) not in sh("losetup", "--list", "--noheadings", "--output", "BACK-FILE"))


def until(done: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until ``done``; the caller's next step shows if it never came."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
