"""What is remembered about a throw-away host: names, places, and one JSON record in its folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .tools import TesthostError

BACKENDS = ("nspawn", "qemu")
SCHEMA = 1
_NAME = re.compile(r"[a-z0-9-]{1,20}")
_SIZE = re.compile(r"([0-9]+)([MGT])(?:iB)?")
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}
MIN_DISK_BYTES = 64 * 2**20
MAX_DISKS = 8


def state_folder() -> Path:
    """Return the folder that holds all hosts: ``KVFLEET_TESTHOST_STATE`` or /var/tmp/kvfleet-testhost."""
    return Path(os.environ.get("KVFLEET_TESTHOST_STATE") or "/var/tmp/kvfleet-testhost")  # noqa: S108 - private, 0700


def cache_folder() -> Path:
    """Return the folder that holds images: below ``KVFLEET_CACHE``, else below kvfleet/ in the user's cache folder."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfleet"
    return Path(os.environ.get("KVFLEET_CACHE") or user) / "testhost"


def checked_name(name: str) -> str:
    """Return a host name that is safe in paths, units, network namespaces and inventories.

    :raises TesthostError: anything but 1 to 20 of a-z, 0-9 and "-", or "-" first or last.
    """
    if not _NAME.fullmatch(name) or name.startswith("-") or name.endswith("-"):
        raise TesthostError(
            f"the host name {name!r} is not usable: take 1 to 20 of a-z, 0-9 and '-', not starting or ending with '-'."
        )
    return name


def parse_size(text: str) -> int:
    """Turn a size such as ``512M`` or ``4G`` (binary units) into bytes.

    :raises TesthostError: not a number with M, G or T, or under 64 MiB.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        raise TesthostError(
            f"the size {text!r} is not understood: write a whole number with M, G or T, for example 4G."
        )
    size = int(match[1]) * _UNITS[match[2]]
    if size < MIN_DISK_BYTES:
        raise TesthostError(f"the size {text} is too small: a disk needs at least 64M.")
    return size


def disk_serial(name: str, number: int) -> str:
    """Return the serial of a host's disk: ``TH``, the letters and digits of the name, two digits.

    NVMe gives a serial 20 characters, so a long name is cut to 16.
    """
    letters = "".join(char for char in name.upper() if char.isalnum())
    return f"TH{letters[:16]}{number:02d}"


def disk_roles(count: int, system_disk: bool) -> list[str]:
    """Return the role of each disk: an optional ``system`` disk first, then ``cache``, the others ``spare``.

    :raises TesthostError: not 0 to 8 disks, or a system disk without a second one to work with.
    """
    if not 0 <= count <= MAX_DISKS:
        raise TesthostError(f"--disks {count} is not possible: a host has 0 to {MAX_DISKS} disks.")
    if system_disk and count < 2:
        raise TesthostError("--system-disk needs --disks 2 or more: the first disk is never to be touched.")
    roles = ["system"] if system_disk else []
    roles += ["cache"] if count > len(roles) else []
    return roles + ["spare"] * (count - len(roles))


@dataclass
class Disk:
    """One disk of a host: a sparse backing file that the host sees as an NVMe-style disk."""

    number: int
    role: str
    serial: str
    size_bytes: int
    system_sha256: str | None = None

    @property
    def by_id(self) -> str:
        """The link that names this disk inside the host, the same for both backends."""
        return f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{self.serial}"


@dataclass
class Host:
    """One throw-away host. ``order`` and ``loops`` say which disk the host's kernel finds first, second, ..."""

    name: str
    backend: str
    port: int
    image: str
    disks: list[Disk] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    memory_mib: int = 2048
    ready: bool = False
    schema: int = SCHEMA

    @property
    def folder(self) -> Path:
        """The folder with everything that belongs to this host."""
        return state_folder() / self.name

    @property
    def ident(self) -> str:
        """A name for namespaces, cgroups and units that two state folders cannot both use."""
        digest = hashlib.sha256(str(state_folder().resolve()).encode()).hexdigest()[:6]
        return f"th-{self.name}-{digest}"

    @property
    def marker(self) -> str:
        """The environment entry that marks every process of this host."""
        return f"KVFLEET_TESTHOST_HOST={self.folder}"

    @property
    def root(self) -> Path:
        """The container's root file system."""
        return self.folder / "root"

    @property
    def ssh_config(self) -> Path:
        """The SSH configuration that reaches this host under its name."""
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        """The file with this host's one SSH key."""
        return self.folder / "known_hosts"

    @property
    def console(self) -> Path:
        """What the host wrote while it started."""
        return self.folder / "console.log"

    def disk(self, number: int) -> Disk:
        """Return a disk by its number, from 1."""
        return next(disk for disk in self.disks if disk.number == number)

    def disk_file(self, disk: Disk) -> Path:
        """Return the backing file of a disk."""
        return self.folder / f"disk{disk.number}.img"

    def disk_with_role(self, role: str) -> Disk | None:
        """Return the first disk with a role, if there is one."""
        return next((disk for disk in self.disks if disk.role == role), None)

    def save(self) -> None:
        """Write the record in one step, so that a killed run leaves the old or the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / "host.json.new"
        new.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        new.replace(self.folder / "host.json")


def load_host(name: str) -> Host | None:
    """Return the record of a host, or None when there is none.

    :raises TesthostError: the record cannot be read or is from another version of this tool.
    """
    path = state_folder() / checked_name(name) / "host.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise TesthostError(f"{path} was written by another version of testhost; remove the host with that one.")
        disks = [Disk(**disk) for disk in data.pop("disks")]
        return Host(**data, disks=disks)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise TesthostError(f"{path} cannot be read ({error}); 'testhost down {name}' removes the host.") from error


def known_host(name: str) -> Host:
    """Return the record of a host that must exist.

    :raises TesthostError: there is no such host.
    """
    host = load_host(name)
    if host is None:
        raise TesthostError(f"there is no host {name!r}: 'testhost up {name}' makes it, 'testhost list' shows all.")
    return host


def all_hosts() -> list[Host]:
    """Return the records of all hosts, by name."""
    folder = state_folder()
    names = sorted(path.parent.name for path in folder.glob("*/host.json")) if folder.is_dir() else []
    return [host for host in map(load_host, names) if host is not None]
