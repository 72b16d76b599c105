"""A pack of a stub release under the GPU row's own id: the whole path in minutes, on a machine without a GPU.

    python make_pack.py OUTPUT_DIR DEBS_DIR

Beside the pack, OUTPUT_DIR/extra holds what the host needs to look like the real one: an nvidia-smi, and wheels for an
environment that "holds torch".
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "gpu-proof.d"), str(ROOT / "tests" / "unit"), str(HERE)]

import engine_stubs  # noqa: E402
from gpuproof import pack  # noqa: E402

from kvfleet.bundles import fetch_wheels, read_lock  # noqa: E402
from kvfleet.core.lockfile import Lock, render_lock  # noqa: E402
from kvfleet.matrix import find_release, load_matrix  # noqa: E402

RELEASE, PYTHON = "cu13-0.25.1-0.5.3", "3.11"
PLATFORM = "cp311-x86_64"
ROW = find_release(load_matrix(), RELEASE).row
_SERVE = """
original = staticmethod(lambda arguments: None).__func__
class ServeSubcommand:
    cmd = staticmethod(original)
"""
_NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *name,memory.total,driver*) echo "NVIDIA H200, 143771 MiB, 580.159.04";;
  *driver_version,name*) echo "580.159.04, NVIDIA H200";;
  *uuid,memory.total,memory.free*) echo "GPU-a492423d-b271-c68b-7365-f92dbc35b343, 143771, 143100";;
  *utilization.gpu*) echo "0, 20000, 50";;
  *) echo "0, GPU-a492423d-b271-c68b-7365-f92dbc35b343, NVIDIA H200, 143771, 0, 00000000:00:06.0, 5, 16,"\
 "580.159.04, Disabled, 9.0, 616";;
esac
"""


def empty(*names: str) -> dict[str, str]:
    """Files of packages without content."""
    return {f"{name}/__init__.py": "" for name in names}


def wheels(folder: Path) -> list[Path]:
    """The stub release's own wheels."""
    fake = (ROOT / "tests" / "unit" / "fake_stack.py").read_text()
    fake = fake.replace("from kvfleet.core.http import HttpFailure", "class HttpFailure(Exception):\n    pass\n")
    vllm = {
        **empty("vllm", "vllm/entrypoints", "vllm/entrypoints/cli", "vllm/distributed", "vllm/distributed/kv_transfer"),
        **empty("vllm/distributed/kv_transfer/kv_connector"),
        "vllm/config.py": engine_stubs._CONFIG,
        "vllm/fake_stack.py": fake,
        "vllm/entrypoints/cli/main.py": (HERE / "stub_vllm.py").read_text(),
        "vllm/entrypoints/cli/serve.py": _SERVE,
        "vllm/distributed/kv_transfer/kv_connector/factory.py": "class LMCacheConnectorV1: pass\n"
        "class KVConnectorFactory:\n    @classmethod\n    def get_connector_class(cls, config):\n"
        "        return LMCacheConnectorV1\n",
    }
    lmcache = {
        **empty("lmcache", "lmcache/integration", "lmcache/integration/vllm"),
        "lmcache/c_ops.py": "import torch\n",
        "lmcache/integration/vllm/vllm_v1_adapter.py": "",
    }
    return [
        engine_stubs.make_wheel(
            folder, "vllm", str(ROW["vllm"]), vllm, scripts={"vllm": "vllm.entrypoints.cli.main:main"}
        ),
        engine_stubs.make_wheel(folder, "lmcache", str(ROW["lmcache"]), lmcache),
    ]


def main(output: Path, debs: Path) -> None:
    """Write the pack and what the host needs beside it."""
    shutil.rmtree(output, ignore_errors=True)
    cache, locks, extra = output / "cache", output / "locks", output / "extra"
    own = wheels(cache)
    lock = engine_stubs.lock_of(own, RELEASE, PLATFORM)
    lock = Lock(
        lock.release,
        lock.platform,
        lock.glibc,
        lock.pins,
        (("torch", str(ROW["torch"]).split("+")[0]), ("triton", None)),
    )
    locks.mkdir()
    (locks / f"{RELEASE}-{PLATFORM}.txt").write_text(render_lock(lock, "a test"))
    tools, text = read_lock("tools", "py3-x86_64")
    (locks / "tools-py3-x86_64.txt").write_text(text)
    for path in fetch_wheels(tools).values():
        shutil.copy(path, cache)
    extra.mkdir()
    torch = {
        "torch/__init__.py": f"__version__ = '{ROW['torch']}'\n"
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    }
    engine_stubs.make_wheel(extra, "torch", str(ROW["torch"]), torch)
    engine_stubs.make_wheel(extra, "triton", "3.6.0", empty("triton"))
    (extra / "nvidia-smi").write_text(_NVIDIA_SMI)
    pack.pack(RELEASE, output / "parts", 2**24, PYTHON, debs=debs, locks=locks, cache=cache)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
