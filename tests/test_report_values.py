"""A report's values are of the right rank, run, plan and step, in the unit that is written beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.metrics import MERGED
from lightning_hetero.report.measured_rank import measured_ranks
from lightning_hetero.report.rank_bars import planned_figure, rates_figure
from lightning_hetero.report.run import Run, read_runs
from lightning_hetero.report.run_tables import run_tables
from lightning_hetero.report.style import MEASURED
from lightning_hetero.report.timeline import timeline_figure
from tests.report_runs import MIB, shard_plan, write_run
from tests.test_report import column
from tests.test_report_figures import heights, spans


def read(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def test_a_rate_is_of_the_ranks_own_peak_and_seconds(tmp_path: Path) -> None:
    energy = {step: {"joules": 250.0, "energy_s": 1.0} for step in range(1, 5)}  # readings are not a step apart
    path = write_run(tmp_path, each=energy) / MERGED
    text = path.read_text()
    for rank, peak in ((0, "9.6e12"), (1, "3.2e12")):
        before = f'"device":"dev{rank}","emulated":false,"dtype":"fp32","peak_flops_per_s":null'
        assert before in text
        text = text.replace(before, before.replace("null", peak))
    path.write_text(text)
    ranks = measured_ranks(read(tmp_path))
    assert [each.mfu for each in ranks] == pytest.approx([0.5, 0.5])  # 4.8 of 9.6 and 1.6 of 3.2 TFLOP/s
    assert [each.power_w for each in ranks] == [250, 250]


def test_peak_memory_is_the_most_of_any_step(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, each={1: {"memory_peak_bytes": 80 * MIB}, 3: {"memory_peak_bytes": 16 * MIB}}))
    assert column(run_tables(run)[0], "peak memory\nmeasured") == ["80 MiB", "80 MiB"]


def test_the_run_that_is_shown_is_the_last_in_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    path = tmp_path / MERGED
    first = path.read_text()
    write_run(tmp_path / "b", steps=3)
    second = (tmp_path / "b" / MERGED).read_text().replace('"run":"a"', '"run":"b"')
    path.write_text(first + second)
    run = read(tmp_path)
    assert (run.metrics.run, run.last_step, run.earlier) == ("b", 3, 1)


def test_the_plan_that_is_shown_is_the_one_that_held_last(tmp_path: Path) -> None:
    later = replace(shard_plan(), batch_shares=(5, 3), predicted_step_s=0.5)
    moved = ("whole_plan", {"step": 2, "plan": later.to_dict(), "pipelines": None})
    never = ("whole_plan", {"step": 4, "plan": shard_plan().to_dict(), "pipelines": None})  # held for no step
    run = read(write_run(tmp_path, plan=shard_plan(), extra={0: [moved, never]}))
    assert run.plan is not None
    assert (run.plan.batch_shares, run.plan.predicted_step_s) == ((5, 3), 0.5)  # type: ignore[union-attr]


def traced(step: int, seconds: float) -> tuple[str, dict[str, Any]]:
    return "timeline", {"step": step, "parts": [["compute", 0.0, seconds]], "units": [], "actions": []}


def test_the_step_that_is_drawn_is_the_last_that_was_traced_each_rank_as_it_ran(tmp_path: Path) -> None:
    extra = {rank: [traced(2, 9.0), traced(4, 1.0 + rank)] for rank in (0, 1)}
    _, measured = timeline_figure(read(write_run(tmp_path, extra=extra))).axes
    assert spans(measured, "compute") == [(0, 1, 0), (0, 2, 1)]
    assert "step 4, as it was traced" in measured._left_title.get_text()


def test_axes_have_the_unit_of_what_is_drawn(tmp_path: Path) -> None:
    short = {step: {"compute_s": 0.004, "step_s": 0.005, "flops": 1e9} for step in range(1, 5)}
    run = read(write_run(tmp_path, each=short))
    busy, step, _, _ = planned_figure(run).axes
    assert (busy.get_ylabel(), heights(busy, MEASURED)) == ("busy (ms)", [4, 4])
    assert (step.get_ylabel(), heights(step, MEASURED)) == ("step (ms)", [5, 5])
    _, flops, _ = rates_figure(run).axes
    assert (flops.get_ylabel(), heights(flops, MEASURED)) == ("GFLOP/s", [200, 200])


def test_dashed_is_what_a_rank_would_do_if_it_never_waited(tmp_path: Path) -> None:
    throughput = rates_figure(read(write_run(tmp_path))).axes[0]
    dashed = [bar.get_height() for bar in throughput.patches if bar.get_linestyle() == "--"]
    assert dashed == pytest.approx([6 / 0.75, 2 / 1.0])
    assert heights(throughput, MEASURED) == [4.8, 1.6]
