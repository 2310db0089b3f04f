"""From a plan to this rank's part of it: stages, messages, groups, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_hetero.errors import PlanError
from lightning_hetero.membership.pipelines import PipelineMembership
from lightning_hetero.plan import Pipeline, PipelinePlan
from lightning_hetero.schedule import Schedule
from lightning_hetero.strategies.pipe.gradients import OwnedGradients
from lightning_hetero.strategies.pipe.hand import Hand
from lightning_hetero.strategies.pipe.lines import Lines, MakeGroup
from lightning_hetero.strategies.pipe.mail import Mail
from lightning_hetero.strategies.pipe.placement import Placement, unit_with
from lightning_hetero.strategies.pipe.reading import Reader
from lightning_hetero.strategies.pipe.routes import Routes
from lightning_hetero.strategies.pipe.runtime import PipelineRuntime
from lightning_hetero.strategies.pipe.stage import Stage


class Assembly:
    """What a rank has of a plan.

    Args:
        plan: of all ranks.
        placement: of the model; this rank keeps its units with it (a collective).
        rank: this rank.
        device: of this rank.
        make_group: makes a process group of ranks; called on all ranks in the same order.
        gather: one value of each rank, on all ranks.

    Attributes:
        pipeline: index of this rank's pipeline; an idle rank goes along with the first.
        takes_part: whether this rank has stages.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        placement: Placement,
        rank: int,
        device: torch.device,
        make_group: MakeGroup,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self.plan, self.placement, self.rank = plan, placement, rank
        self.borders = [borders_in_chain(plan, each, placement) for each in plan.pipelines]
        names = tuple(unit.name for unit in placement.chain.units)
        self.membership = PipelineMembership(plan, tuple(self.borders), names)
        self.takes_part = self.membership.takes_part(rank)
        self.pipeline = self.membership.pipeline_of(rank)
        self.own = plan.pipelines[self.pipeline]
        stages = self.membership.stages_of(rank)
        owners = placement.owners()
        placement.keep(self.membership.units_of(rank), device)
        self.recomputes = any(self.own.stages[stage].activation_checkpointing for stage in stages)
        self._make_hands(device, make_group)
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self.gradients = self._gradients(owners, make_group)
        self.runtime = self._runtime(stages, device, make_group)
        self.owners_of_names = self._ranks_by_name(owners)

    # -- who is who ----------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether this rank has its pipeline's first stage."""
        return self.takes_part and self.own.rank_of(0) == self.rank

    @property
    def is_last(self) -> bool:
        """Whether it has the last."""
        return self.takes_part and self.own.rank_of(len(self.own.stages) - 1) == self.rank

    def last_ranks(self) -> tuple[int, ...]:
        """The rank of each pipeline's last stage."""
        return tuple(each.rank_of(len(each.stages) - 1) for each in self.plan.pipelines)

    def schedule(self, micro_batches: int, training: bool) -> Schedule:
        """What the ranks of this pipeline do with so many micro-batches; the same object each time."""
        key = micro_batches, training
        if key not in self._schedules:
            make = self.plan.schedule_of if training else self.plan.forward_schedule
            self._schedules[key] = make(self.pipeline, micro_batches)
        return self._schedules[key]

    # -- made once -----------------------------------------------------------------------------------------------------

    def _make_hands(self, device: torch.device, make_group: MakeGroup) -> None:
        """Groups over which a pipeline's ranks, and the idle ones with the first, get its batches and outputs.

        They are of gloo. Beside NCCL they have that too: ranks that are outside of a group take part in making it as if
        it had, and those that are in it must not do otherwise.
        """
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        self.first_hand = self.last_hand = Hand(self.rank, self.rank, None)
        self.reader = Reader(self.last_hand)
        for index, pipeline in enumerate(self.plan.pipelines):
            ranks = self.membership.hand_ranks(index)
            group, group_to_read = (
                (make_group(ranks, backend=backend), make_group(ranks, backend=backend))
                if len(ranks) > 1
                else (None, None)
            )
            if self.rank in ranks:
                last = pipeline.rank_of(len(pipeline.stages) - 1)
                self.first_hand = Hand(pipeline.rank_of(0), self.rank, group)
                self.last_hand = Hand(last, self.rank, group)
                self.reader = Reader(Hand(last, self.rank, group_to_read))

    def _ranks_by_name(self, owners: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Ranks that have each parameter and buffer of the split model, those of the first pipeline first."""
        return {name: self.membership.ranks_of_units(units) for name, units in owners.items() if units}

    def _gradients(self, owners: dict[str, tuple[int, ...]], make_group: MakeGroup) -> OwnedGradients:
        # the frozen too: they may be freed later
        ownership = self.membership.ownership(self.placement.parameter_shapes())
        named = dict(self.placement.root.named_parameters())
        own = {name: parameter for name, parameter in named.items() if not parameter.is_meta}
        borders = self.borders[self.pipeline]
        stage_of = [stage for stage, (start, stop) in enumerate(borders) for _ in range(start, stop)]
        mine = set(self.membership.stages_of(self.rank))
        stages_of = {name: frozenset(stage_of[unit] for unit in owners.get(name, ())) & mine for name in own}
        return OwnedGradients(own, ownership, stages_of, self.rank, make_group)

    def _runtime(self, stages: Sequence[int], device: torch.device, make_group: MakeGroup) -> PipelineRuntime | None:
        # every group is made on every rank
        routes_of = [Routes.of(self.placement.chain, borders) for borders in self.borders]
        lines = [
            Lines(
                each.ranks,
                [(each.rank_of(way.source), each.rank_of(way.target)) for way in routes.all],
                device,
                make_group,
            )
            for each, routes in zip(self.plan.pipelines, routes_of, strict=True)
        ]
        if not self.takes_part:
            return None
        borders = self.borders[self.pipeline]
        routes = routes_of[self.pipeline]
        rank_of = [self.own.rank_of(stage) for stage in range(len(self.own.stages))]
        mail = Mail(rank_of, self.rank, device, lines[self.pipeline])
        made = {stage: self._stage(stage, borders[stage], routes) for stage in stages}
        return PipelineRuntime(self.placement.chain, routes, made, rank_of, self.rank, mail)

    def _stage(self, stage: int, border: tuple[int, int], routes: Routes) -> Stage:
        units = [(unit, self.placement.chain.units[unit]) for unit in range(*border)]
        names = dict.fromkeys(way.name for way in routes.all if way.source == stage)
        parameters = dict(self.placement.root.named_parameters(remove_duplicate=False))
        own: dict[int, nn.Parameter] = {}
        for unit, _ in units:
            own |= {id(parameters[n]): parameters[n] for n in self.placement.names_of_unit[unit] if n in parameters}
        if stage == len(self.own.stages) - 1:
            own |= {id(p): p for p in self.placement.outside.values()}  # what the loss uses
        return Stage(stage, units, names, own.values(), self.own.stages[stage].activation_checkpointing)


def borders_in_chain(plan: PipelinePlan, pipeline: Pipeline, placement: Placement) -> tuple[tuple[int, int], ...]:
    """A pipeline's stages as units of the chain; a plan may have finer ones, such as ``patch_embed.proj``.

    Raises:
        PlanError: if the plan's units are not the chain's, or a border is inside one of the chain's.
    """
    chain_names = [unit.name for unit in placement.chain.units]
    if tuple(chain_names) == plan.unit_names:
        return tuple(stage.units for stage in pipeline.stages)
    unit_of = [unit_with(name, placement) for name in plan.unit_names]
    unknown = [name for name, unit in zip(plan.unit_names, unit_of, strict=True) if unit is None]
    if unknown:
        raise PlanError(
            f"the plan has the unit {unknown[0]!r}, and {type(placement.model).__name__} has "
            f'{", ".join(chain_names[:3])}, ..., {chain_names[-1]}: make a plan for this model (plan="auto")'
        )
    found = []
    start = 0
    for index, stage in enumerate(pipeline.stages):
        after = unit_of[stage.units[1]] if stage.units[1] < len(unit_of) else len(chain_names)
        last = unit_of[stage.units[1] - 1]
        assert after is not None
        assert last is not None
        if after <= last:
            raise PlanError(
                f"stage {index} ends with {plan.unit_names[stage.units[1] - 1]!r} and the next begins with "
                f"{plan.unit_names[stage.units[1]]!r}: both are parts of {chain_names[last]!r}, which is run as one; "
                "move the border"
            )
        found.append((start, after))
        start = after
    return tuple(found)
