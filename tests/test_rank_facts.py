"""What is said of a rank once: its dtype and peak, its part of the plan and of the samples of a pipeline."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.callbacks import EmulatedDevices, RankThroughput, rank_meter, step_flops
from lightning_hetero.callbacks.rank_meter import RankMeter
from lightning_hetero.callbacks.run_facts import RankFacts, planned_of
from lightning_hetero.callbacks.step_flops import StepWatch, samples_in, samples_run
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.plan import RankPrediction, ShardPlan
from lightning_hetero.profiler.model_flops import StepFlops
from lightning_hetero.profiler.step_timeline import StepParts
from lightning_hetero.strategies import HeteroFSDPStrategy

A100 = "NVIDIA A100-SXM4-40GB"


def facts(
    monkeypatch: pytest.MonkeyPatch, precision: str, name: str = A100, matmul: str = "highest", **strategy: Any
) -> RankFacts:
    """Of a rank on a CUDA device of this name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0), strategy_name="x", **strategy),
        precision_plugin=SimpleNamespace(precision=precision),
        callbacks=[],
        global_rank=1,
        world_size=2,
    )
    return RankFacts.of(trainer)


@pytest.mark.parametrize(
    ("precision", "matmul", "dtype", "tflops"),
    [
        ("32-true", "highest", "fp32", 19.5),
        ("32-true", "high", "tf32", 156),
        ("bf16-mixed", "highest", "bf16", 312),
        ("bf16-true", "high", "bf16", 312),
        ("16-mixed", "highest", "fp16", 312),
        ("64-true", "highest", "fp64", 19.5),
    ],
)
def test_the_peak_is_that_of_the_dtype_in_use(
    monkeypatch: pytest.MonkeyPatch, precision: str, matmul: str, dtype: str, tflops: float
) -> None:
    found = facts(monkeypatch, precision, matmul=matmul)
    assert (found.dtype, found.peak_flops_per_s, found.no_peak) == (dtype, tflops * 1e12, None)
    assert (found.device, found.emulated, found.rank) == (A100, False, 1)


def test_mixed_precision_of_shards_is_what_products_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"param_dtype": "bfloat16"}, SimpleNamespace(param_dtype=torch.bfloat16)):
        found = facts(monkeypatch, "32-true", options=SimpleNamespace(mixed_precision=given))
        assert (found.dtype, found.peak_flops_per_s) == ("bf16", 312e12)


def test_a_device_that_is_not_known_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts(monkeypatch, "bf16-mixed", "Some Accelerator")
    assert found.peak_flops_per_s is None
    assert "no dense peak for bf16 is known of a Some Accelerator" in str(found.no_peak)


def test_an_emulated_device_has_no_peak_whatever_its_name() -> None:
    device = Device("A100-40GB", "n", 2**30, 1e9)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        precision_plugin=SimpleNamespace(precision="bf16-mixed"),
        callbacks=[EmulatedDevices(Cluster("c", (device,), emulate=True))],
        global_rank=0,
        world_size=1,
    )
    found = RankFacts.of(trainer)
    assert (found.device, found.emulated, found.peak_flops_per_s) == ("A100-40GB", True, None)
    assert found.no_peak == "A100-40GB is emulated by a CPU"


def test_what_is_logged_is_what_is_known_now() -> None:
    class Kept:
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.logged.append(metrics)

    callback: Any = RankThroughput()
    callback._meter = SimpleNamespace(facts=SimpleNamespace(emulated=False))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=3))
    trainer: Any = SimpleNamespace(loggers=[Kept(), Kept()], fit_loop=loop)
    for values in ({"a": 1.0}, {"b": 2.0}, {}):
        callback.log_values(trainer, values)
    for logger in trainer.loggers:
        assert logger.logged == [{"a": 1.0}, {"b": 2.0}]


@pytest.mark.parametrize("peak", [8e12, None])
def test_mfu_of_a_step_leaves_recompute_out_and_hfu_does_not(peak: float | None) -> None:
    callback: Any = RankThroughput()
    trainer: Any = SimpleNamespace(
        world_size=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        loggers=[],
        log_every_n_steps=2,
    )
    callback._meter = SimpleNamespace(
        facts=SimpleNamespace(emulated=False, peak_flops_per_s=peak, no_peak="it is a CPU"),
        no_flops=None,
        complete=lambda trainer: None,
    )
    callback.begin_fit(trainer, None)
    for step, seconds in ((1, 1.0), (2, 2.0)):
        parts = StepParts(compute_s=seconds / 2, input_s=seconds / 8, optimizer_s=seconds / 4, rest_s=seconds / 8)
        record = StepRecord(step, 0, 1, 4.0, parts, StepFlops(seconds * 2e12, seconds * 0.5e12))
        callback.step_is_complete(trainer, record)
        callback.step_is_over(trainer, step)
    rates = {"mfu": 0.25, "hfu": 0.3125} if peak else {}
    assert {name: record.values[name] for name in ("mfu", "hfu") if name in record.values} == rates
    for names in ({name: f"device/{name}" for name in ("mfu", "hfu")}, {"mfu": "device/mfu_rank_0"}):
        logged = {name: callback.logged[key] for name, key in names.items() if key in callback.logged}
        assert logged == {name: rate for name, rate in rates.items() if name in names}
    assert record.values["tflops_per_s"] == callback.logged["tflops_per_sec"] == 2.0
    assert (record.values["samples_per_s"], callback.logged["samples_per_sec"]) == (2.0, pytest.approx(8 / 3))


