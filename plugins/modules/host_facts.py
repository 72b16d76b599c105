#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_facts
short_description: Describe a GPU host in one call
description:
  - Returns everything the planner needs of a host (GPUs, RAM, NUMA nodes, disks, ports in use, versions), read from
    C(nvidia-smi), C(lsblk), C(/proc) and C(/sys). Changes nothing and needs no root.
  - What cannot be read is null, and RV(host.unavailable) says why; a missing or broken driver never fails the module.
options: {}
author: kvfleet
attributes:
  check_mode:
    support: full
"""

EXAMPLES = r"""
- name: Describe the host
  host_facts:
  register: host_plan_facts
"""

RETURN = r"""
host:
  description: The host description.
  returned: always
  type: dict
  contains:
    hostname: {description: The kernel's host name., type: str}
    gpus:
      description: GPUs with index, uuid, name, memory_mib, numa_node, compute_capability, pcie_gen, pcie_width, mig.
      type: list
    driver_version: {description: Version of the NVIDIA driver or null., type: str}
    memory: {description: total_bytes and available_bytes., type: dict}
    numa: {description: NUMA nodes with node, cpus, memory_bytes., type: list}
    cpus: {description: CPUs online., type: int}
    disks: {description: Whole disks with by_id, serial, size_bytes, rotational and more., type: list}
    shm_bytes: {description: Size of the file system at /dev/shm., type: int}
    python: {description: Version of the interpreter that ran the module., type: str}
    glibc: {description: Version of the C library., type: str}
    kernel: {description: Kernel release., type: str}
    os: {description: Name and version of the operating system., type: str}
    unavailable: {description: 'What could not be read, as field and reason.', type: list}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.hostfacts import gather


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    module.exit_json(changed=False, host=gather(run_command))


if __name__ == "__main__":
    main()
