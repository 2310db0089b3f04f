"""What runs beside a fit works as on one device, or is refused by name: averages, searches, ties, manual steps."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.companion_fits import (
    CASES,
    HAS_AVERAGES,
    SAMPLES,
    SHARES,
    Double,
    Seeking,
    ema,
    resume,
    state_of,
    swa,
    train_all,
    unfreezing,
)
from tests.fits import Fit, Recorder, cluster_for, plan_for
from tests.harness import WarmRanks
from tests.odd_fits import loaders, outcome, points, trainer_for
from tests.test_fsdp_exactness import alike


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_fits_are_one_devices(ranks: WarmRanks, part: int) -> None:
    names = list(CASES)[part::4]
    reference = train_all(None, names)
    for results in ranks.run(2, train_all, SHARES, names, timeout=100):
        for name, result in results.items():
            try:
                alike(result, reference[name])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


RESUMED = {
    "averages of every step": 10,  # in the middle of the second epoch of 7 steps
    "averages of epochs": 6,
    "stochastic weight averaging": 24,
    "stochastic weight averaging, a schedule": 24,
    "fine-tuning": 14,  # when the backbone has been freed, at an epoch's end
    "accumulation by schedule, clip by norm": 8,
    "left out, accumulated, clipped": 5,
}


def straight_and_resumed(shares: tuple[int, ...], names: list[str], folder: str, ends: dict[str, int]) -> Any:
    """The end of fits that were stopped and resumed, by the same ranks."""
    result = {}
    for i, name in enumerate(names):
        resume(shares, name, f"{folder}/{i}", None, RESUMED[name])
        path = f"{folder}/{i}/step={RESUMED[name]}.ckpt"
        result[name] = resume(shares, name, f"{folder}/{i}", path, ends[name])
    return result


@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_resumed_in_the_middle(ranks: WarmRanks, tmp_path: Path, part: int) -> None:
    names = list(RESUMED)[part::2]
    straight = {name: resume(None, name, str(tmp_path / f"one {i}"), None, 30) for i, name in enumerate(names)}
    if "fine-tuning" in names:
        # on one device, too, what was freed before a resume is frozen again by the callback's set-up (Lightning 2.6.6)
        path = str(tmp_path / f"one {names.index('fine-tuning')}" / "step=14.ckpt")
        straight["fine-tuning"] = resume(None, "fine-tuning", str(tmp_path / "one resumed"), path, 30)
    ends = dict.fromkeys(names, 30)
    for results in ranks.run(2, straight_and_resumed, SHARES, names, str(tmp_path / "two"), ends, timeout=100):
        for name, result in results.items():
            try:
                for key, value in straight[name]["parameters"].items():
                    assert torch.allclose(result["parameters"][key], value, rtol=0, atol=1e-11), key
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    for i, name in enumerate(names):
        # files are one device's, averages and all
        path = f"step={RESUMED[name]}.ckpt"
        mine, theirs = state_of(str(tmp_path / f"two/{i}/{path}")), state_of(str(tmp_path / f"one {i}" / path))
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.allclose(mine[key], value, rtol=0, atol=1e-11), (name, key)


# -- searches ----------------------------------------------------------------------------------------------------------


def search(shares: tuple[int, ...] | None, folder: str) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder = Seeking(), Recorder()
    finder = callbacks.LearningRateFinder(min_lr=1e-3, max_lr=3.0, num_training_steps=30)
    trainer = trainer_for(shares, recorder, {"callbacks": [finder], "default_root_dir": folder, "max_epochs": 6})
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.fit(module, *loaders(shares, 4, SAMPLES))
    assert finder.optimal_lr is not None
    return {
        **outcome(trainer, module, recorder),
        "losses": finder.optimal_lr.results["loss"],
        "lr": module.lr,
        "left": [path.name for path in Path(folder).glob("**/*.ckpt")],
    }


@pytest.mark.slow
def test_the_learning_rate_that_one_device_finds(ranks: WarmRanks, tmp_path: Path) -> None:
    reference = search(None, str(tmp_path / "one"))
    for result in ranks.run(2, search, SHARES, str(tmp_path / "two")):
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-10)
        assert result["lr"] == pytest.approx(reference["lr"], rel=1e-12)
        assert result["lr"] != 1e-3
        assert result["left"] == []
        alike(result, reference)


# -- refused by name ---------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "batch size finder": (callbacks.BatchSizeFinder, {}, ["BatchSizeFinder", "set global_batch_size"]),
    "on exception": (
        lambda: callbacks.OnExceptionCheckpoint("."),
        {},
        ["OnExceptionCheckpoint", "every_n_train_steps"],
    ),
    "save_on_exception": (
        lambda: callbacks.ModelCheckpoint(save_on_exception=True),
        {},
        ["ModelCheckpoint", "save_on_exception=True", "every_n_train_steps"],
    ),
    "pruning": (lambda: callbacks.ModelPruning("l1_unstructured"), {}, ["ModelPruning", "on one device"]),
    "averages in folders": (ema, {"save_distributed_checkpoint": True}, ["EMAWeightAveraging", "one file"]),
    "swa in folders": (swa, {"save_distributed_checkpoint": True}, ["StochasticWeightAveraging", "one file"]),
    "fine-tuning in folders": (
        unfreezing,
        {"save_distributed_checkpoint": True},
        ["BackboneFinetuning", "parameter groups", "one file"],
    ),
}

if not HAS_AVERAGES:
    del REFUSED["averages in folders"]


def refused(names: list[str]) -> dict[str, str]:
    warnings.simplefilter("ignore")  # what Lightning says of callbacks that are refused
    said = {}
    for name in names:
        make, strategy, _ = REFUSED[name]
        options = {"strategy": strategy, "callbacks": [make()], "enable_checkpointing": True}
        trainer = trainer_for(SHARES, Recorder(), options)
        with pytest.raises(UnsupportedError) as caught:
            trainer.fit(Double(), *loaders(SHARES, 4, 8))
        assert not torch.distributed.is_initialized()
        said[name] = str(caught.value)
    return said


def test_callbacks_that_cannot_work_are_named(ranks: WarmRanks) -> None:
    for said in ranks.run(2, refused, list(REFUSED), process_group=False):
        for name, (_, _, words) in REFUSED.items():
            for word in words:
                assert word in said[name], (name, said[name])


def twice(kind: str) -> tuple[str, list[dict[str, float]]]:
    """A second fit with a copying callback is refused; evaluation after the first one is not."""
    module = Double()
    train, val = loaders(SHARES, 4, 8)
    trainer = trainer_for(SHARES, Recorder(), {"callbacks": [ema() if kind == "ema" else swa()], "max_epochs": 3})
    trainer.fit(module, train, val)
    results = [trainer.validate(module, val, verbose=False)[0], trainer.test(module, val, verbose=False)[0]]
    trainer.fit_loop.max_epochs = 4
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(module, train, val)
    return str(caught.value), [dict(result) for result in results]


@pytest.mark.parametrize("kind", ["ema", "swa"] if HAS_AVERAGES else ["swa"])
def test_a_copying_callback_after_a_fit(ranks: WarmRanks, kind: str) -> None:
    (said, results), other = ranks.run(2, twice, kind)
    assert (said, results) == other
    assert "build the module anew" in said
    assert results[0]["val_loss"] == pytest.approx(results[1]["test_loss"], rel=1e-12)


def test_sync_batchnorm_on_cpu_is_refused() -> None:
    strategy = HeteroFSDPStrategy(cluster=cluster_for(2))
    with pytest.raises(UnsupportedError, match=r"sync_batchnorm=True: .* for GPUs only"):
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, sync_batchnorm=True)


def test_a_compiled_module_is_refused_by_name(tmp_path: Path) -> None:
    module: Any = torch.compile(Double())
    trainer = pl.Trainer(strategy="hetero_fsdp", accelerator="cpu", devices=2, default_root_dir=tmp_path, logger=False)
    with pytest.raises(RuntimeError, match=r"compiled model is incompatible .*HeteroFSDPStrategy"):
        trainer.fit(module, *loaders(SHARES, 4, 8))


# -- ranks that do not agree -------------------------------------------------------------------------------------------


class Stopping(pl.Callback):
    """Stops after some batch, validation or epoch; on some ranks, or all."""

    def __init__(self, when: str, who: tuple[int, ...]) -> None:
        self.when, self.who = when, who

    def stop(self, trainer: pl.Trainer, when: str, due: bool) -> None:
        if when == self.when and due and not trainer.sanity_checking and trainer.global_rank in self.who:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.stop(trainer, "batch", trainer.global_step == 2)

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.stop(trainer, "validation", trainer.global_step == 2)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.stop(trainer, "epoch", trainer.current_epoch == 0)


def stop(when: str, who: tuple[int, ...]) -> int:
    options = {
        "callbacks": [Stopping(when, who)],
        "val_check_interval": 2,
        "strategy": {"timeout": timedelta(seconds=8)},
    }
    trainer = trainer_for(SHARES, Recorder(), options)
    trainer.fit(Double(), *loaders(SHARES, 4, SAMPLES))
    return trainer.global_step


@pytest.mark.parametrize(("when", "steps"), [("batch", 2), ("validation", 2), ("epoch", 7)])
def test_ranks_that_stop_together(ranks: WarmRanks, when: str, steps: int) -> None:
    assert ranks.run(2, stop, when, (0, 1), process_group=False) == [steps] * 2


@pytest.mark.parametrize(
    ("when", "who"),
    [
        ("batch", 0),
        pytest.param("validation", 1, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("batch", 1), ("epoch", 0))),
    ],
)
def test_a_rank_that_stops_alone_is_named(ranks: WarmRanks, when: str, who: int) -> None:
    began = time.monotonic()
    outcomes = ranks.run_outcomes(2, stop, when, (who,), process_group=False)
    took_s = time.monotonic() - began
    for status, *rest in outcomes:
        assert status == "error", outcomes
        assert f"on ranks [{who}] and not on ranks [{1 - who}]" in rest[1], outcomes
        assert "reduce_boolean_decision" in rest[1]
    assert took_s < 30


def gather(sizes: tuple[int, ...]) -> tuple[list[int], list[Any]]:
    trainer = trainer_for(SHARES, Recorder(), {"max_epochs": 1})
    seen: list[Any] = []

    class Gathering(Double):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rank = self.global_rank
            seen.append(self.all_gather({"x": torch.full((sizes[rank],), float(rank))})["x"].tolist())
            self.trainer.strategy.barrier()

    trainer.fit(Gathering(), *loaders(SHARES, 4, 8))
    shape = [len(seen), *torch.tensor(seen[0]).shape]
    return shape, seen[0]


def test_all_gather_by_rank(ranks: WarmRanks) -> None:
    assert ranks.run(2, gather, (2, 2)) == [([2, 2, 2], [[0.0, 0.0], [1.0, 1.0]])] * 2


def test_all_gather_of_other_shapes_is_refused(ranks: WarmRanks) -> None:
    for status, *rest in ranks.run_outcomes(2, gather, (3, 1)):
        assert (status, rest[0]) == ("error", "UnsupportedError"), rest
        assert "by rank [3], [1]" in rest[1]
        assert "gather_objects" in rest[1]


def test_plans_of_the_fits_here() -> None:
    """What the cases above run on: unequal shares, and a rank without samples in the last batch."""
    plan = plan_for(Fit(shares=SHARES))
    assert plan.batch_shares == SHARES
    assert 0 in plan.samples(SAMPLES % sum(SHARES))
    assert len(points(SAMPLES)) == SAMPLES
