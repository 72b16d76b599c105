"""Build a throw-away host, deploy vLLM + LMCache on it with site.yml, and show what came out on one screen."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from kvfleet.checkout import ROOT, cache_directory
from kvfleet.runs import HostRun, PlaybookRun, run_playbook

HOST = "demo"
INVENTORY = ROOT / "inventories" / "local"
RELEASE = "cpu-0.32.0-0.5.6"
MODEL_SIZE = "small"
MODEL_ON_HOST = "/data/models/tiny"
TESTHOST = ROOT / "scripts" / "testhost"
#: the engine's processes, the cache in RAM and the host itself
NEEDED_MEMORY_GIB = 7

console = Console(highlight=False)


def die(sentence: str) -> NoReturn:
    """End with one clear sentence."""
    console.print(f"[bold red]demo:[/] {sentence}", soft_wrap=True)
    sys.exit(2)


def step(number: int, text: str) -> None:
    """Say what happens now."""
    console.print(f"[bold][{number}/5][/] {text}")


def available_memory_bytes() -> int:
    """MemAvailable of this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def call(*command: str) -> None:
    """Run one of the project's own scripts; its own sentence explains a failure."""
    if subprocess.run(command, check=False).returncode:
        failed = " ".join(Path(word).name for word in command)
        die(f"'{failed}' failed, its message stands above; run ./scripts/demo again.")


