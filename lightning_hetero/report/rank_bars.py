"""Figures with bars for every rank: planned against measured, and how much each did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hetero.report.measured_rank import MeasuredRank, Pair, measured_ranks
from lightning_hetero.report.run import Run
from lightning_hetero.report.run_tables import many, no_flops, no_memory
from lightning_hetero.report.style import (
    COLORS,
    MEASURED,
    MOST_RANKS,
    NAMES,
    PLANNED,
    bytes_unit,
    head,
    new_figure,
    plain,
    rank_labels,
    say,
    seconds_unit,
)

Values = Sequence[float | None]


def planned_figure(run: Run) -> Figure:
    """Busy, step, idle share and peak memory of every rank, planned beside measured."""
    ranks = measured_ranks(run)[:MOST_RANKS]
    figure = new_figure(_width(ranks), 6.6)
    panels = figure.subplots(2, 2)
    _pairs(panels[0][0], ranks, [each.busy_s for each in ranks], "busy", seconds_unit)
    _pairs(panels[0][1], ranks, [each.step_s for each in ranks], "step", seconds_unit)
    _pairs(panels[1][0], ranks, [each.idle_share for each in ranks], "idle share", _percent_unit)
    memory = [each.peak_memory_bytes for each in ranks]
    if all(pair.measured is None and pair.planned is None for pair in memory):
        say(panels[1][1], f"no memory: {no_memory(run)}")
    else:
        _pairs(panels[1][1], ranks, memory, "peak memory", bytes_unit)
    without = "" if any(each.step_s.planned is not None for each in ranks) else f"nothing planned: {run.no_plan}"
    head(figure, run, "Planned against measured", without)
    handles = {label: bar for axes in panels.flat for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def rates_figure(run: Run) -> Figure:
    """Samples/s, TFLOP/s and peak memory of every rank."""
    ranks = measured_ranks(run)[:MOST_RANKS]
    figure = new_figure(1.3 * _width(ranks), 4.2)
    panels = figure.subplots(1, 3)
    rates = [each.samples_per_s for each in ranks]
    own = [each.own_samples_per_s for each in ranks]
    places = range(len(ranks))
    axes = panels[0]
    there = [(place, value) for place, value in zip(places, own, strict=True) if value is not None]
    axes.bar(
        [place for place, _ in there],
        [value for _, value in there],
        color="none",
        edgecolor=PLANNED,
        linestyle="--",
        label="if it only computed",
    )
    _bars(axes, ranks, rates, "throughput", "samples/s", label="measured")
    flops = [each.tflops_per_s for each in ranks]
    if all(value is None for value in flops):
        say(panels[1], f"no TFLOP/s: {no_flops(run)}")
    else:
        most = max(value for value in flops if value is not None)
        factor, unit = (1.0, "TFLOP/s") if most >= 1 else (1e3, "GFLOP/s") if most >= 1e-3 else (1e6, "MFLOP/s")
        scaled = [None if value is None else factor * value for value in flops]
        _bars(panels[1], ranks, scaled, "model FLOP/s, recompute left out", unit)
    memory = [each.peak_memory_bytes.measured for each in ranks]
    if all(value is None for value in memory):
        say(panels[2], f"no memory: {no_memory(run)}")
    else:
        factor, unit = bytes_unit(memory)
        scaled = [None if value is None else factor * value for value in memory]
        _bars(panels[2], ranks, scaled, "peak memory", unit)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    head(figure, run, "What every rank did")
    return figure


def parts_figure(run: Run) -> Figure:
    """Where the time of a mean step goes, stacked for every rank."""
    ranks = measured_ranks(run)[:MOST_RANKS]
    figure = new_figure(10, 2.4 + 0.34 * len(ranks))
    axes = figure.subplots()
    factor, unit = seconds_unit([each.step_s.measured for each in ranks])
    for name in dict.fromkeys(name for each in ranks for name in each.parts_s):
        lefts = [factor * _before(each, name) for each in ranks]
        widths = [factor * each.parts_s.get(name, 0.0) for each in ranks]
        places = range(len(ranks))
        axes.barh(places, widths, left=lefts, color=COLORS[name], label=NAMES.get(name, name), height=0.7)
    planned = [(place, each.busy_s.planned) for place, each in enumerate(ranks)]
    there = [(place, value * factor) for place, value in planned if value is not None]
    if there:
        axes.vlines(
            [value for _, value in there],
            [place - 0.42 for place, _ in there],
            [place + 0.42 for place, _ in there],
            color="black",
            linewidth=1.6,
            label="compute, planned",
        )
    axes.set_yticks(range(len(ranks)), [f"rank {each.rank} ({each.device[:24]})" for each in ranks])
    axes.invert_yaxis()
    axes.set_xlabel(f"time of a step ({unit}), mean over {many(len(run.compared), 'step')}")
    plain(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    head(figure, run, "Where the time of a step goes")
    return figure


def _before(rank: MeasuredRank, name: str) -> float:
    total = 0.0
    for each, seconds in rank.parts_s.items():
        if each == name:
            break
        total += seconds
    return total


def _width(ranks: Sequence[MeasuredRank]) -> float:
    return max(9.0, min(20.0, 3.0 + 0.6 * len(ranks)))


def _pairs(
    axes: Axes,
    ranks: Sequence[MeasuredRank],
    pairs: Sequence[Pair],
    what: str,
    unit_of: Callable[[Values], tuple[float, str]],
) -> None:
    factor, unit = unit_of([value for pair in pairs for value in (pair.planned, pair.measured)])
    planned, measured = [pair.planned for pair in pairs], [pair.measured for pair in pairs]
    half = 0.2 if any(value is not None for value in planned) else 0.0
    for side, values, color, label in ((-half, planned, PLANNED, "planned"), (half, measured, MEASURED, "measured")):
        there = [(place, value * factor) for place, value in enumerate(values) if value is not None]
        if not there:
            continue
        bars = axes.bar(
            [place + side for place, _ in there], [value for _, value in there], 0.4, color=color, label=label
        )
        if len(ranks) <= 8:
            axes.bar_label(bars, fmt="%.3g", fontsize=8)
    _ranks_below(axes, ranks)
    axes.margins(y=0.12)
    axes.set_ylabel(f"{what} ({unit})")
    plain(axes)


def _bars(
    axes: Axes, ranks: Sequence[MeasuredRank], values: Values, what: str, unit: str, label: str | None = None
) -> None:
    there = [(place, value) for place, value in enumerate(values) if value is not None]
    bars = axes.bar([place for place, _ in there], [value for _, value in there], color=MEASURED, label=label)
    if len(ranks) <= 8:
        axes.bar_label(bars, fmt="%.3g", fontsize=8, label_type="center", color="white")
    _ranks_below(axes, ranks)
    axes.set_ylabel(unit)
    axes.set_title(what, fontsize=10)
    plain(axes)


def _ranks_below(axes: Axes, ranks: Sequence[MeasuredRank]) -> None:
    labels = rank_labels([each.rank for each in ranks], [each.device for each in ranks])
    step = max(1, len(ranks) // 24)
    axes.set_xticks(range(0, len(ranks), step), labels[::step], fontsize=8)
    axes.set_xlabel("rank")
    room = max(0.7, (4 - len(ranks)) / 2)  # bars of few ranks are no walls
    axes.set_xlim(-room, len(ranks) - 1 + room)


def _percent_unit(values: Values) -> tuple[float, str]:
    return 100.0, "%"
