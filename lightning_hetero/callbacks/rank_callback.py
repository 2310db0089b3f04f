"""What every callback that measures ranks has: its place in the run, and when it logs."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.callbacks.rank_meter import RankMeter
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.errors import HeteroError


class RankCallback(Callback):
    """Base of the callbacks that measure ranks; not to be used by itself.

    Args:
        log_every_n_steps: optimizer steps between two times that values are brought together and logged; default: the
            Trainer's. Other steps have no collective.
        folder: where ``metrics.jsonl`` is written; default: the logger's folder, or ``default_root_dir`` without one.

    Raises:
        HeteroError: if ``log_every_n_steps`` is no whole number of 1 or more.
    """

    flops_per_sample: float | None = None

    def __init__(self, log_every_n_steps: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        bad = isinstance(log_every_n_steps, bool) or not isinstance(log_every_n_steps, int | None)
        if bad or (log_every_n_steps is not None and log_every_n_steps < 1):
            raise HeteroError(
                f"log_every_n_steps={log_every_n_steps!r}: give a whole number of steps, 1 or more, or leave it out"
            )
        self.log_every_n_steps = log_every_n_steps
        self.folder = folder
        self.logged: dict[str, float] = {}
        """what was logged last"""
        self._meter: RankMeter | None = None
        self._said: set[str] = set()

    @property
    def meter(self) -> RankMeter:
        """What this callback shares with the others of its Trainer.

        Raises:
            RuntimeError: outside of a fit.
        """
        if self._meter is None:
            raise RuntimeError(f"{type(self).__name__} measures fits: there is nothing before one")
        return self._meter

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def begin_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Hear that a fit begins; model and optimizers are set up."""

    def add_values(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Add to ``record.values`` what is known at a batch's end."""

    def step_is_complete(self, trainer: pl.Trainer, record: StepRecord) -> None:
        """Hear of a step, oldest first, when its seconds are known."""

    def step_is_over(self, trainer: pl.Trainer, step: int) -> None:
        """Hear that the trainer has done an optimizer step; ranks may come together here."""

    def logs_at(self, trainer: pl.Trainer, step: int) -> bool:
        """Whether values are logged after this step."""
        every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(every) and step % every == 0

    def say_once(self, text: str) -> None:
        """Say on rank 0, once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(f"{type(self).__name__}: {text}")

    # -- Lightning's hooks ---------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take part in a fit, before the model is wrapped."""
        if stage == "fit":
            self._meter = RankMeter.of(trainer)
            self._meter.join(self, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure."""
        if self.meter.leads(self):
            self.meter.start(trainer, pl_module)
        self.begin_fit(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is on the device."""
        if self.meter.leads(self):
            self.meter.begin_batch(trainer)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is done."""
        if self.meter.leads(self):
            self.meter.begin_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward is done."""
        if self.meter.leads(self):
            self.meter.end_backward()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The optimizer's step comes."""
        if self.meter.leads(self):
            self.meter.begin_optimizer()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is done; so is a step, unless batches accumulate."""
        if self.meter.leads(self):
            self.meter.end_batch(trainer, batch)
        self.add_values(trainer, self.meter.record)
        if self.meter.ends(self):
            self.meter.end_step(trainer, batch)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What comes is no training step's."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.meter.leads(self):
            self.meter.pause()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Likewise."""
        if self.meter.leads(self):
            self.meter.pause()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is left, and merge the files."""
        if self.meter.ends(self):
            self.meter.finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave nothing on the model; each rank's own file has all that was measured."""
        if self._meter is not None:
            self._meter.leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing on the model."""
        if self._meter is not None:
            self._meter.leave()
