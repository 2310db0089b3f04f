"""Layouts whose pipelines stay within a node: the best where messages between nodes cost more than devices bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from lightning_hetero.plan import even_parts
from lightning_hetero.planner.layouts import Block, Layout

_PIPELINES_OF_A_NODE = (1, 2, 4)
_MOST_SORTS_COMBINED = 4


def node_layouts(nodes: Sequence[str], names: Sequence[object], most_in_block: int) -> list[Layout]:
    """One node alone, and all nodes of some sorts, each node as 1, 2 or 4 pipelines.

    Args:
        nodes: of each rank.
        names: of each rank, the same for devices that are planned as equals. Nodes with the same devices are of one
            sort.
        most_in_block: the most stages of a pipeline.

    Returns:
        Layouts, each once; none where there is only one node.
    """
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    if len(ranks) < 2:
        return []
    sorts: dict[tuple[object, ...], list[list[int]]] = {}
    for members in ranks.values():
        sorts.setdefault(tuple(names[rank] for rank in members), []).append(members)
    chosen = [[members[0]] for members in sorts.values()]
    chosen += [[node for sort in some for node in sort] for some in _some_of(list(sorts.values()))]
    found = [
        tuple(block for node in some for block in _parts(node, number))
        for some in chosen
        for number in _PIPELINES_OF_A_NODE
        if all(len(node) >= number for node in some)
    ]
    return [layout for layout in dict.fromkeys(found) if max(map(len, layout)) <= most_in_block]


def _some_of(sorts: Sequence[list[list[int]]]) -> Iterable[Sequence[list[list[int]]]]:
    """Every set of sorts for few of them, else each sort and all together."""
    if len(sorts) > _MOST_SORTS_COMBINED:
        return [*([sort] for sort in sorts), sorts]
    return [some for count in range(1, len(sorts) + 1) for some in combinations(sorts, count)]


def _parts(ranks: Sequence[int], number: int) -> list[Block]:
    """A node's ranks in so many pipelines, as even as can be."""
    found, start = [], 0
    for count in even_parts(len(ranks), number):
        found.append(tuple(ranks[start : start + count]))
        start += count
    return found
