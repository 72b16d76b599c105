"""What playbooks and roles say of themselves: names that the planner has to know, agreement by name, rights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from kvfleet.core import settings

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = ROOT / "playbooks"


def entries(data: Any) -> Iterator[dict[str, Any]]:
    """Every play, block and task below ``data``."""
    if isinstance(data, list):
        for one in data:
            yield from entries(one)
    elif isinstance(data, dict):
        yield data
        for key in ("tasks", "pre_tasks", "post_tasks", "block", "rescue", "always"):
            yield from entries(data.get(key))


def files() -> list[Path]:
    return sorted([*PLAYBOOKS.rglob("*.yml"), *ROOT.glob("roles/*/tasks/*.yml")])


def test_facts_of_the_product_are_names_that_planning_accepts() -> None:
    # a second plan in the same run sees every fact that a role has set
    names = {
        name
        for file in files()
        for entry in entries(yaml.safe_load(file.read_text()))
        for name in entry.get("ansible.builtin.set_fact") or {}
        if name.startswith("kvfleet_")
    }
    assert {"kvfleet_plan", "kvfleet_packages_from_bundle"} <= names
    assert settings.check_names(names) == []


@pytest.mark.parametrize(
    ("host", "said", "agrees"),
    [
        ("gpu-1", ["gpu-1"], True),
        ("gpu-1", "gpu-1", True),
        # -e uninstall_hosts=gpu-10 is text
        ("gpu-1", "gpu-10", False),
        ("gpu-1", ["gpu-10"], False),
        ("gpu-1", "gpu-1,gpu-2", False),
        ("gpu-1", None, False),
    ],
)
def test_uninstall_agrees_only_to_the_whole_name(host: str, said: Any, agrees: bool) -> None:
    tasks = list(entries(yaml.safe_load((PLAYBOOKS / "uninstall.yml").read_text())))
    (condition,) = [entry["ansible.builtin.assert"]["that"] for entry in tasks if "ansible.builtin.assert" in entry]
    variables = {"inventory_hostname": host, **({} if said is None else {"uninstall_hosts": said})}
    templar = Templar(loader=DataLoader(), variables=variables)
    assert templar.evaluate_conditional(trust_as_template(condition)) is agrees


def test_every_play_that_plans_does_it_with_the_rights_that_changing_has() -> None:
    # /etc/kvfleet is root's: without rights a plan would forget what was deployed and proved before
    for file in PLAYBOOKS.glob("*.yml"):
        for play in yaml.safe_load(file.read_text()):
            if "'name': 'host_plan'" in str(play):
                assert play.get("become"), f"{file.name}: {play['name']}"


def test_what_cannot_be_collected_does_not_keep_a_host_from_its_way_back() -> None:
    steps = yaml.safe_load((PLAYBOOKS / "tasks" / "restore_proved.yml").read_text())
    including = [step for step in steps if any("support.yml" in str(entry) for entry in entries([step]))]
    assert len(including) == 1
    assert including[0].get("rescue")
