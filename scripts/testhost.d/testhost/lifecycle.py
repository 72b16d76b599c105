"""Starting, stopping and removing hosts; everything a killed run left is found again from the state folder."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from . import container, machine
from .access import boot_id, ssh, wait_ready, write_access
from .disks import detach, loops_left, make_disk
from .image import build_image, client_key, image_of, note_user
from .state import Disk, Host, checked_name, disk_roles, disk_serial, load_host, state_folder
from .tools import (
    TesthostError,
    filesystem_type,
    kill_all,
    locked,
    mounts_below,
    need_packages,
    process_name,
    processes_with,
    run,
    say,
    spawn_detached,
    wait_until,
)

REBOOT_STATUS = 133
SCRIPT = Path(__file__).resolve().parent.parent.parent / "testhost"
# seconds until a host must answer: an emulated processor is slow, above all on a busy machine
START_SECONDS = {"nspawn": 90, "qemu": 420}
# below the ports that the kernel hands out for outgoing connections
PORTS = range(20000, 30000)


def has_systemd() -> bool:
    """Return whether this machine runs systemd, which then supervises the hosts."""
    return Path("/run/systemd/system").is_dir()


def free_port() -> int:
    """Return a loopback port that nobody listens on.

    :raises TesthostError: none found, which only a very full machine brings about.
    """
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise TesthostError(f"no free port between {PORTS.start} and {PORTS.stop - 1}; give one with --port.")


def port_is_free(port: int) -> bool:
    """Return whether nobody listens on a loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_running(host: Host) -> bool:
    """Return whether the host's supervisor is alive; its network alone, which a power-off leaves, is no host."""
    return any(process_name(process) != "slirp4netns" for process in processes_with(host.marker))


def start(host: Host) -> None:
    """Start a host that is recorded and stopped, and wait until it is running."""
    image = image_of(host.image)
    if host.backend == "nspawn":
        container.mount_root(host, image)
        container.start_network(host)
    else:
        machine.make_root(host, image)
    name, _, value = host.marker.partition("=")
    if has_systemd():
        kept = {key: os.environ[key] for key in ("KVFLEET_TESTHOST_STATE", "KVFLEET_CACHE", "XDG_CACHE_HOME", "HOME")
                if key in os.environ}  # fmt: skip
        properties = ["Delegate=yes", "KillMode=mixed", "TasksMax=16384", f"StandardOutput=append:{host.console}",
                      "StandardError=inherit", "Restart=no", f"RestartForceExitStatus={REBOOT_STATUS}",
                      f"SuccessExitStatus={REBOOT_STATUS}", "StartLimitIntervalSec=0"]  # fmt: skip
        run([
            "systemd-run", "--quiet", "--collect", f"--unit={host.ident}",
            *(f"--setenv={key}={value}" for key, value in {**kept, name: value}.items()),
            *(f"--property={item}" for item in properties), sys.executable, SCRIPT, "_boot", host.name,
        ])  # fmt: skip
    else:
        spawn_detached([sys.executable, SCRIPT, "_supervise", host.name], host.console, {**os.environ, name: value})
    wait_ready(host, START_SECONDS[host.backend])


def supervise(name: str) -> int:
    """Boot a host again each time it reboots; return when it powered off. Runs detached, where there is no systemd."""
    while True:
        status = subprocess.run([sys.executable, str(SCRIPT), "_boot", name], check=False).returncode
        if status != REBOOT_STATUS:
            return 0


def boot(host: Host) -> int:
    """Boot a host once; return (or end with) 133 when it rebooted."""
    if host.backend == "nspawn":
        container.boot(host, own_cgroup=not has_systemd())
        return 0
    return machine.boot(host, image_of(host.image))


def up(
    name: str,
    *,
    backend: str,
    disks: int,
    size_bytes: int,
    port: int | None,
    system_disk: bool | None,
    memory_mib: int | None,
    reuse: bool,
    install: bool,
) -> Host:
    """Make and start a host, or with ``reuse`` leave a running one alone and start a stopped one again.

    :param system_disk: make the first disk a system-like one; by default when there are two or more.
    :param memory_mib: memory of a virtual machine; a container shares the machine's.
    :raises TesthostError: wrong arguments, an existing host without ``reuse``, or a start that failed.
    """
    checked_name(name)
    roles = disk_roles(disks, disks >= 2 if system_disk is None else system_disk)
    if memory_mib is not None and backend != "qemu":
        raise TesthostError("--memory is for --backend qemu: a container host shares this machine's memory.")
    if port is not None and not 1 <= port <= 65535:
        raise TesthostError(f"--port {port} is not a port: take 1 to 65535, or leave it out for a free one.")
    if backend == "nspawn" and os.geteuid() != 0:
        raise TesthostError("a container host needs root: run it with sudo, or use --backend qemu.")
    state_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(state_folder() / f".{name}.lock", name):
        host = load_host(name)
        if host is not None and host.ready:
            same = host.backend == backend and [(d.role, d.size_bytes) for d in host.disks] == [
                (role, size_bytes) for role in roles
            ]
            return _reuse(host, reuse, same and port in (None, host.port) and memory_mib in (None, host.memory_mib))
        if (state_folder() / name).exists():
            say(f"an interrupted run left parts of {name}: removing them")
            remove(name)
        if port is not None and not port_is_free(port):
            raise TesthostError(f"--port {port} is taken on this machine: name another or leave it out.")
        need_packages(backend, install=install)
        if filesystem_type(state_folder()) == "overlayfs":
            raise TesthostError(
                f"{state_folder()} lies on an overlay file system, which cannot hold a host's own layer: "
                "set KVFLEET_TESTHOST_STATE to a folder on a plain disk."
            )
        image = build_image(backend)
        host = Host(
            name=name,
            backend=backend,
            port=port or free_port(),
            image=image.folder.name,
            disks=[Disk(n, role, disk_serial(name, n), size_bytes) for n, role in enumerate(roles, start=1)],
            order=list(range(1, len(roles) + 1)),
            memory_mib=memory_mib or 2048,
        )
        host.save()
        note_user(image, host)
        write_access(host, client_key())
        for disk in host.disks:
            make_disk(host, disk)
        host.save()
        say(f"starting {name} ({backend}, {disks} disks)")
        begin = time.monotonic()
        start(host)
        _mark_ready(name)
        say(f"{name} is running after {time.monotonic() - begin:.1f} s: testhost ssh {name}")
        return host


