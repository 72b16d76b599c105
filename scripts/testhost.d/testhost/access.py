"""SSH to a host: keys, configuration, the host key that is known before the first connection, and waiting."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from .state import Host
from .tools import TesthostError, run, wait_until

KEY_TYPE = "ed25519"
# until systemd has started everything that is enabled
SETTLE_SECONDS = 900


def make_key(path: Path, comment: str) -> str:
    """Make an SSH key pair unless it is there, and return its public half."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        run(["ssh-keygen", "-q", "-t", KEY_TYPE, "-N", "", "-C", comment, "-f", path])
    return path.with_name(path.name + ".pub").read_text(encoding="utf-8").strip()


def known_hosts_text(host: Host, public_key: str) -> str:
    """Return the known_hosts line: the host's own alias and the loopback address that tools may use directly."""
    kind, key = public_key.split()[:2]
    return f"{host.ident},[127.0.0.1]:{host.port} {kind} {key}\n"


def ssh_options(host: Host) -> dict[str, str]:
    """Return the SSH options that reach this host and nothing else; its key is checked, never learned."""
    return {
        "HostKeyAlias": host.ident,
        "UserKnownHostsFile": str(host.known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "IdentityFile": str(host.folder / "ssh_key"),
        "IdentitiesOnly": "yes",
        "LogLevel": "ERROR",
        # an emulated processor answers slowly
        "ConnectTimeout": "20",
    }


def ssh_config_text(host: Host) -> str:
    """Return the SSH configuration under which ``ssh NAME`` reaches the host."""
    lines = {"HostName": "127.0.0.1", "Port": str(host.port), "User": "root", **ssh_options(host)}
    return f"Host {host.name}\n" + "".join(f"  {key} {value}\n" for key, value in lines.items())


def write_access(host: Host, client_key: Path) -> None:
    """Write the host's own key pair, its known_hosts and its SSH configuration; keep what is there."""
    for suffix, mode in (("", 0o600), (".pub", 0o644)):
        target = host.folder / f"ssh_key{suffix}"
        target.write_bytes(client_key.with_name(client_key.name + suffix).read_bytes())
        target.chmod(mode)
    public = make_key(host.folder / "host_key", f"root@{host.name}")
    host.known_hosts.write_text(known_hosts_text(host, public), encoding="utf-8")
    host.ssh_config.write_text(ssh_config_text(host), encoding="utf-8")


def inventory_text(host: Host) -> str:
    """Return the host's entry for an Ansible inventory in YAML, indented for ``hosts:`` at the left edge.

    Values are quoted as JSON strings, which YAML reads as they are.
    """
    options = {key: value for key, value in ssh_options(host).items() if key != "IdentityFile"}
    values: dict[str, str | int] = {
        "ansible_host": "127.0.0.1",
        "ansible_port": host.port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(host.folder / "ssh_key"),
        "ansible_ssh_common_args": " ".join(f"-o {key}={value}" for key, value in options.items()),
    }
    cache = host.disk_with_role("cache")
    if cache is not None:
        values["cache_disk_device"] = cache.by_id
        values["cache_disk_serial"] = cache.serial
    return f"{host.name}:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in values.items())


def ssh(host: Host, command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command on the host and return what it did; a lost connection has status 255."""
    argv = ["ssh", "-F", str(host.ssh_config), host.name, command]
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 255, "", f"no answer within {timeout:.0f} s")


def exec_ssh(host: Host, command: list[str]) -> None:
    """Become an ssh to the host, interactive without a command."""
    os.execvp("ssh", ["ssh", "-F", str(host.ssh_config), host.name, *command])  # noqa: S606 - the point of the command


def boot_id(host: Host) -> str:
    """Return the identity of the host's current boot, or an empty text when it does not answer."""
    return ssh(host, "cat /proc/sys/kernel/random/boot_id", timeout=30).stdout.strip()


def console_tail(host: Host, lines: int = 12) -> str:
    """Return the last lines that the host wrote to its console."""
    if not host.console.exists():
        return ""
    return "\n".join(host.console.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def wait_ready(host: Host, seconds: float) -> None:
    """Wait until the host answers over SSH and systemd says that it is running.

    :raises TesthostError: no answer in time, or failed units; the message names them.
    """
    if not wait_until(lambda: ssh(host, "true", timeout=30).returncode == 0, seconds, pause=0.1):
        reason = ssh(host, "true", timeout=30).stderr.strip()
        raise TesthostError(
            f"{host.name} did not answer over SSH within {seconds:.0f} s ({reason}); its console ends with:\n"
            f"{console_tail(host)}\n'testhost down {host.name}' removes it."
        )
    # a host that starts again may have services that load a model first
    state = ssh(host, "systemctl is-system-running --wait", timeout=SETTLE_SECONDS)
    if state.returncode != 0:
        failed = ssh(host, "systemctl --failed --no-legend --plain").stdout.split("\n")
        units = ", ".join(line.split()[0] for line in failed if line.strip()) or "none named"
        raise TesthostError(
            f"{host.name} started but systemd says '{state.stdout.strip() or state.stderr.strip()}' "
            f"(failed units: {units}); 'testhost ssh {host.name}' looks, 'testhost down {host.name}' removes it."
        )
