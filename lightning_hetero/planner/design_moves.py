"""Small changes of a pipeline design: what a search tries from a good design on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_hetero.planner.pipeline_design import Design, Outcome, PipelineDesign, Policy, Problem

# Up to here every pair of stages is tried; with more only the busiest stage with every other.
_MOST_PAIRED = 6


def neighbours(
    problem: Problem, design: Design, outcome: Outcome, sizes: Sequence[int], policies: Sequence[Policy]
) -> Iterator[Design]:
    """Designs that differ from ``design`` in one thing.

    A unit moved from one stage to another (with those between shifted), two devices swapped, a micro-batch moved
    from one pipeline to another, another schedule or warm-up, the next smaller or larger micro-batch size. Pipelines
    that are alike change together, except in their micro-batches.

    Args:
        problem: what is planned.
        design: where to start; it fits.
        outcome: of it.
        sizes: micro-batch sizes, ascending.
        policies: schedules and warm-ups.
    """
    for policy in policies:
        if policy != design.policy and policy.stages_per_rank == design.policy.stages_per_rank:
            yield replace(design, policy=policy)
    yield from _moved_micro_batches(problem, design)
    for members in _alike(problem, design):
        pipeline = design.pipelines[members[0]]
        for changed in (*_moved_units(pipeline, outcome), *_swapped(problem, pipeline)):
            yield _with(design, members, pipeline, changed)
    yield from _resized(problem, design, sizes)


def _alike(problem: Problem, design: Design) -> list[list[int]]:
    """Indices of pipelines with the same types of devices and the same cut."""
    found: dict[object, list[int]] = {}
    for index, pipeline in enumerate(design.pipelines):
        key = pipeline.counts, tuple(problem.kinds[rank] for rank in pipeline.ranks)
        found.setdefault(key, []).append(index)
    return list(found.values())


def _with(
    design: Design, members: Sequence[int], pipeline: PipelineDesign, change: tuple[tuple[int, ...], tuple[int, ...]]
) -> Design:
    """The design with a new order (as positions) and new counts in all pipelines that are like ``pipeline``."""
    places, counts = change
    pipelines = list(design.pipelines)
    for index in members:
        ranks = pipelines[index].ranks
        new = tuple(ranks[place] for place in places)
        pipelines[index] = PipelineDesign(new, counts, pipelines[index].micro_batches)
    return replace(design, pipelines=tuple(pipelines))


def _moved_units(pipeline: PipelineDesign, outcome: Outcome) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    stages, same = len(pipeline.counts), tuple(range(len(pipeline.ranks)))
    busiest = max(range(stages), key=lambda s: outcome.busy_s[pipeline.ranks[s % len(same)]])
    for one in range(stages) if stages <= _MOST_PAIRED else (busiest,):
        for other in range(stages):
            if one == other:
                continue
            for source, target in ((one, other), (other, one))[: 1 if stages <= _MOST_PAIRED else 2]:
                if pipeline.counts[source] > 1:
                    counts = list(pipeline.counts)
                    counts[source] -= 1
                    counts[target] += 1
                    yield same, tuple(counts)


def _swapped(problem: Problem, pipeline: PipelineDesign) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Swap devices of different types, with their units and without; neighbours only in long pipelines."""
    ranks = pipeline.ranks
    one_each = len(ranks) == len(pipeline.counts)
    for one in range(len(ranks)):
        for other in range(one + 1, len(ranks) if len(ranks) <= _MOST_PAIRED else min(one + 2, len(ranks))):
            alike = problem.kinds[ranks[one]] == problem.kinds[ranks[other]]
            if alike and problem.nodes[ranks[one]] == problem.nodes[ranks[other]]:
                continue
            places = list(range(len(ranks)))
            places[one], places[other] = other, one
            yield tuple(places), pipeline.counts
            if one_each and pipeline.counts[one] != pipeline.counts[other]:
                yield tuple(places), tuple(pipeline.counts[place] for place in places)


def _moved_micro_batches(problem: Problem, design: Design) -> Iterator[Design]:
    """Move one micro-batch between pipelines that are not alike."""
    first: dict[object, int] = {}
    for index, pipeline in enumerate(design.pipelines):
        key = pipeline.counts, pipeline.micro_batches, tuple(problem.kinds[rank] for rank in pipeline.ranks)
        first.setdefault(key, index)
    places = list(first.values())
    for source in places if len(places) <= _MOST_PAIRED else ():
        for target in places:
            if source != target and design.pipelines[source].micro_batches > 1:
                pipelines = list(design.pipelines)
                for index, change in ((source, -1), (target, 1)):
                    count = pipelines[index].micro_batches + change
                    pipelines[index] = replace(pipelines[index], micro_batches=count)
                yield replace(design, pipelines=tuple(pipelines))


def _resized(problem: Problem, design: Design, sizes: Sequence[int]) -> Iterator[Design]:
    """The next smaller and larger micro-batch, with the micro-batches split in proportion."""
    place = sizes.index(design.micro_batch_size)
    before = [pipeline.micro_batches for pipeline in design.pipelines]
    for size in sizes[max(0, place - 1) : place + 2]:
        total = problem.total_micro_batches(size)
        if size == design.micro_batch_size or total < len(before):
            continue
        split = [max(1, total * count // sum(before)) for count in before]
        # The largest remainders get what is left; where too much was given, the largest give it back.
        by_remainder = sorted(range(len(split)), key=lambda i: (-(total * before[i] % sum(before)), i))
        turn = 0
        while sum(split) != total:
            if sum(split) < total:
                split[by_remainder[turn % len(split)]] += 1
            else:
                split[max(range(len(split)), key=lambda i: (split[i], -i))] -= 1
            turn += 1
        pipelines = tuple(
            replace(pipeline, micro_batches=count) for pipeline, count in zip(design.pipelines, split, strict=True)
        )
        yield replace(design, micro_batch_size=size, pipelines=pipelines)
