"""A host of the second batch loses SSH in the middle of its change; the next run goes on there."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest
from fleet_hosts import TESTHOST, ssh
from serving_fleet import CANARY, FIRST, HOSTS, RESTART, SECOND, ServingFleet, verdicts

from kvfleet import fleet

pytestmark = pytest.mark.root

#: long enough that every attempt of the run finds nobody
AWAY_S = 200
#: nothing that SSH answers leaves the host; established connections hang as on a dead link
RULE = "pref 90 ipproto 6 sport 22 unreachable"


def cut(host: str) -> None:
    """Take SSH away from the host a moment from now, for AWAY_S."""
    ssh(
        host,
        f"systemd-run -q --on-active={AWAY_S} --timer-property=AccuracySec=1s ip rule del {RULE};"
        f"systemd-run -q --on-active=1 --timer-property=AccuracySec=100ms ip rule add {RULE}",
    )


def wait_for(host: str) -> None:
    """Wait until the host answers again."""
    end = time.monotonic() + AWAY_S + 60
    while subprocess.run([TESTHOST, "ssh", host, "true"], capture_output=True, check=False, timeout=60).returncode:
        assert time.monotonic() < end, f"{host} did not come back"
        time.sleep(5)


def test_a_host_lost_in_its_change_is_told_and_finished_by_the_next_run(three: ServingFleet) -> None:
    before = three.all_seen()
    seqs = three.change()
    cuts: list[threading.Thread] = []

    def hit(event: fleet.FleetEvent) -> None:
        if event.kind == "start" and event.host == SECOND and event.task == RESTART and not cuts:
            cuts.append(threading.Thread(target=cut, args=(SECOND,)))
            cuts[0].start()

    done = three.run(fleet.Action.DEPLOY, hit)
    assert cuts, "the host was never hit"
    cuts[0].join()
    assert verdicts(done) == {CANARY: "proved", FIRST: "proved", SECOND: "unreachable"}
    assert done.exit == 4
    assert "unreachable" in done.hosts[SECOND].reasons[0]
    wait_for(SECOND)

    middle = three.all_seen()
    for name in (CANARY, FIRST):
        assert (middle[name]["seqs"], middle[name]["ready"]) == (seqs, True)
        assert middle[name]["proved"] != before[name]["proved"]
    # clearly marked: out of traffic, and its proof is not of what it runs now
    assert middle[SECOND]["ready"] is False
    assert middle[SECOND]["proved"] == before[SECOND]["proved"]
    told = three.run(fleet.Action.STATUS)
    assert verdicts(told) == {CANARY: "as wanted", FIRST: "as wanted", SECOND: "drift"}
    assert any("traffic" in reason for reason in told.hosts[SECOND].reasons), told.hosts[SECOND].reasons

    again = three.run(fleet.Action.DEPLOY)
    assert again.exit == 0
    assert verdicts(again) == dict.fromkeys(HOSTS, "proved")
    after = three.all_seen()
    # neither restarted nor proved again
    assert {name: after[name] for name in (CANARY, FIRST)} == {name: middle[name] for name in (CANARY, FIRST)}
    assert (after[SECOND]["seqs"], after[SECOND]["ready"]) == (seqs, True)
    assert after[SECOND]["proved"] != before[SECOND]["proved"]
