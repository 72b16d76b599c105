"""Carry a decision about the cache disk out, step by step, so that an end at any point loses nothing.

Before the first write the disk is read a second time and the decision must be the same. Each destructive command is
preceded by a check that the link still leads to the same disk. What was reached is kept in a record on the host
(``begun`` -> ``partitioned`` -> ``formatted`` -> ``ready``) whose UUIDs are chosen before they are written, so that
the next run can tell an unfinished format of ours from anybody else's data. mkfs is never repeated once
``formatted`` is written down, and nothing is mounted before that.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import mmap
import os
import pwd
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable

from .command import CommandResult, CommandRunner
from .disk_health import ask as ask_health
from .disk_probe import (
    HostPaths,
    machine_id,
    parse_export,
    parse_mountinfo,
    probe_disk,
    read_direct,
    read_record,
    record_path,
    resolve_disk,
)
from .disk_speed import measure as measure_speed
from .disks import (
    MARKER_NAME,
    PARTITION_NAME,
    PARTITION_TYPE_GUID,
    Decision,
    DiskProbe,
    DiskRecord,
    DiskSettings,
    Layout,
    decide,
    filesystem_finished,
)
from .findings import Finding, KvfleetError, refuse
from .health import HealthLimits, assess, check_firmware, endurance_days, parse_id_ctrl
from .mount_unit import device_unit_name, mount_unit_name, render_device_timeout, render_mount_unit, wanted_by
from .units import GIB, KIB, MIB

#: Bytes of the aligned O_DIRECT write that decides whether the tier may use it.
DIRECT_PROBE_BYTES = 64 * KIB
MKFS_TIMEOUT_S = 1200.0
_TOOLS = {
    "sgdisk": "gdisk",
    "partx": "util-linux",
    "wipefs": "util-linux",
    "blkid": "util-linux",
    "blkdiscard": "util-linux",
    "systemctl": "systemd",
}


def _no_step(name: str) -> None:
    """Default for the injected ``after_step``: nobody listens."""


@dataclass
class DiskRun:
    """One call on one disk: what it may use, and what it did. ``after_step`` hears each finished step's name."""

    settings: DiskSettings
    runner: CommandRunner
    paths: HostPaths = field(default_factory=HostPaths)
    after_step: Callable[[str], None] = _no_step
    check_mode: bool = False
    limits: HealthLimits = field(default_factory=HealthLimits)
    measure: str = "never"
    chunk_bytes: int = MIB
    steps: list[str] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    health: dict[str, Any] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)

    def did(self, name: str) -> None:
        """Note a finished step."""
        self.steps.append(name)
        self.after_step(name)

    def release(self) -> None:
        """Close what was held open."""
        while self.held:
            os.close(self.held.pop())


def _failed(step: str, words: str) -> KvfleetError:
    return refuse(
        "KVF-DISK-050",
        f"The step '{step}' failed: {words.strip().rstrip('.') or 'no message'}.",
        "Repair what it names and run again; the run goes on where this one ended.",
    )


def _words(done: CommandResult) -> str:
    return (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").replace("\n", "; ")


def _command(run: DiskRun, step: str, argv: Sequence[str], timeout_s: float = 120.0) -> CommandResult:
    done = run.runner(argv, timeout_s=timeout_s)
    if not done.ok:
        raise _failed(step, f"{' '.join(argv)}: {_words(done)}")
    return done


def write_file(path: Path, text: str, mode: int) -> bool:
    """Put ``text`` into ``path`` whole and durably (new file, synced, renamed over); ``False`` if it was there."""
    try:
        if path.read_text() == text and (path.stat().st_mode & 0o7777) == mode:
            return False
    except (OSError, UnicodeDecodeError):
        pass
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "w", encoding="utf-8") as handle:  # noqa: PTH123 - the file object is needed for fsync
            os.fchmod(handle.fileno(), mode)
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(fresh, path)  # noqa: PTH105
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return True


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _keep(run: DiskRun, record: DiskRecord) -> bool:
    folder = Path(run.paths.records)
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True, mode=0o755)
        folder.mkdir(exist_ok=True, mode=0o755)
    return write_file(record_path(record.serial, run.paths), _json(record.as_dict()), 0o640)


@contextlib.contextmanager
def _releasing(run: DiskRun) -> Iterator[None]:
    """Close held partitions at the end, however it comes."""
    try:
        yield
    finally:
        run.release()


