"""Cuts of a chain into stages in a fixed order, where what a stage costs depends on which stage it is.

:func:`~lightning_hetero.planner.partition.partition_units` is exact for costs that belong to units alone. In a
pipeline they also depend on the stage: early stages hold more micro-batches, a stage that does not fit otherwise
runs its forward twice, the last one holds the loss. With a matrix of seconds per stage a dynamic program over the
borders is exact for these too, and cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

# How far above the least bottleneck a stage may be, in exchange for a shorter way through all stages.
_SLACKS = (0.0, 0.02, 0.06, 0.15, 0.35, 0.8, 2.0, np.inf)


@dataclass(frozen=True)
class Cut:
    """A cut and what it costs.

    Args:
        counts: units per stage.
        way_s: seconds of one micro-batch through all stages and back, with its messages.
        slowest_s: of the slowest stage or message, for one micro-batch.
    """

    counts: tuple[int, ...]
    way_s: float
    slowest_s: float

    def seconds(self, micro_batches: int) -> float:
        """About what a step takes: the way once, and the slowest for every further micro-batch."""
        return self.way_s + (micro_batches - 1) * self.slowest_s


def find_cuts(seconds: Sequence[Matrix], hop_s: Sequence[Matrix], slacks: Sequence[float] = _SLACKS) -> list[Cut]:
    """The cut with the least bottleneck, and those with a shorter way under looser bottlenecks.

    Args:
        seconds: per stage, ``[a, b]`` are seconds of units a, ..., b - 1; infinite where that cannot be.
        hop_s: per border between stages, ``[b]`` are seconds of a message (one way) if it lies before unit b.
        slacks: how far above the least bottleneck to look, each a share of it.

    Returns:
        Distinct cuts, that with the least bottleneck first; none if nothing fits.

    Notes:
        Exact for each bottleneck: a minimax, then for each limit the least sum under it, by dynamic programs
        over borders. Time: O(slacks * stages * units^2).
    """
    last = len(seconds) - 1
    both_ways = [stage + 2 * hop_s[s][None, :] if s < last else stage for s, stage in enumerate(seconds)]
    slowest = [np.maximum(stage, hop_s[s][None, :]) if s < last else stage for s, stage in enumerate(seconds)]
    least = _least(slowest)
    if least is None:
        return []
    cuts: dict[tuple[int, ...], Cut] = {}
    for slack in slacks:
        limit = least[0] * (1 + slack) * (1 + 1e-12)
        found = _least(
            [np.where(slow <= limit, way, np.inf) for slow, way in zip(slowest, both_ways, strict=True)], sum_of=True
        )
        if found is None:
            continue
        way, counts = found
        if counts not in cuts:
            ends = np.cumsum(counts).tolist()
            starts = [0, *ends[:-1]]
            cuts[counts] = Cut(counts, way, max(float(m[a, b]) for m, a, b in zip(slowest, starts, ends, strict=True)))
    return list(cuts.values())


def _least(costs: Sequence[Matrix], sum_of: bool = False) -> tuple[float, tuple[int, ...]] | None:
    """The least largest (or summed) cost over all cuts, and such a cut; ``None`` if every one is infinite."""
    best = np.full(costs[0].shape[0], np.inf)
    best[0] = 0.0
    columns = np.arange(len(best))
    chosen = []
    for cost in costs:
        total = best[:, None] + cost if sum_of else np.maximum(best[:, None], cost)
        start = np.argmin(total, axis=0)
        best = total[start, columns]
        chosen.append(start)
    if not np.isfinite(best[-1]):
        return None
    counts, end = [], len(best) - 1
    for start in reversed(chosen):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return float(best[-1]), tuple(reversed(counts))
