#!/usr/bin/python
"""Ansible module: bring one dedicated disk to a mounted cache partition, and never lose anybody's data."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cache_disk
short_description: Select, partition, format and mount the dedicated cache disk of a kvfleet host
description:
  - With I(state=report) lists what is on the named disk, or all candidate disks, and never writes.
  - With I(state=present) turns one disk, named by link and serial, into one GPT partition with a file system,
    mounts it by UUID through a systemd unit of its own and makes the data directory. A disk that already is this host's
    cache disk is mounted and otherwise left alone.
  - A disk counts as somebody's until every probe says that it is blank. Blank disks need I(format=true); recognised or
    unknown content needs I(format=true) and I(wipe_serial) as well; what is mounted, held, part of a RAID, LVM or ZFS
    set or needed by the system is never written to, whatever is set.
  - With I(state=unmounted) unmounts and forgets the unit; the disk keeps its content.
options:
  device:
    description:
      - Link below C(/dev/disk/by-id/) of a whole disk or namespace. Kernel names are refused.
      - May be empty with I(state=report); all disks of the host are listed then.
    type: str
    default: ""
  serial:
    description: Serial of the disk; must match what the disk itself reports.
    type: str
    default: ""
  min_size_gib:
    description: Smallest size in GiB that the disk may have.
    type: float
  max_size_gib:
    description: Largest size in GiB that the disk may have.
    type: float
  state:
    description: What to bring about.
    type: str
    choices: [report, present, unmounted]
    default: report
  format:
    description:
      - Whether a blank disk may be formatted. Only a real boolean true counts; a text such as C("yes") does not.
    type: raw
    default: false
  wipe_serial:
    description: The disk's serial again, to allow that recognised or unknown content is destroyed.
    type: str
    default: ""
  fstype:
    description: File system to make.
    type: str
    choices: [ext4, xfs]
    default: ext4
  label:
    description: Label of the file system, at most 16 (ext4) or 12 (xfs) characters.
    type: str
    default: kvfleet
  spare_percent:
    description: Percentage of the disk that stays unpartitioned, for the drive's own housekeeping.
    type: float
    default: 7
  mount_point:
    description: Where the partition is mounted.
    type: str
    default: /var/cache/kvfleet
  data_directory:
    description: Directory on the partition for the service user; C(data) below the mount point unless given.
    type: str
    default: ""
  owner:
    description: Owner of the data directory.
    type: str
    default: kvfleet
  group:
    description: Group of the data directory.
    type: str
    default: kvfleet
  allow_raid0:
    description: Whether an md RAID0 array may be the cache disk. RAID4, 5 and 6 are always refused.
    type: raw
    default: false
  health_max_used_percent:
    description: Warn when the drive has used more than this percentage of its rated endurance.
    type: float
    default: 90
  health_min_spare_percent:
    description: Warn when fewer than this percentage of the drive's spare blocks are left.
    type: float
    default: 10
  health_max_media_errors:
    description: Warn when the drive has had more media errors than this.
    type: int
    default: 0
  measure_speed:
    description:
      - When to measure the new file system with C(fio), for at most 30 seconds, on a file in the data directory.
    type: str
    choices: [never, after_format, always]
    default: never
  chunk_bytes:
    description: Size in bytes of the reads that stand for the cache's chunks in the measurement.
    type: int
    default: 1048576
attributes:
  check_mode:
    support: full
    description: Reads the disk completely and returns the exact steps.
  diff_mode:
    support: full
    description: Shows identity, content and steps.
author:
  - kvfleet
"""

EXAMPLES = r"""
- name: List the disks of a host and why each can or cannot be the cache disk
  cache_disk:
    state: report

- name: Bring the cache disk in
  cache_disk:
    state: present
    device: /dev/disk/by-id/nvme-SAMSUNG_MZQL21T9HCJR-00A07_S64GNE0T000001
    serial: S64GNE0T000001
    min_size_gib: 1700
    format: true

- name: Unmount it, and keep everything on it
  cache_disk:
    state: unmounted
"""

