"""What each rank's device takes: watts, joules per sample, TFLOP/s per watt."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_hetero.callbacks.emulated_devices import EmulatedDevices
from lightning_hetero.callbacks.energy_span import EnergySpan
from lightning_hetero.callbacks.rank_table import RankTable, logged
from lightning_hetero.callbacks.samples import step_samples
from lightning_hetero.doctor.places import ranks_text
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.power import (
    PERIOD_S,
    EnergyMeter,
    NoPowerSourceError,
    PowerSource,
    Reading,
    find_source,
)

COLUMNS = ("power_w", "joules_per_sample", "tflops_per_s_per_w")
"""what is logged, each as ``device/...``: watts, joules for each of a rank's samples, 10^12 FLOP/s for each watt"""


class RankEnergy(Callback):
    """Measures each rank's device while it trains, under any strategy; validation is left out.

    NVIDIA GPUs are read by NVML, AMD GPUs by amdsmi, processors by RAPL, whose energy the ranks of a machine share
    evenly. A rank whose device tells nothing reports nothing, and rank 0 says why, once; so does a rank that emulates a
    device, since the processor's watts are not that device's.

    Every ``log_every_n_steps`` steps the mean over the ranks, each rank's value, the least and the most go to the
    Trainer's loggers, by one collective: ``device/power_w``, ``device/power_w_rank_0``, ``device/min_power_w``,
    ``device/max_power_w``, and likewise ``joules_per_sample`` and ``tflops_per_s_per_w``. Each rank's own values of
    every step go to :attr:`write`.

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
        self._since_logged = EnergySpan()
        self._since_step = EnergySpan()
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
        self._line = self.write or _appender(trainer)
        self._step = trainer.global_step
        label = None if self._meter is None else self._meter.source.label
        self._line({"kind": "energy_source", "rank": trainer.global_rank, "source": label, "reason": reason or None})
        reasons = _gathered(trainer, reason)
        _say(trainer, reasons)
        # where no rank has a source there is nothing to put together
        self._table = None
        if not all(reasons):
            table = RankTable(trainer.global_rank, trainer.world_size, len(COLUMNS))
            self._table = table.to(trainer.strategy.root_device)
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
        reading = self._read(trainer)
        values = self._since_step.values(reading, self._flops(trainer))
        if values is not None:
            at = {"kind": "energy", "rank": trainer.global_rank, "step": self._step}
            self._line({**at, "samples": self._since_step.samples, **values})
        self._since_step.restart(reading)
        if self._step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log(trainer, reading)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What validation takes is no training step's."""
        reading = self._read(trainer)
        self._since_logged.pause(reading)
        self._since_step.pause(reading)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on."""
        reading = self._read(trainer)
        self._since_logged.resume(reading)
        self._since_step.resume(reading)

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
        reading = None if self._meter is None else self._meter.read()
        self._since_logged.restart(reading)
        self._since_step.restart(reading)

    def _read(self, trainer: pl.Trainer) -> Reading | None:
        if self._meter is None:
            return None
        reading = self._meter.read()
        if reading is None and not self._said_failure:
            self._said_failure = True
            print(
                f"RankEnergy: rank {trainer.global_rank} reports no power any more: {self._meter.problem}", flush=True
            )
        return reading

    def _flops(self, trainer: pl.Trainer) -> float | None:
        found: float | None = self.flops_per_sample or getattr(trainer.strategy, "flops_per_sample", None)
        return found

    def _log(self, trainer: pl.Trainer, reading: Reading | None) -> None:
        if self._table is None:
            return
        own = self._since_logged.values(reading, self._flops(trainer)) or {}
        self._table.update([own.get(name) for name in COLUMNS])
        rows = self._table.compute()
        self._table.reset()
        values: dict[str, float] = {}
        for name, column in zip(COLUMNS, rows.T.tolist(), strict=True):
            values |= logged(name, column)
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)
        self._since_logged.restart(reading)

    def _stop(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.stop()


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


def _say(trainer: pl.Trainer, reasons: list[str]) -> None:
    """Rank 0 says once which ranks report nothing, and why."""
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
