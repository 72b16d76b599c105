#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: bench_load
short_description: Put a published load on every instance of this host and measure it
description:
  - Runs C(vllm bench serve) from the release's own environment through a named profile whose sizes follow from the plan
    and from what C(truth_check) measured. Reads the engine's and LMCache's counters around every run and samples them,
    the disks and the GPUs during it.
  - A benchmark that fails returns findings; only a second benchmark on the same host and wrong options fail the task.
options:
  plan:
    description: The host's plan (C(kvfleet_plan)).
    type: dict
    required: true
  profile:
    description: Which load.
    type: str
    choices: [smoke, article, long, custom]
    default: smoke
  truth:
    description: C(instances) of C(truth_check); its speeds decide the sizes of C(smoke).
    type: list
    elements: dict
    default: []
  user:
    description: System user that runs the load.
    type: str
    default: kvfleet
  budget_s:
    description: Seconds that the requests of C(smoke) may take on one instance, start-up of the tool not counted.
    type: float
    default: 50
  scale:
    description: Factor that shortens C(article) (requests, prompts, outputs); 1 is the article's own load.
    type: float
    default: 1
  custom_runs:
    description: Runs of C(custom), each a dictionary (see docs/proof.md).
    type: list
    elements: dict
    default: []
  may_clear:
    description: Whether the RAM tier may be emptied before the first warm run, so that the disk serves it.
    type: bool
    default: false
  api_key:
    description: Key of the instances, if they have one.
    type: str
  shapes:
    description: Per instance the sizes of an earlier smoke load, kept while they still fit, so that results compare.
    type: dict
    default: {}
  run_limit_s:
    description: Seconds that one run may take.
    type: float
    default: 600
  sample_interval_s:
    description: Seconds between two samples.
    type: float
    default: 2
author: kvfleet
"""

EXAMPLES = r"""
- name: Put the smoke load on the host
  bench_load:
    plan: "{{ kvfleet_plan }}"
    truth: "{{ __truth['instances'] }}"
  register: __load
"""

RETURN = r"""
ok:
  description: Whether there is no finding.
  returned: always
  type: bool
profile:
  description: The load profile that ran.
  returned: always
  type: str
instances:
  description: Per instance its C(runs) (C(run), C(figures), C(tokens) by source and tier, C(series)) and C(findings).
  returned: always
  type: list
  elements: dict
"""

import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet.bench import PROFILES, Speed
from ansible.module_utils.kvfleet.bench_session import BenchSession, Sampler, only_benchmark
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.host_access import base_url, require_tokenizer, server_of, server_url, tier_paths
from ansible.module_utils.kvfleet.host_load import HostProbe, main_pids
from ansible.module_utils.kvfleet.http import HttpClient, HttpFailure
from ansible.module_utils.kvfleet.load import InstanceLoad, plan_runs
from ansible.module_utils.kvfleet.truth import check_model_name, request_finding

#: results of the running load, below the system's temporary directory
DIRECTORY_PREFIX = "kvfleet-bench-"


def end_in_order(*_unused: object) -> None:
    """Who is told to end the benchmark ends its process: then its load and its files must go too."""
    raise SystemExit(143)


def remove_left_over() -> None:
    """Files of a benchmark that was killed; whoever holds the lock knows that none of them is in use."""
    for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "profile": {"type": "str", "choices": list(PROFILES), "default": "smoke"},
            "truth": {"type": "list", "elements": "dict", "default": []},
            "user": {"type": "str", "default": "kvfleet"},
            "budget_s": {"type": "float", "default": 50},
            "scale": {"type": "float", "default": 1},
            "custom_runs": {"type": "list", "elements": "dict", "default": []},
            "may_clear": {"type": "bool", "default": False},
            "api_key": {"type": "str", "no_log": True},
            "shapes": {"type": "dict", "default": {}},
            "run_limit_s": {"type": "float", "default": 600},
            "sample_interval_s": {"type": "float", "default": 2},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="A load sends requests; nothing was measured.")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, end_in_order)
    try:
        with only_benchmark():
            remove_left_over()
            with tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as directory:
                instances = [
                    load_instance(module.params, instance, Path(directory))
                    for instance in module.params["plan"]["instances"]
                ]
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(
        changed=False,
        ok=not any(instance["findings"] for instance in instances),
        profile=module.params["profile"],
        instances=instances,
        duration_s=round(time.monotonic() - started, 1),
    )


def load_instance(params: dict[str, Any], instance: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The whole profile on one instance."""
    plan = params["plan"]
    failed: dict[str, Any] = {
        "name": instance["name"], "profile": instance["profile"], "runs": [], "notes": [], "scale": params["scale"],
    }  # fmt: skip
    server = server_of(plan, instance)
    engine = HttpClient(base_url(instance), params["api_key"])
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **instance.get("environment", {}),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if params["api_key"]:
        # the tool reads it from here; on its command line every user of the host would see it
        environment["OPENAI_API_KEY"] = params["api_key"]
    measured: dict[str, Any] = next((entry for entry in params["truth"] if entry["name"] == instance["name"]), {})
    speed = None
    if measured.get("prefill_tokens_per_s") and measured.get("decode_ms_per_token"):
        speed = Speed(float(measured["prefill_tokens_per_s"]), float(measured["decode_ms_per_token"]))
    results = directory / instance["name"]
    results.mkdir(mode=0o700)
    directory.chmod(0o755)
    units = [f"kvfleet-{'lmcache@' + server['name'] if server else 'vllm@' + instance['name']}.service"]
    base_paths = tier_paths(server, instance)
    host = HostProbe(base_paths, main_pids(units, run_command), bool(instance.get("gpus")), run_command)
    try:
        tokenizer = require_tokenizer(instance)
        check_model_name(engine, instance)
        with BenchSession(Path(plan["paths"]["current"]), environment, results, params["user"]) as session:
            load = InstanceLoad(
                instance, server, engine, HttpClient(server_url(server)) if server else None, tokenizer, session,
                lambda probe: Sampler(probe, params["sample_interval_s"]), host, results, params["run_limit_s"],
            )  # fmt: skip
            runs = plan_runs(
                params["profile"], load.room(), speed, random.SystemRandom().randrange(1, 2**31), params["budget_s"],
                params["may_clear"], params["scale"], params["custom_runs"], params["shapes"].get(instance["name"]),
            )  # fmt: skip
            session.start()
            done: dict[str, Any] = load.run(runs)
            return done
    except HttpFailure as failure:
        return {**failed, "findings": [request_finding(instance["name"], failure).as_dict()]}
    except KvfleetError as error:
        return {**failed, "findings": [finding.as_dict() for finding in error.findings]}


if __name__ == "__main__":
    main()
