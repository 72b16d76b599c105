#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_status
short_description: Say what runs on a host against what the inventory wants
description:
  - Compares the plan of this run with the release in use, units and their settings, mount, disk, driver, free space,
    use of the tiers, the API proxy and the last proof, and names every difference.
  - Reads only. It sends no generation; C(/health) and C(/metrics) are asked on loopback.
options:
  plan:
    description: The host's plan (C(kvfleet_plan)), also one with errors.
    type: dict
    required: true
  serial:
    description: The inventory's C(cache_disk_serial), for a plan that refused the disk.
    type: str
    default: ""
  driver:
    description: The host's NVIDIA driver version.
    type: str
  proxy:
    description: Whether the inventory wants the API proxy (C(kvfleet_api_proxy)).
    type: bool
    default: false
  helper:
    description: Path of the C(kvfleet-unit) helper.
    type: path
    default: /opt/kvfleet/libexec/kvfleet-unit
attributes:
  check_mode:
    description: Nothing is ever changed.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Compare the host with the inventory
  host_status:
    plan: "{{ kvfleet_plan }}"
  register: status
"""

RETURN = r"""
state:
  description: V(ok), V(drift) or V(unknown) for the whole host.
  returned: always
  type: str
items:
  description: Every compared thing with C(area), C(name), C(state), C(wanted), C(found), C(note).
  returned: always
  type: list
  elements: dict
drift:
  description: The items that are not V(ok), one line each.
  returned: always
  type: list
  elements: str
undeployed:
  description: What a deploy of the plan would change, one line each; empty when a proof would be one of the plan.
  returned: always
  type: list
  elements: str
seen:
  description: What was found, in figures (release, units, mount, disk, space, tiers, instances, proxy, proof).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.status import OK, compare, observe, undeployed, verdict


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "serial": {"type": "str", "default": ""},
            "driver": {"type": "str"},
            "proxy": {"type": "bool", "default": False},
            "helper": {"type": "path", "default": "/opt/kvfleet/libexec/kvfleet-unit"},
        },
        supports_check_mode=True,
    )
    options = module.params
    seen = observe(
        options["plan"],
        run_command,
        serial=options["serial"],
        driver=options["driver"],
        proxy=options["proxy"],
        helper=options["helper"],
    )
    items = compare(options["plan"], seen)
    missing = undeployed(options["plan"], seen)
    for unit in seen["units"].values():
        # what differs stands in the items; whole environments are long and may hold what a user put there
        unit.pop("environment")
        unit.pop("command")
    module.exit_json(
        changed=False,
        state=verdict(items),
        items=[item.as_dict() for item in items],
        drift=[str(item) for item in items if item.state != OK],
        undeployed=[str(item) for item in missing],
        seen=seen,
    )


if __name__ == "__main__":
    main()
