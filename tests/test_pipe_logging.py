"""What is logged is the same on every rank, and the same as on one device over the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall

from tests.harness import WarmRanks
from tests.pipe_runs import (
    CLASSES,
    FEATURES,
    ONE,
    TWO,
    UNLIKE,
    Evaluated,
    Layout,
    Noted,
    numbers,
    points,
    seeded,
    trainer_of,
)

LAYOUTS = pytest.mark.parametrize("layout", [ONE, TWO, UNLIKE], ids=["one", "two", "unlike"])


class Values(Evaluated):
    """Plain values of all kinds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        right = logits.argmax(-1) == batch[1]
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("only_epoch", loss, on_step=False, on_epoch=True)
        self.log("right", right.double().sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("least", batch[0].min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log_dict({"acc": right.double().mean(), "number": 3.0}, on_step=False, on_epoch=True)
        self.log("sized", loss, batch_size=len(batch[0]), on_epoch=True)
        if batch_idx % 2:
            self.log("sometimes", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "right": right, "words": "as they are", "parts": [logits.detach()]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("outputs", outputs["right"].double().mean(), on_step=True, on_epoch=True)
        assert outputs["words"] == "as they are"
        assert outputs["parts"][0].shape == (len(outputs["right"]), CLASSES)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, logits = self.loss(batch)
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log("val_right", (logits.argmax(-1) == batch[1]).double().sum(), reduce_fx="sum")
        self.log("val_largest", batch[0].max(), reduce_fx="max")
        self.log("val_sized", loss, batch_size=len(batch[0]), sync_dist=True)


class Metrics(Evaluated):
    """torchmetrics objects, logged and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = MulticlassAccuracy(CLASSES, average="micro")
        self.mean, self.total = MeanMetric(), SumMetric()
        parts = {"f1": MulticlassF1Score(CLASSES), "recall": MulticlassRecall(CLASSES)}
        self.several = MetricCollection(parts, prefix="train_")
        self.by_hand, self.curve = MulticlassAccuracy(CLASSES, average="micro"), MulticlassAUROC(CLASSES)
        self.val_acc, self.val_by_hand = MulticlassAccuracy(CLASSES, average="micro"), MeanMetric()
        self.val_several = self.several.clone(prefix="val_")
        self.kept: list[Tensor] = []
        self.found: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.total.update(batch[0].sum())
        self.acc(logits, batch[1])
        self.log("train_acc", self.acc, on_step=True, on_epoch=True)
        self.mean.update(loss, weight=len(logits))
        self.log("train_mean", self.mean, on_step=False, on_epoch=True)
        self.several.update(logits, batch[1])
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.by_hand.update(logits, batch[1])
        self.curve.update(logits.softmax(-1), batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        for name in ("by_hand", "curve", "total"):
            metric = getattr(self, name)
            self.log(f"hand_{name}", metric.compute())
            self.found.setdefault(name, []).append(float(metric.compute()))
            metric.reset()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, logits = self.loss(batch)
        self.val_acc(logits, batch[1])
        self.log("val_acc", self.val_acc, on_step=True, on_epoch=True)
        self.val_by_hand.update(loss, weight=len(logits))
        self.val_several.update(logits, batch[1])
        self.kept.append(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("val_kept", torch.stack(self.kept).mean())
        self.kept.clear()
        self.log("val_hand", self.val_by_hand.compute(), prog_bar=True)
        self.val_by_hand.reset()
        self.log_dict(self.val_several.compute())
        self.val_several.reset()


def fit(layout: Layout | None, kind: Any, like: Layout, options: dict[str, Any]) -> Any:
    module, noted = seeded(kind), Noted()
    batch, samples = like.batch, 2 * like.batch + like.micro + 1
    trainer = trainer_of(layout, logger=noted, **options)
    train = DataLoader(points(samples), batch_size=batch)
    val = DataLoader(points(4 * like.world + 3, 1), batch_size=2 if layout else 2 * like.world)
    trainer.fit(module, train, val)
    return {
        "logged": noted.logged,
        "metrics": numbers(trainer.callback_metrics),
        "bar": {key for key in trainer.progress_bar_metrics if key != "v_num"},
        "found": getattr(module, "found", {}),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def check(found: Any, expected: Any, left_out: tuple[str, ...] = (), tolerance: float = 1e-9) -> None:
    for rank, own in enumerate(found):
        for key in ("epoch", "step", "bar", "lr"):
            assert own[key] == expected[key], (rank, key)
        for key in ("metrics", "found"):
            _alike(own[key], expected[key], left_out, tolerance)
            assert own[key] == found[0][key], rank
    for mine, theirs in zip(found[0]["logged"], expected["logged"], strict=True):
        _alike(mine, theirs, left_out, tolerance)


def _alike(found: dict[str, Any], expected: dict[str, Any], left_out: tuple[str, ...], tolerance: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name not in left_out:
            assert found[name] == pytest.approx(value, rel=tolerance), name


@LAYOUTS
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_values(ranks: WarmRanks, layout: Layout, accumulate: int) -> None:
    compare(ranks, layout, Values, {"accumulate_grad_batches": accumulate})


@LAYOUTS
@pytest.mark.slow
def test_metrics(ranks: WarmRanks, layout: Layout) -> None:
    # a mean of batches' means, over batches of other sizes: each pipeline has its own
    left_out = ("val_kept",) if len(layout.cuts) > 1 else ()
    compare(ranks, layout, Metrics, {}, left_out, tolerance=1e-6)


def compare(
    ranks: WarmRanks,
    layout: Layout,
    kind: Any,
    options: dict[str, Any],
    left_out: tuple[str, ...] = (),
    tolerance: float = 1e-9,
) -> None:
    expected = fit(None, kind, layout, options)
    check(
        ranks.run(layout.world, fit, layout, kind, layout, options, process_group=False), expected, left_out, tolerance
    )


# -- what watches values -----------------------------------------------------------------------------------------------


class Watched(Evaluated):
    """Schedules by what is logged."""

    def __init__(self, scheduler: str = "plateau") -> None:
        super().__init__(lr=0.3)
        self.scheduler = scheduler

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        cosine = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (TWO, {"max_epochs": 5}),
        (ONE, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "num_sanity_val_steps": 2}),
        (
            TWO,
            {"gradient_clip_val": 0.05, "limit_val_batches": 1, "limit_train_batches": 2, "num_sanity_val_steps": -1},
        ),
        (UNLIKE, {"val_check_interval": 1, "check_val_every_n_epoch": None, "max_steps": 5}),
    ],
    ids=["plateau", "clip by value", "clip by norm, limits", "by steps"],
)
@pytest.mark.slow
def test_watched(ranks: WarmRanks, layout: Layout, options: dict[str, Any]) -> None:
    compare(ranks, layout, Watched, options)


def watched_run(layout: Layout | None, like: Layout, folder: str) -> Any:
    stop = EarlyStopping("val_loss", patience=1)
    best = ModelCheckpoint(folder, "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
    module = seeded(Watched, "one cycle")
    trainer = trainer_of(layout, callbacks=[stop, best], max_epochs=8, enable_checkpointing=True)
    train = DataLoader(points(2 * like.batch + 1), batch_size=like.batch)
    val = DataLoader(points(4 * like.world + 3, 1), batch_size=2 if layout else 2 * like.world)
    trainer.fit(module, train, val)
    tested = trainer.test(module, val, ckpt_path="best", verbose=False)
    return {
        "stopped": stop.stopped_epoch,
        "best": Path(best.best_model_path).name,
        "k": sorted(Path(path).name for path in best.best_k_models),
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "tested": tested[0]["test_loss"],
    }


def test_stopping_and_keeping_the_best(ranks: WarmRanks, tmp_path: Path) -> None:
    expected = watched_run(None, TWO, str(tmp_path / "one"))
    for own in ranks.run(TWO.world, watched_run, TWO, TWO, str(tmp_path / "two"), process_group=False):
        assert own.pop("tested") == pytest.approx(expected["tested"])
        assert own == {key: value for key, value in expected.items() if key != "tested"}


# -- outside of what is trained ----------------------------------------------------------------------------------------


class Centred(Evaluated):
    """Buffers, numbers and metrics that steps change, before the model and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))
        self.inputs = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].sum(0)  # type: ignore[has-type,misc]
        self.inputs.update(batch[0].sum(-1))
        logits = self.model(batch[0] - 0.01 * self.seen)
        self.centre = self.centre + logits.detach().sum(0)  # type: ignore[has-type]
        self.log("inputs", self.inputs, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("centred", (self.model(batch[0]) - self.centre).square().mean())


def centred(layout: Layout | None, batch: int) -> Any:
    module = seeded(Centred)
    trainer = trainer_of(layout, max_epochs=1)
    trainer.fit(module, DataLoader(points(18), batch_size=batch), DataLoader(points(8, 1), batch_size=2))
    return {**numbers(trainer.callback_metrics), "seen": module.seen.tolist(), "centre": module.centre.tolist()}


@pytest.mark.parametrize("cut", [(2, 3), (5,), (1, 3, 1)], ids=str)
def test_buffers_that_steps_change_are_the_last_stages(ranks: WarmRanks, cut: tuple[int, ...]) -> None:
    # one sample a batch on one device goes through the very same buffers as one micro-batch a step does
    layout = Layout((cut,), (1,), 3)
    expected = centred(None, 3)
    found = ranks.run(layout.world, centred, layout, 3, process_group=False)
    for own in found:
        assert own == found[0]
        for name, value in expected.items():
            if name != "centred":  # other batches
                assert own[name] == pytest.approx(value, rel=1e-6), name  # metrics are of 32 bits
