"""What each rank's device takes: watts, joules per sample, TFLOP/s per watt."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_hetero.callbacks.rank_callback import RankCallback
from lightning_hetero.callbacks.rank_values import RankValues, gather_objects, named
from lightning_hetero.callbacks.step_record import StepRecord
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


class RankEnergy(RankCallback):
    """Measures the energy that each rank's device takes in training steps, under any strategy.

    NVIDIA GPUs are read by NVML, AMD GPUs by amdsmi, processors by RAPL, whose energy the ranks of a machine share
    evenly. A rank whose device tells nothing reports nothing, and rank 0 says why, once; so does a rank that emulates a
    device, since the processor's watts are not that device's.

    Logged are ``device/<what>`` (the mean over ranks), ``device/<what>_rank_{r}``, ``device/min_<what>`` and
    ``device/max_<what>``, since they were logged last, of

    - ``power_w``: watts;
    - ``joules_per_sample``: for each of the rank's samples, as RankThroughput counts them;
    - ``tflops_per_s_per_w``: 10^12 FLOP/s of the model for each watt, by the same count of FLOPs as RankThroughput's.

    Args:
        period_s: seconds between readings, by a thread of its own.
        flops_per_sample: FLOPs of forward and backward of one sample, in place of counting them.
        source: makes what tells a rank's energy, given the Trainer; by default what its device has.
        log_every_n_steps: steps between two times that values are logged; default: the Trainer's.
        folder: where ``metrics.jsonl`` is written; default: the logger's folder, or ``default_root_dir`` without one.

    Attributes:
        logged: what was logged last, by name.

    Raises:
        HeteroError: for a value that is no such number.
    """

    def __init__(
        self,
        period_s: float = PERIOD_S,
        flops_per_sample: float | None = None,
        source: Callable[[pl.Trainer], PowerSource] | None = None,
        *,
        log_every_n_steps: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(log_every_n_steps, folder, flops_per_sample)
        if not period_s > 0:
            raise HeteroError(f"period_s={period_s!r}: give a number of seconds above 0")
        self.period_s = period_s
        self._find = source or self._own_source
        self._energy: EnergyMeter | None = None
        self._since: Reading | None = None
        self._joules = self._seconds = 0.0
        self._values: RankValues | None = None

    def begin_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin to measure; say which ranks cannot, and why (a collective)."""
        self.end_fit()
        reason = None
        try:
            self._energy = EnergyMeter(self._find(trainer), self.period_s)
            self._energy.start()
        except NoPowerSourceError as error:
            reason = str(error)
        label = None if self._energy is None else self._energy.source.label
        self.meter.write("energy_source", {"step": trainer.global_step, "source": label, "reason": reason})
        reasons = gather_objects(trainer, reason)
        for why in dict.fromkeys(each for each in reasons if each is not None):
            those = ranks_text(rank for rank, each in enumerate(reasons) if each == why)
            self.say_once(f"no power of {those}: {why}")
        # where no rank has a source there is nothing to bring together
        self._values = RankValues(trainer, 4) if None in reasons else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on where something came in between."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._since is None:
            self._since = self._read()

    def interrupt(self) -> None:
        """What comes takes energy, too."""
        self._note()
        self._since = None

    def add_values(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Add what the step took."""
        if trainer.global_step < record.step:
            return  # batches accumulate: the step's other batches come
        self._note()
        if self._seconds > 0:
            record.values |= {"joules": self._joules, "energy_s": self._seconds}
        self._joules = self._seconds = 0.0

    def step_is_complete(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Note a step, and add its rates to its line."""
        flops = None if record.flops is None else record.flops.model
        row = [record.values.get("joules"), record.values.get("energy_s"), record.samples, flops]
        if row[0] is not None:
            rates = energy_rates([[math.nan if value is None else value for value in row]])
            record.values |= {name: value for name, value in rates.items() if not math.isnan(value)}
        if self._values is not None:
            self._values.add(row)

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Bring the ranks' values together where they are logged."""
        if self._values is None or not self.logs_at(trainer, step):
            return
        self.meter.complete(trainer)
        ranks = [energy_rates(rows) for rows in self._values.take()]
        by_name = {name: [rates[name] for rates in ranks] for name in (ranks[0] if ranks else ())}
        self.log_values(trainer, {key: value for name in by_name for key, value in named(name, by_name[name]).items()})

    def end_fit(self) -> None:
        """End the thread."""
        energy, self._energy, self._since = self._energy, None, None
        if energy is not None:
            energy.stop()

    def _read(self) -> Reading | None:
        if self._energy is None:
            return None
        reading = self._energy.read()
        if reading is None:
            print(
                f"RankEnergy: rank {self.meter.facts.rank} reports no power any more: {self._energy.problem}",
                flush=True,
            )
            self.end_fit()
        return reading

    def _note(self) -> None:
        """Add what was taken since the last reading."""
        before = self._since
        if before is None:
            return
        self._since = self._read()
        if self._since is None:
            self._joules = self._seconds = 0.0  # a part of a step is none
        else:
            self._joules += self._since.joules - before.joules
            self._seconds += self._since.at_s - before.at_s

    def _own_source(self, trainer: pl.Trainer) -> PowerSource:
        """What tells the energy of this rank's device (a collective)."""
        hosts = gather_objects(trainer, socket.gethostname())
        if self.meter.facts.emulated:
            raise NoPowerSourceError(
                "the device is emulated, and what the processor takes is not what that device would"
            )
        return find_source(trainer.strategy.root_device, hosts.count(hosts[trainer.global_rank]))


def energy_rates(steps: Sequence[Sequence[float]]) -> dict[str, float]:
    """What one rank's steps took.

    Args:
        steps: of each, joules, seconds, samples and FLOPs; NaN where there are none, and those without joules are left
            out.

    Returns:
        ``power_w``, ``joules_per_sample`` and ``tflops_per_s_per_w``; NaN where they cannot be told.
    """
    there = [step for step in steps if not math.isnan(step[0])]
    joules, seconds, samples, flops = (math.fsum(column) for column in zip(*there, strict=True)) if there else [0.0] * 4
    return {
        "power_w": joules / seconds if seconds > 0 else math.nan,
        "joules_per_sample": joules / samples if samples > 0 else math.nan,
        # FLOP/s over joules/s: the seconds cancel out
        "tflops_per_s_per_w": flops / joules / 1e12 if joules > 0 else math.nan,
    }
