"""Runs of a small module to compare: by pipelines, and by a plain Trainer on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.plan import Pipeline, PipelinePlan, Stage
from lightning_hetero.schedule import warmup_depths
from lightning_hetero.strategies import HeteroPipelineStrategy

UNITS = 5
FEATURES, CLASSES = 6, 3


class Small(pl.LightningModule):
    """What a user writes; no random numbers, so one device gives the same numbers by any rule."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Evaluated(Small):
    """The same with validation, test and prediction."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch)[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch)[0])

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.model(batch[0]).argmax(-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Layout:
    """Who runs what.

    Args:
        cuts: per pipeline, units of each stage; one rank each.
        counts: per pipeline, micro-batches.
        micro: samples of a micro-batch.
        idle: ranks in no pipeline, the last ones.
    """

    cuts: tuple[tuple[int, ...], ...] = ((2, 3),)
    counts: tuple[int, ...] = (3,)
    micro: int = 2
    schedule: str = "1f1b"
    idle: int = 0

    @property
    def world(self) -> int:
        return sum(len(cut) for cut in self.cuts) + self.idle

    @property
    def batch(self) -> int:
        """Samples of a global batch."""
        return sum(self.counts) * self.micro

    def plan(self, names: Sequence[str] = ("0", "1", "2", "3", "4")) -> PipelinePlan:
        pipelines, rank = [], 0
        for cut, count in zip(self.cuts, self.counts, strict=True):
            depths = warmup_depths(len(cut), count, 0)
            stages = [Stage((sum(cut[:i]), sum(cut[: i + 1])), depths[i]) for i in range(len(cut))]
            pipelines.append(Pipeline(tuple(range(rank, rank + len(cut))), tuple(stages), count))
            rank += len(cut)
        kinds = ("cpu",) * self.world
        return PipelinePlan(self.batch, self.micro, tuple(pipelines), kinds, tuple(names), schedule=self.schedule)

    def strategy(self, **options: Any) -> HeteroPipelineStrategy:
        given = {"plan": self.plan(), **options}
        return HeteroPipelineStrategy(cluster_of(self.world), **{"summary": False, **given})


ONE = Layout()
TWO = Layout(cuts=((2, 3), (4, 1)), counts=(3, 2))
UNLIKE = Layout(cuts=((1, 2, 2), (5,)), counts=(2, 4))


def cluster_of(ranks: int, memory_bytes: int = 2**34) -> Cluster:
    return Cluster("c", tuple(Device("cpu", "n", memory_bytes, None) for _ in range(ranks)))


def points(samples: int, seed: int = 0) -> Dataset[Any]:
    """Random points of three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))


class Noted(Logger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    name = property(lambda self: "noted")
    version = property(lambda self: 0)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append({**{key: float(value) for key, value in metrics.items()}, "step": float(step or 0)})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def trainer_of(layout: Layout | None, strategy: Any = None, **options: Any) -> pl.Trainer:
    """One for a layout; None is one device."""
    made = strategy if strategy is not None else "auto" if layout is None else layout.strategy()
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if layout is None else layout.world,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "precision": "64-true",
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=made, **{**arguments, **options})


def seeded(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """A module of ``kind`` with the same first values everywhere."""
    pl.seed_everything(5, verbose=False)
    return kind(*args, **kwargs)


def values_of(module: nn.Module) -> dict[str, Tensor]:
    """What this rank has of the parameters."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
