"""RankEnergy: watts, joules per sample and TFLOP/s per watt of each rank, or the reason why not."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.callbacks import EmulatedDevices, RankEnergy, RankThroughput
from lightning_hetero.callbacks.rank_energy import energy_rates
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.power import NoPowerSourceError
from tests.callback_fits import SAMPLE, Wide, devices, fit, steps_of
from tests.harness import WarmRanks
from tests.test_power import Steady

SAMPLES = 4
WHATS = ("power_w", "joules_per_sample", "tflops_per_s_per_w")


class Failing(Wide):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ArithmeticError("in the step")
        return super().training_step(batch, batch_idx)


class Validated(Wide):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(0.1)


def none(trainer: pl.Trainer) -> Steady:
    raise NoPowerSourceError("there is no counter")


def alone(*callbacks: pl.Callback, steps: int, module: pl.LightningModule | None = None, **options: Any) -> Any:
    return fit(module or Wide(), "auto", callbacks, batch=SAMPLES, steps=steps, devices=1, **options)


def no_thread() -> bool:
    return not [each for each in threading.enumerate() if each.name == "lightning-hetero energy"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_device() -> None:
    source = Steady(100.0)
    began_s = time.monotonic()
    result = alone(RankEnergy(0.01, source=lambda trainer: source), RankThroughput(), steps=4, log_every_n_steps=2)
    lines = steps_of(result, 0)
    (first,) = (line for line in result["lines"] if line["kind"] == "energy_source")
    assert (first["source"], first["reason"]) == ("a fake", None)
    assert len(lines) == 4
    assert sum(line["energy_s"] for line in lines) < time.monotonic() - began_s
    # read at the start and after each step
    for line, before, after in zip(lines, source.told, source.told[1:], strict=False):
        assert line["joules"] == pytest.approx(after - before)
        assert line["power_w"] == pytest.approx(line["joules"] / line["energy_s"])
        assert line["joules_per_sample"] == pytest.approx(line["joules"] / SAMPLES)
        # by the same count of FLOPs as TFLOP/s
        assert line["flops"] == SAMPLES * SAMPLE
        assert line["tflops_per_s_per_w"] == pytest.approx(line["flops"] / line["joules"] / 1e12)
    by_step: dict[int, dict[str, float]] = {}
    for step, values in result["logged"]:  # at the same steps as the other callbacks
        by_step.setdefault(step, {}).update(values)
    assert len(by_step) == 2
    for told, two in zip(by_step.values(), (lines[:2], lines[2:]), strict=True):
        assert "device/samples_per_sec" in told
        joules, seconds = (math.fsum(line[name] for line in two) for name in ("joules", "energy_s"))
        for which in ("power_w", "power_w_rank_0", "min_power_w", "max_power_w"):
            assert told[f"device/{which}"] == pytest.approx(joules / seconds)
        assert told["device/joules_per_sample"] == pytest.approx(joules / (2 * SAMPLES))
        assert told["device/tflops_per_s_per_w"] == pytest.approx(2 * SAMPLES * SAMPLE / joules / 1e12)
    assert no_thread()


def test_what_has_no_source_is_absent_and_the_reason_said_once() -> None:
    result = alone(RankEnergy(source=none), steps=3, log_every_n_steps=1)
    assert result["said"].count("RankEnergy: no power of rank 0: there is no counter") == 1
    (first,) = (line for line in result["lines"] if line["kind"] == "energy_source")
    assert (first["source"], first["reason"]) == (None, "there is no counter")
    assert not {"joules", *WHATS} & set(steps_of(result, 0)[0])
    assert result["logged"] == []


def test_given_flops_are_taken_by_all() -> None:
    result = alone(RankEnergy(source=lambda trainer: Steady(), flops_per_sample=3e12), RankThroughput(), steps=1)
    (line,) = steps_of(result, 0)
    assert line["flops"] == SAMPLES * 3e12
    assert line["tflops_per_s_per_w"] == pytest.approx(3.0 / line["joules_per_sample"])
    with pytest.raises(HeteroError, match=r"share one flops_per_sample, and are given 1.0 and 2.0: give one of them"):
        alone(RankEnergy(flops_per_sample=1.0), RankThroughput(2.0), steps=1)


def test_an_emulated_device_has_no_watts() -> None:
    result = alone(EmulatedDevices(devices((0.01,), SAMPLES)), RankEnergy(), steps=1)
    assert any(text.startswith("RankEnergy: no power of rank 0: the device is emulated") for text in result["said"])


def test_a_source_that_goes_is_said_once_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    source = Steady(fails_after=2)
    result = alone(RankEnergy(60.0, source=lambda trainer: source), steps=5, log_every_n_steps=1)
    assert ["joules" in line for line in steps_of(result, 0)] == [True, False, False, False, False]
    assert capsys.readouterr().out.count("rank 0 reports no power any more: OSError: the driver is gone") == 1
    assert len(result["logged"]) == 1
    assert source.closed == 1


def test_an_exception_ends_the_thread() -> None:
    source = Steady()
    with pytest.raises(ArithmeticError, match="in the step"):
        alone(RankEnergy(0.01, source=lambda trainer: source), steps=3, module=Failing())
    assert source.closed == 1
    assert no_thread()


def test_validation_counts_for_no_step() -> None:
    """Within a step, whose batches accumulate, and after one."""
    energy = RankEnergy(0.01, source=lambda trainer: Steady(100.0))
    result = alone(energy, steps=4, module=Validated(), validate=True, val_check_interval=1, accumulate_grad_batches=2)
    lines = steps_of(result, 0)
    assert [line["samples"] for line in lines] == [2 * SAMPLES] * 2
    # 20 J each in four validations
    assert 0 < sum(line["joules"] for line in lines) < 40
    joules, seconds = (sum(line[name] for line in lines) for name in ("joules", "energy_s"))
    assert joules == pytest.approx(100.0 * seconds, rel=0.2)  # also what was before the interruption
    assert sum(line["step_s"] for line in lines) < 0.4


@pytest.mark.parametrize(("arguments", "problem"), [((0,), "period_s=0"), ((0.1, -1.0), "flops_per_sample=-1.0")])
def test_arguments_that_cannot_be(arguments: tuple[float, ...], problem: str) -> None:
    with pytest.raises(HeteroError, match=problem):
        RankEnergy(*arguments)


def test_what_cannot_be_told_is_no_number() -> None:
    nan = math.nan
    steps = [[10.0, 2.0, 4.0, 3e12], [nan, nan, 4.0, 3e12], [20.0, 1.0, 1.0, 3e12]]
    assert energy_rates(steps) == {"power_w": 10.0, "joules_per_sample": 6.0, "tflops_per_s_per_w": 0.2}
    for row in ([nan, nan, 4.0, 1.0], [0.0, 0.0, 0.0, nan]):
        assert all(map(math.isnan, energy_rates([row]).values()))
    assert math.isnan(energy_rates([[10.0, 2.0, 4.0, nan]])["tflops_per_s_per_w"])


def fit_ranks() -> dict[str, Any]:
    """The last rank has no source."""
    rank = dist.get_rank()
    callback = RankEnergy(0.01, source=none if rank == 2 else lambda trainer: Steady(100.0 * (rank + 1)))
    result = fit(Wide(), "ddp", [callback], batch=SAMPLES, steps=6, devices=3, log_every_n_steps=1)
    assert no_thread()
    return result


def test_ranks_with_a_source_and_without(ranks: WarmRanks) -> None:
    result = ranks.run(3, fit_ranks)[0]
    assert result["said"].count("RankEnergy: no power of rank 2: there is no counter") == 1
    by_rank = [steps_of(result, rank) for rank in range(3)]
    assert not any("joules" in line for line in by_rank[2])
    assert len(result["logged"]) == 2
    for (_, told), *lines in zip(result["logged"], *by_rank[:2], strict=True):
        for what in WHATS:
            values = [line[what] for line in lines]
            assert [told[f"device/{what}_rank_{rank}"] for rank in (0, 1)] == pytest.approx(values)
            assert told[f"device/{what}"] == pytest.approx(sum(values) / 2)
            assert (told[f"device/min_{what}"], told[f"device/max_{what}"]) == pytest.approx((min(values), max(values)))
            assert f"device/{what}_rank_2" not in told
        for line in lines:  # its own samples, not those of all ranks
            assert line["joules_per_sample"] == pytest.approx(line["joules"] / SAMPLES)
        # a thread that is put to sleep between counter and clock sees more or less
        assert [line["power_w"] for line in lines] == pytest.approx([100.0, 200.0], rel=0.3)
