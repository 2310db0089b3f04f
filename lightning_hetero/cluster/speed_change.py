"""A change of an emulated device's speed in mid-run: it throttles, a neighbour appears, or both end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.errors import ClusterError, raise_all


@dataclass(frozen=True)
class SpeedChange:
    """From an optimizer step on, a device has another speed.

    Args:
        step: number of optimizer steps that were done before.
        factor: of the speed that the device has by its description; 0.5 is half of it. Changes do not add up.

    Raises:
        ClusterError: listing both values that cannot be used.
    """

    step: int
    factor: float

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.step, int) or isinstance(self.step, bool) or self.step < 0:
            problems.append(f"step is {self.step!r}: give a whole number of optimizer steps, 0 or more")
        is_number = isinstance(self.factor, int | float) and not isinstance(self.factor, bool)
        if not (is_number and math.isfinite(self.factor) and self.factor > 0):
            problems.append(f"factor is {self.factor!r}: give a number above 0, such as 0.5")
        raise_all(ClusterError, "change of speed is not valid", problems)


def schedule_problems(changes: Sequence[SpeedChange]) -> list[str]:
    """Say what is wrong with changes that follow one another."""
    steps = [change.step for change in changes]
    if steps == sorted(set(steps)):
        return []
    return [f"speed_schedule has the steps {', '.join(map(str, steps))}: list each step once, in rising order"]


def factor_at(changes: Sequence[SpeedChange], step: int) -> float:
    """Return the factor of the speed after so many optimizer steps; 1 before the first change."""
    return next((change.factor for change in reversed(changes) if change.step <= step), 1.0)
