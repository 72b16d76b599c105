"""On the host: check it, unpack, run kvfleet's playbooks profile by profile, keep what came out."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import disk, memory, model, services, settings

ROOT = Path(__file__).resolve().parents[3]
PACK_INDEX = "kvfleet-gpu-proof.json"
#: programs that the playbooks call, and what misses without them
TOOLS = {
    "losetup": "the loop-backed disk", "lsblk": "the list of disks", "blkid": "the cache disk",
    "wipefs": "the cache disk", "sgdisk": "the cache disk", "partx": "the cache disk", "mkfs.ext4": "the cache disk",
    "debugfs": "the cache disk", "mount": "the cache disk", "useradd": "the service user",
    "gcc": "compilation at run time", "ldconfig": "the driver",
}  # fmt: skip
#: seconds that a profile needs at least; less left is not worth a start
LEAST_S = {name: 160 if name == "disk" else 150 for name in settings.PROFILES}
#: seconds kept for collecting at the end of the budget
RESERVE_S = 12


class ProofError(Exception):
    """A sentence for people: what is wrong and what to do."""


def say(text: str) -> None:
    """One line with the time, at once."""
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}", flush=True)


def call(*argv: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; never raises for its status, nor for a program that is not there (127) or slow (124)."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, **options)
    except FileNotFoundError:
        return subprocess.CompletedProcess(argv, 127, "", f"{argv[0]}: not found")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"{argv[0]}: no end within {timeout_s:g} s")


def must(*argv: str, timeout_s: float = 300, **options: Any) -> str:
    """Run a command that has to succeed; its output."""
    done = call(*argv, timeout_s=timeout_s, **options)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-600:]
        raise ProofError(f"{' '.join(argv[:4])} ended with {done.returncode}: {words}")
    return done.stdout


def bundlefile() -> Any:
    """The library's module for parts, from the installed package or from this checkout."""
    try:
        from kvfleet.core import bundlefile as found
    except ImportError:
        sys.path.insert(0, str(ROOT / "plugins" / "module_utils"))
        from kvfleet import bundlefile as found  # type: ignore[attr-defined,no-redef]
    return found


# ------------------------------------------------------------------------------------------------ check

_ENVIRONMENT = r"""
import json, os, site, sys, sysconfig
sys.path.insert(0, sys.argv[1])
from gpuproof import requires
proof = json.load(open(sys.argv[2]))["proof"]
image = requires.installed()
found = {"python": "%d.%d.%d" % sys.version_info[:3], "base": sys.base_prefix,
         "header": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
         "paths": [path for path in site.getsitepackages() if os.path.isdir(path)],
         "image": {name: entry["version"] for name, entry in sorted(image.items())}}
roots = [name for name in ("vllm", "lmcache") if name in proof["carried"]]
found.update(requires.check(roots, proof["carried"], image, proof["left_out"], proof["accepted"]))
for name, version in proof["provided"].items():
    have = image.get(name, {}).get("version")
    if have is None or (version and have.split("+")[0] != version):
        found["unmet"].append("%s %s instead of %s" % (name, have or "missing", version or "any version"))
print(json.dumps(found))
"""


def check(parts: Path, python: str, output: Path | None = None) -> int:
    """Say whether the proof can work on this host, from the index alone; exit status 0, or 2 with every reason."""
    index = json.loads((parts / PACK_INDEX).read_text())
    proof = index["proof"]
    wrong: list[str] = []
    notes: list[str] = []
    seen: dict[str, Any] = {"kernel": os.uname().release, "cpus": os.cpu_count(), "pid1": _text("/proc/1/comm").strip()}
    answer = call(python, "-c", _ENVIRONMENT, str(Path(__file__).resolve().parents[1]), str(parts / PACK_INDEX))
    if answer.returncode:
        wrong.append(f"{python} could not be asked: {answer.stderr.strip()[-400:]}")
    else:
        found = json.loads(answer.stdout)
        seen.update({key: found[key] for key in ("python", "base", "paths", "header", "used", "known")})
        seen["image"] = found["image"]
        wrong += [f"requirement: {sentence}" for sentence in found["unmet"]]
        if not found["python"].startswith(proof["python"] + "."):
            wrong.append(f"Python {found['python']} instead of {proof['python']}")
        if proof["accelerator"] == "cuda" and not found["header"]:
            wrong.append("Python.h is missing: run-time compilation would fail")
    for tool, what in TOOLS.items():
        if _which(tool) is None:
            where = wrong if tool not in ("sgdisk",) or not proof.get("tools", True) else notes
            where.append(f"{tool} is missing ({what})")
    seen["systemd"] = {name: _which(name) for name in ("systemd-nspawn", "systemctl", "journalctl", "udevadm")}
    seen["systemd"]["systemd"] = Path("/usr/lib/systemd/systemd").exists()
    for name in ("nvcc", "fio", "g++", "ninja", "ip"):
        seen.setdefault("programs", {})[name] = _which(name)
    for group in ("video", "render"):
        seen.setdefault("groups", {})[group] = call("getent", "group", group).returncode == 0
    if not Path("/dev/loop-control").exists():
        wrong.append("/dev/loop-control is missing: no loop-backed disk")
    seen["dev"] = call("stat", "-f", "-c", "%T", "/dev").stdout.strip()
    seen["disk_free_gb"] = round(shutil.disk_usage("/var/lib").free / 1e9, 1)
    seen["memory"] = memory.read()
    if proof["accelerator"] == "cuda":
        wrong += _check_gpu(python, seen)
    if output is not None:
        output.write_text(json.dumps({"wrong": wrong, "notes": notes, **seen}, indent=1) + "\n")
    image = seen.pop("image", {})
    seen["used"] = " ".join(f"{name}=={version}" for name, version in (seen.get("used") or {}).items())
    print(json.dumps(seen, indent=1))
    print(f"image: {len(image)} packages; notes: {notes}")
    for sentence in wrong:
        print(f"WRONG {sentence}")
    print("GO" if not wrong else f"NO-GO: {len(wrong)} reasons above")
    return 0 if not wrong else 2


