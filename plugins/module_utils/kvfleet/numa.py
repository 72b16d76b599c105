"""NUMA: which nodes an instance uses, and which LMCache server it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Name of the server for instances that span nodes, or for hosts without NUMA information.
SPANNING_SERVER = "all"


def instance_nodes(host: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> list[int]:
    """NUMA nodes that an instance with these GPUs uses; empty when the host does not tell.

    A CPU instance uses every node. A GPU without a node (-1 in sysfs, common in virtual machines) belongs to the only
    node of a one-node host and to no known node of a larger one.
    """
    nodes = sorted(int(node["node"]) for node in host.get("numa") or [])
    if not gpus:
        return nodes
    found: set[int] = set()
    for gpu in gpus:
        node: int | None = gpu.get("numa_node")
        if node is None or node < 0:
            if len(nodes) != 1:
                return []
            node = nodes[0]
        found.add(int(node))
    return sorted(found)


def server_name(nodes: Sequence[int]) -> str:
    """Name of the LMCache server for an instance on these nodes: the node's number, or ``all``."""
    return str(nodes[0]) if len(nodes) == 1 else SPANNING_SERVER


def node_memory_bytes(host: Mapping[str, Any]) -> dict[int, int]:
    """RAM of each NUMA node in bytes."""
    return {int(node["node"]): int(node.get("memory_bytes") or 0) for node in host.get("numa") or []}