@contextlib.contextmanager
def _lock(run: DiskRun) -> Iterator[None]:
    """One run at a time on a host."""
    Path(run.paths.lock).parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(run.paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refuse(
                "KVF-DISK-051",
                "Another run is working on this host's cache disk.",
                "Wait for it to end, then run again.",
            ) from error
        yield
    finally:
        os.close(handle)


# --------------------------------------------------------------------------------------------------- what is there


@dataclass(frozen=True)
class MountState:
    """What is mounted at the mount point now (the topmost mount); empty strings if nothing is."""

    major_minor: str = ""
    source: str = ""
    fstype: str = ""


def mounted_at(mount_point: str, paths: HostPaths) -> MountState:
    """The topmost mount at ``mount_point`` in this process's namespace."""
    state = MountState()
    for number, _root, where, fstype, source in parse_mountinfo(
        Path(paths.proc, "self", "mountinfo").read_text(errors="replace")
    ):
        if where == mount_point:
            state = MountState(number, source, fstype)
    return state


def _child(probe: DiskProbe, layout: Layout) -> tuple[str, str] | None:
    """Kernel name and major:minor of the partition that lies where ``layout`` says, or ``None``."""
    for part in probe.partitions:
        if part.start_bytes == layout.start_bytes and part.size_bytes == layout.partition_bytes:
            return part.kernel_name, part.major_minor
    return None


def _same_disk(run: DiskRun, step: str, expected: DiskProbe) -> DiskProbe:
    """Resolve the link again; refuse unless it is the very disk that was decided about."""
    now = resolve_disk(run.settings.device, run.paths)
    identity = ("resolve_error", "is_partition", "major_minor", "disk_sequence", "serial", "size_bytes", "model")
    changed = [name for name in identity if getattr(now, name) != getattr(expected, name)]
    if changed:
        shown = "; ".join(f"{name} was {getattr(expected, name)!r}, is {getattr(now, name)!r}" for name in changed)
        raise refuse(
            "KVF-DISK-052",
            f"Before the step '{step}' {run.settings.device} was no longer the same disk ({shown}); nothing more "
            "was written.",
            "Check the disk and its connection, then run again.",
        )
    return now


def _not_in_use(step: str, nodes: Sequence[str]) -> None:
    """The kernel's own word, right before a destructive command: nobody holds the device."""
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDONLY | os.O_EXCL))
        except OSError as error:
            raise refuse(
                "KVF-DISK-052",
                f"Before the step '{step}' {node} could not be opened exclusively ({error.strerror}); nothing more "
                "was written.",
                "Find what uses the disk, then run again.",
            ) from error


def read_health(run: DiskRun, probe: DiskProbe) -> list[Finding]:
    """Ask an NVMe drive how it is; fills ``run.health`` and warnings, returns reasons against a new cache there."""
    name = run.settings.device
    warnings = check_firmware(name, probe.model, probe.firmware)
    errors: list[Finding] = []
    health: dict[str, Any] = {"available": False, "model": probe.model, "firmware": probe.firmware}
    if probe.kind != "nvme":
        health["reason"] = f"a {probe.kind} device has no NVMe health log"
    else:
        smart, why_not = ask_health(probe.node, run.runner)
        if smart is None:
            health["reason"] = why_not
        else:
            errors, more = assess(name, smart, run.limits)
            warnings += more
            days, basis = endurance_days(smart)
            capacity_bytes, capacity_basis = _capacity(run, probe)
            health.update(
                smart.__dict__,
                available=True,
                capacity_bytes=capacity_bytes,
                capacity_basis=capacity_basis,
                endurance_days=None if days is None else round(days, 1),
                endurance_basis=basis,
            )
    run.health = health
    run.warnings += warnings
    return errors


def _capacity(run: DiskRun, probe: DiskProbe) -> tuple[int, str]:
    """Bytes of the whole drive as it says itself, else of its namespace, which may be a part of it; and which it is."""
    identity = run.runner(["nvme", "id-ctrl", "--output-format=json", probe.node])
    why_not = "" if identity.ok else _words(identity)
    if not why_not:
        try:
            own = parse_id_ctrl(identity.stdout).capacity_bytes
        except (ValueError, TypeError) as error:
            why_not = f"the drive's answer was not understood: {error}"
        else:
            if own:
                return own, "the drive's own word"
            why_not = "the drive does not tell its own"
    return probe.size_bytes, f"the namespace's size: {why_not}"


# --------------------------------------------------------------------------------------------------- before any write


