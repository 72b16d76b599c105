"""One instance under a profile's load: counters around every run, samples during it, findings instead of exceptions."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Protocol

from . import bench, metrics
from .bench import Capacity, LoadPlan, Run, Speed
from .findings import Finding, KvfleetError
from .http import Client, HttpFailure
from .truth import SALT_PREFIX, request_finding

#: samples kept for every run: enough for a plot, little enough for a file that people open
SERIES_LIMIT = 240
#: stores that neither begin nor end for so many seconds are over
STILL_S = 5.0
#: growth of the root file system during a load that logs and the like may cause
ROOT_GROWTH_LIMIT_BYTES = 256 * 1024**2


class Session(Protocol):
    """What runs ``vllm bench serve``; see ``bench_session.py``."""

    def run(self, arguments: Sequence[str], timeout_s: float) -> int:
        """Exit status of one call."""

    def output(self) -> str:
        """Last lines that it printed."""

    def last_line(self) -> str:
        """The line that names its error."""


class HostView(Protocol):
    """Samples of the host and counters of the devices below the disk tier; see ``host_load.py``."""

    root_device: int
    seen_devices: set[int]
    seen_direct: set[bool]

    def __call__(self) -> dict[str, Any]:
        """One sample."""

    def cache_disk_counters(self) -> dict[str, int]:
        """``read_bytes`` and ``written_bytes`` since boot."""


class SamplerFactory(Protocol):
    """Makes a context manager that samples in the background and has ``samples`` afterwards."""

    def __call__(self, probe: Callable[[], dict[str, Any]]) -> Any:
        """Start sampling with ``probe``."""


def plan_runs(
    profile: str,
    room: Capacity,
    speed: Speed | None,
    seed: int,
    budget_s: float,
    may_clear: bool,
    scale: float,
    custom: Sequence[Mapping[str, Any]],
    shape: Mapping[str, Any] | None = None,
) -> LoadPlan:
    """The runs of ``profile`` for an instance. Raises KVF-BENCH-012, -015, -016 for loads that cannot work.

    ``shape`` are the sizes of an earlier smoke load on this host; they are kept while they still fit, so that results
    of different deploys can be compared.
    """
    if profile == "smoke":
        # without a truth check before it (benchmark alone, nothing measured yet) assume a slow host
        return bench.smoke_runs(room, speed or Speed(300.0, 60.0), seed, budget_s, may_clear, shape)
    if profile == "article":
        return bench.article_runs(room, seed, scale, may_clear)
    if profile == "long":
        return bench.long_runs(room, seed, may_clear)
    return bench.custom_runs(custom, room, seed)


class InstanceLoad:
    """All runs of a load plan against one instance; :meth:`run` returns its part of ``bench_load``'s result."""

    def __init__(
        self,
        instance: Mapping[str, Any],
        server: Mapping[str, Any] | None,
        engine: Client,
        cache: Client | None,
        tokenizer: str,
        session: Session,
        sampler: SamplerFactory,
        host: HostView,
        result_dir: Path,
        run_limit_s: float,
        settle_limit_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.instance = instance
        self.server = server
        self.engine = engine
        self.cache = cache
        self.tokenizer = tokenizer
        self.session = session
        self.sampler = sampler
        self.host = host
        self.result_dir = result_dir
        self.run_limit_s = run_limit_s
        self.settle_limit_s = settle_limit_s
        self.sleep = sleep
        self.clock = clock
        self.salt = f"{SALT_PREFIX}{(rng or random.SystemRandom()).getrandbits(64):016x}"
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def room(self) -> Capacity:
        """The instance's room as its plan and its running engine tell it. Raises :class:`HttpFailure`."""
        pool = metrics.pool_tokens(self._engine_metrics()) or int(self.instance["gpu_kv_tokens"])
        return bench.capacity(self.instance, self.server, pool)

    def run(self, plan: LoadPlan) -> dict[str, Any]:
        """Every run of ``plan`` in order; stops at the first that failed, since later ones build on it."""
        runs: list[dict[str, Any]] = []
        self.notes = list(plan.notes)
        try:
            for run in plan.runs:
                runs.append(self._one(run))
            self._check_where_files_lie(runs)
            self._note_unused_disk(plan, runs)
        except KvfleetError as refusal:
            self.findings += refusal.findings
        except HttpFailure as failure:
            self.findings.append(request_finding(str(self.instance["name"]), failure))
        return {
            "name": self.instance["name"],
            "profile": self.instance["profile"],
            "salt": self.salt,
            "notes": self.notes,
            "scale": plan.scale,
            "shape": bench.shape_of(plan),
            "runs": runs,
            "findings": bench.findings_as_dicts(self.findings),
        }

    def _one(self, run: Run) -> dict[str, Any]:
        if run.clear_ram and self.cache is not None:
            # users' cached prompts are theirs: a host that takes traffic keeps its RAM tier
            if metrics.foreign_tokens(self._cache_metrics(), SALT_PREFIX) > 0:
                self.notes.append(f"run {run.name}: the RAM tier was not emptied, this host takes traffic")
            else:
                self._wait_until_stored()
                self.cache.post_json("/cache/clear", {}, 60)
        salt = self.salt if run.dataset == "prefix_repetition" else f"{self.salt}-{run.name}"
        before, device_before = self._counters(salt), self.host.cache_disk_counters()
        target = self.result_dir / f"{run.name}.json"
        target.unlink(missing_ok=True)
        arguments = bench.bench_arguments(
            run,
            self.engine.base_url,
            str(self.instance["served_model_name"]),
            self.tokenizer,
            salt,
            str(self.result_dir),
        )
        with self.sampler(self._probe) as sampler:
            status = self.session.run(arguments, self.run_limit_s)
        if status != 0 or not target.is_file():
            raise KvfleetError(
                Finding(
                    "KVF-BENCH-023",
                    f"vllm bench serve ended with status {status} in run {run.name}: {self.session.last_line()}",
                    "The benchmark could not run, which says nothing about the service: read the output in the result.",
                    {"status": status},
                )
            )
        figures = bench.parse_result(target.read_text(), run)
        after = self._settled_counters(salt, before, figures)
        tokens = {key: int(value) for key, value in metrics.differences(before, after).items()}
        device = metrics.differences(device_before, self.host.cache_disk_counters())
        return {
            "run": bench.run_as_dict(run),
            "figures": figures,
            "tokens": tokens,
            "disk": {**{key: int(value) for key, value in device.items()}, **self._disk_label(tokens, device)},
            "advice": self._advice(run, sampler.samples).as_dict(),
            "series": metrics.thin_out(sampler.samples, SERIES_LIMIT),
        }

    def _disk_label(self, tokens: Mapping[str, int], device: Mapping[str, float]) -> dict[str, Any]:
        """Whether the disk tier's hits really came from its device: bytes that were hit against bytes that it read."""
        hit_bytes = int(tokens.get("tier_disk", 0) * float(self.instance["kv_bytes_per_token"]))
        if hit_bytes == 0:
            return {"hit_bytes": 0, "served_by": None}
        return {"hit_bytes": hit_bytes, "served_by": bench.served_by(hit_bytes, int(device.get("read_bytes", 0)))}

    def _advice(self, run: Run, samples: Sequence[Mapping[str, Any]]) -> metrics.Advice:
        per_rank = float(self.instance["kv_bytes_per_token"]) / max(
            1, int(self.instance.get("tensor_parallel_size") or 1)
        )
        return metrics.advise(
            samples,
            buffer_gib=self.instance.get("buffer_gib_per_gpu") if self.cache is not None else None,
            buffer_needed_gib=run.working_set_tokens * per_rank / 1024**3,
            max_num_seqs=int(self.instance["max_num_seqs"]),
        )

    def _note_unused_disk(self, plan: LoadPlan, runs: Sequence[Mapping[str, Any]]) -> None:
        """Say so when the RAM tier held everything: such a load measured no disk."""
        warm = [run for run in runs if run["run"]["phase"] == "warm"]
        # LMCache inside vLLM does not count by tier: there the device's own counters tell
        if self.cache is None:
            return
        if self.instance["profile"] == "disk" and warm and not any(run["tokens"]["tier_disk"] for run in warm):
            working_set = max(run.working_set_tokens for run in plan.runs)
            delivered = sum(run["tokens"]["external"] for run in warm)
            holder = (
                "RAM tier"
                if delivered * 3 > sum(run["tokens"]["engine_cache"] for run in warm)
                else "engine's own pool"
            )
            self.notes.append(
                f"the {holder} held the whole working set of {working_set} tokens: these figures say nothing "
                "about the disk tier"
            )

    def _check_where_files_lie(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """KVF-BENCH-034 when the disk tier's files lie on the root file system, or the load made that grow.

        The device of the files decides; totals of a disk would count other writers, and a loop-backed test disk twice.
        """
        if self.instance["profile"] != "disk":
            return
        directory = str((self.server or {}).get("base_path") or "")
        try:
            devices = self.host.seen_devices | ({Path(directory).stat().st_dev} if directory else set())
        except OSError:
            devices = set(self.host.seen_devices)
        if self.host.root_device in devices:
            self.findings.append(
                Finding(
                    "KVF-BENCH-034",
                    f"Instance {self.instance['name']}: cache files lie on the root file system ({directory}): "
                    "under load "
                    "that freezes the host.",
                    "Mount the cache partition (cache_disk_device) and restart the server.",
                )
            )
        samples = [entry for run in runs for entry in run["series"] if entry.get("root_used_bytes")]
        growth = samples[-1]["root_used_bytes"] - samples[0]["root_used_bytes"] if samples else 0
        if growth <= ROOT_GROWTH_LIMIT_BYTES:
            return
        per_token = float(self.instance["kv_bytes_per_token"])
        expected = sum(run["tokens"]["computed"] for run in runs if run["run"]["phase"] == "populate") * per_token
        written = sum(int(run["disk"].get("written_bytes", 0)) for run in runs)
        grew = f"the root file system grew by {growth / 1024**2:.0f} MiB during the load"
        if written >= expected / 2:
            # the cache's bytes arrived on its own device, so somebody else wrote these
            self.notes.append(f"{grew}; the cache's own {written / 1024**2:.0f} MiB went to its device")
            return
        self.findings.append(
            Finding(
                "KVF-BENCH-035",
                f"Instance {self.instance['name']}: {grew}, while the cache's device took {written / 1024**2:.0f} "
                "MiB of "
                f"about {expected / 1024**2:.0f} MiB that were stored.",
                "Check that the server's base_path is the mounted cache partition; cache writes on the root disk "
                "freeze hosts.",
                {"growth_bytes": growth, "written_bytes": written},
            )
        )

    def _wait_until_stored(self) -> None:
        """Wait until the populating run's chunks are on disk: submitted and completed stores agree and stand still.

        They need not agree: LMCache 0.5.6 counts a store that failed as submitted and never as completed
        (``store_controller.py``). Counts that stood still for :data:`STILL_S` seconds are the last ones.
        """
        deadline = self.clock() + self.settle_limit_s
        previous, since = (-1.0, -2.0), self.clock()
        while self.clock() < deadline:
            page = self._cache_metrics()
            now = (
                metrics.of_salt(page, "lmcache_mp_l2_store_submitted_objects_chunks_total", self.salt),
                metrics.of_salt(page, "lmcache_mp_l2_store_completed_objects_chunks_total", self.salt),
            )
            if now != previous:
                previous, since = now, self.clock()
            elif now[0] == now[1] > 0 or self.clock() - since >= STILL_S:
                return
            self.sleep(0.5)

    def _counters(self, salt: str) -> dict[str, float]:
        """Prompt tokens by source of the engine, lookups by tier of this salt, evictions of the server."""
        page = self._cache_metrics()
        return {
            **metrics.prompt_tokens_by_source(self._engine_metrics()),
            **{f"tier_{key}": value for key, value in metrics.tier_tokens(page, salt).items()},
            "ram_evicted_chunks": page.total("lmcache_mp_l1_evicted_chunks_total"),
            "disk_evicted_chunks": page.total("lmcache_mp_l2_evicted_objects_chunks_total"),
        }

    def _settled_counters(self, salt: str, before: Mapping[str, float], figures: Mapping[str, Any]) -> dict[str, float]:
        """Counters once the engine has booked every prompt token that was sent; they trail by a moment."""
        for _ in range(20):
            after = self._counters(salt)
            since = metrics.differences(before, after)
            if sum(since[name] for name in metrics.PROMPT_SOURCES) >= figures["input_tokens"]:
                break
            self.sleep(0.1)
        return after

    def _probe(self) -> dict[str, Any]:
        """One sample: use of the pool and the tiers, requests, evictions, and what the host adds."""
        engine, cache = self._engine_metrics(), self._cache_metrics()
        return {
            "kv_usage": engine.highest("vllm:kv_cache_usage_perc"),
            "running": engine.total("vllm:num_requests_running"),
            "waiting": engine.total("vllm:num_requests_waiting"),
            "preemptions": engine.total("vllm:num_preemptions_total"),
            "ram_bytes": cache.total("lmcache_mp_l1_memory_usage_bytes"),
            "disk_bytes": cache.total("lmcache_mp_l2_usage_bytes"),
            "ram_evicted_chunks": cache.total("lmcache_mp_l1_evicted_chunks_total"),
            "disk_evicted_chunks": cache.total("lmcache_mp_l2_evicted_objects_chunks_total"),
            "disk_loaded_chunks": cache.total("lmcache_mp_l2_prefetch_load_completed_chunks_total"),
            **self.host(),
        }

    def _engine_metrics(self) -> metrics.Metrics:
        return metrics.parse(self.engine.get_text("/metrics"))

    def _cache_metrics(self) -> metrics.Metrics:
        return metrics.parse(self.cache.get_text("/metrics")) if self.cache else metrics.Metrics(())
