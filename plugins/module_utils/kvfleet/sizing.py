"""The plan of one host: every number that a deployment needs, computed, explained, or refused.

Pure: host description, settings, models and release go in, the plan of docs/architecture.md comes out. Errors are
collected in the plan (``errors``), so that people see all of them at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import breakeven, gpus, numa, pools
from .findings import Finding, KvfleetError
from .models import (
    KvSize,
    ModelShape,
    check_tensor_parallel,
    kv_size,
    loaded_weight_bytes,
    parse_config,
    resolve_dtype,
    weights_per_rank,
)
from .settings import InstanceSettings, Settings
from .units import GIB, KIB, MIB, human_bytes

SCHEMA = 1
PATHS = {
    "releases": "/opt/kvfleet/releases",
    "current": "/opt/kvfleet/current",
    "etc": "/etc/kvfleet",
    "state": "/var/lib/kvfleet",
    "cache_mount": "/var/cache/kvfleet",
    "cache_data": "/var/cache/kvfleet/data",
    "run": "/run/kvfleet",
}

#: The article's rule for the buffer: this share of what the engine may use of the card.
BUFFER_SHARE_OF_VRAM = 0.33
#: Smallest buffer that is worth a tier.
MINIMUM_BUFFER_GIB = 1.0
#: LMCache's own operator gives a server L1 + 5 GiB; without a GPU 0.5 GiB was seen.
SERVER_OVERHEAD_GIB = {"cuda": 5.0, "cpu": 0.5}
#: Host RAM of vLLM on GPUs: API server and engine of an instance, and each rank's process with CUDA and NCCL.
#: (1.4 GiB and 2.0 GiB a rank were seen with dummy weights; start-up compiles and reads weights on top), and the page
#: cache through which the weights are read, up to an eighth of the RAM.
ENGINE_GIB = 2.0
RANK_GIB = 4.0
WEIGHTS_CACHE_SHARE = 1 / 8
#: Host RAM of vLLM's CPU backend without weights and KV (0.67 + 0.63 + 0.8 GiB seen).
CPU_ENGINE_GIB = 2.1
#: vLLM's own queues in /dev/shm.
ENGINE_SHM_BYTES = 400 * MIB
#: Loads of the disk tier that LMCache stages at once (--l2-prefetch-max-in-flight).
STAGED_LOADS = 8
DEFAULT_WATERMARK = 0.8
LOWEST_WATERMARK = 0.5
EVICTION_RATIO = 0.2
DEFAULT_CHUNK_TOKENS = 256
DEFAULT_PORT = 8000
#: Free space that stays on the cache partition: this share of it, at least 256 MiB, at most 20 GiB.
FLOOR_SHARE, FLOOR_MIN_GIB, FLOOR_MAX_GIB = 0.05, 0.25, 20.0
#: fs_native may pass its capacity while it evicts; more than this share of the partition is never given to it.
QUOTA_SHARE_MAX = 0.8
#: The article's window for the disk cap.
QUOTA_WINDOW = (1 / 3, 1 / 2)
#: Highest TCP port.
_LAST_PORT = 65535
#: ports that the engine may take from an instance's inner base upwards
INNER_PORTS = 16
#: Where L1 lives on a CPU host, as messages call it.
_SHM = "the file system at /dev/shm"
#: LMCache's class that keeps vLLM's hybrid KV cache manager on.
_HYBRID_MODULE = "lmcache.integration.vllm"


@dataclass
class _Draft:
    """What is known of one instance while the plan grows."""

    settings: InstanceSettings
    shape: ModelShape
    model: Mapping[str, Any]
    kv: KvSize
    gpus: list[dict[str, Any]]
    ranks: int
    nodes: list[int]
    profile: str
    chunk_tokens: int
    block_tokens: int
    hybrid_manager: bool
    in_flight: int
    weights_per_rank: int
    utilization: float | None
    pool: pools.Pool
    kv_cache_memory_bytes: int | None
    max_model_len: int
    max_num_seqs: int
    server: str | None = None
    buffer_wanted_gib: float = 0.0
    buffer_gib: float = 0.0
    buffer_own: bool = False
    quota_gib: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    tokens_per_s: float | None = None

    @property
    def name(self) -> str:
        """The instance's name."""
        return self.settings.name


def build_plan(
    host: Mapping[str, Any],
    settings: Settings,
    models: Mapping[str, Mapping[str, Any]],
    release: Mapping[str, Any],
    *,
    disk: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
    endurance: tuple[float | None, str] = (None, "not measured"),
    previous: Mapping[str, Any] | None = None,
    reasons: Sequence[str] = (),
    warnings: Sequence[Finding] = (),
    errors: Sequence[Finding] = (),
    sessions: int | None = None,
    context: int | None = None,
    skip: Collection[str] = (),
) -> dict[str, Any]:
    """Compute the plan of ``host``.

    ``models`` maps each model's path to what :func:`models.read_model` returned; ``release`` is the row to use;
    ``disk`` the cache disk's ``{"device", "serial", "size_bytes", "partition_bytes", "spare_bytes"}``; ``measured``
    may hold ``cpu`` and ``disk`` (bytes per second that the tiers deliver), ``prefill_tokens_per_s`` and ``instances``
    (the same by name, with the model that it was measured with), ``direct_io`` whether the cache partition takes
    O_DIRECT; ``endurance`` the days that the cache disk will last
    and how that is known; ``previous`` is the plan that the host runs now: computed values stay as they are while
    nothing but the free memory changed and they still fit. ``reasons``, ``warnings`` and ``errors`` are those of
    earlier steps; instances named in ``skip`` have their error there already, only their GPUs and ports count here.
    Never raises for a host that does not fit: ``errors`` of the plan says why.
    """
    return _Planner(
        host, settings, models, release, disk, measured or {}, endurance, previous, list(errors),
        [*settings.notes, *warnings],
    ).plan(list(reasons), sessions, context, skip)  # fmt: skip


def ram_reserve_gib(total_bytes: int) -> float:
    """RAM that stays free for the system and its page cache: an eighth of all, from 1 to 64 GiB."""
    return min(64.0, max(1.0, total_bytes / GIB / 8))


def article_buffer_gib(memory_mib: int, utilization: float) -> float:
    """The article's buffer for one GPU in GiB, ``utilisation x VRAM x 0.33`` (80 GiB at 0.75: 19.8)."""
    return memory_mib / KIB * utilization * BUFFER_SHARE_OF_VRAM


