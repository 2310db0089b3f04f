"""Search over pipeline designs: a closed form says what to simulate, and steps from the best go on."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np

from lightning_hetero.plan import even_parts
from lightning_hetero.planner.chain import Chain, Chains, Option
from lightning_hetero.planner.design_moves import neighbours
from lightning_hetero.planner.layouts import (
    MOST_DEVICES_FOR_ALL_LAYOUTS,
    Layout,
    all_layouts,
)
from lightning_hetero.planner.layouts_by_node import node_layouts
from lightning_hetero.planner.layouts_by_type import promising_layouts
from lightning_hetero.planner.pipeline_design import Design, Outcome, PipelineDesign, Policy, Problem

# Actions that may be simulated, one after the other: about 0.6 us each, and with all around them 1 us.
_FIRST_ACTIONS = 120_000
_MOVE_ACTIONS = 120_000
_FIRST_DESIGNS = 250
_ALTERNATIVES = 24
# A layout whose devices would need so much longer in perfect balance than the best closed form is left out.
_HOPELESS = 1.3
_STARTS = 8
_LAYOUTS_BY_TYPE = 12
# Of the micro-batch sizes every so manieth is tried in pipelines within nodes; others come by steps from the best.
_SIZES_APART = 3
# Up to here single devices are moved between pipelines; with more, only types are.
_MOST_DEVICES_MOVED = 16


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
    chains = Chains(problem)
    ranked = sorted(_designs(problem, space, chains), key=lambda each: each[0])
    first = problem.simulated_actions
    for place, (seconds, design) in enumerate(ranked):
        if place >= _FIRST_DESIGNS or problem.simulated_actions - first > _FIRST_ACTIONS:
            found.passed_over.append((seconds, design))
        else:
            found.take(problem, design)
    for design in even_designs(problem, space):
        if problem.simulated_actions - first <= 2 * _FIRST_ACTIONS or found.best is None:
            found.take(problem, design)
    _improve(problem, space, chains, found)
    if found.best is not None:
        found.take(problem, evened(problem, found.best))
    return found


def best_seconds(problem: Problem, space: Space) -> float:
    """Seconds of the fastest design found; infinite if nothing fits."""
    found = search_designs(problem, space)
    return math.inf if found.best is None else found.tried[found.best].step_s


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
                counts = even_parts(problem.units, stages)
                designs.append(Design(samples, policy, (PipelineDesign(tuple(range(world)), counts, count),)))
    return [design for design in designs if is_allowed(design)]


def evened(problem: Problem, design: Design) -> Design:
    """The same with as many units on every device and as many micro-batches in every pipeline."""
    total = sum(pipeline.micro_batches for pipeline in design.pipelines)
    shares = even_parts(total, len(design.pipelines))
    pipelines = tuple(
        PipelineDesign(pipeline.ranks, even_parts(problem.units, len(pipeline.counts)), share)
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


def _designs(problem: Problem, space: Space, chains: Chains) -> list[tuple[float, Design]]:
    """Designs that fit, each once, with the closed form's seconds."""
    if len(problem.kinds) > MOST_DEVICES_FOR_ALL_LAYOUTS:
        found = [*_designs_by_type(problem, space, chains), *_designs_within_nodes(problem, space, chains)]
        found = found or list(_largest_first(problem, space, chains))
    else:
        found = list(_designs_of_all_layouts(problem, space, chains))
    least: dict[Design, float] = {}
    for seconds, design in found:
        if is_allowed(design):
            least[design] = min(seconds, least.get(design, math.inf))
    return [(seconds, design) for design, seconds in least.items()]


def _designs_of_all_layouts(problem: Problem, space: Space, chains: Chains) -> Iterator[tuple[float, Design]]:
    """Every layout, with the alternatives of each."""
    layouts = [layout for layout in all_layouts(chains.names, problem.units) if space.pipelines in (None, len(layout))]
    # Many devices first: they are mostly the fastest, and what cannot come near them need not be cut.
    layouts.sort(key=lambda layout: -sum(map(len, layout)))
    best = math.inf
    for layout, samples in product(layouts, space.sizes):
        total = problem.total_micro_batches(samples)
        speed = sum(problem.speed(rank, samples) for block in layout for rank in block)
        if total >= len(layout) and total / speed <= _HOPELESS * best:
            for policy in space.policies:
                for made in _of_layout(problem, chains, layout, samples, policy, _ALTERNATIVES):
                    best = min(best, made[0])
                    yield made


