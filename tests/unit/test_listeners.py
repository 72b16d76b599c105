"""Sockets of the plan against sockets of the host."""

from kvfleet.core.listeners import compare

EVERY = "0.0.0.0"  # noqa: S104 - compared, not bound
UNIT = "kvfleet-vllm@a.service"
PLAN = [{"unit": UNIT, "address": "127.0.0.1", "port": 8000, "purpose": "vLLM API"}]


def socket(port=8000, address="127.0.0.1", unit=UNIT):
    return {"unit": unit, "address": address, "port": port, "pid": 1, "process": "x"}


def codes(planned, found):
    return [finding.code for finding in compare(planned, found)[0]]


def test_as_planned():
    assert compare(PLAN, [socket(), socket(22, EVERY, "ssh.service")]) == ([], [])


def test_a_missing_socket_and_one_of_another_unit_are_told():
    assert codes(PLAN, []) == ["KVF-SVC-010"]
    assert codes(PLAN, [socket(unit="nginx.service")]) == ["KVF-SVC-010"]


def test_a_wider_socket_is_told():
    assert codes(PLAN, [socket(address=EVERY)]) == ["KVF-SVC-011"]


def test_an_unplanned_socket_is_wrong_only_where_others_reach_it():
    findings, inner = compare(PLAN, [socket(), socket(20001), socket(29500, "::")])
    assert [finding.code for finding in findings] == ["KVF-SVC-012"]
    assert inner == [{"unit": UNIT, "address": "127.0.0.1", "port": 20001}]


def test_an_api_that_is_planned_for_every_interface_may_be_there():
    wide = [{**PLAN[0], "address": EVERY}]
    assert codes(wide, [socket(address=EVERY)]) == []


def test_a_planned_range_may_be_used_or_not():
    inner = {"unit": UNIT, "address": EVERY, "port": 28000, "ports": 16, "purpose": "PyTorch's rendezvous"}
    assert codes([*PLAN, inner], [socket()]) == []
    assert codes([*PLAN, inner], [socket(), socket(28000, "::"), socket(28015, EVERY)]) == []
    assert codes([*PLAN, inner], [socket(), socket(28016, EVERY)]) == ["KVF-SVC-012"]
