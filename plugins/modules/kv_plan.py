#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kv_plan
short_description: Compute the plan of a host, or refuse before anything is changed
description:
  - Describes the host (as M(host_facts) does), chooses the release, reads the models' C(config.json), checks the
    cache disk and the ports, and computes every number of the deployment.
  - Changes nothing and needs no root; as root it also looks at the content of the cache disk and at the owners of
    ports.
options:
  settings:
    description: The inventory's C(kvfleet_*), C(cache_disk_*) and C(LMCACHE_*) variables with their values.
    type: dict
    required: true
  variable_names:
    description: Names of all C(kvfleet_*) variables that the inventory sets; unknown ones are refused.
    type: list
    elements: str
    default: []
  releases:
    description:
      - The release matrix, as the document of C(releases.yml) or its list of rows, best as JSON text.
        Ansible keeps the arguments for all hosts until the task has ended, and a matrix takes less memory as text.
    type: raw
    required: true
  releases_extra:
    description: The inventory's own rows, which follow those of O(releases).
    type: list
    elements: dict
    default: []
  host:
    description: A recorded host description; without it the host is described in the same call.
    type: dict
  model_config:
    description: A recorded C(config.json) for all instances, for models that are not on this machine.
    type: dict
  plan_file:
    description: The plan that the host runs now. Computed values stay as they are while they still fit.
    type: path
    default: /etc/kvfleet/plan.json
  proof_file:
    description:
      - Record of the last proof; its C(measured) (prefill_tokens_per_s, cpu, disk) feeds the break-even advice, its
        C(disk_writes) the cache disk's endurance.
    type: path
    default: /var/lib/kvfleet/proved.json
  sessions:
    description: Number of conversations to check the tiers for, together with O(context).
    type: int
  context:
    description: Tokens of each conversation.
    type: int
  fail_on_errors:
    description: Fail when the plan has errors; otherwise return them in the plan.
    type: bool
    default: true
author: kvfleet
attributes:
  check_mode:
    support: full
"""

EXAMPLES = r"""
- name: Plan the host
  kv_plan:
    settings:
      kvfleet_profile: cpu
      kvfleet_model: /data/models/Meta-Llama-3-8B-Instruct
    releases: "{{ lookup('file', 'releases.yml') | from_yaml }}"
"""

RETURN = r"""
plan:
  description: The plan (docs/architecture.md).
  returned: success
  type: dict
host:
  description: The host description that the plan was made from.
  returned: success
  type: dict
summary:
  description: The plan as lines for people.
  returned: success
  type: list
page:
  description: The plan as titled tables.
  returned: success
  type: list
error_text:
  description: The plan's errors, one a line; empty without any.
  returned: success
  type: str
record:
  description: JSON text for O(plan_file); the same as long as nothing that runs changes.
  returned: success
  type: str
findings:
  description: All errors as code, message, fix, numbers.
  returned: on failure
  type: list
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import disk_probe, disks, plan_text, planning, sizing
from ansible.module_utils.kvfleet import measured as lasting
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.disk_health import smart_log
from ansible.module_utils.kvfleet.findings import Finding, KvfleetError
from ansible.module_utils.kvfleet.hostcheck import check_recorded
from ansible.module_utils.kvfleet.hostfacts import gather


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def list_sizes(path: str) -> dict[str, int] | None:
    try:
        return {entry.name: entry.stat().st_size for entry in Path(path).iterdir() if entry.is_file()}
    except OSError:
        return None


def check_disk(values: dict[str, Any]) -> list[Finding]:
    """What ``cache_disk`` would refuse: identity for everybody, content only for root, who alone may read it."""
    settings = disks.settings_from({key: value for key, value in values.items() if key.startswith("cache_disk_")})
    wrong = disks.check_settings(settings)
    if wrong:
        return list(wrong)
    paths = disk_probe.HostPaths()
    if os.geteuid() != 0:
        return list(disks.check_identity(disk_probe.resolve_disk(settings.device, paths), settings))
    probe = disk_probe.probe_disk(settings, run_command, paths)
    record = disk_probe.read_record(settings.serial, paths)
    return list(disks.check_cache_disk(probe, settings, record, disk_probe.machine_id(paths)))


