"""Who has which units under a pipeline plan, whose gradients are summed, and which process groups there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_hetero.membership.groups import ProcessGroup
from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.ownership import Ownership
from lightning_hetero.plan import Pipeline, PipelinePlan

Borders = tuple[tuple[int, int], ...]
"""per stage, its first unit and the one after its last"""


@dataclass(frozen=True)
class PipelineMembership:
    """Who has which units.

    Args:
        plan: of all ranks.
        borders: per pipeline, its stages as units of the model's chain, which may be coarser than the plan's.
        unit_names: of the chain's units, in order.
    """

    plan: PipelinePlan
    borders: tuple[Borders, ...]
    unit_names: tuple[str, ...]

    @classmethod
    def of_plan(cls, plan: PipelinePlan) -> PipelineMembership:
        """Return that of a plan whose units are the chain's."""
        borders = tuple(tuple(stage.units for stage in each.stages) for each in plan.pipelines)
        return cls(plan, borders, plan.unit_names)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.world_size

    @cached_property
    def _pipelines(self) -> dict[int, int]:
        return {rank: index for index, each in enumerate(self.plan.pipelines) for rank in each.ranks}

    def takes_part(self, rank: int) -> bool:
        """Return whether ``rank`` has stages."""
        return rank in self._pipelines

    def pipeline_of(self, rank: int) -> int:
        """Return the index of ``rank``'s pipeline; an idle rank goes along with the first."""
        return self._pipelines.get(rank, 0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of ``rank``, in order; none where it is idle."""
        return self._pipeline(rank).stages_of(rank) if self.takes_part(rank) else ()

    def units_of(self, rank: int) -> tuple[int, ...]:
        """Return the units that ``rank`` has, ascending."""
        borders = self.borders[self.pipeline_of(rank)]
        return tuple(sorted(unit for stage in self.stages_of(rank) for unit in range(*borders[stage])))

    def _pipeline(self, rank: int) -> Pipeline:
        return self.plan.pipelines[self.pipeline_of(rank)]

    @cached_property
    def ranks_of_unit(self) -> tuple[tuple[int, ...], ...]:
        """Per unit, the rank of each pipeline that has it, in the order of the pipelines."""
        found: list[list[int]] = [[] for _ in self.unit_names]
        for pipeline, borders in zip(self.plan.pipelines, self.borders, strict=True):
            for stage, (start, stop) in enumerate(borders):
                for unit in range(start, stop):
                    found[unit].append(pipeline.rank_of(stage))
        return tuple(tuple(ranks) for ranks in found)

    def ranks_of_units(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that have one of ``units``, those of the first pipeline first."""
        pipelines = range(len(self.plan.pipelines))
        return tuple(dict.fromkeys(self.ranks_of_unit[unit][pipeline] for pipeline in pipelines for unit in units))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.unit_names)}

    def owners_of(self, parameter: ParameterShape) -> tuple[int, ...]:
        """Return the ranks that have a parameter, those of the first pipeline first; all, where no unit has it."""
        if not parameter.units:
            return tuple(range(self.world_size))
        return self.ranks_of_units([self._index[name] for name in parameter.units])

    def ownership(self, parameters: Sequence[ParameterShape]) -> Ownership:
        """Return which rank owns which parameters."""
        sizes = {each.name: each.elements for each in parameters}
        return Ownership.of_wholes(sizes, {each.name: self.owners_of(each) for each in parameters})

    def hand_ranks(self, pipeline: int) -> tuple[int, ...]:
        """Return the ranks that get a pipeline's batches and outputs: its own, and with the first the idle ones."""
        idle = self.plan.idle_ranks if pipeline == 0 else ()
        return tuple(sorted({*self.plan.pipelines[pipeline].ranks, *idle}))

    def process_groups(self, parameters: Sequence[ParameterShape]) -> tuple[ProcessGroup, ...]:
        """Return the process groups that hetero_pipe has, in the order in which every rank makes them.

        Args:
            parameters: of the LightningModule.
        """
        return tuple(self._process_groups(parameters))

    def _process_groups(self, parameters: Sequence[ParameterShape]) -> Iterator[ProcessGroup]:
        yield ProcessGroup("world", tuple(range(self.world_size)))
        for index in range(len(self.plan.pipelines)):
            ranks = self.hand_ranks(index)
            if len(ranks) > 1:
                yield ProcessGroup("outputs", ranks)
                yield ProcessGroup("batches", ranks)
        for owners in self.ownership(parameters).owner_sets:
            yield ProcessGroup("owners", owners)
        for pipeline in self.plan.pipelines:
            if len(pipeline.ranks) > 1:
                yield ProcessGroup("values", tuple(sorted(pipeline.ranks)))
                yield ProcessGroup("gradients", tuple(sorted(pipeline.ranks)))
