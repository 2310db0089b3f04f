"""Fits with the callbacks that measure ranks, on emulated devices and real ones; what they wrote and logged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import EmulatedDevices, RankEnergy, RankMemory, RankThroughput, StragglerMonitor
from lightning_hetero.cluster import Cluster, Device, SpeedChange
from lightning_hetero.metrics import read_metrics
from lightning_hetero.plan import Pipeline, PipelinePlan, RankPrediction, ShardPlan, Stage
from lightning_hetero.schedule import warmup_depths
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy
from tests.odd_fits import Said
from tests.test_power import Steady

WIDTH, LAYERS = 64, 3
LAYER = 2 * WIDTH * WIDTH
FORWARD = LAYERS * LAYER
SAMPLE = 3 * FORWARD - LAYER
"""FLOPs of a sample: the first layer's input needs no gradient"""


class Wide(pl.LightningModule):
    """Layers alike, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


GAP_S = 0.02
"""seconds of Python between two units, where a rank that shards is blocked"""


class Sharded(Wide):
    """Shards itself in ``configure_model``, as ModelParallelStrategy asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.model[2].register_forward_pre_hook(lambda *_: time.sleep(GAP_S))

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in (*self.model[::2], self.model):
                fully_shard(layer, mesh=mesh)


class Dying(Wide):
    """Its process is killed in a step."""

    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.at_step = at_step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Stamps(pl.Callback):
    """When each step ended, by a clock of its own."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.ends.setdefault(trainer.global_step, time.perf_counter())


class Kept(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    name = property(lambda self: "kept")
    version = property(lambda self: 0)
    save_dir = property(lambda self: None)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((int(step or 0), dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def loader(batch: int, steps: int) -> DataLoader[Any]:
    return DataLoader(torch.ones(batch * steps, WIDTH), batch_size=batch)  # type: ignore[arg-type]


def devices(
    seconds: Sequence[float], samples: int, slowed: dict[int, tuple[SpeedChange, ...]] | None = None
) -> Cluster:
    """Emulated devices that take so many seconds for so many samples."""
    return Cluster(
        "test",
        tuple(
            Device(f"d{r}", "n", 2**30, samples * SAMPLE / s, speed_schedule=(slowed or {}).get(r, ()))
            for r, s in enumerate(seconds)
        ),
        emulate=True,
    )


def fit(
    module: pl.LightningModule,
    strategy: Any,
    callbacks: Sequence[pl.Callback],
    *,
    batch: int,
    steps: int,
    validate: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit in the working directory; returns what was logged, said and written, and steps by another clock."""
    kept, stamps, after = Kept(), Stamps(), Stamps()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        callbacks=[stamps, *callbacks, after],
        logger=kept,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
        **{"max_epochs": 1, "log_every_n_steps": 5, "num_sanity_val_steps": 0, **options},
    )
    with Said() as said:
        trainer.fit(module, loader(batch, steps), loader(2, 2) if validate else None)
    (run,) = read_metrics(os.getcwd()) if Path("metrics.jsonl").exists() else (None,)
    own = {step: end - stamps.ends[step - 1] for step, end in stamps.ends.items() if step > 1}
    return {
        "logged": kept.logged,
        "said": said.infos,
        "lines": [] if run is None else run.lines,
        "ranks": {} if run is None else run.ranks,
        "own_step_s": own,
        "callbacks_s": {step: after.ends[step] - end for step, end in stamps.ends.items()},
        "files": sorted(path.name for path in Path.cwd().glob("*.jsonl")),
        "summaries": getattr(trainer.strategy, "summaries", []),
        "shares": getattr(getattr(trainer.strategy, "plan", None), "batch_shares", None),
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in module.modules()),
    }


def everything(**options: Any) -> list[pl.Callback]:
    energy = RankEnergy(source=lambda trainer: Steady(100.0), **options)
    return [RankThroughput(**options), RankMemory(**options), StragglerMonitor(**options), energy]


