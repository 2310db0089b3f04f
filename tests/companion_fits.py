"""Modules, data and callbacks that ask much of what runs beside a fit, alike on one device and on unequal ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassPrecision

from tests.fits import Fit, Recorder, plan_for, whole
from tests.odd_fits import CLASSES, Plain, loaders, outcome, points, trainer_for

Outcomes = dict[str, dict[str, Any]]
Groups = tuple[tuple[int, ...], ...]

SHARES = (3, 1)

SAMPLES = 25
"""the last global batch of an epoch has one sample, so one rank has none"""


class Double(Plain):
    """In 64 bits from the start: what a callback copies before the strategy converts the module is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class Seeking(Double):
    """With a learning rate to be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Scheduled(Double):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)]


# -- tied weights ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.inner(x)))


class Language(nn.Module):
    """An embedding, blocks, and a head with the embedding's weights."""

    def __init__(self, tied: str) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 6, bias=False)  # its weight is [6, 8]
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 6, bias=False)
        if "head" in tied:
            self.head.weight = self.embed.weight
        if "blocks" in tied:
            self.blocks[2].inner.weight = self.blocks[0].inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embed.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :CLASSES].clone()  # a view would lose FSDP2's hook if changed in place


class Tied(Plain):
    """Weights shared inside the network, from block to block, or with a module outside of it."""

    def __init__(self, tied: str) -> None:
        super().__init__()
        self.model = Language(tied)
        self.outside = nn.Linear(8, 8, bias=False) if "outside" in tied else None
        if self.outside is not None:
            self.outside.weight = self.model.blocks[1].inner.weight

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.outside is not None:
            x = x + 0.1 * self.outside(F.pad(x, (0, 2)))[:, :6]
        return super().loss(x, y)


class BlocksOnRoot(Plain):
    """Blocks in a list that the LightningModule holds itself, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))

    def model(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


# -- parts that are not used -------------------------------------------------------------------------------------------


class Skipping(Plain):
    """Leaves a block out on every second step, and a parameter of another one on every third."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if not (self.training and i == 1 + self.global_step % 2):
                x = block(x)
        x = self.last(x) if self.global_step % 3 else F.linear(x, self.last.weight)
        return F.cross_entropy(x, y)


# -- manual optimization -----------------------------------------------------------------------------------------------


class Adversarial(Plain):
    """Two networks, each trained against the other: two backwards and two steps in a training step."""

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.model
        self.toggle = toggle
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.shift = nn.Parameter(torch.zeros(6))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        x, _ = batch
        generator, critic = self.optimizers()  # type: ignore[misc, attr-defined]
        for optimizer, loss_of in ((critic, self._critic_loss), (generator, self._generator_loss)):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            loss = loss_of(x)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            self.log(f"loss {loss_of.__name__}", loss, on_step=True, on_epoch=True, sync_dist=True)

    def _critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(x[:, :3]) + self.shift
        return (F.softplus(-self.critic(x)) + F.softplus(self.critic(fake.detach()))).mean()

    def _generator_loss(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(x[:, :3]) + self.shift)).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._generator_loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam([*self.generator.parameters(), self.shift], 0.02),
            torch.optim.SGD(self.critic.parameters(), 0.1),
        )


class OwnParameters(Plain):
    """Manual accumulation by a counter of its own; all parameters are the LightningModule's or its plain layers'."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        del self.model
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))
        self.count = 0

    def model(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(torch.tanh(self.first(x)) * self.scale)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for part in (0.5, 0.25):
            self.manual_backward(part * self.loss(*batch))
        self.count += 1
        if self.count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        # after a step, within the same training step
        self.log("loss after", self.loss(*batch).detach(), on_step=True, on_epoch=True, sync_dist=True)


# -- fine-tuning, metrics, data ----------------------------------------------------------------------------------------


class FineTuned(Double):
    """A backbone that a callback freezes and frees."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
        self.head = nn.Linear(8, CLASSES).double()

    def model(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.03)


class Measured(Plain):
    """Logs a collection of metrics as objects, and what each batch's hooks are given."""

    def __init__(self) -> None:
        super().__init__()
        metrics = {
            "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
            "precision": MulticlassPrecision(CLASSES, average="macro"),
        }
        self.train_metrics = MetricCollection(dict(metrics), prefix="fit/")
        self.val_metrics = self.train_metrics.clone(prefix="val/")
        self.confusion = MulticlassConfusionMatrix(CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.train_metrics(self.model(x), y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return {"loss": super().training_step(batch, batch_idx), "samples": len(x)}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_metrics.update(self.model(batch[0]), batch[1])
        self.log_dict(self.val_metrics)


class Reloading(pl.LightningDataModule):
    """Gives another loader every second epoch, and remembers what it was asked for."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.asked = batch, 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(points(18 + 4 * self.asked, seed=self.asked), batch_size=self.batch)

    def val_dataloader(self) -> Any:
        return DataLoader(points(11, seed=6), batch_size=self.batch)


class EveryStep(pl.Callback):
    """Saves after every step, when other callbacks have seen it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/step={trainer.global_step}.ckpt")


HAS_AVERAGES = hasattr(callbacks, "EMAWeightAveraging")
"""before Lightning 2.6 there are none but stochastic ones"""


def ema(**options: Any) -> pl.Callback:
    callback: pl.Callback = callbacks.EMAWeightAveraging(decay=0.8, **options)
    return callback


def swa() -> pl.Callback:
    return callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2)


def accumulation() -> pl.Callback:
    return callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})


