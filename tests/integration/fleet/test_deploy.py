"""Three hosts from nothing to serving, and what a second run does to them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from fleet_hosts import ROOT
from serving_fleet import CANARY, FIRST, FOLDER, HOSTS, RELEASE, SECOND, ServingFleet, verdicts

from kvfleet import fleet

pytestmark = pytest.mark.root


def events() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "deploy.jsonl").read_text().splitlines()]


def test_the_canary_is_proved_before_the_others_begin(three: ServingFleet) -> None:
    result = json.loads((FOLDER / "deploy.json").read_text())
    assert result["exit"] == 0
    assert {name: host["verdict"] for name, host in result["hosts"].items()} == dict.fromkeys(HOSTS, "proved")
    assert {host["release"] for host in result["hosts"].values()} == {RELEASE}
    changes = [event for event in events() if event.get("state") == "changed"]
    spans = {
        name: [event["at_s"] for event in changes if event["host"] == name and event["play"].startswith("Roll out")]
        for name in HOSTS
    }
    assert max(spans[CANARY]) < min(spans[FIRST] + spans[SECOND])
    # hosts that serve nothing have nobody to lose: they go at the same time
    assert min(spans[SECOND]) < max(spans[FIRST])
    assert min(spans[FIRST]) < max(spans[SECOND])


def test_a_second_run_changes_nothing_and_proves_nothing_again(three: ServingFleet) -> None:
    before = three.all_seen()
    done = three.run(fleet.Action.DEPLOY)
    assert done.exit == 0
    assert verdicts(done) == dict.fromkeys(HOSTS, "proved")
    assert {name: host.changed for name, host in done.hosts.items()} == dict.fromkeys(HOSTS, ())
    assert all("unchanged since" in host.figure for host in done.hosts.values())
    # the limit is 45; this inventory's two options add theirs: the proxy 8, the key 3
    limit = 45 + 8 + 3
    tasks = {name: host.tasks for name, host in done.hosts.items()}
    assert max(many for name, many in tasks.items() if name != CANARY) <= limit
    # the first host's number holds what runs once for all: plans' folder and files, the gate, the release matrix
    assert tasks[CANARY] <= limit + 4
    assert three.all_seen() == before


def test_the_example_script_prints_every_verdict(three: ServingFleet) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "deploy.py", three.inventory],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in HOSTS:
        assert f"{name}\n  proved\n  {RELEASE}\n" in done.stdout


def test_status_finds_all_as_wanted(three: ServingFleet) -> None:
    done = three.run(fleet.Action.STATUS)
    assert done.exit == 0
    assert verdicts(done) == dict.fromkeys(HOSTS, "as wanted")
