"""Bytes per rank of a sharded model, moment by moment through one optimizer step.

One rank of a shard group of G holds, with p parameters in a unit, S = ceil(p / G) per unit of each state::

    forward of unit i     parameters + optimizer state        S of every unit
                          gathered: unit i, and either its copy while it is laid out or the next unit
                          activations kept by units up to i    x samples
    backward of unit i    parameters + optimizer state        S of every unit
                          gradients                           S of the units from i on
                          gathered: unit i and the previous one
                          unsharded gradient of unit i; once unit i's parameters are freed, the copy of it
                          that goes into the reduce-scatter takes their place
                          activations kept by units up to i, gradients of the output and input of unit i
    step                  parameters + gradients + optimizer state, S of every unit
                          temporaries of the optimizer

With ``reshard_after_forward=False`` every unit stays gathered from its forward to its backward. Units of the
root group (what is outside the blocks) are gathered throughout, and so are their gradients in backward:
FSDP2 does not free the root's parameters after forward, and reduces its gradients last.

Not counted: temporaries inside a unit that are neither kept nor passed on, the padding of dim 0 to whole
rows (below G rows per parameter), allocator fragmentation, and the communication library's own buffers.
The order of events is that of ``torch/distributed/fsdp/_fully_shard`` (torch 2.14).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_hetero.costs import UnitCost
from lightning_hetero.errors import HeteroError, raise_all

_NO_LIMIT = 2**40  # more samples than any batch has


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each state; the defaults are 32-bit training with AdamW.

    Args:
        parameter: of the sharded parameters.
        gradient: of the sharded gradients.
        optimizer: of the optimizer's state (AdamW: two moments of 4 bytes).
        gathered: of the parameters that are all-gathered for compute, and of their gradients
            (2 under bf16-mixed).
        reduced: of what goes into the reduce-scatter.
        step_temporary: of what the optimizer allocates in its step; 0 for torch's loop over parameters,
            about ``parameter`` for its ``foreach`` variants (said in the documentation of torch.optim).
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 8
    gathered: float = 4
    reduced: float = 4
    step_temporary: float = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}: give zero or a positive number of bytes per parameter"
            for name, value in vars(self).items()
            if not (math.isfinite(value) and value >= 0)
        ]
        raise_all(HeteroError, "bytes per parameter are not valid", problems)


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes at one moment of a step: ``fixed_bytes + bytes_per_sample * samples``.

    Args:
        phase: "forward", "backward" or "step"; "measured" where the numbers come from a measurement.
        place: the unit at work; empty in "step" and "measured".
        fixed_bytes: bytes that do not depend on the rank's batch share.
        bytes_per_sample: bytes per sample of the rank's batch share (of its micro-batch, if it accumulates).
    """

    phase: str
    place: str
    fixed_bytes: int
    bytes_per_sample: float = 0.0

    def needed_bytes(self, samples: int) -> int:
        """Whole bytes needed with ``samples`` samples."""
        return self.fixed_bytes + math.ceil(self.bytes_per_sample * samples)

    def __str__(self) -> str:
        return f"{self.phase} of unit {self.place!r}" if self.place else self.phase


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank over a step, as a function of its samples.

    Args:
        points: the moments that may be the peak; at least one.
    """

    points: tuple[MemoryPoint, ...]

    @classmethod
    def measured(cls, fixed_bytes: int, bytes_per_sample: float) -> RankMemory:
        """A rank of which two numbers were measured: bytes without and bytes per sample."""
        return cls((MemoryPoint("measured", "", fixed_bytes, bytes_per_sample),))

    def peak(self, samples: int) -> MemoryPoint:
        """The moment that needs most with ``samples`` samples; the first of equal ones."""
        return max(self.points, key=lambda point: point.needed_bytes(samples))

    def peak_bytes(self, samples: int) -> int:
        """Bytes at that moment."""
        return self.peak(samples).needed_bytes(samples)

    def max_samples(self, capacity_bytes: int) -> int | None:
        """The most samples that fit ``capacity_bytes``: -1 if not even 0 do, ``None`` if any number does."""
        if self.peak_bytes(0) > capacity_bytes:
            return -1
        if self.peak_bytes(_NO_LIMIT) <= capacity_bytes:
            return None
        # By bisection: a quotient of floats could be off by a sample.
        fits, exceeds = 0, _NO_LIMIT
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self.peak_bytes(middle) <= capacity_bytes:
                fits = middle
            else:
                exceeds = middle
        return fits


def shard_memory(
    units: Sequence[UnitCost],
    group_size: int,
    *,
    state: StateBytes | None = None,
    root: Collection[str] = (),
    reshard_after_forward: bool = True,
    prefetch: bool = True,
) -> RankMemory:
    """Memory of a rank in a shard group, by the formula at the head of this file.

    Args:
        units: the model's units in the order of forward; ``parameters``, ``kept_activation_bytes`` and
            ``output_bytes`` are used.
        group_size: ranks that shard the model together, at least 1.
        state: bytes per parameter; by default 32-bit AdamW.
        root: names of the units that belong to the root group and not to a block of their own.
        reshard_after_forward: whether blocks are freed after forward and gathered again for backward.
        prefetch: whether the next block is gathered while one is at work.

    Returns:
        One point per unit in forward and in backward, and one for the optimizer's step.

    Raises:
        HeteroError: if there is no unit, a name in ``root`` is not a unit's, or ``group_size`` is below 1.
    """
    problems = [] if units else ["there is no unit: give at least one"]
    if group_size < 1:
        problems.append(f"group_size is {group_size}: give at least 1 rank")
    names = {unit.name for unit in units}
    problems += [f"root names {name!r}, which is no unit: remove it" for name in root if name not in names]
    raise_all(HeteroError, "memory cannot be predicted", problems)
    step = _Step(units, group_size, state or StateBytes(), frozenset(root), reshard_after_forward, prefetch)
    return RankMemory((*step.forward(), *step.backward(), step.optimizer()))


class _Step:
    """The sums that the points of one step have in common. Parameters are counted, then turned into bytes."""

    def __init__(
        self,
        units: Sequence[UnitCost],
        group_size: int,
        state: StateBytes,
        root: frozenset[str],
        reshard: bool,
        prefetch: bool,
    ) -> None:
        self.units, self.state, self.reshard, self.prefetch = units, state, reshard, prefetch
        self.shards = [-(-unit.parameters // group_size) for unit in units]
        self.kept = list(accumulate(unit.kept_activation_bytes for unit in units))
        # A unit of the root group is gathered for good, so it is not gathered again when its turn comes.
        self.blocks = [0 if unit.name in root else unit.parameters for unit in units]
        self.root = sum(unit.parameters for unit in units if unit.name in root)
        self.states = sum(self.shards) * (state.parameter + state.optimizer)

    def forward(self) -> Iterator[MemoryPoint]:
        for index, unit in enumerate(self.units):
            if self.reshard:
                beside = max(self.blocks[index], self._neighbour(index, 1))
                gathered = self.blocks[index] + beside
            else:
                gathered = sum(self.blocks[: index + 1]) + max(self.blocks[index], self._neighbour(index, 1))
            fixed = self.states + (self.root + gathered) * self.state.gathered
            yield MemoryPoint("forward", unit.name, math.ceil(fixed), self.kept[index])

    def backward(self) -> Iterator[MemoryPoint]:
        state = self.state
        for index in reversed(range(len(self.units))):
            unit, block = self.units[index], self.blocks[index]
            waiting = self._neighbour(index, -1) if self.reshard else sum(self.blocks[:index])
            # Gradient beside parameters while computing; gradient beside its copy while reducing.
            own = block * (state.gathered + max(state.gathered, state.reduced))
            root = self.root * (state.gathered + max(state.gathered, state.reduced))
            sharded = sum(self.shards[index:]) * state.gradient
            fixed = self.states + sharded + waiting * state.gathered + own + root
            passed = unit.output_bytes + (self.units[index - 1].output_bytes if index else 0)
            yield MemoryPoint("backward", unit.name, math.ceil(fixed), self.kept[index] + passed)

    def optimizer(self) -> MemoryPoint:
        per_parameter = self.state.gradient + self.state.step_temporary
        return MemoryPoint("step", "", math.ceil(self.states + sum(self.shards) * per_parameter))

    def _neighbour(self, index: int, direction: int) -> int:
        """Parameters of the next block that is gathered ahead; 0 where there is none."""
        if not self.prefetch:
            return 0
        ahead = self.blocks[index + 1 :] if direction > 0 else self.blocks[:index][::-1]
        return next((block for block in ahead if block), 0)
