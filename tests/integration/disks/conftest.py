"""Real block devices for the cache disk's tests: loop devices on sparse files, always cleaned up."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_bench import Bench, Disk, sh

from kvfleet.core.disk_probe import HostPaths

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.root)


def _interrupt(*_words: object) -> None:
    """What pytest takes for Ctrl-C: it stops and cleans up."""
    raise KeyboardInterrupt


@pytest.fixture(scope="session", autouse=True)
def swept() -> None:
    """Work in a mount namespace of our own, and clean up after runs that were killed.

    A container or sandbox that somebody starts meanwhile would inherit our mounts, and keep the test disks busy for as
    long as it lives; and the mounts of a killed run end with its namespace.
    """
    if os.geteuid() == 0:
        new_mount_namespace = 0x00020000  # CLONE_NEWNS; os.unshare needs Python 3.12
        assert ctypes.CDLL(None, use_errno=True).unshare(new_mount_namespace) == 0, os.strerror(ctypes.get_errno())
        sh("mount", "--make-rprivate", "/")
    signal.signal(signal.SIGTERM, _interrupt)
    for root in Path("/var/tmp").glob("kvfleet-disks-*-*"):
        pid = root.name.split("-")[2]
        if os.geteuid() != 0 or Path("/proc", pid).exists():
            continue
        for line in sh("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE", check=False).splitlines():
            node, _, file = line.strip().partition(" ")
            if file.strip().startswith(f"{root}/"):
                Bench(root).release(Disk(Path(file.strip()), node, root / "by-id" / "gone", "GONE"))
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    assert os.geteuid() == 0, "these tests need root for loop devices; run scripts/test as root or deselect 'root'"
    root = Path(tempfile.mkdtemp(prefix=f"kvfleet-disks-{os.getpid()}-", dir="/var/tmp"))
    tools = root / "bin"
    for folder in ("by-id", "by-uuid", "udev", "systemd", "records", "bin", "var", "run"):
        (root / folder).mkdir()
    (root / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (root / "fstab").write_text("")
    shutil.copy(HERE / "fake_systemctl", tools / "systemctl")
    monkeypatch.setenv("PATH", f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setenv("KVFLEET_TEST_SYSTEMD", str(root / "systemd"))
    made = Bench(
        root,
        paths=HostPaths(
            by_id=str(root / "by-id"),
            by_uuid=str(root / "by-uuid"),
            udev=str(root / "udev"),
            fstab=str(root / "fstab"),
            machine_id=str(root / "machine-id"),
            records=str(root / "records"),
            systemd=str(root / "systemd"),
            lock=str(root / "run" / "lock"),
        ),
    )
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)
