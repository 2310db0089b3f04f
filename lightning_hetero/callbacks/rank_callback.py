"""What every callback that measures ranks has: its place in the run, and when it logs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.callbacks.rank_meter import RankMeter
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.errors import HeteroError
from lightning_hetero.strategies import callback_adapter


class RankCallback(Callback):
    """Base of the callbacks that measure ranks; not to be used by itself.

    Args:
        log_every_n_steps: optimizer steps between two times that values are brought together and logged; default: the
            Trainer's. Other steps have no collective.
        folder: where ``metrics.jsonl`` is written; default: the logger's folder, or ``default_root_dir`` without one.
        flops_per_sample: FLOPs of forward and backward of one sample, in place of counting them.

    Attributes:
        logged: what was logged last, by name.

    Raises:
        HeteroError: for a value that is no such number.
    """

    def __init__(
        self,
        log_every_n_steps: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        flops_per_sample: float | None = None,
    ) -> None:
        bad = isinstance(log_every_n_steps, bool) or not isinstance(log_every_n_steps, int | None)
        if bad or (log_every_n_steps is not None and log_every_n_steps < 1):
            raise HeteroError(
                f"log_every_n_steps={log_every_n_steps!r}: give a whole number of steps, 1 or more, or leave it out"
            )
        if flops_per_sample is not None and not (
            isinstance(flops_per_sample, int | float) and math.isfinite(flops_per_sample) and flops_per_sample > 0
        ):
            raise HeteroError(
                f"flops_per_sample={flops_per_sample!r}: give the FLOPs of a sample's forward and backward, such as "
                "105e9, or leave it out to have them counted"
            )
        self.log_every_n_steps = log_every_n_steps
        self.folder = None if folder is None else os.fspath(folder)
        self.flops_per_sample = flops_per_sample
        self.logged: dict[str, float] = {}
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

    def interrupt(self) -> None:
        """Hear that what comes is no training step's: a validation, an epoch's end."""

    def end_fit(self) -> None:
        """Hear that the fit is over, well or not; it may be told more than once."""

    def logs_at(self, trainer: pl.Trainer, step: int) -> bool:
        """Whether values are logged after this step."""
        every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(every) and step % every == 0

    def log_values(self, trainer: pl.Trainer, values: Mapping[str, float]) -> None:
        """Hand values to the Trainer's loggers, which write on rank 0; none where there are none."""
        self.logged = dict(values)
        if not self.logged:
            return
        if self.meter.facts.emulated:
            self.logged["device/emulated"] = 1.0
        for logger in trainer.loggers:
            logger.log_metrics(dict(self.logged), step=callback_adapter.logged_step(trainer))

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
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pause()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Likewise."""
        self._pause()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is left, and merge the files."""
        self.end_fit()
        if self.meter.ends(self):
            self.meter.finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave nothing behind; each rank's own file has all that was measured."""
        self.end_fit()
        if self._meter is not None:
            self._meter.leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self.end_fit()
        if self._meter is not None:
            self._meter.leave()

    def _pause(self) -> None:
        if self.meter.leads(self):
            self.meter.pause()
        self.interrupt()
