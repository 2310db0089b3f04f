"""Reduce gradients between pipelines once their stages have ended.

What a stage has computed is reduced with the owners of the same units in the other pipelines once each owner's last
backward is done. Every rank takes part in one reduction at a time, and all walk through them in one order, so none
waits for ever. A link that is named carries one reduction at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reduction:
    """One reduction of gradients between the owners of the same units.

    Args:
        seconds: that it takes once all owners are there.
        owners: (pipeline, stage) of each.
        links: names of links that it has for itself while it runs, where other reductions need them too.
    """

    seconds: float
    owners: tuple[tuple[int, int], ...]
    links: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class ReductionTimeline:
    """When gradients were reduced.

    Args:
        step_s: when the last reduction and the last action of every pipeline had ended.
        order: indices of the reductions by their start: all ranks walk through them in this order.
        end_s: when each reduction had ended.
    """

    step_s: float
    order: tuple[int, ...]
    end_s: tuple[float, ...] = ()


def simulate_reductions(
    stage_end_s: Sequence[Sequence[float]], reductions: Sequence[Reduction], rows: Sequence[int] | None = None
) -> ReductionTimeline:
    """Reduce gradients between pipelines, one reduction at a time on each rank and each named link.

    The next one is always that whose owners can begin first; of equals the longest, then the first. So reductions
    of different ranks run side by side, and sorted by their start they are an order in which no rank waits for ever.

    Args:
        stage_end_s: per pipeline and stage, when its last action ended.
        reductions: what is to be reduced.
        rows: per pipeline its number of ranks, where a rank has several stages; stage s is on rank s % ranks.
    """
    free: dict[Hashable, float] = {}
    ranks = [len(ends) for ends in stage_end_s] if rows is None else list(rows)
    held: list[list[Hashable]] = [
        [*((pipeline, stage % ranks[pipeline]) for pipeline, stage in each.owners), *(("link", n) for n in each.links)]
        for each in reductions
    ]
    done = [max(stage_end_s[pipeline][stage] for pipeline, stage in each.owners) for each in reductions]
    heap = [(done[index], -each.seconds, index) for index, each in enumerate(reductions)]
    heapq.heapify(heap)
    order, ends = [], [0.0] * len(reductions)
    step = max(max(stages) for stages in stage_end_s)
    while heap:
        begin, _, index = heap[0]
        possible = max(done[index], max(free.get(port, 0.0) for port in held[index]))
        if possible > begin:
            heapq.heapreplace(heap, (possible, -reductions[index].seconds, index))
            continue
        heapq.heappop(heap)
        end = ends[index] = begin + reductions[index].seconds
        free.update(dict.fromkeys(held[index], end))
        step = max(step, end)
        order.append(index)
    return ReductionTimeline(step, tuple(order), tuple(ends))