def _check_ground(run: DiskRun, probe: DiskProbe, decision: Decision) -> list[Finding]:
    """Everything besides the disk that a full run needs, looked at before the first write."""
    settings, found = run.settings, []
    tools = dict(_TOOLS, **({"mkfs.ext4": "e2fsprogs"} if settings.fstype == "ext4" else {"mkfs.xfs": "xfsprogs"}))
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"
    missing = [
        tool for tool in tools if not any(os.access(Path(part) / tool, os.X_OK) for part in path.split(":") if part)
    ]
    if missing and not run.check_mode:
        found.append(
            Finding(
                "KVF-DISK-053",
                f"This host lacks {', '.join(missing)}.",
                f"Install {', '.join(sorted({tools[tool] for tool in missing}))}; the role cache_disk does.",
            )
        )
    for what, name, look in (("user", settings.owner, pwd.getpwnam), ("group", settings.group, grp.getgrnam)):
        try:
            look(name)
        except KeyError:
            if not run.check_mode:
                found.append(
                    Finding(
                        "KVF-DISK-053",
                        f"The {what} {name!r}, who is to own the data directory, does not exist on this host.",
                        "Run the role service_user first, or set kvfleet_service_user to an existing user.",
                    )
                )
    here = mounted_at(settings.mount_point, run.paths)
    child = _child(probe, decision.layout) if decision.layout else None
    if here.major_minor and (child is None or here.major_minor != child[1] or decision.action != "reuse"):
        found.append(
            Finding(
                "KVF-DISK-026",
                f"{here.source} is mounted at {settings.mount_point} and is not this disk's cache partition.",
                "Unmount it (state 'unmounted' if it is an earlier cache disk), or set another mount point.",
            )
        )
    elif not here.major_minor:
        where = Path(settings.mount_point)
        real = os.path.realpath(where)
        if real != settings.mount_point:
            found.append(
                Finding(
                    "KVF-DISK-026",
                    f"{settings.mount_point} leads through a symbolic link to {real}.",
                    f"Set the mount point to {real}.",
                )
            )
        elif where.exists() and not where.is_dir():
            found.append(
                Finding("KVF-DISK-026", f"{where} is not a directory.", "Move it away, or set another mount point.")
            )
        # an unprivileged check run may not look into the directory
        with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
            entries = sorted(entry.name for entry in where.iterdir())
            if entries:
                found.append(
                    Finding(
                        "KVF-DISK-026",
                        f"{where} holds {len(entries)} entries ({', '.join(entries[:3])}) that a mount would hide.",
                        "Move them away, or set another mount point.",
                    )
                )
    return found


# --------------------------------------------------------------------------------------------------- writing


def _settle(run: DiskRun) -> None:
    """Let udev finish what the last write set off; hosts without udev have nothing to wait for."""
    if Path(run.paths.udev, "control").exists():
        run.runner(["udevadm", "settle", "--timeout=30"], timeout_s=40)


def _await_child(run: DiskRun, probe: DiskProbe, layout: Layout, step: str) -> str:
    """Wait until kernel and /dev agree on the partition; returns its node and holds it open for this run.

    udev reads the table again after each write to the whole disk, and the kernel then drops all partitions and makes
    them anew; an open partition makes it leave them alone.
    """
    _settle(run)
    words = ""
    for attempt in range(60):
        now = _same_disk(run, step, probe)
        child = _child(now, layout)
        if child is not None:
            node = Path(run.paths.dev) / child[0]
            with contextlib.suppress(OSError):
                handle = os.open(node, os.O_RDONLY | os.O_CLOEXEC)
                status = os.fstat(handle)
                if f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" == child[1]:
                    run.held.append(handle)
                    return str(node)
                os.close(handle)
            words = f"the kernel has {child[0]} but {node} is not that device"
        else:
            words = "the kernel does not show the partition"
            if attempt % 5 == 0:
                # a kernel without a parser for the table never finds the partition by itself
                done = run.runner(["partx", "--add", probe.node])
                words += "" if done.ok else f" ({_words(done)})"
                _settle(run)
                continue
        time.sleep(0.2)
    raise _failed(step, words)


def _erase(run: DiskRun, probe: DiskProbe) -> None:
    """Erase signatures of all children, then of the disk; the kernel forgets the old partitions last."""
    for part in probe.partitions:
        step = f"erase signatures on {part.kernel_name}"
        node = str(Path(run.paths.dev) / part.kernel_name)
        _same_disk(run, step, probe)
        _not_in_use(step, [probe.node, node])
        _command(run, step, ["wipefs", "--all", "--quiet", node])
        run.did(step)
    step = f"erase signatures on {probe.kernel_name}"
    _same_disk(run, step, probe)
    _not_in_use(step, [probe.node])
    _command(run, step, ["wipefs", "--all", "--quiet", probe.node])
    run.did(step)
    _zap(run, probe)


def _zap(run: DiskRun, probe: DiskProbe) -> None:
    step = f"erase partition tables on {probe.kernel_name}"
    _same_disk(run, step, probe)
    _not_in_use(step, [probe.node])
    # sgdisk says 2 or 3 about a damaged table that it nevertheless erases; the look afterwards decides
    done = run.runner(["sgdisk", "--zap-all", probe.node])
    if probe.partitions:
        run.runner(["partx", "--delete", probe.node])
    _settle(run)
    if run.runner(["blkid", "--probe", probe.node]).returncode != 2:
        raise _failed(step, f"sgdisk --zap-all {probe.node}: {_words(done)}; something is still recognised there")
    run.did(step)


