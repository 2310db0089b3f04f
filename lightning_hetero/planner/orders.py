"""The orders in which devices may take the stages of a pipeline, as moves between counts of used devices.

A state says how many devices of each type the stages so far have used. A level holds the states with the same
number of stages; a move takes one more device of a type. A fixed order is the chain with one state a level::

    fixed order a b a             (0) -a-> (1) -b-> (2) -a-> (3)

    free order of a a b           (0,0) -a-> (1,0) -a-> (2,0)
                                    |b        |b          |b
                                  (0,1) -a-> (1,1) -a-> (2,1)

So 8 + 8 devices of two types have 81 states, where they have 16! / (8! 8!) = 12,870 orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
# Last entry of what is kept per state, so that index -1 finds it.
NOWHERE = -1


@dataclass(frozen=True)
class Move:
    """Take one more device of a type.

    Args:
        kind: index of the device type.
        source: per state of the level, the state of the level before from which this move leads to it;
            ``NOWHERE`` where none does, because the state has used no device of the type.
    """

    kind: int
    source: Ints


@dataclass(frozen=True)
class Level:
    """The states with one number of stages, and the moves that lead to them.

    Args:
        states: how many there are.
        moves: at most one per device type, in the order of the types.
    """

    states: int
    moves: tuple[Move, ...]


def fixed_order(kinds: Sequence[int]) -> list[Level]:
    """The levels of stages 1 to ``len(kinds)`` where stage i is on a device of type ``kinds[i]``."""
    only = np.zeros(1, dtype=np.int32)
    return [Level(1, (Move(kind, only),)) for kind in kinds]


def free_order(counts: Sequence[int]) -> list[Level]:
    """The levels of all orders of ``counts[t]`` devices of each type t; see :func:`moves_of` for the size."""
    sizes = [count + 1 for count in counts]
    states = math.prod(sizes)
    strides = [math.prod(sizes[kind + 1 :]) for kind in range(len(sizes))]
    number = np.arange(states, dtype=np.int32)
    depth = np.zeros(states, dtype=np.int32)
    for stride, size in zip(strides, sizes, strict=True):
        depth += number // stride % size
    by_depth = np.argsort(depth, kind="stable").astype(np.int32)
    borders = np.searchsorted(depth[by_depth], np.arange(sum(counts) + 2))
    # Index of each state within its level.
    place = np.empty(states, dtype=np.int32)
    place[by_depth] = number - borders[depth[by_depth]]
    levels = []
    for first, stop in pairwise(borders[1:]):
        here = by_depth[first:stop]
        moves = []
        for kind, (stride, size) in enumerate(zip(strides, sizes, strict=True)):
            used = here // stride % size > 0
            if used.any():
                # Where the type is unused the index may be negative or wrong, but is not taken.
                moves.append(Move(kind, np.where(used, place[here - stride], NOWHERE).astype(np.int32)))
        levels.append(Level(len(here), tuple(moves)))
    return levels


def moves_of(counts: Sequence[int]) -> int:
    """About how many single moves :func:`free_order` holds: the measure of its time, and 4 bytes each."""
    return len(counts) * math.prod(count + 1 for count in counts)