def _check_gpu(python: str, seen: dict[str, Any]) -> list[str]:
    wrong = []
    shown = call("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader", timeout_s=30)
    seen["gpu"] = shown.stdout.strip() or shown.stderr.strip()
    if shown.returncode:
        wrong.append(f"nvidia-smi: {seen['gpu'][-200:]}")
    seen["nvidia_smi"] = _which("nvidia-smi")
    # the services run as a user of their own: who may not read the environment gets no torch
    script = "import torch; print(torch.__version__, torch.cuda.is_available())"
    setpriv = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    asked = call(*setpriv, "env", "-i", "PATH=/usr/bin:/bin", "HOME=/tmp", _which(python) or python, "-c", script)
    seen["torch_as_nobody"] = asked.stdout.strip() or asked.stderr.strip()[-300:]
    seen["libcuda"] = [line.strip() for line in call("ldconfig", "-p").stdout.splitlines() if "libcuda.so.1" in line]
    seen["driver_folders"] = [str(path) for path in _driver_folders()]
    if asked.returncode or not asked.stdout.strip().endswith("True"):
        linked = bool(seen["libcuda"])
        if linked or asked.returncode:
            wrong.append(f"torch as an ordinary user in a clean environment: {seen['torch_as_nobody']}")
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia*"))
    seen["devices"] = {path: oct(Path(path).stat().st_mode & 0o777) for path in devices if not Path(path).is_dir()}
    return wrong


def _driver_folders() -> list[Path]:
    found = []
    for top in ("/usr/local/nvidia", "/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/compat"):
        found += [path.parent for path in Path(top).glob("**/libcuda.so.1")] if Path(top).is_dir() else []
    return sorted(set(found))


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------ unpack