def unfreezing() -> pl.Callback:
    return callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


KEPT = Fit(shares=(3, 1), reshard=False)
"""blocks stay gathered after an evaluation, when hooks look for the shards"""

Options = Callable[[], dict[str, Any]]

CASES: dict[str, tuple[Callable[[], Any], Options]] = {
    "averages of every step": (Double, lambda: {"callbacks": [ema()]}),
    "averages from a step on": (
        Double,
        lambda: {"callbacks": [ema(update_starting_at_step=9)], "num_sanity_val_steps": 1},
    ),
    "averages of epochs": (
        Double,
        lambda: {"callbacks": [ema(update_every_n_steps=0, update_starting_at_epoch=0)], "accumulate_grad_batches": 2},
    ),
    "stochastic weight averaging": (Double, lambda: {"callbacks": [swa()], "max_epochs": 5}),
    "stochastic weight averaging, a schedule": (Scheduled, lambda: {"callbacks": [swa()], "max_epochs": 5}),
    "embedding and head tied": (lambda: Tied("head"), dict),
    "blocks tied": (lambda: Tied("head, blocks"), lambda: {"gradient_clip_val": 0.3}),
    "tied to what is outside": (lambda: Tied("outside"), lambda: {"gradient_clip_val": 0.3}),
    "blocks on the module itself": (BlocksOnRoot, dict),
    "blocks and parameters left out": (Skipping, lambda: {"max_epochs": 3}),
    "left out, accumulated, clipped": (Skipping, lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
    "two networks by hand": (lambda: Adversarial(False), dict),
    "two networks by hand, toggled": (lambda: Adversarial(True), dict),
    "own parameters by hand": (OwnParameters, dict),
    "fine-tuning": (FineTuned, lambda: {"callbacks": [unfreezing()], "max_epochs": 4}),
    "fine-tuning, parameters kept gathered": (
        FineTuned,
        lambda: {"callbacks": [unfreezing()], "max_epochs": 4, "strategy": {"plan": plan_for(KEPT)}},
    ),
    "averages, parameters kept gathered": (
        Double,
        lambda: {"callbacks": [ema()], "strategy": {"plan": plan_for(KEPT)}},
    ),
    "accumulation by schedule, clip by norm": (
        Double,
        lambda: {"callbacks": [accumulation()], "gradient_clip_val": 0.1, "max_epochs": 3},
    ),
    "accumulation by schedule, clip by value": (
        Double,
        lambda: {
            "callbacks": [accumulation()],
            "gradient_clip_val": 0.05,
            "gradient_clip_algorithm": "value",
            "max_epochs": 3,
        },
    ),
    "collections of metrics": (Measured, dict),
    "learning rates watched": (Scheduled, lambda: {"callbacks": [callbacks.LearningRateMonitor("epoch")]}),
    "validation every second epoch": (Double, lambda: {"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "a number of steps": (Double, lambda: {"max_epochs": -1, "max_steps": 9, "val_check_interval": 3}),
    "a single batch": (Double, lambda: {"fast_dev_run": True}),
}
if not HAS_AVERAGES:
    CASES = {name: case for name, case in CASES.items() if not name.startswith("averages")}


def train(shares: tuple[int, ...] | None, name: str, groups: Groups = ()) -> dict[str, Any]:
    """Run one of the cases: on one device without shares."""
    torch.manual_seed(8)
    make, options = CASES[name]
    module, recorder = make(), Recorder()
    trainer = trainer_for(shares, recorder, options(), groups)
    trainer.fit(module, *loaders(shares, 4, SAMPLES))
    return outcome(trainer, module, recorder)


def train_all(shares: tuple[int, ...] | None, names: list[str], groups: Groups = ()) -> Outcomes:
    return {name: train(shares, name, groups) for name in names}


def resume(shares: tuple[int, ...] | None, name: str, folder: str, ckpt_path: str | None, steps: int) -> dict[str, Any]:
    """Run one of the cases to ``steps``, with a checkpoint of every step."""
    torch.manual_seed(8)
    make, options = CASES[name]
    module, recorder = make(), Recorder()
    chosen = options() | {"max_steps": steps}
    chosen["callbacks"] = [*chosen.get("callbacks", []), EveryStep(folder)]
    trainer = trainer_for(shares, recorder, chosen)
    trainer.fit(module, *loaders(shares, 4, SAMPLES), ckpt_path=ckpt_path)
    return outcome(trainer, module, recorder)


def state_of(path: str) -> dict[str, Tensor]:
    """The model in a checkpoint of one file."""
    state: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
    return {name: whole(value) for name, value in state.items()}
