"""What each rank of a pipeline plan sends and receives in one step: messages between stages, sums over owners.

A forward's values go to the next stage, a backward's gradients to the one before, one message a micro-batch each way;
between stages of one rank there is none. Gradients of what several ranks own (a unit that other pipelines have, too, a
tied parameter, what is outside the split model) are summed once a step: one all-reduce for each set of owners, with
one number beside each parameter that says on how many ranks it has a gradient. A rank begins a sum when the last of
its stages that has a part in it is done, and what is outside of all stages at the end of the step; all ranks begin sums
in one order, so that none waits for ever.

Not in the list: batches and outputs that are handed around inside a pipeline, and what is agreed on once a step (the
loss, what is logged, the norm of gradients). The first message of each kind carries its shapes beside the values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.membership.pipelines import PipelineMembership
from lightning_hetero.plan import even_parts
from lightning_hetero.schedule import BACKWARD_WEIGHT, FORWARD, Action, Schedule

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


class PipelineTraffic:
    """What is sent and summed in a step with a full batch.

    Args:
        membership: of the plan.
        parameters: of the LightningModule, in its order.
        costs: whose units are the chain's; what they pass on is used.
        gradient_bytes: of one element of a gradient.

    Raises:
        HeteroError: if the costs are of other units.
    """

    def __init__(
        self,
        membership: PipelineMembership,
        parameters: Sequence[ParameterShape],
        costs: ModelCosts,
        gradient_bytes: float = 4,
    ) -> None:
        names = tuple(unit.name for unit in costs.units)
        if names != membership.unit_names:
            raise HeteroError(
                f"the costs have units {', '.join(names[:3])}, ... ({len(names)}), the plan "
                f"{', '.join(membership.unit_names[:3])}, ... ({len(membership.unit_names)}): give the costs of this "
                "plan"
            )
        self._membership, self._costs, self._gradient_bytes = membership, costs, gradient_bytes
        self._schedules: dict[int, Schedule] = {}
        self._sums: dict[int, list[_Sum]] = {}
        for each in self._all_sums(parameters):
            for rank in each.action.ranks:
                self._sums.setdefault(rank, []).append(each)

    def _all_sums(self, parameters: Sequence[ParameterShape]) -> list[_Sum]:
        """All sums in the order in which every rank begins its own: backward goes from later units to earlier ones."""
        shared: dict[tuple[int, ...], list[ParameterShape]] = {}
        for each in parameters:
            owners = tuple(sorted(self._membership.owners_of(each)))
            if len(owners) > 1:
                shared.setdefault(owners, []).append(each)
        found = []
        for owners, own in reversed(shared.items()):  # the last to begin is that of the first parameter
            size = sum(each.elements for each in own) + len(own)
            units = None if any(not each.units for each in own) else frozenset(u for each in own for u in each.units)
            action = PipelineAction(ALL_REDUCE, None, None, False, round(size * self._gradient_bytes), owners)
            found.append(_Sum(action, units))
        return sorted(found, key=lambda each: each.units is None)

    def border_bytes(self, pipeline: int) -> tuple[int, ...]:
        """Return bytes per sample that cross each border of a pipeline: what the unit before it passes on."""
        borders = self._membership.borders[pipeline]
        return tuple(self._costs.units[stop - 1].output_bytes for _, stop in borders[:-1])

    def of_rank(self, rank: int) -> tuple[PipelineAction, ...]:
        """Return what one rank sends, receives and sums, in the order in which it begins to.

        Receives stand where their values are needed; they are posted ahead of that.
        """
        waiting = list(self._sums.get(rank, ()))
        if not self._membership.takes_part(rank):
            return tuple(each.action for each in waiting)
        index = self._membership.pipeline_of(rank)
        row = self._schedule(index).rows[self._membership.plan.pipelines[index].ranks.index(rank)]
        last = {action.stage: place for place, action in enumerate(row)}
        stage_of = self._stages_of_units(rank)
        done: set[int] = set()
        found: list[PipelineAction] = []
        for place, action in enumerate(row):
            found += self._messages(rank, index, action)
            if place == last[action.stage]:
                done.add(action.stage)
                while waiting and waiting[0].may_begin(stage_of, done):
                    found.append(waiting.pop(0).action)
        return (*found, *(each.action for each in waiting))

    def _messages(self, rank: int, index: int, action: Action) -> Iterator[PipelineAction]:
        """What an action of the schedule receives, and what it sends."""
        pipeline, stage, k = self._membership.plan.pipelines[index], action.stage, action.micro_batch
        if action.kind == BACKWARD_WEIGHT:
            return
        forward = action.kind == FORWARD
        ends = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        for kind, other in zip((RECEIVE, SEND), ends, strict=True):
            if 0 <= other < len(pipeline.stages) and pipeline.rank_of(other) != rank:
                size = self.border_bytes(index)[min(stage, other)] * self._samples[index][k]
                yield PipelineAction(kind, stage, k, forward, size, (pipeline.rank_of(other),))

    def _schedule(self, index: int) -> Schedule:
        if index not in self._schedules:
            self._schedules[index] = self._membership.plan.schedule_of(index)
        return self._schedules[index]

    @cached_property
    def _samples(self) -> tuple[tuple[int, ...], ...]:
        """Per pipeline, samples of each micro-batch in a full batch."""
        plan = self._membership.plan
        shares = plan.split(plan.global_batch_size)
        return tuple(even_parts(own, each.micro_batches) for own, each in zip(shares, plan.pipelines, strict=True))

    def _stages_of_units(self, rank: int) -> dict[str, int]:
        borders = self._membership.borders[self._membership.pipeline_of(rank)]
        names = self._membership.unit_names
        return {names[u]: stage for stage in self._membership.stages_of(rank) for u in range(*borders[stage])}


@dataclass(frozen=True)
class _Sum:
    """A sum over owners; the units that have a part in it, or None where a parameter outside of all has one."""

    action: PipelineAction
    units: frozenset[str] | None

    def may_begin(self, stage_of: Mapping[str, int], done: Collection[int]) -> bool:
        """Whether a rank's stages that have a part in it are done."""
        if self.units is None:
            return False
        return all(stage_of[unit] in done for unit in self.units if unit in stage_of)
