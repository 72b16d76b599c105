#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: rollout_gate
short_description: Decide whether a rollout may begin or go on, and in which order
description:
  - With O(stage=plan), after every host was planned, it fails with one table when any plan has errors or any host was
    lost, and returns the wave of every host otherwise.
  - With O(stage=wave), between batches, it fails when a wave lost more hosts than O(max_fail_percentage) allows.
  - Runs once, on the controller; changes nothing.
options:
  stage:
    description: Which of both questions.
    type: str
    choices: [plan, wave]
    required: true
  hosts:
    description: Every host of the run or of the wave.
    type: list
    elements: str
    required: true
  active:
    description: Those that are still there, neither failed nor unreachable.
    type: list
    elements: str
    required: true
  errors:
    description: The errors of each active host's plan, by host.
    type: dict
    default: {}
  serving:
    description: The units of kvfleet that run on each active host, by host.
    type: dict
    default: {}
  serials:
    description: The C(cache_disk_serial) of each active host; no two of those with a disk tier may be the same.
    type: dict
    default: {}
  profiles:
    description: The profile of each active host's plan.
    type: dict
    default: {}
  recorded:
    description:
      - Hosts are about to be changed that were planned from a recorded description, so that the plan is not of the
        machine that Ansible reaches. Always refused.
    type: bool
    default: false
  canaries:
    description: Hosts of the inventory's group C(kvfleet_canary).
    type: list
    elements: str
    default: []
  batches:
    description: C(kvfleet_batches), numbers of hosts or shares such as C(10%).
    type: raw
  max_fail_percentage:
    description: Share of a wave, 0 to 100, that may be lost before the rollout stops.
    type: float
    default: 0
  skip_unreachable:
    description: Go on without the hosts that could not be planned.
    type: bool
    default: false
  must_serve:
    description: Refuse hosts on which nothing runs, because there is nothing to upgrade.
    type: bool
    default: false
  refuse:
    description: Fail at errors; otherwise only return them.
    type: bool
    default: true
attributes:
  check_mode:
    description: Nothing is ever changed.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Stop before the first change when any host cannot be deployed
  rollout_gate:
    stage: plan
    hosts: "{{ ansible_play_hosts_all }}"
    active: "{{ ansible_play_hosts }}"
    errors: "{{ errors_by_host }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
waves:
  description: V(canary), V(new) or V(serving) for each active host.
  returned: O(stage=plan)
  type: dict
batches:
  description: Number of batches in which the serving hosts will go.
  returned: O(stage=plan)
  type: int
table:
  description: Why hosts cannot be deployed, as text; empty when all can.
  returned: O(stage=plan)
  type: str
lost:
  description: Hosts that dropped out.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import rollout


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "stage": {"type": "str", "choices": ["plan", "wave"], "required": True},
            "hosts": {"type": "list", "elements": "str", "required": True},
            "active": {"type": "list", "elements": "str", "required": True},
            "errors": {"type": "dict", "default": {}},
            "serving": {"type": "dict", "default": {}},
            "serials": {"type": "dict", "default": {}},
            "profiles": {"type": "dict", "default": {}},
            "recorded": {"type": "bool", "default": False},
            "canaries": {"type": "list", "elements": "str", "default": []},
            "batches": {"type": "raw"},
            "max_fail_percentage": {"type": "float", "default": 0},
            "skip_unreachable": {"type": "bool", "default": False},
            "must_serve": {"type": "bool", "default": False},
            "refuse": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    options = module.params
    active = set(options["active"])
    lost = [name for name in options["hosts"] if name not in active]
    if options["stage"] == "wave":
        if rollout.too_many_lost(lost, len(options["hosts"]), options["max_fail_percentage"]):
            module.fail_json(
                msg=(
                    f"KVF-HOST-082: The rollout stops: {', '.join(lost)} failed or went away, "
                    f"{len(lost)} of {len(options['hosts'])} hosts of this wave. Hosts that did not have their turn "
                    "are as they were. Repair those hosts and run again; what is proved is not repeated."
                ),
                lost=lost,
            )
        module.exit_json(changed=False, lost=lost)
    if options["recorded"]:
        module.fail_json(
            msg=(
                "KVF-HOST-086: The hosts are planned from kvfleet_host_facts_file, a recorded description, so nothing "
                "is deployed: the plan is not of the machine behind the connection. Leave kvfleet_host_facts_file "
                "out to deploy; playbooks/plan.yml shows the plan."
            ),
            lost=lost,
        )
    batches, wrong = rollout.check_batches(options["batches"] or list(rollout.DEFAULT_BATCHES))
    hosts = [
        rollout.HostState(
            name, serves=bool(options["serving"].get(name)), errors=tuple(options["errors"].get(name) or ())
        )
        for name in options["hosts"]
        if name in active
    ]
    reasons = dict.fromkeys(lost, "it is unreachable or failed while it was planned, see above")
    found = [("all hosts", finding) for finding in wrong]
    found += rollout.refusals(hosts, reasons, skip_unreachable=options["skip_unreachable"])
    found += rollout.idle(hosts) if options["must_serve"] else []
    found += rollout.shared_serials(
        {
            name: str(serial or "")
            for name, serial in options["serials"].items()
            if options["profiles"].get(name) == "disk"
        }
    )
    text = rollout.table(found, len(options["hosts"])) if found else ""
    if found and options["refuse"]:
        module.fail_json(msg=text, table=text, lost=lost)
    waves = rollout.waves(hosts, options["canaries"])
    serving = sum(1 for wave in waves.values() if wave == rollout.SERVING)
    module.exit_json(
        changed=False,
        waves=waves,
        batches=len(rollout.batch_sizes(batches, serving)) if batches else 0,
        table=text,
        lost=lost,
    )


if __name__ == "__main__":
    main()