def _partition(run: DiskRun, probe: DiskProbe, layout: Layout, record: DiskRecord) -> None:
    step = f"partition {probe.kernel_name}"
    _same_disk(run, step, probe)
    _not_in_use(step, [probe.node])
    _command(
        run,
        step,
        [
            "sgdisk",
            "--clear",
            f"--disk-guid={record.disk_guid}",
            f"--set-alignment={layout.alignment_bytes // layout.sector_bytes}",
            f"--new=1:{layout.first_sector}:{layout.last_sector}",
            f"--typecode=1:{PARTITION_TYPE_GUID}",
            f"--partition-guid=1:{record.partition_uuid}",
            f"--change-name=1:{PARTITION_NAME}",
            probe.node,
        ],
    )
    run.did(step)


def _discard_spare(run: DiskRun, probe: DiskProbe, layout: Layout) -> None:
    """Tell the drive that the free space behind the partition holds nothing: only then is it over-provisioning."""
    step = f"discard the free space of {probe.kernel_name}"
    start = layout.start_bytes + layout.partition_bytes
    # the backup table at the end stays: one alignment unit is far more than its 17 or 20 KiB
    length = (probe.size_bytes - start - layout.alignment_bytes) // layout.alignment_bytes * layout.alignment_bytes
    if not probe.discard or length <= 0:
        return
    _same_disk(run, step, probe)
    done = run.runner(["blkdiscard", "--offset", str(start), "--length", str(length), probe.node], timeout_s=600)
    if done.ok:
        run.did(step)
    else:
        # a drive that refuses loses some endurance, no data: the format goes on
        run.warnings.append(
            Finding(
                "KVF-DISK-042",
                f"{probe.node} did not discard its free space: {_words(done)}.",
                "Nothing to do; the spare area helps less.",
            )
        )


def _filesystem_of(run: DiskRun, child: str) -> dict[str, str]:
    done = run.runner(["blkid", "--probe", "--output", "export", child])
    return parse_export(done.stdout) if done.ok else {}


def _make_filesystem(run: DiskRun, probe: DiskProbe, child: str, record: DiskRecord) -> None:
    step = f"make {record.fstype} on {Path(child).name}"
    _same_disk(run, step, probe)
    _not_in_use(step, [child])
    _command(run, step, ["wipefs", "--all", "--quiet", child])
    if record.fstype == "ext4":
        argv = ["mkfs.ext4", "-q", "-m", "0", "-L", record.label, "-U", record.filesystem_uuid]
        argv += ["-E", "discard" if probe.discard else "nodiscard", child]
    else:
        argv = ["mkfs.xfs", "-q", "-L", record.label, "-m", f"uuid={record.filesystem_uuid}"]
        argv += [child] if probe.discard else ["-K", child]
    _command(run, step, argv, timeout_s=MKFS_TIMEOUT_S)
    _settle(run)
    run.did(step)


def _format(run: DiskRun, probe: DiskProbe, decision: Decision, record: DiskRecord | None, host_id: str) -> DiskRecord:
    """Bring a blank, unfinished or given-up disk to a finished file system; returns the record at ``formatted``."""
    settings, layout = run.settings, decision.layout
    assert layout is not None  # noqa: S101 - every decision that is no refusal has one
    entry_there = (
        decision.content == "ours_unfinished"
        and probe.table.primary == probe.table.backup
        and probe.table.primary is not None
    )
    if decision.action != "resume" or record is None:
        record = DiskRecord(
            serial=settings.serial,
            stage="begun",
            machine_id=host_id,
            disk_guid=str(uuid.uuid4()),
            partition_uuid=str(uuid.uuid4()),
            filesystem_uuid=str(uuid.uuid4()),
            fstype=settings.fstype,
            label=settings.label,
            size_bytes=probe.size_bytes,
            hostname=socket.gethostname(),
            overwrote=tuple(str(signature) for signature in probe.signatures)
            or (("unknown bytes",) if decision.action == "overwrite" else ()),
        )
    elif (record.fstype, record.label) != (settings.fstype, settings.label):
        # nothing was ever stored there, so the inventory's newer wish wins; the UUID that tells ours from theirs stays
        record = replace(record, fstype=settings.fstype, label=settings.label)
    _keep(run, record)
    run.did("write down what is about to be made")
    if entry_there and probe.table.primary is not None:
        entry = probe.table.primary.entries[0]
        start = entry.first_sector * probe.sector_bytes
        size = (entry.last_sector - entry.first_sector + 1) * probe.sector_bytes
        layout = Layout(start, size, probe.size_bytes - start - size, layout.alignment_bytes, probe.sector_bytes)
    else:
        if decision.action == "overwrite":
            _erase(run, probe)
        elif decision.action == "resume":
            _zap(run, probe)
        _partition(run, probe, layout, record)
    child = _await_child(run, probe, layout, "wait for the partition")
    if not record.reached("partitioned"):
        record = replace(record, stage="partitioned")
        _keep(run, record)
        run.did("write down that the disk is partitioned")
    _discard_spare(run, probe, layout)
    found = _filesystem_of(run, child)
    wanted = (record.fstype, record.filesystem_uuid, record.label)
    done = (found.get("TYPE"), found.get("UUID"), found.get("LABEL")) == wanted
    if not (done and filesystem_finished(record.fstype, read_direct(child, 0, 4096))):
        _make_filesystem(run, probe, child, record)
        found = _filesystem_of(run, child)
        if (found.get("TYPE"), found.get("UUID"), found.get("LABEL")) != wanted:
            raise _failed(
                f"make {record.fstype}",
                f"blkid reads {found.get('TYPE')} {found.get('LABEL')!r} {found.get('UUID')} instead of {wanted}",
            )
    record = replace(record, stage="formatted")
    _keep(run, record)
    run.did("write down that the file system is finished")
    return record


