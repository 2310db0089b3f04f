"""Figure of several runs: throughput over ranks, with the ideal."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from lightning_hetero.report.scaling import ScalingLine
from lightning_hetero.report.style import LINES, new_figure, plain, title


def scaling_figure(lines: Sequence[ScalingLine]) -> Figure:
    """Samples/s over ranks, and beside it the share of the ideal.

    Dashed is the ideal: what each rank of the smallest run does, times the ranks. Dotted is what the ranks of each run
    would do together if none ever waited, which is the ideal of unequal devices.
    """
    figure = new_figure(11.5, 4.8)
    total, share = figure.subplots(1, 2)
    counts = sorted({point.ranks for line in lines for point in line.points})
    for color, line in zip(LINES * len(lines), lines, strict=False):
        there = [(point, point.samples_per_s) for point in line.points if point.samples_per_s is not None]
        if not there:
            continue
        ranks = [point.ranks for point, _ in there]
        total.plot(ranks, [value for _, value in there], marker="o", color=color, label=f"{line.label}, measured")
        pairs = [(point.ranks, value, line.ideal(point)) for point, value in there]
        ideal = [(count, value, best) for count, value, best in pairs if best is not None]
        if ideal:
            total.plot(
                [count for count, _, _ in ideal],
                [best for _, _, best in ideal],
                color=color,
                linestyle="--",
                alpha=0.7,
                label=f"{line.label}, ideal from the smallest",
            )
            shares = [100 * value / best for _, value, best in ideal]
            share.plot(
                [count for count, _, _ in ideal], shares, color=color, marker="o", label=f"{line.label}, of the ideal"
            )
        own = [(point.ranks, point.own_samples_per_s) for point, _ in there if point.own_samples_per_s is not None]
        if own:
            total.plot(
                [count for count, _ in own],
                [value for _, value in own],
                color=color,
                linestyle=":",
                marker="x",
                label=f"{line.label}, if no rank waited",
            )
            rates = {point.ranks: value for point, value in there}
            shares = [100 * rates[count] / rate for count, rate in own]
            share.plot(
                [count for count, _ in own],
                shares,
                color=color,
                linestyle=":",
                marker="x",
                label=f"{line.label}, of no waiting",
            )
    share.axhline(100, color="#6b7785", linewidth=0.8)
    for axes in (total, share):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        plain(axes)
    total.set_ylabel("throughput (samples/s)")
    share.set_ylabel("share (%)")
    for axes in (total, share):
        axes.legend(fontsize=8, frameon=False)
    several = [line for line in lines if len(line.points) > 1]
    weak = "Weak scaling" if all(line.is_weak for line in several) else "Scaling, samples a rank differ between runs"
    what = weak if several else "Throughput over ranks"
    title(figure, what, any(line.emulated for line in lines))
    return figure
