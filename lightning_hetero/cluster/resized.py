"""The same cluster with more nodes, with one more, or without one: what a simulation asks about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.cluster.cluster import Cluster
from lightning_hetero.cluster.device import Device
from lightning_hetero.errors import ClusterError


def with_nodes(cluster: Cluster, count: int) -> Cluster:
    """A cluster of so many nodes: the given ones in turn, over and over.

    Args:
        cluster: whose nodes are the pattern; links stay as they are.
        count: of nodes, at least 1; fewer than the pattern has are its first ones.

    Raises:
        ClusterError: for a count below 1.
    """
    if count < 1:
        raise ClusterError(f"{count} nodes cannot be made of cluster {cluster.name!r}: give at least 1")
    pattern = [(node, [cluster.devices[rank] for rank in cluster.ranks_of(node)]) for node in cluster.nodes]
    devices: list[Device] = []
    for index in range(count):
        node, own = pattern[index % len(pattern)]
        turn = index // len(pattern)
        name = node if not turn else f"{node} ({turn + 1})"
        devices += [replace(device, node=name, uuid=device.uuid if not turn else None) for device in own]
    return replace(cluster, devices=tuple(devices))


def with_node(cluster: Cluster, devices: Sequence[Device]) -> Cluster:
    """The cluster with one node more, whose ranks come last.

    Args:
        cluster: as it is.
        devices: of the node, which all name it; its name is new.

    Raises:
        ClusterError: if the name is taken, or the devices name several.
    """
    names = sorted({device.node for device in devices})
    if len(names) != 1 or names[0] in cluster.nodes:
        raise ClusterError(
            f"a node called {', '.join(names) or 'nothing'} cannot be added to cluster {cluster.name!r}: give all its "
            f"devices one name that is none of {', '.join(cluster.nodes)}"
        )
    return replace(cluster, devices=(*cluster.devices, *devices))


def without_node(cluster: Cluster, node: str) -> Cluster:
    """The cluster without one of its nodes; ranks behind it move up.

    Raises:
        ClusterError: if it has no such node, or no other.
    """
    if node not in cluster.nodes:
        raise ClusterError(
            f"cluster {cluster.name!r} has no node {node!r} to be removed: give one of {', '.join(cluster.nodes)}"
        )
    if len(cluster.nodes) == 1:
        raise ClusterError(f"node {node!r} is the only one of cluster {cluster.name!r}: removing it leaves nothing")
    return replace(cluster, devices=tuple(device for device in cluster.devices if device.node != node))
