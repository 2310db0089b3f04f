"""What callbacks say of real steps: phases of memory, loggers and files alike, and nothing read from the device."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hetero.callbacks import RankMemory, RankThroughput, StragglerMonitor, rank_memory
from lightning_hetero.metrics import read_metrics
from tests.callback_fits import Wide, everything, fit, steps_of
from tests.harness import WarmRanks

LOGGED = ("step_s", "compute_s", "waiting_s", "communication_s", "input_s", "optimizer_s", "rest_s")


class Logs(Wide):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_loggers_get_the_means_of_what_the_file_has(here: Path) -> None:
    result = fit(Logs(), "auto", [RankThroughput(), RankMemory()], batch=4, steps=4, devices=1, log_every_n_steps=2)
    own = [(step, values) for step, values in result["logged"] if "device/step_s" in values]
    memory = [values for _, values in result["logged"] if "device/memory_peak_bytes" in values]
    lines = steps_of(result, 0)
    assert len(own) == len(memory) == 2
    assert [line["step"] for line in result["lines"] if line["kind"] == "end"] == [4]
    # under the step that Lightning's own are logged under
    assert [step for step, _ in own] == [step for step, values in result["logged"] if "loss" in values]
    for (_, values), peaks, two in zip(own, memory, (lines[:2], lines[2:]), strict=True):
        for name in LOGGED:
            mean = math.fsum(line[name] for line in two) / 2
            for key in ("", "min_", "max_"):
                assert values[f"device/{key}{name}"] == pytest.approx(mean, rel=1e-9)
        seconds = math.fsum(line["step_s"] for line in two)
        assert values["samples_per_sec"] == pytest.approx(math.fsum(line["samples"] for line in two) / seconds)
        assert values["tflops_per_sec"] == pytest.approx(math.fsum(line["flops"] for line in two) / seconds / 1e12)
        for name in ("current", "peak", "peak_forward", "peak_backward", "peak_optimizer"):
            assert peaks[f"device/memory_{name}_bytes"] == two[-1][f"memory_{name}_bytes"]


def test_after_a_fit_nothing_is_kept_of_its_callbacks(here: Path) -> None:
    callback = RankThroughput()
    fit(Wide(), "auto", [callback], batch=4, steps=1, devices=1)
    assert callback.meter.participants == []  # of another fit they may be others


class Scripted:
    """In place of memory that is counted: each phase's peak is the next of these."""

    kind = "scripted"
    peaks = iter(())

    def open(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def take_peak_bytes(self) -> int:
        return int(next(self.peaks))

    def now(self) -> dict[str, int]:
        return {"current": 1}


def test_peaks_are_those_of_their_phase_and_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward, a backward, what is between it and the optimizer, which counts as forward, and the optimizer."""
    monkeypatch.setattr(rank_memory, "SampledMemory", Scripted)
    monkeypatch.setattr(Scripted, "peaks", iter((30, 50, 20, 40, 900, 3, 5, 2, 8)))  # 900: a validation's
    result = fit(
        Wide(), "auto", [RankMemory(sample_every=1)], batch=4, steps=2, devices=1, validate=True, val_check_interval=1,
        limit_val_batches=1, log_every_n_steps=1, max_steps=2,
    )  # fmt: skip
    names = ("forward", "backward", "optimizer", "validation")
    found = [[line.get(f"memory_peak_{name}_bytes") for name in names] for line in steps_of(result, 0)]
    assert found[0] == [30, 50, 40, None]
    assert found[1] == [3, 5, 8, 900]
    assert [line["memory_peak_bytes"] for line in steps_of(result, 0)] == [50, 8]


# -- what is read from the device --------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts by step what a GPU's host would wait for: numbers of tensors that are made Python's (``.item()``)."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal):
            self.counts[self.step] += 1
        return func(*args, **(kwargs or {}))


class Steps(pl.Callback):
    def __init__(self, reads: Reads) -> None:
        self.reads = reads

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.reads.step = trainer.global_step + 1


def reads_of(callbacks: list[pl.Callback]) -> Counter[int]:
    with Reads() as reads:
        fit(Wide(), "auto", [Steps(reads), *callbacks], batch=2, steps=7, devices=1, log_every_n_steps=4)
    return reads.counts


def test_callbacks_read_no_tensor_but_where_they_log(here: Path) -> None:
    """Of the first step FLOPs are counted, the fourth is logged."""
    callbacks = [RankThroughput(), RankMemory(), StragglerMonitor()]
    alone, beside = reads_of([]), reads_of(callbacks)
    for step in (2, 3, 5, 6, 7):
        assert beside[step] == alone[step], step


# -- runs that are interrupted -----------------------------------------------------------------------------------------


def test_a_run_that_is_interrupted_keeps_its_steps_and_the_next_goes_on(here: Path) -> None:
    class Interrupted(Wide):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    module, folder, handler = Interrupted(), here / "kept", signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit(module, "auto", everything(log_every_n_steps=3, folder=folder), batch=2, steps=4, devices=1)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning has it ignored
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    (run,) = read_metrics(folder)
    assert [line["step"] for line in run.steps] == [1, 2]
    assert not any(line["kind"] == "end" for line in run.lines)
    fit(Wide(), "auto", everything(folder=folder), batch=2, steps=3, devices=1)
    first, second = read_metrics(folder)
    assert (first, len(second.steps)) == (run, 3)


# -- ranks -------------------------------------------------------------------------------------------------------------

GAP_S, LATE_S = 0.06, 0.06


class Gaps(Wide):
    """Python between two units; the second rank is late for a collective of its step's, and with its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model[2].register_forward_pre_hook(lambda *_: time.sleep(GAP_S))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model[0](batch)
        if dist.get_rank() == 1:
            hidden.register_hook(lambda grad: time.sleep(LATE_S))
        loss = self.model[1:](hidden).square().mean()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        self.trainer.strategy.barrier()
        return loss  # type: ignore[no-any-return]


def with_gaps() -> dict[str, Any]:
    return fit(Gaps(), "ddp", [RankThroughput()], batch=2, steps=8, devices=2)


def test_replicas_are_blocked_in_collectives_and_for_gradients_alone(ranks: WarmRanks) -> None:
    result = ranks.run(2, with_gaps)[0]
    first, late = (steps_of(result, rank)[1:] for rank in (0, 1))
    assert min(line["blocked_s"] for line in first) > 1.5 * LATE_S  # twice late
    assert min(line["blocked_s"] for line in late) < 0.5 * GAP_S  # what is between units blocks no replica
    for line in (*first, *late):
        assert line["rest_s"] > GAP_S