def _mark_ready(name: str) -> None:
    # the booting process recorded the loop devices meanwhile
    host = load_host(name)
    if host is not None:
        host.ready = True
        host.save()


def _reuse(host: Host, reuse: bool, same: bool) -> Host:
    name = host.name
    running = is_running(host)
    if not reuse:
        state = "is running already" if running else "exists but is stopped"
        raise TesthostError(f"{name} {state}: add --reuse to go on with it, or 'testhost down {name}' to remove it.")
    if not same:
        raise TesthostError(
            f"{name} exists with another backend, port, memory or other disks: 'testhost down {name}' first, "
            "or ask for the same."
        )
    if running and ssh(host, "true").returncode == 0:
        say(f"{name} is running already: nothing to do")
        return host
    say(f"{name} is stopped: starting it again with its disks and files")
    stop(host)
    start(host)
    return host


def stop(host: Host) -> None:
    """End a host at once, as a power cut would, and give back what it holds of the machine; its files stay.

    :raises TesthostError: something would not go.
    """
    if has_systemd():
        run(["systemctl", "kill", "--signal=KILL", f"{host.ident}.service"], check=False)
        run(["systemctl", "stop", f"{host.ident}.service"], check=False)
        run(["systemctl", "reset-failed", f"{host.ident}.service"], check=False)

    def processes() -> list[int]:
        return sorted({*processes_with(host.marker), *container.cgroup_processes(host)} - {os.getpid()})

    if not kill_all(processes):
        raise TesthostError(f"processes of {host.name} would not end: {processes()}.")
    container.remove_cgroups(host)
    if Path("/run/netns", host.ident).exists():
        run(["ip", "netns", "delete", host.ident])
    _unmount(host)

    def detached() -> bool:
        for loop in loops_left(host.folder):
            detach(loop)
        return not loops_left(host.folder)

    # a loop device stays busy until the last mount in the dead host's namespace is gone
    if not wait_until(detached, 15):
        raise TesthostError(f"loop devices of {host.name} would not detach: see losetup --list.")


def _unmount(host: Host) -> None:
    def left() -> list[str]:
        return mounts_below(host.folder, Path("/proc/self/mountinfo").read_text(encoding="utf-8"))

    def unmounted() -> bool:
        for point in left():
            run(["umount", point], check=False)
        return not left()

    if not wait_until(unmounted, 15):
        raise TesthostError(f"{', '.join(left())} would not unmount: something still uses it (fuser -vm shows what).")


def remove(name: str) -> None:
    """Stop a host and remove everything of it; parts that a killed run left are found from the folder alone."""
    folder = state_folder() / name
    # stopping needs names only, so that a record that cannot be read is no obstacle
    stop(Host(name=name, backend="nspawn", port=0, image=""))
    # never into something that is still mounted
    run(["rm", "-rf", "--one-file-system", folder])


def down(name: str) -> None:
    """Remove a host and all its files; a host that does not exist is fine."""
    checked_name(name)
    host = Host(name=name, backend="nspawn", port=0, image="")
    # somebody may have deleted the folder under a running host
    if not (host.folder.exists() or processes_with(host.marker) or Path("/run/netns", host.ident).exists()):
        say(f"there is no host {name}: nothing to do")
        return
    with locked(state_folder() / f".{name}.lock", name):
        remove(name)
    say(f"{name} is gone")


def reboot(host: Host) -> None:
    """Reboot a host from inside and wait until it is running again.

    :raises TesthostError: it did not go down or did not come back.
    """
    before = boot_id(host)
    if not before:
        raise TesthostError(f"{host.name} does not answer over SSH: 'testhost up {host.name} --reuse' starts it again.")
    ssh(host, "systemctl reboot")
    seconds = START_SECONDS[host.backend]
    if not wait_until(lambda: boot_id(host) not in ("", before), seconds, pause=0.2):
        raise TesthostError(f"{host.name} did not come back from its reboot within {seconds} s.")
    wait_ready(host, seconds)


def unplug(host: Host) -> None:
    """Take the host's cache disk away from its next boot on; its content stays.

    :raises TesthostError: the host has no cache disk.
    """
    disk = host.disk_with_role("cache")
    if disk is None:
        raise TesthostError(f"{host.name} has no cache disk to unplug.")
    with locked(state_folder() / f".{host.name}.lock", host.name):
        host.order = [number for number in host.order if number != disk.number]
        host.save()


def plug(host: Host) -> None:
    """Give the host all its disks again, from its next boot on, in the order in which they were made."""
    with locked(state_folder() / f".{host.name}.lock", host.name):
        host.order = [disk.number for disk in host.disks]
        host.save()


def swap(host: Host) -> None:
    """Turn the order around in which the host's kernel finds its disks, from its next boot on."""
    if len(host.disks) < 2:
        raise TesthostError(f"{host.name} has {len(host.disks)} disk: there is nothing to swap.")
    with locked(state_folder() / f".{host.name}.lock", host.name):
        host.order.reverse()
        host.save()
