"""Figure of the scaling benchmark: a panel or two for each topic that was run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hetero.report.save import save_figure

_COLORS = ("#1f6feb", "#2a9d8f", "#e76f51", "#8d6a9f", "#e9c46a", "#457b9d", "#a3b18a", "#9aa5b1")
_STOCK = "#9aa5b1"
_OURS = "#1f6feb"
_BAD = "#b00020"
_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCH = "//"  # of what is emulated
_MIB = 2**20

Rows = Sequence[Mapping[str, Any]]
Panel = Callable[[Axes, Mapping[str, Any]], None]


def plot_scaling(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the results of ``benchmarks.vit_scaling``, each topic in panels of its own.

    Panels of emulated devices are named so and hatched; models that were scaled down are named so at the top. What ran
    out of memory stands in its place in words.

    Args:
        results: what the benchmark writes as JSON.
        path: image file to write, whole or not at all; its suffix gives the format.

    Raises:
        KeyError: when ``results`` holds no topic that has a panel.
    """
    topics = results.get("topics", {})
    panels = [(panel, topics[topic]) for topic, drawn in _PANELS.items() if topic in topics for panel in drawn]
    if not panels:
        raise KeyError(f"the results hold no topic with a panel: {', '.join(_PANELS)}")
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    # no pyplot: a figure of its own touches no global state and needs no display
    figure = Figure(figsize=(7.2 * columns, 4.6 * lines), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (panel, found) in zip(places, panels, strict=False):
        panel(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(_heading(results), fontsize=10)
    save_figure(figure, path)


def _heading(results: Mapping[str, Any]) -> str:
    environment = results.get("environment", {})
    where = f"{environment.get('cpu', 'unknown processor')}, {environment.get('cores', '?')} cores"
    if environment.get("gpu"):
        where += f", {environment['gpus']} x {environment['gpu']}"
    scaled = [each for each in results.get("models", {}).values() if each["scaled_down"]]
    if not scaled:
        return where
    return (
        f"models SCALED DOWN where CPUs compute: width / {scaled[0]['width_divisor']}, "
        f"depth / {scaled[0]['depth_divisor']}, images of 112 x 112\n{where}"
    )


# -- panels --------------------------------------------------------------------------------------------------------


def _throughput(axes: Axes, found: Mapping[str, Any]) -> None:
    _grouped(axes, found["rows"], "model", "sharding", lambda row: row.get("images_per_s"))
    rates = [row["images_per_s"] for row in found["rows"] if row["outcome"] == "ok"]
    if rates and max(rates) > 8 * min(rates):
        axes.set_yscale("log")
    axes.set_ylabel("throughput (images/s)")
    axes.set_title(f"sharding modes, {_ranks(found['rows'])}", fontsize=10)


def _memory(axes: Axes, found: Mapping[str, Any]) -> None:
    def peak(row: Mapping[str, Any]) -> float | None:
        peaks = [each for each in row.get("peak_bytes", ()) if each]
        return max(peaks) / _MIB if peaks else None

    places = _grouped(axes, found["rows"], "model", "sharding", peak)
    predicted = [(x, row["predicted_peak_bytes"] / _MIB) for x, row in places if row.get("predicted_peak_bytes")]
    if predicted:
        where, heights = [x for x, _ in predicted], [height for _, height in predicted]
        axes.scatter(where, heights, marker="_", s=90, color="black", zorder=3, label="predicted")
        axes.legend(fontsize=8, frameon=False, ncols=2)
    axes.set_ylabel("peak memory of a rank (MiB)")
    axes.set_title(f"memory by sharding mode, {_ranks(found['rows'])}", fontsize=10)


def _options(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [row | {"limit": f"limit_all_gathers={row['limit_all_gathers']}"} for row in found["rows"]]
    _grouped(axes, rows, "backward_prefetch", "limit", lambda row: row.get("images_per_s"), write=True)
    axes.set_ylabel("throughput (images/s)")
    axes.set_title(f"{rows[0]['model']}, FULL_SHARD, {_ranks(rows)}", fontsize=10)


def _scaling(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [row for row in found["rows"] if "efficiency" in row]
    lines: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["ranks"] > 1:
            lines.setdefault((row["model"], row["sharding"], row["emulated"]), []).append(row)
    # a colour for each mode, a marker for each model: a colour for each line would come again
    colors = dict(zip(dict.fromkeys(sharding for _, sharding, _ in lines), _COLORS * len(lines), strict=False))
    markers = dict(zip(dict.fromkeys(model for model, _, _ in lines), _MARKERS * len(lines), strict=False))
    for (model, sharding, emulated), points in lines.items():
        ranks = [1, *(row["ranks"] for row in points)]
        times = [1.0, *(row["efficiency"] * row["ranks"] for row in points)]
        axes.plot(ranks, times, marker=markers[model], color=colors[sharding], ls="--" if emulated else "-", alpha=0.8)
    for sharding, color in colors.items():
        axes.plot([], [], color=color, label=sharding)
    for model, marker in markers.items():
        axes.plot([], [], color=_STOCK, marker=marker, ls="", label=model)
    for emulated in sorted({emulated for _, _, emulated in lines}):
        axes.plot([], [], color=_STOCK, ls="--" if emulated else "-", label="EMULATED" if emulated else "real ranks")
    most = max((row["ranks"] for row in rows), default=1)
    axes.plot([1, most], [1, most], color="black", lw=0.8, ls=":", label="ideal")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({row["ranks"] for row in rows}))
    axes.set_xlabel("ranks")
    axes.set_ylabel("throughput (one rank = 1)")
    axes.set_title("weak scaling, the same batch per rank", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _limits(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [row for row in found["rows"] if row["outcome"] == "ok"]
    seconds = {row["arm"]: row["median_step_s"] for row in rows}
    order = [arm for arm in ("input alone", "no communication", "synthetic data") if arm in seconds]
    for arm in order:
        axes.bar(arm.replace(" ", "\n"), seconds[arm], color=_STOCK)
    parts, bottom = found.get("parts") or {}, 0.0
    for color, name in zip(_COLORS, ("compute_s", "communication_s", "input_s"), strict=False):
        if name in parts:
            label = f"{name.removesuffix('_s')} {parts[name]:.3f} s"
            axes.bar("image\nfiles", max(0.0, parts[name]), bottom=bottom, color=color, label=label)
            bottom += max(0.0, parts[name])
    for x, arm in enumerate([*order, "image files"]):
        if arm in seconds:
            # noise may make a part negative, and the stack higher than the step
            top = max(seconds[arm], bottom) if arm == "image files" else seconds[arm]
            axes.text(x, top, f"{seconds[arm]:.3f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.45 * max(seconds.values(), default=1.0))
    axes.set_ylabel("step time (s)")
    axes.set_title(f"what limits: {rows[0]['model']}, FULL_SHARD, {_ranks(rows)}", fontsize=10)
    axes.legend(loc="upper left", fontsize=8, frameon=False, title="a step with image files", title_fontsize=8)


def _devices(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = found["rows"]
    _bars(axes, rows, lambda row: row.get("images_per_s"))
    axes.set_ylabel("throughput (images/s)")
    axes.set_title(f"{rows[0]['cluster']}: {rows[0]['model']}, {_ranks(rows)}", fontsize=10)


def _tflops(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = found["rows"]
    _bars(axes, rows, lambda row: row.get("tflops_per_device"))
    axes.set_ylabel("TFLOP/s per device")
    axes.set_title(f"{rows[0]['model']}, {_ranks(rows)}", fontsize=10)


def _ladder(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [row | {"how": "compiled" if row["compiled"] else "eager"} for row in found["rows"]]
    _grouped(axes, rows, "model", "how", lambda row: row.get("tflops_per_device"), write=True)
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"one GPU, {rows[0]['precision']}, batch {rows[0]['local_batch']}", fontsize=10)


def _ladder_memory(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [row | {"sharding": "compiled" if row["compiled"] else "eager"} for row in found["rows"]]
    _memory(axes, {"rows": rows})
    axes.set_title("one GPU, peak memory", fontsize=10)


_PANELS: dict[str, tuple[Panel, ...]] = {
    "sharding": (_throughput, _memory),
    "options": (_options,),
    "weak_scaling": (_scaling,),
    "limits": (_limits,),
    "mixed": (_devices,),
    "little_memory": (_devices,),
    "gpt": (_tflops,),
    "one_gpu": (_ladder, _ladder_memory),
}


# -- bars ----------------------------------------------------------------------------------------------------------


def _grouped(
    axes: Axes,
    rows: Rows,
    group: str,
    bar: str,
    height: Callable[[Mapping[str, Any]], float | None],
    *,
    write: bool = False,
) -> list[tuple[float, Mapping[str, Any]]]:
    """Bars of each ``group`` side by side, one color for each ``bar``; returns where each row stands."""
    groups, bars = _different(rows, group), _different(rows, bar)
    width = 0.8 / len(bars)
    places = []
    for row in rows:
        x = groups.index(row[group]) + (bars.index(row[bar]) - (len(bars) - 1) / 2) * width
        value = height(row)
        places.append((x, row))
        if row["outcome"] != "ok" or value is None:
            _say_outcome(axes, x, row)
            continue
        color = _COLORS[bars.index(row[bar]) % len(_COLORS)]
        axes.bar(x, value, width=0.92 * width, color=color, hatch=_HATCH if row["emulated"] else None)
        if write:
            axes.text(x, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
    for index, name in enumerate(bars):
        axes.bar(0, 0, width=0, color=_COLORS[index % len(_COLORS)], label=str(name))
    axes.set_xticks(range(len(groups)), [str(name) for name in groups])
    axes.margins(y=0.25)
    axes.legend(fontsize=8, frameon=False, ncols=2)
    return places


def _bars(axes: Axes, rows: Rows, height: Callable[[Mapping[str, Any]], float | None]) -> None:
    """One bar per row, ours in another color than what people run."""
    heights = [height(row) if row["outcome"] == "ok" else None for row in rows]
    for x, (row, value) in enumerate(zip(rows, heights, strict=True)):
        if value is None:
            _say_outcome(axes, x, row)
            continue
        color = _OURS if str(row["arm"]).startswith("hetero") else _STOCK
        axes.bar(x, value, color=color, hatch=_HATCH if row["emulated"] else None, edgecolor="white")
        axes.text(x, value, f"{value:.3g}", ha="center", va="bottom")
    axes.set_xticks(range(len(rows)), [str(row["arm"]).replace(", ", "\n") for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.15 * max((value for value in heights if value is not None), default=1.0))


def _say_outcome(axes: Axes, x: float, row: Mapping[str, Any]) -> None:
    """In place of a bar; the height is a share of the axes, whatever their scale."""
    place = axes.get_xaxis_transform()
    axes.text(x, 0.02, row["outcome"], transform=place, ha="center", va="bottom", rotation=90, fontsize=9, color=_BAD)


def _different(rows: Rows, name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _ranks(rows: Iterable[Mapping[str, Any]]) -> str:
    row = next(iter(rows))
    kind = "EMULATED devices" if row["emulated"] else {"cpu": "CPU ranks", "cuda": "GPUs"}[row["accelerator"]]
    return f"{row['ranks']} {kind}"
