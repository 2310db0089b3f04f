"""Fits whose memory is counted, and what their units keep: for the check of the memory formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import UnitCost
from lightning_hetero.models.units import find_units
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy

PIXELS, CLASSES = 32, 10


@dataclass(frozen=True)
class Size:
    """Of the transformer, and its shares."""

    shares: tuple[int, ...]
    depth: int = 6
    width: int = 192
    reshard: bool = True
    precision: str = "32-true"
    steps: int = 3
    again: tuple[bool, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.shares)


def vit(size: Size) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.models.VisionTransformer(
        img_size=PIXELS,
        patch_size=4,
        in_chans=1,
        num_classes=CLASSES,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=3,
    )
    return model


class Classifier(pl.LightningModule):
    """A plain module."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = vit(size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=False)


class Peaks(pl.Callback):
    """The peak of every step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.bytes.append(strategy.instruments.take_peak_bytes())


def peaks_of_a_rank(size: Size) -> list[int]:
    """Accounted peak bytes of this rank, step by step; runs in each rank."""
    devices = tuple(Device("t", "n", 2**34, 1e13) for _ in size.shares)
    plan = ShardPlan(
        sum(size.shares),
        size.shares,
        (tuple(range(size.ranks)),),
        ("t",) * size.ranks,
        reshard_after_forward=size.reshard,
        activation_checkpointing=size.again,
    )
    strategy = HeteroFSDPStrategy(
        cluster=Cluster("c", devices, emulate=True), plan=plan, check_loss="off", summary=False, **size.options
    )
    peaks = Peaks()
    _fit(size, strategy, [peaks], batch_size=1)
    return peaks.bytes


def planned_and_accounted(speeds: tuple[float, ...]) -> tuple[int, int]:
    """Peak bytes of this rank by the plan that the strategy makes, and those of all steps; runs in each rank."""
    devices = tuple(Device(f"d{rank}", "n", 2**34, speed) for rank, speed in enumerate(speeds))
    strategy = HeteroFSDPStrategy(cluster=Cluster("c", devices, emulate=True), check_loss="off", summary=False)
    _fit(Size((4, 4), depth=3, width=384), strategy, [], batch_size=4)
    rank = strategy.global_rank
    assert strategy.plan is not None
    planned, accounted = strategy.plan.predictions[rank].peak_memory_bytes, strategy.summaries[rank].peak_bytes
    assert planned is not None
    assert accounted is not None
    return planned, accounted


def _fit(size: Size, strategy: HeteroFSDPStrategy, callbacks: list[pl.Callback], batch_size: int) -> None:
    samples = sum(size.shares) * size.steps
    data = TensorDataset(torch.randn(samples, 1, PIXELS, PIXELS), torch.zeros(samples, dtype=torch.int64))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=size.ranks,
        max_epochs=1,
        precision=size.precision,  # type: ignore[arg-type]
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(size), DataLoader(data, batch_size=batch_size))


def measured_units(size: Size, samples: int = 4) -> list[UnitCost]:
    """What each unit keeps and passes on per sample, counted with ``saved_tensors_hooks``.

    A storage counts with the unit in whose forward it was first kept; what is kept between two units counts with
    the one before. Parameters, and the batch itself, count elsewhere.
    """
    module = Classifier(size)
    units = find_units(module)
    known = {p.untyped_storage().data_ptr() for p in module.parameters()}
    images = torch.randn(samples, 1, PIXELS, PIXELS)
    known.add(images.untyped_storage().data_ptr())
    kept, outputs, largest = [0] * len(units), [0] * len(units), [0] * len(units)
    alive: list[Tensor] = []  # so that no address is used twice
    now = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept[now] += storage.nbytes()
            largest[now] = max(largest[now], storage.nbytes())
        alive.append(tensor)
        return tensor

    def begin(index: int) -> Any:
        def hook(*args: Any) -> None:
            nonlocal now
            now = index

        return hook

    def end(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs[index] = output.untyped_storage().nbytes()

        return hook

    for index, unit in enumerate(units):
        unit.module.register_forward_pre_hook(begin(index))
        unit.module.register_forward_hook(end(index))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(module.training_step((images, torch.zeros(samples, dtype=torch.int64)), 0))
    return [
        UnitCost(
            unit.name,
            sum(p.numel() for p in unit.module.parameters()),
            0.0,
            0.0,
            kept[index] // samples,
            outputs[index] // samples,
            is_block=unit.is_block,
            inner_gradient_bytes=largest[index] // samples,
        )
        for index, unit in enumerate(units)
    ]


def parameters_outside_units(size: Size, units: Sequence[UnitCost]) -> int:
    """Parameters of the model that no unit owns (class token, positions)."""
    return sum(p.numel() for p in vit(size).parameters()) - sum(unit.parameters for unit in units)
