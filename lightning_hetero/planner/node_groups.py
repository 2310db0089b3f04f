"""One shard group of all ranks, or one for each node: from the links, before anything is measured.

A model has to be sharded before its ranks can be measured, so compute is not known here, and nothing is taken to hide
communication. What a step sends is: with one group, all-gathers and reduce-scatters of every wrapped module over the
slowest links; with a group for each node the same within nodes, and once a step each rank's part of the gradients
between them (DESIGN 5: the crossing). Nodes of unequal size make groups of unequal size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.cluster import Cluster
from lightning_hetero.simulator.comm import Network, spread_of
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.shard_step import crossing_s
from lightning_hetero.units import format_bytes, format_seconds

Groups = tuple[tuple[int, ...], ...]

WORTH_IT = 0.8
"""groups by node must need less than this share of the seconds that one group sends for"""

FOR_STATES = 0.5
"""the most of a device's memory that parameters, gradients and optimizer state may take; activations need the rest"""


@dataclass(frozen=True)
class GroupChoice:
    """Shard groups, and why.

    Args:
        groups: of ranks; each rank is in one.
        reason: in words, with numbers; empty where there was nothing to choose.
    """

    groups: Groups
    reason: str = ""


def groups_by_links(
    cluster: Cluster, parameters: Sequence[int], *, state: StateBytes, reshard_after_forward: bool
) -> GroupChoice:
    """Choose a group for each node where that sends for clearly less time, and each group has memory for the model.

    Args:
        cluster: one device per rank, with its links. Those of an emulated cluster are not emulated, and a link that is
            not known costs nothing: then, and on one node, there is one group.
        parameters: of each module that is gathered at once.
        state: bytes per parameter.
        reshard_after_forward: whether parameters are gathered again for backward.

    Returns:
        The groups, and the reason.
    """
    one: Groups = (tuple(range(cluster.world_size)),)
    by_node: Groups = tuple(cluster.ranks_of(node) for node in cluster.nodes)
    if len(by_node) == 1 or cluster.emulate or cluster.between_nodes is None:
        return GroupChoice(one)
    network = Network.of(cluster)
    gathers = 2 if reshard_after_forward else 1

    def sends_s(group: tuple[int, ...]) -> float:
        spread = spread_of(cluster, group)
        gathered = sum(network.all_gather_s(count * state.gathered, spread) for count in parameters)
        return gathers * gathered + sum(network.reduce_scatter_s(count * state.reduced, spread) for count in parameters)

    together_s = sends_s(one[0])
    sizes = {len(group) for group in by_node}
    apart_s = max(map(sends_s, by_node))
    apart_s += crossing_s(sum(parameters), state, network, sizes, (1,) * len(by_node))
    compared = f"a step sends for {format_seconds(apart_s)} with a group for each node, {format_seconds(together_s)} "
    compared += "with one of all ranks, were nothing hidden"
    if apart_s >= WORTH_IT * together_s:
        return GroupChoice(one, f"one shard group: {compared}")
    states = sum(parameters) * (state.parameter + state.gradient + state.optimizer)
    for node, group in zip(cluster.nodes, by_node, strict=True):
        least = min(cluster.devices[rank].memory_bytes for rank in group)
        if states / len(group) > FOR_STATES * least:
            needed = format_bytes(int(states / len(group)))
            return GroupChoice(
                one,
                f"one shard group, though {compared}: the model's states would take {needed} of a device of node "
                f"{node!r}, more than half of its {format_bytes(least)}",
            )
    return GroupChoice(by_node, f"a shard group for each node: {compared}")
