"""What runs beside a fit works with a pipeline: a Trainer's defaults, callbacks, several runs of one Trainer."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_hetero  # noqa: F401  (registers the name)
from tests.harness import WarmRanks
from tests.pipe_runs import TWO, Evaluated, Layout, Small, numbers, points, same, seeded, trainer_of, values_of

PAIR = Layout(cuts=((2, 3),), counts=(2,), micro=3)


def by_default(folder: str) -> Any:
    """The name alone, and all that a Trainer brings along: logger, checkpoints, summary, progress bar."""
    module = seeded(Evaluated).float()
    data = [(x.float(), y) for x, y in points(24)]  # type: ignore[attr-defined]
    trainer = pl.Trainer(
        strategy="hetero_pipe",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        default_root_dir=folder,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
    )
    loader, val = DataLoader(data, batch_size=3, shuffle=True), DataLoader(data, batch_size=3)  # type: ignore[arg-type]
    trainer.fit(module, loader, val)
    tested = trainer.test(module, val, ckpt_path="best")
    fresh = Evaluated.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    with torch.no_grad():
        losses = [F.cross_entropy(fresh.model(x[None]), y[None]) for x, y in data]
    return float(torch.stack(losses).mean()), tested[0]["test_loss"], trainer.global_step


def test_the_name_alone(ranks: WarmRanks, tmp_path: Path) -> None:
    found = ranks.run(2, by_default, str(tmp_path), process_group=False)
    assert found[0] == found[1]
    mean, tested, steps = found[0]
    assert tested == pytest.approx(mean, rel=1e-5)
    assert steps == 8
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


@pytest.mark.parametrize("first", ["validate", "test", "predict"])
def test_evaluation_before_a_fit_by_a_plan_of_its_own(ranks: WarmRanks, first: str) -> None:
    for own in ranks.run(2, planned, first, {"global_batch_size": 6}, process_group=False):
        assert own["step"] == 8
        assert own["before"] == pytest.approx(own["expected"], rel=1e-9)
        assert own["busy_s"] > 0  # each run is measured anew


def test_a_batch_that_an_earlier_evaluation_did_not_know(ranks: WarmRanks) -> None:
    for outcome in ranks.run_outcomes(2, planned, "validate", {}, process_group=False):
        assert outcome[:2] == ("error", "DataError")
        assert "pass global_batch_size=6 to the strategy, or fit first" in outcome[2]


def planned(first: str, options: dict[str, Any]) -> Any:
    module = seeded(Evaluated)
    whole = seeded(Evaluated).double()
    data = DataLoader(points(24), batch_size=3)
    strategy = PAIR.strategy(plan="auto", pipelines=1, **options)
    trainer = trainer_of(PAIR, strategy)
    x, y = points(24)[:]
    logits = whole.model(x).detach()
    expected: Any = [float(F.cross_entropy(logits, y))]
    if first == "predict":
        expected = logits.argmax(-1).tolist()
        before: Any = [int(label) for part in trainer.predict(module, data) for label in part]  # type: ignore[union-attr]
    else:
        before = list(getattr(trainer, first)(module, data, verbose=False)[0].values())
    trainer.fit(module, data, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data, data)
    busy_s = strategy.summaries[trainer.global_rank].busy_s
    return {"before": before, "expected": expected, "step": trainer.global_step - 4, "busy_s": busy_s}


# -- callbacks ---------------------------------------------------------------------------------------------------------

CALLBACKS: dict[str, Any] = {
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "timer": lambda: callbacks.Timer(),
    "summary": lambda: callbacks.ModelSummary(max_depth=-1),
    "rich summary": lambda: callbacks.RichModelSummary(max_depth=2),
}


def with_callback(layout: Layout | None, name: str, batch: int) -> Any:
    module = seeded(Small)
    trainer = trainer_of(layout, callbacks=[CALLBACKS[name]()], max_epochs=4)
    trainer.fit(module, DataLoader(points(24), batch_size=batch))
    return values_of(module), numbers(trainer.callback_metrics)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(ranks: WarmRanks, name: str) -> None:
    expected, metrics = with_callback(None, name, PAIR.batch)
    for values, own in ranks.run(2, with_callback, PAIR, name, PAIR.batch, process_group=False):
        same(values, expected)
        assert own == pytest.approx(metrics)


pytestmark = pytest.mark.slow


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.model[1] = nn.BatchNorm1d(8)


def warned(frozen: bool) -> list[str]:
    module = seeded(Normed)
    if frozen:
        module.model[1].eval()
    trainer = trainer_of(PAIR, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(points(12), batch_size=6))
    return [str(each.message) for each in caught if "BatchNorm" in str(each.message)]


def test_batch_norm_is_told_of(ranks: WarmRanks) -> None:
    found = ranks.run(2, warned, False, process_group=False)
    assert "BatchNorm in training mode (model.1) normalises over each micro-batch" in found[0][0]
    assert found[1] == []  # once
    assert ranks.run(2, warned, True, process_group=False) == [[], []]


# -- prediction --------------------------------------------------------------------------------------------------------


def predictions(layout: Layout | None, batch: int) -> Any:
    module = seeded(Evaluated)
    trainer = trainer_of(layout, limit_predict_batches=2)
    loaders = [DataLoader(points(samples, samples), batch_size=batch) for samples in (13, 3)]
    several: Any = trainer.predict(module, loaders)
    assert trainer.predict(module, loaders, return_predictions=False) is None
    return [[part.tolist() for part in one] for one in several]


def test_several_loaders_and_limits(ranks: WarmRanks) -> None:
    expected = predictions(None, 4)
    assert ranks.run(2, predictions, PAIR, 2, process_group=False) == [expected, expected]


# -- user code around the steps ----------------------------------------------------------------------------------------


class Hooked(Small):
    """Clips by itself, zeroes by itself, looks at gradients, a step of the optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.model(batch[0])), batch[1])

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(float(self.head.weight.grad.norm()))  # type: ignore[union-attr]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Thawing(Small):
    """A part that is frozen at first."""

    part = slice(2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.model[self.part].requires_grad_(False)
        self.seen: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.model[self.part].requires_grad_(self.current_epoch == 1)


class ThawingStage(Thawing):
    """All of a first stage."""

    part = slice(0, 4)


def hooked(layout: Layout | None, batch: int, kind: Any) -> Any:
    module = seeded(kind)
    trainer = trainer_of(layout, max_epochs=3)
    trainer.fit(module, DataLoader(points(3 * batch - 1), batch_size=batch))
    return values_of(module), module.seen


@pytest.mark.parametrize("layout", [PAIR, TWO, replace(PAIR, schedule="zero_bubble")], ids=["one", "two", "zero"])
@pytest.mark.parametrize("kind", [Hooked, Thawing, ThawingStage])
def test_hooks_of_the_module(ranks: WarmRanks, layout: Layout, kind: Any) -> None:
    expected, seen = hooked(None, layout.batch, kind)
    for values, own in ranks.run(layout.world, hooked, layout, layout.batch, kind, process_group=False):
        same(values, expected)
        assert own == pytest.approx(seen, rel=1e-9)
