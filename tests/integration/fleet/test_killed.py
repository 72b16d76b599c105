"""The controller dies in the middle of a rollout; the next run goes on without repeating what is proved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any

import pytest
from fleet_hosts import ROOT
from serving_fleet import BIN, CANARY, FIRST, HOSTS, RESTART, SECOND, ServingFleet, verdicts

from kvfleet import fleet
from kvfleet.runs import processes

pytestmark = pytest.mark.root


def kill_all(pid: int) -> int:
    """What a power cut leaves of the run: nothing. Returns how many processes it had."""
    every = processes()
    ours = {pid}
    while more := {one for one, (parent, _) in every.items() if parent in ours} - ours:
        ours |= more
    for one in ours:
        os.kill(one, signal.SIGKILL)
    return len(ours)


def test_a_killed_controller_leaves_every_host_known_and_the_next_run_goes_on(three: ServingFleet) -> None:
    before = three.all_seen()
    seqs = three.change()
    run = subprocess.Popen(
        [str(BIN / "kvfleet"), "deploy", "-i", str(three.inventory), "--json"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    hit = False
    for line in run.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["kind"] == "start" and event["host"] == FIRST and event["task"] == RESTART:
            time.sleep(2)
            # kvfleet, ansible-playbook and at least one worker
            assert kill_all(run.pid) >= 3
            hit = True
            break
    assert hit, "the run never came to the restart of the second host"
    run.wait(timeout=30)
    assert run.returncode == -signal.SIGKILL

    # new and proved; in the middle and out of traffic; old and proved
    middle = three.all_seen()
    assert (middle[CANARY]["seqs"], middle[CANARY]["ready"]) == (seqs, True)
    assert middle[CANARY]["proved"] != before[CANARY]["proved"]
    assert middle[FIRST]["ready"] is False
    assert middle[FIRST]["proved"] == before[FIRST]["proved"]
    assert middle[SECOND] == before[SECOND]
    told = three.run(fleet.Action.STATUS)
    assert verdicts(told) == {CANARY: "as wanted", FIRST: "drift", SECOND: "drift"}

    again = three.run(fleet.Action.DEPLOY)
    assert again.exit == 0
    assert verdicts(again) == dict.fromkeys(HOSTS, "proved")
    assert again.hosts[CANARY].changed == ()
    assert "unchanged since" in again.hosts[CANARY].figure
    after = three.all_seen()
    assert after[CANARY] == middle[CANARY]
    for name in (FIRST, SECOND):
        assert (after[name]["seqs"], after[name]["ready"]) == (seqs, True)
        assert after[name]["proved"] != before[name]["proved"]
