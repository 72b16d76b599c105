#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bench_verdict
short_description: Judge a host's proof and keep the result
description:
  - Turns what C(truth_check) and C(bench_load) returned into one verdict with its reasons and the deciding figure,
    compares it with this host's earlier results below O(results_dir), and writes everything there as one new JSON file.
    Runs on the controller (C(delegate_to=localhost)).
options:
  host:
    description: The host's name in the inventory; also the name of its directory of results.
    type: str
    required: true
  plan:
    description: The host's plan (C(kvfleet_plan)).
    type: dict
    required: true
  profile:
    description: Load profile that ran.
    type: str
    default: smoke
  truth:
    description: What C(truth_check) returned.
    type: dict
    required: true
  load:
    description: What C(bench_load) returned; leave out when it did not run.
    type: dict
  ttft_p99_ms:
    description: Largest TTFT p99 in milliseconds of any warm run; not checked when left out.
    type: float
  tpot_mean_ms:
    description: Largest mean TPOT in milliseconds; not checked when left out.
    type: float
  requests_per_s:
    description: Least requests per second; not checked when left out.
    type: float
  min_warm_speedup_ram:
    description: Times that the RAM tier must be faster than computing the long prompt.
    type: float
    default: 2.0
  min_warm_speedup_disk:
    description: Times that the disk tier must be faster than computing the long prompt.
    type: float
    default: 1.3
  on_degrade:
    description: What a C(degrade) verdict does to the play.
    type: str
    choices: [warn, fail, fallback]
    default: warn
  results_dir:
    description: Directory of all results on the controller.
    type: path
    required: true
author: kvfleet
"""

EXAMPLES = r"""
- name: Judge and keep the result
  bench_verdict:
    host: "{{ inventory_hostname }}"
    plan: "{{ kvfleet_plan }}"
    truth: "{{ __truth }}"
    load: "{{ __load }}"
    results_dir: results
  delegate_to: localhost
"""

RETURN = r"""
verdict:
  description: C(pass), C(degrade) or C(fail).
  returned: always
  type: str
accepted:
  description: Whether the play may go on with this verdict.
  returned: always
  type: bool
reasons:
  description: Every reason with C(level), C(code), C(figure), C(value), C(limit), C(message), C(fix).
  returned: always
  type: list
  elements: dict
deciding:
  description: The figure that decided.
  returned: always
  type: dict
line:
  description: One line for people with host, release, profile, verdict and the deciding figure.
  returned: always
  type: str
text:
  description: The line with every reason and its fix below it.
  returned: always
  type: str
payoff:
  description: Whether the tiers pay against profile gpu, C(unknown) without a comparable result.
  returned: always
  type: dict
better_profile:
  description: The profile that served the same load better on this host, when offload costs; else null.
  returned: always
  type: str
measured:
  description:
    - For later plans C(cpu) and C(disk) (bytes per second that the tiers delivered), C(prefill_tokens_per_s) of the
      only instance, and C(instances) with C(model), C(tensor_parallel_size), C(prefill_tokens_per_s) and
      C(decode_ms_per_token) of each.
  returned: always
  type: dict
shapes:
  description: Per instance the sizes of its load, for the next proof to keep.
  returned: always
  type: dict
path:
  description: The file that was written.
  returned: always
  type: str
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import bench, history, measured
from ansible.module_utils.kvfleet.findings import KvfleetError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "plan": {"type": "dict", "required": True},
            "profile": {"type": "str", "default": "smoke"},
            "truth": {"type": "dict", "required": True},
            "load": {"type": "dict"},
            "ttft_p99_ms": {"type": "float"},
            "tpot_mean_ms": {"type": "float"},
            "requests_per_s": {"type": "float"},
            "min_warm_speedup_ram": {"type": "float", "default": 2.0},
            "min_warm_speedup_disk": {"type": "float", "default": 1.3},
            "on_degrade": {"type": "str", "choices": ["warn", "fail", "fallback"], "default": "warn"},
            "results_dir": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    truth, load = params["truth"], params["load"]
    thresholds = bench.Thresholds(
        params["ttft_p99_ms"], params["tpot_mean_ms"], params["requests_per_s"],
        params["min_warm_speedup_ram"], params["min_warm_speedup_disk"],
    )  # fmt: skip
    gone = next((str(part.get("msg")) for part in (truth, load) if part and part.get("unreachable")), "")
    verdict = bench.judge(truth.get("instances") or [], truth.get("unit_findings") or [], load, thresholds, gone)
    record = history.build_record(
        params["host"], time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), params["plan"], params["profile"],
        _kept(truth), _kept(load), verdict, truth.get("environment") or {},
    )  # fmt: skip
    earlier = history.load_records(Path(params["results_dir"]), params["host"])
    changes = [change.as_dict() for change in history.regressions(record, earlier)]
    payoff = history.payoff(record, earlier).as_dict()
    verdict = bench.judge_history(verdict, changes, payoff)
    verdict["reasons"] = [*verdict["reasons"], *history.clock_reason(record, earlier)]
    record.update(verdict, changes=changes, payoff=payoff)
    path = ""
    if not module.check_mode:
        try:
            path = str(history.store(Path(params["results_dir"]), record))
        except KvfleetError as error:
            module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    accepted = verdict["verdict"] == "pass" or (verdict["verdict"] == "degrade" and params["on_degrade"] != "fail")
    module.exit_json(
        changed=not module.check_mode,
        accepted=accepted,
        path=path,
        time=record["time"],
        payoff=payoff,
        better_profile=history.better_profile(record, earlier) if payoff["state"] == "costs" else None,
        measured=measured.speeds(params["plan"], truth.get("instances") or (), load),
        shapes={entry["name"]: entry.get("shape") or {} for entry in (load or {}).get("instances") or ()},
        line=history.line(record),
        text=history.explanation(record),
        **verdict,
    )


def _kept(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """A module's return without Ansible's own keys; the invocation would hold the key that was given."""
    own = ("changed", "failed", "unreachable", "invocation", "deprecations", "warnings", "exception")
    return None if result is None else {key: value for key, value in result.items() if key not in own}


if __name__ == "__main__":
    main()
