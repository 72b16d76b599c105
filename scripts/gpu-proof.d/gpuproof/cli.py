"""The command line of ``scripts/gpu-proof``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from . import settings

HOME = Path("/var/lib/kvfleet-gpu-proof")


def parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    top = argparse.ArgumentParser(prog="gpu-proof", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    pack = commands.add_parser("pack", help="on the controller: everything that the host needs, in parts")
    pack.add_argument("--release", default="cu13-0.25.1-0.5.3", help="id of a release row")
    pack.add_argument("--output", type=Path, required=True, help="folder for the index and the parts")
    pack.add_argument("--part-size", default="56M", help="largest size of a part")
    pack.add_argument("--python", default="", help="the host's Python, such as 3.12 (default: the row's)")
    pack.add_argument("--model", type=Path, help="model directory to carry (default: Llama-3-8B's shape, made there)")
    pack.add_argument("--debs", type=Path, help="folder of Debian packages with programs that the host lacks")
    pack.add_argument("--complete", action="store_true", help="carry torch and CUDA's libraries too")

    check = commands.add_parser("check", help="on the host, before parts arrive: would it work here?")
    check.add_argument("--parts", type=Path, required=True, help="folder with the index")
    check.add_argument("--python", default="python3", help="interpreter of the environment that holds torch")
    check.add_argument("--output", type=Path, help="file for the findings as JSON")

    for name, text in (
        ("unpack", "on the host: verify the parts, unpack them, make the controller and the model"),
        ("run", "on the host: site.yml and the load for each profile, results after each"),
        ("try", "on the host: settings by hand on top of the profile that runs now, measured and put back"),
        ("collect", "on the host: results, plans, units, journals and logs into one folder"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("--home", type=Path, default=HOME, help="folder of the proof on the host")
        if name == "unpack":
            one.add_argument("--parts", type=Path, required=True, help="folder with the index and all parts")
            one.add_argument("--python", default="python3", help="interpreter of the environment that holds torch")
            one.add_argument("--memory-gib", type=int, default=0, help="touch this much memory first (growing VMs)")
            one.add_argument("--dummy", action="store_true", help="leave the weights to the engine")
        if name == "run":
            one.add_argument("--profiles", default="gpu,cpu,disk", help=f"of {', '.join(settings.PROFILES)}")
            one.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="inventory value for all")
            one.add_argument("--disk-gib", type=float, default=0.0, help="size of the loop-backed disk; 0 = chosen")
        if name == "try":
            one.add_argument("--name", required=True, help="name of the trial in the results")
            one.add_argument("--flags", default="", help="words added to the engine's command line")
            one.add_argument("--environment", action="append", default=[], metavar="NAME=VALUE", help="of the unit")
            one.add_argument("--lmcache", default="{}", metavar="JSON", help="settings of LMCache inside the engine")
            one.add_argument("--server-flags", default="", help="words added to the command line of LMCache's server")
        if name in ("run", "try"):
            one.add_argument("--budget", type=float, default=540.0, help="seconds until everything must have ended")
            one.add_argument("--concurrency", default="", help="points of the load, as 1,4,8,16,32 (default: 8,32)")
        if name in ("run", "try", "collect"):
            one.add_argument("--output", type=Path, required=True, help="folder for what is collected")

    report = commands.add_parser("report", help="collected results into docs/measured and docs/benchmarks.md")
    report.add_argument("--collected", type=Path, nargs="*", default=[], help="folders that run wrote")
    report.add_argument("--results", type=Path, default=None, help="folder of the results files")
    report.add_argument("--document", type=Path, default=None, help="page whose section is replaced")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0, or 2 for a refusal, 3 where something failed."""
    options = parser().parse_args(argv)
    try:
        return _dispatch(options)
    except Exception as error:
        if type(error).__name__ in ("KvfleetError", "ProofError"):
            print(f"gpu-proof: {error}", file=sys.stderr)
            return 2
        raise


def _dispatch(options: argparse.Namespace) -> int:
    if options.command == "pack":
        from kvfleet.core.units import parse_bytes

        from . import pack

        python = options.python or ("3.12" if options.release in settings.PROVIDED else "")
        index = pack.pack(
            options.release, options.output, parse_bytes(options.part_size), python or "3.11",
            options.model, options.debs, options.complete,
        )  # fmt: skip
        total = sum(part["size_bytes"] for part in index["parts"])
        print(f"{len(index['parts'])} parts, {total / 1e6:.1f} MB, beside {options.output / pack.INDEX}")
        return 0
    if options.command == "report":
        from . import report

        return report.main(options.collected, options.results, options.document)
    from . import host

    if options.command == "check":
        return host.check(options.parts, options.python, options.output)
    if options.command == "unpack":
        return host.unpack(options.home, options.parts, options.python, options.memory_gib, options.dummy)
    if options.command == "run":
        profiles = [word for word in options.profiles.split(",") if word]
        own = dict(word.split("=", 1) for word in options.set)
        values = {name: json.loads(text) for name, text in own.items()}
        return host.run(
            options.home, profiles, options.budget, options.disk_gib, options.output, values, _points(options)
        )
    if options.command == "try":
        change = host.Change(
            tuple(shlex.split(options.flags)), tuple(options.environment), json.loads(options.lmcache),
            tuple(shlex.split(options.server_flags)),
        )  # fmt: skip
        return host.attempt(options.home, options.name, change, options.budget, options.output, _points(options))
    return host.collect(options.home, options.output)


def _points(options: argparse.Namespace) -> list[int]:
    return [int(word) for word in options.concurrency.split(",") if word]
