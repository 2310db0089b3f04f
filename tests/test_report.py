"""lightning-hetero report: its numbers are the file's, what is absent says why, and bad files are told by line."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_hetero.cli import main
from lightning_hetero.metrics import rank_path
from lightning_hetero.report.measured_rank import measured_ranks
from lightning_hetero.report.run import Run, read_runs
from lightning_hetero.report.run_tables import run_tables
from lightning_hetero.report.scaling import scaling_lines, scaling_table
from lightning_hetero.report.table import ReportTable
from tests import cli_runs
from tests.report_runs import SECONDS, pipeline_plan, shard_plan, write_run

ROOT = Path(__file__).parent.parent


def read(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def column(table: ReportTable, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


# -- tables ------------------------------------------------------------------------------------------------------------


def test_planned_stands_beside_measured(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, plan=shard_plan()))
    table = run_tables(run)[0]
    assert [column(table, f"busy\n{which}") for which in ("planned", "measured")] == [
        ["800 ms", "900 ms"],
        ["750 ms", "1 s"],
    ]
    assert column(table, "step\nplanned") == ["1 s", "1 s"]
    assert column(table, "step\nmeasured") == ["1.25 s", "1.25 s"]
    assert column(table, "idle\nplanned") == ["20.0 %", "10.0 %"]
    assert column(table, "idle\nmeasured") == ["40.0 %", "20.0 %"]
    assert column(table, "peak memory\nplanned") == ["64 MiB", "64 MiB"]
    assert column(table, "peak memory\nmeasured") == ["48 MiB", "48 MiB"]
    assert column(table, "samples/s") == ["4.8", "1.6"]
    assert column(table, "TFLOP/s") == ["4.8", "1.6"]
    assert "MFU" not in table.columns
    assert "power\nW" not in table.columns
    assert table.notes == (
        "means over 3 full steps, 2 to 4 of 4; together 6.4 samples/s",
        "the plan expects a step of 1 s for 8 samples: 8 samples/s",
        "no MFU: it is a CPU",
        "no power: RankEnergy was not among the callbacks",
    )


def test_parts_sum_to_the_step_and_are_told_apart(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, plan=shard_plan()))
    for each in measured_ranks(run):
        assert math.fsum(each.parts_s.values()) == pytest.approx(each.step_s.measured)
    table = run_tables(run)[1]
    # rank 1 is blocked least, for 0.1 s: that is communication, and the rest of rank 0's 0.35 s is waiting
    assert column(table, "waiting") == ["250 ms\n20.0 %", "0 s\n0.0 %"]
    assert column(table, "communication") == ["100 ms\n8.0 %", "100 ms\n8.0 %"]
    assert column(table, "compute") == ["750 ms\n60.0 %", "1 s\n80.0 %"]


def test_energy_and_mfu_where_there_are_any(tmp_path: Path) -> None:
    values = {step: {"joules": 250.0, "energy_s": 1.25} for step in range(1, 5)}
    header = {"peak_flops_per_s": 9.6e12, "no_peak": None}
    table = run_tables(read(write_run(tmp_path, each=values, header=header)))[0]
    assert column(table, "power\nW") == ["200", "200"]
    assert column(table, "J/sample") == ["41.7", "125"]
    assert column(table, "MFU") == ["50.0 %", "16.7 %"]


def test_what_is_absent_says_why_and_is_no_zero(tmp_path: Path) -> None:
    write_run(tmp_path, strategy="ddp", without=("flops", "memory_peak_bytes"), header={"callbacks": ["TraceCapture"]})
    planned, _, stragglers = run_tables(read(tmp_path))
    assert planned.columns == ("rank", "device", "samples\na step", *MEASURED_ALONE)
    assert planned.notes[1:] == (
        "nothing planned: ddp made no plan",
        "no memory: RankMemory was not among the callbacks",
        "no TFLOP/s: RankThroughput was not among the callbacks",
        "no power: RankEnergy was not among the callbacks",
    )
    assert not any(cell in ("0", "0 B", "0 s") for row in planned.rows for cell in row[1:])
    assert "StragglerMonitor was not among the callbacks" in stragglers.title


MEASURED_ALONE = ("busy\nmeasured", "step\nmeasured", "idle\nmeasured", "samples/s")


def test_reasons_of_the_run_itself(tmp_path: Path) -> None:
    extra = {
        0: [("model", {"step": 0, "no_flops": "Gate cannot run"}), ("energy_source", {"step": 0, "reason": "no RAPL"})]
    }
    write_run(tmp_path, without=("flops",), extra=extra)
    notes = run_tables(read(tmp_path))[0].notes
    assert "no TFLOP/s: Gate cannot run" in notes
    assert "no power: no RAPL" in notes


STRAGGLER = {"since_step": 3, "step": 5, "compute_s": 1.3, "expected_s": 1.0, "slowdown": 1.3, "planned": True}


def test_stragglers(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, extra={1: [("straggler", STRAGGLER)]}))
    assert run_tables(run)[2].rows == (("1", "dev1", "3", "5", "1.3 s", "1 s", "30%", "the plan"),)


def test_a_plan_is_for_one_batch_and_a_step_may_be_several(tmp_path: Path) -> None:
    write_run(tmp_path, plan=shard_plan(), each={step: {"batches": 2} for step in range(1, 5)})
    table = run_tables(read(tmp_path))[0]
    assert column(table, "busy\nplanned") == ["1.6 s", "1.8 s"]
    assert column(table, "step\nplanned") == ["2 s", "2 s"]


def test_compared_are_full_steps_that_nobody_looked_into(tmp_path: Path) -> None:
    plans = {rank: [("plan", {"step": 2, "plan": {"busy_s": 0.5, "step_s": 0.7}})] for rank in (0, 1)}
    each: dict[int, dict[str, Any]] = {4: {"sampled": True}, 5: {"traced": True}, 6: {"samples": 1.0}}
    run = read(write_run(tmp_path, steps=8, each=each, extra=plans))
    assert run.compared == [3, 7, 8]  # from the plan of step 2 on
    assert [pair.busy_s.planned for pair in measured_ranks(run)] == [0.5, 0.5]
    write_run(tmp_path / "b", steps=2, each={2: {"traced": True}})
    assert read(tmp_path / "b").compared == [2]  # better than none
    warming_up = read(write_run(tmp_path / "c", steps=1))
    assert run_tables(warming_up)[0].notes[0].startswith("means over 1 full step, 1 of 1, the first, which warms up;")


def test_emulated_devices_are_named_so_on_every_table(tmp_path: Path) -> None:
    for emulated in (True, False):
        runs = [
            read(write_run(tmp_path / f"{emulated}{ranks}", ranks=ranks, samples=(4.0,) * ranks, emulated=emulated))
            for ranks in (1, 2)
        ]
        tables = [table for run in runs for table in run_tables(run)] + [scaling_table(scaling_lines(runs))]
        assert {("EMULATED" in table.title) for table in tables} == {emulated}


def test_cells_are_no_markup(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, header={"device": "[red]<b>x"}))
    screen = io.StringIO()
    run_tables(run)[0].show(Console(file=screen, width=180))
    assert "[red]<b>x" in screen.getvalue()
    assert "[red]&lt;b&gt;x" in run_tables(run)[0].as_html()


# -- several runs ------------------------------------------------------------------------------------------------------


def test_scaling_against_the_smallest_run_and_against_no_waiting(tmp_path: Path) -> None:
    alike = {"device": "d"}
    runs = [
        read(write_run(tmp_path / str(ranks), ranks=ranks, samples=(5.0,) * ranks, each=steps, header=alike))
        for ranks, steps in ((4, {}), (1, {step: {"step_s": 1.0} for step in range(1, 5)}))
    ]
    (line,) = scaling_lines(runs)
    one, four = line.points
    assert (one.ranks, one.samples_per_s, four.samples_per_s) == (1, 5.0, 16.0)
    assert (line.ideal(one), line.ideal(four)) == (5.0, 20.0)
    assert four.own_samples_per_s == pytest.approx(5 / 0.75 + 3 * 5)
    table = scaling_table([line])
    assert column(table, "of the\nideal") == ["100.0 %", "80.0 %"]
    assert not any("not weak" in note for note in table.notes)
    # a run of other devices has no such ideal, nor has one that is alone
    other = read(write_run(tmp_path / "x", ranks=2, samples=(5.0,) * 2, header={"device": "e"}))
    assert column(scaling_table(scaling_lines([*runs, other])), "ideal") == ["5", "-", "20"]
    assert column(scaling_table(scaling_lines([other])), "of the\nideal") == ["-"]


def test_runs_that_are_not_alike_are_not_one_line(tmp_path: Path) -> None:
    real = write_run(tmp_path / "real" / "run", ranks=1)
    rehearsal = write_run(tmp_path / "rehearsal" / "run", emulated=True)
    more = write_run(tmp_path / "more" / "run", ranks=2, samples=(3.0, 3.0))
    lines = scaling_lines(read_runs([real, rehearsal, more]))
    assert [(line.emulated, [point.name for point in line.points]) for line in lines] == [
        (False, ["real/run", "more/run"]),
        (True, ["rehearsal/run"]),
    ]
    assert any("not weak scaling" in note for note in scaling_table(lines).notes)


# -- runs that did not end well ----------------------------------------------------------------------------------------


def test_a_killed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, plan=shard_plan(), merged=False, ended=False)
    path = rank_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-5])
    run = read(tmp_path)
    assert run.compared == [2, 3]  # rank 1 has not finished the fourth
    assert "ranks 0, 1 did not end well, or still run" in run_tables(run)[0].notes
    path.unlink()
    planned, parts, _ = run_tables(read(tmp_path))
    assert any(note.startswith("no lines of rank 1: put their metrics.rank_*.jsonl into") for note in planned.notes)
    assert "together" not in planned.notes[0]
    assert "waiting or\ncommunication" in parts.columns
    assert column(parts, "waiting or\ncommunication") == ["350 ms\n28.0 %"]
    assert "cannot be told apart" in parts.notes[0]
    write_run(tmp_path / "b", merged=False)
    rank_path(tmp_path / "b", 0).unlink()
    assert any("the lines of rank 0, which are not here" in note for note in run_tables(read(tmp_path / "b"))[0].notes)


def bad_file(tmp_path: Path, line: str) -> Path:
    """A merged file whose line 4 is bad."""
    path = write_run(tmp_path) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], line + "\n", *lines[4:]]))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"kind": "step", "ra', ["metrics.jsonl, line 4, is not JSON", "delete this line"]),
        (
            '{"kind": "run", "rank": 0, "run": "b", "schema": 7}',
            ["line 4, has schema 7", "reads 1", "read it with"],
        ),
        ('{"kind": "run", "rank": 0, "run": "b", "schema": 1}', ["line 4, begins a run", "delete the lines of this"]),
        ('{"kind": "step", "rank": "0"}', ["line 4, is without kind and rank", "delete it"]),
        ('{"kind": "step", "rank": 0, "step": "x"}', ["line 4, has the step 'x'", "delete this line"]),
        (
            '{"kind": "step", "rank": 0, "step": 2}',
            ["step 2, rank 0 has no number step_s, compute_s", "delete"],
        ),
        (
            '{"kind": "step", "rank": 5, "step": 2, "step_s": 1, "compute_s": 1, "samples": 1}',
            ["steps of rank 5", "cut"],
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    err = cli_runs.failed(capsys, lambda: main(["report", str(bad_file(tmp_path, line))]))
    assert all(text in err for text in said), err
    assert not (tmp_path / "report").exists()


def test_bad_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(path: Path) -> str:
        return cli_runs.failed(capsys, lambda: main(["report", str(path)]))

    assert "nowhere does not exist: give the folder" in refused(tmp_path / "nowhere")
    assert f"{tmp_path} has no metrics.jsonl: give the folder of a run with" in refused(tmp_path)
    write_run(tmp_path / "a", steps=0)
    assert "has no step: the run ended before its first one" in refused(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").touch()
    assert "has an empty metrics.jsonl" in refused(tmp_path / "b")


# -- the command -------------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
for name in ("torch", "lightning", "timm", *sys.argv[2:]):
    sys.modules[name] = None
from lightning_hetero.cli import main
sys.exit(main(["report", sys.argv[1]]))
"""


