"""Does what is carried fit what the host's image holds? The closure of requirements, checked before anything arrives.

Pure but for :func:`installed`; versions and markers are read by the ``packaging`` of whoever calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packaging_modules() -> tuple[Any, Any]:
    """``packaging.requirements`` and ``packaging.version`` of this interpreter, or pip's copy."""
    try:
        from packaging import requirements, version
    except ImportError:
        from pip._vendor.packaging import requirements, version  # type: ignore[no-redef]
    return requirements, version


def installed() -> dict[str, dict[str, Any]]:
    """Distributions of this interpreter: name -> version and requirements."""
    import importlib.metadata

    found: dict[str, dict[str, Any]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(
                normalise(name), {"version": distribution.version, "requires": list(distribution.requires or ())}
            )
    return found


def check(
    roots: Iterable[str],
    carried: Mapping[str, Mapping[str, Any]],
    image: Mapping[str, Mapping[str, Any]],
    left_out: Iterable[str] = (),
    accepted: Iterable[str] = (),
) -> dict[str, Any]:
    """Every requirement that is reachable from ``roots`` and not met by what is carried, else by the image.

    ``carried`` and ``image`` map normalised names to ``{"version", "requires": [PEP 508, ...]}``. Returns ``unmet``
    (sentences that must stop a run), ``known`` (about packages left out or accepted) and ``used`` (image packages that
    the release would use, with version).
    """
    requirements, _ = packaging_modules()
    skip, fine = {normalise(name) for name in left_out}, {normalise(name) for name in accepted}
    unmet: list[str] = []
    known: list[str] = []
    used: dict[str, str] = {}
    queue: list[tuple[str, frozenset[str]]] = [(normalise(name), frozenset()) for name in roots]
    seen = set(queue)
    while queue:
        name, extras = queue.pop()
        entry = carried.get(name) or image.get(name)
        if entry is None:
            continue
        if name not in carried:
            used[name] = str(entry["version"])
        for text in entry["requires"]:
            need = requirements.Requirement(text)
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
                continue
            wanted = normalise(need.name)
            have = carried.get(wanted) or image.get(wanted)
            problem = ""
            if have is None:
                problem = f"{name} {entry['version']} needs {need.name}{need.specifier}, which is nowhere"
            elif not need.specifier.contains(str(have["version"]), prereleases=True):
                where = "carried" if wanted in carried else "the image"
                problem = f"{name} {entry['version']} needs {need.name}{need.specifier}, {where} has {have['version']}"
            if problem:
                (known if wanted in skip or wanted in fine else unmet).append(problem)
            # what is left out is not imported, so neither is what it needs
            key = (wanted, frozenset(need.extras))
            if have is not None and wanted not in skip and key not in seen:
                seen.add(key)
                queue.append(key)
    return {"unmet": sorted(set(unmet)), "known": sorted(set(known)), "used": dict(sorted(used.items()))}