# --------------------------------------------------------------------------------------------------- mounting


def _mount(run: DiskRun, record: DiskRecord, child: str) -> None:
    """Unit files, mount point, mount; each only if it differs. Verifies that the mounted source is our file system."""
    settings, paths = run.settings, run.paths
    unit = mount_unit_name(settings.mount_point)
    number = _number_of(child)
    here = mounted_at(settings.mount_point, paths)
    if not here.major_minor:
        step = f"make the mount point {settings.mount_point}"
        where = Path(settings.mount_point)
        try:
            where.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            fresh = not where.is_dir()
            where.mkdir(exist_ok=True, mode=0o700)
            status = where.lstat()
            # nobody but root may write below a lost mount
            if fresh or (status.st_uid, status.st_gid, status.st_mode & 0o7777) != (0, 0, 0):
                os.chown(where, 0, 0)
                where.chmod(0)
                run.did(step)
        except OSError as error:
            raise _failed(step, str(error)) from error
    systemd = Path(paths.systemd)
    device = device_unit_name(record.filesystem_uuid)
    try:
        wrote = write_file(
            systemd / unit, render_mount_unit(settings.mount_point, record.filesystem_uuid, record.fstype), 0o644
        )
        wrote = write_file(systemd / f"{device}.d" / "kvfleet-timeout.conf", render_device_timeout(), 0o644) or wrote
    except OSError as error:
        raise _failed("write the mount unit", str(error)) from error
    if wrote:
        run.did("write the mount unit")
        _command(run, "reload systemd", ["systemctl", "daemon-reload"])
    wants = [systemd / f"{starter}.wants" / unit for starter in wanted_by(record.filesystem_uuid)]
    if not all(link.is_symlink() for link in wants):
        step = f"enable {unit}"
        _command(run, step, ["systemctl", "enable", unit])
        run.did(step)
    if here.major_minor == number:
        if wrote:
            _command(run, "remount with new options", ["systemctl", "reload", unit])
    else:
        step = f"mount {settings.mount_point}"
        _await_uuid_link(run, record, child)
        done = run.runner(["systemctl", "start", unit], timeout_s=120)
        if not done.ok:
            shown = run.runner(["systemctl", "status", "--no-pager", "--full", "--lines=10", unit])
            raise _failed(step, f"{_words(done)}; {shown.stdout.strip()}".replace("\n", "; "))
        run.did(step)
    here = mounted_at(settings.mount_point, paths)
    found = _filesystem_of(run, child)
    if here.major_minor != number or found.get("UUID") != record.filesystem_uuid:
        raise _failed(
            f"verify {settings.mount_point}",
            f"{here.source or 'nothing'} ({here.major_minor or '-'}) is mounted there instead of {child} ({number}), "
            f"whose UUID reads {found.get('UUID')}; expected {record.filesystem_uuid}",
        )


def _number_of(node: str) -> str:
    status = Path(node).stat()
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _await_uuid_link(run: DiskRun, record: DiskRecord, child: str) -> None:
    """systemd mounts by the link that udev makes; wait for it, ask udev once more, say so if it never comes."""
    if not Path(run.paths.udev, "control").exists():
        return
    link = Path(run.paths.by_uuid) / record.filesystem_uuid
    for attempt in range(50):
        if link.exists():
            return
        if attempt % 10 == 5:
            run.runner(["udevadm", "trigger", "--action=change", child])
            _settle(run)
        time.sleep(0.2)
    raise _failed("wait for the by-uuid link", f"udev did not make {link} for {child}")


