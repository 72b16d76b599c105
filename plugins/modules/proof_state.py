#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: proof_state
short_description: Does the last proof of this host still stand?
description:
  - Computes a fingerprint over the plan, the release that C(current) points to, and the unit and settings files of the
    plan's services, and compares it with the last proof's. When it is the same, one short generation per instance shows
    that the services still answer; where one does not, the proof no longer stands and is due.
  - With O(record) it writes that record with the present fingerprint, atomically, keeping the one before.
  - What the disk tier kept of another release or model, for a return to it, is removed as soon as the present state is
    proved, and not earlier.
options:
  plan:
    description: The host's plan (C(kvfleet_plan)).
    type: dict
    required: true
  profile:
    description: Load profile that is asked for; any recorded proof covers C(smoke), others only themselves.
    type: str
    default: smoke
  record:
    description: What to write into C(proved.json) beside the fingerprint (time, release, verdict, figures).
    type: dict
  api_key:
    description: Key of the instances, if they have one.
    type: str
  request_limit_s:
    description: Seconds that the generation may take.
    type: float
    default: 120
author: kvfleet
"""

EXAMPLES = r"""
- name: Ask whether the last proof still stands
  proof_state:
    plan: "{{ kvfleet_plan }}"
  register: __proof
"""

RETURN = r"""
proved:
  description: Whether the last proof covers the present state and every instance generated.
  returned: always
  type: bool
reason:
  description: Why not; empty when proved.
  returned: always
  type: str
line:
  description: The last proof's line and how fast every instance answered now, or why a proof is due.
  returned: when nothing was recorded
  type: str
pool_gib:
  description: The smallest of the instances' own pools per rank, in GiB.
  returned: when nothing was recorded
  type: float
shapes:
  description: Per instance the sizes of the last recorded smoke load.
  returned: when nothing was recorded
  type: dict
fingerprint:
  description: Digest of the present state.
  returned: always
  type: str
generation:
  description: Per instance C(latency_ms) and C(completion_tokens) of the short generation, when the record matches.
  returned: always
  type: dict
dropped_tiers:
  description: Directories of the disk tier that belonged to another release or model and were removed.
  returned: always
  type: list
  elements: str
last:
  description: The last proof's record, or null.
  returned: always
  type: dict
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.disk_health import smart_log
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.host_access import base_url
from ansible.module_utils.kvfleet.http import HttpClient, HttpFailure
from ansible.module_utils.kvfleet.measured import disk_writes
from ansible.module_utils.kvfleet.proof import difference, fingerprint, read_record, unit_files, write_record
from ansible.module_utils.kvfleet.tiers import drop_stale_tiers
from ansible.module_utils.kvfleet.truth import check_model_name, real_completion, request_finding


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "profile": {"type": "str", "default": "smoke"},
            "record": {"type": "dict"},
            "api_key": {"type": "str", "no_log": True},
            "request_limit_s": {"type": "float", "default": 120},
        },
        supports_check_mode=True,
    )
    plan: dict[str, Any] = module.params["plan"]
    state = Path(plan["paths"]["state"])
    parts = fingerprint(plan, unit_files(plan))
    last = read_record(state)
    if module.params["record"] is not None:
        if not module.check_mode:
            written = {**module.params["record"], "parts": parts, "fingerprint": parts["all"]}
            disk = plan["host"].get("disk")
            if disk:
                smart, _ = smart_log(str(disk["device"]), run_command)
                written["disk_writes"] = disk_writes(last, str(disk["serial"]), smart, time.time())
            write_record(state, written)
        dropped = drop_stale_tiers(plan, dry_run=module.check_mode)
        module.exit_json(
            changed=True,
            proved=True,
            reason="",
            fingerprint=parts["all"],
            generation={},
            dropped_tiers=dropped,
            last=last,
        )
    reason = difference(last, parts, module.params["profile"])
    generation = {}
    if not reason and not module.check_mode:
        for instance in plan["instances"]:
            try:
                engine = HttpClient(base_url(instance), module.params["api_key"])
                check_model_name(engine, instance)
                generation[instance["name"]] = real_completion(
                    engine, instance["served_model_name"], module.params["request_limit_s"]
                )
            except HttpFailure as failure:
                reason = str(request_finding(instance["name"], failure))
            except KvfleetError as error:
                reason = str(error)
            if reason:
                # the proof that is due now gives the verdict and keeps it among the results
                break
    # a return to the release that was proved before needs no new record
    dropped = [] if reason else drop_stale_tiers(plan, dry_run=module.check_mode)
    module.exit_json(
        changed=bool(dropped),
        proved=not reason,
        reason=reason,
        line=standing_line(last, reason, generation),
        pool_gib=min((pool_gib(instance) for instance in plan["instances"]), default=0),
        shapes=(last or {}).get("shapes") or {},
        fingerprint=parts["all"],
        generation=generation,
        dropped_tiers=dropped,
        last=last,
    )


def pool_gib(instance: dict[str, Any]) -> float:
    """The engine's own pool per rank in GiB, for measuring other profiles with the same one."""
    size = instance.get("kv_cache_memory_bytes") or instance.get("gpu_kv_pool_bytes_per_rank") or 0
    return round(float(size) / 1024**3, 3)


def standing_line(last: dict[str, Any] | None, reason: str, generation: dict[str, Any]) -> str:
    """What to show when the last proof stands: its own line, and that every instance answered now."""
    if reason or last is None:
        return f"to prove: {reason}"
    answered = ", ".join(f"{name} answered in {entry['latency_ms']:.0f} ms" for name, entry in generation.items())
    return f"{last.get('line', '')}  (unchanged since {last.get('time', '?')}; {answered})"


if __name__ == "__main__":
    main()