def steps_of(result: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """One rank's lines of steps."""
    return [line for line in result["lines"] if line["kind"] == "step" and line["rank"] == rank]


# -- what runs in ranks ------------------------------------------------------------------------------------------------

SHARE, BUSY_S = 8, 0.1
"""slow enough for a machine that does other things as well: a unit takes 12 ms or more"""


def shard_plan(ranks: int, busy_s: float = BUSY_S) -> ShardPlan:
    prediction = RankPrediction.of(busy_s, 1.2 * busy_s, 300_000)
    return ShardPlan(
        SHARE * ranks,
        (SHARE,) * ranks,
        (tuple(range(ranks)),),
        tuple(f"d{r}" for r in range(ranks)),
        predictions=(prediction,) * ranks,
        predicted_step_s=1.2 * busy_s,
    )


def slowed_fsdp(ranks: int, steps: int, slow_rank: int, at_step: int, rebalance: bool = False) -> dict[str, Any]:
    """hetero_fsdp by a plan; one emulated device is slowed by 30 % in mid-run."""
    slowed = {slow_rank: (SpeedChange(at_step, 1 / 1.3),)}
    strategy = HeteroFSDPStrategy(
        devices((BUSY_S,) * ranks, SHARE, slowed), shard_plan(ranks), check_loss="off", summary=False
    )
    monitor = StragglerMonitor(rebalance=rebalance)
    callbacks = [RankThroughput(), RankMemory(), monitor]
    return {**fit(Wide(), strategy, callbacks, batch=SHARE, steps=steps * ranks), "stragglers": monitor.stragglers}


def slow_ddp(ranks: int, steps: int) -> dict[str, Any]:
    """DDP, which has no plan; the last emulated device takes 40 % longer from the start."""
    cluster = devices((*(BUSY_S,) * (ranks - 1), 1.4 * BUSY_S), SHARE)
    monitor = StragglerMonitor(rebalance=True)
    callbacks = [monitor, RankThroughput(), EmulatedDevices(cluster)]
    return {
        **fit(Wide(), "ddp", callbacks, batch=SHARE, steps=steps * ranks, devices=ranks),
        "stragglers": monitor.stragglers,
    }


class Judged(Wide):
    """Logs over ranks in validation."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch).square().mean(), sync_dist=True)


def judged(strategy: str) -> list[float]:
    """A fit as a Trainer begins it, with some steps of validation first; what validation has logged."""
    result = fit(Judged(), strategy, everything(), batch=4, steps=4, devices=2, validate=True, num_sanity_val_steps=2)
    return [values["val_loss"] for _, values in result["logged"] if "val_loss" in values]


def model_parallel(steps: int) -> dict[str, Any]:
    """FSDP2 as Lightning has it."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return fit(Sharded(), strategy, everything(), batch=4, steps=2 * steps, devices=2, validate=True)


PIPE_S = 0.24
"""seconds that an emulated device takes for all layers of a global batch"""


def pipeline(steps: int) -> dict[str, Any]:
    """hetero_pipe on emulated devices: two layers and one."""
    cut, count, micro = (3, 3), 3, 2
    depths = warmup_depths(2, count, 0)
    stages = tuple(Stage((sum(cut[:i]), sum(cut[: i + 1])), depths[i]) for i in range(2))
    names = tuple(str(i) for i in range(2 * LAYERS))
    plan = PipelinePlan(count * micro, micro, (Pipeline((0, 1), stages, count),), ("d0", "d1"), names, schedule="1f1b")
    strategy = HeteroPipelineStrategy(devices((PIPE_S, PIPE_S), count * micro), plan=plan, summary=False)
    return fit(Wide(), strategy, everything(), batch=3, steps=2 * steps)


def dying(folder: str, at_step: int) -> None:
    fit(Dying(at_step), "auto", everything(folder=folder), batch=2, steps=at_step + 2, devices=1)


def with_uneven_share(steps: int) -> dict[str, Any]:
    """Shares 12 and 4 with two micro-batches each, which accumulate over two batches."""
    plan = replace(shard_plan(2), batch_shares=(12, 4), micro_batches=(2,), predictions=(), predicted_step_s=None)
    strategy = HeteroFSDPStrategy(devices((BUSY_S,) * 2, SHARE), plan, check_loss="off", summary=False)
    return fit(
        Wide(), strategy, everything(log_every_n_steps=1), batch=SHARE, steps=4 * steps, accumulate_grad_batches=2
    )