def read_json(path: str) -> dict[str, Any] | None:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def measured(values: dict[str, Any], proof: dict[str, Any] | None) -> dict[str, Any]:
    """Speeds that this host has shown: of the last proof, and of the cache disk when it was formatted."""
    found: dict[str, Any] = {}
    history = (proof or {}).get("measured")
    if isinstance(history, dict):
        found = {key: float(history[key]) for key in ("prefill_tokens_per_s", "cpu", "disk") if history.get(key)}
        if isinstance(history.get("instances"), dict):
            found["instances"] = history["instances"]
    serial = values.get("cache_disk_serial")
    record = disk_probe.read_record(str(serial), disk_probe.HostPaths()) if serial else None
    speed = (record.notes.get("speed") or {}) if record is not None else {}
    if record is not None and isinstance(record.notes.get("direct_io"), bool):
        found["direct_io"] = record.notes["direct_io"]
    if speed.get("random_read_bytes_per_s"):
        found.setdefault("disk", float(speed["random_read_bytes_per_s"]))
    return found


def endurance(values: dict[str, Any], proof: dict[str, Any] | None) -> tuple[float | None, str]:
    """How long the cache disk will last at the write rate since its first proof, and how that is known."""
    serial = str(values.get("cache_disk_serial") or "")
    smart, why_not = smart_log(str(values.get("cache_disk_device") or ""), run_command)
    known: tuple[float | None, str] = lasting.endurance(proof, serial, smart, why_not, time.time())
    return known


def all_releases(matrix: Any, extra: list[dict[str, Any]]) -> Any:
    """The matrix with the inventory's own rows behind its own; text is JSON."""
    document = json.loads(matrix) if isinstance(matrix, str) else matrix
    if not extra:
        return document
    if isinstance(document, dict):
        return {**document, "releases": [*document["releases"], *extra]}
    return [*document, *extra]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "settings": {"type": "dict", "required": True},
            "variable_names": {"type": "list", "elements": "str", "default": []},
            "releases": {"type": "raw", "required": True},
            "releases_extra": {"type": "list", "elements": "dict", "default": []},
            "host": {"type": "dict"},
            "model_config": {"type": "dict"},
            "plan_file": {"type": "path", "default": "/etc/kvfleet/plan.json"},
            "proof_file": {"type": "path", "default": "/var/lib/kvfleet/proved.json"},
            "sessions": {"type": "int"},
            "context": {"type": "int"},
            "fail_on_errors": {"type": "bool", "default": True},
        },
        required_together=[("sessions", "context")],
        supports_check_mode=True,
    )
    options = module.params
    recorded = options["host"]
    proof = read_json(options["proof_file"]) if recorded is None else None
    try:
        host = gather(run_command) if recorded is None else check_recorded(recorded)
        plan = planning.make_plan(
            options["settings"],
            all_releases(options["releases"], options["releases_extra"]),
            host,
            read_text=read_text,
            list_sizes=list_sizes,
            variable_names=options["variable_names"],
            model_config=options["model_config"],
            check_disk=check_disk if recorded is None else None,
            previous=read_json(options["plan_file"]) if recorded is None else None,
            measured=measured(options["settings"], proof) if recorded is None else None,
            endurance=(lambda: endurance(options["settings"], proof)) if recorded is None else None,
            sessions=options["sessions"],
            context=options["context"],
        )
        if options["fail_on_errors"]:
            planning.raise_errors(plan)
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(
        changed=False,
        plan=plan,
        host=host,
        summary=plan_text.summary_lines(plan),
        page=plan_text.page_parts(plan),
        error_text="\n".join(f"{error['code']}: {error['message']} {error['fix']}" for error in plan["errors"]),
        record=json.dumps(sizing.record(plan), indent=1, sort_keys=True),
    )


if __name__ == "__main__":
    main()