class Home:
    """Where the proof lies on the host, and what it remembers between commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def proof(self) -> dict[str, Any]:
        """What was packed."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "pack" / "proof.json").read_text())
        except OSError:
            raise ProofError(f"Nothing is unpacked in {self.folder}: run 'gpu-proof unpack' first.") from None
        return found

    def read(self) -> dict[str, Any]:
        """Remembered values."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def remember(self, **values: Any) -> dict[str, Any]:
        """Add values, in one step on disk."""
        state = {**self.read(), **values}
        beside = self.folder / "state.json.new"
        beside.write_text(json.dumps(state, indent=1, default=str) + "\n")
        beside.replace(self.folder / "state.json")
        return state


@contextlib.contextmanager
def timed(home: Home, step: str) -> Iterator[None]:
    """Say and remember how long a step took."""
    start = time.monotonic()
    yield
    seconds = round(time.monotonic() - start, 1)
    home.remember(steps={**home.read().get("steps", {}), step: seconds})
    say(f"{step}: {seconds} s")


def unpack(folder: Path, parts: Path, python: str, memory_gib: int = 0, dummy: bool = False) -> int:
    """Verify and unpack the parts, make the controller's environment and the model; each step once.

    ``dummy`` leaves the weights to the engine, which makes them at every start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = Home(folder)
    growing = memory.grow(memory_gib) if memory_gib else None
    library = bundlefile()
    data = json.loads((parts / PACK_INDEX).read_text())
    index = library.read_index(data, PACK_INDEX)
    if home.read().get("unpacked") != index.manifest_sha256:
        with timed(home, "unpack the parts"):
            shutil.rmtree(home / "pack", ignore_errors=True)
            joined = library.JoinedParts(index, parts)
            with tarfile.open(fileobj=joined, mode="r|") as tar:
                for member in tar:
                    if not member.isreg() or member.name.startswith(("/", "..")) or "/.." in member.name:
                        raise ProofError(f"{member.name} does not belong into a pack.")
                    tar.extract(member, home / "pack", filter="data") if sys.version_info >= (3, 12) else tar.extract(
                        member, home / "pack"
                    )
            with tarfile.open(home / "pack" / "tree.tar") as tar:
                shutil.rmtree(home / "tree", ignore_errors=True)
                tar.extractall(home / "tree")  # noqa: S202 - git's own archive, its sum checked with the parts
        home.remember(unpacked=index.manifest_sha256)
    proof = home.proof
    base = json.loads(must(python, "-c", _BASE))
    home.remember(base={**base, "python": _which(python) or python})
    if not (home / "controller" / "bin" / "ansible-playbook").exists():
        with timed(home, "make the controller"):
            _controller(home, base)
    with timed(home, "prepare the host"):
        _machine_id()
        _driver_links(home)
        _tools(home)
        home.remember(services=services.install(home / "pack" / "stand-in", home / "stand-in"))
        _model(home, proof, None if dummy else home.read()["base"]["python"])
    if growing is not None:
        with timed(home, "wait for memory"):
            home.remember(memory=growing(40.0))
    say(f"memory: {memory.read()}")
    say(f"units run through: {home.read()['services']['kind']}")
    return 0


_BASE = (
    "import json, os, sys; base = os.path.join(sys.base_prefix, 'bin', 'python%d.%d' % sys.version_info[:2]); "
    "print(json.dumps({'interpreter': base if os.path.exists(base) else sys.executable, 'version': '%d.%d' % "
    "sys.version_info[:2]}))"
)


def _controller(home: Home, base: Mapping[str, str]) -> None:
    """ansible-core in an environment of its own, without any index."""
    target = home / "controller"
    shutil.rmtree(target, ignore_errors=True)
    uv = home / "uv"
    bundle = home / "pack" / "bundle"
    wheel_name = None
    with tarfile.open(next(bundle.glob("*.tar"))) as tar:
        for member in tar:
            if re.fullmatch(r"wheels/uv-.*\.whl", member.name):
                stream = tar.extractfile(member)
                wheel_name = home / "uv.whl"
                wheel_name.write_bytes(stream.read() if stream else b"")
    if wheel_name is None:
        raise ProofError("The pack holds no uv.")
    with zipfile.ZipFile(wheel_name) as wheel:
        uv.write_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith(".data/scripts/uv"))))
    uv.chmod(0o755)
    wheel_name.unlink()
    environment = {
        **os.environ,
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_CACHE_DIR": str(home / "uv-cache"),
    }
    must(str(uv), "venv", "--quiet", "--python", base["interpreter"], str(target), env=environment)
    wheels = sorted(str(path) for path in (home / "pack" / "controller").glob("*.whl"))
    must(
        *(str(uv), "pip", "install", "--quiet", "--offline", "--no-index", "--no-deps", "--link-mode", "copy"),
        *("--python", str(target / "bin" / "python"), *wheels),
        env=environment,
    )


def _machine_id(path: Path = Path("/etc/machine-id")) -> None:
    """Images have none; systemd would make one at its first boot, and the cache disk's record names it."""
    if not path.exists() or not path.read_text().strip():
        path.write_text(uuid.uuid4().hex + "\n")


def _driver_links(home: Home) -> None:
    """Let services, whose environment is clean, find the driver's libraries as on a host where they are installed."""
    found = _which("nvidia-smi")
    if found and shutil.which("nvidia-smi", path="/usr/local/bin:/usr/bin:/bin") is None:
        Path("/usr/local/bin/nvidia-smi").symlink_to(found)
    if "libcuda.so.1" in call("ldconfig", "-p").stdout:
        return
    folders = _driver_folders()
    if folders:
        Path("/etc/ld.so.conf.d/kvfleet-gpu-proof.conf").write_text("".join(f"{path}\n" for path in folders))
        call("ldconfig")
        home.remember(driver_folders=[str(path) for path in folders])


