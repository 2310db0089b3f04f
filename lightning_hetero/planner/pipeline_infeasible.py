"""What to say when no pipeline plan fits: which bytes are missing where, and what would fit, found by planning it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import numpy as np

from lightning_hetero.errors import InfeasibleError
from lightning_hetero.planner.design_search import Found, Space, best_seconds, is_allowed
from lightning_hetero.planner.layouts import orders_of
from lightning_hetero.planner.pipeline_design import Design, Outcome, PipelineDesign, Problem
from lightning_hetero.planner.stage_cut import find_cuts
from lightning_hetero.units import format_bytes, format_seconds

_MOST_RANKS_SHOWN = 16
_MOST_DEVICES_ADDED = 8


def refuse(problem: Problem, space: Space, found: Found) -> NoReturn:
    """Raise the error.

    Raises:
        InfeasibleError: with the design that comes nearest to fitting.
    """
    total = min(problem.total_micro_batches(size) for size in space.sizes)
    if space.pipelines is not None and max(map(problem.total_micro_batches, space.sizes)) < space.pipelines:
        raise InfeasibleError(
            f"{space.pipelines} pipelines cannot share {total} micro-batches: each needs at least one; "
            "use fewer pipelines, smaller micro-batches or a larger global batch"
        )
    nearest = _nearest(problem, space, found)
    lines = ["no pipeline plan fits the memory of the devices"]
    if nearest is not None:
        design, outcome = nearest
        again = "with activation checkpointing" if design.policy.may_recompute else "without activation checkpointing"
        lines[0] += f"; the nearest, with micro-batches of {design.micro_batch_size} and {again}, leaves:"
        for each in outcome.shortages[:_MOST_RANKS_SHOWN]:
            lines.append(
                f"  - rank {each.rank} ({problem.kinds[each.rank]} on {problem.nodes[each.rank]}) needs for "
                f"{_stages_of(problem, design, each.rank)} "
                f"{format_bytes(each.needed_bytes)} and has {format_bytes(each.capacity_bytes)}: "
                f"{format_bytes(each.missing_bytes)} ({each.missing_bytes} bytes) are missing"
            )
        if len(outcome.shortages) > _MOST_RANKS_SHOWN:
            lines.append(f"  - and {len(outcome.shortages) - _MOST_RANKS_SHOWN} more ranks")
    changes = list(_changes(problem, space))
    if changes:
        lines.append("what would fit, by planning it:")
        lines += [f"  - {change}" for change in changes]
    else:
        lines.append(
            f"neither smaller micro-batches, nor checkpointing, nor {_MOST_DEVICES_ADDED} more devices of a type "
            "would fit: use devices with more memory, a lower precision, or an optimizer with less state"
        )
    raise InfeasibleError("\n".join(lines))


def _stages_of(problem: Problem, design: Design, rank: int) -> str:
    """A rank's stages with their units by name."""
    (pipeline,) = (each for each in design.pipelines if rank in each.ranks)
    parts = []
    for stage, (start, stop) in enumerate(pipeline.borders):
        if pipeline.ranks[stage % len(pipeline.ranks)] == rank:
            first, last = problem.costs.units[start].name, problem.costs.units[stop - 1].name
            units = f"unit {first}" if stop - start == 1 else f"units {first} to {last}"
            parts.append(f"stage {stage} ({units})")
    return ", ".join(parts)


def _nearest(problem: Problem, space: Space, found: Found) -> tuple[Design, Outcome] | None:
    """The design whose largest shortage is least: of those tried, and of one pipeline that fills devices evenly."""
    tried = dict(found.tried)
    ranks = sorted(range(len(problem.kinds)), key=lambda rank: (-problem.capacity[rank], rank))
    block = tuple(sorted(ranks[: problem.units]))
    names = list(zip(problem.kinds, problem.capacity, problem.nodes, strict=True))
    samples = space.sizes[0]
    count = problem.total_micro_batches(samples)
    table = problem.table(samples)
    free = [np.zeros(problem.units + 1)] * (len(block) - 1)
    for policy in space.policies:
        if policy.stages_per_rank > 1 or space.pipelines not in (None, 1):
            continue
        held = policy.in_flight(len(block), count)
        for order in orders_of(block, names, problem.kinds):
            # The bottleneck is the largest shortage here; shifted, as costs must not be negative.
            most = max(problem.capacity)
            excess = [
                table.bytes(n, n == count, policy.may_recompute) - problem.capacity[rank] + most
                for rank, n in zip(order, held, strict=True)
            ]
            for cut in find_cuts(excess, free, (0.0,)):
                design = Design(samples, policy, (PipelineDesign(order, cut.counts, count),))
                tried[design] = problem.evaluate(design)
    short = [(design, outcome) for design, outcome in tried.items() if outcome.shortages and is_allowed(design)]
    return min(short, key=lambda each: max(s.missing_bytes for s in each[1].shortages), default=None)


def _changes(problem: Problem, space: Space) -> Iterator[str]:
    """Changes after which a plan fits, one text each."""
    if space.sizes[0] > 1:
        for size in (1 << power for power in reversed(range(space.sizes[0].bit_length()))):
            if size < space.sizes[0]:
                seconds = _seconds(problem, replace(space, sizes=(size,)))
                if seconds is not None:
                    yield f"micro-batches of {size} sample{'s' if size > 1 else ''}: {format_seconds(seconds)} a step"
                    break
    if not all(policy.recompute for policy in space.policies):
        policies = tuple(replace(policy, recompute=True) for policy in space.policies)
        seconds = _seconds(problem, replace(space, policies=policies))
        if seconds is not None:
            yield f"activation checkpointing: {format_seconds(seconds)} a step"
    for kind in problem.cluster.types:
        more = _more_devices(problem, space, kind)
        if more is not None:
            yield more


def _more_devices(problem: Problem, space: Space, kind: str) -> str | None:
    """How many more devices of a type it takes, if a few are enough."""
    for more in range(1, _MOST_DEVICES_ADDED + 1):
        seconds = _seconds(problem.with_more(kind, more), space)
        if seconds is not None:
            devices = "one more device" if more == 1 else f"{more} more devices"
            return f"{devices} of type {kind}: {format_seconds(seconds)} a step"
    return None


def _seconds(problem: Problem, space: Space) -> float | None:
    seconds = best_seconds(problem, space)
    return seconds if math.isfinite(seconds) else None
