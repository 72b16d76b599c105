"""Nodes and the server of an instance."""

import pytest

from kvfleet.core.numa import instance_nodes, node_memory_bytes, server_name


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
