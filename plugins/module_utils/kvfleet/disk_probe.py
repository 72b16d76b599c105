"""Read what a host knows about a disk into a :class:`disks.DiskProbe`. Opens devices for reading only.

Where the host keeps things is injected (:class:`HostPaths`), and so is the command runner, so that the same code
runs against a private directory of links in tests. Trouble while reading never hides: it lands in ``errors`` and
makes the disk occupied.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .command import CommandRunner
from .disks import (
    HEAD_BYTES,
    TAIL_BYTES,
    DiskProbe,
    DiskRecord,
    DiskSettings,
    FilesystemProbe,
    GptEntry,
    MountEntry,
    PartitionProbe,
    Signature,
    TableProbe,
    decide,
    filesystem_finished,
    parse_record,
    parse_tables,
    serial_matches_link,
)
from .units import GIB

#: Mount points whose disk is the system's: losing it loses the host.
SYSTEM_MOUNTS = (
    "/",
    "/boot",
    "/boot/efi",
    "/efi",
    "/usr",
    "/var",
    "/etc",
    "/home",
    "/opt",
    "/root",
    "/srv",
    "/var/lib",
    "/var/log",
    "/tmp",  # noqa: S108 - a mount point to compare with
)
_NO_DISK = re.compile(r"^(ram|zram|sr|fd|nbd|mtdblock|rbd|pmem)\d")


@dataclass(frozen=True)
class HostPaths:
    """Where this host keeps what the probes read and the steps write."""

    by_id: str = "/dev/disk/by-id"
    by_uuid: str = "/dev/disk/by-uuid"
    dev: str = "/dev"
    sys: str = "/sys"
    proc: str = "/proc"
    udev: str = "/run/udev"
    fstab: str = "/etc/fstab"
    machine_id: str = "/etc/machine-id"
    records: str = "/etc/kvfleet/disks"
    systemd: str = "/etc/systemd/system"
    lock: str = "/run/kvfleet-cache-disk.lock"


def _text(path: Path) -> str:
    """The stripped text of a small file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def machine_id(paths: HostPaths) -> str:
    """This host's machine id, or empty."""
    return _text(Path(paths.machine_id))


def record_path(serial: str, paths: HostPaths) -> Path:
    """The file that keeps this host's record of the disk with that serial."""
    return Path(paths.records) / (re.sub(r"[^A-Za-z0-9._-]", "_", serial) + ".json")


def read_record(serial: str, paths: HostPaths) -> DiskRecord | None:
    """This host's record of the disk with that serial; ``None`` if there is none that can be understood."""
    try:
        data = json.loads(record_path(serial, paths).read_text())
    except (OSError, ValueError):
        return None
    return parse_record(data) if isinstance(data, dict) else None


def read_direct(node: str, offset_bytes: int, length_bytes: int) -> bytes:
    """Read from a block device past the page cache, in multiples of 512 bytes. Raises ``OSError``."""
    handle = os.open(node, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, length_bytes) as buffer:
            got = os.preadv(handle, [buffer], offset_bytes)
            if got != length_bytes:
                raise OSError(5, f"{got} of {length_bytes} bytes at {offset_bytes}", node)
            return bytes(buffer)
    finally:
        os.close(handle)


