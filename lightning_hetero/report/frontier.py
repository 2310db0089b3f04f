"""Figure of the Frontier benchmark: what is predicted, in the form of the study, with what was published beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lightning_hetero.report.save import save_figure
from lightning_hetero.report.style import new_figure, plain, say

_COLORS = {
    "NO_SHARD": "#9aa5b1",
    "HYBRID_1": "#1f6feb",
    "HYBRID_2": "#2a9d8f",
    "HYBRID_4": "#a3b18a",
    "HYBRID_8": "#e9c46a",
    "HYBRID_16": "#e9a15b",
    "FULL_SHARD": "#b00020",
    "SHARD_GRAD_OP": "#8d6a9f",
}

_COLUMNS = 3

_OPTIONS = {"NONE": "#9aa5b1", "BACKWARD_POST": "#457b9d", "BACKWARD_PRE": "#1f6feb"}

Rows = Sequence[Mapping[str, Any]]


def plot_frontier(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw weak scaling of each model, memory and communication options: lines and bars predicted, marks published.

    Args:
        results: what ``benchmarks.frontier`` writes as JSON.
        path: image file to write, whole or not at all; its suffix gives the format.

    Raises:
        KeyError: when ``results`` holds no rows.
    """
    rows = results["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        raise KeyError("the results hold no rows: give at least one model")
    lines = -(-len(models) // _COLUMNS)
    figure = new_figure(5.4 * _COLUMNS, 4.2 * (lines + 1))
    grid = figure.add_gridspec(lines + 1, _COLUMNS)
    for index, model in enumerate(models):
        axes = figure.add_subplot(grid[index // _COLUMNS, index % _COLUMNS])
        _weak_scaling(axes, [row for row in rows if row["model"] == model])
    _memory(figure.add_subplot(grid[lines, : _COLUMNS - 1]), rows)
    _options(figure.add_subplot(grid[lines, _COLUMNS - 1]), results["options"])
    _legend(figure, rows)
    save_figure(figure, path)


def _legend(figure: Figure, rows: Rows) -> None:
    """One for all panels of weak scaling."""
    axes = figure.axes[0]
    handles = [axes.plot([], [], color=_COLORS[mode], label=mode)[0] for mode in _modes(rows)]
    handles.append(axes.plot([], [], color="black", lw=0.8, ls=":", label="ideal")[0])
    handles.append(
        axes.plot([], [], color="black", marker="o", ms=4, ls="", label="published (Tsaris et al., 2024)")[0]
    )
    title = "SIMULATED (lines, bars) beside what was published of Frontier (marks); 32 images a GCD"
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9, frameon=False, title=title
    )


def _modes(rows: Rows) -> list[str]:
    found = {row["sharding"] for row in rows}
    return [mode for mode in _COLORS if mode in found]


def _weak_scaling(axes: Axes, rows: Rows) -> None:
    for mode in _modes(rows):
        own = [row for row in rows if row["sharding"] == mode and row["fits"]]
        axes.plot([row["nodes"] for row in own], [row["images_per_s"] for row in own], color=_COLORS[mode], lw=1.3)
        known = [row for row in rows if row["sharding"] == mode and row["published_images_per_s"] is not None]
        heights = [row["published_images_per_s"] for row in known]
        axes.plot([row["nodes"] for row in known], heights, color=_COLORS[mode], marker="o", ms=4, ls="")
    nodes = sorted({row["nodes"] for row in rows})
    rates = [row["images_per_s"] / row["nodes"] for row in rows if row["fits"] and row["nodes"] == nodes[0]]
    if rates:
        axes.plot(nodes, [max(rates) * count for count in nodes], color="black", lw=0.8, ls=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("nodes of 8 GCDs")
    axes.set_ylabel("throughput (images/s)")
    axes.set_title(rows[0]["model"], fontsize=10)
    plain(axes)


def _memory(axes: Axes, rows: Rows) -> None:
    known = [row for row in rows if row["published_peak_memory_gb"] is not None]
    if not known:
        say(axes, "no memory was published of these models")
        return
    places = range(len(known))
    axes.bar(places, [row["peak_memory_gb"] for row in known], color=[_COLORS[row["sharding"]] for row in known])
    heights = [row["published_peak_memory_gb"] for row in known]
    axes.scatter(places, heights, color="black", marker="_", s=90, zorder=3, label="published")
    names = [f"{row['model']}\n{row['sharding']}, {row['nodes']}" for row in known]
    axes.set_xticks(places, names, rotation=90, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("peak memory of a GCD (GB)")
    axes.set_title("memory by sharding mode and nodes", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    plain(axes)


def _options(axes: Axes, rows: Rows) -> None:
    if not rows:
        say(axes, "communication options were published of vit_5b, which was left out")
        return
    modes = list(dict.fromkeys(row["sharding"] for row in rows))
    for offset, (prefetch, color) in enumerate(_OPTIONS.items()):
        own = {row["sharding"]: row for row in rows if row["backward_prefetch"] == prefetch}
        places = [index + (offset - 1) * 0.27 for index in range(len(modes))]
        axes.bar(places, [own[mode]["images_per_s"] for mode in modes], width=0.25, color=color, label=prefetch)
        heights = [own[mode]["published_images_per_s"] for mode in modes]
        axes.scatter(places, heights, color="black", marker="_", s=90, zorder=3)
    axes.set_xticks(range(len(modes)), modes)
    axes.set_ylabel("throughput (images/s)")
    axes.set_title("backward prefetch, vit_5b on 8 nodes", fontsize=10)
    axes.set_ylim(0, 1.3 * max(row["images_per_s"] for row in rows))
    axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=len(_OPTIONS))
    plain(axes)
