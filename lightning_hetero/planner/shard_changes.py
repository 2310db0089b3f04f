"""Changes to a cluster that may help a shard plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_hetero.cluster import Cluster, Device, Link


def with_devices(cluster: Cluster, device_type: str, count: int) -> Cluster:
    """The cluster with ``count`` more devices of a type, each as its first one and on that one's node."""
    first = next(device for device in cluster.devices if device.type == device_type)
    added = replace(first, uuid=None)
    at = 1 + max(rank for rank, device in enumerate(cluster.devices) if device.node == first.node)
    return replace(cluster, devices=(*cluster.devices[:at], *(added,) * count, *cluster.devices[at:]))


def with_memory(cluster: Cluster, factor: float, device_type: str | None = None) -> Cluster:
    """The cluster with ``factor`` times the memory on devices of a type, or on all of them."""
    return replace(
        cluster,
        devices=tuple(
            replace(device, memory_bytes=int(device.memory_bytes * factor))
            if device_type in (None, device.type)
            else device
            for device in cluster.devices
        ),
    )


def without_links(cluster: Cluster) -> Cluster:
    """The cluster with communication that takes no time."""
    return replace(cluster, within_node=None, between_nodes=None)


def faster_links(cluster: Cluster, factor: float) -> Iterator[tuple[str, Cluster]]:
    """The cluster with ``factor`` times the bandwidth of one of its links, for each that is known, and its name."""
    if cluster.within_node is not None and len(cluster.nodes) < cluster.world_size:
        yield "within nodes", replace(cluster, within_node=_faster(cluster.within_node, factor))
    if cluster.between_nodes is not None and len(cluster.nodes) > 1:
        yield "between nodes", replace(cluster, between_nodes=_faster(cluster.between_nodes, factor))


def without_ranks(cluster: Cluster, ranks: set[int]) -> Cluster:
    """The cluster without some of its ranks; at least one must stay."""
    kept: list[Device] = [device for rank, device in enumerate(cluster.devices) if rank not in ranks]
    return replace(cluster, devices=tuple(kept))


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
