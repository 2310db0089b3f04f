"""What each rank did, step by step while it trains, and said once at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_hetero.emulation_report import EmulationReport, late_line
from lightning_hetero.plan import ShardPlan
from lightning_hetero.units import format_bytes, format_seconds


@dataclass(frozen=True)
class RankSummary:
    """What one rank measured over a fit; medians over its full steps.

    Attributes:
        rank: the rank.
        device: its device's type.
        samples: its batch share.
        steps: full steps that were measured (the first one and those beside validation are left out).
        step_s: seconds from one step's start to the next one's; None with no full step.
        busy_s: of these, seconds in the forward and backward of its units.
        flops_per_sample: floating-point operations of forward and backward; None where they were not counted.
        peak_bytes: peak memory of the device; None where it is not counted.
        emulation: how well this CPU kept up with the device it emulated; None for a real device.
    """

    rank: int
    device: str
    samples: int
    steps: int
    step_s: float | None
    busy_s: float | None
    flops_per_sample: float | None
    peak_bytes: int | None
    emulation: EmulationReport | None = None

    @property
    def idle_share(self) -> float | None:
        """Share of the step in which none of the rank's units ran."""
        if self.step_s is None or self.busy_s is None:
            return None
        return max(0.0, 1.0 - self.busy_s / self.step_s)

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


def summary_table(ranks: Sequence[RankSummary], plan: ShardPlan) -> Table:
    """Return the table that a fit ends with: one line a rank, planned against measured."""
    emulated = any(rank.emulation is not None for rank in ranks)
    what = "emulated devices, a rehearsal: not measurements of real ones" if emulated else "measured"
    table = Table(title=f"hetero_fsdp, {what}", title_justify="left")
    columns = ("rank", "device", "share", "step", "planned", "busy", "planned", "idle", "planned")
    for name in (*columns, "samples/s", "TFLOP/s", "peak memory", "planned"):
        table.add_column(name, justify="left" if name == "device" else "right")
    for measured in ranks:
        planned = plan.predictions[measured.rank] if measured.rank < len(plan.predictions) else None
        table.add_row(
            str(measured.rank),
            measured.device,
            str(measured.samples),
            in_seconds(measured.step_s),
            in_seconds(plan.predicted_step_s),
            in_seconds(measured.busy_s),
            in_seconds(planned.busy_s if planned else None),
            in_percent(measured.idle_share),
            in_percent(planned.idle_share if planned else None),
            "-" if measured.samples_per_s is None else f"{measured.samples_per_s:.2f}",
            "-" if measured.tflops_per_s is None else f"{measured.tflops_per_s:.3g}",
            in_bytes(measured.peak_bytes),
            in_bytes(planned.peak_memory_bytes if planned else None),
        )
    return table


def print_summary(ranks: Sequence[RankSummary], plan: ShardPlan) -> None:
    """Print :func:`summary_table`, wide enough not to be cut where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(summary_table(ranks, plan))
    total = sum(measured.samples_per_s or 0.0 for measured in ranks)
    if total:
        console.print(f"together {total:.2f} samples/s")
    exposed = _unplanned_share(ranks, plan)
    if exposed is not None and exposed > 0.1:
        console.print(
            f"{exposed:.0%} of a step is none of the units' compute: communication and Python, which a plan made from "
            "measured steps counts, the optimizer's step and input, which it does not; larger batches make it less"
        )
    reports = [rank.emulation for rank in ranks if rank.emulation is not None]
    late = late_line(reports)
    if late is not None:
        console.print(late, highlight=False)


def _unplanned_share(ranks: Sequence[RankSummary], plan: ShardPlan) -> float | None:
    """Share of the step in which not even the busiest rank computed; None where it was not measured."""
    steps = [rank.step_s for rank in ranks if rank.step_s]
    busy = [rank.busy_s for rank in ranks if rank.busy_s is not None]
    if not steps or not busy or plan.predicted_step_s is None:
        return None
    return max(0.0, 1.0 - max(busy) / max(steps))


def in_seconds(value: float | None) -> str:
    """Seconds as a table shows them; - where there are none."""
    return "-" if value is None else format_seconds(value)


def in_percent(value: float | None) -> str:
    """A share in percent, likewise."""
    return "-" if value is None else f"{100 * value:.1f} %"


def in_bytes(value: int | None) -> str:
    """Bytes, likewise."""
    return "-" if value is None else format_bytes(value)
