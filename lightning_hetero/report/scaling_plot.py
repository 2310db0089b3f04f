"""Figure of several runs: throughput over ranks, with the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from lightning_hetero.report.scaling import ScalingLine
from lightning_hetero.report.style import LINES, new_figure, plain, title


def scaling_figure(lines: Sequence[ScalingLine]) -> Figure:
    """Samples/s over ranks, and beside it the share of the ideal.

    Dashed is the ideal: what each rank of the smallest run does, times the ranks. Dotted is what the ranks of each run
    would do together if they only computed, which is the ideal of unequal devices.
    """
    figure = new_figure(11.5, 4.8 + 0.4 * len(lines))  # a legend below each panel
    total, share = figure.subplots(1, 2)
    draw_scaling(total, share, lines)
    title(figure, scaling_title(lines), any(line.emulated for line in lines))
    return figure


def scaling_title(lines: Sequence[ScalingLine]) -> str:
    """Which scaling lines of several runs show."""
    several = [line for line in lines if len(line.points) > 1]
    if not several:
        return "Throughput over ranks"
    if all(line.is_weak for line in several):
        return "Weak scaling"
    return (
        "Strong scaling" if all(line.is_strong for line in several) else "Scaling, samples a rank differ between runs"
    )


def draw_scaling(total: Axes, share: Axes, lines: Sequence[ScalingLine]) -> None:
    """Draw lines into two panels: samples/s over ranks, and the share of the ideal."""
    counts = sorted({point.ranks for line in lines for point in line.points})
    for color, line in zip(LINES * len(lines), lines, strict=False):
        _draw(total, share, line, color)
    shares = [float(value) for drawn in share.get_lines() for value in np.asarray(drawn.get_ydata())]
    share.axhline(100, color="#6b7785", linewidth=0.8)
    for axes in (total, share):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        plain(axes)
    share.set_ylim(0, 1.05 * max([100.0, *shares]))
    total.set_ylabel("throughput (samples/s)")
    share.set_ylabel("share (%)")
    for axes in (total, share):
        if axes.get_legend_handles_labels()[0]:  # below, where it covers no line
            axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _draw(total: Axes, share: Axes, line: ScalingLine, color: str) -> None:
    """One strategy's runs, its ideals, and what share of them it has."""
    there = [(point, point.samples_per_s) for point in line.points if point.samples_per_s is not None]
    if not there:
        return
    _plot(total, [(point.ranks, value) for point, value in there], f"{line.label}, {line.origin}", color, marker="o")
    ideal = [(point.ranks, value, best) for point, value in there if (best := line.ideal(point)) is not None]
    if len(ideal) > 1:  # of the smallest alone it is no line, and 100 % of itself
        label = f"{line.label}, ideal from the smallest"
        _plot(total, [(ranks, best) for ranks, _, best in ideal], label, color, linestyle="--", alpha=0.7)
        shares = [(ranks, 100 * value / best) for ranks, value, best in ideal]
        _plot(share, shares, f"{line.label}, of the ideal", color, marker="o")
    own = [(p.ranks, value, p.own_samples_per_s) for p, value in there if p.own_samples_per_s is not None]
    if own:
        dotted = {"linestyle": ":", "marker": "x"}
        _plot(
            total, [(ranks, rate) for ranks, _, rate in own], f"{line.label}, if ranks only computed", color, **dotted
        )
        shares = [(ranks, 100 * value / rate) for ranks, value, rate in own]
        _plot(share, shares, f"{line.label}, of only computing", color, **dotted)


def _plot(axes: Axes, points: Sequence[tuple[int, float]], label: str, color: str, **how: Any) -> None:
    axes.plot([ranks for ranks, _ in points], [value for _, value in points], label=label, color=color, **how)