def test_without_torch_and_matplotlib_there_are_tables_and_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path, plan=shard_plan(), emulated=True)
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path), "matplotlib"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert "Planned against measured" in result.stdout
    assert (
        "no plots: matplotlib is not installed; install it with: pip install 'lightning-hetero[plot]'" in result.stdout
    )
    page = (tmp_path / "report" / "report.html").read_text()
    assert "matplotlib is not installed" in page
    assert "<img" not in page
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.html"]


def test_all_is_drawn_and_put_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "pipe", plan=pipeline_plan(), pipelines=[SECONDS], strategy="hetero_pipe", emulated=True)
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "pipe"), "--out", str(out)]) == 0
    shown, progress = capsys.readouterr()
    assert "Where the time of a step goes: pipe, hetero_pipe, 2 ranks" in shown
    assert "drawing: 4 of 4: done" in progress
    names = sorted(path.name for path in out.iterdir())
    assert names == ["parts.png", "planned.png", "rates.png", "report.html", "timeline.png"]
    page = (out / "report.html").read_text()
    assert page.count("src='data:image/png;base64,") == 4
    assert re.findall(r"(?:src|href)=(?!'data:)", page) == []
    assert "<p class=emulated>EMULATED devices" in page
    assert main(["report", str(tmp_path / "pipe"), "--no-html"]) == 0
    assert not (tmp_path / "pipe" / "report" / "report.html").exists()
    assert (tmp_path / "pipe" / "report" / "timeline.png").exists()


def test_several_runs_are_drawn_in_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_hetero.report.figures.RUN_FIGURES", RUN_FIGURES_FOR_TEST)
    for ranks in (1, 2):
        write_run(tmp_path / f"r{ranks}", ranks=ranks)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "r1", "r2"]) == 0
    assert "Runs side by side" in capsys.readouterr().out
    found = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "report").rglob("*.*"))
    assert found == ["report/r1/x.png", "report/r2/x.png", "report/report.html", "report/scaling.png"]
    assert (tmp_path / "report" / "report.html").read_text().count("<img") == 3


def _small(run: Run) -> Any:
    from lightning_hetero.report.style import new_figure

    return new_figure(1, 1)


RUN_FIGURES_FOR_TEST = (("x", _small, "a figure"),)
