"""What each rank did, step by step while it trains, and said once at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies.rank_table import MeasuredRank, print_ranks, rank_table


@dataclass(frozen=True, kw_only=True)
class RankSummary(MeasuredRank):
    """What a rank of hetero_fsdp measured.

    Attributes:
        samples: its batch share.
        flops_per_sample: floating-point operations of forward and backward; None where they were not counted.
    """

    samples: int
    flops_per_sample: float | None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of this rank per second."""
        return None if self.step_s is None else self.samples / self.step_s

    @property
    def tflops_per_s(self) -> float | None:
        """10^12 floating-point operations per second, over the whole step."""
        if self.samples_per_s is None or self.flops_per_sample is None:
            return None
        return self.samples_per_s * self.flops_per_sample / 1e12


class StepRecorder:
    """Collects the times of full training steps on one rank."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.busy_s: list[float] = []
        self._started: float | None = None

    def begin_step(self, busy_of_last_s: float, comparable: bool) -> bool:
        """Note that a step begins.

        Args:
            busy_of_last_s: busy seconds since the last call.
            comparable: whether the time since the last call is one full step and nothing else.

        Returns:
            Whether it was taken into account.
        """
        now = time.perf_counter()
        counted = comparable and self._started is not None
        if counted and self._started is not None:
            self.step_s.append(now - self._started)
            self.busy_s.append(busy_of_last_s)
        self._started = now
        return counted

    def forget(self) -> None:
        """What was measured so far is not what comes: batch shares have moved."""
        self.step_s.clear()
        self.busy_s.clear()

    def pause(self) -> None:
        """The time since the last step will not be one step (validation, an epoch's end)."""
        self._started = None

    def medians(self) -> tuple[float | None, float | None]:
        """Return the median step and busy seconds, without the first step where there are more."""
        steps, busy = self.step_s, self.busy_s
        if len(steps) > 1:
            steps, busy = steps[1:], busy[1:]
        return (statistics.median(steps), statistics.median(busy)) if steps else (None, None)


def print_summary(ranks: Sequence[RankSummary], plan: ShardPlan) -> None:
    """Print the table that a fit of hetero_fsdp ends with, and what a plan does not count."""
    table = rank_table(
        "hetero_fsdp",
        ranks,
        plan,
        parts={"share": lambda rank: str(rank.samples)},
        rates={
            "samples/s": lambda rank: "-" if rank.samples_per_s is None else f"{rank.samples_per_s:.2f}",
            "TFLOP/s": lambda rank: "-" if rank.tflops_per_s is None else f"{rank.tflops_per_s:.3g}",
        },
    )
    lines = []
    total = sum(rank.samples_per_s or 0.0 for rank in ranks)
    if total:
        lines.append(f"together {total:.2f} samples/s")
    exposed = _unplanned_share(ranks, plan)
    if exposed is not None and exposed > 0.1:
        lines.append(
            f"{exposed:.0%} of a step is none of the units' compute: communication, Python, the optimizer's step and "
            "input, which a plan counts where it was made from what this run measured; larger batches make it less"
        )
    print_ranks(table, lines, ranks)


def _unplanned_share(ranks: Sequence[RankSummary], plan: ShardPlan) -> float | None:
    """Share of the step in which not even the busiest rank computed; None where it was not measured."""
    steps = [rank.step_s for rank in ranks if rank.step_s]
    busy = [rank.busy_s for rank in ranks if rank.busy_s is not None]
    if not steps or not busy or plan.predicted_step_s is None:
        return None
    return max(0.0, 1.0 - max(busy) / max(steps))
