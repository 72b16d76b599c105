"""The cached image that all hosts share: a squashfs for containers, a kernel and a disk for virtual machines."""

from __future__ import annotations

import hashlib
import platform
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .access import make_key
from .recipe import BUILD_MARKER, SUITE, bootstrap, inputs, pack
from .state import Host, all_hosts, cache_folder
from .tools import TesthostError, kill_all, locked, processes_with, run, say


@dataclass(frozen=True)
class Image:
    """One built image; its folder's name tells what went in."""

    folder: Path

    @property
    def squashfs(self) -> Path:
        """The root file system of container hosts."""
        return self.folder / "root.sqfs"

    @property
    def disk(self) -> Path:
        """The root disk of virtual machines."""
        return self.folder / "root.img"

    @property
    def kernel(self) -> Path:
        """The kernel of virtual machines."""
        return self.folder / "vmlinuz"

    @property
    def complete(self) -> bool:
        """Whether the build ran to its end."""
        return (self.folder / "complete").exists()


def client_key() -> Path:
    """Return the SSH key that every image lets in, made at the first call."""
    path = cache_folder() / "ssh_key"
    make_key(path, "kvfleet-testhost")
    return path


def image_stamp(parts: Iterable[bytes]) -> str:
    """Return a short name for everything that goes into an image; each part counts with its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:16]


def current_image(backend: str) -> Image:
    """Return the image that this checkout and this machine ask for, built or not."""
    if backend == "qemu" and platform.machine() != "x86_64":
        raise TesthostError("the qemu backend runs on x86_64 machines only; use --backend nspawn.")
    parts = [*inputs(backend), client_key().with_name("ssh_key.pub").read_bytes()]
    return Image(cache_folder() / f"{SUITE}-{backend}-{image_stamp(parts)}")


def image_of(stamp: str) -> Image:
    """Return an image by the name that a host's record holds.

    :raises TesthostError: it is gone.
    """
    image = Image(cache_folder() / stamp)
    if not image.complete:
        raise TesthostError(
            f"the image {image.folder} of this host is gone; 'testhost down' the host and make it anew."
        )
    return image


def build_image(backend: str, *, force: bool = False) -> Image:
    """Return the image, built if it is missing or old.

    :param force: build it again even if nothing changed.
    """
    with locked(cache_folder() / "lock", "the image"):
        image = current_image(backend)
        if image.complete and not force:
            return image
        say(f"building the Debian {SUITE} image for {backend} hosts in {image.folder} (once; about a minute)")
        cache_folder().chmod(0o700)
        # under the lock nobody else is building: what is left belongs to a killed run, perhaps with children alive
        if not kill_all(lambda: processes_with(BUILD_MARKER)):
            raise TesthostError(f"processes of a killed build would not end: {processes_with(BUILD_MARKER)}.")
        for left in cache_folder().glob("build.*"):
            run(["rm", "-rf", "--one-file-system", left])
        work = Path(tempfile.mkdtemp(prefix="build.", dir=cache_folder()))
        try:
            new = Image(work / "image")
            new.folder.mkdir()
            bootstrap(work, backend, client_key().with_name("ssh_key.pub").read_bytes())
            pack(work / "root", new.folder, backend)
            (new.folder / "complete").touch()
            if image.folder.exists():
                shutil.rmtree(image.folder)
            new.folder.rename(image.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        _remove_old(image, backend)
        return image


def note_user(image: Image, host: Host) -> None:
    """Note in the image's folder that a host starts from it, whatever state folder the host is in."""
    users = image.folder / "users"
    users.mkdir(exist_ok=True)
    (users / host.ident).write_text(str(host.folder), encoding="utf-8")


def is_used(image: Image) -> bool:
    """Return whether a host that still exists starts from an image."""
    if any(host.image == image.folder.name for host in all_hosts()):
        return True
    notes = [path.read_text(encoding="utf-8") for path in image.folder.glob("users/*")]
    return any(Path(note, "host.json").exists() for note in notes)


def _remove_old(image: Image, backend: str) -> None:
    """Remove earlier images of the same backend that no host uses."""
    for folder in cache_folder().glob(f"{SUITE}-{backend}-*"):
        if folder != image.folder and not is_used(Image(folder)):
            with suppress(OSError):
                shutil.rmtree(folder)
