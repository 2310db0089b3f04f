"""Emulated devices under any strategy: stock ones too, so that a baseline is emulated by the same code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_hetero.callbacks.rank_values import gather_objects
from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.emulation import Emulation
from lightning_hetero.emulation_report import EmulationReport, late_line
from lightning_hetero.errors import ClusterError, UnsupportedError
from lightning_hetero.models.units import find_units
from lightning_hetero.profiler.marks import UnitListener


class EmulatedDevices(Callback):
    """Makes each CPU rank as slow as its device of the cluster, and out of memory where that device would be.

    Training, validation, test and predict steps are emulated, under single-device, DDP, FSDP2 and our own
    strategies. At the end of fit rank 0 prints one line if any unit was late.

    Args:
        cluster: the cluster, or the path of its YAML file; ``devices[r]`` is the device of global rank r.
        costs: seconds per unit and device type in place of FLOPs / speed, or the path of their JSON file.
        wrap: classes of the model's blocks, as for the strategy; by default they are found by structure.
        listeners: told of each unit's begin and end; the time between includes the emulation's sleep.

    Attributes:
        reports: every rank's report, after a fit.

    Raises:
        ClusterError: the file is wrong or, when a run starts, the number of devices is not that of ranks.
    """

    def __init__(
        self,
        cluster: Cluster | str | os.PathLike[str],
        costs: ModelCosts | str | os.PathLike[str] | None = None,
        wrap: set[type[nn.Module]] | None = None,
        listeners: Sequence[UnitListener] = (),
    ) -> None:
        self.cluster = cluster if isinstance(cluster, Cluster) else Cluster.from_yaml(cluster)
        self.costs = costs if costs is None or isinstance(costs, ModelCosts) else ModelCosts.load(costs)
        self.wrap = wrap
        self.listeners = list(listeners)
        self.reports: tuple[EmulationReport, ...] = ()
        self._emulation: Emulation | None = None
        self._module: pl.LightningModule | None = None
        self._step: AbstractContextManager[None] | None = None

    @property
    def emulation(self) -> Emulation:
        """The emulation of this rank, once attached.

        Raises:
            RuntimeError: before a run has started.
        """
        if self._emulation is None:
            raise RuntimeError("the emulation starts with a run of the trainer: call attach() first")
        return self._emulation

    def attach(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start this rank's emulation, after any wrapping; what is attached stays as it is.

        Raises:
            ClusterError: the number of devices is not that of ranks.
            UnsupportedError: the rank does not run on a CPU.
            EmulatedOutOfMemoryError: the model alone does not fit.
        """
        if self._module is not module:
            self.detach()
            self._check(trainer)
            device = self.cluster.devices[trainer.global_rank]
            self._emulation = Emulation(
                device, trainer.global_rank, find_units(module, self.wrap), self.costs, listeners=self.listeners
            )
            self._module = module
            self._emulation.start(module, trainer.optimizers)
        else:
            self.emulation.count(module, trainer.optimizers)

    def detach(self) -> None:
        """End the emulation; its report stays readable."""
        self._leave()
        if self._module is not None:
            self.emulation.stop()
            self._module = None

    def step(self, batch: object = None) -> AbstractContextManager[None]:
        """Emulate what runs inside, outside of the trainer's own steps; see :meth:`Emulation.step`."""
        return self.emulation.step(batch)

    def take_peak_bytes(self) -> int | None:
        """The most that was live on this rank since the last call."""
        return self.emulation.take_peak_bytes()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a cluster that does not fit before anything is built."""
        self._check(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach; the strategy has wrapped the model by now."""
        self.attach(trainer, pl_module)

    # Again at each start: optimizer states may have been restored since.
    on_sanity_check_start = on_train_start = on_fit_start
    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Emulate from here on: forward, backward and optimizer step."""
        self.emulation.steps_done = trainer.global_step
        self._enter(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Emulate no longer."""
        self._leave()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Emulate no longer: a batch that was skipped has no end of its own."""
        self._leave()

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Emulate from here on: the forward."""
        self._enter(batch)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Emulate no longer."""
        self._leave()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather all ranks' reports; rank 0 says how many units were late."""
        self.reports = tuple(gather_objects(trainer, self.emulation.report()))
        line = late_line(self.reports)
        if line is not None and trainer.is_global_zero:
            print(line, flush=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave nothing active behind."""
        self._leave(exception)
        self.detach()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the hooks off the model."""
        self.detach()

    def _enter(self, batch: object) -> None:
        self._leave()
        step = self.emulation.step(batch)
        step.__enter__()
        self._step = step

    def _leave(self, exception: BaseException | None = None) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if exception is None:
            step.__exit__(None, None, None)
        else:
            step.__exit__(type(exception), exception, exception.__traceback__)

    def _check(self, trainer: pl.Trainer) -> None:
        if self.cluster.world_size != trainer.world_size:
            raise ClusterError(
                f"cluster {self.cluster.name!r} has {self.cluster.world_size} devices and the trainer runs "
                f"{trainer.world_size} ranks: set devices={self.cluster.world_size} (and num_nodes), or give a "
                "cluster file with one device per rank"
            )
        root = trainer.strategy.root_device
        if root.type != "cpu":
            raise UnsupportedError(f"emulated devices are CPU ranks, this one runs on {root}: use accelerator='cpu'")
