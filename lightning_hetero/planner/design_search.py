"""Search over pipeline designs: a closed form says what to simulate, and steps from the best go on."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from lightning_hetero.planner.chain import Chain, Chains
from lightning_hetero.planner.design_moves import neighbours
from lightning_hetero.planner.layouts import (
    MOST_DEVICES_FOR_ALL_LAYOUTS,
    Layout,
    all_layouts,
)
from lightning_hetero.planner.layouts_by_type import promising_layouts
from lightning_hetero.planner.pipeline_design import Design, Outcome, PipelineDesign, Policy, Problem

# Actions that may be simulated, one after the other: about 8 us each.
_FIRST_ACTIONS = 60_000
_MOVE_ACTIONS = 60_000
_FIRST_DESIGNS = 80
_STARTS = 4
_LAYOUTS_BY_TYPE = 24
_MOST_LAYOUTS = 200


@dataclass(frozen=True)
class Space:
    """What a search may choose from.

    Args:
        sizes: micro-batch sizes.
        policies: schedules and warm-ups.
        pipelines: the only number of pipelines, if it is given.
    """

    sizes: tuple[int, ...]
    policies: tuple[Policy, ...]
    pipelines: int | None = None


@dataclass
class Found:
    """What a search has seen.

    Attributes:
        best: the fastest design, ``None`` if nothing fits.
        tried: designs and what they take, in the order in which they were simulated.
        passed_over: designs that were not simulated, with the closed form's seconds.
    """

    best: Design | None = None
    tried: dict[Design, Outcome] = field(default_factory=dict)
    passed_over: list[tuple[float, Design]] = field(default_factory=list)

    def take(self, problem: Problem, design: Design) -> Outcome:
        """Simulate a design and note it; of equally fast ones the first stays the best."""
        outcome = problem.evaluate(design)
        self.tried[design] = outcome
        if math.isfinite(outcome.step_s) and (self.best is None or outcome.step_s < self.tried[self.best].step_s):
            self.best = design
        return outcome


def search_designs(problem: Problem, space: Space) -> Found:
    """The fastest design found.

    The even plan is always among what is simulated, and the design that has the same ranks, order, micro-batches
    and schedule as the best one but as many units on every device, so neither can be faster.

    Args:
        problem: what is planned.
        space: what to choose from.
    """
    found = Found()
    ranked = sorted(_designs(problem, space), key=lambda each: each[0])
    first = problem.simulated_actions
    for place, (seconds, design) in enumerate(ranked):
        if place >= _FIRST_DESIGNS or problem.simulated_actions - first > _FIRST_ACTIONS:
            found.passed_over.append((seconds, design))
        else:
            found.take(problem, design)
    for design in even_designs(problem, space):
        if problem.simulated_actions - first <= 2 * _FIRST_ACTIONS or found.best is None:
            found.take(problem, design)
    _improve(problem, space, found)
    if found.best is not None:
        found.take(problem, evened(problem, found.best))
    return found


def even_designs(problem: Problem, space: Space) -> list[Design]:
    """One pipeline over all devices in their order with equally many units each, for every size and policy."""
    world = len(problem.kinds)
    if world > problem.units or space.pipelines not in (None, 1):
        return []
    designs = []
    for policy in space.policies:
        stages = world * policy.stages_per_rank
        if stages <= problem.units:
            for samples in space.sizes:
                count = problem.total_micro_batches(samples)
                counts = _even(problem.units, stages)
                designs.append(Design(samples, policy, (PipelineDesign(tuple(range(world)), counts, count),)))
    return [design for design in designs if is_allowed(design)]


def evened(problem: Problem, design: Design) -> Design:
    """The same with as many units on every device and as many micro-batches in every pipeline."""
    total = sum(pipeline.micro_batches for pipeline in design.pipelines)
    shares = _even(total, len(design.pipelines))
    pipelines = tuple(
        PipelineDesign(pipeline.ranks, _even(problem.units, len(pipeline.counts)), share)
        for pipeline, share in zip(design.pipelines, shares, strict=True)
    )
    even = Design(design.micro_batch_size, design.policy, pipelines)
    return even if is_allowed(even) else design


def is_allowed(design: Design) -> bool:
    """Whether the schedule can run so many micro-batches."""
    if design.policy.schedule != "interleaved_1f1b":
        return True
    return all(
        pipeline.micro_batches % max(1, pipeline.micro_batches // len(pipeline.ranks)) == 0
        for pipeline in design.pipelines
    )


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (index < total % parts) for index in range(parts))


def _designs(problem: Problem, space: Space) -> Iterator[tuple[float, Design]]:
    """Designs that fit, with the closed form's seconds."""
    chains = Chains(problem)
    if len(problem.kinds) > MOST_DEVICES_FOR_ALL_LAYOUTS:
        yield from _designs_by_type(problem, space, chains)
        return
    seen = set()
    for layout in all_layouts(chains.names, problem.units):
        if space.pipelines in (None, len(layout)):
            for samples, policy in product(space.sizes, space.policies):
                made = _design(problem, chains, layout, samples, policy)
                if made is not None and made[1] not in seen and is_allowed(made[1]):
                    seen.add(made[1])
                    yield made


