"""Fits to compare: a module as a pipeline, and on one device by the same rule of random states and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.models.chains import find_chain
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.plan import Pipeline, PipelinePlan, Stage, even_parts
from lightning_hetero.schedule import warmup_depths
from lightning_hetero.strategies import HeteroPipelineStrategy
from lightning_hetero.strategies.pipe.randomness import Draws


def vit(depth: int = 7, drop: float = 0.1) -> nn.Module:
    """A timm ViT of ``depth`` + 3 units with dropout and stochastic depth."""
    model: nn.Module = timm.models.VisionTransformer(
        img_size=8,
        patch_size=4,
        in_chans=1,
        num_classes=3,
        embed_dim=16,
        depth=depth,
        num_heads=2,
        mlp_ratio=2,
        proj_drop_rate=drop,
        drop_path_rate=drop,
    )
    return model


class Pictures(pl.LightningModule):
    """What a user writes: random augmentation in the step, parameters before and after the model, logs."""

    def __init__(self, depth: int = 7, drop: float = 0.1, outside: bool = True) -> None:
        super().__init__()
        self.model = vit(depth, drop)
        self.brightness = nn.Parameter(torch.ones(1)) if outside else None
        self.temperature = nn.Parameter(torch.ones(1)) if outside else None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        if torch.rand(()) < 0.5:
            images = images.flip(-1)
        images = images + 0.1 * torch.randn_like(images)
        if self.brightness is not None:
            images = images * self.brightness
        logits = self.model(images)
        if self.temperature is not None:
            logits = logits / self.temperature
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


class Validated(Pictures):
    """The same with validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(-1) == labels).float().mean())


class Texts(pl.LightningModule):
    """The bundled GPT with a tied embedding."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(vocabulary=11, context=6, width=16, depth=depth, heads=2, dropout=0.1))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def pictures(samples: int, dtype: torch.dtype = torch.float64) -> Dataset[Any]:
    """Random images of three classes."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(images.to(dtype), torch.randint(3, (samples,), generator=generator))


def texts(samples: int) -> Dataset[Any]:
    """Random sequences of tokens."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(11, (samples, 7), generator=generator))


@dataclass(frozen=True)
class PipeFit:
    """One fit, described so that it can be sent to other processes.

    Args:
        cuts: per pipeline, units of each stage.
        counts: per pipeline, micro-batches of a full batch.
        micro: samples of a micro-batch.
        ranks_of: per pipeline its number of ranks; by default one per stage.
    """

    cuts: tuple[tuple[int, ...], ...] = ((5, 1, 4),)
    counts: tuple[int, ...] = (4,)
    micro: int = 2
    schedule: str = "1f1b"
    ranks_of: tuple[int, ...] | None = None
    extra: int = 0
    checkpointing: bool = False
    kind: str = "pictures"
    steps: int = 3
    samples: int | None = None
    precision: str = "64-true"
    clip: float | None = None
    accumulate: int = 1
    validate: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Samples of a full global batch."""
        return sum(self.counts) * self.micro

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.ranks_of or tuple(len(cut) for cut in self.cuts)

    @property
    def world(self) -> int:
        return sum(self.ranks)

    def make_module(self) -> pl.LightningModule:
        pl.seed_everything(1, verbose=False)
        kinds: dict[str, Any] = {"texts": Texts, "pictures": Validated if self.validate else Pictures}
        made: pl.LightningModule = kinds[self.kind](**self.module)
        return made

    def dataset(self) -> Dataset[Any]:
        samples = self.samples or self.batch * self.steps * self.accumulate
        dtype = torch.float64 if self.precision == "64-true" else torch.float32
        return texts(samples) if self.kind == "texts" else pictures(samples, dtype)

    def plan(self) -> PipelinePlan:
        names = [unit.name for unit in find_chain(self.make_module().model).units]  # type: ignore[arg-type]
        pipelines, rank = [], 0
        for cut, count, ranks in zip(self.cuts, self.counts, self.ranks, strict=True):
            depths = warmup_depths(len(cut), count, self.extra)
            borders = [(sum(cut[:i]), sum(cut[: i + 1])) for i in range(len(cut))]
            stages = [Stage(b, d, self.checkpointing) for b, d in zip(borders, depths, strict=True)]
            pipelines.append(Pipeline(tuple(range(rank, rank + ranks)), tuple(stages), count))
            rank += ranks
        return PipelinePlan(
            self.batch, self.micro, tuple(pipelines), ("cpu",) * self.world, tuple(names), schedule=self.schedule
        )


