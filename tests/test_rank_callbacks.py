"""RankThroughput, RankMemory and StragglerMonitor under every kind of strategy: what they say is what happened."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_hetero
from benchmarks.callback_cost.__main__ import costs
from lightning_hetero.callbacks import RankMemory, RankThroughput, StragglerMonitor
from lightning_hetero.callbacks.rank_throughput import throughput_of
from lightning_hetero.callbacks.rank_values import named
from lightning_hetero.callbacks.straggler_monitor import window_slowdowns
from lightning_hetero.errors import HeteroError
from lightning_hetero.metrics import read_metrics
from tests.callback_fits import (
    BUSY_S,
    GAP_S,
    LAYER,
    PIPE_S,
    SAMPLE,
    SHARE,
    Dying,
    Wide,
    dying,
    everything,
    fit,
    judged,
    model_parallel,
    pipeline,
    slow_ddp,
    slowed_fsdp,
    steps_of,
    with_uneven_share,
)
from tests.harness import WarmRanks

PARTS = ("compute_s", "blocked_s", "messages_s", "input_s", "optimizer_s", "rest_s")
SPLIT = ("compute_s", "waiting_s", "communication_s", "input_s", "optimizer_s", "rest_s")


def check_sums(result: dict[str, Any], ranks: int, samples: int) -> None:
    """Parts are the step, also by another clock; ranks' samples are the global ones, and their rates the global one."""
    steps = zip(*(steps_of(result, rank) for rank in range(ranks)), strict=True)
    assert {round(math.fsum(line["samples"] for line in lines), 9) for lines in steps} == {samples}
    # without the first step's end, where FLOPs are counted, and what other things came within
    others = {line["step"]: line for line in steps_of(result, 0) if line["step"] > 2 and "interrupted" not in line}
    by_another_clock_s = math.fsum(result["own_step_s"][step] for step in others)
    total_s = math.fsum(line[part] for line in others.values() for part in PARTS)
    # a step ends while callbacks are told of its end, and a machine that does other things may take its time there
    early_s = math.fsum(result["callbacks_s"][step - 1] for step in others if step - 1 not in others)
    late_s = math.fsum(result["callbacks_s"][step] for step in others if step + 1 not in others)
    assert 0.98 * by_another_clock_s - early_s <= total_s <= 1.02 * by_another_clock_s + late_s
    for rank in range(ranks):
        lines = steps_of(result, rank)
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        for line in lines:
            for parts in (PARTS, SPLIT):
                assert math.fsum(line[part] for part in parts) == pytest.approx(line["step_s"], rel=1e-6)
            if "joules" in line:  # by a source of 100 W
                assert line["joules_per_sample"] * line["samples"] == pytest.approx(line["joules"])
                assert line["tflops_per_s_per_w"] * line["joules"] == pytest.approx(line["flops"] / 1e12)
    assert result["logged"]
    for _, logged in result["logged"]:
        for what in ("samples_per_sec", "tflops_per_sec"):
            if f"device/{what}" in logged:
                of_ranks = [logged[f"device/{what}_rank_{rank}"] for rank in range(ranks)]
                assert sum(of_ranks) == pytest.approx(logged[what], rel=1e-12)
                assert logged[f"device/{what}"] == pytest.approx(statistics.mean(of_ranks))
                assert (logged[f"device/min_{what}"], logged[f"device/max_{what}"]) == (min(of_ranks), max(of_ranks))
        if "device/step_s" in logged:
            assert sum(logged[f"device/{part}"] for part in SPLIT) == pytest.approx(logged["device/step_s"], rel=1e-6)


def median(result: dict[str, Any], rank: int, part: str, steps: range = range(2, 999)) -> float:
    """Of steps; the first one warms up. A machine that does other things disturbs some, not most."""
    return statistics.median(line[part] for line in steps_of(result, rank) if line["step"] in steps)


