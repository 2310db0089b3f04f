"""Fits under the options of hetero_fsdp: what is recorded where it happens, in each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Fit, Outcome, Recorder, cluster_for, dataset, plan_for, run
from tests.odd_fits import Said

WIDTHS = (64, 7, 5, 3)
"""of ``mlp()``'s three layers: every gather, product and reduction is told apart by its size"""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Order(TorchDispatchMode):
    """Notes gathers (G), forwards (F), backwards (B) and reductions (R) of the layers, at the dispatcher."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.events: list[str] = []
        layers = list(itertools.pairwise(WIDTHS))
        padded = [-(-rows // ranks) * ranks * (columns + 1) for columns, rows in layers]
        self._by_size = {size: str(index) for index, size in enumerate(padded)}
        self._by_shape = {(rows, columns): str(index) for index, (columns, rows) in enumerate(layers)}
        self._by_columns = {(columns, rows): str(index) for index, (columns, rows) in enumerate(layers)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if func.namespace == "c10d":
            self._note_collective(name, args)
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and name.startswith("addmm"):
            self.events.append("F" + self._by_columns[tuple(args[2].shape)])
        elif func.namespace == "aten" and name.startswith("mm") and tuple(out.shape) in self._by_shape:
            self.events.append("B" + self._by_shape[tuple(out.shape)])
        return out

    def _note_collective(self, name: str, args: Any) -> None:
        sizes = [tensor.numel() for tensor in _tensors(args)]
        if "gather" in name and max(sizes) in self._by_size:
            self.events.append("G" + self._by_size[max(sizes)])
        elif "reduce_scatter" in name and max(sizes) in self._by_size:
            self.events.append("R" + self._by_size[max(sizes)])


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class Watch(pl.Callback):
    """Enters :class:`Order` for the second step."""

    def __init__(self, ranks: int) -> None:
        self.order = Order(ranks)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.order.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.order.__exit__(None, None, None)


def orders_of(fits: list[Fit]) -> list[tuple[str, str]]:
    """The events of one step's forward, and of its backward, of each fit."""
    return [_order_of(fit) for fit in fits]


def in_flight_of(fits: list[tuple[Fit, int, bool]]) -> list[tuple[str, int]]:
    """The events of one step's forward, and how many reductions may run at once, on devices of so many bytes.

    Each fit comes with whether the devices are emulated.
    """
    found = []
    for fit, memory_bytes, emulate in fits:
        strategy = strategy_for(fit)
        assert strategy.cluster is not None
        devices = tuple(replace(device, memory_bytes=memory_bytes) for device in strategy.cluster.devices)
        strategy.cluster = replace(strategy.cluster, devices=devices, emulate=emulate)
        forward, _ = _order_of(fit, strategy)
        assert strategy.gradients.reduce_scatter is not None
        found.append((forward, strategy.gradients.reduce_scatter.in_flight))
    return found


def _order_of(fit: Fit, strategy: HeteroFSDPStrategy | None = None) -> tuple[str, str]:
    watch = Watch(fit.ranks)
    strategy = strategy or strategy_for(fit)
    module = Plain(fit.network)
    trainer = pl.Trainer(
        strategy=strategy, devices=fit.ranks, max_steps=2, precision="64-true", callbacks=[watch], **QUIET
    )
    trainer.fit(module, DataLoader(dataset(50, "64-true"), batch_size=1))
    events = watch.order.events
    last = max(index for index, event in enumerate(events) if event[0] == "F")
    return " ".join(events[: last + 1]), " ".join(events[last + 1 :])


class Plain(pl.LightningModule):
    """A network and its loss."""

    def __init__(self, network: str | nn.Module = "mlp", lr: float = 1e-2) -> None:
        super().__init__()
        from tests.fits import mlp, tiny_vit

        torch.manual_seed(3)
        self.model = network if isinstance(network, nn.Module) else (tiny_vit() if network == "vit" else mlp())
        self.lr = lr
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        self.seen |= {"input": batch[0].dtype, "output": logits.dtype}
        self.seen["gathered"] = next(self.model.parameters()).dtype
        return F.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def strategy_for(fit: Fit) -> HeteroFSDPStrategy:
    options = {"check_loss": "off", "summary": False, **fit.options}
    return HeteroFSDPStrategy(cluster=cluster_for(fit.ranks), plan=plan_for(fit), **options)


def fitted(fits: list[Fit]) -> list[Outcome]:
    """Fits with their options; runs in each rank."""
    return [run(fit, strategy_for(fit), rank_batch=1, devices=fit.ranks) for fit in fits]


