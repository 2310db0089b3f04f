"""TraceCapture under every kind of strategy: a trace per rank, one of all, and no other step touched."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.profiler import profile

import lightning_hetero
from lightning_hetero.callbacks import RankThroughput, StragglerMonitor, TraceCapture
from lightning_hetero.callbacks.trace_file import MARK
from lightning_hetero.errors import HeteroError
from lightning_hetero.metrics import read_metrics
from lightning_hetero.plan import Pipeline, PipelinePlan, RankPrediction, Stage
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy
from tests.callback_fits import BUSY_S, LAYERS, SHARE, Wide, devices, fit, shard_plan, steps_of
from tests.harness import WarmRanks

PLANNED, MEASURED, PARTS = 1, 2, 3

AWAKE_US = 8e3
"""by which ranks may differ in when the barrier lets them go, on a busy machine; a forward takes 10 ms
or more"""


def on_shards(steps: int) -> dict[str, Any]:
    strategy = HeteroFSDPStrategy(devices((BUSY_S,) * 2, SHARE), shard_plan(2), check_loss="off", summary=False)
    callbacks = [RankThroughput(), TraceCapture(steps=(2, 99), ranks=1), StragglerMonitor()]
    return fit(Wide(), strategy, callbacks, batch=SHARE, steps=2 * steps)


def on_a_pipeline(steps: int) -> dict[str, Any]:
    """Two layers and one; three micro-batches of two."""
    stages = (Stage((0, 3), 2), Stage((3, 6), 1))
    names = tuple(str(i) for i in range(2 * LAYERS))
    predictions = (RankPrediction.of(0.12, 0.2, 2**20),) * 2
    plan = PipelinePlan(
        6, 2, (Pipeline((0, 1), stages, 3),), ("d0", "d1"), names, predicted_step_s=0.2, predictions=predictions
    )
    strategy = HeteroPipelineStrategy(devices((0.24, 0.24), 6), plan=plan, summary=False)
    return fit(Wide(), strategy, [TraceCapture(steps=2)], batch=3, steps=2 * steps)


def on_ddp(steps: int) -> dict[str, Any]:
    return fit(Wide(), "ddp", [TraceCapture(steps=[2])], batch=2, steps=2 * steps, devices=2)


def events(path: Path, pid: int | None = None, ph: str = "X") -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event["ph"] == ph and pid in (None, event["pid"])]


def names_of_processes(path: Path) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events(path, ph="M") if event["name"] == "process_name"}


def check_ranks_events(path: Path, ranks: Sequence[int]) -> None:
    """Operations of these ranks, on one clock, in processes of their own."""
    for rank in ranks:
        own = [event for event in events(path) if 100 * (rank + 1) <= event["pid"] < 100 * (rank + 2)]
        assert any("addmm" in event["name"] for event in own)
        (mark,) = [event for event in own if event["name"] == MARK]
        assert mark["ts"] == 0
        parts = [event for event in events(path, PARTS) if event["tid"] == rank]
        end_us = max(event["ts"] + event["dur"] for event in parts)
        products = [event["ts"] for event in own if "addmm" in event["name"]]
        assert -1e3 < min(products) < max(products) < 1.1 * end_us
    pids = {event["pid"] for event in events(path)}
    assert {pid // 100 - 1 for pid in pids if pid >= 100} == set(ranks)


def parts_are_the_step(result: dict[str, Any], rank: int) -> None:
    (timeline,) = [line for line in result["lines"] if line["kind"] == "timeline" and line["rank"] == rank]
    line = steps_of(result, rank)[1]
    assert (timeline["step"], line["step"], line["traced"]) == (2, 2, True)
    totals: dict[str, float] = {}
    at_s = 0.0
    for name, start_s, end_s in timeline["parts"]:
        assert start_s == pytest.approx(at_s, abs=1e-6)
        totals[name] = totals.get(name, 0.0) + end_s - start_s
        at_s = end_s
    assert totals["compute"] <= line["compute_s"] + 1e-4
    # what came before the ranks had met is not drawn: input, and Python
    assert at_s <= line["step_s"]
    assert at_s > line["compute_s"] + line["optimizer_s"] - 1e-4
    assert [("traced" in each) for each in steps_of(result, rank)] == [False, True, False, False]


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_hetero_fsdp_with_operations_of_a_chosen_rank(ranks: WarmRanks, tmp_path: Path) -> None:
    result, other = ranks.run(2, in_folder, str(tmp_path), "on_shards")
    folder = tmp_path / "traces"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2.json", "step_2.rank_1.json"]
    merged = folder / "step_2.json"
    processes = names_of_processes(merged)
    assert processes[PLANNED] == "planned, EMULATED devices"
    assert processes[MEASURED] == "measured, EMULATED devices"
    assert any(name.startswith("rank 1: ") for name in processes.values())
    planned = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events(merged, PLANNED)]
    assert [(tid, name) for tid, name, *_ in planned] == [
        (0, "compute"),
        (0, "waiting, exposed communication"),
        (1, "compute"),
        (1, "waiting, exposed communication"),
    ]
    assert planned[0][2:] == (0, pytest.approx(1e6 * BUSY_S))
    assert planned[1][2:] == (pytest.approx(1e6 * BUSY_S), pytest.approx(0.2e6 * BUSY_S))
    check_ranks_events(merged, [1])
    for rank in (0, 1):
        units = [event for event in events(merged, MEASURED) if event["tid"] == rank]
        assert [event["cat"] for event in units] == ["forward"] * LAYERS + ["backward"] * LAYERS
        assert sum(event["dur"] for event in units) == pytest.approx(1e6 * BUSY_S, rel=0.1)
        parts_are_the_step(result, rank)
    assert any("no trace of step 99: the fit ended before" in text for text in result["said"])
    assert any("step_2.json" in text and "perfetto" in text for text in result["said"])
    assert result["hooks"] == other["hooks"]
    whole = [line for line in result["lines"] if line["kind"] == "whole_plan"]
    assert [line["plan"]["batch_shares"] for line in whole] == [[SHARE, SHARE]]


def test_hetero_pipe_with_the_planned_schedule_above(ranks: WarmRanks, tmp_path: Path) -> None:
    result = ranks.run(2, in_folder, str(tmp_path), "on_a_pipeline")[0]
    merged = tmp_path / "traces" / "step_2.json"
    rows = {0: "0F0 0F1 0B0 0F2 0B1 0B2", 1: "1F0 1B0 1F1 1B1 1F2 1B2"}
    for rank, row in rows.items():
        for pid in (PLANNED, MEASURED):
            own = sorted((e for e in events(merged, pid) if e["tid"] == rank), key=lambda e: e["ts"])
            assert " ".join(event["name"] for event in own) == row
        planned = [event for event in events(merged, PLANNED) if event["tid"] == rank]
        assert sum(event["dur"] for event in planned) == pytest.approx(0.12e6)
        parts_are_the_step(result, rank)
    assert "a forward is taken as a third" in names_of_processes(merged)[PLANNED]
    check_ranks_events(merged, [0, 1])
    # a stage cannot begin before it has what the one before it sends
    ends = {event["name"]: event["ts"] + event["dur"] for event in events(merged, MEASURED)}
    starts = {event["name"]: event["ts"] for event in events(merged, MEASURED)}
    for k in range(3):
        assert starts[f"1F{k}"] > ends[f"0F{k}"] - AWAKE_US
        assert starts[f"0B{k}"] > ends[f"1B{k}"] - AWAKE_US


def test_ddp(ranks: WarmRanks, tmp_path: Path) -> None:
    result = ranks.run(2, in_folder, str(tmp_path), "on_ddp")[0]
    merged = tmp_path / "traces" / "step_2.json"
    assert "absent, DDPStrategy has no plan" in names_of_processes(merged)[PLANNED]
    assert events(merged, PLANNED) == []
    check_ranks_events(merged, [0, 1])
    assert any("no planned timeline: DDPStrategy has no plan" in text for text in result["said"])
    assert [event["cat"] for event in events(merged, MEASURED)] == (["forward"] * LAYERS + ["backward"] * LAYERS) * 2


def in_folder(folder: str, name: str) -> dict[str, Any]:
    """A fit of four steps whose files are in a folder."""
    os.chdir(folder)
    found: dict[str, Any] = globals()[name](4)
    return found


# -- one device --------------------------------------------------------------------------------------------------------


def test_one_device_and_accumulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = TraceCapture(steps=range(2, 4))
    module = Wide()
    result = fit(module, "auto", [callback], batch=2, steps=8, devices=1, accumulate_grad_batches=2)
    names = [f"step_{n}{of}.json" for n in (2, 3) for of in (".rank_0", "")]
    assert [path.name for path in callback.written] == names
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(names)
    forwards = [e for e in events(tmp_path / "traces" / "step_3.json", MEASURED) if e["cat"] == "forward"]
    assert len(forwards) == 2 * LAYERS  # both batches of the step
    assert [("traced" in line) for line in steps_of(result, 0)] == [False, True, True, False]
    assert result["hooks"] == 0


class Slow(profile):
    """A profiler that takes its time outside of the step."""

    def start(self) -> None:
        time.sleep(SLOW_S)
        super().start()

    def stop(self) -> None:
        time.sleep(SLOW_S)
        super().stop()


SLOW_S = 0.6


def test_what_the_profiler_takes_is_no_steps_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_hetero.callbacks.trace_capture.profile", Slow)
    result = fit(Wide(), "auto", [TraceCapture(2)], batch=2, steps=4, devices=1)
    lines = steps_of(result, 0)
    assert max(line["step_s"] for line in lines[1:]) < 0.8 * SLOW_S
    assert [("interrupted" in line) for line in lines] == [False, False, True, False]


def test_a_fit_that_fails_in_a_traced_step_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ArithmeticError("broken")
            return super().training_step(batch, batch_idx)

    monkeypatch.chdir(tmp_path)
    module = Fails()
    with pytest.raises(ArithmeticError):
        fit(module, "auto", [TraceCapture(2)], batch=2, steps=4, devices=1)
    assert list((tmp_path / "traces").iterdir()) == []
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    # the profiler was stopped: another one can start
    fit(Wide(), "auto", [TraceCapture(2, folder=tmp_path / "b")], batch=2, steps=3, devices=1)
    assert (tmp_path / "b" / "traces" / "step_2.json").exists()


def test_a_disk_that_is_full_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    replace = os.replace

    def full(old: Any, new: Any) -> None:
        if "traces" in Path(new).parts:
            raise OSError(28, "No space left on device")
        replace(old, new)

    monkeypatch.setattr(os, "replace", full)
    fit(Wide(), "auto", [TraceCapture(2)], batch=2, steps=3, devices=1)
    out = capsys.readouterr().out
    for name in ("step_2.rank_0.json", "step_2.json"):
        assert f"rank 0 could not write {tmp_path / 'traces' / name} ([Errno 28] No space left on device)" in out
    assert list((tmp_path / "traces").iterdir()) == []
    assert len(read_metrics(tmp_path)[0].steps) == 3


def test_a_run_to_try_things_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = fit(Wide(), "auto", [TraceCapture(1)], batch=2, steps=2, devices=1, fast_dev_run=True)
    assert any("fast_dev_run writes nothing" in text for text in result["said"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps: 0 is none: give whole numbers, 1 or more"),
        ({"steps": ()}, r"steps=\(\): give one whole number or several"),
        ({"steps": "5"}, "steps='5': give one whole number"),
        ({"steps": [1, True]}, "steps: True is none"),
        ({"ranks": [-1, 2]}, "ranks: -1 is none: give whole numbers, 0 or more"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HeteroError, match=message):
        TraceCapture(**arguments)


def test_a_rank_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeteroError, match=r"TraceCapture\(ranks=...\) has 3, and the run has ranks 0 to 0"):
        fit(Wide(), "auto", [TraceCapture(ranks=[0, 3])], batch=2, steps=2, devices=1)


def test_it_is_public() -> None:
    assert lightning_hetero.TraceCapture is TraceCapture
    assert issubclass(TraceCapture, pl.Callback)
