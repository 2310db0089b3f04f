"""How much memory every rank uses, phase by phase, against what the plan expects."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.callbacks.rank_callback import RankCallback
from lightning_hetero.callbacks.rank_values import RankValues, named
from lightning_hetero.callbacks.run_facts import emulation_of
from lightning_hetero.callbacks.step_flops import pipeline_of
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.memory_source import AllocatorMemory, CountedMemory, MemorySource, SampledMemory

FORWARD, BACKWARD, OPTIMIZER, SCHEDULE, VALIDATION = "forward", "backward", "optimizer", "schedule", "validation"
"""phases of which there are peaks; in a pipeline forwards and backwards take turns, and are one: the schedule"""

_PHASES = (FORWARD, BACKWARD, OPTIMIZER, SCHEDULE, VALIDATION)
_NAMES = ("current", "peak", "reserved", "active", *(f"peak_{phase}" for phase in _PHASES))


class RankMemory(RankCallback):
    """Logs the memory of every rank: now, at its peak, and the peak of each phase.

    Under any strategy: ``device/<what>`` (the mean over ranks), ``device/<what>_rank_{r}``, ``device/min_<what>`` and
    ``device/max_<what>`` of

    - ``memory_current_bytes``, at a step's end, and ``memory_peak_bytes``, within it;
    - ``memory_peak_forward_bytes``, ``..._backward_bytes``, ``..._optimizer_bytes``, ``..._validation_bytes``; in a
      pipeline ``..._schedule_bytes`` for the first two, which take turns there;
    - on CUDA ``memory_reserved_bytes``, what torch's allocator holds, and ``memory_active_bytes``, what is in use or
      waits for another stream;
    - ``memory_of_plan``: the peak over the plan's, where there is a plan with one.

    On CUDA they are torch's own counts. On CPU the bytes of live tensors are counted, of emulated devices in each step,
    else in every ``sample_every``-th: operations are looked at one by one then, which takes time.

    Args:
        sample_every: optimizer steps between two in which memory is counted on CPU; default: as often as is logged.
        log_every_n_steps: steps between two times that values are logged; default: the Trainer's.
        folder: where ``metrics.jsonl`` is written; default: the logger's folder, or ``default_root_dir`` without one.

    Attributes:
        logged: what was logged last, by name.

    Raises:
        HeteroError: for a value that is no such number.
    """

    def __init__(
        self,
        *,
        sample_every: int | None = None,
        log_every_n_steps: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(log_every_n_steps, folder)
        if sample_every is not None and (
            isinstance(sample_every, bool) or not isinstance(sample_every, int) or sample_every < 1
        ):
            raise HeteroError(f"sample_every={sample_every!r}: give a whole number of steps, 1 or more")
        self.sample_every = sample_every
        self._source: MemorySource | None = None
        self._phase: str | None = None
        self._peaks: dict[str, int] = {}
        self._values: RankValues

    def begin_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Find where bytes are read."""
        self._values = RankValues(trainer, len(_NAMES) + 1)
        emulation = emulation_of(trainer)
        device = trainer.strategy.root_device
        if emulation is not None and emulation.storages is not None and emulation.peak is not None:
            self._source = CountedMemory(emulation.storages, emulation.peak)
        else:
            self._source = AllocatorMemory(device) if device.type == "cuda" else SampledMemory()
        self._phase = None
        self._peaks = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The forward begins."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._looks_at(trainer, trainer.global_step + 1):
            assert self._source is not None
            self._source.open(pl_module, trainer.optimizers, batch)
            self._phase = SCHEDULE if pipeline_of(trainer) >= 0 else FORWARD

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The backward begins."""
        super().on_before_backward(trainer, pl_module, loss)
        self._go_on(BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward has ended; with manual optimization another forward may come."""
        super().on_after_backward(trainer, pl_module)
        self._go_on(FORWARD)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The optimizer's step begins."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        self._go_on(OPTIMIZER)

    def add_values(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Add what the step used."""
        source, phase = self._source, self._phase
        if source is None or phase is None:
            return
        now = source.now()
        self._end_phase(source, phase)
        source.close()
        self._phase = None
        if trainer.global_step < record.step:
            return  # batches accumulate: the step's other batches come
        training = {name: peak for name, peak in self._peaks.items() if name != VALIDATION}
        values = {**now, "peak": max(training.values()), **{f"peak_{name}": n for name, n in self._peaks.items()}}
        self._peaks = {}
        record.values |= {f"memory_{name}_bytes": value for name, value in values.items()}
        record.values["memory_kind"] = source.kind
        if isinstance(source, SampledMemory):
            record.values["sampled"] = True
        planned = self.meter.planned
        planned_bytes = None if planned is None else planned.peak_memory_bytes
        self._values.reset()
        self._values.add([*(values.get(name) for name in _NAMES), planned_bytes])

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Bring the ranks' last values together where they are logged."""
        if not self.logs_at(trainer, step):
            return
        rows = [rank[-1] for rank in self._values.take()]
        values: dict[str, float] = {}
        for position, name in enumerate(_NAMES):
            values |= named(f"memory_{name}_bytes", [row[position] for row in rows])
        peak, planned = _NAMES.index("peak"), len(_NAMES)
        values |= named("memory_of_plan", [row[peak] / row[planned] if row[planned] else None for row in rows])
        self.log_values(trainer, values)

    # -- validation ----------------------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look at the first batch, which is as large as any."""
        if self._source is not None and batch_idx == 0 and not trainer.sanity_checking:
            self._source.open(pl_module, trainer.optimizers, batch)
            self._phase = VALIDATION

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep its peak for the next step's line, and write it on one of its own."""
        if self._source is not None and self._phase == VALIDATION:
            self._end_phase(self._source, VALIDATION)
            self._source.close()
            self._phase = None
            peak_bytes = self._peaks[VALIDATION]
            self.meter.write(VALIDATION, {"step": trainer.global_step, "memory_peak_validation_bytes": peak_bytes})

    # -- the end -------------------------------------------------------------------------------------------------------

    def end_fit(self) -> None:
        """Look no longer."""
        if self._source is not None:
            self._source.close()
        self._source = self._phase = None

    def _looks_at(self, trainer: pl.Trainer, step: int) -> bool:
        if not isinstance(self._source, SampledMemory):
            return self._source is not None
        if self.sample_every is not None:
            return step % self.sample_every == 0
        return self.logs_at(trainer, step)

    def _go_on(self, phase: str) -> None:
        if self._source is None or self._phase is None or self._phase == VALIDATION:
            return
        self._end_phase(self._source, self._phase)
        if self._phase != SCHEDULE or phase == OPTIMIZER:
            self._phase = phase

    def _end_phase(self, source: MemorySource, phase: str) -> None:
        self._peaks[phase] = max(self._peaks.get(phase, 0), source.take_peak_bytes())