def _of_layout(
    problem: Problem, chains: Chains, layout: Layout, samples: int, policy: Policy, alternatives: int
) -> Iterator[tuple[float, Design]]:
    """Split the micro-batches over the blocks of a layout, each with its best order and cut.

    Then come designs in which one block has another order or cut, as many as ``alternatives`` over all blocks.
    """
    total = problem.total_micro_batches(samples)
    if total < len(layout):
        return
    speeds = [sum(problem.speed(rank, samples) for rank in block) for block in layout]
    most = total - len(layout) + 1
    found: list[Chain] = []
    for block, speed in zip(layout, speeds, strict=True):
        # What it will about run, for the memory of what is in flight.
        expected = max(1, min(most, math.ceil(total * speed / sum(speeds))))
        chain = chains.find(block, samples, policy, expected, most)
        if chain is None:
            return
        found.append(chain)
    split = _split(found, total)
    if split is None:
        return
    chosen = [chain.options[chain.best[count - 1]] for chain, count in zip(found, split, strict=True)]
    yield _made(problem, layout, samples, policy, split, chosen)
    alike: dict[int, list[int]] = {}
    for index, chain in enumerate(found):
        alike.setdefault(id(chain), []).append(index)
    each = alternatives // len(alike)
    for members in alike.values():
        # Pipelines that are alike change together too: equal cuts let the same ranks reduce all their gradients.
        for option in found[members[0]].alternatives(max(split[index] for index in members), each):
            for changing in {tuple(members), (members[0],)}:
                changed = [option if index in changing else other for index, other in enumerate(chosen)]
                yield _made(problem, layout, samples, policy, split, changed)


def _made(
    problem: Problem, layout: Layout, samples: int, policy: Policy, split: Sequence[int], options: Sequence[Option]
) -> tuple[float, Design]:
    pipelines = tuple(
        PipelineDesign(tuple(block[place] for place in option.order), option.cut.counts, count)
        for block, option, count in zip(layout, options, split, strict=True)
    )
    seconds = max(option.cut.seconds(count) for option, count in zip(options, split, strict=True))
    return seconds + _reduction_s(problem, pipelines), Design(samples, policy, pipelines)


def _split(chains: Sequence[Chain], total: int) -> list[int] | None:
    """Whole micro-batches per chain that make the last one to end as early as can be, at least one each."""
    if len(chains) == 1:
        return [total]
    if total * len(chains) <= 400:
        return _split_one_by_one(chains, total)
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


def _split_one_by_one(chains: Sequence[Chain], total: int) -> list[int]:
    """The same for few: always the micro-batch that would end first."""
    split = [1] * len(chains)
    rows = [chain.seconds.tolist() for chain in chains]
    for _ in range(total - len(chains)):
        index = min(range(len(split)), key=lambda i: (rows[i][split[i]], i))
        split[index] += 1
    return split


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
        for layout, samples in promising_layouts(problem, space.sizes, space.pipelines, policy.may_recompute):
            found = list(_of_layout(problem, chains, layout, samples, policy, 0))
            made += bool(found)
            yield from found
            if made >= _LAYOUTS_BY_TYPE:
                break
        if made:
            return


def _designs_within_nodes(problem: Problem, space: Space, chains: Chains) -> Iterator[tuple[float, Design]]:
    """Designs that send nothing from node to node but gradients."""
    classes = list(zip(problem.kinds, problem.capacity, strict=True))
    layouts = [
        layout
        for layout in node_layouts(problem.nodes, classes, problem.units)
        if space.pipelines in (None, len(layout))
    ]
    for layout, samples in product(layouts, space.sizes[::_SIZES_APART]):
        for policy in space.policies:
            found = list(_of_layout(problem, chains, layout, samples, policy, 0))
            yield from found
            if found:
                break