def direct_io_works(folder: str) -> bool:
    """Whether an aligned O_DIRECT write into ``folder`` reads back as written; leaves nothing behind.

    Raises ``OSError`` when there is no room to try.
    """
    path = Path(folder) / f".kvfleet-direct-{os.getpid()}"
    pattern = os.urandom(DIRECT_PROBE_BYTES)
    try:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno == 22:
                return False
            raise
        try:
            with mmap.mmap(-1, DIRECT_PROBE_BYTES) as buffer, mmap.mmap(-1, DIRECT_PROBE_BYTES) as back:
                buffer.write(pattern)
                try:
                    written = os.pwritev(handle, [buffer], 0)
                    os.fsync(handle)
                    got = os.preadv(handle, [back], 0)
                except OSError as error:
                    if error.errno == 22:
                        return False
                    raise
                return written == got == DIRECT_PROBE_BYTES and bytes(back) == pattern
        finally:
            os.close(handle)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _data_directory_fits(settings: DiskSettings) -> bool:
    """Whether the data directory has its owner, group and mode."""
    try:
        status = Path(settings.data_path).lstat()
        owner = (pwd.getpwnam(settings.owner).pw_uid, grp.getgrnam(settings.group).gr_gid)
    except (OSError, KeyError):
        return False
    return stat.S_IMODE(status.st_mode) == 0o750 and (status.st_uid, status.st_gid) == owner


def _furnish(run: DiskRun, probe: DiskProbe, record: DiskRecord) -> DiskRecord:
    """Data directory, marker, direct I/O verdict; returns the record at ``ready``."""
    settings = run.settings
    step = f"make the data directory {settings.data_path}"
    data = Path(settings.data_path)
    try:
        uid, gid = pwd.getpwnam(settings.owner).pw_uid, grp.getgrnam(settings.group).gr_gid
        changed = False
        for folder in [*reversed([part for part in data.parents if Path(settings.mount_point) in part.parents]), data]:
            if folder.is_symlink():
                raise OSError(f"{folder} is a symbolic link")
            if not folder.is_dir():
                folder.mkdir(mode=0o755 if folder != data else 0o700)
                changed = True
        status = data.lstat()
        if (status.st_uid, status.st_gid) != (uid, gid):
            os.chown(data, uid, gid)
            changed = True
        if (status.st_mode & 0o7777) != 0o750:
            data.chmod(0o750)
            changed = True
    except OSError as error:
        raise _failed(step, str(error)) from error
    if changed:
        run.did(step)
    marker = {
        "schema": record.as_dict()["schema"],
        "machine_id": record.machine_id,
        "hostname": record.hostname,
        "serial": record.serial,
        "partition_uuid": record.partition_uuid,
        "filesystem_uuid": record.filesystem_uuid,
    }
    try:
        if write_file(Path(settings.mount_point) / MARKER_NAME, _json(marker), 0o644):
            run.did("write the marker file")
    except OSError as error:
        raise _failed("write the marker file", str(error)) from error
    notes = dict(record.notes)
    if "direct_io" not in notes:
        try:
            notes["direct_io"] = direct_io_works(settings.data_path)
        except OSError as error:
            run.warnings.append(
                Finding(
                    "KVF-DISK-043",
                    f"Direct I/O in {settings.data_path} could not be tried: {error}.",
                    "Make room there and run again; until then the tier does without.",
                )
            )
    new = record.stage != "ready"
    if run.measure == "always" or (run.measure == "after_format" and new):
        usage = os.statvfs(settings.data_path)
        speed = measure_speed(settings.data_path, usage.f_bavail * usage.f_frsize, run.chunk_bytes, run.runner)
        if speed["available"]:
            notes["speed"] = speed
        else:
            run.warnings.append(
                Finding(
                    "KVF-DISK-047",
                    f"The speed of {settings.mount_point} is not known: {speed['reason']}.",
                    "Install fio, or set cache_disk_measure_speed to never.",
                )
            )
    if not probe.discard and not notes.get("told_no_discard"):
        # said once: a disk does not learn to discard, and nobody needs to read it at every deploy
        notes["told_no_discard"] = True
        run.warnings.append(
            Finding(
                "KVF-DISK-048",
                f"{settings.device} does not support discard, so it is not trimmed and no trim timer is set up.",
                "Nothing to do; leave more spare space (cache_disk_spare_percent) on such a disk.",
            )
        )
    record = replace(record, stage="ready", notes=notes)
    if _keep(run, record):
        run.did("write down that the disk is ready")
    return record


# --------------------------------------------------------------------------------------------------- entry points


def _view(probe: DiskProbe, decision: Decision, mount: MountState) -> dict[str, Any]:
    """The disk in the few words that a diff shows."""
    ours = decision.content == "ours"
    child = _child(probe, decision.layout) if decision.layout else None
    return {
        "device": probe.device,
        "kernel_name": probe.kernel_name,
        "model": probe.model,
        "serial": probe.serial,
        "firmware": probe.firmware,
        "size_bytes": probe.size_bytes,
        "content": decision.content,
        "signatures": [str(item) for item in probe.signatures],
        "partition_uuid": decision.partition_uuid if ours else "",
        "filesystem_uuid": decision.filesystem_uuid if ours else "",
        "fstype": probe.filesystem.type if ours else "",
        "mounted": bool(ours and child and mount.major_minor == child[1]),
    }


