"""Any data: each pipeline's last rank reads it, once, and what comes of it is what one device makes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from tests.harness import WarmRanks
from tests.pipe_batches import Named, Padded, Typed, items, mapped, pad, typed
from tests.pipe_runs import (
    ONE,
    TWO,
    UNLIKE,
    Evaluated,
    Layout,
    Noted,
    Small,
    points,
    same,
    seeded,
    trainer_of,
    values_of,
)

WIDE = Layout(cuts=((2, 3), (1, 4)), counts=(2, 2), micro=3)


class Rows(Dataset[Any]):
    """Counts what is read of it."""

    def __init__(self, samples: int, form: str = "pairs") -> None:
        self.data, self.form, self.read = points(samples), form, 0

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        x, y = self.data[index]
        if self.form == "dicts":
            return {"name": f"sample {index}", "x": x, "y": y, "more": {"index": index, "twice": [x, x]}}
        return x, y


class Stream(IterableDataset[Any]):
    """Samples in a row, without a length."""

    def __init__(self, samples: int) -> None:
        self.data, self.read = points(samples), 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.data)):  # type: ignore[arg-type]
            self.read += 1
            yield self.data[index]


class Data(pl.LightningDataModule):
    """As a user's."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def setup(self, stage: str) -> None:
        self.rows = Rows(25)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=self.batch)


class Sampled(BatchSampler):
    """A user's own batches, of different sizes."""

    def __init__(self, batches: int = 4) -> None:
        super().__init__(SequentialSampler(range(20)), 4, False)
        self.batches = [[0, 1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19]][:batches]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def loader(kind: str, batch: int) -> Any:
    if kind == "stream":
        return DataLoader(Stream(20), batch_size=batch)
    if kind == "batches":
        return DataLoader(Rows(20), batch_sampler=Sampled())
    if kind == "dicts":
        return DataLoader(Rows(25, "dicts"), batch_size=batch, collate_fn=mapped)
    if kind == "typed":
        return DataLoader(Rows(25), batch_size=batch, collate_fn=typed)
    if kind == "padded":
        return DataLoader(Rows(25), batch_size=batch, collate_fn=pad)
    if kind == "dropped":
        return DataLoader(Rows(25), batch_size=batch, drop_last=True)
    if kind == "worker":
        return DataLoader(Rows(25), batch_size=batch, num_workers=1, persistent_workers=True)
    if kind == "one more":
        return DataLoader(Rows(2 * batch + 1), batch_size=batch)
    return DataLoader(Rows(25), batch_size=batch)


MODULES: dict[str, Any] = {"dicts": Named, "typed": Typed, "padded": Padded}


def fit(layout: Layout | None, kind: str, batch: int, options: dict[str, Any]) -> Any:
    module, noted = seeded(MODULES.get(kind, Small)), Noted()
    strategy = None
    if layout is not None and kind == "padded":
        strategy = layout.strategy(loss_weight=items)
    trainer = trainer_of(layout, strategy, logger=noted, **options)
    data = Data(batch) if kind == "module" else loader(kind, batch)
    trainer.fit(module, data)
    rows = data.rows if kind == "module" else data.dataset
    losses = [logged.get("train_loss_step", logged.get("train_loss")) for logged in noted.logged]
    losses = [loss for loss in losses if loss is not None]
    return {"values": values_of(module), "losses": losses, "read": rows.read, "step": trainer.global_step}


def compare(ranks: WarmRanks, layout: Layout, kind: str, options: dict[str, Any], batch: int | None = None) -> Any:
    batch = batch or layout.batch
    expected = fit(None, kind, batch, options)
    found = ranks.run(layout.world, fit, layout, kind, batch, options, process_group=False)
    for own in found[: layout.world - layout.idle]:
        assert own["step"] == expected["step"]
        same(own["values"], expected["values"])
    assert not any(own["values"] for own in found[layout.world - layout.idle :])
    logged = found[0]["losses"]
    assert logged == pytest.approx(expected["losses"], rel=1e-9)
    return found, expected


