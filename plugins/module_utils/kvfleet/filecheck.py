"""Whether folders and files can be made as asked: decided for all of them before the first one is written."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence

from .findings import Finding, KvfleetError

#: what :func:`check_targets` is told about a path
ABSENT, FILE, FOLDER, LINK, FOREIGN_LINK, OTHER = "absent", "file", "folder", "link", "foreign link", "other"

_WORDS = {FILE: "a file", FOLDER: "a folder", LINK: "a link to nothing", OTHER: "neither a file nor a folder"}


def parents(path: str) -> list[str]:
    """All folders above ``path``, the nearest first."""
    found = []
    while (above := posixpath.dirname(path)) != path:
        found.append(above)
        path = above
    return found


def check_targets(
    folders: Sequence[str],
    files: Sequence[str],
    folder_at: Callable[[str], str],
    file_at: Callable[[str], str],
    *,
    announced: bool,
) -> None:
    """Raise one :class:`KvfleetError` with everything that keeps ``folders`` or ``files`` from being made.

    ``folder_at`` says what a path leads to: FOLDER, FILE, OTHER, ABSENT, LINK (to nothing) or FOREIGN_LINK (one that
    another user than root may have planted). ``file_at`` says what lies at the path itself; a link there is replaced,
    never written through. With ``announced`` (check mode) a missing folder of a file counts as made by a step before.
    """
    wrong: list[Finding] = []
    seen: set[str] = set()
    for path in [*folders, *files]:
        if not path.startswith("/") or posixpath.normpath(path) != path:
            wrong.append(
                Finding("KVF-HOST-060", f"{path!r} is no plain absolute path.", "Give the path without '..' and '//'.")
            )
        elif path in seen:
            wrong.append(Finding("KVF-HOST-060", f"{path} is asked for twice.", "Name each path once."))
        seen.add(path)
    if wrong:
        raise KvfleetError(*wrong)

    made = {above for folder in folders for above in (folder, *parents(folder))}
    for folder in folders:
        for path in (folder, *parents(folder)):
            kind = folder_at(path)
            if kind != ABSENT:
                wrong += _no_folder(path, kind)
                break
    for path in files:
        kind = file_at(path)
        if kind in (FOLDER, OTHER):
            text = f"{path} has to be a file but is {_WORDS[kind]}."
            wrong.append(Finding("KVF-HOST-062", text, "Move it away, then run this again."))
        above = posixpath.dirname(path)
        # the nearest that exists: below a file there will never be a folder
        nearest = next(one for one in parents(path) if folder_at(one) != ABSENT)
        trouble = _no_folder(nearest, folder_at(nearest))
        if not trouble and nearest != above and above not in made and not announced:
            text = f"The folder of {path} is missing."
            trouble = [Finding("KVF-HOST-063", text, f"Make {above} first, then run this again.")]
        wrong += trouble
    if wrong:
        # two files of one folder have the same trouble
        raise KvfleetError(*{str(finding): finding for finding in wrong}.values())


def _no_folder(path: str, kind: str) -> list[Finding]:
    """Why what is at ``path`` cannot serve as a folder; empty when it can."""
    if kind == FOLDER:
        return []
    if kind == FOREIGN_LINK:
        text = f"{path} is a link that another user than root made, so its target is not trusted."
        return [Finding("KVF-HOST-064", text, f"Look where it leads, remove the link, and make {path} a folder.")]
    text = f"{path} has to be a folder but is {_WORDS[kind]}."
    return [Finding("KVF-HOST-061", text, "Move it away, then run this again.")]
