"""All figures of a report, as files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lightning_hetero.report.page import Picture
from lightning_hetero.report.rank_bars import parts_figure, planned_figure, rates_figure
from lightning_hetero.report.run import Run
from lightning_hetero.report.save import save_figure
from lightning_hetero.report.scaling import ScalingLine
from lightning_hetero.report.scaling_plot import scaling_figure
from lightning_hetero.report.timeline import timeline_figure

RUN_FIGURES: tuple[tuple[str, Callable[[Run], Figure], str], ...] = (
    ("planned", planned_figure, "What the plan expects of every rank, and what it measured."),
    ("timeline", timeline_figure, "A step: on top as planned, below as measured; numbers are micro-batches."),
    ("parts", parts_figure, "Where the time of a mean step goes; the black line is the compute that was planned."),
    ("rates", rates_figure, "Throughput and memory of every rank; dashed what it would do if it only computed."),
)
"""of one run: name of the file, what draws it, caption"""

SCALING_CAPTION = (
    "Throughput over ranks: dashed the ideal, the smallest run's rate for each rank; dotted what the ranks of each run "
    "would do together if none waited."
)


def run_pictures(run: Run, folder: Path) -> Iterator[Picture]:
    """Draw and write the figures of one run, one after the other.

    Args:
        run: the run.
        folder: for the images; made where it is not there.
    """
    for name, draw, caption in RUN_FIGURES:
        path = folder / f"{name}.png"
        figure = draw(run)
        save_figure(figure, path)
        yield Picture(path, caption, figure.get_figwidth())


def scaling_picture(lines: Sequence[ScalingLine], folder: Path) -> Picture:
    """Draw and write the figure of several runs."""
    path = folder / "scaling.png"
    figure = scaling_figure(lines)
    save_figure(figure, path)
    return Picture(path, SCALING_CAPTION, figure.get_figwidth())