def _design(
    problem: Problem, chains: Chains, layout: Layout, samples: int, policy: Policy
) -> tuple[float, Design] | None:
    """Split the micro-batches over the blocks of a layout, each with its best order and cut."""
    total = problem.total_micro_batches(samples)
    if total < len(layout):
        return None
    table = problem.table(samples)
    speeds = [sum(1 / float(table.both(problem.kinds[rank])[0, -1]) for rank in block) for block in layout]
    most = total - len(layout) + 1
    # What each will about run, for the memory of what is in flight.
    expected = [max(1, min(most, math.ceil(total * speed / sum(speeds)))) for speed in speeds]
    found: list[Chain] = []
    for block, count in zip(layout, expected, strict=True):
        chain = chains.find(block, samples, policy, count, most)
        if chain is None:
            return None
        found.append(chain)
    split = _split(found, total)
    if split is None:
        return None
    pipelines = []
    for block, chain, count in zip(layout, found, split, strict=True):
        option = chain.options[chain.best[count - 1]]
        pipelines.append(PipelineDesign(tuple(block[place] for place in option.order), option.cut.counts, count))
    seconds = max(float(chain.seconds[count - 1]) for chain, count in zip(found, split, strict=True))
    return seconds + _reduction_s(problem, pipelines), Design(samples, policy, tuple(pipelines))


def _split(chains: Sequence[Chain], total: int) -> list[int] | None:
    """Whole micro-batches per chain that make the last one to end as early as can be, at least one each."""
    kinds: dict[int, list[int]] = {}
    for index, chain in enumerate(chains):
        kinds.setdefault(id(chain), []).append(index)
    rows = [chains[members[0]].seconds for members in kinds.values()]
    numbers = [len(members) for members in kinds.values()]
    low, high = max(float(row[0]) for row in rows), max(float(row[-1]) for row in rows)
    for _ in range(60):
        middle = (low + high) / 2
        held = sum(int(np.searchsorted(row, middle, "right")) * n for row, n in zip(rows, numbers, strict=True))
        low, high = (low, middle) if held >= total else (middle, high)
    split = [0] * len(chains)
    for row, members in zip(rows, kinds.values(), strict=True):
        for index in members:
            split[index] = int(np.searchsorted(row, high, "right"))
    surplus = sum(split) - total
    # What is too much is taken from those that would end last.
    last = [(-float(chains[index].seconds[count - 1]), index) for index, count in enumerate(split) if count > 1]
    heapq.heapify(last)
    while surplus > 0 and last:
        _, index = heapq.heappop(last)
        split[index] -= 1
        surplus -= 1
        if split[index] > 1:
            heapq.heappush(last, (-float(chains[index].seconds[split[index] - 1]), index))
    return split if surplus == 0 else None


def _reduction_s(problem: Problem, pipelines: Sequence[PipelineDesign]) -> float:
    """About what the reduction of gradients takes: that of the largest stage of the first pipeline."""
    if len(pipelines) == 1:
        return 0.0
    units, first = problem.costs.units, pipelines[0]
    largest = max(sum(unit.parameters for unit in units[start:stop]) for start, stop in first.borders)
    nodes: dict[str, int] = {}
    for pipeline in pipelines:
        node = problem.nodes[pipeline.ranks[0]]
        nodes[node] = nodes.get(node, 0) + 1
    spread = tuple(sorted(nodes.values(), reverse=True))
    return problem.network.all_reduce_s(problem.training.state.gradient * largest, spread)


def _designs_by_type(problem: Problem, space: Space, chains: Chains) -> Iterator[tuple[float, Design]]:
    """Designs of many devices from the most promising layouts; other policies come by steps from the best."""
    for policy in space.policies:
        made = 0
        for layout, samples in promising_layouts(problem, space.sizes, space.pipelines, policy.may_recompute)[
            :_MOST_LAYOUTS
        ]:
            found = _design(problem, chains, layout, samples, policy)
            if found is not None and is_allowed(found[1]):
                made += 1
                yield found
            if made >= _LAYOUTS_BY_TYPE:
                break
        if made:
            return


def _improve(problem: Problem, space: Space, found: Found) -> None:
    """From the best few designs go on to better neighbours until there is none."""
    first = problem.simulated_actions
    fitting = sorted(
        (d for d, o in found.tried.items() if math.isfinite(o.step_s)), key=lambda d: found.tried[d].step_s
    )
    for start in fitting[:_STARTS]:
        current = start
        while problem.simulated_actions - first < _MOVE_ACTIONS:
            better, seconds = None, found.tried[current].step_s * (1 - 1e-9)
            for design in neighbours(problem, current, found.tried[current], space.sizes, space.policies):
                if not is_allowed(design) or problem.simulated_actions - first > _MOVE_ACTIONS:
                    continue
                outcome = found.tried.get(design) or found.take(problem, design)
                if outcome.step_s < seconds:
                    better, seconds = design, outcome.step_s
            if better is None:
                break
            current = better
