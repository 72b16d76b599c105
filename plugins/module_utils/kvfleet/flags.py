"""Flags that a user adds to vLLM or LMCache, held against the parsers of the pinned release before anything starts.

The table (``flag_table.py``) is read from the wheels by ``scripts/engineflags``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import flag_table
from .findings import Finding

#: Flags of older releases and of articles, with what does the job now (vLLM 0.32 source, "removed" in its history).
REPLACED: dict[str, str] = {
    "--swap-space": "set kvfleet_buffer_gib_per_gpu: the RAM tier replaces swapping",
    "--disable-log-requests": "leave it out: requests are not logged unless --enable-log-requests is given",
    "--device": "leave it out: the release decides (a cu13, cu12 or cpu row of releases.yml)",
    "--num-scheduler-steps": "leave it out: the engine's scheduler has no such steps any more",
    "--use-v2-block-manager": "leave it out: there is one block manager",
    "--max-seq-len-to-capture": "use --max-cudagraph-capture-size",
    "--worker-use-ray": "use --distributed-executor-backend",
    "--engine-use-ray": "use --distributed-executor-backend",
    "--preemption-mode": "leave it out: preempted requests are recomputed",
    "--guided-decoding-backend": "use --structured-outputs-config",
    "--enable-reasoning": "use --reasoning-parser",
    "--rope-scaling": "use --hf-overrides",
    "--rope-theta": "use --hf-overrides",
    "--task": "use --runner and --convert",
    "--disable-frontend-multiprocessing": "leave it out: the engine always has its own process",
    "--kv-ip": "leave it out: kvfleet renders --kv-transfer-config",
    "--cpu-offload-buffer-size": "set kvfleet_buffer_gib_per_gpu",
}
#: Flags that the plan renders, with the variable behind each; a second value would contradict the plan.
MANAGED: dict[str, str] = {
    "--model": "kvfleet_model",
    "--host": "kvfleet_host",
    "--port": "kvfleet_port",
    "--served-model-name": "kvfleet_served_model_name",
    "--tensor-parallel-size": "kvfleet_tensor_parallel_size",
    "--max-model-len": "kvfleet_max_model_len",
    "--max-num-seqs": "kvfleet_max_num_seqs",
    "--kv-cache-dtype": "kvfleet_kv_cache_dtype",
    "--dtype": "kvfleet_dtype",
    "--gpu-memory-utilization": "kvfleet_gpu_memory_utilization",
    "--device-memory-utilization": "kvfleet_gpu_memory_utilization",
    "--kv-cache-memory-bytes": "kvfleet_kv_pool_gib",
    "--enforce-eager": "kvfleet_enforce_eager",
    "--trust-remote-code": "kvfleet_trust_remote_code",
    "--kv-transfer-config": "kvfleet_profile",
    "--kv-offloading-size": "kvfleet_buffer_gib_per_gpu",
    "--kv-offloading-backend": "kvfleet_profile",
    "--api-key": "kvfleet_api_key, which never becomes an argument",
    "--device-ids": "kvfleet_gpus",
    "--block-size": "kvfleet_chunk_tokens (the block follows from it)",
    "--num-gpu-blocks-override": "kvfleet_kv_pool_gib",
    "--shutdown-timeout": "nothing: the unit's stop timeout is rendered with it",
    "--config": "kvfleet_engine_flags itself",
    "--uds": "kvfleet_host",
    # of lmcache server
    "--http-host": "nothing: it listens on loopback only, since it knows no authentication",
    "--http-port": "kvfleet_lmcache_http_port",
    "--l1-size-gb": "kvfleet_buffer_gib_per_gpu",
    "--chunk-size": "kvfleet_chunk_tokens",
    "--l2-adapter": "kvfleet_quota_gib",
    "--shm-name": "nothing: the planner names it",
}


def known(table: Mapping[str, Mapping[str, Any]], version: str) -> frozenset[str] | None:
    """The flags (or keys) of ``version``; ``None`` when the table does not have it."""
    entry = table.get(version)
    if entry is None:
        return None
    if "all" in entry:
        return frozenset(entry["all"])
    return frozenset(table[entry["like"]]["all"]) - frozenset(entry["minus"]) | frozenset(entry["plus"])


def engine_flags(version: str) -> frozenset[str] | None:
    """Flags of ``vllm serve`` in vLLM ``version``."""
    return known(flag_table.VLLM, version)


def server_flags(version: str) -> frozenset[str] | None:
    """Flags of ``lmcache server`` in LMCache ``version``."""
    return known(flag_table.LMCACHE_SERVER, version)


def normal(name: str) -> str:
    """A flag as parsers print it: ``max_num_seqs`` and ``--max_num_seqs`` are ``--max-num-seqs``."""
    return "--" + str(name).strip().lstrip("-").split("=", 1)[0].replace("_", "-")


def check(
    flags: Mapping[str, Any], valid: frozenset[str] | None, program: str, variable: str
) -> tuple[list[Finding], list[Finding]]:
    """``(errors, warnings)`` of what a user wants to add.

    Errors: a flag that the release does not know (KVF-SET-020, with its replacement or the nearest name), one that
    the plan renders itself (KVF-SET-021), ``false`` for a flag without a ``--no-`` form (KVF-SET-022). With ``valid``
    ``None`` (a row of the user's own, not in the table) names cannot be checked: KVF-SET-023 warns.
    """
    errors: list[Finding] = []
    warnings: list[Finding] = []
    for name, value in flags.items():
        flag = normal(name)
        if any(ord(character) < 32 for word in words({name: value}) for character in word):
            # no unit file can carry it
            errors.append(
                Finding(
                    "KVF-SET-002",
                    f"{flag!r} in {variable} holds a control character.",
                    f"Write {variable} without line breaks and tabs.",
                    {"flag": flag},
                )
            )
            continue
        positive = f"--{flag[5:]}" if flag.startswith("--no-") else flag
        if flag in MANAGED or positive in MANAGED:
            owner = MANAGED.get(flag) or MANAGED[positive]
            errors.append(
                Finding(
                    "KVF-SET-021",
                    f"{variable} holds {flag}, which the plan renders itself.",
                    f"Set {owner}.",
                    {"flag": flag},
                )
            )
        elif valid is None:
            warnings.append(
                Finding(
                    "KVF-SET-023",
                    f"{flag} in {variable} could not be checked: the flags of {program} are not known.",
                    "Run scripts/engineflags after adding the release to releases.yml.",
                    {"flag": flag},
                )
            )
        elif flag not in valid:
            near = difflib.get_close_matches(flag, sorted(valid), n=1, cutoff=0.75)
            fix = REPLACED.get(flag) or (f"did you mean {near[0]}?" if near else f"see {program.split()[0]} --help")
            word = "was removed from" if flag in REPLACED else "is no flag of"
            errors.append(
                Finding(
                    "KVF-SET-020",
                    f"{flag} in {variable} {word} {program}.",
                    f"Remove it from {variable}; {fix}{'' if fix.endswith('?') else '.'}",
                    {"flag": flag},
                )
            )
        elif value is False and f"--no-{flag[2:]}" not in valid:
            errors.append(
                Finding(
                    "KVF-SET-022",
                    f"{flag} in {variable} is false, but {program} has no --no-{flag[2:]}.",
                    f"Remove {flag} from {variable}: it is off without it.",
                    {"flag": flag},
                )
            )
    return errors, warnings


def words(flags: Mapping[str, Any]) -> list[str]:
    """The words of ``flags`` in a command line, sorted by name.

    ``true`` and ``null`` give the bare flag, ``false`` its ``--no-`` form, a list one word each, a mapping JSON.
    """
    found: list[str] = []
    for name, value in sorted(flags.items(), key=lambda item: normal(item[0])):
        flag = normal(name)
        if value is False:
            found.append(f"--no-{flag[2:]}")
        elif value is True or value is None:
            found.append(flag)
        elif isinstance(value, Mapping):
            found += [flag, json.dumps(value, separators=(",", ":"), sort_keys=True)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            found += [flag, *(str(item) for item in value)]
        else:
            found += [flag, str(value)]
    return found
