"""What a run's typical step was: medians over the compared steps, which one stall does not move."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_hetero.metrics import Line
from lightning_hetero.report.run import Run
from lightning_hetero.simulator.measured_run import RankMeasurement


def median_step_s(run: Run) -> float:
    """Seconds of a run's median step, of the rank whose median is longest."""
    return max(median(float(line["step_s"]) for line in run.lines_compared(rank)) for rank in run.ranks)


def median_measurement(run: Run, rank: int) -> RankMeasurement:
    """Each part of a rank's step by its own median over the compared steps.

    Medians of parts need not sum to the median step. Watts are those of single steps, where every step has them;
    communication is told apart from waiting only where the lines of all ranks are there.

    Args:
        run: with at least one compared step.
        rank: of the run.
    """
    lines = run.lines_compared(rank)
    return RankMeasurement(
        compute_s=_median(lines, "compute_s") or 0.0,
        optimizer_s=_median(lines, "optimizer_s") or 0.0,
        fixed_s=median((line.get("input_s") or 0.0) + (line.get("rest_s") or 0.0) for line in lines),
        communication_s=_median(lines, "communication_s"),
        power_w=_power_w(lines),
    )


def _median(lines: Sequence[Line], name: str) -> float | None:
    """Over the lines; None where one has no such number."""
    values = [line.get(name) for line in lines]
    known = [float(value) for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _power_w(lines: Sequence[Line]) -> float | None:
    watts = [
        line["joules"] / line["energy_s"] for line in lines if line.get("joules") is not None and line.get("energy_s")
    ]
    return median(watts) if watts and len(watts) == len(lines) else None