def _tools(home: Home) -> None:
    """Programs that the host lacks, from carried Debian packages, beside the system and with their own libraries."""
    if _which("sgdisk"):
        return
    target = home / "debs"
    for package in sorted((home / "pack" / "debs").glob("*.deb")):
        must("dpkg-deb", "-x", str(package), str(target))
    program = next(iter(target.glob("*/sbin/sgdisk")), next(iter(target.glob("sbin/sgdisk")), None))
    if program is None:
        say("sgdisk is neither here nor in the pack: the disk profile cannot run")
        return
    libraries = ":".join(sorted({str(path.parent) for path in target.glob("**/*.so*")}))
    wrapper = Path("/usr/local/sbin/sgdisk")
    wrapper.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {program} "$@"\n')
    wrapper.chmod(0o755)


def _model(home: Home, proof: Mapping[str, Any], python: str | None) -> None:
    target = Path(settings.MODEL_ON_HOST)
    if proof["model"]:
        if not target.exists():
            shutil.copytree(home / "pack" / "model", target)
    else:
        model.write_shape(target)
        if python is not None and proof["accelerator"] == "cuda" and not model.has_weights(target):
            made = call(*model.weights_command(target, python, "cuda"), timeout_s=300)
            if made.returncode:
                say(f"no weights could be made, the engine makes its own: {made.stderr.strip()[-300:]}")
    for path in [target, *target.rglob("*"), *target.parents]:
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))


# ------------------------------------------------------------------------------------------------ run


def run(
    folder: Path,
    profiles: Sequence[str],
    budget_s: float,
    disk_gib: float,
    output: Path,
    own: Mapping[str, Any] | None = None,
    concurrencies: Sequence[int] = (),
) -> int:
    """Each profile with site.yml and its load within ``budget_s`` seconds; results land in ``output`` after each.

    ``own`` are inventory values that win over those of every profile; ``concurrencies`` other points than the usual.
    """
    end = time.monotonic() + budget_s - RESERVE_S
    home = Home(folder)
    proof = home.proof
    output.mkdir(parents=True, exist_ok=True)
    unknown = [profile for profile in profiles if profile not in settings.PROFILES]
    if unknown:
        raise ProofError(f"Unknown profiles {', '.join(unknown)}; known are {', '.join(settings.PROFILES)}.")
    own = {**_load(proof, concurrencies), **(own or {})}
    _inventory(home, proof)
    if "idle" not in home.read():
        home.remember(idle=memory.read())
    if proof["accelerator"] == "cuda" and "speeds" not in home.read():
        with timed(home, "measure the copy speed"):
            home.remember(speeds=_copy_speed(home))
    status = 0
    for profile in profiles:
        left = end - time.monotonic()
        if left < LEAST_S[profile] * (0.2 if proof["accelerator"] == "cpu" else 1):
            _outcome(home, profile, ran=False, reason=f"only {left:.0f} s were left of the budget")
            say(f"{profile}: not run, only {left:.0f} s are left")
            status = 3
            continue
        if profile == "disk":
            with timed(home, "make the loop-backed disk"):
                found = disk.attach(home / "disk.img", disk_gib or (3.0 if proof["accelerator"] == "cpu" else 0.0))
            home.remember(disk={**home.read().get("disk", {}), **found})
            say(f"disk: {found}")
        status = max(status, _profile(home, profile, end, own))
        collect(folder, output)
    return status


def _load(proof: Mapping[str, Any], concurrencies: Sequence[int]) -> dict[str, Any]:
    """Inventory values of a load with these points; nothing for the usual ones."""
    if not concurrencies:
        return {}
    small = proof["accelerator"] == "cpu"
    return {"smoke_benchmark_custom_runs": settings.runs(settings.SEED, small, concurrencies)}


def _inventory(home: Home, proof: Mapping[str, Any]) -> None:
    state = home.read()
    values = settings.host_values(proof["release"], proof["accelerator"], settings.MODEL_ON_HOST)
    bundle = home / "pack" / "bundle"
    values.update(
        ansible_connection="local",
        ansible_user="root",
        ansible_become=False,
        ansible_python_interpreter=state["base"]["interpreter"],
        engine_bundle=str(bundle / proof["bundle"]),
        engine_lock=str(bundle / proof["lock"]),
        engine_base_python=state["base"]["python"] if proof["reduced"] else "",
        cache_disk_measure_speed="after_format" if _which("fio") else "never",
        vllm_instance_groups=[name for name in ("video", "render") if call("getent", "group", name).returncode == 0],
        smoke_benchmark_results_dir=str(home / "results"),
        host_plan_output_dir=str(home / "plans"),
    )
    if model.has_weights(Path(settings.MODEL_ON_HOST)):
        values.pop("kvfleet_load_format", None)
    words = host_environment(os.environ)
    if proof["reduced"]:
        # FlashInfer is not carried; without this vLLM takes it for granted
        words["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if words:
        drop_in = Path(f"/etc/systemd/system/kvfleet-vllm@{settings.INSTANCE}.service.d/gpu-proof.conf")
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"Environment={systemd_word(f'{name}={value}')}" for name, value in sorted(words.items())]
        drop_in.write_text("\n".join(["[Service]", *lines, ""]))
    target = home / "inventory"
    target.mkdir(exist_ok=True)
    (target / "hosts.yml").write_text(
        json.dumps({"all": {"hosts": {settings.HOST: {}}, "vars": values}}, indent=1) + "\n"
    )


