"""The table that a fit ends with: what each rank measured, one line a rank, beside what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from lightning_hetero.emulation_report import EmulationReport, late_line
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.units import format_bytes, format_seconds


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank measured over a fit; medians over its full steps.

    Attributes:
        rank: the rank.
        device: its device's type.
        steps: full steps that were measured (the first one and those beside validation are left out).
        step_s: seconds from one step's start to the next one's; None with no full step.
        busy_s: of these, seconds in the forwards and backwards of its units.
        peak_bytes: peak memory of the device; None where it is not counted.
        emulation: how well this CPU kept up with the device it emulated; None for a real device.
    """

    rank: int
    device: str
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


Rank = TypeVar("Rank", bound=MeasuredRank)
Column = Callable[[Rank], str]


def rank_table(
    name: str,
    ranks: Sequence[Rank],
    plan: ShardPlan | PipelinePlan,
    parts: Mapping[str, Column[Rank]],
    rates: Mapping[str, Column[Rank]],
) -> Table:
    """Return the table: one line a rank, planned against measured.

    Args:
        name: of what ran.
        ranks: what each measured.
        plan: what was planned for them.
        parts: by heading, what of the work each has.
        rates: by heading, what each did of it per second.
    """
    emulated = any(rank.emulation is not None for rank in ranks)
    what = "emulated devices, a rehearsal: not measurements of real ones" if emulated else "measured"
    table = Table(title=f"{name}, {what}", title_justify="left")
    measured = ("step", "planned", "busy", "planned", "idle", "planned")
    for heading in ("rank", "device", *parts, *measured, *rates, "peak memory", "planned"):
        table.add_column(heading, justify="left" if heading in ("device", "units") else "right")
    for rank in ranks:
        planned = plan.predictions[rank.rank] if rank.rank < len(plan.predictions) else None
        table.add_row(
            str(rank.rank),
            rank.device,
            *(text(rank) for text in parts.values()),
            in_seconds(rank.step_s),
            in_seconds(plan.predicted_step_s),
            in_seconds(rank.busy_s),
            in_seconds(planned.busy_s if planned else None),
            in_percent(rank.idle_share),
            in_percent(planned.idle_share if planned else None),
            *(text(rank) for text in rates.values()),
            in_bytes(rank.peak_bytes),
            in_bytes(planned.peak_memory_bytes if planned else None),
        )
    return table


def print_ranks(table: Table, lines: Iterable[str], ranks: Sequence[MeasuredRank]) -> None:
    """Print the table, wide enough not to be cut where the output is no terminal, and what is to be said below it."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(table)
    steps = max((rank.steps for rank in ranks), default=0)
    if steps:
        console.print(f"medians over full steps: {steps}, without the first and those beside a validation")
    for line in lines:
        console.print(line)
    late = late_line([rank.emulation for rank in ranks if rank.emulation is not None])
    if late is not None:
        console.print(late, highlight=False)


def in_seconds(value: float | None) -> str:
    """Seconds as the table shows them; - where there are none."""
    return "-" if value is None else format_seconds(value)


def in_percent(value: float | None) -> str:
    """A share in percent, likewise."""
    return "-" if value is None else f"{100 * value:.1f} %"


def in_bytes(value: int | None) -> str:
    """Bytes, likewise."""
    return "-" if value is None else format_bytes(value)