def forget_cache(node: str) -> None:
    """Drop what the page cache keeps of a block device, so that the tools read the device itself.

    A disk and its partitions have caches of their own: after mkfs on a partition the disk's cache still shows what
    was there before.
    """
    with contextlib.suppress(OSError):
        handle = os.open(node, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


# --------------------------------------------------------------------------------------------------- tools


def parse_wipefs(text: str) -> list[Signature]:
    """The signatures in the output of ``wipefs --no-act --json``; empty output means none."""
    if not text.strip():
        return []
    return [
        Signature(
            str(item.get("device") or ""),
            str(item["type"]),
            int(str(item["offset"]), 16),
            str(item.get("label") or ""),
            str(item.get("uuid") or ""),
        )
        for item in json.loads(text).get("signatures", [])
    ]


def parse_export(text: str) -> dict[str, str]:
    """``blkid -o export`` as a dictionary; blkid escapes some characters with a backslash."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: re.sub(r"\\(.)", r"\1", value) for key, value in pairs}


def _signatures(node: str, name: str, runner: CommandRunner) -> tuple[list[Signature], list[str]]:
    """What wipefs and blkid recognise on one device, and what went wrong while asking."""
    errors: list[str] = []
    found: list[Signature] = []
    forget_cache(node)
    done = runner(["wipefs", "--no-act", "--json", node])
    if done.ok:
        try:
            found = [replace(item, device=name) for item in parse_wipefs(done.stdout)]
        except (ValueError, KeyError, TypeError) as error:
            errors.append(f"wipefs on {name}: output not understood ({error})")
    else:
        errors.append(f"wipefs on {name}: {(done.stderr or done.stdout).strip() or done.returncode}")
    done = runner(["blkid", "--probe", "--output", "export", node])
    if done.ok:
        values = parse_export(done.stdout)
        for key, label, ident in (("TYPE", "LABEL", "UUID"), ("PTTYPE", "", "PTUUID")):
            kind = values.get(key, "")
            # wipefs and blkid share a library, but blkid also knows types without a magic that could be erased
            if kind and not any(item.type == kind for item in found):
                found.append(Signature(name, kind, 0, values.get(label, ""), values.get(ident, "")))
    elif done.returncode == 8:
        errors.append(f"blkid on {name}: more than one content fits (ambivalent probing result)")
    elif done.returncode != 2 or done.stderr.strip():
        errors.append(f"blkid on {name}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return found, errors


def _partition_filesystem(
    node: str, entry: GptEntry, child: str, sector_bytes: int, runner: CommandRunner
) -> tuple[FilesystemProbe, list[str]]:
    """What lies inside our partition; read through the whole disk while the kernel does not know the partition."""
    offset = entry.first_sector * sector_bytes
    length = (entry.last_sector - entry.first_sector + 1) * sector_bytes
    errors: list[str] = []
    where = [child] if child else ["--offset", str(offset), "--size", str(length), node]
    forget_cache(node)
    done = runner(["blkid", "--probe", "--output", "export", *where])
    values: dict[str, str] = {}
    if done.ok:
        values = parse_export(done.stdout)
    elif done.returncode != 2:
        errors.append(f"blkid in partition {entry.number}: {(done.stderr or done.stdout).strip() or done.returncode}")
    others: list[Signature] = []
    if child:
        found, more = _signatures(child, Path(child).name, runner)
        errors += more
        others = [item for item in found if item.type != values.get("TYPE")]
    finished = False
    try:
        finished = filesystem_finished(values.get("TYPE", ""), read_direct(node, offset // 4096 * 4096, 4096))
    except OSError as error:
        errors.append(f"reading partition {entry.number}: {error}")
    return (
        FilesystemProbe(
            values.get("TYPE", ""), values.get("UUID", ""), values.get("LABEL", ""), finished, tuple(others)
        ),
        errors,
    )


def read_marker(child: str, runner: CommandRunner) -> dict[str, Any]:
    """The marker file of an ext4 cache partition, read without mounting; empty if there is none."""
    done = runner(["debugfs", "-R", "cat /.kvfleet.json", child])
    try:
        data = json.loads(done.stdout)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


# --------------------------------------------------------------------------------------------------- the kernel's view


def _kind(name: str, block: Path) -> str:
    if name.startswith("dm-"):
        return "multipath" if _text(block / "dm" / "uuid").startswith("mpath-") else "dm"
    for prefix, kind in (
        ("nvme", "nvme"),
        ("sd", "scsi"),
        ("vd", "virtio"),
        ("xvd", "xen"),
        ("mmcblk", "mmc"),
        ("loop", "loop"),
        ("md", "md"),
    ):
        if name.startswith(prefix):
            return kind
    return re.sub(r"\d+$", "", name)


def _udev_properties(major_minor: str, paths: HostPaths) -> dict[str, str]:
    lines = _text(Path(paths.udev) / "data" / f"b{major_minor}").splitlines()
    return dict(line[2:].split("=", 1) for line in lines if line.startswith("E:") and "=" in line)


def _serial(kind: str, block: Path, major_minor: str, link: str, paths: HostPaths) -> tuple[str, str]:
    """The disk's serial and where it was read: the kernel first, then udev, then the link's own name."""
    kernel = _text(block / "device" / "serial") or _text(block / "serial")
    if not kernel and kind == "scsi":
        with contextlib.suppress(OSError):
            # SPC-4 7.8.16: four bytes of header, then the serial
            kernel = (block / "device" / "vpd_pg80").read_bytes()[4:].decode("ascii", "replace").strip(" \0")
    if kernel:
        return kernel, "kernel"
    known = _udev_properties(major_minor, paths)
    if known.get("ID_SERIAL_SHORT"):
        return known["ID_SERIAL_SHORT"], "udev"
    name = Path(link).name
    if name.startswith("md-uuid-"):
        return name[len("md-uuid-") :], "link"
    return (re.split(r"[_-]", name)[-1], "link") if link and "_" in name else ("", "")


def _partitions(block: Path) -> tuple[PartitionProbe, ...]:
    found = [
        PartitionProbe(
            child.name,
            _number(child / "partition"),
            _number(child / "start") * 512,
            _number(child / "size") * 512,
            _text(child / "dev"),
        )
        for child in sorted(block.iterdir())
        if (child / "partition").is_file()
    ]
    return tuple(sorted(found, key=lambda item: item.number))


def _family(name: str, paths: HostPaths) -> dict[str, str]:
    """Everything that stands on a disk: itself, partitions, their holders, and so on; kernel name -> major:minor."""
    family: dict[str, str] = {}
    queue = [Path(paths.sys) / "class" / "block" / name]
    while queue:
        block = queue.pop()
        if block.name in family or not block.exists():
            continue
        family[block.name] = _text(block / "dev")
        real = block.resolve()
        queue += [
            Path(paths.sys) / "class" / "block" / child.name
            for child in real.iterdir()
            if (child / "partition").is_file()
        ]
        holders = real / "holders"
        if holders.is_dir():
            queue += [Path(paths.sys) / "class" / "block" / child.name for child in holders.iterdir()]
    return family


def _device_number(path: str) -> str:
    """``major:minor`` of a block device node, empty for anything else."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return ""
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if stat.S_ISBLK(status.st_mode) else ""


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def parse_mountinfo(text: str) -> Iterator[tuple[str, str, str, str, str]]:
    """``(major:minor, root, mount point, type, source)`` of each line of a mountinfo file (man 5 proc)."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 6 and len(tail) >= 2:
            yield fields[2], _unescape(fields[3]), _unescape(fields[4]), tail[0], _unescape(tail[1])


def find_mounts(numbers: Mapping[str, str], paths: HostPaths) -> tuple[list[MountEntry], list[str]]:
    """Mounts of the devices in ``numbers`` (major:minor -> kernel name) in every mount namespace of the host."""
    proc = Path(paths.proc)
    errors: list[str] = []
    found: list[MountEntry] = []
    seen: set[str] = set()
    try:
        own = str((proc / "self" / "ns" / "mnt").readlink())
    except OSError as error:
        return [], [f"the mount table cannot be read: {error}"]
    pids = _pids(paths)
    for pid in ["self", *pids]:
        try:
            namespace = str((proc / pid / "ns" / "mnt").readlink())
            if namespace in seen:
                continue
            text = (proc / pid / "mountinfo").read_text(errors="replace")
        except PermissionError:
            # even root may not look into every process (sandboxes); the exclusive open that every probe makes as well
            # fails with EBUSY for a mount in any namespace, so nothing is missed, only not named
            continue
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:
            # a zombie's mountinfo answers EINVAL; it holds no namespace
            if error.errno == 22:
                continue
            errors.append(f"the mount table of process {pid} cannot be read: {error}")
            continue
        seen.add(namespace)
        for number, root, mount_point, fstype, source in parse_mountinfo(text):
            name = numbers.get(number) or (numbers.get(_device_number(source)) if source.startswith("/dev/") else None)
            if name:
                found.append(MountEntry(name, mount_point, "" if namespace == own else pid, fstype, root))
    return found, errors


def _exclusive_error(nodes: list[str]) -> tuple[str, list[str]]:
    """Why a device cannot be opened exclusively, and other trouble in opening it."""
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDONLY | os.O_EXCL))
        except OSError as error:
            if error.errno == 16:
                return f"{Path(node).name}: {error.strerror}", []
            return "", [f"opening {node}: {error.strerror}"]
    return "", []


def _pids(paths: HostPaths) -> list[str]:
    """The running processes, oldest first."""
    return sorted((entry.name for entry in Path(paths.proc).iterdir() if entry.name.isdigit()), key=int)


def _loops_over(numbers: Mapping[str, str], paths: HostPaths) -> list[str]:
    """Loop devices whose backing file is one of the devices: they neither hold nor claim it, the kernel just writes."""
    found = []
    for block in sorted((Path(paths.sys) / "block").glob("loop*")):
        backing = _text(block / "loop" / "backing_file")
        if backing and _device_number(backing) in numbers:
            found.append(block.name)
    return found


def _writers(numbers: Mapping[str, str], paths: HostPaths) -> list[str]:
    """Processes that have one of the devices open for writing (virtual machines, databases), as ``name (pid)``."""
    found = []
    for pid in _pids(paths):
        process = Path(paths.proc) / pid
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if _device_number(str(handle)) not in numbers:
                        continue
                    flags = re.search(r"^flags:\s*(\d+)", (process / "fdinfo" / handle.name).read_text(), re.MULTILINE)
                    if flags is None or int(flags.group(1), 8) & os.O_ACCMODE != os.O_RDONLY:
                        found.append(f"{_text(process / 'comm')} ({process.name})")
                        break
    return found


def fstab_uses(text: str, tokens: set[str], numbers: Mapping[str, str], mount_point: str = "") -> list[str]:
    """Lines of fstab that name one of ``tokens`` (UUIDs, labels), a device in ``numbers`` or our own mount point."""
    found = []
    for line in text.splitlines():
        fields = line.split("#", 1)[0].split()
        if len(fields) < 2:
            continue
        source = fields[0]
        key, _, value = source.partition("=")
        named = key in ("UUID", "PARTUUID", "LABEL", "PARTLABEL") and value.strip('"').lower() in tokens
        if named or _device_number(source) in numbers or (mount_point and fields[1].rstrip("/") == mount_point):
            found.append(" ".join(fields[:3]))
    return found


# --------------------------------------------------------------------------------------------------- one disk


def resolve_disk(device: str, paths: HostPaths = HostPaths()) -> DiskProbe:
    """Identity only: what ``device`` points at, from links and sysfs; needs no root and opens no device.

    Trouble is in ``resolve_error`` as the end of a sentence that starts with the link.
    """
    link = Path(device)
    if device.startswith("/dev/disk/by-id/"):
        link = Path(paths.by_id) / device[len("/dev/disk/by-id/") :]
    probe = DiskProbe(device=device)
    if not link.is_symlink() and not link.exists():
        return replace(probe, resolve_error="does not exist on this host")
    if not link.exists():
        return replace(probe, resolve_error=f"points at {link.readlink()}, which does not exist")
    number = _device_number(str(link))
    if not number:
        return replace(probe, resolve_error="is not a block device")
    system = Path(paths.sys) / "dev" / "block" / number
    if not system.exists():
        return replace(probe, resolve_error=f"points at device {number}, which the kernel no longer has")
    block = system.resolve()
    if (block / "partition").is_file():
        return replace(probe, kernel_name=block.name, is_partition=True)
    return _describe(device, str(link), block, number, paths)


def _describe(device: str, link: str, block: Path, number: str, paths: HostPaths) -> DiskProbe:
    name = block.name
    kind = _kind(name, block)
    serial, source = _serial(kind, block, number, link, paths)
    queue = block / "queue"
    rivals: list[str] = []
    if serial and source != "link":
        exact = re.search(r"^(nvme-eui\.|nvme-uuid\.|nvme-nvme\.|wwn-)", Path(link).name)
        # nvme-MODEL_SERIAL means "the first namespace"; nvme-MODEL_SERIAL_2 means one
        suffixed = re.search(re.escape(serial.strip()) + r"_\d+$", Path(link).name)
        for other in sorted((Path(paths.sys) / "block").iterdir()):
            if other.name == name or _text(other / "hidden") == "1" or exact:
                continue
            same = _serial(_kind(other.name, other), other, _text(other / "dev"), "", paths)[0] == serial
            if same and not (suffixed and _text(other / "nsid") != _text(block / "nsid")):
                rivals.append(other.name)
    by_id = Path(paths.by_id)
    links = []
    if by_id.is_dir():
        links = [
            f"/dev/disk/by-id/{entry.name}" for entry in sorted(by_id.iterdir()) if _device_number(str(entry)) == number
        ]
    return DiskProbe(
        device=device,
        kernel_name=name,
        node=str(Path(paths.dev) / name),
        major_minor=number,
        disk_sequence=_text(block / "diskseq"),
        kind=kind,
        raid_level=_text(block / "md" / "level"),
        model=_text(block / "device" / "model")
        or _text(block / "device" / "name")
        or ("loop device" if kind == "loop" else ""),
        serial=serial,
        serial_source=source,
        firmware=_text(block / "device" / "firmware_rev") or _text(block / "device" / "rev"),
        size_bytes=_number(block / "size") * 512,
        sector_bytes=_number(queue / "logical_block_size") or 512,
        optimal_io_bytes=_number(queue / "optimal_io_size"),
        read_only=_text(block / "ro") == "1",
        removable=_text(block / "removable") == "1",
        rotational=_text(queue / "rotational") == "1",
        discard=_number(queue / "discard_granularity") > 0 and _number(queue / "discard_max_bytes") > 0,
        links=tuple(links),
        rivals=tuple(rivals),
        partitions=_partitions(block),
    )


def _content(
    probe: DiskProbe, runner: CommandRunner, paths: HostPaths
) -> tuple[TableProbe, tuple[Signature, ...], list[str]]:
    errors: list[str] = []
    table = TableProbe()
    try:
        # whole blocks of 4 KiB, never more than the disk has
        length = probe.size_bytes // 4096 * 4096
        head = read_direct(probe.node, 0, min(HEAD_BYTES, length))
        tail_bytes = min(TAIL_BYTES, length)
        tail_start = (probe.size_bytes - tail_bytes) // 4096 * 4096
        tail_length = -(-(probe.size_bytes - tail_start) // probe.sector_bytes) * probe.sector_bytes
        tail = read_direct(probe.node, tail_start, tail_length)
        table = parse_tables(head, tail, probe.size_bytes, probe.sector_bytes)
    except OSError as error:
        errors.append(f"reading {probe.kernel_name}: {error.strerror or error}")
    signatures, more = _signatures(probe.node, probe.kernel_name, runner)
    errors += more
    for part in probe.partitions:
        child = str(Path(paths.dev) / part.kernel_name)
        if _device_number(child) != part.major_minor:
            errors.append(f"{child} is not the device of the kernel's {part.kernel_name}")
            continue
        found, more = _signatures(child, part.kernel_name, runner)
        signatures += found
        errors += more
    return table, tuple(signatures), errors


def probe_disk(settings: DiskSettings, runner: CommandRunner, paths: HostPaths = HostPaths()) -> DiskProbe:
    """Read everything about the disk that ``settings.device`` names; looks at it twice, past the page cache."""
    probe = resolve_disk(settings.device, paths)
    if probe.resolve_error or probe.is_partition:
        return probe
    if _device_number(probe.node) != probe.major_minor:
        return replace(probe, errors=(f"{probe.node} is not the device that the link points at",))
    first = _content(probe, runner, paths)
    second = _content(probe, runner, paths)
    table, signatures, errors = second
    if first != second:
        errors = [*errors, "two looks at the disk differ; something is writing to it"]
    family = _family(probe.kernel_name, paths)
    numbers = {number: name for name, number in family.items() if number}
    mounts, more = find_mounts(numbers, paths)
    errors += more
    swaps = [
        line.split()[0]
        for line in _text(Path(paths.proc) / "swaps").splitlines()[1:]
        if _device_number(_unescape(line.split()[0])) in numbers
    ]
    own = {probe.kernel_name, *(part.kernel_name for part in probe.partitions)}
    holders = (
        *(name for name in family if name not in own),
        *_loops_over(numbers, paths),
        *(f"process {name}" for name in _writers(numbers, paths)),
    )
    node_of = {name: str(Path(paths.dev) / name) for name in own}
    exclusive, more = _exclusive_error(
        [node_of[probe.kernel_name], *(node_of[part.kernel_name] for part in probe.partitions)]
    )
    errors += more
    filesystem = FilesystemProbe()
    entries = table.primary or table.backup or None
    if entries is not None and len(entries.entries) == 1:
        entry = entries.entries[0]
        start = entry.first_sector * probe.sector_bytes
        child = next(
            (str(Path(paths.dev) / part.kernel_name) for part in probe.partitions if part.start_bytes == start), ""
        )
        if entry.last_sector * probe.sector_bytes < probe.size_bytes:
            filesystem, more = _partition_filesystem(probe.node, entry, child, probe.sector_bytes, runner)
            errors += more
        record = read_record(settings.serial, paths)
        if child and filesystem.type == "ext4" and (record is None or record.partition_uuid != entry.partition_guid):
            filesystem = replace(filesystem, marker=read_marker(child, runner))
    tokens = {item.uuid.lower() for item in signatures if item.uuid} | {
        item.label.lower() for item in signatures if item.label
    }
    if entries is not None:
        tokens |= {entry.partition_guid.lower() for entry in entries.entries} | {
            entry.name.lower() for entry in entries.entries
        }
    tokens |= {value.lower() for value in (filesystem.uuid, filesystem.label) if value}
    return replace(
        probe,
        table=table,
        signatures=signatures,
        filesystem=filesystem,
        mounts=tuple(mounts),
        system_uses=tuple(
            f"{mount.device} on {mount.mount_point}"
            for mount in mounts
            if mount.mount_point in SYSTEM_MOUNTS and not mount.namespace
        ),
        swaps=tuple(swaps),
        holders=holders,
        fstab=tuple(fstab_uses(_text(Path(paths.fstab)), tokens, numbers, settings.mount_point)),
        exclusive_error=exclusive,
        errors=tuple(dict.fromkeys(errors)),
    )


# --------------------------------------------------------------------------------------------------- all disks


def _best_link(probe: DiskProbe) -> str:
    """The link to paste: ends in the serial if there is one, names a single namespace if the disk has several."""
    own = [link for link in probe.links if serial_matches_link(link, probe.serial)]
    return (
        next((link for link in own if re.search(r"_\d+$", link)), "")
        or next(iter(own), "")
        or next(iter(probe.links), "")
    )


def list_candidates(
    settings: DiskSettings, runner: CommandRunner, paths: HostPaths = HostPaths()
) -> list[dict[str, Any]]:
    """Every disk of the host: identity, content and the reasons why it can or cannot become the cache disk."""
    listed: list[dict[str, Any]] = []
    for entry in sorted((Path(paths.sys) / "block").iterdir()):
        name, block = entry.name, entry.resolve()
        if _NO_DISK.match(name) or _text(block / "hidden") == "1" or _number(block / "size") == 0:
            continue
        number = _text(block / "dev")
        probe = _describe("", "", block, number, paths)
        link = _best_link(probe)
        reasons: list[str] = []
        content = ""
        here = _device_number(probe.node) == number
        if not here:
            reasons.append(f"this machine has no {probe.node}; the disk belongs to another host on the same kernel")
        elif not link:
            reasons.append("has no link below /dev/disk/by-id, so it cannot be named safely")
        else:
            probe = _describe(link, str(Path(paths.by_id) / Path(link).name), block, number, paths)
            # what would happen if the inventory named it and allowed a blank disk to be formatted
            asked = replace(settings, device=link, serial=probe.serial, format=True, wipe_serial="")
            probe = probe_disk(asked, runner, paths)
            decision = decide(probe, asked, read_record(probe.serial, paths), machine_id(paths))
            content = decision.content
            reasons = [finding.message for finding in decision.errors]
        listed.append(
            {
                "device": link,
                "kernel_name": name,
                "kind": probe.kind,
                "model": probe.model,
                "serial": probe.serial,
                "firmware": probe.firmware,
                "size_bytes": probe.size_bytes,
                "size_gib": round(probe.size_bytes / GIB, 1),
                "content": content,
                "signatures": [item.as_dict() for item in probe.signatures],
                "here": here,
                "eligible": not reasons,
                "reasons": reasons,
            }
        )
    return listed
