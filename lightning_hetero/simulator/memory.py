"""Bytes per parameter, and the memory of a rank as a function of its samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
