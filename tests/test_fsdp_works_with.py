"""What runs beside a fit works as on one device, or is refused by name: averages, searches, ties, manual steps."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.companion_fits import (
    CASES,
    SAMPLES,
    Double,
    Measured,
    Reloading,
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
from tests.odd_fits import Plain, loaders, outcome, points, trainer_for
from tests.test_fsdp_exactness import alike

SHARES = (3, 1)


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


@pytest.mark.parametrize("kind", ["ema", "swa"])
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


# -- what is shown, loaded, configured ---------------------------------------------------------------------------------


def shown(kind: str) -> tuple[int, int, str]:
    made: Any = callbacks.ModelSummary() if kind == "plain" else callbacks.RichModelSummary()
    progress = [callbacks.RichProgressBar()] if kind == "rich" else []
    noted: dict[str, Any] = {}
    tell = type(made).summarize

    def note(data: Any, total: int, trainable: int, *args: Any, **kwargs: Any) -> None:
        noted.update(total=total, trainable=trainable)
        tell(data, total, trainable, *args, **kwargs)

    made.summarize = note
    options = {"callbacks": [made, *progress], "enable_model_summary": True, "enable_progress_bar": kind == "rich"}
    module = Double()
    module.model[0].weight.requires_grad_(False)
    module.example_input_array = torch.zeros(2, 6, dtype=torch.float64)
    module.forward = lambda x: module.model(x)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer_for(SHARES, Recorder(), options).fit(module, *loaders(SHARES, 4, 8))
    return noted.get("total", 0), noted.get("trainable", 0), printed.getvalue()


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_summaries_count_the_whole_model(ranks: WarmRanks, kind: str) -> None:
    first, second = ranks.run(2, shown, kind)
    whole = 6 * 8 + 8 + 8 * 3 + 3
    assert first[:2] == (whole, whole - 6 * 8)
    assert second[:2] == (0, 0)  # rank 0 prints
    assert ("Epoch 1/1" in first[2]) == (kind == "rich")


def reload(shares: tuple[int, ...] | None) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder = Double(), Recorder()
    data = Reloading(4 // len(shares) if shares else 4)
    trainer = trainer_for(shares, recorder, {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4})
    trainer.fit(module, datamodule=data)
    return {**outcome(trainer, module, recorder), "asked": data.asked}


def test_data_that_is_loaded_anew(ranks: WarmRanks) -> None:
    reference = reload(None)
    assert reference["asked"] == 2
    for result in ranks.run(2, reload, SHARES):
        alike(result, reference)
        assert result["asked"] == 2


def outputs() -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []

    class Noting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["samples"], len(batch[0])))

    trainer_for(SHARES, Recorder(), {"callbacks": [Noting()], "max_epochs": 1}).fit(Measured(), *loaders(SHARES, 4, 8))
    return seen


def test_hooks_are_given_the_ranks_own_outputs(ranks: WarmRanks) -> None:
    assert ranks.run(2, outputs) == [[(3, 3)] * 2, [(1, 1)] * 2]


class Drawing(torch.utils.data.Dataset[Any]):
    """Draws in its workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.rand(6, dtype=torch.float64), index % 3


def draw() -> list[float]:
    pl.seed_everything(5, workers=True, verbose=False)
    seen: list[float] = []

    class Noting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[0].flatten().tolist())

    train: DataLoader[Any] = DataLoader(Drawing(), batch_size=2, num_workers=1)
    trainer = trainer_for((2, 2), Recorder(), {"callbacks": [Noting()], "max_epochs": 1})
    trainer.fit(Plain(), train, loaders((2, 2), 4, 8)[1])
    return seen


def test_workers_of_different_ranks_draw_different_numbers(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, draw)
    assert len(first) == len(second) == 24
    assert not set(first) & set(second)
    assert ranks.run(2, draw) == [first, second]  # and the same ones in the next run


def time_out() -> tuple[int, bool]:
    trainer = trainer_for(SHARES, Recorder(), {"max_time": {"seconds": 3}, "max_epochs": -1})
    trainer.fit(Double(), *loaders(SHARES, 4, 8))
    return trainer.global_step, trainer.should_stop


def test_all_ranks_end_when_time_is_up(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, time_out)
    assert first == second
    assert first[1]
    assert first[0] > 0


def keep(shares: tuple[int, ...] | None, folder: str) -> dict[str, Any]:
    """The best two and the last; then validation and test of the best."""
    torch.manual_seed(8)
    keeper = callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}")
    trainer = trainer_for(shares, Recorder(), {"callbacks": [keeper], "enable_checkpointing": True, "max_epochs": 4})
    train, val = loaders(shares, 4, SAMPLES)
    trainer.fit(Double(), train, val)
    tested = trainer.test(dataloaders=val, ckpt_path="best", verbose=False)[0]["test_loss"]
    validated = trainer.validate(dataloaders=val, ckpt_path="last", verbose=False)[0]["val_loss"]
    return {
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "best": float(keeper.best_model_score),  # type: ignore[arg-type]
        "tested": tested,
        "validated": validated,
    }


def test_the_best_and_the_last_are_kept(ranks: WarmRanks, tmp_path: Path) -> None:
    reference = keep(None, str(tmp_path / "one"))
    assert len(reference["files"]) == 3
    for result in ranks.run(2, keep, SHARES, str(tmp_path / "two")):
        assert result.pop("files") == reference["files"]
        # one device under 64-true rounds what it loads to 32 bits
        assert result["best"] == pytest.approx(reference["best"], rel=1e-12)
        assert result["tested"] == pytest.approx(result["best"], rel=1e-12)
        assert result["validated"] == pytest.approx(reference["validated"], rel=1e-6)


YAML = """
seed_everything: 3
model:
  class_path: tests.companion_fits.Double
data:
  class_path: tests.companion_fits.Reloading
  init_args: {batch: 2}
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  precision: 64-true
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: STRATEGY
"""


BY_PATH = (
    "{class_path: lightning_hetero.strategies.HeteroFSDPStrategy, "
    "init_args: {global_batch_size: 6, summary: false, reshard_after_forward: true}}"
)


def by_yaml(strategy: str) -> tuple[str, Any, int]:
    from lightning.pytorch.cli import LightningCLI

    sys.argv = ["train.py"]
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # Lightning 2.6.6 calls what jsonargparse 4.53 deprecates

    Path(f"{torch.distributed.get_rank()}.yaml").write_text(YAML.replace("STRATEGY", strategy))
    cli = LightningCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        args=["fit", "--config", f"{torch.distributed.get_rank()}.yaml"],
    )
    made: Any = cli.trainer.strategy
    return type(made).__name__, made.global_batch_size, cli.trainer.global_step


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        ("hetero_fsdp", 4),
        ("{class_path: lightning_hetero.HeteroFSDPStrategy, init_args: {global_batch_size: 6, check_loss: error}}", 6),
        (BY_PATH, 6),
    ],
)
def test_lightning_cli(ranks: WarmRanks, strategy: str, batch: int) -> None:
    steps = -(-22 // batch)
    assert ranks.run(2, by_yaml, strategy) == [("HeteroFSDPStrategy", batch, steps)] * 2


def test_plans_of_the_fits_here() -> None:
    """What the cases above run on: unequal shares, and a rank without samples in the last batch."""
    plan = plan_for(Fit(shares=SHARES))
    assert plan.batch_shares == SHARES
    assert 0 in plan.samples(SAMPLES % sum(SHARES))
    assert len(points(SAMPLES)) == SAMPLES
