"""Links: between two ranks, and the network between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hetero.errors import ClusterError, raise_all


@dataclass(frozen=True)
class Link:
    """What it takes to move bytes from one rank to another: ``latency_s + bytes / bandwidth_bytes_per_s``.

    Args:
        bandwidth_bytes_per_s: bytes per second in one direction, above zero.
        latency_s: seconds until the first byte arrives, zero or more.

    Raises:
        ClusterError: for any other value.
    """

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0):
            problems.append(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s!r}: give a positive number")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            problems.append(f"latency_s is {self.latency_s!r}: give zero or a positive number of seconds")
        raise_all(ClusterError, "link is not valid", problems)

    def seconds(self, size_bytes: float) -> float:
        """Seconds that a message of ``size_bytes`` takes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Fabric(Link):
    """The network between nodes: a link per network card, and what all nodes share.

    Args:
        bandwidth_bytes_per_s: of one network card (NIC), in one direction.
        latency_s: as of any link.
        nics: network cards of a node, which its ranks share; at least 1.
        half_bandwidth_nodes: how many nodes at work leave half of its bandwidth to each of them; with n nodes it is
            ``1 / (1 + n / half_bandwidth_nodes)`` of it. ``None`` where nodes do not hold each other up.

    Raises:
        ClusterError: for any other value.
    """

    nics: int = 1
    half_bandwidth_nodes: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [] if self.nics >= 1 else [f"nics is {self.nics!r}: give at least 1 network card per node"]
        half = self.half_bandwidth_nodes
        if half is not None and not (math.isfinite(half) and half > 0):
            problems.append(f"half_bandwidth_nodes is {half!r}: give a positive number of nodes, or leave it out")
        raise_all(ClusterError, "the network between nodes is not valid", problems)

    def node_bandwidth_bytes_per_s(self, nodes: int) -> float:
        """Bytes per second that leave one node, and as many that enter it, while ``nodes`` nodes are at work."""
        share = 1.0 if self.half_bandwidth_nodes is None else 1 / (1 + nodes / self.half_bandwidth_nodes)
        return self.nics * self.bandwidth_bytes_per_s * share