def logged(result: dict[str, Any], name: str) -> list[float]:
    return [values[name] for _, values in result["logged"] if name in values]


# -- one device --------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_device(here: Path) -> None:
    module = Wide()
    result = fit(module, "auto", everything(), batch=4, steps=10, devices=1, validate=True)
    check_sums(result, 1, 4)
    assert result["files"] == ["metrics.jsonl"]
    assert result["hooks"] == 0
    first = result["ranks"][0]
    assert (first["schema"], first["world_size"], first["emulated"], first["plan"]) == (1, 1, False, None)
    lines = steps_of(result, 0)
    for line in lines:
        assert line["communication_s"] == line["waiting_s"] == line["blocked_s"] == line["messages_s"] == 0
        assert (line["samples"], line["batches"], line["flops"]) == (4, 1, 4 * SAMPLE)
        assert line["samples_per_s"] == pytest.approx(4 / line["step_s"])
        assert line["tflops_per_s"] == pytest.approx(4 * SAMPLE / line["step_s"] / 1e12)
        assert min(line[part] for part in ("compute_s", "input_s", "optimizer_s", "rest_s")) > 0
    # a CPU has no peak, which is said once and made up nowhere
    assert sum("no MFU: no vendor states a dense peak of a CPU" in text for text in result["said"]) == 1
    assert not any("mfu" in name or "hfu" in name for _, values in result["logged"] for name in values)
    assert len(logged(result, "device/step_s")) == 2  # every five of ten steps


def test_memory_is_counted_in_some_steps_on_a_cpu(here: Path) -> None:
    result = fit(Wide(), "auto", [RankMemory(sample_every=2)], batch=4, steps=5, devices=1, validate=True)
    lines = steps_of(result, 0)
    assert ["sampled" in line for line in lines] == [False, True, False, True, False]
    line = lines[3]
    model = sum(p.nbytes for p in Wide().parameters())
    batch = 4 * 64 * 4
    assert line["memory_kind"] == "counted"
    # parameters, gradients and two moments, which are there already
    assert 4 * model <= line["memory_current_bytes"] <= 4 * model + 40 * batch
    assert line["memory_peak_bytes"] == max(
        line[f"memory_peak_{p}_bytes"] for p in ("forward", "backward", "optimizer")
    )
    assert line["memory_peak_forward_bytes"] < line["memory_peak_optimizer_bytes"]  # its temporaries
    assert logged(result, "device/memory_peak_bytes") == [line["memory_peak_bytes"]]
    (validation,) = [line for line in result["lines"] if line["kind"] == "validation"]
    assert model < validation["memory_peak_validation_bytes"] < line["memory_peak_bytes"]
    assert not any("reserved" in name for _, values in result["logged"] for name in values)


def test_accumulated_batches_are_one_step(here: Path) -> None:
    result = fit(
        Wide(), "auto", everything(log_every_n_steps=2), batch=2, steps=12, devices=1, accumulate_grad_batches=3
    )
    check_sums(result, 1, 6)
    assert [(line["batches"], line["samples"]) for line in steps_of(result, 0)] == [(3, 6)] * 4


def test_given_flops_are_taken(here: Path) -> None:
    callbacks = [RankThroughput(5e6, log_every_n_steps=2)]
    result = fit(Wide(), "auto", callbacks, batch=4, steps=4, devices=1)
    assert {line["flops"] for line in steps_of(result, 0)} == {4 * 5e6}
    assert len(logged(result, "tflops_per_sec")) == 2


def test_flops_that_cannot_be_counted_are_absent(here: Path) -> None:
    class Reads(Wide):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) if self.gate(batch) else batch.sum()

        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> bool:
            return float(x.sum()) > 0

    result = fit(Reads(), "auto", everything(), batch=4, steps=5, devices=1)
    assert "flops" not in steps_of(result, 0)[0]
    assert sum("no TFLOP/s and no MFU: Gate 'gate' cannot run on the meta device" in s for s in result["said"]) == 1
    assert not logged(result, "tflops_per_sec")
    assert logged(result, "samples_per_sec")


