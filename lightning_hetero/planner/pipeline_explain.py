"""Why a pipeline plan is as it is: what else was tried, what limits it, and what would help."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_hetero.costs import UnitTiming
from lightning_hetero.planner.design_search import Found, Space, best_seconds
from lightning_hetero.planner.pipeline_design import Design, Outcome, PipelineDesign, Problem
from lightning_hetero.units import format_bytes, format_seconds

_MOST_CANDIDATES = 40
_COUNTS = 0.05
_FREE_LINKS = "links that cost nothing"
_ENDLESS_MEMORY = "devices with endless memory"


@dataclass(frozen=True)
class Candidate:
    """Something that was tried.

    Args:
        what: the design in words.
        step_s: predicted seconds of a step; ``None`` where it was not simulated or does not fit.
        reason: why it was taken or rejected.
    """

    what: str
    step_s: float | None
    reason: str


@dataclass(frozen=True)
class Binding:
    """What limits a plan.

    Args:
        rank: that sets the pace.
        what: "link" or "memory" where without its limit the step would be a twentieth shorter or more (the one of
            the two that costs more), else "compute".
        gains: by change, by how much the step would be shorter (0.1: a tenth shorter).
        advice: the change that would help most, in words.
        planned_anew: whether other designs were looked at with each change. A design alone does not tell what binds:
            another one may be out of its reach for lack of memory.
    """

    rank: int
    what: str
    gains: Mapping[str, float]
    advice: str
    planned_anew: bool = True


def binding_of(problem: Problem, found: Found, space: Space | None) -> Binding:
    """What limits the best design: one thing is changed at a time.

    Args:
        problem: what is planned.
        found: what a search has seen.
        space: what may be chosen when planning anew with each change; ``None`` to look at the same design only,
            which is quick but does not see what other designs a change would allow.
    """
    design = found.best
    assert design is not None, "there is nothing to explain where nothing fits"
    outcome = found.tried[design]
    rank = max(outcome.busy_s, key=lambda each: (outcome.busy_s[each], -each))
    kind = problem.kinds[rank]
    faster = dict(problem.timings) | {kind: tuple(map(_halved, problem.timings[kind]))}
    changed = {
        f"devices of type {kind} twice as fast": Problem(
            problem.cluster, problem.costs, problem.training, faster, problem.capacity
        ),
        _FREE_LINKS: problem.with_free_links(),
        _ENDLESS_MEMORY: problem.without_memory_limit(),
    }
    if space is not None:
        changed |= {f"one more device of type {each}": problem.with_more(each, 1) for each in problem.cluster.types}
    gains = {}
    for name, other in changed.items():
        seconds = other.evaluate(design).step_s
        if space is not None:
            seconds = min(seconds, best_seconds(other, space))
        gains[name] = max(0.0, 1 - seconds / outcome.step_s) if outcome.step_s else 0.0
    best = max(gains, key=lambda name: gains[name])
    # Faster devices always help; what binds besides is what costs a part of the step that counts.
    besides = max((_FREE_LINKS, _ENDLESS_MEMORY), key=lambda name: gains[name])
    what = "compute" if gains[besides] < _COUNTS else "link" if besides == _FREE_LINKS else "memory"
    under = "" if space is not None else " under this plan"
    advice = f"{best} would make the step {gains[best]:.0%} shorter{under}"
    return Binding(rank, what, gains, advice, planned_anew=space is not None)


def _halved(timing: UnitTiming) -> UnitTiming:
    return UnitTiming(
        timing.forward_fixed_s / 2,
        timing.forward_per_sample_s / 2,
        timing.backward_fixed_s / 2,
        timing.backward_per_sample_s / 2,
    )


def candidates_of(problem: Problem, found: Found) -> tuple[Candidate, ...]:
    """What was tried, the fastest first; of designs that differ in less than their layout only the best."""
    assert found.best is not None
    best_s = found.tried[found.best].step_s
    shown: dict[object, Candidate] = {}
    fitting = sorted(found.tried.items(), key=lambda each: each[1].step_s)
    for design, outcome in fitting:
        key = design.micro_batch_size, tuple(sorted(tuple(sorted(p.ranks)) for p in design.pipelines))
        if key in shown:
            continue
        if math.isfinite(outcome.step_s):
            slower = outcome.step_s / best_s - 1
            reason = "taken: the fastest of all" if design == found.best else f"{slower:.1%} slower"
            again = len(_checkpointing_ranks(design, outcome))
            how = f"; activations checkpointed on {again} of the ranks" if again else ""
            shown[key] = Candidate(describe(problem, design) + how, outcome.step_s, reason)
        else:
            shown[key] = Candidate(describe(problem, design), None, f"does not fit: {missing(problem, outcome)}")
    for seconds, design in found.passed_over:
        key = design.micro_batch_size, tuple(sorted(tuple(sorted(p.ranks)) for p in design.pipelines))
        text = f"not simulated: the closed form says {format_seconds(seconds)}, and others promised more"
        shown.setdefault(key, Candidate(describe(problem, design), None, text))
    return tuple(shown.values())[:_MOST_CANDIDATES]


def _checkpointing_ranks(design: Design, outcome: Outcome) -> set[int]:
    return {
        pipeline.ranks[stage % len(pipeline.ranks)]
        for pipeline, flags in zip(design.pipelines, outcome.checkpointing, strict=True)
        for stage, flag in enumerate(flags)
        if flag
    }


def describe(problem: Problem, design: Design) -> str:
    """A design in words: ``2 pipelines [a: 3, b: 1] x 4 micro-batches, ...; 2 samples each; 1f1b``."""
    shapes = Counter(_shape(problem, pipeline) for pipeline in design.pipelines)
    texts = [f"{count} x {text}" if count > 1 else text for text, count in shapes.items()]
    number = len(design.pipelines)
    head = f"{number} pipeline{'s' if number > 1 else ''}"
    samples = f"{design.micro_batch_size} sample{'s' if design.micro_batch_size > 1 else ''}"
    return f"{head}: {', '.join(texts)}; micro-batches of {samples}; {design.policy}"


def _shape(problem: Problem, pipeline: PipelineDesign) -> str:
    kinds = [problem.kinds[rank] for rank in pipeline.ranks]
    if len(pipeline.counts) <= 8:
        stages = ", ".join(f"{kinds[s % len(kinds)]}: {count}" for s, count in enumerate(pipeline.counts))
    else:
        stages = ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items())
    return f"[{stages}] x {pipeline.micro_batches} micro-batches"


def missing(problem: Problem, outcome: Outcome) -> str:
    """Which ranks lack how much."""
    texts = [
        f"rank {each.rank} ({problem.kinds[each.rank]}) lacks {format_bytes(each.missing_bytes)}"
        for each in outcome.shortages[:4]
    ]
    more = len(outcome.shortages) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def reasons_of(
    problem: Problem, found: Found, binding: Binding, bound_s: float, even_s: float | None, proven: bool
) -> tuple[str, ...]:
    """The plan's reasons, one sentence each."""
    design = found.best
    assert design is not None
    outcome = found.tried[design]
    tried = sum(math.isfinite(each.step_s) for each in found.tried.values())
    reasons = [
        f"{describe(problem, design)}: the fastest of {tried} simulated designs that fit",
        (
            f"the step takes {format_seconds(outcome.step_s)}; no plan can take less than {format_seconds(bound_s)}, "
            f"so at most {1 - min(1.0, bound_s / outcome.step_s):.1%} could be gained"
        ),
        (
            f"rank {binding.rank} ({problem.kinds[binding.rank]}) sets the pace: it is busy for "
            f"{format_seconds(outcome.busy_s[binding.rank])} of it; "
            f"{f'what binds is {binding.what}; ' if binding.planned_anew else ''}{binding.advice}"
        ),
    ]
    if proven:
        reasons.append(
            "no other choice of devices, order, cut, micro-batches and schedule is faster: all were looked at"
        )
    if even_s is not None:
        reasons.append(f"an even split would take {format_seconds(even_s)}, {even_s / outcome.step_s:.2f} x as long")
    again = _checkpointing_ranks(design, outcome)
    if again:
        reasons.append(f"activations are checkpointed on {len(again)} ranks, which would not fit otherwise")
    idle = [rank for rank in range(len(problem.kinds)) if rank not in outcome.busy_s]
    if idle:
        reasons.append(f"{len(idle)} ranks stay idle, since the step would take longer with them")
    unknown = [
        name
        for name, link in (
            ("within_node", problem.network.within_node),
            ("between_nodes", problem.network.between_nodes),
        )
        if link is None
    ]
    if unknown and len(problem.kinds) > 1:
        reasons.append(f"links {' and '.join(unknown)} are not known and cost nothing here")
    return tuple(reasons)
