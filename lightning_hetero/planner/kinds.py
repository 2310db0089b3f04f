"""Kinds of ranks: those that a plan cannot tell apart, by the seconds of their units and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.simulator.comm import Spread
from lightning_hetero.simulator.shard_step import Passes


@dataclass(frozen=True)
class Kind:
    """One kind of rank.

    Args:
        memory_bytes: that a plan may use.
        plain: seconds of its units.
        again: the same with activation checkpointing.
    """

    memory_bytes: int
    plain: Passes
    again: Passes

    def passes(self, checkpointing: bool) -> Passes:
        """Seconds of its units with or without activation checkpointing."""
        return self.again if checkpointing else self.plain


@dataclass(frozen=True)
class GroupSpec:
    """What the time and the memory of a shard group depend on.

    Args:
        counts: of each kind of rank in it, ``(kind, ranks)`` in the order of kinds.
        spread: ranks per node.
    """

    counts: tuple[tuple[int, int], ...]
    spread: Spread

    @cached_property  # searches ask thousands of times
    def size(self) -> int:
        """Number of ranks."""
        return sum(count for _, count in self.counts)


class Kinds:
    """The kinds of a cluster's ranks, in an order that does not depend on names or on the order of ranks.

    Args:
        cluster: one device per rank.
        costs: of the model.
        timings: of every unit by device type.
    """

    def __init__(self, cluster: Cluster, costs: ModelCosts, timings: Mapping[str, tuple[UnitTiming, ...]]) -> None:
        is_block = np.array([unit.is_block for unit in costs.units])
        plain = {kind: Passes.of(each) for kind, each in timings.items()}
        rows = {kind: (passes.per_sample_s, passes.fixed_s, *_numbers(passes)) for kind, passes in plain.items()}
        keys = [(rows[device.type], device.memory_bytes) for device in cluster.devices]
        order = {key: index for index, key in enumerate(sorted(set(keys)))}
        self.of_rank = tuple(order[key] for key in keys)
        example = {order[key]: device for key, device in zip(keys, cluster.devices, strict=True)}
        self.kinds = tuple(
            Kind(
                example[index].memory_bytes,
                plain[example[index].type],
                plain[example[index].type].checkpointed(is_block),
            )
            for index in range(len(order))
        )
        named: dict[int, list[str]] = {}
        for index, device in zip(self.of_rank, cluster.devices, strict=True):
            named.setdefault(index, [])
            if device.type not in named[index]:
                named[index].append(device.type)
        self.names = tuple("/".join(named[index]) for index in range(len(order)))
        nodes = list(dict.fromkeys(device.node for device in cluster.devices))
        numbers = {node: number for number, node in enumerate(nodes)}
        self.node_of_rank = tuple(numbers[device.node] for device in cluster.devices)

    def spec(self, ranks: Iterable[int]) -> GroupSpec:
        """What matters of a group of these ranks."""
        counts: dict[int, int] = {}
        spread: dict[int, int] = {}
        for rank in ranks:
            kind, node = self.of_rank[rank], self.node_of_rank[rank]
            counts[kind] = counts.get(kind, 0) + 1
            spread[node] = spread.get(node, 0) + 1
        return GroupSpec(tuple(sorted(counts.items())), tuple(sorted(spread.values(), reverse=True)))

    def home(self, group: Sequence[int]) -> int:
        """The node that a group lies on, or a number of its own, below zero, where it spans several."""
        nodes = {self.node_of_rank[rank] for rank in group}
        return nodes.pop() if len(nodes) == 1 else -1 - group[0]


def _numbers(passes: Passes) -> tuple[tuple[float, ...], ...]:
    rows = (
        passes.forward_fixed_s,
        passes.forward_per_sample_s,
        passes.backward_fixed_s,
        passes.backward_per_sample_s,
    )
    return tuple(tuple(row.tolist()) for row in rows)
