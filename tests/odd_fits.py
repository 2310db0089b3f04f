"""Modules and loaders that ask much of a strategy, to be run on one device and on unequal ranks alike."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Fit, Recorder, cluster_for, plan_for, whole

CLASSES = 3
STAGES = ("fit", "val")


def points(samples: int, seed: int = 5) -> TensorDataset:
    """Points of six numbers in three classes, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def layers(*extra: nn.Module) -> nn.Sequential:
    """A small network; ``extra`` sits in its middle."""
    return nn.Sequential(nn.Linear(6, 8), *extra, nn.Tanh(), nn.Linear(8, CLASSES))


class Mean(Metric):
    """A mean in 64 bits. torchmetrics' own sums each batch in 32 bits once ``Module.double()`` was called on it
    (1.9.0: that resets what ``set_dtype`` set), so that its last digits depend on how samples are batched.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return self.total / self.count


class Plain(pl.LightningModule):
    """Logs a lot; the base of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = layers()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(*batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return batch[0][:, 0].clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.03)


class Logging(Plain):
    """Every way to log, in every hook that sees a batch or an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = nn.ModuleDict({stage: MulticlassAccuracy(CLASSES, average="micro") for stage in STAGES})
        self.mean = nn.ModuleDict({stage: Mean() for stage in STAGES})
        self.outputs: list[int] = []

    def _log_all(self, stage: str, batch: tuple[Tensor, Tensor], **how: Any) -> None:
        x, y = batch
        for fx in ("mean", "sum", "min", "max"):
            # each sample's own value, reduced as the name says: what one device over the global batch gives
            self.log(f"{stage}/{fx}", getattr(torch, fx)(x[:, 0]), reduce_fx=fx, sync_dist=True, **how)
        self.accuracy[stage](self.model(x), y)
        self.mean[stage].update(x[:, 1])
        self.log(f"{stage}/accuracy", self.accuracy[stage], on_step=False, on_epoch=True)
        self.log(f"{stage}/mean_metric", self.mean[stage], on_step=False, on_epoch=True)
        self.log(f"{stage}/local", x[:, 0].mean(), on_step=False, on_epoch=True)

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("fit/before", batch[0][:, 3].mean(), on_step=True, on_epoch=True, sync_dist=True)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/before", batch[0][:, 3].mean(), sync_dist=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self._log_all("fit", batch, on_step=True, on_epoch=True)
        self.outputs.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("fit/after", batch[0][:, 2].mean(), on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("fit/epoch", float(self.current_epoch), sync_dist=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self._log_all("val", batch, on_step=False, on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/after", batch[0][:, 2].mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/epoch", 2.0 * self.current_epoch, sync_dist=True)


class Scheduled(Plain):
    """A schedule over all steps, a frozen layer and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.model = layers(nn.Linear(8, 8))
        self.model[1].requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Configured(Plain):
    """Builds its network in ``configure_model``: plain, on the meta device, or sharded by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(8)  # sharded or not, every rank draws the same
        with torch.device("meta" if "meta" in self.how else "cpu"):
            self.model = layers()
        if "fully_shard" in self.how and self.device_mesh is not None:
            for layer in self.model:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Manual(Plain):
    """Two optimizers, stepped by hand, one of them every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc, attr-defined]
        loss = self.loss(*batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.model[0].parameters(), 0.1)
        return first, torch.optim.Adam(self.model[2].parameters(), 0.02)


