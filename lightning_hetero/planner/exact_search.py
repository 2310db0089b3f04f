"""Every pipeline design of a small problem, but for those that a bound rules out.

A step of a pipeline with stage seconds t_i (forward and backward) and message seconds c_i cannot take less than

- ``sum(t) + 2 sum(c)``: one micro-batch goes all the way and back;
- for each stage i, ``sum(t_j + 2 c_j for j < i) + m t_i``: the way to it and back, and its work on m micro-batches.

Neither depends on the schedule. Memory can only add to t, by checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, permutations, product

from lightning_hetero.planner.design_search import Found, Space
from lightning_hetero.planner.layouts import Block, Layout, all_layouts
from lightning_hetero.planner.pipeline_design import Design, PipelineDesign, Problem

MOST_DESIGNS = 150_000
"""Designs, without their policies, that are looked at: about a second if every bound is in vain."""

Counts = tuple[int, ...]


def prove_best(problem: Problem, space: Space, found: Found) -> bool:
    """Simulate every design that a bound does not rule out, so that ``found.best`` is the fastest of the space.

    Args:
        problem: what is planned.
        space: what may be chosen.
        found: what was seen so far; the better its best, the less there is to simulate.

    Returns:
        Whether that was done: not with more than ``MOST_DESIGNS`` designs, or with several stages per rank.
    """
    if any(policy.stages_per_rank > 1 for policy in space.policies) or len(problem.kinds) > 6:
        return False
    names = list(zip(problem.kinds, problem.capacity, problem.nodes, strict=True))
    layouts = [
        ordered
        for layout in all_layouts(names, problem.units)
        if space.pipelines in (None, len(layout))
        for ordered in _orders(layout, names)
    ]
    if sum(_size(problem, layout, samples) for samples in space.sizes for layout in layouts) > MOST_DESIGNS:
        return False
    for samples in space.sizes:
        bounds = _Bounds(problem, samples)
        total = problem.total_micro_batches(samples)
        for layout in layouts:
            for split in compositions(total, len(layout)):
                _look(problem, space, found, bounds, layout, split)
    return True


def _look(problem: Problem, space: Space, found: Found, bounds: _Bounds, layout: Layout, split: Sequence[int]) -> None:
    """All cuts of a layout with its micro-batches split."""

    def best_s() -> float:
        return math.inf if found.best is None else found.tried[found.best].step_s

    limit = best_s()
    rows = [
        [counts for counts, bound in bounds.of(block, count) if bound < limit]
        for block, count in zip(layout, split, strict=True)
    ]
    for cuts in product(*rows):
        pipelines = tuple(PipelineDesign(*each) for each in zip(layout, cuts, split, strict=True))
        if any(bounds.one(*each) >= best_s() for each in zip(layout, cuts, split, strict=True)):
            continue
        for policy in space.policies:
            design = Design(bounds.samples, policy, pipelines)
            if design not in found.tried:
                found.take(problem, design)


def compositions(total: int, parts: int) -> Iterator[Counts]:
    """Every way to write ``total`` as an ordered sum of ``parts`` numbers of at least 1."""
    for borders in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *borders), (*borders, total), strict=True))


def _orders(layout: Layout, names: Sequence[object]) -> Iterator[Layout]:
    """The layout with its blocks in every order; of ranks with equal names any one."""
    rows = []
    for block in layout:
        rows.append(list({tuple(names[rank] for rank in order): order for order in permutations(block)}.values()))
    yield from product(*rows)


def _size(problem: Problem, layout: Layout, samples: int) -> int:
    total = problem.total_micro_batches(samples)
    if total < len(layout):
        return 0
    cuts = math.prod(math.comb(problem.units - 1, len(block) - 1) for block in layout)
    return math.comb(total - 1, len(layout) - 1) * cuts


class _Bounds:
    """Seconds that no schedule of one pipeline can be below, for one micro-batch size."""

    def __init__(self, problem: Problem, samples: int) -> None:
        self.problem, self.samples = problem, samples
        self.table = problem.table(samples)
        self._cuts: dict[Block, list[tuple[Counts, float, list[tuple[float, float]]]]] = {}
        self._found: dict[tuple[Block, int], dict[Counts, float]] = {}

    def of(self, block: Block, micro_batches: int) -> list[tuple[Counts, float]]:
        """Every cut with its bound."""
        return list(self._all(block, micro_batches).items())

    def one(self, block: Block, counts: Counts, micro_batches: int) -> float:
        """The bound of one cut."""
        return self._all(block, micro_batches)[counts]

    def _all(self, block: Block, micro_batches: int) -> dict[Counts, float]:
        key = block, micro_batches
        if key not in self._found:
            # A little less, so that rounding does not rule out what is equal.
            self._found[key] = {
                counts: max(way, *(before + micro_batches * own for before, own in stages)) * (1 - 1e-12)
                for counts, way, stages in self._stages(block)
            }
        return self._found[key]

    def _stages(self, block: Block) -> list[tuple[Counts, float, list[tuple[float, float]]]]:
        """Every cut, its way, and per stage the way to it and back and its own seconds."""
        if block not in self._cuts:
            rows = [self.table.both(self.problem.kinds[rank]) for rank in block]
            cuts = []
            for counts in compositions(self.problem.units, len(block)):
                ends = list(accumulate(counts))
                own = [float(row[a, b]) for row, a, b in zip(rows, [0, *ends[:-1]], ends, strict=True)]
                hops = [*self.problem.hops(block, counts, self.samples), 0.0]
                before = [0.0, *accumulate(s + 2 * hop for s, hop in zip(own, hops, strict=True))]
                cuts.append((counts, before[-1], list(zip(before, own, strict=False))))
            self._cuts[block] = cuts
        return self._cuts[block]
