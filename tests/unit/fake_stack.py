"""A small model of an engine with its own block pool and of a two-tier cache server behind it, for the proof's tests.

It follows what vLLM 0.32 and LMCache 0.5.6 were seen to do: whole blocks are reused, oldest first; whole chunks are
stored per salt; a lookup asks RAM, then disk; counters are those of the recorded pages in tests/data/metrics.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from kvfleet.core.http import HttpFailure

BLOCK = 16
CHUNK = 64


class FakeStack:
    def __init__(self, *, pool_blocks=24, max_num_seqs=2, profile="disk"):
        self.pool_blocks = pool_blocks
        self.profile = profile
        self.model = "tiny"
        self.pool = OrderedDict()
        self.ram, self.disk = {}, {}
        self.lock = threading.RLock()
        self.sources = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.tier_hits = {}
        self.requests = []
        # faults
        self.ignore_salt = False
        self.disk_off = False
        self.ram_off = False
        self.corrupt_disk = False
        self.failed_loads = False
        self.skip_loads_of_whole_prompts = False
        self.forget_whole_prompts = False
        self.secret_pool_blocks = 0
        self.prefix_caching = True
        self.status = None
        self.no_tokens = False
        self.clock_s = 0.0

    def instance(self):
        return {
            "name": "a",
            "model": "/models/tiny",
            "served_model_name": "tiny",
            "profile": self.profile,
            "port": 8000,
            "max_model_len": 512,
            "max_num_seqs": 2,
            "gpu_kv_tokens": self.pool_blocks * BLOCK,
            "block_size_tokens": BLOCK,
            "chunk_tokens": CHUNK,
            "kv_bytes_per_token": 1024,
            "server": "0" if self.profile != "gpu" else None,
        }

    def server(self):
        return {"name": "0", "l1_gib": 1, "quota_gib": 4, "base_path": "/cache/0"} if self.profile != "gpu" else None

    def clock(self):
        self.clock_s += 0.001
        return self.clock_s

    def sleep(self, seconds):
        self.clock_s += seconds

    def tier_files(self, _path, salt):
        files = [key for key in self.disk if key[0] == salt]
        return len(files) * CHUNK * 1024, len(files)

    # -- the engine ------------------------------------------------------------------------------------------------

    def serve(self, body):
        if self.status:
            raise HttpFailure("status", f"HTTP {self.status}", self.status)
        with self.lock:
            self.requests.append(body)
            prompt = body["prompt"]
            salt = "" if self.ignore_salt else body.get("cache_salt", "")
            keep = (body.get("kv_transfer_params") or {}).get("lmcache.max_offload_tokens") != 0
            blocks = [(salt, tuple(prompt[: end + BLOCK])) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
            local = 0
            for key in blocks:
                if key not in self.pool or not self.prefix_caching:
                    break
                local += BLOCK
            local = min(local, (len(prompt) - 1) // BLOCK * BLOCK)
            chunks = [(salt, tuple(prompt[: end + CHUNK])) for end in range(0, len(prompt) - CHUNK + 1, CHUNK)]
            tiers = {"l1": 0, "l2": 0}
            corrupted = False
            for key in chunks:
                if self.profile == "gpu":
                    break
                if key in self.ram:
                    tiers["l1"] += CHUNK
                elif key in self.disk and self.profile == "disk":
                    tiers["l2"] += CHUNK
                    corrupted |= self.corrupt_disk
                else:
                    break
            found = tiers["l1"] + tiers["l2"]
            if found == len(prompt):
                corrupted |= self.skip_loads_of_whole_prompts
                if self.forget_whole_prompts:
                    found, tiers = 0, {"l1": 0, "l2": 0}
            hits = self.tier_hits.setdefault(body.get("cache_salt", ""), {"requested": 0, "l1": 0, "l2": 0})
            hits["requested"] += len(chunks) * CHUNK
            for tier, tokens in tiers.items():
                hits[tier] += tokens
            external = 0 if self.failed_loads else max(0, found - local)
            self.sources["local_cache_hit"] += local
            self.sources["external_kv_transfer"] += external
            self.sources["local_compute"] += len(prompt) - local - external
            for key in reversed(blocks):
                self.pool.pop(key, None)
                self.pool[key] = True
            while len(self.pool) > self.pool_blocks - 1 + self.secret_pool_blocks:
                self.pool.popitem(last=False)
            if keep and self.profile != "gpu":
                for key in chunks:
                    if not self.ram_off:
                        self.ram[key] = True
                    if self.profile == "disk" and not self.disk_off:
                        self.disk[key] = True
            slow = (len(prompt) - local - external) / 1000
            return self.answer(body, slow, corrupted)

    def answer(self, body, first_s, corrupted):
        if self.no_tokens:
            return [(first_s, {"choices": [{"text": ""}]})]
        seed = hashlib.sha256(repr(body["prompt"]).encode() + (b"?" if corrupted else b"")).digest()
        events = [(0.0, {"choices": [{"text": ""}]})]
        for position in range(body["max_tokens"]):
            token = seed[position % 32] + position
            names = [f"token_id:{token + offset}" for offset in range(5)]
            listed = {name: -1.0 - index * 0.7 for index, name in enumerate(names)}
            choice = {"text": "x", "logprobs": {"tokens": names[:1], "top_logprobs": [listed]}}
            events.append((first_s + position * 0.01, {"choices": [choice]}))
        events.append((first_s + 0.5, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"])}}))
        return events

    def engine_page(self):
        lines = [
            f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",source="{name}"}} {value}'
            for name, value in self.sources.items()
        ]
        labels = f'block_size="{BLOCK}",num_gpu_blocks="{self.pool_blocks}"'
        return "\n".join([*lines, f"vllm:cache_config_info{{{labels}}} 1.0"])

    def cache_page(self):
        lines = []
        for salt, hits in self.tier_hits.items():
            labels = f'{{cache_salt="{salt}",model_name="/models/tiny"}}'
            lines += [
                f"lmcache_mp_lookup_requested_tokens_total{labels} {hits['requested']}",
                f"lmcache_mp_lookup_hit_tokens_total{labels} {hits['l1'] + hits['l2']}",
                f"lmcache_mp_lookup_hit_l1_tokens_total{labels} {hits['l1']}",
                f"lmcache_mp_lookup_hit_l2_tokens_total{labels} {hits['l2']}",
                f"lmcache_mp_l1_write_chunks_total{labels} {sum(key[0] == salt for key in self.ram)}",
                f"lmcache_mp_l2_store_submitted_objects_chunks_total{labels} {sum(k[0] == salt for k in self.disk)}",
                f"lmcache_mp_l2_store_completed_objects_chunks_total{labels} {sum(k[0] == salt for k in self.disk)}",
            ]
        lines.append(f"lmcache_mp_l2_usage_bytes {len(self.disk) * CHUNK * 1024}")
        return "\n".join(lines)


class FakeEngine:
    base_url = "http://127.0.0.1:8000"

    def __init__(self, stack):
        self.stack = stack

    def get_text(self, path, timeout_s=30.0):
        assert path == "/metrics"
        return self.stack.engine_page()

    def get_json(self, path, timeout_s=30.0):
        assert path == "/v1/models"
        if self.stack.status:
            raise HttpFailure("status", f"HTTP {self.stack.status}", self.stack.status)
        return {"data": [{"id": self.stack.model}]}

    def post_json(self, path, body, timeout_s=300.0):
        if self.stack.no_tokens:
            return {"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}
        return {"choices": [{"text": "x"}], "usage": {"completion_tokens": body["max_tokens"]}}

    def stream(self, path, body, timeout_s=300.0):
        yield from self.stack.serve(body)


class FakeCache:
    base_url = "http://127.0.0.1:8080"

    def __init__(self, stack):
        self.stack = stack

    def get_text(self, path, timeout_s=30.0):
        return self.stack.cache_page()

    def get_json(self, path, timeout_s=30.0):
        return {}

    def post_json(self, path, body, timeout_s=300.0):
        assert path == "/cache/clear"
        self.stack.ram.clear()
        return {"status": "ok"}

    def stream(self, path, body, timeout_s=300.0):
        raise AssertionError("the cache server streams nothing")