def test_each_rank_is_told_its_own_part_of_the_plan() -> None:
    predictions = (RankPrediction.of(0.5, 1.0, 100), RankPrediction.of(0.75, 1.0, 200))
    plan = ShardPlan(8, (6, 2), ((0, 1),), ("a", "b"), predicted_step_s=1.0, predictions=predictions)
    for rank, expected in enumerate(((0.5, 0.5, 100, 6), (0.75, 0.25, 200, 2))):
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(plan=plan), global_rank=rank)
        planned = planned_of(trainer)
        assert planned is not None
        assert planned.step_s == 1.0
        assert (planned.busy_s, planned.idle_share, planned.peak_memory_bytes, planned.samples) == expected


# -- samples -----------------------------------------------------------------------------------------------------------

NAN = math.nan


def share(
    monkeypatch: pytest.MonkeyPatch, rank: int, rows: list[list[float]], given: float | None = None
) -> tuple[float, StepFlops | None, str | None]:
    """What a rank takes of each sample, given every rank's pipeline and FLOPs, and whether it has samples."""
    monkeypatch.setattr(rank_meter, "pipeline_of", lambda trainer: rows[rank][0])
    monkeypatch.setattr(rank_meter, "gather_once", lambda trainer, row: rows)
    meter, own = RankMeter(), rows[rank][1]
    meter.flops = StepFlops(own, own / 2) if given is None and not math.isnan(own) else None
    meter.flops = StepFlops(given) if given is not None else meter.flops
    trainer: Any = None
    meter._share_samples(trainer, given, has_samples=bool(rows[rank][2]))
    return meter.share, meter.flops, meter.no_flops


def test_a_rank_of_a_pipeline_takes_its_part_of_that_pipelines_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0.0, 5.0, 1.0], [0.0, 3.0, 1.0], [1.0, 4.0, 1.0], [0.0, 0.0, 0.0], [1.0, 4.0, 1.0]]  # one has no stage
    found = [share(monkeypatch, rank, rows) for rank in range(5)]
    assert [each for each, _, _ in found] == [5 / 8, 3 / 8, 0.5, 0.0, 0.5]
    # of a whole sample; with the share of the samples each rank's own
    assert [flops.model for _, flops, _ in found if flops] == [8.0] * 5
    assert [own * flops.recomputed for own, flops, _ in found if flops] == [2.5, 1.5, 2.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("pipeline", "samples", "known"),
    [
        (0, 0, StepFlops(0.0)),
        (0, 4, "its stages call no module of the model, which was exported: pass flops_per_sample"),
        (-1, 4, "training_step calls no submodule: pass flops_per_sample"),
    ],
)
def test_a_rank_without_a_stage_computes_nothing_and_that_is_known(
    monkeypatch: pytest.MonkeyPatch, pipeline: int, samples: int, known: Any
) -> None:
    """Elsewhere a step that calls no module is one whose FLOPs nobody knows."""
    monkeypatch.setattr(step_flops, "pipeline_of", lambda trainer: pipeline)
    monkeypatch.setattr(step_flops, "samples_in", lambda trainer, batch: float(samples))
    placement = SimpleNamespace(model=torch.nn.Identity())
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(assembly=SimpleNamespace(placement=placement)))
    watch = StepWatch(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    watch.begin(trainer)
    assert watch.count(trainer, None) == known


def test_without_flops_the_ranks_of_a_pipeline_take_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0.0, NAN, 1.0], [0.0, 3.0, 1.0], [1.0, 4.0, 1.0]]
    assert share(monkeypatch, 1, rows) == (0.5, None, "another rank of the pipeline could not count its own")
    assert share(monkeypatch, 2, rows) == (1.0, StepFlops(4.0, 2.0), None)
    nothing = [[0.0, NAN, 1.0]] * 2
    assert share(monkeypatch, 0, nothing, given=6.0) == (0.5, StepFlops(6.0), None)


def test_a_rank_without_a_stage_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0.0, NAN, 1.0], [0.0, 0.0, 0.0]]
    assert share(monkeypatch, 0, rows)[0] == 1.0
    assert share(monkeypatch, 1, rows)[0] == 0.0


def test_ranks_that_share_a_batch_have_a_part_of_it_each() -> None:
    def trainer(**kwargs: Any) -> Any:
        return SimpleNamespace(strategy=SimpleNamespace(), world_size=4, distributed_sampler_kwargs=kwargs)

    batch = torch.zeros(6, 2)
    assert samples_in(trainer(num_replicas=2, rank=0), batch) == 3
    assert samples_in(trainer(), batch) == 6


def test_a_rank_with_no_samples_runs_one_to_keep_the_others_company() -> None:
    strategy: Any = HeteroFSDPStrategy.__new__(HeteroFSDPStrategy)
    strategy.__dict__["_sizes"] = (0, 8)
    strategy.cluster_environment = None
    strategy.rank_samples = lambda: 0
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=2)
    assert samples_in(trainer, torch.zeros(1, 2)) == 0
    assert samples_run(trainer, torch.zeros(1, 2)) == 1