def without_overlap(fit: Fit) -> Outcome:
    """The same with reductions that are waited for at once, as FSDP2 by itself does."""
    from lightning_hetero.strategies.overlap import OverlappedReduceScatter

    OverlappedReduceScatter.overlap = property(lambda self: False, lambda self, value: None)  # type: ignore
    return fitted([fit])[0]


def said_and_seen(cluster: Cluster, options: dict[str, Any], fits: int = 1) -> tuple[list[str], dict[str, str]]:
    """What the strategy said of its options in so many fits, and the types that the module saw."""
    module = Plain()
    with Said() as said:
        strategy = HeteroFSDPStrategy(cluster=cluster, check_loss="off", summary=False, **options)
        trainer = pl.Trainer(strategy=strategy, devices=cluster.world_size, max_steps=2, **QUIET)
        for _ in range(fits):
            trainer.fit(module, DataLoader(dataset(8, "32-true"), batch_size=1))
    kept = {p.dtype for p in module.parameters()} | {
        value.dtype for state in trainer.optimizers[0].state.values() for value in state.values() if value.ndim
    }
    seen = {name: str(dtype) for name, dtype in module.seen.items()}
    return [text for text in said.infos if "does nothing" in text], seen | {"kept": str(*kept)}


def recorded_plan(cluster: Cluster, options: dict[str, Any]) -> Any:
    """The plan that a fit ends with, as plain data."""
    strategy = HeteroFSDPStrategy(cluster=cluster, check_loss="off", summary=False, **options)
    trainer = pl.Trainer(strategy=strategy, devices=cluster.world_size, max_steps=1, **QUIET)
    trainer.fit(Plain(), DataLoader(dataset(8, "32-true"), batch_size=2))
    assert strategy.plan is not None
    strategy.plan.validate()
    return strategy.plan.to_dict()


class Dropping(nn.Module):
    """A block with dropout, so that a second forward with other random numbers would be another one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.forwards += 1
        inner: Tensor = self.second(F.dropout(torch.tanh(self.first(x)), 0.5, self.training))
        return x + scale * inner


class Droppings(nn.Module):
    """Blocks with dropout between two layers."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Dropping(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = block(x, scale=0.5)
        out: Tensor = self.head(x)
        return out


def dropped(fit: Fit, again: tuple[bool, ...] = ()) -> dict[str, Any]:
    """Every step's gradients of a network with dropout, how often its blocks ran, and its parameters' names."""
    from dataclasses import replace

    recorder = Recorder()
    module = Plain(Droppings())
    options = {"check_loss": "off", "summary": False, **fit.options}
    plan = replace(plan_for(fit), activation_checkpointing=again)
    strategy = HeteroFSDPStrategy(cluster=cluster_for(fit.ranks), plan=plan, **options)
    quiet = QUIET | {"logger": recorder}
    trainer = pl.Trainer(
        strategy=strategy, devices=fit.ranks, max_steps=3, precision="64-true", callbacks=[recorder], **quiet
    )
    torch.manual_seed(11 + strategy.global_rank)
    trainer.fit(module, DataLoader(dataset(50, "64-true"), batch_size=1))
    return {
        "gradients": recorder.gradients,
        "forwards": [block.forwards for block in module.model.blocks],
        "names": [name for name, _ in module.named_parameters()],
        "own forward": ["forward" in block.__dict__ for block in module.model.blocks],
    }


def layout_of(cluster: Cluster, options: dict[str, Any], manual: bool = False) -> tuple[Any, Any]:
    """The ranks that hold the model together in a fit, and the plan that it ends with."""
    from tests.odd_fits import Manual, points

    strategy = HeteroFSDPStrategy(cluster=cluster, check_loss="off", summary=False, **options)
    trainer = pl.Trainer(
        strategy=strategy, devices=cluster.world_size, max_steps=1, precision="64-true", limit_val_batches=0, **QUIET
    )
    data = points(8) if manual else dataset(8, "64-true")
    loader = DataLoader(data, batch_size=2)
    trainer.fit(Manual() if manual else Plain(), loader, loader if manual else None)
    assert strategy.plan is not None
    strategy.plan.validate()
    return strategy.groups.replicas, strategy.plan


def of_types(*types: str) -> Cluster:
    return Cluster("mixed", tuple(Device(kind, "n", 2**34, 1e12) for kind in types), emulate=True)