def test_a_killed_run_keeps_its_steps_and_the_next_goes_on(ranks: WarmRanks, tmp_path: Path) -> None:
    (outcome,) = ranks.run_outcomes(1, dying, str(tmp_path), 4)
    assert outcome[0] == "error"
    (run,) = read_metrics(tmp_path)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 4]
    with pytest.raises(HeteroError, match="give one of them"):
        fit(Wide(), "auto", [RankMemory(folder="a"), RankThroughput(folder="b")], batch=2, steps=1, devices=1)
    fit(Dying(99), "auto", everything(folder=tmp_path), batch=2, steps=3, devices=1)
    first, second = read_metrics(tmp_path)
    assert (first, len(second.steps)) == (run, 3)
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["metrics.jsonl"]


def test_a_failed_run_leaves_no_hook_behind(here: Path) -> None:
    class Fails(Wide):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                raise ArithmeticError("broken")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(ArithmeticError):
        fit(module, "auto", everything(log_every_n_steps=3), batch=2, steps=4, devices=1)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    assert [line["step"] for line in read_metrics(here)[0].steps] == [1, 2]
    again = fit(Wide(), "auto", everything(), batch=2, steps=2, devices=1, fast_dev_run=True)
    assert again["files"] == ["metrics.rank_0.jsonl"]  # a run to try things writes nothing


# -- ranks -------------------------------------------------------------------------------------------------------------

SLOW_AT = 9


def test_a_slowed_rank_is_named_by_its_own_compute(ranks: WarmRanks) -> None:
    results = ranks.run(3, slowed_fsdp, 3, 17, 1, SLOW_AT)
    result = results[0]
    check_sums(result, 3, 3 * SHARE)
    assert all(other["stragglers"] == result["stragglers"] for other in results)
    straggler = next(each for each in result["stragglers"] if each.step > SLOW_AT)
    assert straggler.rank == 1
    assert straggler.step <= SLOW_AT + 10
    assert abs(straggler.since_step - (SLOW_AT + 1)) <= 2
    assert straggler.slowdown == pytest.approx(1.3, abs=0.05)
    assert straggler.planned
    assert straggler.expected_s == pytest.approx(BUSY_S)
    assert any("rank 1 is a straggler since step" in text for text in result["said"])
    assert {line["rank"] for line in result["lines"] if line["kind"] == "straggler"} == {1}
    before, after = range(2, SLOW_AT + 1), range(SLOW_AT + 1, 999)
    for rank in range(3):
        slower = median(result, rank, "compute_s", after) / median(result, rank, "compute_s", before)
        assert slower == pytest.approx(1.3 if rank == 1 else 1.0, abs=0.05)
    for rank in (0, 2):  # the others wait for it
        pairs = zip(steps_of(result, rank), steps_of(result, 1), strict=True)
        longer = [own["waiting_s"] - slow["waiting_s"] for own, slow in pairs if own["step"] in after]
        assert statistics.median(longer) > 0.15 * BUSY_S
    for rank, summary in enumerate(result["summaries"]):  # the strategy's own timer saw the same
        assert summary.busy_s == pytest.approx(median(result, rank, "compute_s", range(2, 17)), rel=0.02)
    check_emulated_memory(result)


def check_emulated_memory(result: dict[str, Any]) -> None:
    header = result["ranks"][2]
    assert (header["emulated"], header["device"], header["strategy"]) == (True, "d2", "hetero_fsdp")
    assert header["plan"]["busy_s"] == pytest.approx(BUSY_S)
    assert "d2 is emulated by a CPU" in header["no_peak"]
    assert set(logged(result, "device/emulated")) == {1.0}
    line = steps_of(result, 0)[8]
    assert line["memory_peak_bytes"] >= max(line["memory_peak_forward_bytes"], line["memory_current_bytes"])
    assert logged(result, "device/memory_of_plan_rank_0")[1] == pytest.approx(
        steps_of(result, 0)[9]["memory_peak_bytes"] / 300_000
    )


