"""Bytes per rank of a pipeline, moment by moment through one optimizer step.

A stage with units a, ..., b - 1 and at most n micro-batches in flight (``schedule.peaks_in_flight``) holds, per
parameter and per sample of the micro-batch::

    always               parameters, gradients (summed over micro-batches) and optimizer state of its units
                         a copy of parameters that are tied to an earlier unit, which another stage has
    per micro-batch      kept:     what its units keep for the backward, or, where activations are checkpointed,
      in flight                    only the input of each unit
                         end:      the stage's output, until its backward; on the last stage what the loss keeps
    forward              n x (kept + end)
    backward of unit i   (n - 1) x (kept + end) + kept by units up to i + end
                         gradients of the output and of the input of unit i, or of what is inside it
                         with checkpointing: what unit i keeps, since its forward is run again
                         the largest parameter's gradient, before it is added to the one that is there
    buffers              one input and one gradient that are received ahead (not on the first and last stage)
    step                 temporaries of the optimizer: two of the largest parameter, with torch's loop over them

With no more micro-batches than are in flight (GPipe), gradients only come into being during the first backward, last
units first, and not before.

Not counted: temporaries inside a unit that are neither kept nor passed on, allocator fragmentation, and the
communication library's own buffers. The earlier unit of tied
parameters is not named in costs, so a copy is counted on every stage but the first, which may be one too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.simulator.memory import MemoryPoint, RankMemory, StateBytes


@dataclass(frozen=True)
class StageUnits:
    """The units of one stage.

    Args:
        start: index of its first unit.
        stop: index after its last unit.
        activation_checkpointing: whether its units keep only their inputs and run their forward again in backward.
    """

    start: int
    stop: int
    activation_checkpointing: bool = False


def stage_memory(
    costs: ModelCosts, units: StageUnits, in_flight: int, micro_batches: int, *, state: StateBytes | None = None
) -> RankMemory:
    """Memory of a rank with one stage, as a function of the samples of a micro-batch.

    Args:
        costs: of the model.
        units: those of the stage.
        in_flight: micro-batches in flight at most, at least 1.
        micro_batches: of a step, at least ``in_flight``.
        state: bytes per parameter; by default 32-bit AdamW.

    Returns:
        One point for the forward, one per unit in backward, and one for the optimizer's step.

    Raises:
        HeteroError: listing what is out of range.
    """
    problems = _problems(costs, [units])
    if not 1 <= in_flight <= micro_batches:
        problems.append(f"in_flight is {in_flight}: give 1 to {micro_batches} (the number of micro-batches)")
    raise_all(HeteroError, "memory cannot be predicted", problems)
    stage = _Stage(costs, units, state or StateBytes())
    points = [*(stage.first_step(in_flight) if in_flight == micro_batches else stage.steady(in_flight)), stage.step()]
    return RankMemory(tuple(points))


def rank_memory(
    costs: ModelCosts,
    stages: Mapping[int, StageUnits],
    peaks: Sequence[Mapping[int, int]],
    micro_batches: int,
    *,
    state: StateBytes | None = None,
) -> RankMemory:
    """Memory of a rank with one or several stages; arguments and errors as :func:`stage_memory`.

    Args:
        costs: of the model.
        stages: units of each of its stages, by stage.
        peaks: what :func:`~lightning_hetero.schedule.peaks_in_flight` says of its row.
        micro_batches: of a step.
        state: bytes per parameter; by default 32-bit AdamW.
    """
    if len(stages) == 1:
        ((stage, units),) = stages.items()
        return stage_memory(costs, units, max(peak[stage] for peak in peaks), micro_batches, state=state)
    raise_all(HeteroError, "memory cannot be predicted", _problems(costs, stages.values()))
    parts = {stage: _Stage(costs, units, state or StateBytes()) for stage, units in stages.items()}
    points = []
    for peak in peaks:
        # One stage is in its backward; the others hold their micro-batches.
        for working in (stage for stage, count in peak.items() if count):
            others = [stage for stage in parts if stage != working]
            fixed = sum(parts[stage].fixed_bytes for stage in others)
            waiting = sum(parts[stage].waiting_bytes(peak[stage]) for stage in others)
            points += [
                MemoryPoint(point.phase, point.place, point.fixed_bytes + fixed, point.bytes_per_sample + waiting)
                for point in parts[working].steady(peak[working])
            ]
    temporary = sum(part.step().fixed_bytes for part in parts.values())
    return RankMemory((*points, MemoryPoint("step", "", temporary)))


def _problems(costs: ModelCosts, stages: Iterable[StageUnits]) -> list[str]:
    count = len(costs.units)
    return [
        f"units {units.start} to {units.stop - 1} are not in a model of {count} units: give 0 <= start < stop"
        for units in stages
        if not 0 <= units.start < units.stop <= count
    ]


class _Stage:
    """The sums that the points of one stage have in common."""

    def __init__(self, costs: ModelCosts, units: StageUnits, state: StateBytes) -> None:
        self.units, self.state = costs.units[units.start : units.stop], state
        self.recompute = units.activation_checkpointing
        before = costs.units[units.start - 1].output_bytes if units.start else 0
        # Per unit, the bytes of its input; that of the model's first unit is the batch itself.
        self.inputs = [before, *(unit.output_bytes for unit in self.units[:-1])]
        is_last = units.stop == len(costs.units)
        output = self.units[-1].output_bytes
        self.end = costs.loss_bytes if is_last else output
        # What the loss keeps includes the gradient of the model's output.
        self.last_gradient = 0 if is_last and costs.loss_bytes else output
        self.buffers = before + (0 if is_last else output)
        self.parameters = [unit.parameters + (unit.shared_parameters if units.start else 0) for unit in self.units]
        self.kept = self.inputs if self.recompute else [unit.kept_activation_bytes for unit in self.units]
        self.largest = max(unit.largest_parameter for unit in self.units)
        self.states_bytes = sum(self.parameters) * (state.parameter + state.optimizer)

    @property
    def fixed_bytes(self) -> int:
        return math.ceil(self.fixed_exactly)

    @property
    def fixed_exactly(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.states_bytes + sum(self.parameters) * self.state.gradient

    def waiting_bytes(self, in_flight: int) -> int:
        """Per sample, while no micro-batch of this stage is at work."""
        return in_flight * (sum(self.kept) + self.end) + self.buffers

    def steady(self, in_flight: int) -> Iterator[MemoryPoint]:
        """Once gradients are there."""
        yield MemoryPoint("forward", self.units[-1].name, self.fixed_bytes, self.waiting_bytes(in_flight))
        for index, unit in enumerate(self.units):
            adding = math.ceil(self.fixed_exactly + self.largest * self.state.gradient)
            yield MemoryPoint("backward", unit.name, adding, self._backward_bytes(index, in_flight))

    def first_step(self, in_flight: int) -> Iterator[MemoryPoint]:
        """Where all forwards come before the first backward."""
        states = math.ceil(self.states_bytes)
        yield MemoryPoint("forward", self.units[-1].name, states, self.waiting_bytes(in_flight))
        for index, unit in enumerate(self.units):
            gradients = sum(self.parameters[index:]) * self.state.gradient
            fixed = math.ceil(self.states_bytes + gradients)
            yield MemoryPoint("backward", unit.name, fixed, self._backward_bytes(index, in_flight))
        if in_flight > 1:
            yield from list(self.steady(in_flight - 1))[1:]

    def step(self) -> MemoryPoint:
        temporary = max(sum(self.parameters) * self.state.step_temporary, 2 * self.state.parameter * self.largest)
        return MemoryPoint("step", "", math.ceil(self.fixed_bytes + temporary))

    def _backward_bytes(self, index: int, in_flight: int) -> int:
        unit = self.units[index]
        # the gradient of the input comes when the largest one inside has gone
        at_work = sum(self.kept[: index + 1]) + self.end + max(self.inputs[index], unit.inner_gradient_bytes)
        at_work += self.last_gradient if index == len(self.units) - 1 else unit.output_bytes
        at_work += unit.kept_activation_bytes if self.recompute else 0
        return self.waiting_bytes(in_flight - 1) + at_work
