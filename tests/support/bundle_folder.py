"""A controller's folder of release locks and bundles for the tests that deploy from bundles."""

from __future__ import annotations

from pathlib import Path

from kvfleet.matrix import LOCKS


def prepare_bundle_folder(folder: Path) -> None:
    """Make ``folder``'s ``bundles`` and ``locks``, with the CPU releases' locks of the checkout linked into the latter.

    Links, so that a test can put locks of its own beside them; those of an earlier part stay.
    """
    for name in ("bundles", "locks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for lock in LOCKS.glob("cpu-*.txt"):
        link = folder / "locks" / lock.name
        link.unlink(missing_ok=True)
        link.symlink_to(lock)
