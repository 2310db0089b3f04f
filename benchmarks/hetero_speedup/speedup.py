"""From raw step times to the figures that the benchmark stands for. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass
class ArmTimes:
    """Measured steps of one arm.

    Args:
        images_per_step: global batch of the arm.
        turns: ``turns[i]`` holds the step times in seconds of the arm's i-th turn.
        info: what the arm said about itself.
    """

    images_per_step: int
    turns: list[list[float]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Median over turns of the median over a turn's steps, in seconds."""
        return median(median(turn) for turn in self.turns)

    @property
    def images_per_s(self) -> float:
        """Images of a step over its median time."""
        return self.images_per_step / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Raw repeats, as plain data."""
        return {
            "images_per_step": self.images_per_step,
            "step_s": self.turns,
            "median_step_s": self.step_s,
            "images_per_s": self.images_per_s,
            **self.info,
        }


def summarise(
    hetero: ArmTimes, even: ArmTimes, solo: Mapping[str, ArmTimes], kind_of_rank: Sequence[str]
) -> dict[str, float]:
    """Compute the benchmark's figures.

    Args:
        hetero: hetero_fsdp over all ranks.
        even: Lightning's FSDP2 with an even split over all ranks.
        solo: each kind of device alone.
        kind_of_rank: the kind of every rank's device, a key of ``solo``.

    Returns:
        ``hetero_images_per_s``, ``even_images_per_s``, ``solo_sum_images_per_s``, ``efficiency``
        (hetero over solo sum), ``speedup`` (hetero over even) and ``theoretical_speedup`` (solo sum over
        ranks x slowest solo, what an even split that waits for the slowest would leave to win).
    """
    by_rank = [solo[kind].images_per_s for kind in kind_of_rank]
    solo_sum = sum(by_rank)
    return {
        "hetero_images_per_s": hetero.images_per_s,
        "even_images_per_s": even.images_per_s,
        "solo_sum_images_per_s": solo_sum,
        "efficiency": hetero.images_per_s / solo_sum,
        "speedup": hetero.images_per_s / even.images_per_s,
        "theoretical_speedup": solo_sum / (len(by_rank) * min(by_rank)),
    }


def ratio_of_turns(one: ArmTimes, other: ArmTimes) -> float:
    """One arm's step time over another's, of as many images.

    The median over turns of the ratio of the two turns' medians: turns that follow one another met the same
    machine, whatever else it had to do.
    """
    pairs = zip(one.turns, other.turns, strict=True)
    return median(median(ours) / median(theirs) for ours, theirs in pairs)