def test_a_straggler_makes_shares_move_where_they_can(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, slowed_fsdp, 2, 18, 1, 4, True)
    assert first["shares"] == second["shares"]
    assert first["shares"][0] > SHARE > first["shares"][1]
    assert any("batch shares move" in text for text in first["said"])
    plans = [line for line in first["lines"] if line["kind"] == "plan"]
    assert [line["plan"]["samples"] for line in plans[-2:]] == list(first["shares"])


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "hetero_fsdp"])
def test_what_a_sanity_check_logs_over_ranks_is_logged_again(ranks: WarmRanks, strategy: str) -> None:
    """The callbacks begin after it, and what they put in the place of the strategy's reduction is taken for it."""
    first, second = ranks.run(2, judged, strategy)
    assert len(first) == len(second) == 1
    assert first == second


@pytest.mark.slow
def test_without_a_plan_samples_say_what_to_expect(ranks: WarmRanks) -> None:
    result = ranks.run(2, slow_ddp, 2, 8)[0]
    check_sums(result, 2, 2 * SHARE)
    straggler = result["stragglers"][0]
    assert (straggler.rank, straggler.planned) == (1, False)
    assert straggler.since_step <= 4
    assert straggler.slowdown == pytest.approx(1.4, abs=0.05)
    assert sum("cannot move work between ranks" in text for text in result["said"]) == 1
    for rank, seconds in enumerate((BUSY_S, 1.4 * BUSY_S)):
        assert median(result, rank, "compute_s") == pytest.approx(seconds, rel=0.05)
        line = steps_of(result, rank)[4]
        assert (line["samples"], line["flops"]) == (SHARE, SHARE * SAMPLE)
    assert median(result, 0, "blocked_s") - median(result, 1, "blocked_s") > 0.2 * BUSY_S
    assert result["files"] == ["metrics.jsonl"]


def test_shards_of_lightnings_own(ranks: WarmRanks) -> None:
    result = ranks.run(2, model_parallel, 5)[0]
    check_sums(result, 2, 8)
    for rank in (0, 1):
        for line in steps_of(result, rank):
            assert line["flops"] == 4 * SAMPLE  # whole layers, of which a rank holds parts
            assert line["communication_s"] > GAP_S  # between units as well
    assert result["ranks"][1]["strategy"] == "ModelParallelStrategy"


def test_a_pipeline(ranks: WarmRanks) -> None:
    result = ranks.run(2, pipeline, 6)[0]
    check_sums(result, 2, 6)
    # two layers, the first of which takes no gradient to its input, and one
    for rank, products in enumerate((5, 3)):
        line = steps_of(result, rank)[3]
        assert line["samples"] == pytest.approx(6 * products / 8)
        assert line["flops"] == pytest.approx(6 * products * LAYER)
        assert line["recomputed_flops"] == 0
        assert line["memory_peak_bytes"] == max(line["memory_peak_schedule_bytes"], line["memory_peak_optimizer_bytes"])
        compute_s = median(result, rank, "compute_s", range(2, 6))
        assert compute_s == pytest.approx(PIPE_S * products / 8, rel=0.03)
        assert result["summaries"][rank].busy_s == pytest.approx(compute_s, rel=0.02)
    # the smaller stage waits for the larger one
    assert median(result, 1, "messages_s") > median(result, 0, "messages_s")


@pytest.mark.slow
def test_micro_batches_that_accumulate(ranks: WarmRanks) -> None:
    result = ranks.run(2, with_uneven_share, 3)[0]
    check_sums(result, 2, 32)
    for rank, samples in enumerate((24, 8)):
        assert {(line["samples"], line["batches"]) for line in steps_of(result, rank)} == {(samples, 2)}
        assert {line["flops"] for line in steps_of(result, rank)} == {samples * SAMPLE}