def _result(
    run: DiskRun,
    probe: DiskProbe,
    decision: Decision,
    record: DiskRecord | None,
    before: dict[str, Any],
    changed: bool,
) -> dict[str, Any]:
    mount = mounted_at(run.settings.mount_point, run.paths)
    after = _view(probe, decision, mount)
    layout = decision.layout
    return {
        "changed": changed,
        **{
            name: after[name]
            for name in (
                "device",
                "kernel_name",
                "model",
                "serial",
                "firmware",
                "size_bytes",
                "content",
                "partition_uuid",
                "filesystem_uuid",
                "fstype",
                "mounted",
            )
        },
        "mount_point": run.settings.mount_point,
        "data_directory": run.settings.data_path,
        "partition_gib": round(layout.partition_bytes / GIB, 3) if layout else 0.0,
        "spare_gib": round(layout.spare_bytes / GIB, 3) if layout else 0.0,
        "discard": probe.discard,
        "health": dict(run.health),
        "speed": dict(record.notes.get("speed") or {}) if record is not None else {},
        "direct_io": bool(record is not None and record.notes.get("direct_io") is True),
        "signatures": [item.as_dict() for item in probe.signatures],
        "action": decision.action,
        "errors": [finding.as_dict() for finding in decision.errors],
        "warnings": [finding.as_dict() for finding in (*decision.warnings, *run.warnings)],
        "steps": list(run.steps),
        "before": before,
        "after": after,
    }


def report(run: DiskRun) -> dict[str, Any]:
    """Look at the named disk and say what ``present`` would do; never writes, never refuses."""
    host_id = machine_id(run.paths)
    probe = probe_disk(run.settings, run.runner, run.paths)
    record = read_record(run.settings.serial, run.paths)
    decision = decide(probe, run.settings, record, host_id)
    before = _view(probe, decision, mounted_at(run.settings.mount_point, run.paths))
    run.steps = list(decision.steps)
    if not probe.resolve_error and not probe.is_partition:
        read_health(run, probe)
    return _result(run, probe, decision, record, before, False)


def _pending(run: DiskRun, probe: DiskProbe, decision: Decision, record: DiskRecord | None) -> list[str]:
    """What a real run would do, for check mode."""
    settings = run.settings
    steps = list(decision.steps)
    child = _child(probe, decision.layout) if decision.layout else None
    unit = mount_unit_name(settings.mount_point)
    if decision.action == "reuse":
        text = render_mount_unit(settings.mount_point, decision.filesystem_uuid, probe.filesystem.type)
        try:
            same = Path(run.paths.systemd, unit).read_text() == text
        except OSError:
            same = False
        mounted = child is not None and mounted_at(settings.mount_point, run.paths).major_minor == child[1]
        steps += [] if same else [f"write {unit}"]
        steps += [] if mounted else [f"mount {settings.mount_point}"]
        if mounted and not _data_directory_fits(settings):
            steps.append(f"make the data directory {settings.data_path}")
        if decision.adopt or record is None or record.stage != "ready":
            steps.append("write down that the disk is ready")
        return steps
    return [*steps, f"write {unit}", f"mount {settings.mount_point}", f"make the data directory {settings.data_path}"]


def present(run: DiskRun) -> dict[str, Any]:
    """Bring the disk to a mounted cache partition, or refuse without a write, or fail with the step's name.

    Raises :class:`KvfleetError`. In check mode returns the plan and writes nothing.
    """
    settings, paths = run.settings, run.paths
    with contextlib.nullcontext() if run.check_mode else _lock(run), _releasing(run):
        host_id = machine_id(paths)
        record = read_record(settings.serial, paths)
        _settle(run)
        probe = probe_disk(settings, run.runner, paths)
        decision = decide(probe, settings, record, host_id)
        if decision.refused:
            raise KvfleetError(*decision.errors)
        unwell = read_health(run, probe)
        if unwell and decision.action != "reuse":
            raise KvfleetError(*unwell)
        # a cache that is in service goes on: losing it costs speed, not data
        run.warnings += unwell
        if not host_id:
            raise refuse(
                "KVF-DISK-053",
                f"This host has no machine id ({paths.machine_id} is empty).",
                "Run systemd-machine-id-setup on the host.",
            )
        ground = _check_ground(run, probe, decision)
        if ground:
            raise KvfleetError(*ground)
        before = _view(probe, decision, mounted_at(settings.mount_point, paths))
        if run.check_mode:
            run.steps = _pending(run, probe, decision, record)
            return _result(run, probe, decision, record, before, bool(run.steps))
        if decision.action == "reuse":
            if decision.adopt or record is None:
                entry_table = probe.table.primary
                record = DiskRecord(
                    serial=settings.serial,
                    stage="formatted",
                    machine_id=host_id,
                    disk_guid=entry_table.disk_guid if entry_table else "",
                    partition_uuid=decision.partition_uuid,
                    filesystem_uuid=decision.filesystem_uuid,
                    fstype=probe.filesystem.type,
                    label=probe.filesystem.label,
                    size_bytes=probe.size_bytes,
                    hostname=str(probe.filesystem.marker.get("hostname") or socket.gethostname()),
                )
                _keep(run, record)
                run.did("write this host's record anew from the disk's marker")
        else:
            again = probe_disk(settings, run.runner, paths)
            second = decide(again, settings, record, host_id)
            if again != probe or second != decision:
                raise refuse(
                    "KVF-DISK-052",
                    f"Two looks at {settings.device} led to different answers; nothing was written.",
                    "Something is working on the disk; find it, then run again.",
                )
            record = _format(run, probe, decision, record, host_id)
            probe = probe_disk(settings, run.runner, paths)
            decision = decide(probe, settings, record, host_id)
            if decision.action != "reuse":
                raise _failed(
                    "verify the new file system",
                    "; ".join(finding.message for finding in decision.errors) or decision.content,
                )
        assert decision.layout is not None  # noqa: S101 - a decision to reuse has one
        child = _await_child(run, probe, decision.layout, "wait for the partition")
        _mount(run, record, child)
        record = _furnish(run, probe, record)
        if run.steps:
            probe = probe_disk(settings, run.runner, paths)
            decision = decide(probe, settings, record, host_id)
            if decision.action != "reuse":
                raise _failed(
                    "verify the result", "; ".join(item.message for item in decision.errors) or decision.content
                )
        return _result(run, probe, decision, record, before, bool(run.steps))


