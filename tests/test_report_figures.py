"""Figures of a report: what is drawn is what was planned and measured, with units, and named where it is emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lightning_hetero.report import simulation_plot
from lightning_hetero.report.figures import RUN_FIGURES
from lightning_hetero.report.rank_bars import parts_figure, planned_figure, rates_figure
from lightning_hetero.report.run import Run, read_runs
from lightning_hetero.report.scaling import Point, ScalingLine, scaling_lines
from lightning_hetero.report.scaling_plot import scaling_figure, scaling_title
from lightning_hetero.report.style import COLORS, MEASURED, PLANNED
from lightning_hetero.report.timeline import timeline_figure
from tests.report_runs import SECONDS, pipeline_plan, shard_plan, write_run


def read(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def heights(axes: Any, color: str) -> list[float]:
    return [round(bar.get_height(), 6) for bar in axes.patches if to_hex(bar.get_facecolor()) == color]


def spans(axes: Any, kind: str) -> list[tuple[float, float, int]]:
    """Start, end and row of every bar of a kind."""
    found = [bar for bar in axes.patches if to_hex(bar.get_facecolor()) == COLORS[kind]]
    return [
        (round(bar.get_x(), 6), round(bar.get_x() + bar.get_width(), 6), round(bar.get_y() + bar.get_height() / 2))
        for bar in found
    ]


def texts(figure: Figure) -> str:
    own = [text.get_text() for axes in figure.axes for text in (*axes.texts, axes.title, axes.xaxis.label)]
    return "\n".join([figure.get_suptitle(), *own, *(axes._left_title.get_text() for axes in figure.axes)])


def test_planned_beside_measured(tmp_path: Path) -> None:
    figure = planned_figure(read(write_run(tmp_path, plan=shard_plan())))
    busy, step, idle, memory = figure.axes
    assert busy.get_ylabel() == "busy (s)"
    assert (heights(busy, PLANNED), heights(busy, MEASURED)) == ([0.8, 0.9], [0.75, 1.0])
    assert (heights(step, PLANNED), heights(step, MEASURED)) == ([1.0, 1.0], [1.25, 1.25])
    assert idle.get_ylabel() == "idle share (%)"
    assert (heights(idle, PLANNED), heights(idle, MEASURED)) == ([20, 10], [40, 20])
    assert memory.get_ylabel() == "peak memory (MiB)"
    assert (heights(memory, PLANNED), heights(memory, MEASURED)) == ([64, 64], [48, 48])


def test_rates_and_parts(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, plan=shard_plan()))
    throughput, flops, memory = rates_figure(run).axes
    assert (throughput.get_ylabel(), heights(throughput, MEASURED)) == ("samples/s", [4.8, 1.6])
    assert (flops.get_ylabel(), heights(flops, MEASURED)) == ("TFLOP/s", [4.8, 1.6])
    assert (memory.get_ylabel(), heights(memory, MEASURED)) == ("MiB", [48, 48])
    (axes,) = parts_figure(run).axes
    assert axes.get_xlabel() == "time of a step (s), mean over 3 steps"
    assert spans(axes, "compute") == [(0, 0.75, 0), (0, 1.0, 1)]
    assert spans(axes, "waiting") == [(0.75, 1.0, 0), (1.0, 1.0, 1)]
    assert spans(axes, "communication") == [(1.0, 1.1, 0), (1.0, 1.1, 1)]
    (planned,) = axes.collections
    assert [segment[0][0] for segment in planned.get_segments()] == [0.8, 0.9]


def test_what_is_not_known_is_said_in_its_place(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, strategy="ddp", without=("flops", "memory_peak_bytes")))
    assert "nothing planned: ddp made no plan" in texts(planned_figure(run))
    assert "no memory: " in texts(planned_figure(run))
    assert "no TFLOP/s: " in texts(rates_figure(run))
    assert "nothing planned: ddp made no plan" in texts(timeline_figure(run))


ACTIONS = [["0F0", 0.0, 1.5], ["0F1", 1.5, 3.0], ["0B0", 5.0, 7.0], ["0B1", 8.0, 10.0]]
PARTS = [["messages", 0.0, 0.1], ["compute", 0.1, 10.0], ["optimizer", 10.0, 10.5]]


def test_the_grid_of_a_pipeline_has_its_bubbles(tmp_path: Path) -> None:
    timeline = ("timeline", {"step": 4, "parts": PARTS, "units": [], "actions": ACTIONS})
    write_run(tmp_path, plan=pipeline_plan(), pipelines=[SECONDS], strategy="hetero_pipe", extra={0: [timeline]})
    planned, measured = timeline_figure(read(tmp_path)).axes
    # 1F1B: rank 1's forward 0 begins when rank 0's has ended, and each backward goes down
    assert spans(planned, "F") == [(0, 1, 0), (1, 2, 0), (1, 2, 1), (4, 5, 1)]
    assert spans(planned, "B") == [(4, 6, 0), (7, 9, 0), (2, 4, 1), (5, 7, 1)]
    assert "idle 33.3 %" in "".join(text.get_text() for text in planned.texts)
    assert sorted(text.get_text() for text in planned.texts if len(text.get_text()) == 1) == sorted("01" * 4)
    assert spans(measured, "F") == [(0, 1.5, 0), (1.5, 3, 0)]
    assert spans(measured, "B") == [(5, 7, 0), (8, 10, 0)]
    assert spans(measured, "optimizer") == [(10, 10.5, 0)]
    assert spans(measured, "compute") == []  # which its actions are
    assert measured.get_xlabel() == "time in the step (s)"
    assert "step 4, as it was traced" in measured._left_title.get_text()


def test_without_a_trace_parts_are_drawn_and_said_to_have_no_order(tmp_path: Path) -> None:
    planned, measured = timeline_figure(read(write_run(tmp_path, plan=shard_plan()))).axes
    assert spans(planned, "compute") == [(0, 0.8, 0), (0, 0.9, 1)]
    assert spans(planned, "idle") == [(0.8, 1.0, 0), (0.9, 1.0, 1)]
    assert spans(measured, "compute") == [(0, 0.75, 0), (0, 1.0, 1)]
    assert "parts are not in their order, which TraceCapture notes" in measured._left_title.get_text()


def test_scaling(tmp_path: Path) -> None:
    alike = {"device": "d"}
    runs = [read(write_run(tmp_path / str(n), ranks=n, samples=(5.0,) * n, header=alike)) for n in (1, 2)]
    total, share = scaling_figure(scaling_lines(runs)).axes
    measured, ideal, own = [list(line.get_xydata()[:, 1]) for line in total.lines]
    assert measured == [4.0, 8.0]
    assert ideal == [4.0, 8.0]
    assert own == pytest.approx([5 / 0.75, 5 / 0.75 + 5])
    assert (total.get_xlabel(), total.get_ylabel()) == ("ranks", "throughput (samples/s)")
    assert list(share.lines[0].get_xydata()[:, 1]) == [100, 100]
    assert list(share.lines[1].get_xydata()[:, 1]) == pytest.approx([60, 100 * 8 / (5 / 0.75 + 5)])


def test_simulated_scaling_says_so_and_weak_is_not_strong() -> None:
    points = {
        each: tuple(Point("c", n, frozenset({"d"}), 8 * (n if each == "weak" else 1), 4.0 * n, None) for n in (1, 2))
        for each in ("weak", "strong")
    }
    lines = {each: ScalingLine("FULL_SHARD", False, own, simulated=True) for each, own in points.items()}
    assert scaling_title([lines["weak"]]) == "Weak scaling"
    assert scaling_title([lines["strong"]]) == "Strong scaling"
    assert scaling_title(list(lines.values())).startswith("Scaling, samples a rank differ")
    total, _ = scaling_figure([lines["strong"]]).axes
    assert total.lines[0].get_label() == "FULL_SHARD, simulated"


def test_simulated_scaling_is_drawn_whole_with_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(rates: tuple[float, ...], mixed: bool) -> ScalingLine:
        points = tuple(
            Point(
                "c", ranks, frozenset({f"kind {index}" if mixed else "kind"}), 64, rate, 10.0 * ranks if mixed else None
            )
            for index, (ranks, rate) in enumerate(zip((1, 8, 64), rates, strict=True))
        )
        return ScalingLine("FULL_SHARD", False, points, simulated=True)

    saved = []
    monkeypatch.setattr(simulation_plot, "save_figure", lambda figure, path: saved.append(figure))
    lines = {"small": [line((4.0, 8.0, 9.0), False)], "large": [line((4.0, 8.0, 9.0), True)]}
    simulation_plot.plot_simulated_scaling(lines, "s.png", "frontier, global batch 64, bf16-true")
    figure = saved[0]
    assert figure.get_suptitle().startswith("Strong scaling on frontier, global batch 64, bf16-true\nSIMULATED")
    figure.draw_without_rendering()
    for total, share in (figure.axes[:2], figure.axes[2:]):
        for axes in (total, share):
            low, high = axes.get_ylim()
            drawn = [value for each in axes.lines for value in each.get_xydata()[:, 1]]
            assert low < min(drawn) or axes is share
            assert max(drawn) <= high  # the ideal of strong scaling, 64 x 4, too
            legend = axes.get_legend()
            assert len(legend.get_texts()) == sum(
                len(each.get_xdata()) > 1 and each.get_label()[0] != "_" for each in axes.lines
            )
            assert legend.get_window_extent().y1 < axes.get_window_extent().y0
    assert [each.get_label() for each in figure.axes[2].lines] == [
        "FULL_SHARD, simulated",
        "FULL_SHARD, if ranks only computed",
    ]


def test_every_figure_says_that_devices_are_emulated(tmp_path: Path) -> None:
    for emulated in (True, False):
        run = read(write_run(tmp_path / str(emulated), plan=shard_plan(), emulated=emulated))
        figures = [draw(run) for _, draw, _ in RUN_FIGURES] + [scaling_figure(scaling_lines([run]))]
        assert {"EMULATED" in figure.get_suptitle() for figure in figures} == {emulated}


@pytest.mark.slow
def test_a_figure_of_many_ranks_is_no_larger_than_a_page(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, ranks=100, steps=2, samples=(1.0,) * 100, plan=shard_plan((1,) * 100)))
    for _, draw, _ in RUN_FIGURES:
        figure = draw(run)
        assert max(figure.get_size_inches()) <= 28
        assert "the first 64 of 100 ranks" in figure.get_suptitle()
