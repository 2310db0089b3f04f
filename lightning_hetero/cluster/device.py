"""One device: what it is, how much memory and how fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_hetero.cluster.speed_change import SpeedChange, factor_at, schedule_problems
from lightning_hetero.errors import ClusterError, raise_all


@dataclass(frozen=True)
class Device:
    """A device that one rank runs on.

    Args:
        type: its kind; devices of one type are planned as equals ("fast", "H200").
        node: name of the machine that it sits in.
        memory_bytes: memory that a plan may use, in bytes.
        speed_flops_per_s: declared or measured speed in FLOP/s, a multiply-add counting as 2;
            ``None`` where it was not measured.
        true_speed_flops_per_s: of an emulated device, the speed it really has when that differs
            from the declared one, so that only measuring reveals it.
        name: what the device calls itself ("NVIDIA H200"), where it was discovered.
        uuid: its identifier, where it has one.
        speed_schedule: of an emulated device, how its speed changes in mid-run, by optimizer steps.

    Raises:
        ClusterError: listing every value that is not a positive finite number or is empty.
    """

    type: str
    node: str
    memory_bytes: int
    speed_flops_per_s: float | None
    true_speed_flops_per_s: float | None = None
    name: str | None = None
    uuid: str | None = None
    speed_schedule: tuple[SpeedChange, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "speed_schedule", tuple(self.speed_schedule))
        problems = [
            f"{field} is {value!r}: give a non-empty text"
            for field, value in (("type", self.type), ("node", self.node))
            if not isinstance(value, str) or not value
        ]
        if not _is_positive(self.memory_bytes) or int(self.memory_bytes) != self.memory_bytes:
            problems.append(f"memory_bytes is {self.memory_bytes!r}: give a positive whole number of bytes")
        for field in ("speed_flops_per_s", "true_speed_flops_per_s"):
            value = getattr(self, field)
            if value is not None and not _is_positive(value):
                problems.append(f"{field} is {value!r}: give a positive number of FLOP/s, or None if not measured")
        problems += schedule_problems(self.speed_schedule)
        raise_all(ClusterError, f"device of type {self.type!r} on node {self.node!r} is not valid", problems)

    @property
    def actual_speed_flops_per_s(self) -> float | None:
        """The speed that the device really has, in FLOP/s: the true one if given, else the declared one."""
        return self.speed_flops_per_s if self.true_speed_flops_per_s is None else self.true_speed_flops_per_s

    def speed_factor(self, step: int) -> float:
        """Return what its schedule makes of its speed after so many optimizer steps; 1 without one."""
        return factor_at(self.speed_schedule, step)


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
