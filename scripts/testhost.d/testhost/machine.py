"""The virtual machine host: QEMU with emulated NVMe controllers, for what only a real boot and a real device show."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .image import Image
from .recipe import ROOT_PARTUUID
from .state import Host
from .tools import TesthostError, run, say, wait_until

REBOOT_STATUS = 133


def accelerator(cpuinfo: str, kvm_usable: bool) -> list[str]:
    """Return QEMU's acceleration arguments.

    A usable /dev/kvm alone proves nothing: on a processor without ``vmx`` or ``svm`` QEMU starts and hangs. Emulated,
    an old processor model boots a third faster: there are fewer vector paths to emulate.
    """
    if kvm_usable and {"vmx", "svm"} & set(cpuinfo.split()):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem"]


def make_root(host: Host, image: Image) -> None:
    """Put the machine's own root disk over the image's."""
    path = host.folder / "root.qcow2"
    if not path.exists():
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", image.disk, "-F", "raw", path])


def qemu_argv(host: Host, image: Image, accel: list[str]) -> list[str]:
    """Return the command that boots the machine once.

    The root is an NVMe disk as well: the kernel needs no initrd, and roles meet a machine whose system disk has the
    same kind of name as the cache disk. Slots are given, so that the kernel finds the disks in the record's order.
    """
    append = f"root=PARTUUID={ROOT_PARTUUID} rw console=ttyS0 quiet mitigations=off net.ifnames=0"
    argv = [
        "qemu-system-x86_64", "-name", host.ident, "-M", "q35", "-nodefaults", "-no-user-config", *accel,
        "-smp", "2", "-m", f"{host.memory_mib}M", "-display", "none", "-no-reboot",
        "-chardev", f"file,id=console,path={host.console},append=on", "-serial", "chardev:console",
        "-qmp", f"unix:{host.folder / 'qmp.sock'},server=on,wait=off",
        # systemd hands this to testhost-hostkey.service
        "-fw_cfg", f"name=opt/io.systemd.credentials/testhost.hostkey,file={host.folder / 'host_key'}",
        "-kernel", str(image.kernel), "-append", f"{append} systemd.hostname={host.name}",
        "-drive", f"if=none,id=root,file={host.folder / 'root.qcow2'},format=qcow2,discard=unmap",
        "-device", "nvme,id=nroot,serial=THROOT,drive=root,addr=0x4",
    ]  # fmt: skip
    for slot, number in enumerate(host.order, start=5):
        disk = host.disk(number)
        file = f"file={host.disk_file(disk)},format=raw,discard=unmap,detect-zeroes=unmap"
        argv += ["-drive", f"if=none,id=d{number},{file}"]
        argv += ["-device", f"nvme,id=n{number},serial={disk.serial},drive=d{number},addr={slot:#x}"]
    return [
        *argv,
        "-netdev", f"user,id=net0,hostfwd=tcp:127.0.0.1:{host.port}-:22",
        "-device", "virtio-net-pci,netdev=net0,romfile=",
        "-device", "virtio-rng-pci",
    ]  # fmt: skip


def ended_with_reset(lines: Iterable[bytes]) -> bool:
    """Read QEMU's events to their end and return whether the guest asked for a reset rather than a power-off."""
    reset = False
    for line in lines:
        event = json.loads(line)
        if event.get("event") == "SHUTDOWN":
            reset = event["data"].get("reason") == "guest-reset"
    return reset


def boot(host: Host, image: Image) -> int:
    """Run QEMU until the guest ends; return 133 when it rebooted, as systemd-nspawn does.

    A reboot ends QEMU on purpose: the next start takes the disks in the order that is then due, which a reset inside
    one QEMU cannot.
    """
    if platform.machine() != "x86_64":
        raise TesthostError("the qemu backend runs on x86_64 machines only; use --backend nspawn.")
    qmp = host.folder / "qmp.sock"
    qmp.unlink(missing_ok=True)
    accel = accelerator(Path("/proc/cpuinfo").read_text(encoding="utf-8"), os.access("/dev/kvm", os.W_OK))
    argv = qemu_argv(host, image, accel)
    say(f"boot: {' '.join(argv)}")
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as qemu:
        if not wait_until(lambda: qmp.exists() or qemu.poll() is not None, 30) or qemu.poll() is not None:
            raise TesthostError(f"QEMU did not start; see {host.folder / 'supervisor.log'}.")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(qmp))
            with client.makefile("rb") as events:
                client.sendall(b'{"execute": "qmp_capabilities"}\n')
                reset = ended_with_reset(events)
        qemu.wait()
    return REBOOT_STATUS if reset else qemu.returncode
