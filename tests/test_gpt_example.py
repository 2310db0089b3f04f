"""The text example: one loss curve under both strategies and on one device; bad input is told in one line."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.models.gpt import GPTConfig
from lightning_hetero.plan import Pipeline, PipelinePlan, Stage
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy
from tests.harness import WarmRanks

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt_text.py"
BATCH, CONTEXT = 8, 12


def _parts() -> tuple[dict[str, Any], Any, Any]:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    text = example["Text"](example["read_text"](None, 1300), CONTEXT)
    pl.seed_everything(0, verbose=False)
    config = GPTConfig(vocabulary=len(example["CHARACTERS"]), context=CONTEXT, width=16, depth=2, heads=2)
    return example, text, example["CharacterGPT"](config, 3e-3)


class Curve(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))


def _strategy(kind: str) -> Any:
    devices = tuple(Device("cpu", "n", 2**34, None) for _ in range(2))
    if kind == "hetero_fsdp":
        return HeteroFSDPStrategy(Cluster("c", devices), global_batch_size=BATCH, summary=False)
    names = ("embed", "blocks.0", "blocks.1", "norm", "head")
    pipeline = Pipeline((0, 1), (Stage((0, 2), 2), Stage((2, 5), 1)), 4)
    plan = PipelinePlan(BATCH, 2, (pipeline,), ("cpu", "cpu"), names)
    return HeteroPipelineStrategy(Cluster("c", devices), plan=plan, summary=False)


def curve(kind: str) -> list[float]:
    _, text, module = _parts()
    found = Curve()
    trainer = pl.Trainer(
        strategy=_strategy(kind),
        accelerator="cpu",
        devices=2,
        precision="64-true",
        max_epochs=1,
        callbacks=[found],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(text, BATCH, shuffle=True), DataLoader(text, BATCH))
    return found.losses


def one_device() -> list[float]:
    _, text, module = _parts()
    module.double()
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0)).tolist()
    losses = []
    for start in range(0, len(order), BATCH):
        rows = [text[i] for i in order[start : start + BATCH]]
        loss = module.training_step(tuple(map(torch.stack, zip(*rows, strict=True))), 0)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("kind", ["hetero_pipe", pytest.param("hetero_fsdp", marks=pytest.mark.slow)])
def test_the_loss_curve_is_one_devices(ranks: WarmRanks, kind: str) -> None:
    (alone,) = ranks.run(1, one_device, process_group=False)
    assert len(alone) == 14
    for losses in ranks.run(2, curve, kind, process_group=False):
        assert losses == pytest.approx(alone, rel=1e-10)


def _main(*arguments: str) -> int:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    status: int = runpy.run_path(str(EXAMPLE))["main"](["--strategy", "auto", "--devices", "1", *arguments])
    return status


def test_it_learns(ranks: WarmRanks) -> None:
    small = ("--epochs", "1", "--characters", "6000", "--width", "32", "--depth", "1", "--global-batch", "16")
    assert ranks.run(1, _main, *small, "--max-loss", "4.4", process_group=False) == [0]
    assert ranks.run(1, _main, *small, "--max-loss", "0.1", process_group=False) == [1]


def test_a_text_that_is_not_there_is_told(ranks: WarmRanks) -> None:
    ((status, kind, message),) = ranks.run_outcomes(1, _main, "--text", "nope.txt", process_group=False)
    assert (status, kind) == ("error", "SystemExit")
    assert message.startswith("--text nope.txt: no such file")