#: names by which a host tells programs how its GPUs may talk to each other
_BETWEEN_GPUS = ("NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_", "TORCH_NCCL_")


def host_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the host's own environment says about traffic between its GPUs; units would start without it.

    Where it forbids NVLink's multicast (``NCCL_NVLS_ENABLE=0``), vLLM's all-reduce over symmetric memory is off too.
    """
    found = {name: value for name, value in environment.items() if name.startswith(_BETWEEN_GPUS)}
    if found.get("NCCL_NVLS_ENABLE") == "0":
        found["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    return found


def _copy_speed(home: Home) -> dict[str, float]:
    """Bytes per second from pinned host memory to the GPU and back, as PyTorch copies 1 GiB; empty when it cannot."""
    script = (
        "import json, time, torch\n"
        "host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)\n"
        "card = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')\n"
        "found = {}\n"
        "for name, into, out in (('to_gpu', card, host), ('to_host', host, card)):\n"
        "    into.copy_(out); torch.cuda.synchronize(); start = time.perf_counter()\n"
        "    for _ in range(4): into.copy_(out)\n"
        "    torch.cuda.synchronize(); found[name] = 4 * (1 << 30) / (time.perf_counter() - start)\n"
        "print(json.dumps(found))\n"
    )
    answer = call(home.read()["base"]["python"], "-c", script, timeout_s=60)
    return json.loads(answer.stdout) if answer.returncode == 0 else {}


def _profile(home: Home, profile: str, end: float, own: Mapping[str, Any]) -> int:
    """One profile; 0, or 3 when something failed. What was measured is kept either way."""
    state = home.read()
    small = home.proof["accelerator"] == "cpu"
    values = settings.profile_values(profile, small)
    if state.get("speeds", {}).get("to_gpu"):
        values["kvfleet_ram_bytes_per_s"] = round(state["speeds"]["to_gpu"])
    if profile == "disk" and (state.get("disk") or {}).get("read_bytes_per_s"):
        values["kvfleet_disk_bytes_per_s"] = round(state["disk"]["read_bytes_per_s"])
    if profile == "disk" and (state.get("disk") or {}).get("size_gib"):
        # the plan gives at most 80 % of the partition, and 7 % of the disk stay unpartitioned
        most = int(float(state["disk"]["size_gib"]) * 0.93 * 0.75 * 10) / 10
        values["kvfleet_quota_gib"] = min(values["kvfleet_quota_gib"], most)
    _stop_services(keep_disk=profile == "disk")
    if not small:
        values.update(fit_buffer(values, memory.read()))
    values.update(own)
    folder = home / "runs" / profile
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "values.json").write_text(json.dumps(values, indent=1) + "\n")
    before = set((home / "results").rglob("*.json"))
    started = time.monotonic()
    status, tasks = playbook(home, ["site.yml", "-e", f"@{folder / 'values.json'}"], folder / "site.log", end)
    seconds = round(time.monotonic() - started, 1)
    fresh = sorted(set((home / "results").rglob("*.json")) - before)
    record = json.loads(fresh[-1].read_text()) if fresh else None
    busy = memory.read()
    _save_services(folder)
    plans = home / "plans" / "plans.json"
    if plans.exists():
        shutil.copy(plans, folder / "plans.json")
    # a deploy that failed its proof has put back what was proved before
    home.remember(deployed=profile if status == 0 else "")
    _outcome(
        home, profile, ran=True, memory=busy, engine=engine_facts(services.journals().values()), status=status,
        seconds=seconds, tasks=tasks, result=fresh[-1].name if fresh else None,
        verdict=(record or {}).get("verdict"), line=_last_verdict(record), values=values,
        own=own_seconds(tasks),
    )  # fmt: skip
    say(f"{profile}: site.yml ended with {status} after {seconds} s; {_last_verdict(record) or 'no result'}")
    return 0 if status == 0 else 3


def _measure(home: Home, folder: Path, values: Path, end: float) -> list[dict[str, Any]]:
    """The load on what runs now, without a deploy or a proof, into ``load.json`` of ``folder``; the run's tasks."""
    words = [str(home / "tree" / "scripts" / "gpu-proof.d" / "load.yml"), "-e", f"@{values}"]
    words += ["-e", f"gpu_proof_load={folder / 'load.json'}", "-e", f"gpu_proof_plans={home / 'plans' / 'plans.json'}"]
    return playbook(home, words, folder / "load.log", end)[1]


