"""The systemd units that mount the cache partition: names and texts, pure.

A native mount unit ignores ``x-systemd.device-timeout`` (systemd.mount(5): fstab only), so the short wait for a
missing disk is a drop-in of the device's own unit, which is what systemd's fstab generator writes as well.
"""

from __future__ import annotations

from pathlib import PurePosixPath

#: How long the services wait at boot for the disk, in seconds; systemd's default is 90. A busy boot was seen to need
#: more than 10 until udev had named the disk; one that appears later still is mounted then, see :func:`wanted_by`.
DEVICE_TIMEOUT_S = 30


def escape_path(path: str) -> str:
    """Escape an absolute path for a unit name as ``systemd-escape --path`` does (systemd.unit(5))."""
    parts = [part for part in path.split("/") if part]
    if not parts:
        return "-"
    text = "/".join(parts)
    out = []
    for index, byte in enumerate(text.encode()):
        char = chr(byte)
        if char == "/":
            out.append("-")
        elif char.isascii() and (char.isalnum() or char in ":_" or (char == "." and index > 0)):
            out.append(char)
        else:
            out.append(f"\\x{byte:02x}")
    return "".join(out)


def mount_unit_name(mount_point: str) -> str:
    """The name that systemd demands of the mount unit for ``mount_point``."""
    return escape_path(str(PurePosixPath(mount_point))) + ".mount"


def device_unit_name(filesystem_uuid: str) -> str:
    """The name of the device unit of a file system's by-uuid link."""
    return escape_path(f"/dev/disk/by-uuid/{filesystem_uuid}") + ".device"


def wanted_by(filesystem_uuid: str) -> tuple[str, str]:
    """The units that start the mount: the boot, and the device itself, which may appear when the boot is long over."""
    return ("local-fs.target", device_unit_name(filesystem_uuid))


def render_mount_unit(mount_point: str, filesystem_uuid: str, fstype: str) -> str:
    """The mount unit: by UUID, ``noatime``, ``nofail`` (a missing disk must not stop a boot), no online discard."""
    return (
        "# Written by kvfleet (cache_disk); changes are overwritten.\n"
        "[Unit]\n"
        "Description=kvfleet cache partition\n"
        "\n"
        "[Mount]\n"
        f"What=/dev/disk/by-uuid/{filesystem_uuid}\n"
        f"Where={mount_point}\n"
        f"Type={fstype}\n"
        "# nofail also takes the unit out of the order before local-fs.target; no discard: kvfleet-trim.timer trims\n"
        "Options=noatime,nodev,nosuid,noexec,nofail\n"
        "TimeoutSec=60\n"
        "\n"
        "[Install]\n"
        f"WantedBy={' '.join(wanted_by(filesystem_uuid))}\n"
    )


def render_device_timeout() -> str:
    """The drop-in that limits the wait for the device."""
    return (
        "# Written by kvfleet (cache_disk): a host must boot without its cache disk.\n"
        "[Unit]\n"
        f"JobRunningTimeoutSec={DEVICE_TIMEOUT_S}\n"
    )
