"""The benchmark of predictions: its figures follow from raw values, its settings are what they say, one runs here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.hetero_speedup.model import ViTSize
from benchmarks.predicted_steps import __main__ as command
from benchmarks.predicted_steps.figures import error, late_share, problems, row_of, summary, worst
from benchmarks.predicted_steps.setting import FSDP, PIPE, Setting
from benchmarks.predicted_steps.settings import PIPELINES, QUICK, SETTINGS, SHARDED
from benchmarks.predicted_steps.table import print_results
from lightning_hetero.errors import HeteroError
from lightning_hetero.report import predicted_steps
from lightning_hetero.report.predicted_steps import plot_predicted_steps

RESULTS = Path(command.__file__).parent / "results" / "full.json"


def rank(busy: tuple[float, float], peak: tuple[int | None, int | None], late_s: float = 0.0) -> dict[str, Any]:
    return {
        "predicted_busy_s": busy[0],
        "busy_s": busy[1],
        "predicted_peak_bytes": peak[0],
        "peak_bytes": peak[1],
        "emulation": {"late_s": late_s, "target_s": 10.0, "units_late": 1, "units_run": 4},
    }


def row(predicted_s: float, *ranks: dict[str, Any], strategy: str = FSDP) -> dict[str, Any]:
    speeds = {"strategy": strategy, "true_gflops": [1.0] * len(ranks), "declared_gflops": [2.0] * len(ranks)}
    told = {"ranks": list(ranks), "plan": {}}
    return speeds | row_of({"predicted_step_s": predicted_s}, told, [9.0, 1.0, 1.1, 0.9])


def test_errors_are_of_medians_without_the_first_step() -> None:
    found = row(1.04, rank((0.9, 1.0), (99, 100)), rank((1.0, 1.0), (103, 100), late_s=0.3))
    assert found["measured_step_s"] == 1.0
    assert found["error"] == pytest.approx(0.04)
    assert found["busy_errors"] == pytest.approx([-0.1, 0.0])
    assert found["memory_errors"] == pytest.approx([-0.01, 0.03])
    assert found["late_share"] == 0.03
    assert found["raw_step_s"] == [9.0, 1.0, 1.1, 0.9]


def test_what_is_not_there_has_no_error() -> None:
    assert error(None, 1.0) is error(1.0, None) is error(1.0, 0.0) is None
    assert worst([None, -0.2, 0.1]) == -0.2
    assert worst([None]) is None
    assert late_share({"late_s": 0.0, "target_s": 0.0}) == 0.0


def test_what_is_off_is_named() -> None:
    rows = {
        "good": row(1.049, rank((1, 1), (104, 100))),
        "slow": row(0.94, rank((1, 1), (100, 100))),
        "large": row(1.0, rank((1, 1), (100, 100)), rank((1, 1), (94, 100))),
        "unknown": row(1.0, rank((1, 1), (None, 100))),
    }
    assert problems(rows) == [
        "slow: step predicted -6.0% off",
        "large: memory predicted -6.0% off",
        "unknown: memory was not predicted",
    ]
    assert problems({"good": rows["good"]}) == []


def test_the_summary_is_by_strategy() -> None:
    rows = {
        "a": row(1.02, rank((0.9, 1.0), (100, 100), late_s=0.5)),
        "b": row(0.96, rank((1.0, 1.0), (103, 100))),
        "c": row(1.01, rank((1.0, 1.0), (None, 100)), strategy=PIPE),
    }
    found = summary(rows)
    assert found[FSDP]["settings"] == 2
    assert found[FSDP]["mean_step_error"] == pytest.approx(0.03)
    assert found[FSDP]["largest_step_error"] == pytest.approx(0.04)
    assert found[FSDP]["largest_busy_error"] == pytest.approx(0.1)
    assert found[FSDP]["labelled_late"] == 1
    assert found[PIPE]["largest_memory_error"] is None


def test_settings_are_as_many_and_as_different_as_they_are_said_to_be() -> None:
    assert len(SHARDED) >= 12
    assert len(PIPELINES) >= 8
    assert len(SETTINGS) == len(SHARDED) + len(PIPELINES)
    assert set(QUICK) <= set(SETTINGS)
    for setting in SETTINGS.values():
        cluster = setting.cluster()
        assert cluster.emulate
        assert [device.true_speed_flops_per_s for device in cluster.devices] == [s * 1e9 for s in setting.true_speeds]
        assert setting.global_batch % setting.world_size == 0
        assert not setting.groups or sorted(sum(setting.groups, ())) == list(range(setting.world_size))
    off = [
        true / declared - 1
        for setting in SETTINGS.values()
        for true, declared in zip(setting.true_speeds, setting.declared, strict=True)
    ]
    assert min(off) <= -0.1
    assert max(off) >= 0.1
    assert {setting.world_size for setting in SHARDED} == {2, 3, 4}


def test_the_committed_run_has_every_setting_within_5_percent() -> None:
    found = json.loads(RESULTS.read_text())
    assert set(found["settings"]) == set(SETTINGS)
    assert found["emulated"] is True
    assert problems(found["settings"]) == []
    assert summary(found["settings"]) == found["summary"]


def options(*arguments: str) -> Any:
    return command.parse_arguments(arguments)


def test_settings_are_chosen_by_name_and_left_out_where_they_are_known() -> None:
    assert command.chosen(options(), {}) == list(SETTINGS)
    assert command.chosen(options("--quick"), {}) == list(QUICK)
    assert command.chosen(options("--only", "two pipelines"), {}) == [
        "hetero_pipe: two pipelines",
        "hetero_pipe: GPT, two pipelines",
    ]
    known = {"hetero_pipe: two pipelines": {}}
    assert command.chosen(options("--only", "two pipelines", "--resume"), known) == ["hetero_pipe: GPT, two pipelines"]
    with pytest.raises(HeteroError, match="no setting is called so"):
        command.chosen(options("--only", "nobody"), {})


@pytest.mark.parametrize(("predicted_s", "status"), [(1.0, 0), (1.2, 1)])
def test_the_exit_status_says_whether_predictions_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], predicted_s: float, status: int
) -> None:
    monkeypatch.setattr(command, "measure", lambda setting, steps: row(predicted_s, rank((1, 1), (100, 100))))
    monkeypatch.setattr(command, "preload", lambda *modules: None)
    out = tmp_path / "found.json"
    assert command.main(["--only", "two stages", "--out", str(out)]) == status
    assert list(json.loads(out.read_text())["settings"]) == ["hetero_pipe: two stages"]
    # a second part joins the first, in the order of all settings
    assert command.main(["--only", "three types", "--out", str(out)]) == status
    assert list(json.loads(out.read_text())["settings"]) == ["hetero_fsdp: three types", "hetero_pipe: two stages"]
    printed = capsys.readouterr()
    assert "EMULATED" in printed.out
    assert ("step predicted +20.0% off" in printed.err) == bool(status)


def test_late_settings_are_labelled_in_the_table() -> None:
    rows = {"late": row(1.0, rank((1, 1), (100, 100), late_s=0.5)), "in time": row(1.0, rank((1, 1), (100, 100)))}
    console = Console(width=150, record=True, file=io.StringIO())
    print_results(command.results_of(rows, quick=False), console)
    lines = console.export_text().splitlines()
    assert [("LATE" in line) for line in lines if "1 (2)" in line] == [True, False]


def test_the_figure_draws_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = predicted_steps.save_figure
    monkeypatch.setattr(predicted_steps, "save_figure", lambda figure, path: (drawn.append(figure), save(figure, path)))
    rows = {
        "one": row(0.93, rank((1, 1), (104, 100)), rank((1, 1), (97, 100))),
        "two": row(1.01, rank((1, 1), (None, 100)), strategy=PIPE),
    }
    plot_predicted_steps(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    steps, memory = drawn[0].axes
    title = drawn[0].get_suptitle()
    assert "emulated" in title.lower()
    assert [label.get_text() for label in steps.get_yticklabels()] == ["one", "two"]
    points = [sorted(line.get_xdata()) for line in memory.get_lines()[1:]]
    assert points[0] == pytest.approx([0.97, 1.04])
    assert steps.get_xlim()[0] < 0.93
    with pytest.raises(ValueError, match="no setting"):
        plot_predicted_steps({}, tmp_path / "none.png")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP, PIPE])
def test_a_tiny_setting_runs_and_is_predicted(strategy: str) -> None:
    """Bounds are wide: other tests run beside it."""
    size = ViTSize(depth=2, width=64, heads=2)
    tiny = Setting("tiny", strategy, (0.6, 0.3), (0.5, 0.36), global_batch=12, size=size)
    found = command.measure(tiny, steps=3)
    assert len(found["raw_step_s"]) == 3
    assert abs(found["error"]) < 0.3
    assert max(map(abs, found["memory_errors"])) < 0.05
    assert found["plan"]["global_batch_size"] == 12
    assert [each["emulation"]["units_run"] > 0 for each in found["ranks"]] == [True, True]