#: host RAM in GiB of an 8B engine on one GPU beside its buffer, with some room (sizing.py: 2 + 4 + page cache, + 0.5)
_ENGINE_RAM_GIB = 17.0


def fit_buffer(values: Mapping[str, Any], now: Mapping[str, float]) -> dict[str, Any]:
    """Changes for a host that shows too little memory: a machine that grows as it is used may not have grown yet.

    First the reserve for the system shrinks to 1 GiB, then the buffer; both stand in the values that are kept.
    """
    buffer = float(values.get("kvfleet_buffer_gib_per_gpu") or 0)
    if not buffer or now["available_gib"] >= buffer + _ENGINE_RAM_GIB + now["total_gib"] / 8:
        return {}
    fits = max(2.0, float(int(now["available_gib"] - _ENGINE_RAM_GIB - 1)))
    return {"kvfleet_ram_reserve_gib": 1, "kvfleet_buffer_gib_per_gpu": min(buffer, fits)}


def _last_verdict(record: Mapping[str, Any] | None) -> str:
    if not record:
        return ""
    deciding = record.get("deciding") or {}
    return f"verdict {record.get('verdict')}: {deciding.get('message') or deciding.get('figure')}"


def _stop_services(keep_disk: bool) -> None:
    """Stop what the profile before left running, and unmount its disk unless ``keep_disk``.

    Without control groups the plan cannot tell our own processes from foreign ones: memory and ports have to be free.
    """
    with contextlib.suppress(OSError):
        for unit in sorted(Path("/etc/systemd/system").glob("kvfleet-*@*.service"), reverse=True):
            call("systemctl", "stop", unit.name)
    if not keep_disk and os.path.ismount("/var/cache/kvfleet"):
        call("systemctl", "stop", "var-cache-kvfleet.mount")


#: tasks that are said as they begin
_SHOWN = ("Bring servers", "Build", "Put the load", "Check that")
_TASK = re.compile(r"^(TASK|PLAY|RUNNING HANDLER) \[(?P<name>.*)\] \**$")