def _largest_first(problem: Problem, space: Space, chains: Chains) -> Iterator[tuple[float, Design]]:
    """One pipeline of the devices with most memory, 1, 2, 3, ... of them: where nothing else fits, this may."""
    ranks = sorted(range(len(problem.kinds)), key=lambda rank: (-problem.capacity[rank], rank))
    for count in range(1, min(len(ranks), problem.units) + 1) if space.pipelines in (None, 1) else ():
        for policy in space.policies:
            found = list(_of_layout(problem, chains, (tuple(sorted(ranks[:count])),), space.sizes[0], policy, 0))
            yield from found
            if found:
                break


def _improve(problem: Problem, space: Space, chains: Chains, found: Found) -> None:
    """From the best few designs go on to better neighbours until there is none."""
    first = problem.simulated_actions
    for start in _starts(problem, found):
        current = start
        while problem.simulated_actions - first < _MOVE_ACTIONS:
            step = _best_of(problem, found, current, _neighbours(problem, space, current, found), first)
            if step is None and len(problem.kinds) <= _MOST_DEVICES_MOVED:
                step = _best_of(problem, found, current, _reshaped(problem, space, chains, current), first)
            if step is None:
                break
            current = step


def _neighbours(problem: Problem, space: Space, design: Design, found: Found) -> Iterator[Design]:
    return neighbours(problem, design, found.tried[design], space.sizes, space.policies)


def _best_of(problem: Problem, found: Found, current: Design, designs: Iterable[Design], first: int) -> Design | None:
    """The fastest of the designs if it is faster than the current one."""
    better, seconds = None, found.tried[current].step_s * (1 - 1e-9)
    for design in designs:
        if not is_allowed(design) or problem.simulated_actions - first > _MOVE_ACTIONS:
            continue
        outcome = found.tried.get(design) or found.take(problem, design)
        if outcome.step_s < seconds:
            better, seconds = design, outcome.step_s
    return better


def _reshaped(problem: Problem, space: Space, chains: Chains, design: Design) -> Iterator[Design]:
    """Designs with one device elsewhere: idle, in another pipeline, or one by itself; or two pipelines made one."""
    blocks = [tuple(sorted(pipeline.ranks)) for pipeline in design.pipelines]
    used = {rank for block in blocks for rank in block}
    idle = [rank for rank in range(len(problem.kinds)) if rank not in used]
    layouts: dict[object, Layout] = {}
    for place, block in enumerate((*blocks, tuple(idle))):
        for rank in {chains.names[rank]: rank for rank in reversed(block)}.values():
            rest = [tuple(each for each in other if each != rank) for other in blocks]
            targets = [[*rest], [*rest, (rank,)]]
            for other in range(len(rest)):
                if other != place:
                    joined = tuple(sorted((*rest[other], rank)))
                    targets.append([*rest[:other], joined, *rest[other + 1 :]])
            for target in targets:
                layout = tuple(each for each in target if each)
                layouts.setdefault(frozenset(layout), layout)
    for one, other in combinations(range(len(blocks)), 2):
        merged = tuple(sorted(blocks[one] + blocks[other]))
        left = [block for place, block in enumerate(blocks) if place not in (one, other)]
        layouts.setdefault(frozenset((merged, *left)), (merged, *left))
    for layout in layouts.values():
        if layout and space.pipelines in (None, len(layout)) and set(layout) != set(blocks):
            for _, made in _of_layout(problem, chains, layout, design.micro_batch_size, design.policy, 2):
                yield made


def _starts(problem: Problem, found: Found) -> list[Design]:
    """The best designs seen, one for each way to form pipelines and each micro-batch size."""
    first: dict[object, Design] = {}
    for design, _ in sorted(found.tried.items(), key=lambda each: each[1].step_s):
        if math.isfinite(found.tried[design].step_s):
            kinds = sorted(tuple(sorted(problem.kinds[rank] for rank in each.ranks)) for each in design.pipelines)
            first.setdefault((tuple(kinds), design.micro_batch_size), design)
    return list(first.values())[:_STARTS]
