"""Seconds of collectives from where their ranks sit: in a pair, in a node, between nodes that share a network.

n ranks on N nodes, S bytes of the *whole* tensor::

    ring gather, scatter   (n - 1) (latency + S / (n bandwidth))
    ring all-reduce        2 (n - 1) (latency + S / (n bandwidth))
    tree all-reduce        2 (ceil(log2 N) latency_between + (c - 1) latency_within) + 2 S / bandwidth

A ring is as slow as its slowest hop. Two ranks of a pair use the link of the pair. c is the most ranks in a node: trees
of NCCL are binary between nodes and chains within; two of them, each of half the data, use both directions. Between
nodes, the cards of a node (``Fabric.nics``) serve all that leaves it: where the ranks of a node are in several equal
collectives at once, as those of hybrid sharding are, each gets its part; and with ``half_bandwidth_nodes`` all nodes of
the cluster share the network.

Libraries: "nccl" (RCCL too) gathers and scatters in rings and takes the faster of ring and tree for an all-reduce; its
ring runs through all ranks, however many nodes there are. "gloo" knows rings only, and its reduce-scatter is an
all-reduce of which each rank keeps its part.

Sources: as in :mod:`~lightning_hetero.simulator.comm`; double binary trees of Sanders, Speck and Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan" (2009), in NCCL from 2.4 on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_hetero.cluster import Cluster, Fabric, Link
from lightning_hetero.errors import HeteroError

LIBRARIES = ("nccl", "gloo")

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


@dataclass(frozen=True)
class Placement:
    """How the ranks of a collective lie.

    Args:
        per_node: ranks on each node that has any, largest first.
        is_pair: whether it is the two ranks of a pair.
        side_by_side: how many equal collectives of a node's ranks share its network cards, 1 or more.
    """

    per_node: tuple[int, ...]
    is_pair: bool = False
    side_by_side: float = 1.0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.per_node)


@dataclass(frozen=True)
class Topology:
    """The links of a cluster and what a library does with them. Links that are not known cost nothing.

    Args:
        cluster: whose.
        library: one of :data:`LIBRARIES`.

    Raises:
        HeteroError: for a library that is not known.
    """

    cluster: Cluster
    library: str = "nccl"

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            raise HeteroError(f"library is {self.library!r}: give one of {', '.join(LIBRARIES)}")

    @cached_property
    def _node_of(self) -> tuple[str, ...]:
        return tuple(device.node for device in self.cluster.devices)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Of each rank, which one of its node it is."""
        seen: Counter[str] = Counter()
        places = []
        for node in self._node_of:
            places.append(seen[node])
            seen[node] += 1
        return tuple(places)

    @cached_property
    def _sizes(self) -> Counter[str]:
        return Counter(self._node_of)

    @cached_property
    def _nodes(self) -> int:
        return len(self._sizes)

    def place(self, ranks: Sequence[int]) -> Placement:
        """How a set of ranks lies, when all ranks of its nodes are in collectives like it."""
        counts = Counter(self._node_of[rank] for rank in ranks)
        is_pair = False
        if len(ranks) == 2 and len(counts) == 1:
            low, high = sorted(self._places[rank] for rank in ranks)
            is_pair = high == low + 1 and low % 2 == 0
        side_by_side = max(self._sizes[node] / count for node, count in counts.items())
        return Placement(tuple(sorted(counts.values(), reverse=True)), is_pair, side_by_side)

    def seconds(self, kind: str, size_bytes: float, placement: Placement) -> float:
        """Seconds of one collective.

        Args:
            kind: "all_gather", "reduce_scatter" or "all_reduce".
            size_bytes: of the whole tensor; nothing is sent for zero.
            placement: of its ranks; one rank alone takes no time.

        Raises:
            HeteroError: for another kind.
        """
        if kind not in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
            raise HeteroError(f"kind is {kind!r}: give all_gather, reduce_scatter or all_reduce")
        if placement.ranks <= 1 or size_bytes <= 0:
            return 0.0
        one_way = (placement.ranks - 1) * self._hop(placement).seconds(size_bytes / placement.ranks)
        if kind == ALL_REDUCE or (kind == REDUCE_SCATTER and self.library == "gloo"):
            return min(2 * one_way, self._tree_s(size_bytes, placement))
        return one_way

    def _tree_s(self, size_bytes: float, placement: Placement) -> float:
        if self.library != "nccl" or len(placement.per_node) == 1:
            return math.inf
        between, within, hop = self._between(placement.side_by_side), self._within(placement), self._hop(placement)
        levels = math.ceil(math.log2(len(placement.per_node)))
        latency_s = levels * between.latency_s + (placement.per_node[0] - 1) * within.latency_s
        return 2 * (latency_s + size_bytes / hop.bandwidth_bytes_per_s)

    def _hop(self, placement: Placement) -> Link:
        """The slowest hop of a ring, in latency and in bandwidth."""
        used = []
        if placement.per_node[0] > 1:
            used.append(self._within(placement))
        if len(placement.per_node) > 1:
            used.append(self._between(placement.side_by_side))
        return Link(min(link.bandwidth_bytes_per_s for link in used), max(link.latency_s for link in used))

    def _within(self, placement: Placement) -> Link:
        if placement.is_pair and self.cluster.within_pair is not None:
            return self.cluster.within_pair
        return self.cluster.within_node or _FREE

    def _between(self, side_by_side: float) -> Link:
        link = self.cluster.between_nodes
        if not isinstance(link, Fabric):
            return link or _FREE
        bandwidth = link.node_bandwidth_bytes_per_s(self._nodes) / side_by_side
        return Link(bandwidth, link.latency_s)


_FREE = Link(1e30, 0.0)
"""a link that is not known"""
