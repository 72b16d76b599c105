"""The order of a rollout, its batches as Ansible makes them, and when it must not begin or go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.module_utils.testing import patch_module_args
from ansible.parsing.dataloader import DataLoader
from hypothesis import given
from hypothesis import strategies as st

import rollout_gate
from kvfleet.core import rollout
from kvfleet.core.rollout import HostState, batch_sizes, check_batches, refusals, table, too_many_lost, waves

ROOT = Path(__file__).parents[2]
ERROR = {"code": "KVF-DISK-003", "message": "No such disk.", "fix": "Set cache_disk_device.", "numbers": {}}


def states(*serving: bool) -> list[HostState]:
    return [HostState(f"h{number}", serves=one) for number, one in enumerate(serving, 1)]


def test_the_first_host_is_the_canary_when_the_inventory_names_none() -> None:
    assert waves(states(True, True, False), []) == {"h1": "canary", "h2": "serving", "h3": "new"}
    assert waves(states(True, True, False), ["gone"]) == {"h1": "canary", "h2": "serving", "h3": "new"}


def test_the_inventorys_canaries_go_first() -> None:
    assert waves(states(True, False, False), ["h2", "h3"]) == {"h1": "serving", "h2": "canary", "h3": "canary"}


def test_no_host_at_all_has_no_wave() -> None:
    assert waves([], ["h1"]) == {}


@pytest.mark.parametrize("batches", [[1, "10%", "30%"], ["1", " 10 %"], 5, "50%"])
def test_good_batches(batches: object) -> None:
    assert check_batches(batches)[1] == []


@pytest.mark.parametrize("batches", [[0], ["0%"], ["110%"], ["many"], [-1], [], [1.5], ["nan%"], ["12.5%"]])
def test_bad_batches_are_named(batches: object) -> None:
    sizes, found = check_batches(batches)
    assert sizes == []
    assert found[0].code == "KVF-SET-040"
    assert "kvfleet_batches" in found[0].fix


def ansible_batches(batches: list[int | str], hosts: int) -> list[int]:
    """What Ansible itself makes of ``serial``."""
    from ansible.utils.helpers import pct_to_int

    # PlaybookExecutor._get_serialized_batches
    sizes, left, position = [], hosts, 0
    while left > 0:
        size = pct_to_int(batches[position], hosts)
        sizes.append(min(size, left))
        left -= size
        position = min(position + 1, len(batches) - 1)
    return sizes


@given(
    st.lists(st.one_of(st.integers(1, 50), st.integers(1, 100).map(lambda share: f"{share}%")), min_size=1, max_size=4),
    st.integers(0, 300),
)
def test_batches_are_ansibles(batches: list[int | str], hosts: int) -> None:
    sizes, found = check_batches(batches)
    assert not found
    assert batch_sizes(sizes, hosts) == ansible_batches(batches, hosts)


def test_every_error_and_every_lost_host_stops_all() -> None:
    hosts = [HostState("a"), HostState("b", errors=(ERROR,))]
    found = refusals(hosts, {"c": "gone"}, skip_unreachable=False)
    assert [(name, finding.code) for name, finding in found] == [("b", "KVF-DISK-003"), ("c", "KVF-HOST-080")]
    text = table(found, 3)
    assert text.splitlines()[0] == "2 of 3 hosts cannot be deployed; nothing was changed on any host."
    assert "KVF-DISK-003: No such disk. Set cache_disk_device." in text
    assert "kvfleet_skip_unreachable" in text


def test_what_does_not_serve_cannot_be_upgraded(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"stage": "plan", "hosts": ["a", "b"], "active": ["a", "b"], "serving": {"a": ["x.service"], "b": []}}
    assert call(capsys, **given)["waves"] == {"a": "canary", "b": "new"}
    refused = call(capsys, **given, must_serve=True)
    assert refused["failed"]
    assert "  b  KVF-ENG-040" in str(refused["msg"])
    assert "  a  " not in str(refused["msg"])


def test_lost_hosts_may_be_skipped_but_errors_may_not() -> None:
    assert refusals([HostState("a")], {"c": "gone"}, skip_unreachable=True) == []
    assert refusals([HostState("b", errors=(ERROR,))], {}, skip_unreachable=True)


@pytest.mark.parametrize(
    ("lost", "hosts", "share", "stops"),
    [
        (0, 10, 0, False),
        (1, 10, 0, True),
        (1, 10, 10, False),
        (2, 10, 10, True),
        (1, 1000, 0, True),
        (3, 3, 100, False),
    ],
)
def test_the_share_that_may_be_lost(lost: int, hosts: int, share: float, stops: bool) -> None:
    assert too_many_lost([f"h{n}" for n in range(lost)], hosts, share) is stops


def call(capsys: pytest.CaptureFixture[str], **parameters: object) -> dict[str, object]:
    with patch_module_args(parameters), pytest.raises(SystemExit):
        rollout_gate.main()
    return dict(json.loads(capsys.readouterr().out))


def test_the_gate_lets_a_good_fleet_through(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(
        capsys, stage="plan", hosts=["a", "b", "c"], active=["a", "b", "c"], errors={"a": [], "b": []},
        serving={"b": ["kvfleet-vllm@x.service"], "c": ["kvfleet-vllm@x.service"]}, canaries=["b"],
    )  # fmt: skip
    assert "failed" not in answer
    assert answer["waves"] == {"a": "new", "b": "canary", "c": "serving"}
    assert answer["batches"] == 1


def test_the_gate_refuses_with_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, stage="plan", hosts=["a", "b"], active=["a"], errors={"a": [ERROR]}, batches=["x"])
    assert answer["failed"]
    text = str(answer["msg"])
    assert all(code in text for code in ("KVF-SET-040", "KVF-DISK-003", "KVF-HOST-080"))
    assert answer["lost"] == ["b"]


def test_no_two_hosts_name_the_same_disk(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, stage="plan", hosts=["a", "b", "c"], active=["a", "b", "c"],
                  serials={"a": "S1", "b": "S2", "c": "S1"}, profiles=dict.fromkeys("abc", "disk"))  # fmt: skip
    assert answer["failed"]
    assert "KVF-DISK-056" in str(answer["msg"])
    assert "S1 is the same on a, c" in str(answer["msg"])
    assert "S2" not in str(answer["msg"])
    disks = dict.fromkeys("abc", "disk")
    assert "failed" not in call(
        capsys, stage="plan", hosts=["a", "b"], active=["a", "b"], serials={"a": "", "b": "", "c": "S1"}, profiles=disks
    )
    # a serial that is set for all hosts matters only on those that have a disk tier
    serials = {"a": "S1", "b": "S1", "c": "S1"}
    names = list(serials)
    alone = {"a": "cpu", "b": "gpu", "c": "disk"}
    assert "failed" not in call(capsys, stage="plan", hosts=names, active=names, serials=serials, profiles=alone)
    two = {"a": "cpu", "b": "disk", "c": "disk"}
    answer = call(capsys, stage="plan", hosts=names, active=names, serials=serials, profiles=two)
    assert "S1 is the same on b, c" in str(answer["msg"])


def test_a_recorded_host_is_never_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, stage="plan", hosts=["a"], active=["a"], recorded=True)
    assert answer["failed"]
    assert "KVF-HOST-086" in str(answer["msg"])


def test_the_gate_between_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert "failed" not in call(capsys, stage="wave", hosts=["a", "b"], active=["a"], max_fail_percentage=50)
    stopped = call(capsys, stage="wave", hosts=["a", "b"], active=["a"], max_fail_percentage=49)
    assert stopped["failed"]
    assert "KVF-HOST-082" in str(stopped["msg"])


def test_the_default_batches_of_playbook_and_library_are_the_same() -> None:
    playbook = (Path(__file__).parents[2] / "playbooks" / "waves.yml").read_text()
    assert str(list(rollout.DEFAULT_BATCHES)) in playbook


#: the control flow of playbooks/tasks/rollout.yml with the roles replaced by one command that may fail
FLOW = """
- hosts: all
  gather_facts: false
  serial: [1, 3]
  max_fail_percentage: 0
  tasks:
    - block:
        - ansible.builtin.command: "{{ 'false' if inventory_hostname == bad else 'true' }}"
        - ansible.builtin.command: touch {{ folder }}/{{ inventory_hostname }}.proved
      rescue:
        - ansible.builtin.set_fact: {rollout_outcome: restored}
        - ansible.builtin.command: touch {{ folder }}/{{ inventory_hostname }}.restored
    - ansible.builtin.fail: {msg: not proved}
      when: rollout_outcome is defined
