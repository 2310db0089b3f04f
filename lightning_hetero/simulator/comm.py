"""Seconds of collectives over the links of a cluster, from how their ranks lie on nodes.

With n ranks, S bytes of the *whole* tensor, and a link of latency a and bandwidth w::

    point-to-point   a + S / w
    all-gather       (n - 1) (a + S / (n w))           ring: in each of n - 1 steps every rank sends 1/n on
    reduce-scatter   the same, the other way round
    all-reduce       2 (n - 1) (a + S / (n w))         reduce-scatter, then all-gather

A ring is as slow as its slowest hop. Where several ranks share a node the two-level form may be faster: N nodes
with c ranks each gather between nodes first, c rings side by side, then within each node::

    all-gather       (N - 1) (a_between + S / (N c w_between)) + (c - 1) (a_within + S / (c w_within))

The faster of the two is taken, as a communication library does. With unequal numbers of ranks per node, as many
rings run between nodes as the smallest node has ranks, each carries its part of the largest node, and the largest
node is last to finish within.

Sources: the ring all-gather and reduce-scatter are those of Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), sections 3 and 4; ring all-reduce of Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); the two levels of Jia et al., "Highly
Scalable Deep Learning Training System with Mixed-Precision" (2018), section 4.3. The sums that are computed on the
way take no time here, and rings that run at once do not slow each other down.

A link that the cluster file does not give is unknown: it costs nothing, and :meth:`Network.unknown` says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_hetero.cluster import Cluster, Fabric, Link
from lightning_hetero.errors import HeteroError, raise_all

Spread = tuple[int, ...]
"""How many ranks of a set each node holds, largest first; nodes without any are left out."""


@dataclass(frozen=True)
class Network:
    """The links that collectives run over.

    Args:
        within_node: between two ranks of one node; ``None`` where it is not known, which costs nothing.
        between_nodes: between ranks of different nodes; likewise.
    """

    within_node: Link | None = None
    between_nodes: Link | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Network:
        """The links of a cluster; of network cards that the ranks of a node share, each has its part."""
        between = cluster.between_nodes
        if isinstance(between, Fabric):
            most = max(Counter(device.node for device in cluster.devices).values())
            node = between.node_bandwidth_bytes_per_s(len(cluster.nodes))
            between = Link(node / most, between.latency_s)
        return cls(cluster.within_node, between)

    def unknown(self, spread: Spread) -> tuple[str, ...]:
        """Names of the links that ranks spread like this use and that are not known: they cost nothing."""
        used = [("within_node", self.within_node, max(spread, default=1) > 1)]
        used.append(("between_nodes", self.between_nodes, len(spread) > 1))
        return tuple(name for name, link, is_used in used if is_used and link is None)

    def point_to_point_s(self, size_bytes: float, same_node: bool) -> float:
        """Seconds of one message of ``size_bytes`` from one rank to another."""
        _check(size_bytes)
        return _seconds(self.within_node if same_node else self.between_nodes, size_bytes)

    def all_gather_s(self, size_bytes: float, spread: Spread) -> float:
        """Seconds until every rank has the whole tensor of which each holds an equal part.

        Args:
            size_bytes: bytes of the whole tensor, zero or more. Nothing is sent for zero.
            spread: ranks per node (:func:`spread_of`); one rank alone takes no time.

        Raises:
            HeteroError: if ``size_bytes`` is negative or not finite, or ``spread`` holds a number below 1.
        """
        _check(size_bytes, spread)
        ranks = sum(spread)
        if ranks <= 1 or size_bytes == 0:
            return 0.0
        part_bytes = size_bytes / ranks
        within = _seconds(self.within_node, part_bytes) if spread[0] > 1 else 0.0
        if len(spread) == 1:
            return (ranks - 1) * within
        flat = (ranks - 1) * max(within, _seconds(self.between_nodes, part_bytes))
        most, rings = max(spread), min(spread)
        between = (len(spread) - 1) * _seconds(self.between_nodes, part_bytes * most / rings)
        inside = (most - 1) * _seconds(self.within_node, size_bytes / most) if most > 1 else 0.0
        return min(flat, between + inside)

    def reduce_scatter_s(self, size_bytes: float, spread: Spread) -> float:
        """Seconds until every rank has its part of the sum; arguments and errors as :meth:`all_gather_s`.

        ``size_bytes`` is what every rank puts in. It is the all-gather run backwards, and takes as long.
        """
        return self.all_gather_s(size_bytes, spread)

    def all_reduce_s(self, size_bytes: float, spread: Spread) -> float:
        """Seconds until every rank has the whole sum; arguments and errors as :meth:`all_gather_s`."""
        return self.reduce_scatter_s(size_bytes, spread) + self.all_gather_s(size_bytes, spread)


def spread_of(cluster: Cluster, ranks: Iterable[int]) -> Spread:
    """How a set of ranks lies on the nodes of a cluster.

    Args:
        cluster: says which node each rank sits in.
        ranks: of the set, each once.

    Returns:
        Ranks per node, largest first.

    Raises:
        HeteroError: listing ranks that the cluster does not have, or that are named twice.
    """
    ranks = list(ranks)
    problems = [
        f"rank {rank} is not one of the {cluster.world_size} of cluster {cluster.name!r}: leave it out"
        for rank in ranks
        if not 0 <= rank < cluster.world_size
    ]
    problems += [
        f"rank {rank} is named {count} times: name it once" for rank, count in Counter(ranks).items() if count > 1
    ]
    raise_all(HeteroError, "the ranks of a collective are not valid", problems)
    return tuple(sorted(Counter(cluster.devices[rank].node for rank in ranks).values(), reverse=True))


def _seconds(link: Link | None, size_bytes: float) -> float:
    return 0.0 if link is None else link.seconds(size_bytes)


def _check(size_bytes: float, spread: Spread = ()) -> None:
    problems = []
    if not (math.isfinite(size_bytes) and size_bytes >= 0):
        problems.append(f"size_bytes is {size_bytes!r}: give zero or a positive number of bytes")
    problems += [f"spread holds {count}: give at least 1 rank for each node" for count in spread if count < 1]
    if problems:
        raise_all(HeteroError, "the seconds of a collective cannot be computed", problems)
