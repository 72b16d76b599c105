#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: truth_check
short_description: Prove that every tier of every instance serves the same answer as computing it
description:
  - Sends one long random prompt per instance cold, then again so that the RAM tier and the disk tier must serve it, and
    compares the greedy answers and their log-probabilities. LMCache's and vLLM's own counters decide which tier served.
  - Also checks that every unit of the plan is active, was never restarted by systemd, and wrote no alarm line into its
    journal since it was started.
  - Changes nothing but the cache itself. Findings are returned, not raised, so that a failing proof can be recorded;
    only a second benchmark on the same host fails the task.
options:
  plan:
    description: The host's plan (C(kvfleet_plan)).
    type: dict
    required: true
  may_clear:
    description: Whether the RAM tier may be emptied, which the disk pass needs; only before the host takes traffic.
    type: bool
    default: false
  api_key:
    description: Key of the instances, if they have one.
    type: str
  check_units:
    description: Whether to look at the units and their journals; off where the services are not systemd's.
    type: bool
    default: true
  request_limit_s:
    description: Seconds that one request may take.
    type: float
    default: 300
  flood_limit_s:
    description: Seconds that displacing the engine's own pool may take.
    type: float
    default: 300
  settle_limit_s:
    description: Seconds to wait until asynchronous stores have reached their tier.
    type: float
    default: 60
  cold_limit_s:
    description: Seconds that computing the long prompt may be planned to take; the prompt is shortened on slower hosts.
    type: float
    default: 45
author: kvfleet
"""

EXAMPLES = r"""
- name: Check that every tier tells the truth
  truth_check:
    plan: "{{ kvfleet_plan }}"
    may_clear: true
  register: __truth
"""

RETURN = r"""
ok:
  description: Whether there is no finding.
  returned: always
  type: bool
instances:
  description:
    - Per instance C(ttft_ms) (cold, engine_cache, ram, disk), C(hit_tokens), C(bytes), C(identical),
      C(max_logprob_difference), C(tolerance), C(prompt_tokens), speeds, C(notes) and C(findings).
  returned: always
  type: list
  elements: dict
units:
  description: Per unit whether it is active, how often systemd restarted it, and its alarm lines.
  returned: always
  type: dict
environment:
  description: Kernel, processor, memory, driver and GPUs that the figures were measured on.
  returned: always
  type: dict
unit_findings:
  description: Findings about units.
  returned: always
  type: list
  elements: dict
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.bench_session import only_benchmark
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.host_access import (
    base_url,
    drop_page_cache,
    engine_dtype,
    server_of,
    server_url,
    tier_files,
    vocabulary_size,
)
from ansible.module_utils.kvfleet.host_load import environment
from ansible.module_utils.kvfleet.http import HttpClient
from ansible.module_utils.kvfleet.proof import check_units
from ansible.module_utils.kvfleet.truth import TOLERANCES, InstanceProof, Limits, Surroundings


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "may_clear": {"type": "bool", "default": False},
            "api_key": {"type": "str", "no_log": True},
            "check_units": {"type": "bool", "default": True},
            "request_limit_s": {"type": "float", "default": 300},
            "flood_limit_s": {"type": "float", "default": 300},
            "settle_limit_s": {"type": "float", "default": 60},
            "cold_limit_s": {"type": "float", "default": 45},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="A proof sends requests; nothing was checked.")
    started = time.monotonic()
    params = module.params
    try:
        # it clears the RAM tier and fills the pool: beside another benchmark both would measure each other
        with only_benchmark():
            instances = [prove_instance(params, instance) for instance in params["plan"]["instances"]]
            units, unit_findings = check_units(params["plan"], run_command) if params["check_units"] else ({}, [])
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(
        changed=False,
        ok=not unit_findings and not any(instance["findings"] for instance in instances),
        instances=instances,
        units=units,
        unit_findings=[finding.as_dict() for finding in unit_findings],
        environment=environment(run_command, any(instance.get("gpus") for instance in params["plan"]["instances"])),
        duration_s=round(time.monotonic() - started, 1),
    )


def prove_instance(params: dict[str, Any], instance: dict[str, Any]) -> dict[str, Any]:
    """All passes of one instance against the servers of the plan."""
    server = server_of(params["plan"], instance)
    proof = InstanceProof(
        instance,
        server,
        HttpClient(base_url(instance), params["api_key"]),
        HttpClient(server_url(server)) if server else None,
        vocabulary_size(instance),
        TOLERANCES[engine_dtype(instance)],
        params["may_clear"],
        Surroundings(tier_files=tier_files, drop_page_cache=drop_page_cache),
        Limits(params["request_limit_s"], params["flood_limit_s"], params["settle_limit_s"], params["cold_limit_s"]),
    )
    result: dict[str, Any] = proof.run()
    return result


if __name__ == "__main__":
    main()
