#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_unit
short_description: Bring kvfleet's systemd units to the state that their files describe
description:
  - Enables and starts the given units in order, restarts exactly those that run with something else than what is on
    disk now (unit file, drop-ins, settings, release), removes units of ours that are not named any more, and waits
    until all stay up.
  - The decision compares digests that the units record at every start, so a run that was interrupted between
    rendering and restarting is repaired by the next one.
options:
  state:
    description:
      - C(present) brings the units to what their files say.
      - C(absent) stops, disables and removes every unit of ours and the target; nothing else on the host is touched.
    type: str
    choices: [present, absent]
    default: present
  units:
    description: Unit names in start order; a unit comes after those it needs. Required with O(state=present).
    type: list
    elements: str
    default: []
  owned_prefixes:
    description:
      - Unit names that begin so are ours; those not in O(units) are stopped, disabled and removed, in this order.
    type: list
    elements: str
    default: []
  target:
    description: The target that holds the units together; it is enabled and started.
    type: str
    required: true
  helper:
    description: Path of the C(kvfleet-unit) helper.
    type: path
    default: /opt/kvfleet/libexec/kvfleet-unit
  cache_data:
    description:
      - Data directory of the cache partition. With it and O(cache_mount), the tier and the settings of a unit that is
        removed are deleted too, on a mounted partition of kvfleet only.
    type: path
  cache_mount:
    description: Mount point of the cache partition.
    type: path
  listeners:
    description:
      - Sockets that the plan names (C(unit), C(address), C(port), C(purpose)). They are compared with those that the
        units hold; a missing one and one that other hosts can reach against the plan are errors.
    type: list
    elements: dict
    default: []
  timeout_s:
    description: Seconds that one start or stop may take; the units' own limits are shorter.
    type: float
    default: 1200
  settle_s:
    description: Seconds that everything which was started must stay up.
    type: float
    default: 3
author: kvfleet
"""

EXAMPLES = r"""
- name: Bring servers and instances to the rendered state
  service_unit:
    units: [kvfleet-lmcache@0.service, kvfleet-vllm@default.service]
    owned_prefixes: ["kvfleet-vllm@", "kvfleet-lmcache@"]
    target: kvfleet.target

- name: Remove every unit of kvfleet
  service_unit:
    state: absent
    owned_prefixes: ["kvfleet-vllm@", "kvfleet-lmcache@"]
    target: kvfleet.target
"""

RETURN = r"""
actions:
  description: What was done (or would be), one line each, in order.
  returned: always
  type: list
  elements: str
inner_listeners:
  description: Sockets of our units on loopback that the plan does not name (the engine's own).
  returned: when O(listeners) is given
  type: list
  elements: dict
started:
  description: Units that were started or restarted.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.hostfacts import listeners as sockets_of_host
from ansible.module_utils.kvfleet.listeners import compare
from ansible.module_utils.kvfleet.unit_control import UnitActions, UnitControl, decide


def remove(module: AnsibleModule, control: UnitControl) -> None:
    """Take every unit of ours away and end the module."""
    actions = UnitActions(remove=control.strays([*module.params["owned_prefixes"], module.params["target"]], []))
    actions.reload = bool(actions.remove)
    try:
        if not module.check_mode:
            control.apply(actions, module.params["timeout_s"])
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(changed=actions.any, actions=actions.describe(), started=[])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "units": {"type": "list", "elements": "str", "default": []},
            "owned_prefixes": {"type": "list", "elements": "str", "default": []},
            "target": {"type": "str", "required": True},
            "helper": {"type": "path", "default": "/opt/kvfleet/libexec/kvfleet-unit"},
            "cache_data": {"type": "path"},
            "cache_mount": {"type": "path"},
            "listeners": {"type": "list", "elements": "dict", "default": []},
            "timeout_s": {"type": "float", "default": 1200},
            "settle_s": {"type": "float", "default": 3},
        },
        required_if=[("state", "present", ("units",))],
        required_together=[("cache_data", "cache_mount")],
        supports_check_mode=True,
    )
    options = module.params
    control = UnitControl(run_command, options["helper"])
    if options["state"] == "absent":
        remove(module, control)
    if module.check_mode and run_command(["test", "-x", options["helper"]]).returncode:
        # nothing is installed yet: everything would be started
        module.exit_json(
            changed=True, actions=[f"start {unit}" for unit in options["units"]], started=list(options["units"])
        )
    try:
        strays = control.strays(options["owned_prefixes"], options["units"])
        states = [control.state(unit) for unit in options["units"]]
        target = options["target"]
        actions = decide(states, strays, control.is_enabled(target), target, control.is_active(target))
        if actions.any and not module.check_mode:
            cache = (options["cache_data"], options["cache_mount"]) if options["cache_data"] else None
            control.apply(actions, options["timeout_s"], cache)
            # a server that was restarted has taken its running instances along
            missing = [unit for unit in options["units"] if not control.state(unit).active]
            control.apply(UnitActions(start=missing), options["timeout_s"])
            actions.start += missing
            control.settle(options["units"], options["settle_s"])
        inner = []
        if options["listeners"] and not module.check_mode:
            wrong, inner = compare(options["listeners"], sockets_of_host())
            if wrong:
                raise KvfleetError(*wrong)
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    described = actions.describe()
    module.exit_json(
        changed=actions.any,
        actions=described,
        started=actions.start,
        inner_listeners=inner,
        diff={"before": "", "after": "".join(f"{line}\n" for line in described)},
    )


if __name__ == "__main__":
    main()
