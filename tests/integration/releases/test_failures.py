"""A host without a network gets its release from a bundle; upgrades that fail leave it serving what it served."""

import pytest
from bad_releases import DAMAGED, NEVER_READY, WRONG_HASH, WRONG_TORCH
from fleet import OLD, ssh

from kvfleet.debs import ROLE_PACKAGES


def test_the_host_was_deployed_without_a_network(fleet):
    look = "import urllib.request as u; u.urlopen('http://10.0.2.2/', timeout=5)"
    refused = ssh(f'python3 -c "{look}" 2>&1; apt-get -o Acquire::Retries=0 update 2>&1', check=False)
    assert "Network is unreachable" in refused
    assert "Temporary failure resolving" in refused
    installed = ssh(f"dpkg-query -W -f '${{Package}} ${{db:Status-Status}}\\n' {' '.join(ROLE_PACKAGES)} libnuma1")
    assert installed.count(" installed\n") == len(ROLE_PACKAGES) + 1
    state = fleet.state()
    assert (state["current"], state["proved"], len(state["tiers"])) == (OLD, OLD, 1)


@pytest.mark.parametrize(
    ("release", "words"),
    [
        # every gate of the release runs in its own interpreter
        (WRONG_TORCH, ["KVF-ENG-020", "fails its gate torch", "torch 2.14.0+cpu instead of 2.13.0+cpu"]),
        (DAMAGED, ["KVF-REL-061", f"kvfleet-bundle-{DAMAGED}-cp311-x86_64.tar.part002", "another sha256"]),
        (WRONG_HASH, ["KVF-ENG-005", "lmcache-0.5.6-py3-none-any.whl", "sha256 of the lock"]),
    ],
)
def test_a_release_that_fails_before_the_switch_stops_nothing(fleet, release, words):
    before, since = fleet.state(), fleet.now()
    running = "systemctl show -P InvocationID 'kvfleet-vllm@*' 'kvfleet-lmcache@*'"
    invocations = ssh(running)
    assert len(invocations.split()) == 2
    status, text = fleet.kvfleet("upgrade", "--release", release)
    assert status == 3
    for word in words:
        assert word in text
    assert fleet.state() == before
    assert ssh(running) == invocations
    seen = fleet.traffic(since)
    assert seen.windows == []
    assert [one for one in seen.requests if one["error"]] == []
    assert len(seen.good) > 5


def test_a_release_that_never_becomes_ready_is_left_again(fleet):
    before, since = fleet.state(), fleet.now()
    status, text = fleet.kvfleet("upgrade", "--release", NEVER_READY)
    assert status == 3
    assert "releases restored" in text
    assert "RuntimeError: no engine in this release" in text
    assert f"{OLD} with its settings is back, proved and in traffic" in text
    after = fleet.state()
    assert (after["current"], after["proved"], after["tiers"]) == (OLD, OLD, before["tiers"])
    seen = fleet.traffic(since)
    # it was there, and then the old one again
    assert {one["current"] for one in seen.looks} == {OLD, NEVER_READY}
    assert len(seen.windows) == 1
    assert seen.failed_outside == []
    assert len([one for one in seen.good if one["start"] > seen.windows[0][1]]) > 1
    print(f"drain window {seen.windows[0][1] - seen.windows[0][0]:.0f} s")
    # what the failed release wrote is gone with the proof of the old one, and no sooner
    mixed = [one for one in seen.looks if len(one["tiers"]) == 2]
    assert mixed
    assert mixed[-1]["time"] > seen.windows[0][1]
