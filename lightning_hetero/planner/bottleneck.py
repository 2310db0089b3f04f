"""The least bottleneck that some order and cut of a chain of units reaches, in whole numbers and so exactly.

All costs are Python integers (the caller scales binary fractions to whole numbers), so no sum is rounded and
no comparison is close. The search is parametric: for a limit, either some order and cut keeps every stage
within it or none does, and the answer only changes at the cost of some stage (Megiddo 1979; for chains see
Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.planner.orders import NOWHERE, Ints, Level

Longs = NDArray[np.int64]


@dataclass(frozen=True)
class StageCosts:
    """What a stage of units a, ..., b - 1 costs on one device type: ``prefix[b] - prefix[a] - discount``.

    Args:
        prefix: running sum of the units' costs, ``units + 1`` numbers that never fall.
        discount: what is taken off once per stage; 0 for seconds, the device's capacity for bytes.
        reach: per first unit a the largest b that is allowed whatever it costs (memory), never falling.
    """

    prefix: Sequence[int]
    discount: int
    reach: Sequence[int]

    def within(self, limit: int) -> list[int]:
        """Per first unit a the largest b such that units a, ..., b - 1 cost no more than ``limit``.

        It is a itself where not even unit a does. ``units + 1`` numbers, never falling.
        """
        prefix, room, last = self.prefix, limit + self.discount, 0
        ends = []
        for start, allowed in enumerate(self.reach):
            last = max(start, bisect_right(prefix, prefix[start] + room, max(start, last)) - 1)
            ends.append(min(last, allowed))
        return ends

    def neighbours(self, limit: int, ends: Sequence[int]) -> tuple[int | None, int | None]:
        """The largest stage cost up to ``limit`` and the smallest above it, of stages that are allowed.

        Args:
            limit: as given to :meth:`within`.
            ends: what it returned.
        """
        prefix = self.prefix
        below = [prefix[end] - prefix[start] for start, end in enumerate(ends) if end > start]
        above = [
            prefix[end + 1] - prefix[start]
            for start, (end, allowed) in enumerate(zip(ends, self.reach, strict=True))
            if end < allowed
        ]
        return (
            max(below) - self.discount if below else None,
            min(above) - self.discount if above else None,
        )


@dataclass(frozen=True)
class Optimum:
    """The least limit, and an order that keeps to it.

    Args:
        limit: the least bottleneck.
        kinds: device type of each stage.
        ends: per device type, what :meth:`StageCosts.within` says for that limit.
    """

    limit: int
    kinds: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


def least_bottleneck(costs: Sequence[StageCosts], levels: Sequence[Level]) -> Optimum | None:
    """Minimise the most expensive stage over all cuts into stages of at least one unit, and all orders.

    Args:
        costs: one per device type; all over the same units.
        levels: the orders that are allowed (:mod:`lightning_hetero.planner.orders`), at most as many levels
            as there are units.

    Returns:
        The optimum, or ``None`` where no cut is allowed at any cost.

    Notes:
        The limit is bisected by value; each answer moves the border on to the next cost of any stage, so the
        search ends exactly on one. Time: O(log(costs) * (moves + types * units * log(units))), unless some
        device has nothing small enough to do (see :func:`_order_within`).
    """
    low = _lower_bound(costs, len(levels))
    limit = max(cost.prefix[-1] - cost.discount for cost in costs)
    best: tuple[int, list[list[int]], Callable[[], tuple[int, ...]]] | None = None
    while True:
        ends = [cost.within(limit) for cost in costs]
        order = _order_within(ends, levels)
        borders = [cost.neighbours(limit, end) for cost, end in zip(costs, ends, strict=True)]
        if order is not None:
            best = max(below for below, _ in borders if below is not None), ends, order
        elif best is None:
            return None
        else:
            low = min(above for _, above in borders if above is not None)
        if low >= best[0]:
            return Optimum(best[0], best[2](), tuple(map(tuple, best[1])))
        limit = (low + best[0]) // 2
        if low > 0:
            # The optimum is rarely above twice the bound, while the first limit is many times that.
            limit = min(limit, 2 * low)


def _lower_bound(costs: Sequence[StageCosts], stages: int) -> int:
    """What the most expensive stage costs at least: some unit by itself, or its part of all units."""
    units = len(costs[0].reach) - 1
    discount = max(cost.discount for cost in costs)
    cheapest = [min(cost.prefix[unit + 1] - cost.prefix[unit] for cost in costs) for unit in range(units)]
    return max(max(cheapest), -(-sum(cheapest) // stages)) - discount


def _order_within(ends: Sequence[Sequence[int]], levels: Sequence[Level]) -> Callable[[], tuple[int, ...]] | None:
    """A function that returns an order whose stages all keep within ``ends``; ``None`` if there is none.

    Three questions, from quick to thorough. How far do the devices come if they may stay empty? If not to
    the last unit: no. How far, if each takes as many units as it can but at least one? If to the last: yes.
    In between, a device is stuck before a unit that is too large for it while a shorter stage before it
    would have left it a small one; then all positions where stages can end are followed.
    """
    units, stages = len(ends[0]) - 1, len(levels)
    spare = units - stages
    tables = [np.array([*row, NOWHERE]) for row in ends]
    if _furthest(tables, levels, spare, may_be_empty=True)[-1][0] < units:
        return None
    advancing = [np.where(table > np.arange(units + 2), table, NOWHERE) for table in tables]
    reached = _furthest(advancing, levels, spare, may_be_empty=False)
    if reached[-1][0] == units:
        return partial(_order_of_furthest, advancing, levels, reached, spare)
    first = [np.searchsorted(row, np.arange(units + 1)).astype(np.int32) for row in ends]
    positions = _all_positions(first, levels, spare)
    return None if positions is None else partial(_order_of_positions, first, levels, positions, spare)


def _furthest(tables: Sequence[Longs], levels: Sequence[Level], spare: int, *, may_be_empty: bool) -> list[Longs]:
    """Per level and state how many units the stages so far can hold at most, by always taking the most.

    Args:
        tables: per device type the end of its stage by its first unit; the last entry is for ``NOWHERE``.
        levels: the orders.
        spare: units beyond one per stage. After k stages no more than ``spare + k`` units may be taken,
            so that the others get one each, unless stages may be empty.
        may_be_empty: whether stages may be.

    Returns:
        Levels 0, 1, 2, ...; each array has ``NOWHERE`` as an additional last entry.
    """
    reached = [np.array([0, NOWHERE])]
    for stage, level in enumerate(levels, start=1):
        most = np.full(level.states + 1, NOWHERE)
        for move in level.moves:
            np.maximum(most[:-1], tables[move.kind][reached[-1][move.source]], out=most[:-1])
        reached.append(most if may_be_empty else np.minimum(most, spare + stage))
    return reached


def _order_of_furthest(
    tables: Sequence[Longs], levels: Sequence[Level], reached: Sequence[Longs], spare: int
) -> tuple[int, ...]:
    """Walk back from the last state; of several types that lead there the first one."""
    kinds, state = [], 0
    for stage in range(len(levels), 0, -1):
        for move in levels[stage - 1].moves:
            source = move.source[state]
            end = tables[move.kind][reached[stage - 1][source]]
            if min(end, spare + stage) == reached[stage][state]:
                kinds.append(move.kind)
                state = source
                break
    return tuple(reversed(kinds))


def _all_positions(first: Sequence[Ints], levels: Sequence[Level], spare: int) -> list[NDArray[np.uint8]] | None:
    """Per level and state every position where the stages so far can end; ``None`` if never at the last unit.

    After k stages only the ``spare + 1`` positions k, ..., k + spare can lead to the end, so a state is a
    row of that width; eight positions a byte, as every level is kept for the walk back.

    Args:
        first: per device type and end b the smallest a such that its stage may hold units a, ..., b - 1.
        levels: the orders.
        spare: units beyond one per stage.
    """
    # last[state][j]: the last position up to k + j where the first k stages can end. A stage may end in b
    # after one that ended in a if first[b] <= a < b: if and only if ``last`` at b - 1 is at least first[b].
    last = np.array([[0] * (spare + 1), [NOWHERE] * (spare + 1)], dtype=np.int32)
    kept = [np.packbits(np.eye(1, spare + 1, dtype=np.bool_), axis=1)]
    for stage, level in enumerate(levels, start=1):
        positions = np.arange(stage, stage + spare + 1, dtype=np.int32)
        can_end = np.zeros((level.states + 1, spare + 1), dtype=np.bool_)
        for move in level.moves:
            can_end[:-1] |= last[move.source] >= first[move.kind][positions]
        kept.append(np.packbits(can_end, axis=1))
        last = np.where(can_end, positions, np.int32(NOWHERE))
        np.maximum.accumulate(last, axis=1, out=last)
    return kept if last[0, -1] == len(levels) + spare else None


def _order_of_positions(
    first: Sequence[Ints], levels: Sequence[Level], kept: Sequence[NDArray[np.uint8]], spare: int
) -> tuple[int, ...]:
    """Walk back from the last unit; of several types that lead there the first, with its shortest stage."""
    kinds, state, end = [], 0, len(levels) + spare
    for stage in range(len(levels), 0, -1):
        for move in levels[stage - 1].moves:
            source = move.source[state]
            if source == NOWHERE:
                continue
            # Column j of this row is position j + stage - 1.
            row = np.unpackbits(kept[stage - 1][source], count=spare + 1)
            starts = np.flatnonzero(row[: end - stage + 1]) + stage - 1
            if len(starts) and starts[-1] >= first[move.kind][end]:
                kinds.append(move.kind)
                state, end = source, int(starts[-1])
                break
    return tuple(reversed(kinds))