"""


@pytest.mark.parametrize(
    ("bad", "left"),
    [
        ("h1", {"h1.restored"}),
        # the batch of the bad host ends as a whole: nobody is cut off in the middle; the next batch never begins
        ("h3", {"h1.proved", "h2.proved", "h3.restored", "h4.proved"}),
    ],
)
def test_a_failing_host_stops_the_rollout_after_its_batch(bad: str, left: set[str], tmp_path: Path) -> None:
    (tmp_path / "flow.yml").write_text(FLOW)
    hosts = "".join(f"h{n} ansible_connection=local ansible_python_interpreter={sys.executable}\n" for n in range(1, 7))
    (tmp_path / "hosts.ini").write_text(hosts)
    playbook = Path(sys.executable).parent / "ansible-playbook"
    done = subprocess.run(
        [playbook, "-i", tmp_path / "hosts.ini", "-e", f"bad={bad} folder={tmp_path}", tmp_path / "flow.yml"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert {path.name for path in tmp_path.glob("h?.*")} == left


def test_hosts_go_in_the_order_of_the_inventory_not_in_that_of_their_planning(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yml"
    hosts.write_text("all: {hosts: {c: {}, a: {}, b: {}}}\n")
    manager = InventoryManager(loader=DataLoader(), sources=[str(hosts)])
    # group_by adds a host when its planning has ended
    manager.add_group("kvfleet_wave_serving")
    for name in ("b", "a", "c"):
        manager.add_host(name, "kvfleet_wave_serving")
    plays = yaml.safe_load((ROOT / "playbooks" / "waves.yml").read_text())
    pattern = next(play["hosts"] for play in plays if "kvfleet_wave_serving" in play["hosts"])
    assert [host.name for host in manager.list_hosts(pattern)] == ["c", "a", "b"]
