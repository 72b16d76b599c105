"""The order of a rollout and when it stops: canary first, then hosts that serve nothing, then serving ones in batches.

Pure: hosts by name in, decisions and sentences out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .findings import Finding

#: the waves in their order; Ansible's groups are called ``kvfleet_wave_<name>``
CANARY, NEW, SERVING = "canary", "new", "serving"
#: a fleet of any size meets a bad release on one host, then on a tenth, then on thirds
DEFAULT_BATCHES: tuple[int | str, ...] = (1, "10%", "30%")


@dataclass(frozen=True)
class HostState:
    """What planning found on one host: ``errors`` of its plan, whether it ``serves`` now."""

    name: str
    release: str = ""
    profile: str = ""
    serves: bool = False
    errors: tuple[Mapping[str, Any], ...] = ()


def waves(hosts: Sequence[HostState], canaries: Sequence[str]) -> dict[str, str]:
    """The wave of each host. Without a canary of the inventory among ``hosts`` the first host is the canary.

    The only host of a run is its own canary: there is nobody to protect, but the order stays the same.
    """
    named = [host.name for host in hosts if host.name in set(canaries)]
    chosen = set(named or [host.name for host in hosts[:1]])
    return {
        host.name: CANARY if host.name in chosen else SERVING if host.serves else NEW
        for host in hosts
    }  # fmt: skip


def check_batches(batches: Any) -> tuple[list[int | str], list[Finding]]:
    """``kvfleet_batches`` as Ansible's ``serial`` takes it, and errors (KVF-SET-040) for what it would misread."""
    given = batches if isinstance(batches, (list, tuple)) else [batches]
    sizes: list[int | str] = []
    for entry in given:
        text = str(entry).strip()
        share = text[:-1].strip() if text.endswith("%") else ""
        # Ansible reads whole percents only, and ends the play at others when the hosts before are changed already
        if share.isdigit() and 0 < int(share) <= 100:
            sizes.append(f"{share}%")
        elif text.isdigit() and int(text) > 0:
            sizes.append(int(text))
        else:
            return [], [_bad_batches(entry)]
    return (sizes, []) if sizes else ([], [_bad_batches(batches)])


def _bad_batches(entry: Any) -> Finding:
    return Finding(
        "KVF-SET-040",
        f"kvfleet_batches holds {entry!r}, which is no size of a batch.",
        'Set kvfleet_batches to numbers of hosts or whole percents of them, such as [1, "10%", "30%"].',
    )


def batch_sizes(batches: Sequence[int | str], hosts: int) -> list[int]:
    """Sizes of the batches that Ansible's ``serial`` makes of ``hosts`` hosts; the last entry repeats.

    A share is rounded down but at least one host (ansible.utils.helpers.pct_to_int).
    """
    sizes: list[int] = []
    left = hosts
    while left > 0:
        entry = batches[min(len(sizes), len(batches) - 1)]
        share = isinstance(entry, str)
        size = max(1, int(float(str(entry).rstrip("%")) / 100 * hosts)) if share else int(entry)
        sizes.append(min(size, left))
        left -= sizes[-1]
    return sizes


def refusals(
    hosts: Sequence[HostState], lost: Mapping[str, str], *, skip_unreachable: bool
) -> list[tuple[str, Finding]]:
    """Why the rollout must not begin, by host: errors of plans, and hosts that could not be planned at all.

    ``lost`` maps the hosts that dropped out while planning to a reason; with ``skip_unreachable`` they do not stop the
    others, but stay lost.
    """
    found: list[tuple[str, Finding]] = []
    for host in hosts:
        for error in host.errors:
            found.append((host.name, Finding(str(error["code"]), str(error["message"]), str(error["fix"]))))
    if not skip_unreachable:
        for name in sorted(lost):
            found.append(
                (
                    name,
                    Finding(
                        "KVF-HOST-080",
                        f"It could not be planned: {lost[name]}.",
                        f"Bring it back, leave it out with --limit 'all:!{name}', "
                        "or set kvfleet_skip_unreachable: true.",
                    ),
                )
            )
    return found


def idle(hosts: Sequence[HostState]) -> list[tuple[str, Finding]]:
    """Hosts on which nothing serves, where going over to another release makes no sense: KVF-ENG-040."""
    return [
        (
            host.name,
            Finding(
                "KVF-ENG-040",
                "Nothing of kvfleet runs on it, so there is nothing to upgrade.",
                "Deploy it with site.yml, or leave it out with --limit.",
            ),
        )
        for host in hosts
        if not host.serves
    ]


def shared_serials(serials: Mapping[str, str]) -> list[tuple[str, Finding]]:
    """Hosts that name the same cache disk (``cache_disk_serial`` by host; empty ones do not count): KVF-DISK-056."""
    owners: dict[str, list[str]] = {}
    for host, serial in serials.items():
        if serial:
            owners.setdefault(serial, []).append(host)
    return [
        (
            host,
            Finding(
                "KVF-DISK-056",
                f"cache_disk_serial {serial} is the same on {', '.join(sorted(hosts))}.",
                "Set cache_disk_device, cache_disk_serial and cache_disk_wipe_serial per host (host_vars), never for a "
                "group or with -e.",
            ),
        )
        for serial, hosts in sorted(owners.items())
        if len(hosts) > 1
        for host in sorted(hosts)
    ]


def table(found: Sequence[tuple[str, Finding]], hosts: int) -> str:
    """The refusals of all hosts as one text: a line a finding, hosts aligned, what to do below the last."""
    width = max((len(name) for name, _ in found), default=0)
    bad = len({name for name, _ in found})
    lines = [f"{bad} of {hosts} hosts cannot be deployed; nothing was changed on any host."]
    for name, finding in found:
        lines.append(f"  {name:<{width}}  {finding.code}: {finding.message} {finding.fix}".rstrip())
    return "\n".join(lines)


def too_many_lost(lost: Sequence[str], hosts: int, max_fail_percentage: float) -> bool:
    """Whether the hosts that a wave lost so far are more than ``max_fail_percentage`` (0 - 100) of its ``hosts``."""
    return bool(lost) and 100.0 * len(lost) > max_fail_percentage * hosts