def playbook(home: Home, words: Sequence[str], log: Path, end: float) -> tuple[int, list[dict[str, Any]]]:
    """Run ansible-playbook until ``end``; its status (124 = out of time) and the seconds of every task."""
    limit = max(5.0, end - time.monotonic())
    environment = {
        **os.environ,
        "PATH": f"/usr/local/sbin:/usr/local/bin:{home / 'controller' / 'bin'}:{os.environ.get('PATH', '/bin')}",
        "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(home / "tmp"), "ANSIBLE_REMOTE_TMP": str(home / "tmp"),
        "LC_ALL": "C.UTF-8", "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "false", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    argv = [str(home / "controller" / "bin" / "ansible-playbook"), "-i", str(home / "inventory" / "hosts.yml"), *words]
    start = time.monotonic()
    tasks: list[dict[str, Any]] = []
    with log.open("a") as kept:
        process = subprocess.Popen(
            argv, cwd=home / "tree", env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            time.sleep(4)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.daemon = True
        timer.start()
        for line in process.stdout or ():
            now = time.monotonic() - start
            kept.write(f"{now:8.1f} {line}")
            kept.flush()
            match = _TASK.match(line)
            if match:
                tasks.append({"name": match["name"], "at": round(now, 2)})
                if line.startswith("TASK") and any(word in line for word in _SHOWN):
                    say(f"  {now:6.1f} {match['name']}")
            elif line.startswith(("fatal:", "ERROR")):
                say(f"  {now:6.1f} {line.strip()[:600]}")
        status = process.wait()
        timer.cancel()
    return (124 if expired.is_set() else status), tasks


def _outcome(home: Home, profile: str, **values: Any) -> None:
    outcomes = home.read().get("profiles", {})
    values["time"] = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    home.remember(profiles={**outcomes, profile: values})


def _save_services(folder: Path) -> None:
    """Units, settings, plan and journals as they are now."""
    target = folder / "host"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for pattern in ("/etc/systemd/system/kvfleet*", "/etc/systemd/system/*/gpu-proof.conf", "/etc/kvfleet/*"):
        for path in sorted(Path("/").glob(pattern.lstrip("/"))):
            if path.is_file():
                shutil.copy(path, target / path.name)
    for unit, lines in services.journals().items():
        (target / f"{unit}.journal").write_text("\n".join(lines) + "\n")


# ---------------------------------------------------------------------------------------------------- try


@dataclass(frozen=True)
class Change:
    """What a trial changes by hand on the unit that the profile before rendered."""

    #: words that follow the engine's command line
    flags: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    #: settings of LMCache inside the engine
    lmcache: Mapping[str, Any] = field(default_factory=dict)
    #: words that follow the command line of LMCache's server
    server_flags: tuple[str, ...] = ()

    def unit(self, text: str) -> str:
        """The engine unit's text with its own environment and words."""
        lines = [f"Environment={systemd_word(word)}" for word in self.environment]
        return self._with_words(text.replace("[Service]\n", "\n".join(["[Service]", *lines, ""]), 1), self.flags)

    def server_unit(self, text: str) -> str:
        """The text of the server's unit with its own words."""
        return self._with_words(text, self.server_flags)

    @staticmethod
    def _with_words(text: str, flags: Sequence[str]) -> str:
        if not flags:
            return text
        found = re.search(r"^ExecStart=(?:.*\\\n)*.*$", text, re.MULTILINE)
        if found is None:
            raise ProofError("The unit has no ExecStart line.")
        words = " ".join(systemd_word(word) for word in flags)
        return f"{text[: found.end()]} \\\n  {words}{text[found.end() :]}"


def systemd_word(word: str) -> str:
    """A word as systemd reads it back (systemd.syntax(7), "Quoting")."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def attempt(
    folder: Path, name: str, change: Change, budget_s: float, output: Path, concurrencies: Sequence[int] = ()
) -> int:
    """Try settings that kvfleet would not render on top of the profile that runs now, measure, and put all back.

    The figures land in ``results-try-<name>.json``; they are no result of a deploy, and say so.
    """
    end = time.monotonic() + budget_s - RESERVE_S
    home = Home(folder)
    base = home.read().get("deployed")
    if not base:
        raise ProofError("No proved profile runs here: run one first, a trial changes its unit.")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise ProofError(f"{name!r} is no name for a trial: small letters, digits and dashes.")
    unit = Path(f"/etc/systemd/system/kvfleet-vllm@{settings.INSTANCE}.service")
    config = Path(f"/etc/kvfleet/kvfleet-vllm@{settings.INSTANCE}.lmcache.yaml")
    server = Path("/etc/systemd/system/kvfleet-lmcache@0.service")
    target = home / "runs" / f"try-{name}"
    target.mkdir(parents=True, exist_ok=True)
    values = {**json.loads((home / "runs" / base / "values.json").read_text()), **_load(home.proof, concurrencies)}
    (target / "values.json").write_text(json.dumps(values, indent=1) + "\n")
    texts = {path: path.read_text() for path in (unit, config, server) if path.exists()}
    started = time.monotonic()
    try:
        unit.write_text(change.unit(texts[unit]))
        if change.lmcache:
            if config not in texts:
                raise ProofError(f"Profile {base} has no settings of LMCache inside the engine to change.")
            config.write_text(json.dumps({**json.loads(texts[config]), **change.lmcache}, indent=1) + "\n")
        if change.server_flags:
            if server not in texts:
                raise ProofError(f"Profile {base} has no LMCache server whose command line could change.")
            server.write_text(change.server_unit(texts[server]))
        call("systemctl", "daemon-reload")
        call("systemctl", "stop", unit.name)
        if server in texts:
            # every trial begins with an empty tier
            call("systemctl", "stop", server.name)
            call("systemctl", "start", server.name, timeout_s=max(10.0, end - time.monotonic()))
        begun = call("systemctl", "start", unit.name, timeout_s=max(10.0, end - time.monotonic()))
        start_s = round(time.monotonic() - started, 1)
        say(f"try {name} on {base}: started with status {begun.returncode} after {start_s} s")
        ready = begun.returncode == 0 and services.answers(8000)
        if ready:
            _measure(home, target, target / "values.json", end)
        _save_services(target)
        journals = services.journals()
    finally:
        call("systemctl", "stop", unit.name)
        if server in texts:
            call("systemctl", "stop", server.name)
        for path, text in texts.items():
            path.write_text(text)
        call("systemctl", "daemon-reload")
    load = json.loads((target / "load.json").read_text()) if (target / "load.json").exists() else None
    if load:
        _thin(load)
    changed = {"flags": list(change.flags), "environment": list(change.environment), "lmcache": dict(change.lmcache),
               "server_flags": list(change.server_flags)}  # fmt: skip
    record = {
        "proof_profile": f"try-{name}", "base": base, "release": home.proof["release"],
        "time": datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ"), "ready": ready, "start_s": start_s,
        "change": changed,
        "engine": engine_facts(journals.values()), "load": load,
        "errors": [line for lines in journals.values() for line in lines if "ERROR" in line][-5:] if not load else [],
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    (home / "runs" / f"try-{name}.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    collect(folder, output)
    return 0 if load else 3


# ------------------------------------------------------------------------------------------------ collect


def collect(folder: Path, output: Path) -> int:
    """Write ``summary.json``, ``results-<profile>.json`` and ``evidence.tar.xz`` into ``output``."""
    home = Home(folder)
    output.mkdir(parents=True, exist_ok=True)
    state = home.read()
    proof = {key: value for key, value in home.proof.items() if key != "carried"}
    outcomes = state.get("profiles", {})
    for profile in settings.PROFILES:
        if profile not in outcomes:
            outcomes[profile] = {"ran": False, "reason": "not asked for"}
    summary = {"schema": 1, "proof": proof, **{k: v for k, v in state.items() if k != "profiles"}, "profiles": outcomes}
    (output / "summary.json").write_text(json.dumps(summary, indent=1, default=str) + "\n")
    for profile, outcome in outcomes.items():
        record = _record(home, profile, outcome)
        if record:
            (output / f"results-{profile}.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    for path in sorted((home / "runs").glob("try-*.json")):
        shutil.copy(path, output / f"results-{path.name}")
    keep = [home / name for name in ("runs", "plans", "results", "inventory", "state.json")]
    with tarfile.open(output / "evidence.tar.xz", "w:xz", preset=1) as tar:
        for path in keep:
            if path.exists():
                tar.add(path, arcname=path.name)
    return 0


def _record(home: Home, profile: str, outcome: Mapping[str, Any]) -> dict[str, Any] | None:
    """The role's own result with the proof's circumstances, its samples thinned out."""
    found = next(iter((home / "results").rglob(outcome.get("result") or "/")), None) if outcome.get("result") else None
    record: dict[str, Any] = json.loads(found.read_text()) if found else {}
    if not record:
        return None
    _thin(record.get("load") or {})
    plans = home / "runs" / profile / "plans.json"
    if "plan" not in record and plans.exists():
        record["plan"] = json.loads(plans.read_text()).get(settings.HOST)
    record["proof_profile"] = profile
    record["outcome"] = {key: value for key, value in outcome.items() if key != "tasks"}
    return record


def _thin(load: Mapping[str, Any]) -> None:
    """At most about 20 samples of every run: the results lie in the repository."""
    for instance in load.get("instances") or ():
        for one in instance.get("runs") or ():
            one["series"] = one.get("series", [])[:: max(1, len(one.get("series", [])) // 20)]


_ENGINE_FACTS = {
    "kv_tokens": re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
    "kv_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "model_gib": re.compile(r"Model loading took ([\d.]+) Gi"),
    "graphs_gib": re.compile(r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB"),
    "attention": re.compile(r"Using (\w+) attention backend"),
}


def engine_facts(journals: Iterable[Sequence[str]]) -> dict[str, Any]:
    """What the engine itself logged about its sizes at its last start, and the speeds that LMCache logged for loads."""
    found: dict[str, Any] = {}
    loads: list[float] = []
    for line in (line for lines in journals for line in lines):
        for name, pattern in _ENGINE_FACTS.items():
            match = pattern.search(line)
            if match:
                text = match[1].replace(",", "")
                found[name] = float(text) if re.fullmatch(r"[\d.]+", text) else text
        match = re.search(r"Retrieved (\d+) out of .*?throughput: ([\d.]+) GB/s", line)
        if match and int(match[1]) >= 1024:
            loads.append(float(match[2]))
    if loads:
        loads.sort()
        found["loads"] = len(loads)
        found["load_gb_per_s"] = {"p10": loads[len(loads) // 10], "p50": loads[len(loads) // 2], "max": loads[-1]}
    return found


#: tasks whose time belongs to the engine's start or to the benchmark
_NOT_OURS = ("Bring servers and instances", "Check that every tier", "Put the load on", "Build and prove the release")


def own_seconds(tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a run: ``engine`` (its start), ``proof``, ``load``, ``install``, and kvfleet's ``own``.

    Into a pipe Ansible writes a task's heading together with its first result, so ``at`` is when the task ended. A time
    before the last one begins another playbook.
    """
    spent = {"engine": 0.0, "proof": 0.0, "load": 0.0, "install": 0.0, "own": 0.0}
    names = dict(zip(_NOT_OURS, ("engine", "proof", "load", "install"), strict=True))
    last = 0.0
    for task in tasks:
        ended = float(task["at"])
        kind = next((kind for text, kind in names.items() if text in str(task["name"])), "own")
        spent[kind] += ended - last if ended >= last else ended
        last = ended
    return {key: round(value, 1) for key, value in spent.items()}
