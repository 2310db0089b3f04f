"""Seconds of collectives over the links of a cluster, from how their ranks lie on nodes.

With n ranks, S bytes of the *whole* tensor, and a link of latency a and bandwidth w::

    point-to-point   a + S / w
    all-gather       (n - 1) (a + S / (n w))           ring: in each of n - 1 steps every rank sends 1/n on
    reduce-scatter   the same, the other way round
    all-reduce       2 (n - 1) (a + S / (n w))         reduce-scatter, then all-gather

A ring is as slow as its slowest hop, and runs through all ranks however many nodes they are on, as those of NCCL, RCCL
and gloo do. What NCCL does faster where it can (trees of an all-reduce between nodes) the event simulation knows
(:mod:`~lightning_hetero.simulator.topology`).

Sources: the ring all-gather and reduce-scatter are those of Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), sections 3 and 4; ring all-reduce of Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). The sums that are computed on the way
take no time here.

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
        sharing: how many ranks of a node share ``between_nodes``. A ring through all of them has it to itself; rings
            side by side, such as those of hybrid sharding, and messages have their part each.
    """

    within_node: Link | None = None
    between_nodes: Link | None = None
    sharing: int = 1

    @classmethod
    def of(cls, cluster: Cluster) -> Network:
        """The links of a cluster; network cards are shared by the ranks of a node."""
        between = cluster.between_nodes
        if not isinstance(between, Fabric):
            return cls(cluster.within_node, between)
        most = max(Counter(device.node for device in cluster.devices).values())
        node = Link(between.node_bandwidth_bytes_per_s(len(cluster.nodes)), between.latency_s)
        return cls(cluster.within_node, node, most)

    def unknown(self, spread: Spread) -> tuple[str, ...]:
        """Names of the links that ranks spread like this use and that are not known: they cost nothing."""
        used = [("within_node", self.within_node, max(spread, default=1) > 1)]
        used.append(("between_nodes", self.between_nodes, len(spread) > 1))
        return tuple(name for name, link, is_used in used if is_used and link is None)

    def point_to_point_s(self, size_bytes: float, same_node: bool) -> float:
        """Seconds of one message of ``size_bytes`` from one rank to another."""
        _check(size_bytes)
        return _seconds(self.within_node, size_bytes) if same_node else self._between_s(size_bytes, 1)

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
        within = _seconds(self.within_node, part_bytes) if max(spread) > 1 else 0.0
        between = self._between_s(part_bytes, max(spread)) if len(spread) > 1 else 0.0
        return (ranks - 1) * max(within, between)

    def _between_s(self, size_bytes: float, ranks: int) -> float:
        """Where the ring, or the message, is of so many of a node's ranks, and others like it are under way."""
        return _seconds(self.between_nodes, size_bytes * max(1.0, self.sharing / ranks))

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