RETURN = r"""
candidates:
  description: With I(state=report) and no device, every disk with identity, content, C(eligible) and C(reasons).
  type: list
  elements: dict
  returned: when no device was named
device:
  description: The link that was named.
  type: str
  returned: when a device was named
kernel_name:
  description: The kernel's name of the disk at this moment.
  type: str
  returned: when a device was named
model:
  description: Model as the disk reports it.
  type: str
  returned: when a device was named
serial:
  description: Serial as the disk, udev or the link reports it.
  type: str
  returned: when a device was named
firmware:
  description: Firmware revision.
  type: str
  returned: when a device was named
size_bytes:
  description: Size of the whole disk.
  type: int
  returned: when a device was named
content:
  description:
    - Whose the content is.
    - One of blank, ours, ours_unfinished, ours_moved, ours_damaged, recognised, unknown, unreadable.
  type: str
  returned: when a device was named
action:
  description: What was decided (refuse, reuse, resume, format, overwrite).
  type: str
  returned: when a device was named
partition_uuid:
  description: UUID of our partition.
  type: str
  returned: when a device was named
filesystem_uuid:
  description: UUID of our file system.
  type: str
  returned: when a device was named
fstype:
  description: Type of our file system.
  type: str
  returned: when a device was named
mount_point:
  description: Where it is mounted.
  type: str
  returned: always
data_directory:
  description: The service user's directory on it.
  type: str
  returned: when a device was named
mounted:
  description: Whether our file system is mounted there, verified by device number and UUID.
  type: bool
  returned: always
partition_gib:
  description: Size of the partition in GiB.
  type: float
  returned: when a device was named
spare_gib:
  description: Space left free behind the partition in GiB.
  type: float
  returned: when a device was named
discard:
  description: Whether the disk supports discard.
  type: bool
  returned: when a device was named
direct_io:
  description: Whether an aligned O_DIRECT write and read-back in the data directory passed.
  type: bool
  returned: when a device was named
health:
  description:
    - What the drive says about itself; C(available) is false with a C(reason) when nothing can be asked.
    - C(capacity_bytes) is the whole drive's where it tells that, else its namespace's; C(capacity_basis) says which.
  type: dict
  returned: when a device was named
speed:
  description:
    - What C(fio) measured last.
    - With C(write_bytes_per_s), C(read_bytes_per_s), C(random_read_bytes_per_s) and C(chunk_bytes).
    - Empty if it was never measured.
  type: dict
  returned: when a device was named
signatures:
  description: Everything that the probes recognised on the disk.
  type: list
  elements: dict
  returned: when a device was named
steps:
  description: Steps that were done, or would be done in check mode.
  type: list
  elements: str
  returned: always
before:
  description: The disk before.
  type: dict
  returned: always
after:
  description: The disk after.
  type: dict
  returned: always
errors:
  description: With I(state=report), the findings that I(state=present) would refuse with.
  type: list
  elements: dict
  returned: when a device was named
warnings_found:
  description: Findings that do not stop anything, with code, message and fix.
  type: list
  elements: dict
  returned: when a device was named
"""

import json
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.disk_actions import DiskRun, present, report, unmounted
from ansible.module_utils.kvfleet.disk_probe import HostPaths, list_candidates
from ansible.module_utils.kvfleet.disks import settings_from
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.health import HealthLimits

ARGUMENTS: dict[str, Any] = {
    "device": {"type": "str", "default": ""},
    "serial": {"type": "str", "default": ""},
    "min_size_gib": {"type": "float"},
    "max_size_gib": {"type": "float"},
    "state": {"type": "str", "default": "report", "choices": ["report", "present", "unmounted"]},
    # raw, not bool: Ansible's bool would turn the text "yes" into true, and a formatter must not be armed by a text
    "format": {"type": "raw", "default": False},
    "wipe_serial": {"type": "str", "default": ""},
    "fstype": {"type": "str", "default": "ext4", "choices": ["ext4", "xfs"]},
    "label": {"type": "str", "default": "kvfleet"},
    "spare_percent": {"type": "float", "default": 7.0},
    "mount_point": {"type": "str", "default": "/var/cache/kvfleet"},
    "data_directory": {"type": "str", "default": ""},
    "owner": {"type": "str", "default": "kvfleet"},
    "group": {"type": "str", "default": "kvfleet"},
    "allow_raid0": {"type": "raw", "default": False},
    "health_max_used_percent": {"type": "float", "default": 90.0},
    "health_min_spare_percent": {"type": "float", "default": 10.0},
    "health_max_media_errors": {"type": "int", "default": 0},
    "measure_speed": {"type": "str", "default": "never", "choices": ["never", "after_format", "always"]},
    "chunk_bytes": {"type": "int", "default": 1048576},
}


def diff_of(result: dict[str, Any]) -> dict[str, str]:
    """Before and after in the form of Ansible's diff; the steps stand in the after part."""
    before = json.dumps(result["before"], indent=1, sort_keys=True) + "\n"
    after = json.dumps({**result["after"], "steps": result["steps"]}, indent=1, sort_keys=True) + "\n"
    return {"before": before, "after": after}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    # the disk tools live in sbin, which an unprivileged user's PATH lacks
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    run: DiskRun | None = None
    try:
        settings = settings_from(module.params)
        run = DiskRun(
            settings,
            run_command,
            HostPaths(),
            check_mode=module.check_mode,
            limits=HealthLimits(
                module.params["health_max_used_percent"],
                module.params["health_min_spare_percent"],
                module.params["health_max_media_errors"],
            ),
            measure=module.params["measure_speed"],
            chunk_bytes=module.params["chunk_bytes"],
        )
        state = module.params["state"]
        if state == "report" and not settings.device:
            module.exit_json(
                changed=False,
                candidates=list_candidates(settings, run_command),
                mount_point=settings.mount_point,
                mounted=False,
                steps=[],
                before={},
                after={},
            )
        result = {"report": report, "present": present, "unmounted": unmounted}[state](run)
    except KvfleetError as error:
        steps = run.steps if run is not None else []
        findings = [finding.as_dict() for finding in error.findings]
        module.fail_json(msg=str(error), findings=findings, steps=steps, changed=bool(steps))
    result["warnings_found"] = result.pop("warnings", [])
    for finding in result["warnings_found"]:
        module.warn(f"{finding['code']}: {finding['message']} {finding['fix']}")
    if module._diff and result["changed"]:
        result["diff"] = diff_of(result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