class Recorder(pl.Callback):
    """Keeps the gradients of the first step, losses, and the values at the end."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        if not self.gradients:
            named = module.named_parameters()
            self.gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)  # Lightning divides it


def run_pipeline(fit: PipeFit, plan: PipelinePlan | None = None) -> dict[str, Any]:
    """Run a fit on this rank; returns what it has."""
    module, recorder = fit.make_module(), Recorder()
    devices = tuple(Device("cpu", "n", 2**34, None) for _ in range(fit.world))
    strategy = HeteroPipelineStrategy(Cluster("c", devices), plan=plan or fit.plan(), summary=False)
    trainer = make_trainer(fit, strategy=strategy, callbacks=[recorder], devices=fit.world)
    loader = DataLoader(fit.dataset(), batch_size=fit.batch, shuffle=True)
    trainer.fit(module, loader, loader if fit.validate else None)
    own = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    executed = strategy.assembly.runtime.executed if strategy.assembly.runtime else []
    return {
        "gradients": recorder.gradients,
        "losses": recorder.losses,
        "values": own,
        "metrics": metrics,
        "executed": [str(action) for action in executed],
        "state": module.state_dict(),
        "rank": strategy.global_rank,
    }


def make_trainer(fit: PipeFit, **arguments: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": fit.precision,
        "gradient_clip_val": fit.clip,
        "accumulate_grad_batches": fit.accumulate,
        "num_sanity_val_steps": 0,
        **fit.trainer,
        **arguments,
    }
    return pl.Trainer(**options)


# -- one device --------------------------------------------------------------------------------------------------------


@contextmanager
def seeded_units(model: nn.Module, draws: list[Draws]) -> Iterator[None]:
    """Run the model's own forward with torch seeded before each unit, and after the last.

    Found by the units' modules, so that the model's own forward runs and not the chain.
    """
    chain = find_chain(model)
    handles, before = [], model.__dict__.get("forward")
    for number, unit in enumerate(chain.units):
        first = model.get_submodule(unit.modules[0])

        def seed(*args: Any, number: int = number) -> None:
            draws[0].begin_unit(number)

        handles.append(first.register_forward_pre_hook(seed))
    handles.append(model.register_forward_hook(lambda *args: draws[0].end_model()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        assert before is None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What Lightning sets in the steps of "64-true"."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reference(fit: PipeFit) -> dict[str, Any]:
    """The same fit on one device in a plain loop: the user's step on each micro-batch, losses weighted by samples."""
    module: Any = fit.make_module()
    dtype = torch.float64 if fit.precision == "64-true" else torch.float32
    module.to(dtype)
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    dataset: Any = fit.dataset()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1)).tolist()
    losses, gradients = [], {}
    draws: list[Draws] = [Draws(1, 0, 0)]
    batches = [order[start : start + fit.batch] for start in range(0, len(order), fit.batch)]
    with seeded_units(module.model, draws), default_dtype(dtype):
        for step, indices in enumerate(batches):
            total = 0.0
            for number, part in micro_batches_of(fit, len(indices)):
                rows = [dataset[indices[i]] for i in part]
                batch = tuple(torch.stack(column) for column in zip(*rows, strict=True))
                draws[0] = Draws(1, step, number)
                draws[0].begin_step()
                with torch.autocast("cpu", torch.bfloat16, enabled=fit.precision == "bf16-mixed"):
                    loss = module.training_step(batch, step)
                loss = loss * (len(part) / len(indices))
                (loss / fit.accumulate).backward()
                total += float(loss.detach())
            losses.append(total)
            if (step + 1) % fit.accumulate and step + 1 < len(batches):
                continue
            if not gradients:
                gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
            if fit.clip:
                torch.nn.utils.clip_grad_norm_(module.parameters(), fit.clip)
            optimizer.step()
            optimizer.zero_grad()
    values = {n: p.detach().clone() for n, p in module.named_parameters()}
    return {"gradients": gradients, "losses": losses, "values": values}


def micro_batches_of(fit: PipeFit, samples: int) -> list[tuple[int, range]]:
    """Number in the step and places in the batch of each micro-batch."""
    shares = fit.plan().split(samples)
    found, at, before = [], 0, 0
    for share, count in zip(shares, fit.counts, strict=True):
        sizes = even_parts(share, min(count, -(-share // fit.micro))) if share else ()
        for index, size in enumerate(sizes):
            found.append((before + index, range(at, at + size)))
            at += size
        before += count
    return found
