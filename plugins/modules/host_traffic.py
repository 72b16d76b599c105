#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_traffic
short_description: Take a host out of traffic before a restart, return it after its proof
description:
  - V(drained) acts only when bringing the units to what is on disk would stop something that runs. It removes the
    readiness file, runs the inventory's command, and waits until no request is in flight or the deadline has passed.
  - V(serving) acts only when the host is not in traffic. It runs the inventory's command and makes the readiness file.
    It also keeps the state on disk, when the last proof covers it, as the one that a failed rollout returns to.
options:
  state:
    description: Which of both.
    type: str
    choices: [drained, serving]
    required: true
  plan:
    description: The host's plan (C(kvfleet_plan)).
    type: dict
    required: true
  units:
    description: Unit names in start order, as O(service_unit#module:units); needed with O(state=drained).
    type: list
    elements: str
    default: []
  owned_prefixes:
    description: Unit names that begin so are ours.
    type: list
    elements: str
    default: ["kvfleet-vllm@", "kvfleet-lmcache@"]
  helper:
    description: Path of the C(kvfleet-unit) helper.
    type: path
    default: /opt/kvfleet/libexec/kvfleet-unit
  command:
    description: Command (argument list, no shell) that tells the router; runs on the host.
    type: list
    elements: str
    default: []
  undo_command:
    description: With O(state=drained), what tells the router the contrary, for a O(command) that fails late.
    type: list
    elements: str
    default: []
  always:
    description: With O(state=drained), act also when no unit would stop or start, and wait for nothing.
    type: bool
    default: false
  reason:
    description: With O(state=drained), why, for who looks at the host; without it the units that will be restarted.
    type: str
    default: ""
  command_limit_s:
    description: Seconds that the command may take.
    type: float
    default: 60
  notice_s:
    description: Seconds that a load balancer may take to see that the readiness file is gone.
    type: float
    default: 0
  deadline_s:
    description: Seconds to wait for requests in flight after that.
    type: float
    default: 60
attributes:
  check_mode:
    description: Says whether it would act.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Take the host out of traffic before anything is restarted
  host_traffic:
    state: drained
    plan: "{{ kvfleet_plan }}"
    units: [kvfleet-lmcache@0.service, kvfleet-vllm@default.service]
    command: [/usr/local/bin/router-drain, gpu-host-1]
"""

RETURN = r"""
moving:
  description: Running units that will be stopped, and on a host that takes traffic services that will be started.
  returned: O(state=drained)
  type: list
  elements: str
in_flight:
  description: Requests that were still running when the wait ended.
  returned: O(state=drained), when it acted
  type: int
waited_s:
  description: Seconds waited.
  returned: O(state=drained), when it acted
  type: float
kept:
  description: Whether another proved state than before is the one to return to now.
  returned: O(state=serving)
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import serving
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.unit_control import UnitControl


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["drained", "serving"], "required": True},
            "plan": {"type": "dict", "required": True},
            "units": {"type": "list", "elements": "str", "default": []},
            "owned_prefixes": {"type": "list", "elements": "str", "default": ["kvfleet-vllm@", "kvfleet-lmcache@"]},
            "helper": {"type": "path", "default": "/opt/kvfleet/libexec/kvfleet-unit"},
            "command": {"type": "list", "elements": "str", "default": []},
            "undo_command": {"type": "list", "elements": "str", "default": []},
            "always": {"type": "bool", "default": False},
            "reason": {"type": "str", "default": ""},
            "command_limit_s": {"type": "float", "default": 60},
            "notice_s": {"type": "float", "default": 0},
            "deadline_s": {"type": "float", "default": 60},
        },
        supports_check_mode=True,
    )
    options = module.params
    plan = options["plan"]
    command = tuple(options["command"])
    try:
        if options["state"] == "drained":
            control = UnitControl(run_command, options["helper"])
            ready = serving.is_ready(serving.traffic_directory(plan))
            moving = serving.will_move(control, options["units"], options["owned_prefixes"], options["helper"], ready)
            acts = bool(moving) or (options["always"] and ready)
            if not acts or module.check_mode:
                module.exit_json(changed=acts, moving=moving)
            hooks = serving.Hooks(
                drain=command,
                undrain=tuple(options["undo_command"]),
                command_limit_s=options["command_limit_s"],
                notice_s=options["notice_s"],
                deadline_s=0 if options["always"] else options["deadline_s"],
            )
            reason = options["reason"] or "a rollout restarts " + ", ".join(moving)
            left = serving.drain(plan, reason, hooks, run_command)
            if left["in_flight"]:
                module.warn(f"{left['in_flight']} requests were still running after {left['waited_s']} s")
            module.exit_json(changed=True, moving=moving, **left)
        kept = serving.keep(plan, dry_run=module.check_mode)
        if module.check_mode:
            returned = not serving.is_ready(serving.traffic_directory(plan))
        else:
            hooks = serving.Hooks(undrain=command, command_limit_s=options["command_limit_s"])
            returned = serving.serve(plan, hooks, run_command)
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(changed=returned or kept, kept=kept)


if __name__ == "__main__":
    main()
