"""The cut of a chain of units into stages that is best by a sum over stages, within given borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
# (stage, first units as a column, ends as a row) -> cost of each such stage, non-negative
StageCost = Callable[[int, Longs, Longs], NDArray[Any]]


def least_sum_cut(ends: Sequence[Sequence[int]], cost: StageCost) -> tuple[int, ...]:
    """Units per stage, at least one each, that minimise the sum of ``cost`` over the stages.

    Equal sums go to the cut whose last stage has the fewest units, then the last but one, and so on.

    Args:
        ends: per stage and first unit a the largest b such that the stage may hold units a, ..., b - 1, never
            falling in a; ``units + 1`` numbers each.
        cost: called with a stage, a column of first units and a row of ends.

    Returns:
        The counts, one per stage. Some cut must exist.

    Notes:
        A dynamic program over where stages end. Only ends from which the rest can still be held are looked
        at, so it is cheap where ``ends`` leave little room, as they do at the optimal bottleneck.
    """
    stages, units = len(ends), len(ends[0]) - 1
    earliest = _earliest_ends(ends)
    starts, sums = np.zeros(1, dtype=np.int64), np.zeros(1)
    choices: list[tuple[int, Longs]] = []
    for stage in range(stages):
        reach = np.asarray(ends[stage], dtype=np.int64)[starts]
        stop = min(int(reach.max()), units - (stages - stage - 1))
        positions = np.arange(max(earliest[stage + 1], stage + 1), stop + 1, dtype=np.int64)
        column, row = starts[:, None], positions[None, :]
        total = np.where((column < row) & (row <= reach[:, None]), sums[:, None] + cost(stage, column, row), np.inf)
        # The last of the best first units: this stage gets the fewest units.
        best = len(starts) - 1 - np.argmin(total[::-1], axis=0)
        sums = total[best, np.arange(len(positions))]
        choices.append((int(positions[0]), starts[best]))
        kept = np.isfinite(sums)
        starts, sums = positions[kept], sums[kept]
    counts, end = [], units
    for first, chosen in reversed(choices):
        start = int(chosen[end - first])
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))


def _earliest_ends(ends: Sequence[Sequence[int]]) -> list[int]:
    """Per stage the fewest units that it and those before must have taken for the rest to be held at all."""
    units = len(ends[0]) - 1
    earliest = [units]
    for row in reversed(ends):
        earliest.append(int(np.searchsorted(row, earliest[-1])))
    return list(reversed(earliest))
