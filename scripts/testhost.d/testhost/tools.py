"""Everything that leaves Python: commands, packages, locks, processes, mounts."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# Debian package that brings each tool
PACKAGE_OF: Mapping[str, str] = {
    "mmdebstrap": "mmdebstrap",
    "mksquashfs": "squashfs-tools",
    "mke2fs": "e2fsprogs",
    "sfdisk": "fdisk",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "mount": "mount",
    "losetup": "mount",
    "systemd-nspawn": "systemd-container",
    "slirp4netns": "slirp4netns",
    "ip": "iproute2",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
}
COMMON_TOOLS = ("mmdebstrap", "mke2fs", "sfdisk", "ssh", "ssh-keygen")
TOOLS_OF: Mapping[str, tuple[str, ...]] = {
    "nspawn": (*COMMON_TOOLS, "mksquashfs", "mount", "losetup", "systemd-nspawn", "slirp4netns", "ip"),
    "qemu": (*COMMON_TOOLS, "qemu-system-x86_64", "qemu-img"),
}
# where Debian keeps tools that a plain user's PATH does not name
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


class TesthostError(Exception):
    """One sentence for the person at the terminal: what is wrong and what to do."""


def say(message: str) -> None:
    """Print one line of progress to standard error, which leaves standard output to results."""
    print(f"testhost: {message}", file=sys.stderr, flush=True)


def extend_path() -> None:
    """Make sure that PATH reaches Debian's system tools."""
    parts = os.environ.get("PATH", "/usr/bin:/bin").split(":")
    os.environ["PATH"] = ":".join([*parts, *(folder for folder in SBIN if folder not in parts)])


def run(
    argv: Sequence[str | Path], *, stdin: str | None = None, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end.

    :param argv: program and arguments; never goes through a shell.
    :param stdin: text for its standard input; nothing by default.
    :param check: turn a failure into an error.
    :param env: the whole environment; this process's own by default.
    :raises TesthostError: the command is missing, or failed and ``check`` is set; the message ends with the last
        lines that it wrote.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
    except FileNotFoundError as error:
        package = PACKAGE_OF.get(words[0])
        fix = f"; install it with: apt-get install {package}" if package else ""
        raise TesthostError(f"the command {words[0]} is missing{fix}.") from error
    if check and done.returncode != 0:
        tail = " / ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
        raise TesthostError(f"'{' '.join(words)[:160]}' failed with status {done.returncode}: {tail}")
    return done


def missing_packages(
    backend: str, which: Callable[[str], str | None] = shutil.which, keyring: Path | None = None
) -> list[str]:
    """Return the Debian packages that a backend needs and that this machine lacks, sorted.

    :param backend: ``nspawn`` or ``qemu``.
    :param which: finds a program on PATH.
    :param keyring: the file that proves Debian's archive; the usual place by default.
    """
    names = {PACKAGE_OF[tool] for tool in TOOLS_OF[backend] if which(tool) is None}
    if not (keyring or Path("/usr/share/keyrings/debian-archive-keyring.gpg")).exists():
        names.add("debian-archive-keyring")
    return sorted(names)


def install_packages(packages: Sequence[str]) -> None:
    """Install Debian packages on this machine, after saying so.

    :raises TesthostError: not root, no apt, or apt failed.
    """
    line = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise TesthostError(f"packages are missing on this machine; install them with: {line}")
    say(f"installing what this machine lacks: {line}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    argv = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *packages]
    if run(argv, check=False, env=env).returncode != 0:
        # the usual cause is an empty or old package list
        run(["apt-get", "update", "-qq"], env=env)
        run(argv, env=env)


def need_packages(backend: str, *, install: bool) -> None:
    """Make sure that everything a backend needs is there.

    :param install: install what is missing; otherwise refuse.
    :raises TesthostError: something is missing and may not or cannot be installed.
    """
    missing = missing_packages(backend)
    if not missing:
        return
    if not install:
        raise TesthostError(
            f"packages are missing on this machine; install them with: apt-get install {' '.join(missing)}"
        )
    install_packages(missing)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for whoever has it; it ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that works on {what}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Ask until the condition holds; return whether it did within the time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def spawn_detached(argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Start a process in a session of its own that outlives this one; its output goes to the end of ``log``."""
    with log.open("ab") as handle:
        subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            start_new_session=True,
            env=None if env is None else dict(env),
        )


def processes_with(marker: str, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes whose environment holds ``marker`` (``NAME=value``), oldest first.

    A mark in the environment is found again after any crash and cannot hit a stranger that got a reused process id.
    """
    wanted = marker.encode()
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found)


def process_name(process: int, proc: Path = Path("/proc")) -> str:
    """Return the short name of a process, or an empty text when it is gone."""
    try:
        return (proc / str(process) / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def kill_all(processes: Callable[[], Iterable[int]], seconds: float = 15) -> bool:
    """Kill processes until none is left; return whether that worked within the time."""

    def gone() -> bool:
        left = list(processes())
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not left

    return wait_until(gone, seconds)


def mounts_below(folder: Path, mountinfo: str) -> list[str]:
    """Return the mount points at or below a folder, innermost first.

    :param mountinfo: the text of ``/proc/self/mountinfo`` (see proc(5): the fifth field is the mount point, with
        octal escapes for blanks and backslashes).
    """
    found = []
    for line in mountinfo.splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        point = fields[4]
        for escape, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(escape, char)
        if point == str(folder) or point.startswith(f"{folder}/"):
            found.append(point)
    return found[::-1]


def filesystem_type(path: Path) -> str:
    """Return the type of the file system that holds a path, or its nearest existing parent, as stat(1) names it."""
    while not path.exists():
        path = path.parent
    return run(["stat", "--file-system", "--format=%T", path]).stdout.strip()