# -- numbers alone -----------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert named("x", [1.0, None, 4.0]) == {
        "device/x": 2.5,
        "device/x_rank_0": 1.0,
        "device/x_rank_2": 4.0,
        "device/min_x": 1.0,
        "device/max_x": 4.0,
    }
    assert named("x", [None, math.nan]) == {}


def test_what_is_logged_of_steps() -> None:
    def rank(compute: float, blocked: float, peak: float, samples: float) -> list[dict[str, float]]:
        step = {"samples": samples, "step_s": 2.0, "compute_s": compute, "blocked_s": blocked, "messages_s": 0.0}
        rest = {"input_s": 0.0, "optimizer_s": 0.0, "rest_s": 2.0 - compute - blocked, "flops": 4e12}
        return [{**step, **rest, "recomputed_flops": 1e12, "peak_flops_per_s": peak}] * 2

    found = throughput_of([rank(1.5, 0.25, 8e12, 6.0), rank(0.5, 1.0, math.nan, 2.0)])
    assert found["samples_per_sec"] == 4.0
    assert found["tflops_per_sec"] == 4.0
    assert (found["device/mfu"], found["device/hfu"]) == (0.25, 0.3125)  # of the rank whose peak is known
    assert "device/mfu_rank_1" not in found
    assert [found[f"device/waiting_s_rank_{r}"] for r in (0, 1)] == [0.0, 0.75]
    assert found["device/communication_s"] == 0.25
    assert (found["device/min_idle_share"], found["device/max_idle_share"]) == (0.25, 0.75)


def test_slowdowns() -> None:
    nan = math.nan
    planned = [[[1, 0.13, 0.1, 5]], [[1, 0.21, 0.2, 5]], [[1, 0.42, 0.4, 5]], [[1, 0.0, 0.0, 0]]]
    assert [round(rank[0], 3) for rank in window_slowdowns(planned)] == [round(1.3 / 1.05, 3), 1.0, 1.0, 1.0]
    unplanned = [[[1, 0.2, nan, 8]], [[1, 0.2, nan, 4]]]
    assert [rank[0] for rank in window_slowdowns(unplanned)] == [1.0, 2.0]
    assert window_slowdowns([[[1, 0.0, nan, 0]]]) == [[1.0]]
    # the one is faster than planned, the other as planned
    assert window_slowdowns([[[1, 0.06, 0.1, 5]], [[1, 0.2, 0.2, 5]]]) == [[1.0], [1.0]]


def test_figures_of_the_benchmark() -> None:
    found = costs([1.0, 2.0, 2.0, 3.0], [1.0, 2.2, 2.2, 3.0])
    assert found.pop("error_s") > 0
    assert found == pytest.approx({"median_s": 0.2, "median": 0.1, "quiet": 0.0, "mean": 0.05})
    assert costs([1.0] * 5, [1.5] * 5)["error_s"] == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RankThroughput(flops_per_sample=-1), "flops_per_sample=-1"),
        (lambda: RankThroughput(log_every_n_steps=0), "log_every_n_steps=0"),
        (lambda: RankMemory(sample_every=0), "sample_every=0"),
        (lambda: RankMemory(log_every_n_steps=True), "log_every_n_steps=True"),
        (lambda: StragglerMonitor(threshold=0), "threshold=0"),
        (lambda: StragglerMonitor(window=1.5), "window=1.5"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_refused(make: Any, words: str) -> None:
    with pytest.raises(HeteroError, match=words):
        make()


def test_they_are_the_packages_own_names() -> None:
    for kind in (RankThroughput, RankMemory, StragglerMonitor):
        assert getattr(lightning_hetero, kind.__name__) is kind
        assert issubclass(kind, pl.Callback)
