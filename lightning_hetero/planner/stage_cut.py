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
_SLACKS = (0.0, 0.1, 0.5, np.inf)


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
    free = np.zeros(seconds[0].shape[0])
    after = [*hop_s, free]
    least = _minimax(seconds, after)
    if least is None:
        return []
    cuts: dict[tuple[int, ...], Cut] = {}
    for slack in slacks:
        counts = _shortest(seconds, after, least * (1 + slack) * (1 + 1e-12))
        if counts is not None and counts not in cuts:
            cuts[counts] = _cut(seconds, after, counts)
    return list(cuts.values())


def _cut(seconds: Sequence[Matrix], after: Sequence[Matrix], counts: tuple[int, ...]) -> Cut:
    way, slowest, start = 0.0, 0.0, 0
    for stage, hop, count in zip(seconds, after, counts, strict=True):
        end = start + count
        way += float(stage[start, end] + 2 * hop[end])
        slowest = max(slowest, float(stage[start, end]), float(hop[end]))
        start = end
    return Cut(counts, way, slowest)


def _minimax(seconds: Sequence[Matrix], after: Sequence[Matrix]) -> float | None:
    """The least bottleneck over all cuts; ``None`` if there is none."""
    best = np.full(seconds[0].shape[0], np.inf)
    best[0] = 0.0
    for stage, hop in zip(seconds, after, strict=True):
        best = np.maximum(np.maximum(best[:, None], stage).min(axis=0), hop)
    return float(best[-1]) if np.isfinite(best[-1]) else None


def _shortest(seconds: Sequence[Matrix], after: Sequence[Matrix], limit: float) -> tuple[int, ...] | None:
    """The cut with the shortest way through all stages, none of which takes more than ``limit``."""
    best = np.full(seconds[0].shape[0], np.inf)
    best[0] = 0.0
    chosen = []
    columns = np.arange(len(best))
    for stage, hop in zip(seconds, after, strict=True):
        total = best[:, None] + np.where(stage <= limit, stage, np.inf)
        start = total.argmin(axis=0)
        best = np.where(hop <= limit, total[start, columns] + 2 * hop, np.inf)
        chosen.append(start)
    if not np.isfinite(best[-1]):
        return None
    counts, end = [], len(best) - 1
    for start in reversed(chosen):
        counts.append(end - int(start[end]))
        end = int(start[end])
    return tuple(reversed(counts))
