"""Figure of the benchmark of predictions: predicted over measured steps of emulated runs, both strategies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from lightning_hetero.report.save import save_figure
from lightning_hetero.report.style import LINES, new_figure, plain, title

_MARGIN = 0.05


def plot_predicted_steps(rows: Mapping[str, Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the rows of ``benchmarks.predicted_steps``: steps in one panel, the memory of every rank in another.

    Args:
        rows: what the benchmark writes as JSON, by setting.
        path: image file to write, whole or not at all; its suffix gives the format.

    Raises:
        ValueError: when there is no row.
    """
    if not rows:
        raise ValueError("there is no setting to draw")
    figure = new_figure(11.0, 1.6 + 0.24 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    steps = {name: [row["error"]] for name, row in rows.items()}
    memory = {name: row["memory_errors"] for name, row in rows.items()}
    colors = {strategy: LINES[i] for i, strategy in enumerate(dict.fromkeys(r["strategy"] for r in rows.values()))}
    for axes, errors, what in ((left, steps, "step time"), (right, memory, "peak memory, every rank")):
        _draw(axes, errors, [colors[row["strategy"]] for row in rows.values()])
        axes.set_xlabel(f"{what}: predicted over measured")
    left.set_yticks(range(len(rows)))
    left.set_yticklabels(list(rows), fontsize=8)
    left.invert_yaxis()
    for strategy, color in colors.items():
        left.plot([], [], "o", color=color, label=strategy)
    left.legend(fontsize=8, frameon=False, loc="upper right")
    title(figure, f"{len(rows)} settings, each planned from what it measured; shaded: within 5 %", emulated=True)
    save_figure(figure, path)


def _draw(axes: Axes, errors: Mapping[str, list[float | None]], colors: list[str]) -> None:
    axes.axvspan(1 - _MARGIN, 1 + _MARGIN, color="#eef2f6", zorder=0)
    axes.axvline(1.0, color="#9aa5b1", linewidth=1, zorder=1)
    for place, (own, color) in enumerate(zip(errors.values(), colors, strict=True)):
        ratios = [1 + each for each in own if each is not None]
        axes.plot(ratios, [place] * len(ratios), "o", color=color, markersize=5, alpha=0.8)
    largest = max((abs(each) for own in errors.values() for each in own if each is not None), default=0.0)
    half = max(1.3 * _MARGIN, 1.1 * largest)
    axes.set_xlim(1 - half, 1 + half)
    plain(axes)