def last_ranks(layout: Layout) -> list[int]:
    """Who reads: each pipeline's last rank, which is done first with a step."""
    return [sum(len(cut) for cut in layout.cuts[: i + 1]) - 1 for i in range(len(layout.cuts))]


@pytest.mark.parametrize("kind", ["dicts", "typed", "padded", "dropped", "one more", "module"])
@pytest.mark.parametrize("layout", [TWO, pytest.param(UNLIKE, marks=pytest.mark.slow)], ids=["two", "unlike"])
def test_read_once(ranks: WarmRanks, kind: str, layout: Layout) -> None:
    found, expected = compare(ranks, layout, kind, {})
    read = [own["read"] for own in found]
    readers = last_ranks(layout)
    assert all(count == 0 for rank, count in enumerate(read) if rank not in readers), read
    filled = layout.world  # a pipeline without samples reads one, to take part
    assert sum(read) <= expected["read"] + filled, read
    assert all(read[rank] for rank in readers), read


class ReadBy(pl.Callback):
    """Notes how many samples have been read by the end of each step."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.read = rows, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, *args: Any) -> None:
        self.read.append(self.rows.read)


def read_by_step(layout: Layout, samples: int) -> list[int]:
    rows = Rows(samples)
    noted = ReadBy(rows)
    trainer = trainer_of(layout, callbacks=[noted], max_epochs=1)
    trainer.fit(seeded(Small), DataLoader(rows, batch_size=layout.batch))
    return noted.read


def test_the_next_batch_is_read_within_a_step(ranks: WarmRanks) -> None:
    layout = Layout(cuts=((2, 3),), counts=(2,))
    whole, steps = layout.counts[0] * layout.micro, 4
    found = ranks.run(layout.world, read_by_step, layout, whole * steps, process_group=False)
    assert found == [[0] * steps, [whole * min(steps, step + 2) for step in range(steps)]]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("worker", {}),
        ("plain", {"overfit_batches": 1}),
        ("plain", {"reload_dataloaders_every_n_epochs": 1}),
        ("plain", {"limit_train_batches": 2, "accumulate_grad_batches": 3}),
        ("plain", {"use_distributed_sampler": False}),
        ("stream", {}),
        ("batches", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.slow
def test_one_pipeline(ranks: WarmRanks, kind: str, options: dict[str, Any]) -> None:
    layout = Layout(cuts=((1, 3, 1),), counts=(3,))
    found, _ = compare(ranks, layout, kind, options)
    # batches that are the user's own are the first rank's
    reader = 0 if kind in ("stream", "batches") or "use_distributed_sampler" in options else 2
    read = [] if kind == "worker" else [reader]  # which counts in its own process
    assert [rank for rank, own in enumerate(found) if own["read"]] == read


def test_an_idle_rank_with_a_loss_weight(ranks: WarmRanks) -> None:
    compare(ranks, Layout(cuts=((2, 3),), counts=(3,), idle=1), "padded", {})


@pytest.mark.parametrize("kind", ["stream", "batches"])
@pytest.mark.slow
def test_users_batches_are_each_pipelines_own(ranks: WarmRanks, kind: str) -> None:
    """As with any strategy: whoever batches by himself shares out by himself; here all read the same."""
    found = ranks.run(WIDE.world, fit, WIDE, kind, 4, {}, process_group=False)
    expected = fit(None, kind, 4, {})  # two pipelines with one and the same batch are one
    for own in found:
        same(own["values"], expected["values"])
    assert [own["read"] > 0 for own in found] == [True, False, True, False]


def shorter_on_some(layout: Layout) -> tuple[int, int]:
    rank = int(os.environ["RANK"])
    trainer = trainer_of(layout)
    trainer.fit(seeded(Small), DataLoader(Rows(20), batch_sampler=Sampled(4 if rank < 2 else 3)))
    return trainer.current_epoch, trainer.global_step


def test_an_epoch_ends_with_the_pipeline_that_has_fewest_batches(ranks: WarmRanks) -> None:
    assert ranks.run(WIDE.world, shorter_on_some, WIDE, process_group=False) == [(2, 6)] * 4


# -- random numbers ----------------------------------------------------------------------------------------------------


class Mixed(Small):
    """Draws where a batch is moved, and keeps what it saw of it on both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[float] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        share = torch.rand(())
        other = torch.randperm(len(x))
        return share * x + (1 - share) * x[other], (y, y[other], share)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, (y, other, share) = batch
        assert x.shape[0] == y.shape[0]
        logits = self.model(x)
        # the model's inputs as the last stage has them must give what the pipeline made of the first stage's
        self.targets.append(float(share))
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, other)


