"""The release matrix on the controller: ``releases.yml`` of the checkout plus rows of people's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvfleet.checkout import ROOT
from kvfleet.core.findings import refuse
from kvfleet.core.releases import Release, load_rows

LOCKS = ROOT / "locks"


def load_matrix(path: Path | None = None, extra: Path | None = None) -> dict[str, Any]:
    """The document of ``releases.yml``; ``extra`` is a YAML file with a list of more rows, or a mapping with one.

    Raises KVF-REL-003 for a file that is not such a document.
    """
    document = _read(path or ROOT / "releases.yml")
    if not isinstance(document, dict) or "releases" not in document:
        raise refuse(
            "KVF-REL-003", f"{path or 'releases.yml'} is no release matrix.", "Give a file with the key releases."
        )
    if extra is not None:
        more = _read(extra)
        if isinstance(more, dict):
            more = more.get("kvfleet_releases_extra", more.get("releases"))
        if not isinstance(more, list):
            raise refuse("KVF-REL-003", f"{extra} holds no list of rows.", "Give a list, or kvfleet_releases_extra.")
        document = {**document, "releases": [*document["releases"], *more]}
    return document


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise refuse("KVF-REL-003", f"{path}: {error.strerror}.", "Give an existing file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise refuse("KVF-REL-003", f"{path} is not YAML: {error}", "Correct the file.") from None


def find_release(document: dict[str, Any], name: str) -> Release:
    """The installable row with this id; refuses KVF-REL-010 or -011 like the planner does."""
    releases = load_rows(document)
    for release in releases:
        if release.id == name:
            if release.forbidden:
                raise refuse("KVF-REL-011", f"{name} is forbidden: {release.row['reason']}", "Take another row.")
            return release
    names = ", ".join(release.id for release in releases if not release.forbidden)
    raise refuse("KVF-REL-010", f"No release is called {name!r}.", f"Take one of {names}.")