class Stateful(Plain):
    """Changes all that a step can change: random states, metrics, containers, tensors, buffers, the network's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = layers(nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.model.seen = {"sizes": [], "steps": 0}
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.outputs: list[Any] = []
        self.by_class: dict[str, list[int]] = {"first": []}
        self.ema = torch.zeros((), dtype=torch.float64)
        self.total = torch.zeros((), dtype=torch.float64)
        self.steps = 0
        self.started: dict[str, Any] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.started:
            self.started = self.state()

    def state(self) -> dict[str, Any]:
        """Everything that must be as if nobody had run a step before."""
        return {
            "torch": torch.get_rng_state().sum().item(),
            "numpy": str(np.random.get_state()[1].sum()),  # type: ignore[index]
            "python": (sum(random.getstate()[1]), random.getstate()[2]),
            "buffers": {name: buffer.sum().item() for name, buffer in self.named_buffers()},
            "gradients": [name for name, p in self.named_parameters() if p.grad is not None],
            "containers": repr((self.outputs, self.by_class, self.model.seen, self.steps)),
            "tensors": (self.ema.item(), self.total.item()),
            "metric": (self.accuracy.tp.sum().item(), self.accuracy._update_count),
            "training": {name: module.training for name, module in self.named_modules()},
        }

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.1 * torch.randn_like(x) * float(np.random.rand()) * random.random()
        self.accuracy.update(self.model(x), y)
        self.outputs.append(len(x))
        self.by_class["first"].append(int(y[0]))
        self.model.seen["sizes"].append(len(x))
        self.model.seen["steps"] += 1
        loss = self.loss(x, y)
        self.ema = 0.9 * self.ema + 0.1 * loss.detach()
        self.total += loss.detach()
        self.steps += 1
        self.log("seen", loss)
        return loss


class Augmented(Dataset[Any]):
    """Draws from all random generators for each sample."""

    def __init__(self, samples: int) -> None:
        self.data = points(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.01 * torch.randn_like(x) * float(np.random.rand()) * random.random(), y


class Stream(IterableDataset[Any]):
    """Batches of the given sizes, one after another out of the samples from ``start`` on."""

    def __init__(self, start: int, sizes: tuple[int, ...]) -> None:
        self.start, self.sizes = start, sizes

    def __iter__(self) -> Iterator[Any]:
        x, y = points(100).tensors
        at = self.start
        for size in self.sizes:
            yield x[at : at + size], y[at : at + size]
            at += size


class OwnBatches(Sampler[list[int]]):
    """Indices as a user's own batch sampler gives them."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def trainer_for(
    shares: tuple[int, ...] | None,
    recorder: Recorder,
    options: dict[str, Any],
    groups: tuple[tuple[int, ...], ...] = (),
) -> pl.Trainer:
    """A quiet trainer in 64 bits: on one device without shares, else on ranks with that plan."""
    options = dict(options)
    strategy: Any = "auto"
    if shares is not None:
        fit = Fit(shares=shares, groups=groups)
        own = {"plan": plan_for(fit), "check_loss": "off", "summary": False, **options.pop("strategy", {})}
        strategy = HeteroFSDPStrategy(cluster=cluster_for(fit.ranks), **own)
    options.pop("strategy", None)
    callbacks = [recorder, *options.pop("callbacks", [])]
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        strategy=strategy,
        devices=len(shares) if shares else 1,
        accelerator="cpu",
        callbacks=callbacks,
        **{"precision": "64-true", "logger": recorder, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
        | quiet
        | {"max_epochs": 2}
        | options,
    )


def loaders(shares: tuple[int, ...] | None, batch: int, samples: int, **options: Any) -> tuple[Any, Any]:
    """Training and validation loaders in order; one device's batch is the ranks' global batch."""
    size = batch // len(shares) if shares else batch
    train = DataLoader(points(samples), batch_size=size, **options)
    return train, DataLoader(points(11, seed=6), batch_size=size)


def outcome(trainer: pl.Trainer, module: pl.LightningModule, recorder: Recorder) -> dict[str, Any]:
    """What a run came to, as plain data."""
    return {
        "parameters": {name: whole(p) for name, p in module.named_parameters()},
        "logged": recorder.logged,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
    }


class Said(logging.Handler):
    """What the strategy said by log and by warning while this was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.infos.append(record.getMessage())

    def __enter__(self) -> Said:
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(self)
        self._catching = warnings.catch_warnings(record=True)
        self._warned = self._catching.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error: Any) -> None:
        self._catching.__exit__(*error)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(self)

    @property
    def warned(self) -> list[str]:
        return [str(w.message) for w in self._warned or [] if "hetero_fsdp" in str(w.message)]
