"""What each rank's device takes: watts, joules per sample, TFLOP/s per watt."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.callbacks.rank_table import RankTable, logged
from lightning_hetero.callbacks.samples import step_samples
from lightning_hetero.doctor.places import ranks_text
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.power import PERIOD_S, EnergyMeter, NoPowerSourceError, PowerSource, find_source

COLUMNS = ("power_w", "joules_per_sample", "tflops_per_s_per_w")
"""what is logged, each as ``device/...``: watts, joules for each of a rank's samples, 10^12 FLOP/s for each watt"""


class RankEnergy(Callback):
    """Measures each rank's device while it trains, under any strategy; validation is left out.

    NVIDIA GPUs are read by NVML, AMD GPUs by amdsmi, processors by RAPL, whose energy the ranks of a machine share
    evenly. A rank whose device tells nothing reports nothing, and rank 0 says why, once; so does a rank that emulates a
    device, since the processor's watts are not that device's.

    Every ``log_every_n_steps`` steps the mean over the ranks, each rank's value, the least and the most go to the
    Trainer's loggers: ``device/power_w``, ``device/power_w_rank_0``, ``device/min_power_w``, ``device/max_power_w``, and
    likewise ``joules_per_sample`` and ``tflops_per_s_per_w``; that takes one collective. Each rank's own values of every
    step go to :attr:`write`.

    Args:
        period_s: seconds between readings, by a thread of its own.
        flops_per_sample: floating-point operations of forward and backward that this rank does for a sample; by default
            those that hetero_fsdp counts. Without them there is no TFLOP/s per watt.
        source: makes what tells a rank's energy, given the Trainer; by default what its device has.
        write: is given every line of this rank, a dict; by default it is appended to ``metrics.rank_{r}.jsonl`` in the
            Trainer's ``log_dir`` (or ``default_root_dir``).

    Raises:
        HeteroError: for a period or FLOPs that are not above 0.
    """

    def __init__(
        self,
        period_s: float = PERIOD_S,
        flops_per_sample: float | None = None,
        source: Callable[[pl.Trainer], PowerSource] | None = None,
        write: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        for name, value in (("period_s", period_s), ("flops_per_sample", flops_per_sample)):
            if value is not None and not value > 0:
                raise HeteroError(f"{name}={value!r}: give a number above 0")
        self.period_s = period_s
        self.flops_per_sample = flops_per_sample
        self.write = write
        self._find = source or _source
        self._meter: EnergyMeter | None = None
        self._table: RankTable | None = None
        self._line: Callable[[dict[str, Any]], None] = write or (lambda line: None)
        self._since_logged = _Span()
        self._since_step = _Span()
        self._step = 0
        self._said_failure = False

    # -- the run -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure; say which ranks cannot, and why."""
        self._stop()
        self._said_failure = False
        reason = ""
        try:
            source = self._find(trainer)
            self._meter = EnergyMeter(source, self.period_s)
            self._meter.start()
        except NoPowerSourceError as error:
            reason = str(error)
        self._table = RankTable(trainer.global_rank, trainer.world_size, len(COLUMNS)).to(trainer.strategy.root_device)
        self._line = self.write or _appender(trainer)
        self._step = trainer.global_step
        label = None if self._meter is None else self._meter.source.label
        self._line({"kind": "energy_source", "rank": trainer.global_rank, "source": label, "reason": reason or None})
        _say(trainer, reason)
        self._begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples; after an optimizer step note what it took, and log where it is to be logged."""
        samples = step_samples(trainer, batch)
        for span in (self._since_logged, self._since_step):
            span.samples += samples
        if trainer.global_step == self._step:
            return  # gradients accumulate
        self._step = trainer.global_step
        joules = self._read(trainer)
        values = self._values(trainer, self._since_step, joules)
        if any(value is not None for value in values.values()):
            taken = {"joules": self._since_step.joules(joules), "samples": self._since_step.samples}
            line = {"kind": "energy", "rank": trainer.global_rank, "step": self._step, **taken, **values}
            self._line(line)
        self._since_step.restart(joules)
        if self._step % trainer.log_every_n_steps == 0:
            self._log(trainer, joules)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What validation takes is no training step's."""
        joules = self._read(trainer)
        self._since_logged.pause(joules)
        self._since_step.pause(joules)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on."""
        joules = self._read(trainer)
        self._since_logged.resume(joules)
        self._since_step.resume(joules)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the thread."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the thread."""
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the thread."""
        self._stop()

    # -- values --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        joules = None if self._meter is None else self._meter.read()
        self._since_logged.restart(joules)
        self._since_step.restart(joules)

    def _read(self, trainer: pl.Trainer) -> float | None:
        if self._meter is None:
            return None
        joules = self._meter.read()
        if joules is None and not self._said_failure:
            self._said_failure = True
            print(
                f"RankEnergy: rank {trainer.global_rank} reports no power any more: {self._meter.problem}", flush=True
            )
        return joules

    def _values(self, trainer: pl.Trainer, span: _Span, joules: float | None) -> dict[str, float | None]:
        """This rank's numbers over a span, by column."""
        taken, seconds = span.joules(joules), span.seconds()
        if taken is None or seconds <= 0:
            return dict.fromkeys(COLUMNS)
        flops = self.flops_per_sample or getattr(trainer.strategy, "flops_per_sample", None)
        per_watt = flops * span.samples / taken / 1e12 if flops and taken > 0 else None
        return dict(
            zip(COLUMNS, (taken / seconds, taken / span.samples if span.samples else None, per_watt), strict=True)
        )

    def _log(self, trainer: pl.Trainer, joules: float | None) -> None:
        assert self._table is not None
        self._table.update(list(self._values(trainer, self._since_logged, joules).values()))
        rows = self._table.compute()
        self._table.reset()
        values: dict[str, float] = {}
        for name, column in zip(COLUMNS, rows.T.tolist(), strict=True):
            values |= logged(name, column)
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)
        self._since_logged.restart(joules)

    def _stop(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.stop()


class _Span:
    """Energy, seconds and samples since a moment, pauses left out."""

    def __init__(self) -> None:
        self.samples = 0
        self._joules: float | None = None
        self._began_s = time.monotonic()
        self._paused: tuple[float | None, float] | None = None

    def restart(self, joules: float | None) -> None:
        """Begin anew at a meter's reading."""
        self.samples, self._joules, self._began_s, self._paused = 0, joules, time.monotonic(), None

    def pause(self, joules: float | None) -> None:
        """What comes now does not count."""
        self._paused = (joules, time.monotonic())

    def resume(self, joules: float | None) -> None:
        """It counts again."""
        if self._paused is None:
            return
        before, since_s = self._paused
        self._paused = None
        self._began_s += time.monotonic() - since_s
        self._joules = None if None in (joules, before, self._joules) else self._joules + joules - before  # type: ignore

    def joules(self, reading: float | None) -> float | None:
        """Energy up to a reading; None where one of the readings failed."""
        return None if reading is None or self._joules is None else reading - self._joules

    def seconds(self) -> float:
        """Seconds up to now."""
        return time.monotonic() - self._began_s


def _source(trainer: pl.Trainer) -> PowerSource:
    """What tells the energy of this rank's device (a collective)."""
    device = trainer.strategy.root_device
    ranks_here = _on_this_machine(trainer)
    cluster = getattr(trainer.strategy, "cluster", None)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if getattr(cluster, "emulate", False) or any(isinstance(each, EmulatedDevices) for each in callbacks):
        raise NoPowerSourceError("the device is emulated, and what the processor takes is not what that device would")
    return find_source(device, ranks_here)


def _on_this_machine(trainer: pl.Trainer) -> int:
    return Counter(_gathered(trainer, socket.gethostname()))[socket.gethostname()]


def _gathered(trainer: pl.Trainer, value: Any) -> list[Any]:
    if trainer.world_size < 2 or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values


def _say(trainer: pl.Trainer, reason: str) -> None:
    """Rank 0 says once which ranks report nothing, and why (a collective)."""
    reasons = _gathered(trainer, reason)
    if not trainer.is_global_zero:
        return
    for why in dict.fromkeys(each for each in reasons if each):
        those = ranks_text(rank for rank, each in enumerate(reasons) if each == why)
        print(f"RankEnergy: no power of {those}: {why}", flush=True)


def _appender(trainer: pl.Trainer) -> Callable[[dict[str, Any]], None]:
    """Write lines to this rank's file."""
    path = Path(trainer.log_dir or trainer.default_root_dir) / f"metrics.rank_{trainer.global_rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(line: dict[str, Any]) -> None:
        # one write in append mode: other callbacks' lines in the same file stay whole
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return write
