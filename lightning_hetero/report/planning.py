"""Figure of the planner benchmark: planning time against devices and units."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from lightning_hetero.report.save import save_figure

_COLORS = ("#1f6feb", "#2a9d8f", "#e76f51", "#8d6a9f", "#e9c46a")


def plot_planning_time(
    growth: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], path: str | os.PathLike[str]
) -> None:
    """Draw seconds of ``partition_units`` against devices and against units, both axes logarithmic.

    Args:
        growth: ``"growth"`` of what ``benchmarks.planner_quality`` writes: ``by_devices`` and ``by_units``, each
            a list of points (devices, units, median_s) by name.
        path: image file to write, whole or not at all; its suffix gives the format.

    Raises:
        KeyError: when ``growth`` lacks one of the two.
    """
    # no pyplot: a figure of its own touches no global state and needs no display
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    _draw(panels[0], growth["by_devices"], "devices", "three units a device, at least 100")
    _draw(panels[1], growth["by_units"], "units", "16 devices")
    panels[0].set_ylabel("planning time (s), median")
    save_figure(figure, path)


def _draw(axes: Axes, lines: Mapping[str, Sequence[Mapping[str, Any]]], variable: str, title: str) -> None:
    for color, (name, points) in zip(_COLORS, lines.items(), strict=False):
        axes.loglog(
            [point[variable] for point in points],
            [point["median_s"] for point in points],
            marker="o",
            color=color,
            label=name,
        )
    # Sizes double from point to point: ticks at powers of two, written out.
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(variable)
    axes.set_title(title, fontsize=10)
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
