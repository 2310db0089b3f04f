"""The table that a fit of pipelines ends with: one line a rank, planned against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_hetero.emulation_report import EmulationReport, late_line
from lightning_hetero.plan import PipelinePlan
from lightning_hetero.strategies.summary import in_bytes, in_percent, in_seconds


@dataclass(frozen=True)
class PipeSummary:
    """What one rank measured over a fit; medians over its full steps.

    Attributes:
        rank: the rank.
        device: its device's type.
        pipeline: the one that it belongs to; None for an idle rank.
        units: first unit and the one after the last of each of its stages.
        steps: full steps that were measured.
        step_s: seconds from one step's start to the next one's; None with no full step.
        busy_s: of these, seconds in the forwards and backwards of its units.
        peak_bytes: peak memory of the device; None where it is not counted.
        emulation: how well this CPU kept up with the device it emulated; None for a real device.
    """

    rank: int
    device: str
    pipeline: int | None
    units: tuple[tuple[int, int], ...]
    steps: int
    step_s: float | None
    busy_s: float | None
    peak_bytes: int | None
    emulation: EmulationReport | None = None

    @property
    def idle_share(self) -> float | None:
        """Share of the step in which none of the rank's units ran."""
        if self.step_s is None or self.busy_s is None:
            return None
        return max(0.0, 1.0 - self.busy_s / self.step_s)


def pipe_summary_table(ranks: Sequence[PipeSummary], plan: PipelinePlan) -> Table:
    """One line a rank."""
    emulated = any(rank.emulation is not None for rank in ranks)
    what = "emulated devices, a rehearsal: not measurements of real ones" if emulated else "measured"
    table = Table(title=f"hetero_pipe, {plan.schedule}, {what}", title_justify="left")
    columns = ("rank", "device", "pipeline", "units", "step", "planned", "busy", "planned", "idle", "planned")
    for name in (*columns, "peak memory", "planned"):
        table.add_column(name, justify="left" if name in ("device", "units") else "right")
    for measured in ranks:
        planned = plan.predictions[measured.rank] if measured.rank < len(plan.predictions) else None
        table.add_row(
            str(measured.rank),
            measured.device,
            "-" if measured.pipeline is None else str(measured.pipeline),
            ", ".join(f"{start}-{stop - 1}" for start, stop in measured.units) or "idle",
            in_seconds(measured.step_s),
            in_seconds(plan.predicted_step_s),
            in_seconds(measured.busy_s),
            in_seconds(planned.busy_s if planned else None),
            in_percent(measured.idle_share),
            in_percent(planned.idle_share if planned else None),
            in_bytes(measured.peak_bytes),
            in_bytes(planned.peak_memory_bytes if planned else None),
        )
    return table


def print_pipe_summary(ranks: Sequence[PipeSummary], plan: PipelinePlan) -> None:
    """Print :func:`pipe_summary_table`, wide enough not to be cut where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(pipe_summary_table(ranks, plan))
    steps = [rank.step_s for rank in ranks if rank.step_s]
    if steps:
        console.print(f"together {plan.global_batch_size / max(steps):.2f} samples/s")
    late = late_line([rank.emulation for rank in ranks if rank.emulation is not None])
    if late is not None:
        console.print(late, highlight=False)