def _users_of(mount_point: str, paths: HostPaths) -> list[str]:
    """Processes with an open file, working directory or root below the mount point, as ``name (pid)``."""
    found = []
    for pid in sorted((entry.name for entry in Path(paths.proc).iterdir() if entry.name.isdigit()), key=int):
        base = Path(paths.proc) / pid
        links = [base / "cwd", base / "root"]
        with contextlib.suppress(OSError):
            links += list((base / "fd").iterdir())
        for link in links:
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if target == mount_point or target.startswith(mount_point + "/"):
                    name = (base / "comm").read_text().strip()
                    found.append(f"{name} ({pid})")
                    break
    return found


def unmounted(run: DiskRun) -> dict[str, Any]:
    """Stop, disable and remove our mount unit; the disk keeps its content and the host its record.

    Only a mount of a kvfleet file system is undone: our unit file must be there, or nothing is done.
    Raises :class:`KvfleetError` when the mount is in use.
    """
    settings, paths = run.settings, run.paths
    unit = mount_unit_name(settings.mount_point)
    path = Path(paths.systemd) / unit
    here = mounted_at(settings.mount_point, paths)
    try:
        text = path.read_text()
    except FileNotFoundError:
        text = ""
    ours = "Written by kvfleet" in text
    before = {"mount_point": settings.mount_point, "mounted": bool(here.major_minor), "unit": ours}
    result: dict[str, Any] = {"mount_point": settings.mount_point, "before": before}
    if not ours:
        if here.major_minor:
            raise refuse(
                "KVF-DISK-054",
                f"{here.source} is mounted at {settings.mount_point} but not by kvfleet ({unit} is not ours).",
                "Unmount it by hand if it may go.",
            )
        return dict(result, changed=False, mounted=False, steps=[], after=before)
    after = {"mount_point": settings.mount_point, "mounted": False, "unit": False}
    if run.check_mode:
        return dict(
            result,
            changed=True,
            mounted=False,
            steps=[f"unmount {settings.mount_point}", f"remove {unit}"],
            after=after,
        )
    with _lock(run):
        if here.major_minor:
            users = _users_of(settings.mount_point, paths)
            if users:
                raise refuse(
                    "KVF-DISK-055",
                    f"{settings.mount_point} is in use by {', '.join(users[:8])}; nothing was changed.",
                    "Stop those processes (kvfleet's own with systemctl stop 'kvfleet-vllm@*' 'kvfleet-lmcache@*'), "
                    "then run again.",
                )
            step = f"unmount {settings.mount_point}"
            _command(run, step, ["systemctl", "stop", unit])
            if mounted_at(settings.mount_point, paths).major_minor:
                raise _failed(step, f"{settings.mount_point} is still mounted")
            run.did(step)
        step = f"remove {unit}"
        _command(run, step, ["systemctl", "disable", unit])
        uuid_line = next((line for line in text.splitlines() if line.startswith("What=/dev/disk/by-uuid/")), "")
        device = device_unit_name(uuid_line.rpartition("/")[2]) if uuid_line else ""
        try:
            if device:
                drop_in = Path(paths.systemd) / f"{device}.d"
                with contextlib.suppress(FileNotFoundError):
                    (drop_in / "kvfleet-timeout.conf").unlink()
                    drop_in.rmdir()
            path.unlink()
        except OSError as error:
            raise _failed(step, str(error)) from error
        _command(run, step, ["systemctl", "daemon-reload"])
        run.did(step)
    return dict(result, changed=True, mounted=False, steps=list(run.steps), after=after)
