"""What is shown, loaded and configured around a fit is as on one device."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader

from tests.companion_fits import (
    SAMPLES,
    SHARES,
    Double,
    Measured,
    Reloading,
)
from tests.fits import Recorder
from tests.harness import WarmRanks
from tests.odd_fits import Plain, loaders, outcome, trainer_for
from tests.test_fsdp_exactness import alike


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
        pytest.param(BY_PATH, 6, marks=pytest.mark.slow),
    ],
)
def test_lightning_cli(ranks: WarmRanks, strategy: str, batch: int) -> None:
    steps = -(-22 // batch)
    assert ranks.run(2, by_yaml, strategy) == [("HeteroFSDPStrategy", batch, steps)] * 2