def fingerprint(plan: Mapping[str, Any]) -> str:
    """sha256 over everything in the plan that changes what runs; free memory, measurements and texts do not."""
    volatile = {"tiers", "reasons", "origin", "max_concurrency_at_max_len", "memory_gib", "weights_source"}
    release = plan["release"]
    parts = {
        "schema": plan["schema"],
        "profile": plan["profile"],
        "paths": plan["paths"],
        "release": {
            key: release.get(key) for key in ("id", "vllm", "lmcache", "torch", "mode", "lock_sha256", "platform")
        },
        "servers": [{k: v for k, v in server.items() if k not in volatile} for server in plan["servers"]],
        "instances": [{k: v for k, v in instance.items() if k not in volatile} for instance in plan["instances"]],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def record(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the next plan needs to know of this one (``previous`` of :func:`build_plan`)."""
    return {
        "schema": plan["schema"],
        "fingerprint": plan["fingerprint"],
        "inputs": plan["inputs"],
        "release": plan["release"].get("id"),
        "profile": plan["profile"],
        "instances": [
            {key: instance[key] for key in ("name", "buffer_gib_per_gpu", "l1_gib", "quota_gib", "server")}
            for instance in plan["instances"]
        ],
    }


def default_quota_gib(partition_gib: float) -> float:
    """Half of the partition above its free-space floor, in GiB, rounded down to hundredths."""
    return math.floor((partition_gib - floor_gib(partition_gib)) * 50) / 100


def largest_quota_gib(partition_gib: float) -> float:
    """Most that the disk tier may get: what the floor leaves, and never more than 80 % of the partition."""
    return max(
        0.0, math.floor(min(partition_gib - floor_gib(partition_gib), partition_gib * QUOTA_SHARE_MAX) * 100) / 100
    )


def floor_gib(partition_gib: float) -> float:
    """Free space that has to stay on the cache partition, in GiB."""
    return round(min(FLOOR_MAX_GIB, max(FLOOR_MIN_GIB, partition_gib * FLOOR_SHARE)), 2)


class _Planner:
    """One computation; collects findings while it goes."""

    def __init__(
        self,
        host: Mapping[str, Any],
        settings: Settings,
        models: Mapping[str, Mapping[str, Any]],
        release: Mapping[str, Any],
        disk: Mapping[str, Any] | None,
        measured: Mapping[str, Any],
        endurance: tuple[float | None, str],
        previous: Mapping[str, Any] | None,
        errors: list[Finding],
        warnings: list[Finding],
    ) -> None:
        self.host = host
        self.settings = settings
        self.models = models
        self.release = release
        self.disk = disk
        self.measured = measured
        self.endurance = endurance
        self.errors = errors
        self.warnings = warnings
        self.accelerator = "cuda" if host.get("gpus") else "cpu"
        self.mode = str(release.get("mode") or "none")
        self.inputs = self._inputs_digest()
        self.previous: dict[str, Mapping[str, Any]] = {}
        if previous and previous.get("inputs") == self.inputs:
            self.previous = {str(entry.get("name")): entry for entry in previous.get("instances") or []}

    # --- the whole ---

    def plan(
        self, reasons: list[str], sessions: int | None, context: int | None, skip: Collection[str]
    ) -> dict[str, Any]:
        self._check_gpus_shown()
        drafts = []
        for instance in self.settings.instances:
            if instance.name in skip:
                continue
            try:
                drafts.append(self._draft(instance))
            except KvfleetError as error:
                self.errors.extend(error.findings)
        self._check_sharing(drafts)
        disk = self._disk()
        self._buffers(drafts)
        self._quotas(drafts, disk)
        servers = self._servers(drafts)
        ram = self._ram(drafts)
        self._staging(drafts, servers)
        self._shm(servers)
        instances = [self._instance(draft) for draft in drafts]
        plan: dict[str, Any] = {
            "schema": SCHEMA,
            "fingerprint": "",
            "inputs": self.inputs,
            "profile": self.settings.profile,
            "release": {**self.release, "reasons": reasons},
            "host": {
                "hostname": self.host.get("hostname"),
                "accelerator": self.accelerator,
                "ram": ram,
                "disk": disk,
                "listeners": [],
            },
            "servers": servers,
            "instances": instances,
            "paths": dict(PATHS),
        }
        self._ports(plan)
        if sessions and context:
            plan["sessions"] = self._sessions(drafts, sessions, context)
        plan["errors"] = [finding.as_dict() for finding in _unique(self.errors)]
        plan["warnings"] = [finding.as_dict() for finding in _unique(self.warnings)]
        plan["fingerprint"] = fingerprint(plan)
        return plan

    def _inputs_digest(self) -> str:
        """Digest of what decides the plan apart from the momentary state of the host."""
        parts = {
            "release": self.release.get("id"),
            "settings": [
                (own.name, sorted((key, str(value)) for key, value in own.values.items()))
                for own in self.settings.instances
            ],
            "host_settings": (self.settings.profile, self.settings.quota_gib, self.settings.ram_reserve_gib),
            "models": {path: model.get("digest") for path, model in self.models.items()},
            "gpus": [
                (gpu.get("uuid"), gpu.get("memory_mib"), gpu.get("numa_node")) for gpu in self.host.get("gpus") or []
            ],
            "ram": int((self.host.get("memory") or {}).get("total_bytes") or 0) // GIB,
            "disk": (self.disk or {}).get("size_bytes"),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _error(self, code: str, message: str, fix: str, **numbers: Any) -> None:
        self.errors.append(Finding(code, message, fix, numbers))

    def _warn(self, code: str, message: str, fix: str, **numbers: Any) -> None:
        self.warnings.append(Finding(code, message, fix, numbers))

    # --- one instance ---

    def _draft(self, own: InstanceSettings) -> _Draft:
        path = own.get("model")
        if not path:
            raise KvfleetError(
                Finding(
                    "KVF-MODEL-008",
                    f"Instance {own.name} has no model.",
                    "Set model in kvfleet_instances (or kvfleet_model) to the model's directory on the host.",
                )
            )
        if str(path) not in self.models:
            raise KvfleetError(
                Finding(
                    "KVF-MODEL-001",
                    f"The model {path} of instance {own.name} was not read.",
                    "Set model to a directory.",
                )
            )
        if "@" in str(path) and own.get("profile") != "gpu":
            self._error(
                "KVF-MODEL-009",
                f"Instance {own.name}: the model's path {path} contains '@', which LMCache uses in its keys and "
                "refuses.",
                "Move the model to a path without '@', or set profile to gpu.",
            )
        model = self.models[str(path)]
        shape = parse_config(model["config"], str(path))
        self.warnings.extend(shape.notes)
        chosen = self._chosen_gpus(own)
        ranks = self._ranks(own, shape, chosen)
        profile = self._profile(own, shape)
        hybrid = self._hybrid_manager(shape, profile)
        kv_dtype = own.get("kv_cache_dtype", "auto")
        kv = kv_size(shape, ranks, kv_dtype, own.get("dtype", "auto"), hybrid)
        if self.accelerator == "cpu" and kv.element_bytes < 2 and profile != "gpu":
            raise KvfleetError(
                Finding(
                    "KVF-MODEL-011",
                    f"Instance {own.name}: the CPU backend cannot transfer a KV cache of type {kv.dtype}.",
                    "Set kvfleet_kv_cache_dtype: auto, or kvfleet_profile: gpu.",
                )
            )
        block = (
            pools.CPU_BLOCK_TOKENS if self.accelerator == "cpu" else (64 if shape.mla_dim else pools.GPU_BLOCK_TOKENS)
        )
        reasons: dict[str, str] = {}
        chunk = self._chunk(own, block, kv, profile, reasons)
        weights = loaded_weight_bytes(shape, int(model.get("weight_bytes") or 0), own.get("dtype", "auto"))
        if not weights:
            raise KvfleetError(
                Finding(
                    "KVF-MODEL-012",
                    f"Instance {own.name}: {path} has no weight files and its size cannot be computed "
                    f"(model_type {shape.model_type}, quantisation {shape.quantization or 'none'}).",
                    "Copy the weights to the model directory first.",
                )
            )
        if own.get("load_format") == "dummy":
            self._warn(
                "KVF-MODEL-023",
                f"Instance {own.name} serves random weights (load_format dummy): its answers mean nothing.",
                "Leave kvfleet_load_format out for anything but measurements.",
            )
        reasons["weights_bytes_per_rank"] = {
            "index": "from model.safetensors.index.json",
            "files": "sum of the weight files",
        }.get(str(model.get("weight_source")), "computed from config.json") + (
            f", divided among {ranks} ranks" if ranks > 1 else ""
        )
        per_rank = weights_per_rank(shape, weights, ranks)
        max_seqs = own.get("max_num_seqs") or (256 if self.accelerator == "cuda" else 4)
        smallest = min(chosen, key=lambda gpu: int(gpu["memory_mib"])) if chosen else None
        in_flight = pools.in_flight_tokens(smallest)
        sized = self._pool(
            own, shape, kv, chosen, ranks, profile, chunk, block, hybrid, in_flight, per_rank, max_seqs, reasons
        )
        pool, utilization, explicit, max_len = sized
        draft = _Draft(
            settings=own,
            shape=shape,
            model=model,
            kv=kv,
            gpus=chosen,
            ranks=ranks,
            nodes=numa.instance_nodes(self.host, chosen),
            profile=profile,
            chunk_tokens=chunk,
            block_tokens=block,
            hybrid_manager=hybrid,
            in_flight=in_flight,
            weights_per_rank=per_rank,
            utilization=utilization,
            pool=pool,
            kv_cache_memory_bytes=explicit,
            max_model_len=max_len,
            max_num_seqs=max_seqs,
            reasons=reasons,
        )
        if profile != "gpu" and chunk > max_len:
            self._warn(
                "KVF-MODEL-021",
                f"Instance {own.name}: a chunk of {chunk} tokens is longer than the longest request of {max_len}, so "
                "no tier ever gets one.",
                f"Set kvfleet_chunk_tokens to at most {max(block, max_len // block * block)}, raise "
                "kvfleet_max_model_len, or set kvfleet_profile: gpu.",
                chunk_tokens=chunk,
                max_model_len=max_len,
            )
        draft.tokens_per_s = self._prefill(draft)
        return draft

    def _why_no_gpus(self) -> str:
        for entry in self.host.get("unavailable") or []:
            if entry.get("field") == "gpus":
                return f" ({entry.get('reason')})"
        return ""

    def _chosen_gpus(self, own: InstanceSettings) -> list[dict[str, Any]]:
        """The instance's GPUs; a tensor parallel size below all GPUs of the host takes the first ones."""
        wanted = own.get("gpus", "all")
        if self.accelerator == "cpu":
            if wanted not in ("all", []):
                raise KvfleetError(
                    Finding(
                        "KVF-GPU-004",
                        f"Instance {own.name} names GPUs {wanted}, but this host shows none{self._why_no_gpus()}.",
                        "Repair the driver, or leave gpus out to serve on the CPU.",
                    )
                )
            return []
        ranks = own.get("tensor_parallel_size")
        available = self.host.get("gpus") or []
        if wanted == "all" and ranks and ranks < len(available):
            first = sorted(available, key=lambda gpu: int(gpu["index"]))[: int(ranks)]
            self._warn(
                "KVF-GPU-009",
                f"Instance {own.name} uses {ranks} of this host's {len(available)} GPUs (tensor_parallel_size "
                f"{ranks}).",
                "List gpus in kvfleet_instances to give the others an instance.",
                gpus=len(available),
                tensor_parallel_size=ranks,
            )
            wanted = [gpu["uuid"] for gpu in first]
        chosen = gpus.select_gpus(available, wanted, own.name)
        if not chosen:
            raise KvfleetError(
                Finding(
                    "KVF-GPU-005",
                    f"Instance {own.name} has an empty list of GPUs.",
                    "Set gpus to indices, UUIDs or all.",
                )
            )
        self._with_memory(chosen, own)
        self._check_equal(chosen, own)
        return chosen

    def _claimed_gpus(self, own: InstanceSettings) -> list[dict[str, Any]]:
        """The GPUs that an instance asks for, also one that is refused for another reason."""
        available = self.host.get("gpus") or []
        wanted, ranks = own.get("gpus", "all"), own.get("tensor_parallel_size")
        if wanted == "all":
            return sorted(available, key=lambda gpu: int(gpu["index"]))[: int(ranks) if ranks else None]
        claimed = []
        for item in wanted:
            try:
                claimed += gpus.select_gpus(available, [item], own.name)
            except KvfleetError:
                continue  # its own message says which GPU is wrong
        return claimed

    def _check_gpus_shown(self) -> None:
        """A GPU host must not be served like a smaller one, or like one without GPUs, because a card is lost."""
        shown, why = len(self.host.get("gpus") or []), self._why_no_gpus()
        if not shown and self.host.get("driver_version"):
            self._error(
                "KVF-GPU-010",
                f"NVIDIA driver {self.host['driver_version']} is on this host, but it shows no GPU{why}.",
                "Repair the driver or the GPUs (nvidia-smi must list them); to serve on the CPU, remove the driver.",
            )
        elif not shown and why:
            self._warn(
                "KVF-GPU-011",
                f"The plan is one for the CPU, because no GPU is shown{why}.",
                "Install or repair the driver, if this host has GPUs to serve with.",
            )
        elif shown and why:
            takers = [own.name for own in self.settings.instances if own.get("gpus", "all") == "all"]
            if takers:
                self._error(
                    "KVF-GPU-010",
                    f"Instance {takers[0]} takes all GPUs, but only {shown} of them can be seen{why}.",
                    "Repair that GPU, or set gpus (kvfleet_gpus) to those that are to serve without it.",
                    gpus=shown,
                )
            else:
                self._warn("KVF-GPU-011", f"Not every GPU can be seen{why}.", "Repair it, if an instance is to use it.")

    def _check_equal(self, chosen: Sequence[Mapping[str, Any]], own: InstanceSettings) -> None:
        sizes = sorted({int(gpu["memory_mib"]) for gpu in chosen})
        # cards of one kind differ by some MiB of ECC and firmware
        if len(sizes) > 1 and sizes[0] < 0.98 * sizes[-1]:
            self._warn(
                "KVF-GPU-012",
                f"Instance {own.name} has GPUs of {sizes[0]} and {sizes[-1]} MiB; every rank gets what the smallest "
                "one holds.",
                "Give GPUs of different sizes to different instances (gpus in kvfleet_instances).",
                smallest_mib=sizes[0],
                largest_mib=sizes[-1],
            )

    def _with_memory(self, chosen: Sequence[Mapping[str, Any]], own: InstanceSettings) -> None:
        """Refuse a GPU whose memory is not known: every size starts from it."""
        for gpu in chosen:
            if not gpu.get("memory_mib"):
                raise KvfleetError(
                    Finding(
                        "KVF-GPU-007",
                        f"Instance {own.name}: GPU {gpu['index']} does not tell its memory.",
                        "Repair the driver (nvidia-smi must show the GPU's memory), or leave the GPU out of gpus.",
                    )
                )

    def _ranks(self, own: InstanceSettings, shape: ModelShape, chosen: Sequence[Mapping[str, Any]]) -> int:
        ranks = int(own.get("tensor_parallel_size") or max(1, len(chosen)))
        check_tensor_parallel(shape, ranks, own.name)
        if ranks != max(1, len(chosen)):
            what = f"{len(chosen)} GPUs" if chosen else "the CPU, which is one rank"
            raise KvfleetError(
                Finding(
                    "KVF-GPU-006",
                    f"Instance {own.name}: tensor_parallel_size {ranks} does not match {what}.",
                    "Leave tensor_parallel_size out, or list as many gpus.",
                    {"tensor_parallel_size": ranks, "gpus": len(chosen)},
                )
            )
        return ranks

    def _profile(self, own: InstanceSettings, shape: ModelShape) -> str:
        profile = str(own.get("profile", self.settings.profile))
        if profile != "gpu" and self.mode == "none":
            raise KvfleetError(
                Finding(
                    "KVF-PLAN-001",
                    f"Instance {own.name}: release {self.release.get('id')} has no LMCache, so profile {profile} is "
                    "impossible.",
                    "Set kvfleet_profile: gpu, or choose another kvfleet_release.",
                )
            )
        if profile != "gpu" and shape.has_state:
            raise KvfleetError(
                Finding(
                    "KVF-MODEL-013",
                    f"Instance {own.name}: {shape.model_type} mixes attention with state-space or linear-attention "
                    "layers, "
                    "whose states the KV connector does not carry.",
                    "Set profile: gpu for this instance.",
                )
            )
        if shape.has_state:
            self._warn(
                "KVF-MODEL-014",
                f"Instance {own.name}: {shape.model_type} keeps states beside its KV; only the attention layers' KV "
                "is counted, "
                "the engine will report fewer tokens.",
                "Read the engine's log line 'KV cache size' after the first start.",
            )
        return profile

    def _hybrid_manager(self, shape: ModelShape, profile: str) -> bool:
        """Whether vLLM keeps its hybrid KV cache manager on (vLLM 0.32, ``config/vllm.py``)."""
        if shape.has_chunked:
            return False
        if profile == "gpu":
            return True
        module = str(self.release.get("connector_module_path") or "")
        return self.mode == "mp" and module.startswith(_HYBRID_MODULE)

    def _chunk(self, own: InstanceSettings, block: int, kv: KvSize, profile: str, reasons: dict[str, str]) -> int:
        chunk = int(own.get("chunk_tokens") or DEFAULT_CHUNK_TOKENS)
        if chunk % block:
            raise KvfleetError(
                Finding(
                    "KVF-MODEL-015",
                    f"Instance {own.name}: chunk_tokens {chunk} is no multiple of the engine's block of {block} "
                    "tokens.",
                    f"Set kvfleet_chunk_tokens to a multiple of {block}, or leave it out for {DEFAULT_CHUNK_TOKENS}.",
                    {"chunk_tokens": chunk, "block_size_tokens": block},
                )
            )
        if chunk < 128 and profile != "gpu":
            chunk_bytes = chunk * kv.stored_per_token_per_rank
            self._warn(
                "KVF-MODEL-016",
                f"Instance {own.name}: chunk_tokens {chunk} makes {DEFAULT_CHUNK_TOKENS / chunk:.3g} times as many "
                "objects as "
                f"{DEFAULT_CHUNK_TOKENS} for the same bytes: {human_bytes(chunk_bytes)} in each file of a rank, "
                f"{GIB // max(1, chunk_bytes)} files a GiB.",
                f"Leave kvfleet_chunk_tokens out ({DEFAULT_CHUNK_TOKENS}), unless your prompts share only short "
                "prefixes.",
                chunk_tokens=chunk,
                chunk_bytes_per_rank=chunk_bytes,
            )
        reasons["chunk_tokens"] = (
            "set by the user" if "chunk_tokens" in own.own else f"LMCache's default, a multiple of the block of {block}"
        )
        return chunk

    # --- the engine's pool ---

    def _pool(
        self,
        own: InstanceSettings,
        shape: ModelShape,
        kv: KvSize,
        chosen: Sequence[Mapping[str, Any]],
        ranks: int,
        profile: str,
        chunk: int,
        block: int,
        hybrid: bool,
        in_flight: int,
        weights: int,
        max_seqs: int,
        reasons: dict[str, str],
    ) -> tuple[pools.Pool, float | None, int | None, int]:
        wanted_len = own.get("max_model_len")
        model_len = shape.max_position or 8192
        if wanted_len and shape.max_position and wanted_len > shape.max_position:
            self._error(
                "KVF-MODEL-017",
                f"Instance {own.name}: max_model_len {wanted_len} is above the model's own {shape.max_position}.",
                f"Set kvfleet_max_model_len to {shape.max_position} or less.",
                max_model_len=wanted_len,
                model_max=shape.max_position,
            )
        own_pool = own.get("kv_pool_gib")
        explicit = math.floor(own_pool * GIB) if own_pool else None
        utilization: float | None = None
        if self.accelerator == "cpu":
            if explicit is None:
                explicit = self._cpu_pool(
                    own, shape, kv, block, hybrid, in_flight, wanted_len or min(model_len, 8192), reasons
                )
            else:
                reasons["gpu_kv_pool_bytes_per_rank"] = "set by the user"
            pool_bytes = explicit
        else:
            utilization, room = self._gpu_room(
                own, shape, kv, chosen, ranks, profile, chunk, weights, max_seqs, reasons
            )
            if explicit is not None and explicit > room:
                self._error(
                    "KVF-VRAM-003",
                    f"Instance {own.name}: a KV pool of {human_bytes(explicit)} does not fit: after weights "
                    f"({human_bytes(weights)}), one step, graphs and the LMCache server, {human_bytes(max(0, room))} "
                    "are left on a GPU.",
                    f"Set kvfleet_kv_pool_gib to at most {max(0, math.floor(room / GIB * 10) / 10):g}, or leave it "
                    "out.",
                    wanted_bytes=explicit,
                    free_bytes=room,
                )
            pool_bytes = explicit if explicit is not None else room
            if explicit is not None:
                reasons["gpu_kv_pool_bytes_per_rank"] = "set by the user"
        longest = pools.longest_len(shape, kv, pool_bytes, block, hybrid, in_flight, wanted_len or model_len)
        if wanted_len:
            max_len = int(wanted_len)
            reasons["max_model_len"] = "set by the user"
        else:
            max_len = longest or model_len
            reasons["max_model_len"] = (
                "the model's own maximum"
                if longest >= model_len
                else f"the longest request that the KV pool holds (the model allows {model_len})"
            )
            if self.accelerator == "cpu" and max_len > 8192:
                max_len = 8192
                reasons["max_model_len"] = "8192 on a CPU, which computes long prompts slowly"
        too_long = bool(shape.max_position and max_len > shape.max_position)
        if not own_pool and (pool_bytes <= 0 or longest < min(max_len, block)):
            self._error(
                "KVF-VRAM-001" if self.accelerator == "cuda" else "KVF-RAM-005",
                f"Instance {own.name}: nothing is left for KV: weights take {human_bytes(weights)} per rank"
                + (f" of {human_bytes(pools.usable_gpu_bytes(chosen[0]))}" if chosen else "")
                + ".",
                self._vram_fix(shape, chosen, weights, ranks),
                weights_bytes_per_rank=weights,
                pool_bytes_per_rank=pool_bytes,
            )
        elif longest < max_len and not too_long:
            need = pools.smallest_pool_bytes(shape, kv, max_len, block, hybrid, in_flight)
            self._error(
                "KVF-VRAM-004",
                f"Instance {own.name}: one request of max_model_len {max_len} needs {human_bytes(need)} of KV per "
                "rank, the pool has "
                f"{human_bytes(pool_bytes)} (one block of {block} tokens is never usable).",
                (
                    f"Set kvfleet_max_model_len to at most {longest}, or"
                    if longest
                    else f"Set it to at least {math.ceil(need / GIB * 100) / 100:g}, or"
                )
                + (
                    " raise kvfleet_kv_pool_gib."
                    if own_pool or self.accelerator == "cpu"
                    else " use more gpus, or kvfleet_kv_cache_dtype: fp8."
                ),
                needed_bytes=need,
                pool_bytes=pool_bytes,
                longest_tokens=longest,
            )
        pool = pools.build_pool(shape, kv, pool_bytes, max_len, block, hybrid, in_flight)
        return pool, utilization, explicit, max_len

    def _cpu_pool(
        self,
        own: InstanceSettings,
        shape: ModelShape,
        kv: KvSize,
        block: int,
        hybrid: bool,
        in_flight: int,
        max_len: int,
        reasons: dict[str, str],
    ) -> int:
        """KV memory of a CPU engine: two requests of full length, less when that is over a tenth of the host's RAM."""
        total = int((self.host.get("memory") or {}).get("total_bytes") or 0)
        two = pools.smallest_pool_bytes(shape, kv, max_len, block, hybrid, in_flight, requests=2)
        one = pools.smallest_pool_bytes(shape, kv, max_len, block, hybrid, in_flight)
        reasons["gpu_kv_pool_bytes_per_rank"] = f"two requests of {max_len} tokens and the block that is never usable"
        if two <= total // 10:
            return two
        reasons["gpu_kv_pool_bytes_per_rank"] = f"one request of {max_len} tokens and the block that is never usable"
        return one if own.get("max_model_len") or one <= total // 10 else total // 10

    def _gpu_room(
        self,
        own: InstanceSettings,
        shape: ModelShape,
        kv: KvSize,
        chosen: Sequence[Mapping[str, Any]],
        ranks: int,
        profile: str,
        chunk: int,
        weights: int,
        max_seqs: int,
        reasons: dict[str, str],
    ) -> tuple[float, int]:
        """Utilisation, and the bytes that it leaves for KV on the smallest of the GPUs."""
        smallest = min(chosen, key=lambda gpu: int(gpu["memory_mib"]))
        usable = pools.usable_gpu_bytes(smallest)
        server = (
            pools.lmcache_gpu_bytes(chunk * kv.stored_per_token_per_rank)
            if profile != "gpu" and self.mode == "mp"
            else 0
        )
        highest = pools.largest_utilization(usable, server, ranks)
        if highest <= 0:
            raise KvfleetError(
                Finding(
                    "KVF-VRAM-002",
                    f"Instance {own.name}: the CUDA context ({human_bytes(pools.engine_context_bytes(ranks))}) and the "
                    f"LMCache server ({human_bytes(server)}, with {pools.LMCACHE_STAGED_CHUNKS} chunks of {chunk} "
                    f"tokens) need more than the GPU's {human_bytes(usable)}.",
                    f"Leave kvfleet_chunk_tokens out ({DEFAULT_CHUNK_TOKENS}), or set kvfleet_profile: gpu.",
                    {"usable_bytes": usable, "lmcache_bytes": server},
                )
            )
        utilization = own.get("gpu_memory_utilization")
        if utilization is None:
            share = math.floor((pools.DEFAULT_UTILIZATION - server / usable) * 100 + 1e-6) / 100
            utilization = min(share, highest)
            reasons["gpu_memory_utilization"] = (
                "vLLM's default" + (f" less the LMCache server's {human_bytes(server)}" if server else "")
                if utilization == share
                else "what CUDA, NCCL and the LMCache server leave"
            )
        else:
            reasons["gpu_memory_utilization"] = "set by the user"
            if utilization > highest:
                self._error(
                    "KVF-VRAM-002",
                    f"Instance {own.name}: gpu_memory_utilization {utilization:g} leaves too little of "
                    f"{human_bytes(usable)} for the CUDA "
                    f"context ({human_bytes(pools.engine_context_bytes(ranks))})"
                    + (f" and the LMCache server ({human_bytes(server)})" if server else "")
                    + ".",
                    f"Set kvfleet_gpu_memory_utilization to at most {highest:g}.",
                    utilization=utilization,
                    highest=highest,
                )
        self._foreign_memory(own, chosen, utilization)
        step = pools.step_bytes(shape, pools.batched_tokens(smallest), max_seqs, ranks)
        graphs = 0 if own.get("enforce_eager", False) else pools.graph_bytes(shape)
        other = pools.NON_TORCH_BYTES
        if own.get("kv_pool_gib"):
            # an explicit pool overrides the utilisation; the card itself is the limit then
            utilization = highest
        room = int(utilization * usable) - weights - step - graphs - other
        reasons["gpu_kv_pool_bytes_per_rank"] = (
            f"{utilization:g} x {human_bytes(usable)} - weights {human_bytes(weights)} - one step "
            f"{human_bytes(step)} - "
            f"graphs {human_bytes(graphs)} - other {human_bytes(other)}"
            + (f"; the LMCache server takes {human_bytes(server)} outside of it" if server else "")
        )
        return float(utilization), room

    def _foreign_memory(self, own: InstanceSettings, chosen: Sequence[Mapping[str, Any]], utilization: float) -> None:
        """vLLM does not start on a GPU that others use; what our own running units use is left out of the question."""
        if (self.host.get("kvfleet") or {}).get("units"):
            return
        for gpu in chosen:
            used = int(gpu.get("memory_used_mib") or 0) * MIB
            usable = pools.usable_gpu_bytes(gpu)
            if usable - used < utilization * usable + pools.ENGINE_CONTEXT_BYTES:
                self._error(
                    "KVF-VRAM-005",
                    f"Instance {own.name}: other processes hold {human_bytes(used)} of GPU {gpu['index']}, so "
                    f"{utilization:g} of its {human_bytes(usable)} is not free.",
                    "Stop them (nvidia-smi lists them), choose other gpus, or set kvfleet_gpu_memory_utilization "
                    "lower.",
                    gpu=gpu["index"],
                    used_bytes=used,
                )

    def _vram_fix(self, shape: ModelShape, chosen: Sequence[Mapping[str, Any]], weights: int, ranks: int) -> str:
        if not chosen:
            return "Set kvfleet_kv_pool_gib, or use a smaller model."
        need = weights * ranks
        usable = pools.usable_gpu_bytes(min(chosen, key=lambda gpu: int(gpu["memory_mib"])))
        limit = human_bytes(0.75 * usable * ranks)
        for count in (2, 4, 8, 16):
            if count > ranks and shape.attention_heads % count == 0 and need / count < 0.75 * usable:
                return f"Use {count} such GPUs, a quantised model, or a model below {limit} of weights."
        return f"Use a quantised or smaller model (below {limit} of weights) or larger GPUs."

    def _prefill_history(self, draft: _Draft) -> float | None:
        """What the last proof measured of this instance with this model on as many GPUs (or CPU ranks)."""
        instances = self.measured.get("instances")
        if not instances:
            return self.measured.get("prefill_tokens_per_s")
        before = instances.get(draft.name) or {}
        same_model = before.get("model") == str(draft.settings.get("model")).rstrip("/")
        # records of proofs before 2026-12 do not say it; theirs counts until the next proof
        same_ranks = before.get("tensor_parallel_size", draft.ranks) == draft.ranks
        return before.get("prefill_tokens_per_s") if same_model and same_ranks else None

    def _prefill(self, draft: _Draft) -> float | None:
        own = draft.settings.get("prefill_tokens_per_s")
        if own:
            draft.reasons["tiers"] = f"prefill {own:g} tokens/s set by the user"
            return float(own)
        history = self._prefill_history(draft)
        if history:
            draft.reasons["tiers"] = f"prefill {history:.0f} tokens/s from this host's history"
            return float(history)
        if not draft.gpus:
            draft.reasons["tiers"] = "prefill speed unknown: no history and no estimate for CPUs"
            return None
        peak = gpus.dense_tflops(str(draft.gpus[0].get("name") or ""))
        rate = breakeven.prefill_tokens_per_s(peak, draft.ranks, draft.shape.active_parameters)
        draft.reasons["tiers"] = (
            f"prefill estimated: {draft.ranks} x {peak:g} TFLOP/s x {breakeven.PREFILL_EFFICIENCY:g} / (2 x "
            f"{draft.shape.active_parameters} parameters) = {rate:.0f} tokens/s"
            if rate and peak
            else "prefill speed unknown: the card or the model's parameters are not in the table"
        )
        return rate

    # --- what instances share ---

    def _check_sharing(self, drafts: Sequence[_Draft]) -> None:
        users: dict[str, str] = {}
        for claimant in self.settings.instances:
            for gpu in self._claimed_gpus(claimant):
                other = users.setdefault(str(gpu["uuid"]), claimant.name)
                if other != claimant.name:
                    self._error(
                        "KVF-GPU-008",
                        f"GPU {gpu['index']} ({gpu['uuid']}) is used by the instances {other} and {claimant.name}.",
                        "Give every GPU to one instance in kvfleet_instances.",
                        gpu=gpu["index"],
                    )
        if self.accelerator == "cpu" and len(drafts) > 1:
            self._warn(
                "KVF-RAM-006",
                f"{len(drafts)} instances share the CPUs of this host.",
                "Use one instance on a host without GPUs, unless slow answers are fine.",
            )
        # servers hold one chunk size for all their instances, and their keys know the model's path but not its format
        for draft in drafts:
            if draft.profile != "gpu" and self.mode == "mp":
                draft.server = numa.server_name(draft.nodes)
        for name in sorted({draft.server for draft in drafts if draft.server}):
            sizes = {draft.chunk_tokens for draft in drafts if draft.server == name}
            if len(sizes) > 1:
                self._error(
                    "KVF-MODEL-018",
                    f"The instances of LMCache server {name} have different chunk sizes: "
                    f"{', '.join(map(str, sorted(sizes)))}.",
                    "Set kvfleet_chunk_tokens once for the host.",
                )
            formats: dict[str, tuple[str, str]] = {}
            for draft in drafts:
                if draft.server != name:
                    continue
                path = str(draft.settings.get("model")).rstrip("/")
                own = (draft.kv.dtype, resolve_dtype(draft.shape, draft.settings.get("dtype", "auto")))
                if formats.setdefault(path, own) != own:
                    self._error(
                        "KVF-MODEL-019",
                        f"LMCache server {name}: {path} is served in different number formats ({' and '.join(own)} "
                        "beside "
                        f"{' and '.join(formats[path])}), which its keys cannot tell apart.",
                        "Give these instances the same kv_cache_dtype and dtype, or a copy of the model under "
                        "another path.",
                    )

    # --- RAM ---

    def _available_bytes(self) -> int:
        """RAM that a deployment may count on: what is free now and what our own running units would give back."""
        memory = self.host.get("memory") or {}
        ours = int((self.host.get("kvfleet") or {}).get("memory_bytes") or 0)
        return min(int(memory.get("total_bytes") or 0), int(memory.get("available_bytes") or 0) + ours)

    def _reserve_gib(self) -> float:
        if self.settings.ram_reserve_gib is not None:
            return self.settings.ram_reserve_gib
        return ram_reserve_gib(int((self.host.get("memory") or {}).get("total_bytes") or 0))

    def _engine_gib(self, draft: _Draft) -> float:
        """Host RAM of one instance without any buffer."""
        if self.accelerator == "cpu":
            return CPU_ENGINE_GIB + (draft.weights_per_rank + draft.pool.bytes_per_rank) / GIB
        total = int((self.host.get("memory") or {}).get("total_bytes") or 0)
        cache = min(draft.weights_per_rank * draft.ranks, total * WEIGHTS_CACHE_SHARE) / GIB
        return ENGINE_GIB + RANK_GIB * draft.ranks + cache

    def _overhead_gib(self, drafts: Sequence[_Draft]) -> float:
        """Host RAM of LMCache beside the buffers."""
        if self.mode == "mp":
            return SERVER_OVERHEAD_GIB[self.accelerator] * len({draft.server for draft in drafts if draft.server})
        return 0.5 * sum(draft.ranks for draft in drafts if draft.profile != "gpu")

    def _budget_gib(self, drafts: Sequence[_Draft]) -> float:
        engines = sum(self._engine_gib(draft) for draft in drafts)
        return self._available_bytes() / GIB - self._reserve_gib() - engines - self._overhead_gib(drafts)

    def _node_budgets(self, drafts: Sequence[_Draft]) -> dict[int, float]:
        """GiB for buffers on each NUMA node, from its share of the host's RAM; empty on hosts with one node or none."""
        sizes = numa.node_memory_bytes(self.host)
        total = sum(sizes.values())
        if len(sizes) < 2 or not total:
            return {}
        free = self._available_bytes() / GIB - self._reserve_gib()
        budgets = {}
        for node, size in sizes.items():
            engines = sum(self._engine_gib(draft) / len(draft.nodes) for draft in drafts if node in draft.nodes)
            servers = {draft.server for draft in drafts if draft.server == str(node)}
            budgets[node] = free * size / total - engines - SERVER_OVERHEAD_GIB[self.accelerator] * len(servers)
        return budgets

    @property
    def _held_share(self) -> float:
        """Share of a buffer that holds chunks before any is evicted (seen on an H200, docs/sizing.md).

        The cache server evicts above its watermark, LMCache inside the engine when an allocation fails.
        """
        return DEFAULT_WATERMARK if self.mode == "mp" else 1.0

    def _wanted_buffer(self, draft: _Draft) -> None:
        own = draft.settings.get("buffer_gib_per_gpu")
        if own is not None:
            draft.buffer_wanted_gib, draft.buffer_own = float(own), True
            draft.reasons["buffer_gib_per_gpu"] = "set by the user"
            chunk = draft.chunk_tokens * draft.kv.stored_per_token_per_rank
            if own * GIB < pools.LMCACHE_STAGED_CHUNKS * chunk:
                least = pools.LMCACHE_STAGED_CHUNKS * chunk / GIB
                self._error(
                    "KVF-RAM-009",
                    f"Instance {draft.name}: a buffer of {human_bytes(own * GIB)} does not hold "
                    f"{pools.LMCACHE_STAGED_CHUNKS} chunks of {human_bytes(chunk)}.",
                    f"Set kvfleet_buffer_gib_per_gpu to at least {math.ceil(least * 1000) / 1000:g}, or leave it out.",
                    buffer_gib=own,
                    least_gib=least,
                )
            return
        working_set = float(draft.settings.get("working_set_gib") or 0)
        holds_it = working_set / self._held_share / draft.ranks
        if draft.gpus:
            smallest = min(int(gpu["memory_mib"]) for gpu in draft.gpus)
            exact = article_buffer_gib(smallest, draft.utilization or pools.DEFAULT_UTILIZATION)
            rule = max(MINIMUM_BUFFER_GIB, float(round(exact)))
            reason = (
                f"{draft.utilization:g} x {smallest / KIB:.1f} GiB x {BUFFER_SHARE_OF_VRAM:g} = {exact:.1f}, rounded"
            )
        else:
            total = int((self.host.get("memory") or {}).get("total_bytes") or 0) / GIB
            rule = max(MINIMUM_BUFFER_GIB, math.floor(total / 8))
            reason = "an eighth of the host's RAM, at least 1 GiB"
        if holds_it > rule:
            rule = math.ceil(holds_it * 2) / 2
            reason = (
                f"raised to hold the working set of {working_set:g} GiB over {draft.ranks} "
                f"rank(s), of a buffer {self._held_share:.0%} before chunks are evicted"
            )
        draft.buffer_wanted_gib = rule
        draft.reasons["buffer_gib_per_gpu"] = reason

    def _buffers(self, drafts: Sequence[_Draft]) -> None:
        users = [draft for draft in drafts if draft.profile != "gpu"]
        budget = self._budget_gib(drafts)
        if not users:
            if budget < 0:
                self._too_little_ram(drafts, budget)
            return
        for draft in users:
            self._wanted_buffer(draft)
        groups: list[tuple[str, list[_Draft], float]] = [("the host", users, budget)]
        for node, node_budget in self._node_budgets(drafts).items():
            members = [
                draft for draft in users if draft.server == str(node) or (self.mode != "mp" and draft.nodes == [node])
            ]
            if members:
                groups.append((f"NUMA node {node}", members, node_budget))
        shm = self.host.get("shm_bytes")
        if self.accelerator == "cpu" and self.mode == "mp" and shm is not None:
            groups.append((_SHM, users, (shm - ENGINE_SHM_BYTES) / GIB))
        factors = {id(draft): 1.0 for draft in users}
        limits = {id(draft): ("", 0.0) for draft in users}
        for where, members, limit in groups:
            fixed = sum(draft.buffer_wanted_gib * draft.ranks for draft in members if draft.buffer_own)
            asked = sum(draft.buffer_wanted_gib * draft.ranks for draft in members if not draft.buffer_own)
            if fixed and fixed > limit and where != _SHM:
                self._own_buffers_too_large(
                    where, [draft for draft in members if draft.buffer_own], fixed, limit, drafts
                )
            if asked and asked > limit - fixed:
                factor = max(0.0, limit - fixed) / asked
                for draft in members:
                    if not draft.buffer_own and factor < factors[id(draft)]:
                        factors[id(draft)] = factor
                        limits[id(draft)] = (where, limit)
        for draft in users:
            draft.buffer_gib = draft.buffer_wanted_gib
            if draft.buffer_own or factors[id(draft)] >= 1.0:
                self._keep_previous(draft, 1.0)
                continue
            where, limit = limits[id(draft)]
            fits = draft.buffer_wanted_gib * factors[id(draft)]
            draft.buffer_gib = _step_down(fits)
            self._keep_previous(draft, fits)
            if draft.buffer_gib < MINIMUM_BUFFER_GIB:
                if where != _SHM:  # that has its own message
                    self._too_little_ram(drafts, budget)
                draft.buffer_gib = MINIMUM_BUFFER_GIB
                continue
            self._warn(
                "KVF-RAM-003",
                f"Instance {draft.name}: the buffer is {draft.buffer_gib:g} GiB per GPU instead of "
                f"{draft.buffer_wanted_gib:g}: "
                f"{sum(user.ranks for user in users)} buffer(s) may take {max(0.0, limit):.1f} GiB on "
                f"{where}.",
                "Accept it, or add RAM; kvfleet_ram_reserve_gib says how much stays free for the system.",
                wanted_gib=draft.buffer_wanted_gib,
                buffer_gib=draft.buffer_gib,
                budget_gib=round(limit, 2),
            )
            draft.reasons["buffer_gib_per_gpu"] += f"; reduced to what {where} has"

    def _keep_previous(self, draft: _Draft, fits_gib: float) -> None:
        """Keep the buffer that runs now when only the free memory moved and it still fits."""
        before = self.previous.get(draft.name, {}).get("buffer_gib_per_gpu")
        if before is None or draft.buffer_own or before == draft.buffer_gib:
            return
        if before <= draft.buffer_wanted_gib and (fits_gib == 1.0 or before <= fits_gib):
            draft.buffer_gib = float(before)

    def _own_buffers_too_large(
        self, where: str, drafts: Sequence[_Draft], total: float, limit: float, everyone: Sequence[_Draft]
    ) -> None:
        parts = (
            f"available {self._available_bytes() / GIB:.1f} GiB, less {self._reserve_gib():.1f} for the system, "
            f"{sum(self._engine_gib(draft) for draft in everyone):.1f} for vLLM and "
            f"{self._overhead_gib(everyone):.1f} for LMCache"
            if where == "the host"
            else "its share of the RAM, less what the system, vLLM and LMCache need there"
        )
        terms = " + ".join(f"{draft.ranks} x {draft.buffer_wanted_gib:g}" for draft in drafts)
        ranks = sum(draft.ranks for draft in drafts)
        most = max(0.0, _step_down(limit / ranks)) if limit > 0 else 0.0
        self._error(
            "KVF-RAM-002",
            f"The buffers need {terms} = {total:g} GiB of RAM, but {where} has {max(0.0, limit):.1f} GiB for them "
            f"({parts}).",
            f"Set kvfleet_buffer_gib_per_gpu to at most {most:g}, or leave it out."
            if most >= 0.5
            else "Set kvfleet_profile: gpu, or add RAM.",
            buffers_gib=total,
            budget_gib=round(limit, 2),
        )

    def _too_little_ram(self, drafts: Sequence[_Draft], budget: float) -> None:
        users = [draft for draft in drafts if draft.profile != "gpu"]
        engines = sum(self._engine_gib(draft) for draft in drafts)
        overhead = self._overhead_gib(drafts)
        smallest = MINIMUM_BUFFER_GIB * sum(draft.ranks for draft in users)
        needed = engines + overhead + smallest + self._reserve_gib()
        self._error(
            "KVF-RAM-001",
            f"Not enough RAM: {self._available_bytes() / GIB:.1f} GiB are available, {needed:.1f} are needed "
            f"({self._reserve_gib():.1f} for the system, {engines:.1f} for vLLM, {overhead:.1f} for LMCache, "
            f"{smallest:g} for the "
            f"smallest buffers of {MINIMUM_BUFFER_GIB:g} GiB per GPU).",
            "Free or add RAM, set kvfleet_ram_reserve_gib lower"
            + (", or set kvfleet_profile: gpu." if users else ", or use a smaller model or kvfleet_kv_pool_gib."),
            available_gib=round(self._available_bytes() / GIB, 2),
            needed_gib=round(needed, 2),
            budget_gib=round(budget, 2),
        )

    def _ram(self, drafts: Sequence[_Draft]) -> dict[str, Any]:
        buffers = sum(draft.buffer_gib * draft.ranks for draft in drafts if draft.profile != "gpu")
        engines = sum(self._engine_gib(draft) for draft in drafts)
        overhead = self._overhead_gib(drafts)
        available = self._available_bytes() / GIB
        return {
            "total_gib": round(int((self.host.get("memory") or {}).get("total_bytes") or 0) / GIB, 2),
            "available_gib": round(available, 2),
            "reserved_gib": round(self._reserve_gib(), 2),
            "buffers_gib": round(buffers, 2),
            "engine_gib": round(engines, 2),
            "lmcache_gib": round(overhead, 2),
            "free_gib": round(available - self._reserve_gib() - engines - overhead - buffers, 2),
        }

    def _shm(self, servers: Sequence[dict[str, Any]]) -> None:
        """On CPU hosts L1 lives in /dev/shm, beside vLLM's own queues."""
        size = self.host.get("shm_bytes")
        if self.accelerator != "cpu" or not servers:
            return
        need = int(sum(server["l1_gib"] for server in servers) * GIB) + ENGINE_SHM_BYTES
        if size is not None and size < need:
            self._error(
                "KVF-RAM-004",
                f"The file system at /dev/shm has {human_bytes(size)}, but L1 and vLLM's queues need "
                f"{human_bytes(need)} there.",
                f"Enlarge it (mount -o remount,size={math.ceil(need / GIB)}G /dev/shm), or set "
                "kvfleet_buffer_gib_per_gpu to at most "
                f"{max(0.0, _step_down((size - ENGINE_SHM_BYTES) / GIB)):g}.",
                shm_bytes=size,
                needed_bytes=need,
            )

    # --- servers and tiers ---

    def _servers(self, drafts: Sequence[_Draft]) -> list[dict[str, Any]]:
        servers = []
        for name in sorted(
            {draft.server for draft in drafts if draft.server}, key=lambda item: (item == numa.SPANNING_SERVER, item)
        ):
            members = [draft for draft in drafts if draft.server == name]
            l1 = round(sum(draft.buffer_gib * draft.ranks for draft in members), 3)
            quotas = [draft.quota_gib for draft in members if draft.quota_gib]
            servers.append(
                {
                    "name": name,
                    "numa_nodes": sorted({node for draft in members for node in draft.nodes}),
                    "instances": [draft.name for draft in members],
                    "l1_gib": l1,
                    "quota_gib": round(sum(quotas), 2) if quotas else None,
                    "chunk_tokens": members[0].chunk_tokens,
                    "port": None,
                    "http_port": None,
                    "shm_name": f"kvfleet_l1_{name}" if self.accelerator == "cpu" else None,
                    "base_path": None,
                    "eviction_trigger_watermark": DEFAULT_WATERMARK,
                    "eviction_ratio": EVICTION_RATIO,
                    "l2_eviction_trigger_watermark": DEFAULT_WATERMARK,
                    "l2_eviction_ratio": EVICTION_RATIO,
                    "memory_gib": round(l1 + SERVER_OVERHEAD_GIB[self.accelerator], 2),
                    "use_odirect": self.measured.get("direct_io") is not False,
                }
            )
        if any(server["quota_gib"] and not server["use_odirect"] for server in servers):
            self._warn(
                "KVF-DISK-107",
                f"The cache partition on {(self.disk or {}).get('serial')} refused an aligned O_DIRECT write and "
                "read-back, so the disk tier goes through the page cache: its figures are RAM's, and it takes RAM.",
                "Use ext4 or xfs on a local NVMe drive for the cache.",
            )
        return servers

    def _staging(self, drafts: Sequence[_Draft], servers: Sequence[dict[str, Any]]) -> None:
        """A disk hit passes through L1: above the eviction watermark there must be room for the prompts in flight."""
        for server in servers:
            members = [draft for draft in drafts if draft.server == server["name"] and draft.profile == "disk"]
            if not members:
                continue
            longest = max(draft.max_model_len * draft.kv.stored_per_token for draft in members)
            loads = min(STAGED_LOADS, sum(draft.max_num_seqs for draft in members))
            l1 = server["l1_gib"] * GIB
            if not l1:
                continue
            wanted = math.floor((1 - longest * loads / l1) * 20) / 20
            server["eviction_trigger_watermark"] = round(min(DEFAULT_WATERMARK, max(LOWEST_WATERMARK, wanted)), 2)
            room = round(l1 * (1 - server["eviction_trigger_watermark"]))
            if longest > room:
                self._warn(
                    "KVF-RAM-007",
                    f"LMCache server {server['name']}: a disk hit of the longest prompt needs {human_bytes(longest)} "
                    "of L1 above the eviction "
                    f"watermark, which leaves {human_bytes(room)}; longer hits are computed again.",
                    "Raise kvfleet_buffer_gib_per_gpu, or lower kvfleet_max_model_len.",
                    needed_bytes=longest,
                    room_bytes=room,
                )
            elif longest * loads > room:
                self._warn(
                    "KVF-RAM-008",
                    f"LMCache server {server['name']}: {loads} disk hits of the longest prompt at once need "
                    f"{human_bytes(longest * loads)} of L1 "
                    f"above the eviction watermark, which leaves {human_bytes(room)}; {int(room // longest)} fit at "
                    "once.",
                    "Raise kvfleet_buffer_gib_per_gpu if many long prompts come back at the same time.",
                    needed_bytes=longest * loads,
                    room_bytes=room,
                )

    def _disk(self) -> dict[str, Any] | None:
        wanted = any(str(own.get("profile", self.settings.profile)) == "disk" for own in self.settings.instances)
        if not wanted:
            return None
        if self.disk is None:
            if not any(finding.code.startswith("KVF-DISK") for finding in self.errors):
                self._error(
                    "KVF-DISK-100",
                    "Profile disk needs a cache disk, and none is named."
                    if not self.settings.cache_disk_device
                    else f"The cache disk {self.settings.cache_disk_device} is not on this host.",
                    "Set cache_disk_device to a /dev/disk/by-id link and cache_disk_serial to the disk's serial, or "
                    "set kvfleet_profile: cpu.",
                )
            return None
        partition = self.disk["partition_bytes"] / GIB
        return {
            "device": self.disk.get("device"),
            "serial": self.disk.get("serial"),
            "size_gib": round(self.disk["size_bytes"] / GIB, 2),
            "partition_gib": round(partition, 2),
            "spare_gib": round(self.disk.get("spare_bytes", 0) / GIB, 2),
            "floor_gib": floor_gib(partition),
            "quota_gib": 0.0,
            "endurance_days": self.endurance[0],
            "endurance_reason": self.endurance[1],
        }

    def _quotas(self, drafts: Sequence[_Draft], disk: dict[str, Any] | None) -> None:
        writers = [draft for draft in drafts if draft.profile == "disk"]
        if disk is None or self.disk is None or not writers:
            return
        partition = self.disk["partition_bytes"] / GIB
        most = largest_quota_gib(partition)
        fixed = sum(float(draft.settings.get("quota_gib", 0.0)) for draft in writers)
        open_writers = [draft for draft in writers if draft.settings.get("quota_gib") is None]
        total = (
            self.settings.quota_gib if self.settings.quota_gib is not None else max(fixed, default_quota_gib(partition))
        )
        if not open_writers:
            total = fixed
        share = max(0.0, total - fixed)
        ranks = sum(draft.ranks for draft in open_writers)
        for draft in writers:
            own = draft.settings.get("quota_gib")
            draft.quota_gib = float(own) if own is not None else math.floor(share * draft.ranks / ranks * 100) / 100
            draft.reasons["quota_gib"] = (
                "set by the user"
                if own is not None or self.settings.quota_gib is not None
                else f"half of the partition of {partition:.1f} GiB above its floor of {floor_gib(partition):g} GiB"
            ) + (f", divided among {len(writers)} instances" if len(writers) > 1 and own is None else "")
            if not draft.quota_gib:
                self._error(
                    "KVF-DISK-101",
                    f"Instance {draft.name}: nothing of the disk tier's {total:g} GiB is left for it.",
                    "Raise kvfleet_quota_gib, or lower quota_gib of the other instances.",
                )
        used = round(sum(draft.quota_gib or 0.0 for draft in writers), 2)
        disk["quota_gib"] = used
        if used > most:
            self._error(
                "KVF-DISK-102",
                f"A quota of {used:g} GiB does not fit a partition of {partition:.1f} GiB: {floor_gib(partition):g} "
                "GiB stay free, and the tier may pass "
                f"its quota while it evicts, so {most:g} GiB are the most.",
                f"Set kvfleet_quota_gib to at most {most:g}, or leave it out.",
                quota_gib=used,
                most_gib=most,
                partition_gib=round(partition, 2),
            )
        elif self.settings.quota_gib is not None or fixed:
            low, high = (share_of * partition for share_of in QUOTA_WINDOW)
            if not low - 0.01 <= used <= high + 0.01:
                self._warn(
                    "KVF-DISK-103",
                    f"A quota of {used:g} GiB is {used / partition:.0%} of the partition; between a third and a half "
                    "is the usual window.",
                    f"Set kvfleet_quota_gib between {low:.1f} and {high:.1f}, or leave it out.",
                    quota_gib=used,
                    partition_gib=round(partition, 2),
                )

    # --- ports ---

    def _ports(self, plan: dict[str, Any]) -> None:
        address = self.settings.host
        taken: dict[int, str] = {}
        planned = {instance["name"] for instance in plan["instances"]}
        for own in self.settings.instances:  # a refused instance has its port all the same
            port = own.get("port")
            if own.name not in planned and port is not None and "port" in own.own:
                if port in taken:
                    self._error(
                        "KVF-NET-001",
                        f"Port {port} is used by {taken[port]} and by instance {own.name}.",
                        "Give every instance in kvfleet_instances its own port.",
                        port=port,
                    )
                taken[int(port)] = f"instance {own.name}"
        instances = {own.name: own for own in self.settings.instances}
        next_port = DEFAULT_PORT
        for instance in plan["instances"]:
            own = instances[instance["name"]]
            port = own.get("port")
            if port is None:
                while next_port in taken or any(other.get("port") == next_port for other in self.settings.instances):
                    next_port += 1
                port = next_port
            instance["port"] = int(port)
            if port in taken:
                self._error(
                    "KVF-NET-001",
                    f"Port {port} is used by {taken[port]} and by instance {instance['name']}.",
                    "Give every instance in kvfleet_instances its own port.",
                    port=port,
                )
            taken[int(port)] = f"instance {instance['name']}"
        for key, setting, first in (("port", "lmcache_port", 5555), ("http_port", "lmcache_http_port", 8080)):
            base = getattr(self.settings, setting)
            for number, server in enumerate(plan["servers"]):
                port = (base or first) + number
                while base is None and port in taken:
                    port += 1
                if port in taken:
                    self._error(
                        "KVF-NET-001",
                        f"Port {port} is used by {taken[port]} and by LMCache server {server['name']} "
                        f"({'requests' if key == 'port' else 'HTTP'}).",
                        f"Set kvfleet_{setting} to a free port.",
                        port=port,
                    )
                if port > _LAST_PORT:
                    self._error(
                        "KVF-NET-004",
                        f"LMCache server {server['name']} would listen on port {port}; the last one is {_LAST_PORT}.",
                        f"Set kvfleet_{setting} to at most {_LAST_PORT + 1 - len(plan['servers'])}.",
                        port=port,
                    )
                server[key] = port
                taken[port] = f"LMCache server {server['name']} ({'requests' if key == 'port' else 'HTTP'})"
        for instance in plan["instances"]:
            # the engine scans upwards from here: 16 ports each, below the range for outgoing connections
            internal = 20000 + instance["port"] * 16 % 12000
            while any(internal <= port < internal + INNER_PORTS for port in taken):
                internal += INNER_PORTS
            instance["internal_port"] = internal
            taken[internal] = f"the inner ports of instance {instance['name']}"
        listeners = []
        for instance in plan["instances"]:
            unit = f"kvfleet-vllm@{instance['name']}.service"
            listeners.append({"unit": unit, "address": address, "port": instance["port"], "purpose": "vLLM API"})
            if self.accelerator != "cpu":
                # seen on an H200: PyTorch's store listens on every interface, for one GPU too, whatever is set
                listeners.append(
                    {
                        "unit": unit, "address": "0.0.0.0", "port": instance["internal_port"], "ports": INNER_PORTS,  # noqa: S104
                        "purpose": "PyTorch's rendezvous; let the host's firewall close it",
                    }
                )  # fmt: skip
        for server in plan["servers"]:
            unit = f"kvfleet-lmcache@{server['name']}.service"
            listeners.append(
                {"unit": unit, "address": "127.0.0.1", "port": server["port"], "purpose": "LMCache requests"}
            )
            listeners.append(
                {"unit": unit, "address": "127.0.0.1", "port": server["http_port"], "purpose": "LMCache HTTP"}
            )
        plan["host"]["listeners"] = listeners
        if self.release.get("loopback_only") and address not in ("127.0.0.1", "localhost", "::1"):
            self._error(
                "KVF-NET-003",
                f"Release {self.release.get('id')} has known weaknesses, so its API may listen on loopback only, not "
                f"on {address}.",
                "Set kvfleet_host: 127.0.0.1, or choose a kvfleet_release without them.",
            )
        self._foreign_ports(listeners)

    def _foreign_ports(self, listeners: Sequence[Mapping[str, Any]]) -> None:
        for listener in listeners:
            if "ports" in listener:
                continue  # the engine takes the next free port of its range
            for entry in self.host.get("listeners") or []:
                if entry.get("port") != listener["port"] or str(entry.get("unit") or "").startswith("kvfleet-"):
                    continue
                if entry.get("pid") is None and listener["unit"] in (self.host.get("kvfleet") or {}).get("units", []):
                    continue  # without root the owner cannot be seen; our running unit holds the port
                owner = entry.get("process") or "a process that only root can name"
                name = str(listener["unit"]).split("@")[-1].replace(".service", "")
                variable = {
                    "vLLM API": f"port of instance {name}",
                    "LMCache requests": "kvfleet_lmcache_port",
                    "LMCache HTTP": "kvfleet_lmcache_http_port",
                }[str(listener["purpose"])]
                pid = f" (process {entry['pid']})" if entry.get("pid") else ""
                self._error(
                    "KVF-NET-002",
                    f"Port {listener['port']} for {listener['purpose']} is taken by {owner}{pid}.",
                    f"Set {variable} to a free port, or stop that process.",
                    port=listener["port"],
                )
                break

    # --- output ---

    def _measured(self, tier: str) -> float | None:
        own = self.settings.ram_bytes_per_s if tier == "cpu" else self.settings.disk_bytes_per_s
        return own if own else self.measured.get(tier)

    def _instance(self, draft: _Draft) -> dict[str, Any]:
        own = draft.settings
        name = str(own.get("model")).rstrip("/").rsplit("/", 1)[-1]
        tiers = {
            tier: breakeven.tier_report(
                tier, draft.kv.stored_per_token, draft.tokens_per_s, self._measured(tier), draft.chunk_tokens
            )
            for tier in {"gpu": (), "cpu": ("cpu",), "disk": ("cpu", "disk")}[draft.profile]
        }
        for tier, report in tiers.items():
            if report["pays"] == "no":
                self._warn(
                    "KVF-BENCH-101",
                    f"Instance {draft.name}: the {tier} tier delivers "
                    f"{human_bytes(report['measured_bytes_per_s'])}/s but would have to deliver "
                    f"{human_bytes(report['needed_bytes_per_s'])}/s to beat computing the same tokens again at load.",
                    "Set kvfleet_profile: cpu, or use a faster disk."
                    if tier == "disk"
                    else "Set kvfleet_profile: gpu.",
                    tier=tier,
                    needed_bytes_per_s=report["needed_bytes_per_s"],
                    measured_bytes_per_s=report["measured_bytes_per_s"],
                )
        tiered = draft.profile != "gpu"
        return {
            "name": draft.name,
            "model": str(own.get("model")).rstrip("/"),
            "model_digest": draft.model.get("digest"),
            "served_model_name": str(own.get("served_model_name", name)),
            "profile": draft.profile,
            "gpus": [{"index": gpu["index"], "uuid": gpu["uuid"]} for gpu in draft.gpus],
            "tensor_parallel_size": draft.ranks,
            "host": self.settings.host,
            "port": None,
            "internal_port": None,
            "max_model_len": draft.max_model_len,
            "max_num_seqs": draft.max_num_seqs,
            "kv_bytes_per_token": draft.kv.per_token,
            "kv_bytes_per_token_per_rank": draft.kv.per_token_per_rank,
            "kv_bytes_per_token_stored": draft.kv.stored_per_token,
            "weights_bytes_per_rank": draft.weights_per_rank,
            "gpu_kv_pool_bytes_per_rank": draft.pool.bytes_per_rank,
            "gpu_kv_tokens": draft.pool.tokens,
            "kv_cache_memory_bytes": draft.kv_cache_memory_bytes,
            "block_size_tokens": draft.block_tokens,
            "gpu_memory_utilization": draft.utilization,
            "kv_cache_dtype": str(own.get("kv_cache_dtype", "auto")),
            "dtype": str(own.get("dtype", "auto")),
            "resolved_dtype": resolve_dtype(draft.shape, own.get("dtype", "auto")),
            "hybrid_kv_cache_manager": draft.hybrid_manager,
            "enforce_eager": bool(own.get("enforce_eager", self.accelerator == "cpu")),
            "trust_remote_code": bool(own.get("trust_remote_code", False)),
            "load_format": own.get("load_format", "auto"),
            "numa_nodes": draft.nodes,
            "use_odirect": self.measured.get("direct_io") is not False,
            "server": draft.server,
            "buffer_gib_per_gpu": draft.buffer_gib if tiered else 0.0,
            "l1_gib": round(draft.buffer_gib * draft.ranks, 3) if tiered else 0.0,
            "quota_gib": draft.quota_gib,
            "chunk_tokens": draft.chunk_tokens,
            "chunk_bytes_per_rank": draft.chunk_tokens * draft.kv.stored_per_token_per_rank,
            "max_concurrency_at_max_len": round(draft.pool.max_concurrency, 2),
            "tiers": tiers,
            "reasons": draft.reasons,
        }

    def _sessions(self, drafts: Sequence[_Draft], sessions: int, context: int) -> dict[str, Any]:
        """How much KV ``sessions`` conversations of ``context`` tokens are, and which tiers hold all of it."""
        if not drafts:
            return {
                "sessions": sessions,
                "context": context,
                "kv_bytes_total": None,
                "fits": {"gpu": None, "cpu": None, "disk": None},
            }
        draft = drafts[0]
        if context > draft.max_model_len:
            self._warn(
                "KVF-MODEL-022",
                f"Instance {draft.name} takes requests of at most {draft.max_model_len} tokens, the sessions have "
                f"{context}.",
                f"Set --context (host_plan_context) to at most {draft.max_model_len}, or raise kvfleet_max_model_len.",
                context=context,
                max_model_len=draft.max_model_len,
            )
        total = sessions * context * draft.kv.stored_per_token
        gpu_requests = pools.build_pool(
            draft.shape,
            draft.kv,
            draft.pool.bytes_per_rank,
            context,
            draft.block_tokens,
            draft.hybrid_manager,
            draft.in_flight,
        ).max_concurrency
        l1 = draft.buffer_gib * draft.ranks * GIB
        quota = (draft.quota_gib or 0.0) * GIB * DEFAULT_WATERMARK
        return {
            "sessions": sessions,
            "context": context,
            "instance": draft.name,
            "kv_bytes_total": total,
            "fits": {
                "gpu": gpu_requests >= sessions,
                "cpu": draft.profile != "gpu" and l1 * self._held_share >= total,
                "disk": draft.profile == "disk" and quota >= total,
            },
            "sessions_held": {
                "gpu": int(gpu_requests),
                "cpu": int(l1 * self._held_share // (context * draft.kv.stored_per_token))
                if draft.profile != "gpu"
                else 0,
                "disk": int(quota // (context * draft.kv.stored_per_token)),
            },
        }


def _step_down(size_gib: float) -> float:
    """A buffer in friendly steps: whole GiB from 4 on, halves below."""
    return float(math.floor(size_gib)) if size_gib >= 4 else math.floor(size_gib * 2) / 2


def _unique(findings: Sequence[Finding]) -> list[Finding]:
    seen: set[str] = set()
    unique = []
    for finding in findings:
        if str(finding) not in seen:
            seen.add(str(finding))
            unique.append(finding)
    return unique
