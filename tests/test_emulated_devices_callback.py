"""The callback emulates devices under Lightning's own strategies, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import EmulatedDevices
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.emulation import OUTSIDE
from lightning_hetero.emulation_report import EmulationReport
from lightning_hetero.errors import ClusterError, EmulatedOutOfMemoryError
from tests.harness import WarmRanks

SAMPLES, WIDTH = 8, 64
FORWARD = 2 * SAMPLES * WIDTH * WIDTH
STEP = 5 * FORWARD  # two layers; the first one's input needs no gradient
GIB = 1 << 30


class Module(pl.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.fails = fails

    def configure_model(self) -> None:
        if getattr(self, "_device_mesh", None) is not None and not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=mesh)

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fails and self.trainer.training:
            raise ArithmeticError("in the step")
        return self.net(batch).square().mean()

    training_step = step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Evaluated(Module):
    validation_step = test_step = predict_step = Module.step


def cluster(*speeds: float, memory_bytes: int = GIB) -> Cluster:
    return Cluster("test", tuple(Device(f"at-{s:.3g}", "a", memory_bytes, s) for s in speeds), emulate=True)


def loader(batches: int) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(batches * SAMPLES, WIDTH), batch_size=SAMPLES)  # type: ignore[arg-type]


def trainer(callback: EmulatedDevices, path: Path, **options: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options}
    return pl.Trainer(callbacks=[callback], default_root_dir=path, **options)


def test_training_and_validation_on_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = EmulatedDevices(cluster(STEP / 0.05))
    fit = trainer(callback, tmp_path, num_sanity_val_steps=1)
    began_s = time.perf_counter()
    fit.fit(Evaluated(), loader(3), loader(2))
    seconds = time.perf_counter() - began_s
    # 3 training steps, and 1 + 2 forwards of validation
    target_s = 3 * 0.05 + 3 * 0.02
    assert seconds >= target_s
    (report,) = callback.reports
    assert report.target_s == pytest.approx(target_s)
    assert_faithful(report, steps=6)
    assert {p.runs for p in report.phases if p.phase == "forward"} == {6}
    assert {p.runs for p in report.phases if p.phase == "backward"} == {3}
    assert [p for p in report.phases if p.unit == OUTSIDE] == []
    if not report.units_late:
        assert "emulate" not in capsys.readouterr().out
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_evaluation_is_emulated_too(run: str, tmp_path: Path) -> None:
    callback = EmulatedDevices(cluster(FORWARD / 0.02))
    getattr(trainer(callback, tmp_path), run)(Evaluated(), loader(2))
    report = callback.emulation.report()
    assert report.target_s == pytest.approx(2 * 2 * 0.02)
    assert_faithful(report, steps=2)
    assert _get_current_dispatch_mode_stack() == []


def test_a_cpu_that_is_too_slow_is_said_at_the_end_of_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = EmulatedDevices(cluster(40e15))
    trainer(callback, tmp_path).fit(Module(), loader(2))
    out = capsys.readouterr().out
    assert "emulated: this CPU is too slow to emulate 40 PFLOP/s on 1 rank: 100 % of units were late" in out


def test_a_number_of_devices_that_is_not_that_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"'test' has 3 devices and the trainer runs 1 ranks"):
        trainer(EmulatedDevices(cluster(1e9, 1e9, 1e9)), tmp_path).fit(Module(), loader(1))


def test_a_cluster_file_may_be_given_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    cluster(3e9).to_yaml(path)
    assert EmulatedDevices(path).cluster == cluster(3e9)
    with pytest.raises(ClusterError, match="missing"):
        EmulatedDevices(tmp_path / "missing.yaml")


def test_out_of_memory_ends_the_fit_with_its_own_error(tmp_path: Path) -> None:
    states = 2 * (WIDTH + 1) * WIDTH * 4
    callback = EmulatedDevices(cluster(1e12, memory_bytes=3 * states))  # AdamW and gradients need four
    with pytest.raises(EmulatedOutOfMemoryError, match=r"rank 0 \(emulated at-1e\+12"):
        trainer(callback, tmp_path).fit(Module(), loader(2))
    assert _get_current_dispatch_mode_stack() == []


def test_an_error_in_a_step_leaves_nothing_active(tmp_path: Path) -> None:
    module = Module(fails=True)
    with pytest.raises(ArithmeticError, match="in the step"):
        trainer(EmulatedDevices(cluster(1e9)), tmp_path).fit(module, loader(1))
    assert _get_current_dispatch_mode_stack() == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_batch_that_is_skipped_leaves_nothing_active(tmp_path: Path) -> None:
    class Skips(Module):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int:
            return -1

    trainer(EmulatedDevices(cluster(1e9)), tmp_path).fit(Skips(), loader(2))
    assert _get_current_dispatch_mode_stack() == []


def test_a_callback_serves_several_runs(tmp_path: Path) -> None:
    callback, module = EmulatedDevices(cluster(1e12)), Module()
    for _ in range(2):
        trainer(callback, tmp_path).fit(module, loader(1))
        assert {p.runs for p in callback.reports[0].phases} == {1}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def assert_faithful(report: EmulationReport, steps: int) -> None:
    """What was not late was on time, but for the last wake-up of each step: true on a busy machine as well."""
    assert report.taken_s >= 0.98 * report.target_s
    assert report.taken_s - report.late_s <= 1.02 * report.target_s + 0.02 * steps


def fit_ranks(strategy_name: str, path: str, speeds: tuple[float, ...]) -> dict[str, Any]:
    strategy: Any = (
        "ddp"
        if strategy_name == "ddp"
        else ModelParallelStrategy(data_parallel_size=len(speeds), tensor_parallel_size=1)
    )
    callback = EmulatedDevices(cluster(*speeds))
    fit = trainer(callback, Path(path), devices=len(speeds), strategy=strategy)
    module = Module()
    fit.fit(module, loader(2 * len(speeds)))
    return {
        "reports": callback.reports,
        "peak_bytes": callback.reports[dist.get_rank()].peak_bytes,
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_rank_is_its_own_device_under_stock_strategies(strategy: str, tmp_path: Path, ranks: WarmRanks) -> None:
    fast, slow = STEP / 0.1, STEP / 0.2
    found = ranks.run(2, fit_ranks, strategy, str(tmp_path), (fast, slow))
    for result in found:
        assert [report.target_s for report in result["reports"]] == pytest.approx([2 * 0.1, 2 * 0.2])
        for report in result["reports"]:
            assert_faithful(report, steps=2)
            assert [p.unit for p in report.phases] == ["net.0", "net.2", "net.2", "net.0"]
        states = 4 * 2 * (WIDTH + 1) * WIDTH * 4
        # FSDP2 holds half of the states, and one or two layers and a gradient whole
        assert (result["peak_bytes"] < states) == (strategy == "fsdp2")
