"""A pipeline's checkpoint is one device's: it goes there and back, to hetero_fsdp and back, and under any other cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy, HeteroPipelineStrategy
from tests.harness import WarmRanks
from tests.pipe_runs import (
    CLASSES,
    ONE,
    TWO,
    UNITS,
    Layout,
    Small,
    cluster_of,
    points,
    same,
    seeded,
    trainer_of,
    values_of,
)

SAMPLES = 45
SAVE_AT = 3  # in the middle of an epoch of 5 global batches
END_OF_EPOCH = 5
OTHER = Layout(cuts=((1, 1, 3), (2, 3)), counts=(2, 3))  # of the same global batch as TWO
SINGLE = Layout(cuts=((4, 1),), counts=(5,))


class Kept(Small):
    """A scheduler, buffers on both sides of the model, and parameters outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(CLASSES))
        self.model[1].register_buffer("scale", torch.full((8,), 2.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch[0]) / self.temperature
        self.steps += 1  # type: ignore[has-type,misc]
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Judged(Kept):
    """The same with validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0])


class EveryStep(pl.Callback):
    """Saves after every step."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        trainer.save_checkpoint(f"{self.folder}/step={trainer.global_step}.ckpt")


def go(layout: Layout | str | None, folder: str, steps: int, resume: str | None = None, kind: Any = Kept) -> Any:
    """Train to ``steps``, keep every step's checkpoint."""
    saver, module = EveryStep(folder), seeded(kind)
    world = None if layout is None else 2 if isinstance(layout, str) else layout.world
    strategy: Any = "auto" if layout is None else None
    batch = TWO.batch
    if layout == "fsdp" or layout == "sharded":
        batch //= 2
        plan = ShardPlan(10, (6, 4), ((0, 1),), ("cpu",) * 2)
        sharded = layout == "sharded"
        strategy = HeteroFSDPStrategy(
            cluster_of(2), plan=plan, check_loss="off", summary=False, save_distributed_checkpoint=sharded
        )
    elif isinstance(layout, Layout):
        strategy = layout.strategy()
    trainer = trainer_of(None, strategy=strategy, devices=world or 1, max_epochs=-1, max_steps=steps, callbacks=[saver])
    trainer.fit(module, DataLoader(points(SAMPLES), batch_size=batch), ckpt_path=resume)
    return {
        "values": values_of(module) if layout not in ("fsdp", "sharded") else {},
        "losses": saver.losses,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def run(ranks: WarmRanks, layout: Any, *args: Any, **kwargs: Any) -> Any:
    world = 2 if isinstance(layout, str) else layout.world
    return ranks.run(world, go, layout, *args, process_group=False, **kwargs)


def state_at(folder: Path, step: int) -> Any:
    return torch.load(folder / f"step={step}.ckpt", weights_only=True)


def alike(found: Any, expected: Any, path: str = "") -> None:
    """Nested values, tensors within rounding."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, path
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11, msg=path)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            alike(found[key], value, f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            alike(found[index], value, f"{path}/{index}")
    else:
        assert found == expected, path


@pytest.mark.parametrize("layout", [ONE, TWO], ids=["one", "two"])
@pytest.mark.slow
def test_the_file_is_one_devices(ranks: WarmRanks, tmp_path: Path, layout: Layout) -> None:
    layout = replace(layout, counts=(5,)) if layout is ONE else layout
    go(None, str(tmp_path / "one"), END_OF_EPOCH)
    run(ranks, layout, str(tmp_path / "two"), END_OF_EPOCH)
    for step in (SAVE_AT, END_OF_EPOCH):
        mine, theirs = state_at(tmp_path / "two", step), state_at(tmp_path / "one", step)
        assert mine.pop("lightning_hetero")["global_batch_size"] == 10
        assert mine.pop("state_dict").keys() == theirs["state_dict"].keys()
        mine["state_dict"] = state_at(tmp_path / "two", step)["state_dict"]
        # counts micro-batches, of which one device has one a step
        assert mine["state_dict"].pop("steps") > theirs["state_dict"].pop("steps")
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            alike(mine[key], theirs[key], f"{step}/{key}")
        alike(mine["loops"], theirs["loops"], "loops")
    assert not [path for path in (tmp_path / "two").iterdir() if "tmp" in path.name]
    module = Kept()
    module.load_state_dict(state_at(tmp_path / "two", SAVE_AT)["state_dict"], strict=True)


@pytest.mark.parametrize("at", [SAVE_AT, END_OF_EPOCH])
@pytest.mark.slow
def test_resumed_anywhere(ranks: WarmRanks, tmp_path: Path, at: int) -> None:
    straight = go(None, str(tmp_path / "one"), 12)
    run(ranks, TWO, str(tmp_path / "a"), at)
    for layout in (TWO, OTHER, SINGLE):
        path = str(tmp_path / "a" / f"step={at}.ckpt")
        for own in run(ranks, layout, str(tmp_path / "b"), 12, path):
            assert own["losses"] == pytest.approx(straight["losses"][at:], rel=1e-10)
            assert own["lr"] == straight["lr"]
            same(own["values"], straight["values"])


@pytest.mark.slow
def test_to_one_device_and_back(ranks: WarmRanks, tmp_path: Path) -> None:
    straight = go(None, str(tmp_path / "one"), 12)
    run(ranks, TWO, str(tmp_path / "a"), END_OF_EPOCH)
    # an epoch's end, since one device's plain loader cannot be resumed in the middle of one
    resumed = go(None, str(tmp_path / "b"), 12, str(tmp_path / "a" / f"step={END_OF_EPOCH}.ckpt"))
    # one device restores before precision="64-true" makes the module 64-bit: Lightning rounds its own files so, too
    same(resumed["values"], straight["values"], tolerance=1e-6)
    for own in run(ranks, OTHER, str(tmp_path / "c"), 12, str(tmp_path / "one" / f"step={SAVE_AT}.ckpt")):
        same(own["values"], straight["values"])
        assert own["losses"] == pytest.approx(straight["losses"][SAVE_AT:], rel=1e-10)


@pytest.mark.parametrize("there", ["fsdp", pytest.param("sharded", marks=pytest.mark.slow)])
def test_to_hetero_fsdp_and_back(ranks: WarmRanks, tmp_path: Path, there: str) -> None:
    straight = go(None, str(tmp_path / "one"), 9)
    run(ranks, there, str(tmp_path / "a"), SAVE_AT)
    for own in run(ranks, OTHER, str(tmp_path / "b"), 7, str(tmp_path / "a" / f"step={SAVE_AT}.ckpt")):
        assert own["losses"] == pytest.approx(straight["losses"][SAVE_AT:7], rel=1e-10)
    for own in run(ranks, "fsdp", str(tmp_path / "c"), 9, str(tmp_path / "b" / "step=7.ckpt")):
        assert own["lr"] == straight["lr"]
    state, expected = state_at(tmp_path / "c", 9)["state_dict"], state_at(tmp_path / "one", 9)["state_dict"]
    for name in straight["values"]:
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-11, msg=name)


def planned_anew(folder: str, resume: str, asked: int | None) -> Any:
    """Go on with a plan made here, and a loader that says 8 samples a step on two ranks."""
    saver, module = EveryStep(folder), seeded(Kept)
    strategy = HeteroPipelineStrategy(cluster_of(2), global_batch_size=asked, summary=False)
    trainer = trainer_of(None, strategy=strategy, devices=2, max_epochs=-1, max_steps=SAVE_AT + 2, callbacks=[saver])
    trainer.fit(module, DataLoader(points(SAMPLES), batch_size=4), ckpt_path=resume)
    assert strategy.plan is not None
    return strategy.plan.global_batch_size, saver.losses


@pytest.mark.parametrize("there", ["fsdp", pytest.param("sharded", marks=pytest.mark.slow)])
def test_global_batch_of_a_checkpoint_is_planned_for(ranks: WarmRanks, tmp_path: Path, there: str) -> None:
    straight = go(None, str(tmp_path / "one"), SAVE_AT + 2)
    run(ranks, there, str(tmp_path / "a"), SAVE_AT)
    resume = str(tmp_path / "a" / f"step={SAVE_AT}.ckpt")
    for batch, losses in ranks.run(2, planned_anew, str(tmp_path / "b"), resume, None, process_group=False):
        assert batch == TWO.batch == 10
        assert losses == pytest.approx(straight["losses"][SAVE_AT:], rel=1e-10)
    for batch, _ in ranks.run(2, planned_anew, str(tmp_path / "c"), resume, 9, process_group=False):
        assert batch == 9


class AfterSteps(EveryStep):
    """Saves right after an optimizer's step: what has accumulated later is in no file, on one device either."""

    last = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step != self.last:
            self.last = trainer.global_step
            trainer.save_checkpoint(f"{self.folder}/step={self.last}.ckpt")


def judged(folder: str, resume: str | None) -> Any:
    module, saver = seeded(Judged), AfterSteps(folder)
    options: dict[str, Any] = {"val_check_interval": 2, "accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 6}
    trainer = trainer_of(ONE, callbacks=[saver], **options)
    train = DataLoader(points(27), batch_size=ONE.batch, shuffle=True)
    trainer.fit(module, train, DataLoader(points(8), batch_size=2), ckpt_path=resume)
    return values_of(module), saver.losses, float(trainer.callback_metrics["val_loss"])


@pytest.mark.slow
def test_resumed_with_accumulation_and_validation_to_the_very_bits(ranks: WarmRanks, tmp_path: Path) -> None:
    straight = ranks.run(2, judged, str(tmp_path / "a"), None, process_group=False)
    for at in (1, 4):
        path = str(tmp_path / "a" / f"step={at}.ckpt")
        resumed = ranks.run(2, judged, str(tmp_path / "b"), path, process_group=False)
        for own, whole in zip(resumed, straight, strict=True):
            same(own[0], whole[0], tolerance=0.0)
            assert own[1] == whole[1][-len(own[1]) :]
            assert own[2] == whole[2]


# -- tied weights ------------------------------------------------------------------------------------------------------


class Words(pl.LightningModule):
    """The bundled GPT, its embedding tied to its head, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(vocabulary=11, context=6, width=8, depth=2, heads=2, dropout=0.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0].argsort(-1)
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def words(layout: Layout | None, folder: str, steps: int, resume: str | None = None) -> Any:
    from lightning_hetero.models.chains import find_chain

    saver, module = EveryStep(folder), seeded(Words)
    names = [unit.name for unit in find_chain(module.model).units]
    strategy = "auto" if layout is None else layout.strategy(plan=layout.plan(names))
    trainer = trainer_of(layout, strategy, max_epochs=-1, max_steps=steps, callbacks=[saver])
    trainer.fit(module, DataLoader(points(20), batch_size=4), ckpt_path=resume)
    return values_of(module)


def test_tied_weights(ranks: WarmRanks, tmp_path: Path) -> None:
    from lightning_hetero.models.chains import find_chain

    units = len(find_chain(Words().model).units)
    layout = Layout(cuts=((2, units - 2),), counts=(2,))
    other = Layout(cuts=((1, units - 2, 1),), counts=(2,))
    straight = words(None, str(tmp_path / "one"), 5)
    ranks.run(2, words, layout, str(tmp_path / "a"), 2, process_group=False)
    alike(state_at(tmp_path / "a", 2)["state_dict"], state_at(tmp_path / "one", 2)["state_dict"])
    alike(state_at(tmp_path / "a", 2)["optimizer_states"], state_at(tmp_path / "one", 2)["optimizer_states"])
    path = str(tmp_path / "a" / "step=2.ckpt")
    for own in ranks.run(3, words, other, str(tmp_path / "b"), 5, path, process_group=False):
        same(own, straight)


# -- kinds of files ----------------------------------------------------------------------------------------------------


def kinds(layout: Layout | None, folder: str) -> Any:
    module = seeded(Judged)
    best = ModelCheckpoint(folder, "best", monitor="val_loss", save_weights_only=True, save_last="link")
    trainer = trainer_of(layout, callbacks=[best], enable_checkpointing=True)
    val = DataLoader(points(9, 1), batch_size=3)
    trainer.fit(module, DataLoader(points(20), batch_size=4), val)
    found = trainer.validate(module, val, ckpt_path=best.best_model_path, verbose=False)[0]
    again = trainer.validate(module, val, ckpt_path="last", verbose=False)[0]
    return {"best": found["val_loss"], "last": again["val_loss"], "score": float(best.best_model_score)}


@pytest.mark.slow
def test_weights_alone_and_links(ranks: WarmRanks, tmp_path: Path) -> None:
    expected = kinds(None, str(tmp_path / "one"))
    layout = Layout(cuts=((2, 3),), counts=(2,))
    for own in ranks.run(2, kinds, layout, str(tmp_path / "two"), process_group=False):
        assert own["best"] == pytest.approx(own["score"])
        assert own["score"] == pytest.approx(expected["score"], abs=0.05)  # other batches
    mine = torch.load(tmp_path / "two" / "best.ckpt", weights_only=True)
    theirs = torch.load(tmp_path / "one" / "best.ckpt", weights_only=True)
    assert set(mine) - set(theirs) == {"lightning_hetero"}
    assert mine["state_dict"].keys() == theirs["state_dict"].keys()
    assert "optimizer_states" not in mine


def wrong(layout: Layout, path: str, change: str) -> None:
    state = torch.load(path, weights_only=True)
    if change == "shape":
        state["state_dict"]["model.4.weight"] = torch.zeros(CLASSES + 1, 8)
    elif change == "missing":
        del state["state_dict"]["model.0.weight"]
    elif change == "groups":
        state["optimizer_states"][0]["param_groups"] *= 2
    own = f"{path}.{change}.{torch.distributed.get_rank() if torch.distributed.is_initialized() else id(state)}"
    torch.save(state, own)
    go(layout, "x", 2, own)


@pytest.mark.parametrize(
    ("change", "words_of_it"),
    [("shape", "size mismatch for model.4.weight"), ("missing", "model.0.weight"), ("groups", "parameter groups")],
)
def test_a_file_that_does_not_fit_is_refused_on_all_ranks(
    ranks: WarmRanks, tmp_path: Path, change: str, words_of_it: str
) -> None:
    go(None, str(tmp_path), 1)
    layout = Layout(cuts=((2, 3),), counts=(5,))
    for outcome in ranks.run_outcomes(2, wrong, layout, str(tmp_path / "step=1.ckpt"), change, process_group=False):
        assert outcome[0] == "error"
        assert words_of_it in outcome[2], outcome


assert sum(OTHER.cuts[0]) == sum(SINGLE.cuts[0]) == UNITS