def mixed(layout: Layout) -> Any:
    module = seeded(Mixed)
    trainer = trainer_of(layout, max_epochs=1)
    trainer.fit(module, DataLoader(points(layout.batch * 2 + 1), batch_size=layout.batch))
    return values_of(module), module.targets


def test_augmentation_on_the_device_is_the_same_under_any_cut(ranks: WarmRanks) -> None:
    one, other = Layout(cuts=((5,),), counts=(3,)), Layout(cuts=((1, 3, 1),), counts=(3,))
    ((expected, targets),) = ranks.run(1, mixed, one, process_group=False)
    found = ranks.run(3, mixed, other, process_group=False)
    for values, _ in found:
        same(values, expected)
    assert found[2][1] == targets
    assert len(set(targets)) == len(targets)


# -- evaluation --------------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    """Keeps what it is to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: dict[int, int] = {}
        self.ends: list[int] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        for index, value in zip(batch_indices or (), prediction, strict=bool(batch_indices)):
            assert index not in self.written
            self.written[index] = int(value)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.ends = [index for part in batch_indices for indices in part for index in indices]


def evaluate(layout: Layout | None, samples: int, batch: int, first: str) -> Any:
    module, writer = seeded(Evaluated), Writer()
    trainer = trainer_of(layout, callbacks=[writer], max_epochs=1)
    data, shifted = DataLoader(points(samples, 1), batch_size=batch), DataLoader(points(7, 2), batch_size=batch)
    if first == "fit":
        trainer.fit(module, DataLoader(points(12), batch_size=layout.batch if layout else 6), data)
    several = trainer.validate(module, [data, shifted], verbose=False)
    tested = trainer.test(module, data, verbose=False)
    predicted: Any = trainer.predict(module, data)
    again = trainer.validate(module, data, verbose=False)
    return {
        "values": {**several[0], **several[1], **tested[0], "again": again[0]["val_loss"]},
        "predicted": [part.tolist() for part in predicted],
        "written": writer.written,
        "ends": writer.ends,
    }


@pytest.mark.parametrize("first", ["fit", pytest.param("nothing", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [ONE, Layout(cuts=((2, 3), (4, 1)), counts=(2, 1)), UNLIKE], ids="abc")
@pytest.mark.parametrize("samples", [17, pytest.param(9, marks=pytest.mark.slow)])
def test_evaluation(ranks: WarmRanks, layout: Layout, first: str, samples: int) -> None:
    if first == "fit" and layout.batch != 6:
        pytest.skip("the reference trains with batches of 6")
    batch = 2
    expected = evaluate(None, samples, batch * layout.world, first)
    found = ranks.run(layout.world, evaluate, layout, samples, batch, first, process_group=False)
    for own in found:
        assert own["values"] == pytest.approx(expected["values"], rel=1e-9)
    readers = last_ranks(layout)
    written: dict[int, int] = {}
    for rank, own in enumerate(found):
        if rank not in readers:
            assert own["written"] == {}
            assert own["ends"] == []
        written |= own["written"]
    assert written == expected["written"]
    assert sorted(index for rank in readers for index in found[rank]["ends"]) == list(range(samples))
    # each rank of a pipeline has its predictions; the pipelines' are one device's, batch by batch
    for cut, last in zip(layout.cuts, readers, strict=True):
        assert all(own["predicted"] == found[last]["predicted"] for own in found[last + 1 - len(cut) : last + 1])
    joined = [sum((found[rank]["predicted"][k] for rank in readers), []) for k in range(len(expected["predicted"]))]
    assert joined == expected["predicted"]
