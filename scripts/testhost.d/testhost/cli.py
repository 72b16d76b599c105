"""The command ``scripts/testhost``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import lifecycle
from .access import exec_ssh, inventory_text
from .disks import allocated_bytes, verify_system_disk
from .image import build_image
from .state import BACKENDS, Host, all_hosts, cache_folder, known_host, parse_size, state_folder
from .tools import TesthostError, extend_path, filesystem_type, missing_packages, need_packages

EXIT_FAILED = 1
EXIT_USAGE = 64
# an image with its build folder, and the writable layer of a host with an engine release
NEEDED_DISK_BYTES = 8 * 2**30


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        """End with status 64 and one sentence."""
        print(f"testhost: {message}; 'scripts/testhost --help' shows all commands.", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = Parser(prog="testhost", description="Throw-away Debian hosts for the demo and the tests.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, text: str, *, host: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if host:
            sub.add_argument("name", metavar="NAME", help="1 to 20 of a-z, 0-9 and '-'")
        return sub

    image = command("image", "Build the cached image that all hosts share.", host=False)
    image.add_argument("--backend", choices=BACKENDS, default="nspawn", help="kind of host (default: %(default)s)")
    image.add_argument("--force", action="store_true", help="build it again although nothing changed")
    up = command("up", "Make and start a host; wait until it is running.")
    up.add_argument(
        "--backend", choices=BACKENDS, default="nspawn",
        help="nspawn: a booted container, seconds, needs root; qemu: a virtual machine, minutes (default: %(default)s)",
    )  # fmt: skip
    up.add_argument("--disks", type=int, default=2, metavar="N", help="number of disks (default: %(default)s)")
    up.add_argument("--size", default="4G", metavar="SIZE", help="size of each disk: M, G or T (default: %(default)s)")
    up.add_argument("--port", type=int, metavar="P", help="loopback port for SSH (default: a free one)")
    up.add_argument(
        "--system-disk", action=argparse.BooleanOptionalAction, default=None,
        help="make the first disk look like a system that nobody may touch (default: with two or more disks)",
    )  # fmt: skip
    up.add_argument("--memory", metavar="SIZE", help="memory of a virtual machine (default: 2G)")
    up.add_argument("--reuse", action="store_true", help="go on with a host that exists; start it if it is stopped")
    for sub in (image, up):
        sub.add_argument("--no-install", action="store_true", help="never install missing Debian packages")
    ssh = command("ssh", "Log in, or run a command on the host.")
    ssh.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    command("ssh-config", "Print the path of the host's SSH configuration.")
    command("inventory", "Print the host's entry for an Ansible inventory.")
    command("down", "Remove a host and everything of it.")
    command("reboot", "Reboot a host and wait until it is running again.")
    command("swap", "Turn the kernel's order of the disks around, from the next boot on.")
    command("unplug", "Take the cache disk away, from the next boot on; its content stays.")
    command("plug", "Give back what unplug took, from the next boot on.")
    usage = command("disk-usage", "Print the allocated bytes of each disk's backing file.")
    command("verify-system-disk", "Prove that the system-like disk is as it was made.")
    listing = command("list", "List all hosts.", host=False)
    for sub in (usage, listing):
        sub.add_argument("--json", action="store_true", help="print JSON")
    command("doctor", "Say what is missing on this machine.", host=False)
    return top


def describe(host: Host) -> dict[str, Any]:
    """Return what ``list --json`` says about a host."""
    state = "running" if lifecycle.is_running(host) else "stopped"
    return {
        "name": host.name,
        "backend": host.backend,
        "state": state if host.ready else "incomplete",
        "address": "127.0.0.1",
        "port": host.port,
        "ssh_config": str(host.ssh_config),
        "known_hosts": str(host.known_hosts),
        "private_key": str(host.folder / "ssh_key"),
        "disks": [
            {
                "number": disk.number,
                "role": disk.role,
                "serial": disk.serial,
                "by_id": disk.by_id,
                "size_bytes": disk.size_bytes,
                "file": str(host.disk_file(disk)),
            }
            for disk in host.disks
        ],
    }


def list_hosts(as_json: bool) -> None:
    """Print all hosts."""
    hosts = [describe(host) for host in all_hosts()]
    if as_json:
        print(json.dumps(hosts, indent=2))
        return
    for host in hosts:
        disks = " ".join(f"{disk['serial']}({disk['role']})" for disk in host["disks"])
        print(f"{host['name']:20} {host['backend']:7} {host['state']:11} 127.0.0.1:{host['port']} {disks}".rstrip())


def disk_usage(host: Host, as_json: bool) -> None:
    """Print the allocated bytes of each disk."""
    rows = [
        {
            "disk": disk.number,
            "role": disk.role,
            "serial": disk.serial,
            "file": str(host.disk_file(disk)),
            "allocated_bytes": allocated_bytes(host.disk_file(disk)),
            "size_bytes": disk.size_bytes,
        }
        for disk in host.disks
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    for row in [] if as_json else rows:
        print(f"disk{row['disk']} {row['serial']} {row['allocated_bytes']}")


def findings(backend: str) -> list[str]:
    """Return what keeps this machine from running a kind of host, one sentence each."""
    found = []
    missing = missing_packages(backend)
    if missing:
        found.append(f"Debian packages are missing: apt-get install --no-install-recommends {' '.join(missing)}")
    if shutil.disk_usage(_existing(cache_folder())).free < NEEDED_DISK_BYTES:
        found.append(f"{cache_folder()} has under 8 GiB free: set KVFLEET_CACHE to a folder with more.")
    if shutil.disk_usage(_existing(state_folder())).free < NEEDED_DISK_BYTES:
        found.append(f"{state_folder()} has under 8 GiB free: set KVFLEET_TESTHOST_STATE to a folder with more.")
    if os.geteuid() != 0:
        found.append("building an image needs root: run it with sudo.")
    if backend == "nspawn":
        if filesystem_type(state_folder()) == "overlayfs":
            found.append(f"{state_folder()} is on an overlay file system: set KVFLEET_TESTHOST_STATE to a plain disk.")
        if not Path("/dev/loop-control").exists():
            found.append("/dev/loop-control is missing: load the kernel module 'loop'.")
    return found


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def doctor() -> int:
    """Say what is missing; return 0 when container hosts, the everyday kind, can run."""
    found = {backend: findings(backend) for backend in BACKENDS}
    for backend, sentences in found.items():
        print(f"{backend}: {'ready' if not sentences else ''}".rstrip())
        for sentence in sentences:
            print(f"  - {sentence}")
    return EXIT_FAILED if found["nspawn"] else 0


def run_command(args: argparse.Namespace) -> int:
    """Run one parsed command and return its exit status."""
    command = args.command
    if command == "image":
        need_packages(args.backend, install=not args.no_install)
        print(build_image(args.backend, force=args.force).folder)
    elif command == "up":
        memory = None if args.memory is None else parse_size(args.memory) // 2**20
        lifecycle.up(
            args.name,
            backend=args.backend,
            disks=args.disks,
            size_bytes=parse_size(args.size),
            port=args.port,
            system_disk=args.system_disk,
            memory_mib=memory,
            reuse=args.reuse,
            install=not args.no_install,
        )
    elif command == "down":
        lifecycle.down(args.name)
    elif command == "list":
        list_hosts(args.json)
    elif command == "doctor":
        return doctor()
    else:
        return run_host_command(command, known_host(args.name), args)
    return 0


def run_host_command(command: str, host: Host, args: argparse.Namespace) -> int:
    """Run a command on a host that exists and return its exit status."""
    if command == "ssh":
        exec_ssh(host, args.words)
    elif command == "ssh-config":
        print(host.ssh_config)
    elif command == "inventory":
        print(inventory_text(host), end="")
    elif command == "reboot":
        lifecycle.reboot(host)
    elif command == "swap":
        lifecycle.swap(host)
    elif command == "unplug":
        lifecycle.unplug(host)
    elif command == "plug":
        lifecycle.plug(host)
    elif command == "disk-usage":
        disk_usage(host, args.json)
    elif command == "verify-system-disk":
        print(f"unchanged: SHA-256 {verify_system_disk(host)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 failed with one sentence, 64 wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    extend_path()
    try:
        # how a host's own processes call this script
        if words[:1] == ["_boot"]:
            return lifecycle.boot(known_host(words[1]))
        if words[:1] == ["_supervise"]:
            return lifecycle.supervise(words[1])
        return run_command(parser().parse_args(words))
    except TesthostError as error:
        print(f"testhost: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("testhost: interrupted; the next 'up' or 'down' of this host cleans up.", file=sys.stderr)
        return 130
