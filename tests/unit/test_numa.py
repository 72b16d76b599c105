"""CPU lists and the server of an instance."""

import pytest

from kvfleet.core.numa import instance_nodes, node_memory_bytes, parse_cpu_list, server_name


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", [0, 1, 2, 3, 8]), ("5\n", [5]), ("", []), ("0-0", [0])])
def test_cpu_lists(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["3-1", "a", "1-"])
def test_bad_cpu_lists(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the text is for programmers
        parse_cpu_list(text)


def nodes(*numbers):
    return {"numa": [{"node": number, "memory_bytes": 10 + number} for number in numbers]}


@pytest.mark.parametrize(
    ("host", "gpus", "expected", "name"),
    [
        (nodes(0, 1), [{"numa_node": 1}], [1], "1"),
        (nodes(0, 1), [{"numa_node": 0}, {"numa_node": 1}], [0, 1], "all"),
        (nodes(0), [{"numa_node": None}], [0], "0"),
        (nodes(0), [{"numa_node": -1}], [0], "0"),
        (nodes(0, 1), [{"numa_node": None}], [], "all"),
        (nodes(0), [], [0], "0"),
        (nodes(0, 1), [], [0, 1], "all"),
        ({}, [{"numa_node": None}], [], "all"),
    ],
)
def test_nodes_and_server(host, gpus, expected, name):
    assert instance_nodes(host, gpus) == expected
    assert server_name(expected) == name


def test_memory_by_node():
    assert node_memory_bytes(nodes(0, 3)) == {0: 10, 3: 13}
