"""What each rank of a pipeline plan sends and receives in one step: messages between stages, sums over owners.

A forward's values go to the next stage, a backward's gradients to the one before, one message a micro-batch each way;
between stages of one rank there is none. Gradients of what several ranks own (a unit that other pipelines have, too, a
tied parameter, what is outside the split model) are summed once a step: one all-reduce for each set of owners, with
one number beside each parameter that says on how many ranks it has a gradient. A rank begins a sum when the last of
its stages that has a part in it is done, and what is outside of all stages at the end of the step.

Not in the list: batches and outputs that are handed around inside a pipeline, and what is agreed on once a step (the
loss, what is logged, the norm of gradients). The first message of each kind carries its shapes beside the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.membership.parameters import OUTSIDE, ParameterShape
from lightning_hetero.membership.pipelines import PipelineMembership
from lightning_hetero.plan import even_parts
from lightning_hetero.schedule import BACKWARD, BACKWARD_INPUT, FORWARD

SEND, RECEIVE, ALL_REDUCE = "send", "receive", "all_reduce"


@dataclass(frozen=True)
class PipelineAction:
    """One message or sum.

    Args:
        kind: "send", "receive" or "all_reduce".
        stage: of a message: this rank's; None for a sum.
        micro_batch: of a message; None for a sum.
        forward: of a message: whether it holds values; else their gradients.
        size_bytes: of the message, or of what each owner puts into the sum.
        ranks: of a message: the other rank; of a sum: its owners, ascending.
    """

    kind: str
    stage: int | None
    micro_batch: int | None
    forward: bool
    size_bytes: int
    ranks: tuple[int, ...]


def border_bytes(membership: PipelineMembership, costs: ModelCosts, pipeline: int) -> tuple[int, ...]:
    """Return bytes per sample that cross each border of a pipeline: what the unit before it passes on.

    Args:
        membership: of the plan.
        costs: whose units are the chain's, by name.
        pipeline: its index.

    Raises:
        HeteroError: if the costs are of other units.
    """
    names = tuple(unit.name for unit in costs.units)
    if names != membership.unit_names:
        raise HeteroError(
            f"the costs have units {', '.join(names[:3])}, ... ({len(names)}), the plan "
            f"{', '.join(membership.unit_names[:3])}, ... ({len(membership.unit_names)}): give the costs of this plan"
        )
    return tuple(costs.units[stop - 1].output_bytes for _, stop in membership.borders[pipeline][:-1])


def pipeline_actions(
    membership: PipelineMembership,
    rank: int,
    crossing_bytes: Sequence[int],
    parameters: Sequence[ParameterShape],
    gradient_bytes: float = 4,
) -> tuple[PipelineAction, ...]:
    """Return what one rank sends, receives and sums in one step, in the order in which it begins to.

    Receives stand where their values are needed; they are posted ahead of that.

    Args:
        membership: of the plan.
        rank: which one.
        crossing_bytes: of its pipeline: bytes per sample that cross each border (:func:`border_bytes`).
        parameters: of the LightningModule.
        gradient_bytes: of one element of a gradient.
    """
    sums = _sums(membership, rank, parameters, gradient_bytes)
    if not membership.takes_part(rank):
        return tuple(action for action, _ in sums)
    plan, index = membership.plan, membership.pipeline_of(rank)
    pipeline, schedule = plan.pipelines[index], plan.schedule_of(index)
    samples = _samples(membership, index)
    row = schedule.rows[pipeline.ranks.index(rank)]
    last = {action.stage: place for place, action in enumerate(row)}
    open_stages = set(membership.stages_of(rank))
    found: list[PipelineAction] = []
    for place, action in enumerate(row):
        stage, k = action.stage, action.micro_batch

        def message(kind: str, border: int, other: int, forward: bool, *, own: int = stage, of: int = k) -> None:
            if pipeline.rank_of(other) != rank:
                size = crossing_bytes[border] * samples[of]
                found.append(PipelineAction(kind, own, of, forward, size, (pipeline.rank_of(other),)))

        is_first, is_last = stage == 0, stage == len(pipeline.stages) - 1
        if action.kind == FORWARD:
            if not is_first:
                message(RECEIVE, stage - 1, stage - 1, forward=True)
            if not is_last:
                message(SEND, stage, stage + 1, forward=True)
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            if not is_last:
                message(RECEIVE, stage, stage + 1, forward=False)
            if not is_first:
                message(SEND, stage - 1, stage - 1, forward=False)
        if place == last[stage]:
            open_stages.discard(stage)
            ready = [each for each in sums if each[1] is not None and not each[1] & open_stages]
            found += [sum_ for sum_, _ in ready]
            sums = [each for each in sums if each not in ready]
    return (*found, *(action for action, _ in sums))


def _samples(membership: PipelineMembership, pipeline: int) -> tuple[int, ...]:
    """Samples of each micro-batch of a pipeline in a full batch."""
    plan = membership.plan
    return even_parts(plan.split(plan.global_batch_size)[pipeline], plan.pipelines[pipeline].micro_batches)


def _sums(
    membership: PipelineMembership, rank: int, parameters: Sequence[ParameterShape], gradient_bytes: float
) -> list[tuple[PipelineAction, frozenset[int] | None]]:
    """Sums that a rank takes part in, and its stages that each waits for; None where it waits for the step's end."""
    shared: dict[tuple[int, ...], list[ParameterShape]] = {}
    for each in parameters:
        owners = tuple(sorted(membership.owners_of(each)))
        if len(owners) > 1 and rank in owners:
            shared.setdefault(owners, []).append(each)
    stages = _stages_of_units(membership, rank)
    found = []
    for owners, own in sorted(shared.items()):
        size = sum(each.elements for each in own) + len(own)
        outside = any(each.unit == OUTSIDE for each in own)
        waits = frozenset(stages[unit] for each in own for unit in each.units if unit in stages)
        action = PipelineAction(ALL_REDUCE, None, None, False, round(size * gradient_bytes), owners)
        found.append((action, None if outside or not waits else waits))
    return found


def _stages_of_units(membership: PipelineMembership, rank: int) -> Mapping[str, int]:
    borders = membership.borders[membership.pipeline_of(rank)]
    return {
        membership.unit_names[unit]: stage
        for stage in membership.stages_of(rank)
        for unit in range(*borders[stage])
    }
