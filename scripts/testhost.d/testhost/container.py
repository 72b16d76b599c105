"""The container host: systemd-nspawn over a read-only image, loop devices, a network namespace with slirp4netns."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .disks import attach_disks
from .image import Image
from .state import Host
from .tools import TesthostError, run, say, spawn_detached, wait_until

# guests may open this many files where the machine allows it; systemd's own default for services
WANTED_FILES = 524288
CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))


def is_mounted(path: Path) -> bool:
    """Return whether something is mounted exactly there."""
    return os.path.ismount(path)


def mount_root(host: Host, image: Image) -> None:
    """Put the host's writable layer over the image: a new host costs no copy."""
    for name in ("lower", "upper", "work", "root"):
        (host.folder / name).mkdir(exist_ok=True)
    lower = host.folder / "lower"
    if not is_mounted(lower):
        run(["mount", "-t", "squashfs", "-o", "ro,loop", image.squashfs, lower])
    if not is_mounted(host.root):
        layers = f"lowerdir={lower},upperdir={host.folder / 'upper'},workdir={host.folder / 'work'}"
        run(["mount", "-t", "overlay", host.ident, "-o", layers, host.root])
    etc = host.root / "etc"
    (etc / "hostname").write_text(f"{host.name}\n", encoding="utf-8")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n", encoding="utf-8")
    key = etc / "ssh" / "ssh_host_ed25519_key"
    key.write_bytes((host.folder / "host_key").read_bytes())
    key.chmod(0o600)


def forward_request(port: int) -> bytes:
    """Return the request to slirp4netns's socket that forwards a loopback port of this machine to the host's SSH."""
    arguments = {"proto": "tcp", "host_addr": "127.0.0.1", "host_port": port, "guest_port": 22}
    return json.dumps({"execute": "add_hostfwd", "arguments": arguments}).encode()


def start_network(host: Host) -> None:
    """Give the host a network of its own: no bridge, no forwarding rule, nothing changed on the machine."""
    namespace = Path("/run/netns") / host.ident
    if not namespace.exists():
        run(["ip", "netns", "add", host.ident])
    run(["ip", "-n", host.ident, "link", "set", "lo", "up"])
    api = host.folder / "slirp.sock"
    api.unlink(missing_ok=True)
    name, _, value = host.marker.partition("=")
    argv: list[str | Path] = [
        "slirp4netns",
        "--configure",
        "--netns-type=path",
        "--mtu=1500",
        f"--api-socket={api}",
        namespace,
        "eth0",
    ]
    spawn_detached(argv, host.folder / "slirp.log", {**os.environ, name: value})

    answer = b""

    def asked() -> bool:
        nonlocal answer
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(api))
            except OSError:
                # not listening yet
                return False
            client.sendall(forward_request(host.port))
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(4096)
            return True

    wait_until(asked, 15)
    if b'"return"' not in answer:
        log = (host.folder / "slirp.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = answer.decode(errors="replace") or " / ".join(log[-2:])
        raise TesthostError(
            f"port {host.port} of this machine could not be forwarded to {host.name}: {reason}; "
            "take another with --port."
        )


def file_limit(hard: int) -> int:
    """Return how many open files the guest may have: systemd's default, or less where the machine forbids it."""
    return WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)


def nspawn_argv(host: Host, hard_files: int) -> list[str]:
    """Return the command that boots the host once.

    :param hard_files: this process's own hard limit of open files.
    """
    pairs = [
        f"{Path(loop).name}={host.disk(number).serial}" for number, loop in zip(host.order, host.loops, strict=True)
    ]
    limit = file_limit(hard_files)
    return [
        "systemd-nspawn",
        "--quiet",
        # these two let it run where PID 1 is not systemd and there is no D-Bus
        "--register=no",
        "--keep-unit",
        f"--directory={host.root}",
        f"--machine={host.ident}",
        f"--hostname={host.name}",
        f"--network-namespace-path=/run/netns/{host.ident}",
        # udevd cannot pass events on without it
        "--capability=CAP_NET_ADMIN",
        f"--rlimit=RLIMIT_NOFILE={min(1024, limit)}:{limit}",
        "--resolv-conf=off",
        "--timezone=off",
        "--link-journal=no",
        "--kill-signal=SIGRTMIN+3",
        "--console=read-only",
        f"--setenv=TESTHOST_DISKS={' '.join(pairs)}",
        *(f"--bind={loop}" for loop in host.loops),
        "/usr/local/lib/testhost/init",
    ]


def enter_own_cgroup(host: Host, roots: Sequence[Path] = CGROUP_ROOTS) -> None:
    """Move this process into cgroups of its own: nspawn makes groups with fixed names below, and two hosts would
    collide. Only where systemd does not do it for a unit."""
    for root in roots:
        if (root / "cgroup.procs").exists():
            group = root / host.ident
            group.mkdir(exist_ok=True)
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")


def cgroup_processes(host: Host, roots: Sequence[Path] = CGROUP_ROOTS) -> list[int]:
    """Return the processes in the host's own cgroups."""
    found: set[int] = set()
    for root in roots:
        for procs in (root / host.ident).glob("**/cgroup.procs"):
            with suppress(OSError):
                found.update(int(line) for line in procs.read_text(encoding="utf-8").split())
    return sorted(found)


def remove_cgroups(host: Host, roots: Sequence[Path] = CGROUP_ROOTS) -> None:
    """Remove the host's own, now empty cgroups, innermost first."""
    for root in roots:
        top = root / host.ident
        folders = sorted((path for path in top.glob("**/") if path.is_dir()), key=lambda path: -len(path.parts))
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()


def boot(host: Host, own_cgroup: bool) -> None:
    """Attach the disks in the order that is due and become systemd-nspawn; it ends with 133 when the guest reboots."""
    attach_disks(host)
    if own_cgroup:
        enter_own_cgroup(host)
    # /tmp would be a tmpfs of 10 % of memory, which one large wheel fills
    os.environ["SYSTEMD_NSPAWN_TMPFS_TMP"] = "0"
    argv = nspawn_argv(host, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    say(f"boot: {' '.join(argv)}")
    os.execvp(argv[0], argv)  # noqa: S606 - its exit status tells a reboot from a power-off