def ssh(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command on the host."""
    return subprocess.run([str(TESTHOST), "ssh", HOST, *words], text=True, capture_output=True, check=False, **options)


def host_is_up() -> bool:
    """Whether the demo host already runs and answers."""
    listed = subprocess.run([str(TESTHOST), "list", "--json"], capture_output=True, text=True, check=False)
    hosts = json.loads(listed.stdout or "[]")
    return any(host["name"] == HOST and host["state"] == "running" for host in hosts)


def carry_model(model: Path) -> None:
    """Copy the model to the host unless the same one is there: the marker file holds its parameters."""
    marker = next(iter(sorted(model.glob(".*.json"))), model / "config.json")
    there = ssh("cat", f"{MODEL_ON_HOST}/{marker.name}", "2>/dev/null")
    if there.returncode == 0 and there.stdout == marker.read_text():
        return
    archive = subprocess.Popen(["tar", "-C", str(model), "-cf", "-", "."], stdout=subprocess.PIPE)
    unpack = f"mkdir -p {MODEL_ON_HOST} && tar -C {MODEL_ON_HOST} --no-same-owner -xf -"
    copied = subprocess.run([str(TESTHOST), "ssh", HOST, unpack], stdin=archive.stdout, check=False)
    if archive.wait() or copied.returncode:
        die("the model could not be copied to the host; run ./scripts/demo again.")


class Progress:
    """One line per task that takes time, updated in place on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._play = ""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Print plays, and tasks that changed something or took longer than two seconds."""
        data = event.get("event_data") or {}
        kind = event.get("event")
        if kind == "playbook_on_play_start" and data.get("name") != self._play:
            self._play = str(data.get("name"))
            console.print(f"  {self._clock()} [bold]{self._play}[/]")
        elif kind in ("runner_on_ok", "runner_on_failed") and (
            (data.get("res") or {}).get("changed") or float(data.get("duration") or 0) > 2 or kind == "runner_on_failed"
        ):
            mark = "[red]failed[/]" if kind == "runner_on_failed" else ""
            changed = "[yellow]changed[/]" if (data.get("res") or {}).get("changed") else ""
            seconds = float(data.get("duration") or 0)
            console.print(f"  {self._clock()}   {data.get('task')} {changed}{mark} [dim]{seconds:.0f} s[/]".rstrip())

    def _clock(self) -> str:
        passed = int(time.monotonic() - self._started)
        return f"[dim]{passed // 60:2d}:{passed % 60:02d}[/]"


def proof_on_host() -> dict[str, Any]:
    """The host's own record of its last proof."""
    record = ssh("cat", "/var/lib/kvfleet/proved.json")
    if record.returncode:
        die("the host has no record of a proof; run ./scripts/demo again.")
    return dict(json.loads(record.stdout))


def result_file(proof: Mapping[str, Any]) -> Path | None:
    """The results file of that proof, when this checkout made it."""
    path = ROOT / "results" / HOST / f"{proof['time']}-{proof['release']}.json"
    return path if path.is_file() else None


def main() -> None:
    """Read the command line and act."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument(
        "--profile", choices=["gpu", "cpu", "disk"], default="disk", help="tiers to deploy (default: disk)"
    )
    parser.add_argument("--down", action="store_true", help="throw the host away")
    arguments = parser.parse_args()
    if arguments.down:
        call(str(TESTHOST), "down", HOST)
        return
    deploy(arguments.profile)


def deploy(profile: str) -> None:
    """Build what is missing, deploy, and print the summary."""
    if os.geteuid() != 0:
        die("a booted container and loop devices need root: run it with sudo.")
    free_gib = available_memory_bytes() / 1024**3
    if not host_is_up() and free_gib < NEEDED_MEMORY_GIB:
        die(f"{free_gib:.1f} GiB of memory are free and the demo needs {NEEDED_MEMORY_GIB}: end something else first.")
    step(1, "Throw-away host: a booted systemd container with a system-like disk and an empty cache disk")
    call(str(TESTHOST), "up", HOST, "--reuse")
    step(2, "Model: random weights, real tokenizer, made here")
    model = cache_directory() / "models" / MODEL_SIZE
    call(sys.executable, str(ROOT / "scripts" / "tinymodel"), "--size", MODEL_SIZE, str(model))
    carry_model(model)
    step(3, f"Wheels of release {RELEASE}, by hash")
    call(str(Path(sys.executable).parent / "kvfleet"), "bundle", RELEASE)
    step(4, "ansible-playbook -i inventories/local site.yml")
    run = run_playbook(ROOT / "site.yml", INVENTORY, extra_vars={"kvfleet_profile": profile}, on_event=Progress())
    step(5, "Result")
    summary(run)


def summary(run: PlaybookRun) -> None:
    """One screen: release, plan, changes, figures, verdict, and where to go from here."""
    host = run.hosts.get(HOST, HostRun(HOST))
    if not run.ok:
        for failure in host.failures or ["Ansible ended before it reached the host:", run.tail]:
            console.print(f"[bold red]failed[/] {failure}", soft_wrap=True)
        console.print("Run ./scripts/demo again, or look at the host with ./scripts/testhost ssh demo")
        sys.exit(4)
    plan = host.facts["kvfleet_plan"]
    proof = proof_on_host()
    path = result_file(proof)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    release, instance, disk = plan["release"], plan["instances"][0], plan["host"]["disk"]
    table.add_row(
        "release", f"{release['id']}: vLLM {release['vllm']}, LMCache {release['lmcache']}, torch {release['torch']}"
    )
    sizes = [f"pool {instance['gpu_kv_pool_bytes_per_rank'] / 1024**3:g} GiB"]
    if plan["servers"]:
        sizes.append(f"buffer {instance['buffer_gib_per_gpu']:g} GiB per CPU rank")
        sizes.append(f"L1 {plan['servers'][0]['l1_gib']:g} GiB")
    if disk:
        sizes.append(f"quota {disk['quota_gib']:g} of {disk['partition_gib']:g} GiB")
    table.add_row("plan", f"profile {plan['profile']}: {', '.join(sizes)}")
    table.add_row("changed", f"{len(host.changed)} of {host.executed} tasks in {run.seconds:.0f} s")
    for tested in json.loads(path.read_text())["truth"]["instances"] if path else []:
        table.add_row("first token", first_tokens(tested))
    verdict = proof["verdict"]
    colour = {"pass": "green", "degrade": "yellow"}.get(verdict, "red")
    table.add_row(
        "verdict", f"[bold {colour}]{verdict.upper()}[/], proved {proof['time']}: {proof['deciding']['message']}"
    )
    if path:
        table.add_row("report", str(ROOT / "results" / "report.html"))
        table.add_row("figures", str(path))
    table.add_row("log in", "./scripts/testhost ssh demo")
    table.add_row("throw away", "./scripts/demo --down")
    console.print(table)


def first_tokens(proof: Mapping[str, Any]) -> str:
    """Time to the first token of the same long prompt, cold and from each tier, with the ratio."""
    ttft = {tier: value for tier, value in proof["ttft_ms"].items() if value}
    cold = ttft.pop("cold")
    names = {"ram": "warm from RAM", "disk": "warm from disk", "engine_cache": "warm in the engine"}
    parts = [f"{proof['prompt_tokens']} tokens cold {cold:.0f} ms"]
    parts += [f"{names[tier]} {value:.0f} ms (1/{cold / value:.0f})" for tier, value in ttft.items()]
    return ", ".join(parts) + (", same answer" if proof["identical"] else "")


if __name__ == "__main__":
    main()
