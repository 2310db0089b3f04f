"""Fits to compare: one and the same module and data, on one device and on unequal ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy


def tiny_vit() -> nn.Module:
    """A timm ViT of two blocks, width 16, 5 tokens: its keys' bias has no true gradient, as in larger ones."""
    model: nn.Module = timm.models.VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2
    )
    return model


def mlp() -> nn.Module:
    """Layers in a row, with a first dimension that does not divide by the ranks."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


class Classifier(pl.LightningModule):
    """What a user writes, with nothing about devices in it."""

    def __init__(self, network: str = "vit", lr: float = 1e-2, through_self: bool = False) -> None:
        super().__init__()
        self.model = tiny_vit() if network == "vit" else mlp()
        self.lr = lr
        self.through_self = through_self

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.model(images)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images) if self.through_self else self.model(images)
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("only_step", loss, on_step=True, on_epoch=False, sync_dist=True)
        self.log("images", float(len(images)), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Validated(Classifier):
    """The same with validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self(images), labels), sync_dist=True)


@dataclass(frozen=True)
class Fit:
    """One fit, described so that it can be sent to other processes."""

    network: str = "vit"
    shares: tuple[int, ...] = (2, 1)
    samples: int = 50
    epochs: int = 3
    accumulate: int = 1
    clip: float | None = None
    clip_by: str = "norm"
    precision: str = "64-true"
    shuffle: bool = True
    through_self: bool = False
    reshard: bool = True
    max_steps: int = -1
    validate: bool = False
    seed: int = 3
    groups: tuple[tuple[int, ...], ...] = ()
    modes: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    checkpointing: tuple[bool, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def global_batch(self) -> int:
        return sum(self.shares)

    @property
    def ranks(self) -> int:
        return len(self.shares)

    def on(self, **changes: Any) -> Fit:
        return replace(self, **changes)


class Recorder(Logger, pl.Callback):
    """Keeps every step's gradients (whole, before clipping) and every logged value."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.logged: list[dict[str, float]] = []
        self.name_, self.version_ = "recorder", 0

    name = property(lambda self: "recorder")
    version = property(lambda self: 0)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append({key: float(value) for key, value in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients.append(
            {name: whole(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}
        )


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


@dataclass(frozen=True)
class Outcome:
    """What a fit came to."""

    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    logged: list[dict[str, float]]
    callback_metrics: dict[str, float]
    seen: list[list[int]]


class Order(Sampler[int]):
    """The rule that samples follow: torch's permutation seeded by seed + epoch."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


class Watched(Dataset[Any]):
    """A dataset that remembers which samples were asked for."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.data[index]


def dataset(samples: int, precision: str) -> TensorDataset:
    """Random images and labels, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=dtype)
    return TensorDataset(images, torch.randint(0, 3, (samples,), generator=generator))


def run(fit: Fit, strategy: Any, *, rank_batch: int, order: Any = None, **trainer_options: Any) -> Outcome:
    """Fit under any strategy and say what came of it."""
    torch.manual_seed(fit.seed)
    module = (Validated if fit.validate else Classifier)(fit.network, through_self=fit.through_self)
    data = dataset(fit.samples, fit.precision)
    watched = Watched(data)
    loader = DataLoader(watched, batch_size=rank_batch, shuffle=fit.shuffle if order is None else None, sampler=order)
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=fit.epochs,
        max_steps=fit.max_steps,
        accumulate_grad_batches=fit.accumulate,
        gradient_clip_val=fit.clip,
        gradient_clip_algorithm=fit.clip_by if fit.clip else None,
        precision=fit.precision,
        logger=recorder,
        callbacks=[recorder],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **trainer_options,
    )
    val = DataLoader(dataset(23, fit.precision), batch_size=max(1, rank_batch)) if fit.validate else None
    watched.asked.clear()
    trainer.fit(module, loader, val)
    return Outcome(
        recorder.gradients,
        {name: whole(p) for name, p in module.named_parameters()},
        recorder.logged,
        {key: float(value) for key, value in trainer.callback_metrics.items()},
        [list(watched.asked)],
    )


def on_one_device(fit: Fit) -> Outcome:
    """The reference: Lightning on one device over the global batch."""
    order = Order(fit.samples) if fit.shuffle else None
    return run(fit.on(shuffle=False), "auto", rank_batch=fit.global_batch, order=order, devices=1)


def cluster_for(ranks: int) -> Cluster:
    """As many devices, of a type each."""
    return Cluster(
        "test",
        tuple(Device(type=f"d{r}", node="n", memory_bytes=2**34, speed_flops_per_s=1e9) for r in range(ranks)),
    )


def plan_for(fit: Fit) -> ShardPlan:
    """A plan with the fit's shares."""
    return ShardPlan(
        global_batch_size=fit.global_batch,
        batch_shares=fit.shares,
        groups=fit.groups or (tuple(range(fit.ranks)),),
        device_types=tuple(f"d{r}" for r in range(fit.ranks)),
        modes=fit.modes,
        micro_batches=fit.micro_batches,
        activation_checkpointing=fit.checkpointing,
        reshard_after_forward=fit.reshard,
    )


def on_a_rank(fit: Fit) -> Outcome:
    """The same under hetero_fsdp; runs in each rank."""
    options = {"check_loss": "off", "summary": False, **fit.options}
    strategy = HeteroFSDPStrategy(cluster=cluster_for(fit.ranks), plan=plan_for(fit), **options)
    return run(fit, strategy, rank_batch=1, devices=fit.ranks)
