"""What is packed and what is measured: data per release, load and profiles, and the inventory's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Name of the one host in the inventory and in the results.
HOST = "gpu-proof"
INSTANCE = "default"
MODEL_ON_HOST = "/data/models/proof"
SERIAL = "KVPROOF01"
SEED = 20261129
DISK_LINK = f"/dev/disk/by-id/nvme-kvfleet_proof_disk_{SERIAL}"
#: what ``run`` deploys: kvfleet's three profiles; the article's hand settings; the whole GPU as pool; two GPUs as one
PROFILES = ("gpu", "cpu", "disk", "article", "gpu-whole", "cpu-whole", "gpu-tp2", "cpu-tp2")
#: profile of the same pool and GPUs without offload: what a profile's figures are compared with
BASELINES: Mapping[str, str] = {"cpu-whole": "gpu-whole", "cpu-tp2": "gpu-tp2"}

#: Packages that an image with torch and CUDA's libraries provides for both releases.
_PROVIDED_FOR_BOTH = (
    "cuda-bindings", "cuda-pathfinder", "hf-xet", "huggingface-hub", "llvmlite", "mpmath", "networkx", "numba",
    "nvidia-cublas", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13",
    "nvidia-cufft", "nvidia-cufile", "nvidia-curand", "nvidia-cusolver", "nvidia-cusparse", "nvidia-cusparselt-cu13",
    "nvidia-nvjitlink", "nvidia-nvshmem-cu13", "nvidia-nvtx", "pillow", "safetensors", "sympy",
)  # fmt: skip
#: Packages of a release's lock that such an image provides, and the exact version where any other would break the
#: release (None: the check on the host decides by the requirements of what was carried).
PROVIDED: Mapping[str, Mapping[str, str | None]] = {
    "cu13-0.25.1-0.5.3": {
        "torch": "2.11.0",
        "triton": "3.6.0",
        **dict.fromkeys(sorted((*_PROVIDED_FOR_BOTH, "grpcio", "nvidia-nccl-cu13", "tokenizers", "transformers"))),
    },
    # torch and what was built for it are carried; CUDA's libraries of the image have the same major versions
    "cu13-0.32.0-0.5.6": dict.fromkeys(sorted((*_PROVIDED_FOR_BOTH, "cupy-cuda13x"))),
}
#: Packages that a dense model's text load never imports in either release; their absence is seen by the gates at
#: installation. FlashInfer is among them on purpose: without it the engine samples with PyTorch, which greedy answers
#: do not notice, and the first start does not compile its kernels for minutes.
_LEFT_OUT_OF_BOTH = (
    "awscrt", "cuda-core", "cuda-python", "cuda-tile", "cuda-toolkit", "cufile-python",
    "fastapi-cloud-cli", "fastar", "flashinfer-python", "google-api-core", "google-auth", "google-cloud-bigtable",
    "google-cloud-core", "google-cloud-monitoring", "google-crc32c", "grpc-google-iam-v1", "grpcio-status", "iniconfig",
    "nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13", "nvidia-nvvm", "opencv-python-headless",
    "proto-plus", "pynvvideocodec", "pytest", "quack-kernels", "redis", "rignore", "sentry-sdk", "setuptools-scm",
    "supervisor", "tilelang", "tokenspeed-mla", "tokenspeed-triton", "torch-c-dlpack-ext", "torchaudio", "torchcodec",
    "vcs-versioning", "z3-solver",
)  # fmt: skip
#: Packages of a release's lock that are not carried to such an image.
LEFT_OUT: Mapping[str, Sequence[str]] = {
    "cu13-0.25.1-0.5.3": tuple(
        sorted(
            (
                *_LEFT_OUT_OF_BOTH,
                "cryptography",
                "cupy-cuda13x",
                "flashinfer-cubin",
                "nvidia-cuda-tileiras",
                "torchvision",
            )
        )
    ),
    # the image's torchvision belongs to its own torch, and the cache server needs cryptography: both are carried
    "cu13-0.32.0-0.5.6": tuple(
        sorted(
            (
                *_LEFT_OUT_OF_BOTH,
                "nccl-extensions",
                "nccl4py",
                "nvidia-cutlass-dsl-libs-core",
                "nvidia-cutlass-dsl-libs-cu12",
            )
        )
    ),
}
#: Requirements that are known not to hold, with the reason; everything else that the check finds stops the run.
ACCEPTED: Mapping[str, str] = {
    "numba": "compiles vLLM's n-gram proposer alone, which this load does not use",
}
#: ansible-core and what it needs, from the controller's own lock.
CONTROLLER_PACKAGES = (
    "ansible-core", "cffi", "cryptography", "jinja2", "markupsafe", "packaging", "pycparser", "pyyaml", "resolvelib",
)  # fmt: skip
STAND_IN = "docker-systemctl-replacement==1.7.1097"
STAND_IN_SHA256 = "a73781b1fda952817174f33b2a4624403ae79e879ab0449b92e4eeda70ca8edb"


def runs(seed: int, small: bool = False, concurrencies: Sequence[int] = (8, 32)) -> list[dict[str, Any]]:
    """The load: 200 requests over 50 prefixes of 2000 + 48 tokens, 128 out; cold at 32, then warm, the busiest last.

    Below 8 concurrent requests 200 of them would take minutes: there half as many prefixes of their own seed,
    one request for each, first cold and then warm.
    """
    shape = (
        {"prefixes": 8, "prefix_tokens": 1000, "suffix_tokens": 24, "output_tokens": 8}
        if small
        else {"prefixes": 50, "prefix_tokens": 2000, "suffix_tokens": 48, "output_tokens": 128}
    )
    many, least = (4, 2) if small else (32, 8)

    def one(load: str, phase: str, concurrency: int, requests: int, own_seed: int) -> dict[str, Any]:
        word = "cold" if phase == "populate" else "warm"
        return {
            "name": f"{load}-{word}-c{concurrency}", "phase": phase, "concurrency": concurrency, "load": load,
            "dataset": "prefix_repetition", "seed": own_seed, "requests": requests, **shape,
            "prefixes": min(requests, shape["prefixes"]),
        }  # fmt: skip

    busy = sorted(number for number in concurrencies if number >= least)
    few = sorted((number for number in concurrencies if number < least), reverse=True)
    found = []
    if busy:
        requests = 16 if small else 200
        found += [one("rag", "populate", many, requests, seed)]
        found += [one("rag", "warm", number, requests, seed) for number in busy]
    if few:
        requests = shape["prefixes"] // 2
        found += [one("rag-few", "populate", many, requests, seed + 1)]
        found += [one("rag-few", "warm", number, requests, seed + 1) for number in few]
    return found


def profile_values(profile: str, small: bool = False) -> dict[str, Any]:
    """Inventory values of one profile; ``article`` is the article's hand settings on profile cpu."""
    plain, _, kind = profile.partition("-")
    buffers = {"cpu": 1.0, "disk": 0.5, "article": 1.0} if small else {"cpu": 24, "disk": 5, "article": 20}
    # a host with more GPUs than one would be planned as one instance over all of them
    values: dict[str, Any] = {
        "kvfleet_profile": "cpu" if plain == "article" else plain,
        "kvfleet_tensor_parallel_size": 2 if kind == "tp2" else 1,
    }
    if plain in buffers:
        values["kvfleet_buffer_gib_per_gpu"] = buffers[plain] / (2 if kind == "tp2" else 1)
    if plain == "article":
        # its chunk of 32 tokens; its utilisation of 0.75 changes nothing beside a pool of a given size
        values["kvfleet_chunk_tokens"] = 128 if small else 32
    if plain == "disk":
        values.update(
            cache_disk_device=DISK_LINK,
            cache_disk_serial=SERIAL,
            cache_disk_format=True,
            kvfleet_quota_gib=0.8 if small else 22,
        )
    if kind == "whole":
        values["kvfleet_kv_pool_gib"] = None
    if kind == "tp2":
        # the pool of one GPU in two halves: the same number of tokens
        values["kvfleet_kv_pool_gib"] = 2
    return values


def host_values(release: str, accelerator: str, model: str) -> dict[str, Any]:
    """Inventory values of every profile; paths of the host are added there."""
    cpu = accelerator == "cpu"
    return {
        "kvfleet_release": release,
        "kvfleet_allow_advisories": True,
        "kvfleet_instances": [
            {"name": INSTANCE, "model": model, "port": 8000, "max_model_len": 8192, "max_num_seqs": 4 if cpu else 32}
        ],
        "kvfleet_kv_pool_gib": 0.125 if cpu else 4,
        **({"kvfleet_dtype": "float32"} if cpu else {"kvfleet_load_format": "dummy"}),
        "engine_source": "bundle",
        "engine_packages": [],
        "engine_keep_releases": 0,
        "cache_disk_install_tools": False,
        "smoke_benchmark_profile": "custom",
        "smoke_benchmark_custom_runs": runs(SEED, small=cpu),
        "smoke_benchmark_force": True,
        "smoke_benchmark_report": False,
        # what a tier gives is measured here, not required
        "smoke_benchmark_min_warm_speedup_ram": 0.01,
        "smoke_benchmark_min_warm_speedup_disk": 0.01,
        "smoke_benchmark_run_limit_s": 240,
    }
