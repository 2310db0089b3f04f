"""RankEnergy: watts, joules per sample and TFLOP/s per watt of each rank, or the reason why not."""

from __future__ import annotations

import csv
import json
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, RankEnergy
from lightning_hetero.callbacks import EmulatedDevices
from lightning_hetero.callbacks.rank_table import logged
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.power import NoPowerSourceError
from tests.harness import WarmRanks
from tests.test_power import Steady

SAMPLES = 4


class Module(pl.LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.fails_at = fails_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.fails_at:
            raise ArithmeticError("in the step")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Validated(Module):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(0.5)


def loader(batches: int) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(batches * SAMPLES, 8), batch_size=SAMPLES)  # type: ignore[arg-type]


def trainer(path: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1, **quiet, **options}
    logger = CSVLogger(path, name="", version="", flush_logs_every_n_steps=1)
    return pl.Trainer(callbacks=list(callbacks), logger=logger, default_root_dir=path, **options)


def rows(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def steady(watts: float) -> RankEnergy:
    return RankEnergy(0.01, source=lambda trainer: Steady(watts))


def no_thread() -> bool:
    return not [each for each in threading.enumerate() if each.name == "lightning-hetero energy"]


def test_one_device(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    source = Steady(100.0)
    callback = RankEnergy(0.01, flops_per_sample=3e12, source=lambda trainer: source, write=lines.append)
    began_s = time.monotonic()
    trainer(tmp_path, callback, log_every_n_steps=2).fit(Module(), loader(4))
    assert lines[0] == {"kind": "energy_source", "rank": 0, "source": "a fake", "reason": None}
    assert [line["step"] for line in lines[1:]] == [1, 2, 3, 4]
    assert sum(line["seconds"] for line in lines[1:]) < time.monotonic() - began_s
    # read at the start and after each step
    for line, before, after in zip(lines[1:], source.told, source.told[1:], strict=False):
        assert (line["kind"], line["rank"], line["samples"]) == ("energy", 0, SAMPLES)
        assert line["joules"] == pytest.approx(after - before)
        assert line["power_w"] == pytest.approx(line["joules"] / line["seconds"])
        assert line["joules_per_sample"] == pytest.approx(line["joules"] / SAMPLES)
        assert line["tflops_per_s_per_w"] == pytest.approx(3.0 / line["joules_per_sample"])
    told = rows(tmp_path)
    assert [row["step"] for row in told] == ["2", "4"]
    for row, two in zip(told, (lines[1:3], lines[3:5]), strict=True):
        values = {row[f"device/{which}"] for which in ("power_w", "power_w_rank_0", "min_power_w", "max_power_w")}
        assert len(values) == 1
        mean_w = sum(line["joules"] for line in two) / sum(line["seconds"] for line in two)
        assert float(values.pop()) == pytest.approx(mean_w)
        joules = float(row["device/joules_per_sample_rank_0"])
        assert float(row["device/tflops_per_s_per_w"]) == pytest.approx(3.0 / joules)
    assert no_thread()


def test_what_has_no_source_is_absent_and_the_reason_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(trainer: pl.Trainer) -> Any:
        raise NoPowerSourceError("there is no counter")

    trainer(tmp_path, RankEnergy(source=none)).fit(Module(), loader(3))
    assert capsys.readouterr().out.count("RankEnergy: no power of rank 0: there is no counter") == 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.rank_0.jsonl").read_text().splitlines()]
    assert lines == [{"kind": "energy_source", "rank": 0, "source": None, "reason": "there is no counter"}]
    assert not (tmp_path / "metrics.csv").exists() or "power_w" not in (tmp_path / "metrics.csv").read_text()


def test_without_flops_there_is_no_figure_per_watt(tmp_path: Path) -> None:
    trainer(tmp_path, steady(50.0)).fit(Module(), loader(2))
    told = rows(tmp_path)
    assert "device/power_w" in told[0]
    assert not [name for name in told[0] if "tflops" in name]


def test_an_emulated_device_has_no_watts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster("test", (Device("fast", "a", 1 << 30, 1e12),), emulate=True)
    trainer(tmp_path, EmulatedDevices(cluster), RankEnergy()).fit(Module(), loader(1))
    assert "RankEnergy: no power of rank 0: the device is emulated" in capsys.readouterr().out


def test_a_source_that_goes_is_said_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = []
    source = Steady(fails_after=2)
    callback = RankEnergy(60.0, source=lambda trainer: source, write=lines.append)
    trainer(tmp_path, callback).fit(Module(), loader(5))
    assert [line["step"] for line in lines[1:]] == [1]
    assert capsys.readouterr().out.count("reports no power any more: OSError: the driver is gone") == 1
    assert len(rows(tmp_path)) == 1
    assert source.closed == 1


def test_an_exception_ends_the_thread(tmp_path: Path) -> None:
    source = Steady()
    with pytest.raises(ArithmeticError, match="in the step"):
        trainer(tmp_path, RankEnergy(0.01, source=lambda trainer: source)).fit(Module(fails_at=1), loader(3))
    assert source.closed == 1
    assert no_thread()


def test_validation_counts_for_no_step(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    callback = RankEnergy(0.01, source=lambda trainer: Steady(100.0), write=lines.append)
    fit = trainer(tmp_path, callback, val_check_interval=1, num_sanity_val_steps=0, log_every_n_steps=2)
    fit.fit(Validated(), loader(4), loader(1))
    assert len(lines) == 5
    # 50 J each in four validations
    assert sum(line["joules"] for line in lines[1:]) < 100
    assert all(float(row["device/joules_per_sample"]) * 2 * SAMPLES < 100 for row in rows(tmp_path))


def test_accumulated_steps_have_all_their_samples(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    callback = RankEnergy(0.01, source=lambda trainer: Steady(), write=lines.append)
    trainer(tmp_path, callback, accumulate_grad_batches=2).fit(Module(), loader(4))
    assert [(line["step"], line["samples"]) for line in lines[1:]] == [(1, 2 * SAMPLES), (2, 2 * SAMPLES)]


@pytest.mark.parametrize(("arguments", "problem"), [((0,), "period_s=0"), ((0.1, -1.0), "flops_per_sample=-1.0")])
def test_arguments_that_cannot_be(arguments: tuple[float, ...], problem: str) -> None:
    with pytest.raises(HeteroError, match=problem):
        RankEnergy(*arguments)


def test_ranks_without_a_value_do_not_count() -> None:
    assert logged("power_w", [float("nan"), 200.0, 100.0]) == {
        "device/power_w": 150.0,
        "device/power_w_rank_1": 200.0,
        "device/power_w_rank_2": 100.0,
        "device/min_power_w": 100.0,
        "device/max_power_w": 200.0,
    }
    assert logged("power_w", [float("nan")]) == {}


def fit_ranks(strategy: str, path: str) -> list[dict[str, Any]]:
    """The last rank has no source."""
    rank, lines = dist.get_rank(), []

    def source(trainer: pl.Trainer) -> Steady:
        if rank == 2:
            raise NoPowerSourceError("there is none")
        return Steady(100.0 * (rank + 1))

    callback = RankEnergy(0.01, source=source, write=lines.append)
    trainer(Path(path), callback, devices=3, strategy=strategy).fit(Module(), loader(6))
    assert no_thread()
    return lines


@pytest.mark.parametrize("strategy", ["ddp", "hetero_fsdp"])
def test_every_rank_under_any_strategy(strategy: str, tmp_path: Path, ranks: WarmRanks) -> None:
    first, second, third = ranks.run(3, fit_ranks, strategy, str(tmp_path))
    assert [len(lines) for lines in (first, second, third)] == [3, 3, 1]
    assert third[0]["reason"] == "there is none"
    assert {line["rank"] for line in second} == {1}
    # the loader's batch for each rank; hetero_fsdp shares them out by speed
    if strategy == "ddp":
        assert [line["samples"] for line in second[1:]] == [SAMPLES, SAMPLES]
    told = [row for row in rows(tmp_path) if row.get("device/power_w")]
    assert len(told) == 2
    for row, line_0, line_1 in zip(told, first[1:], second[1:], strict=True):
        assert float(row["device/power_w_rank_0"]) == pytest.approx(line_0["power_w"])
        assert float(row["device/power_w_rank_1"]) == pytest.approx(line_1["power_w"])
        assert "device/power_w_rank_2" not in row
        mean = (float(row["device/power_w_rank_0"]) + float(row["device/power_w_rank_1"])) / 2
        assert float(row["device/power_w"]) == pytest.approx(mean)
        powers = [line_0["power_w"], line_1["power_w"]]
        assert float(row["device/min_power_w"]) == pytest.approx(min(powers))
        assert float(row["device/max_power_w"]) == pytest.approx(max(powers))
        assert ("device/tflops_per_s_per_w" in row) == (strategy == "hetero_fsdp")


def fit_pipeline(path: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    callback = RankEnergy(0.01, source=lambda trainer: Steady(), write=lines.append)
    strategy = HeteroPipelineStrategy(pipelines=1, micro_batch_size=2, summary=False)
    trainer(Path(path), callback, devices=2, strategy=strategy).fit(Module(), loader(4))
    return lines


def test_all_samples_of_a_pipeline_go_through_each_of_its_ranks(tmp_path: Path, ranks: WarmRanks) -> None:
    for lines in ranks.run(2, fit_pipeline, str(tmp_path)):
        assert [(line["step"], line["samples"]) for line in lines[1:]] == [(1, 2 * SAMPLES), (2, 2 * SAMPLES)]
