"""What fails on the canary stops there: it returns to what was proved, and nobody else notices."""

from __future__ import annotations

import subprocess

import pytest
from bad_releases import NEVER_READY
from fleet_hosts import ssh
from serving_fleet import CANARY, FIRST, RELEASE, SECOND, UNIT, ServingFleet, verdicts

from kvfleet import fleet

pytestmark = pytest.mark.root


def stopped_at_the_canary(three: ServingFleet, before: dict, done: fleet.FleetResult) -> str:
    """Assert that the canary is back and proved and the others were not touched; returns the canary's reasons."""
    assert done.exit == 3
    assert verdicts(done) == {CANARY: "restored", FIRST: "not started", SECOND: "not started"}
    after = three.all_seen()
    # not even restarted
    assert {name: after[name] for name in (FIRST, SECOND)} == {name: before[name] for name in (FIRST, SECOND)}
    assert after[CANARY]["start"] != before[CANARY]["start"], "the failure has to be one after the restart"
    assert {**after[CANARY], "start": ""} == {**before[CANARY], "start": ""}
    assert done.artifacts is not None
    bundle = done.artifacts / f"support-{CANARY}.tar.gz"
    names = subprocess.run(["tar", "-tzf", bundle], capture_output=True, text=True, check=True).stdout
    assert f"journal/{UNIT}.txt" in names
    assert "plan.json" in names
    return " ".join(done.hosts[CANARY].reasons)


def test_an_upgrade_that_never_serves_ends_at_the_canary(three: ServingFleet) -> None:
    before = three.all_seen()
    done = three.run(fleet.Action.UPGRADE, variables={"kvfleet_release": NEVER_READY})
    reasons = stopped_at_the_canary(three, before, done)
    assert "RuntimeError: no engine in this release" in reasons
    assert f"KVF-HOST-081: {CANARY} failed" in reasons
    assert f"{RELEASE} with its settings is back, proved and in traffic" in reasons
    assert ssh(CANARY, "readlink /opt/kvfleet/current").strip().endswith(RELEASE)
    assert ssh(FIRST, "ls /opt/kvfleet/releases").split() == [RELEASE]


def test_a_setting_that_the_engine_refuses_ends_at_the_canary(three: ServingFleet) -> None:
    # a flag that the release knows, with a value that only its start can find wrong
    flags = {"--tokenizer": "/data/models/none"}
    before = three.all_seen()
    done = three.run(fleet.Action.DEPLOY, variables={"kvfleet_engine_flags": flags})
    stopped_at_the_canary(three, before, done)


def test_the_fleet_is_as_wanted_after_both(three: ServingFleet) -> None:
    done = three.run(fleet.Action.DEPLOY)
    assert done.exit == 0
    assert {name: host.changed for name, host in done.hosts.items()} == {CANARY: (), FIRST: (), SECOND: ()}
