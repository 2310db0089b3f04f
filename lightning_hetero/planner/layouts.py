"""Which devices form pipelines together, and in which order.

A *block* is the set of ranks of one pipeline, without their order; a *layout* is a tuple of disjoint blocks. Ranks
in no block stay idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations

Block = tuple[int, ...]
Layout = tuple[Block, ...]

MOST_DEVICES_FOR_ALL_LAYOUTS = 5
"""Up to here every set of blocks is looked at: 202 for 5 different devices, 876 for 6."""

_MOST_ORDERED_FREELY = 4


def all_layouts(names: Sequence[object], most_in_block: int) -> list[Layout]:
    """Every set of disjoint blocks of up to ``most_in_block`` ranks, each once up to ranks of equal name.

    Args:
        names: of each rank; ranks with equal names are interchangeable.
        most_in_block: more stages than the model has units cannot be.
    """
    seen: dict[object, Layout] = {}
    for layout in set_partitions(tuple(range(len(names)))):
        if layout and all(len(block) <= most_in_block for block in layout):
            key = tuple(sorted(tuple(sorted(str(names[rank]) for rank in block)) for block in layout))
            seen.setdefault(key, layout)
    return list(seen.values())


def set_partitions(ranks: Block) -> Iterator[Layout]:
    """Every set of disjoint sets of some of the ranks, the empty one too."""
    if not ranks:
        yield ()
        return
    first, rest = ranks[0], ranks[1:]
    for layout in set_partitions(rest):
        yield layout  # the first rank idle
        yield ((first,), *layout)
        for index, block in enumerate(layout):
            yield (*layout[:index], (first, *block), *layout[index + 1 :])


def orders_of(block: Block, names: Sequence[object], classes: Sequence[object]) -> list[Block]:
    """Orders of a block's ranks that are worth a look: all that differ for a few, runs by class for many.

    Args:
        block: ranks.
        names: of every rank of the cluster; ranks with equal names are interchangeable.
        classes: of every rank; ranks of a class stay together where not every order is looked at.
    """
    if len(block) <= _MOST_ORDERED_FREELY:
        found = {tuple(names[rank] for rank in order): order for order in reversed(list(permutations(block)))}
        return list(found.values())
    counts = Counter(classes[rank] for rank in block)
    runs = [[rank for rank in block if classes[rank] == each] for each in counts]
    if len(runs) > 4:
        return [block, block[::-1]]
    return [tuple(rank for run in order for rank in run) for order in permutations(runs)]
