"""Why a plan is as it is: what was tried and rejected, what binds now, and which change would help most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from lightning_hetero.planner.pipeline import PipelineSearch
from lightning_hetero.planner.shard_candidates import ShardSearch
from lightning_hetero.units import format_seconds

_MOST_SHOWN = 12


@dataclass(frozen=True)
class Tried:
    """One plan that was looked at.

    Args:
        what: in words.
        step_s: predicted seconds of a step; ``None`` where it has none.
        verdict: why it is the plan, or why it is not.
    """

    what: str
    step_s: float | None
    verdict: str


@dataclass(frozen=True)
class Explanation:
    """What a search says of its plan, whichever planner made it.

    Args:
        tried: what was looked at, the fastest first.
        binding: what limits the plan now, in words; empty where it is not known.
        advice: changes that would help, the most helpful first.
        reasons: of the plan itself.
    """

    tried: tuple[Tried, ...]
    binding: tuple[str, ...]
    advice: tuple[str, ...]
    reasons: tuple[str, ...]


def explain(search: ShardSearch | PipelineSearch) -> Explanation:
    """What a search found, in one form for both planners."""
    if isinstance(search, PipelineSearch):
        return _of_pipelines(search)
    return _of_shards(search)


def tried_table(explanation: Explanation, most: int = _MOST_SHOWN) -> Table:
    """What was tried, the fastest first: the first ``most`` that have seconds and as many of the others."""
    table = Table(title="tried", title_justify="left")
    for name, justify in (("plan", "left"), ("step time", "right"), ("why", "left")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for each in _shown(explanation.tried, most):
        table.add_row(each.what, "-" if each.step_s is None else format_seconds(each.step_s), each.verdict)
    return table


def explanation_lines(explanation: Explanation, most: int = _MOST_SHOWN) -> list[str]:
    """Reasons, what binds and what would help, one sentence each."""
    left = len(explanation.tried) - len(_shown(explanation.tried, most))
    lines = [f"and {left} more were tried"] if left else []
    lines += [f"why: {reason}" for reason in explanation.reasons]
    lines += [f"binds now: {text}" for text in explanation.binding]
    lines += [f"would help{' most' if place == 0 else ''}: {text}" for place, text in enumerate(explanation.advice)]
    return lines


def _shown(tried: Sequence[Tried], most: int) -> list[Tried]:
    timed = [each for each in tried if each.step_s is not None]
    others = [each for each in tried if each.step_s is None]
    return [*timed[:most], *others[:most]]


def _of_pipelines(search: PipelineSearch) -> Explanation:
    binding = search.binding
    gains = sorted(binding.gains.items(), key=lambda pair: -pair[1])
    # what changes nothing is no advice
    advice = [f"{change}: a step {gain:.0%} shorter" for change, gain in gains if gain >= 0.005]
    if not advice:
        advice = [f"none of these alone: {', '.join(change for change, _ in gains)}"]
    kind = search.plan.device_types[binding.rank]
    return Explanation(
        tuple(Tried(each.what, each.step_s, each.reason) for each in search.candidates),
        (f"{binding.what}; rank {binding.rank} ({kind}) sets the pace",),
        tuple(advice),
        search.plan.reasons,
    )


def _of_shards(search: ShardSearch) -> Explanation:
    kinds = search.plan.device_types
    binding = search.binding
    return Explanation(
        tuple(
            Tried(each.what, each.predicted_step_s, each.rejected or "taken: the fastest of all")
            for each in search.candidates
        ),
        () if binding is None else (f"{binding.by}; rank {binding.rank} ({kinds[binding.rank]}): {binding.why}",),
        tuple(
            f"{each.change}: {format_seconds(each.predicted_step_s)} a step, {each.speed_up:.2f} x as fast"
            for each in search.advice
        ),
        search.plan.reasons,
    )
