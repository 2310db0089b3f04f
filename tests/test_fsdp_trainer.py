"""What the Trainer offers works under hetero_fsdp as on one device: limits, schedules, callbacks, loops, set-ups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Recorder
from tests.harness import WarmRanks
from tests.odd_fits import Configured, Manual, Plain, Said, Scheduled, loaders, outcome, points, trainer_for
from tests.test_fsdp_exactness import alike

SHARES = (3, 1)

MODULES: dict[str, Any] = {
    "plain": Plain,
    "scheduled": Scheduled,
    "manual": Manual,
    "configured": lambda: Configured("plain"),
    "configured, meta": lambda: Configured("meta"),
    "configured, fully_shard": lambda: Configured("fully_shard"),
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "limits": ("plain", {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 1}),
    "limits as shares": ("plain", {"limit_train_batches": 0.5, "limit_val_batches": 0.7, "val_check_interval": 0.5}),
    "overfit": ("plain", {"overfit_batches": 2}),
    "validation within epochs": ("plain", {"val_check_interval": 0.5, "accumulate_grad_batches": 2}),
    "a schedule over all steps": ("scheduled", {"accumulate_grad_batches": 2}),
    "a schedule, limited": ("scheduled", {"limit_train_batches": 3}),
    "manual optimization": ("manual", {}),
    "configure_model": ("configured", {}),
    "configure_model with fully_shard": ("configured, fully_shard", {}),
}


def fit(shares: tuple[int, ...] | None, module: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(8)
    made, recorder = MODULES[module](), Recorder()
    trainer = trainer_for(shares, recorder, options)
    trainer.fit(made, *loaders(shares, 4, 26))
    return outcome(trainer, made, recorder)


def fit_all(shares: tuple[int, ...] | None, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: fit(shares, *CASES[name]) for name in names}


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_fits_are_one_devices(ranks: WarmRanks, half: int) -> None:
    names = list(CASES)[half::2]
    reference = fit_all(None, names)
    for results in ranks.run(2, fit_all, SHARES, names):
        for name, result in results.items():
            assert len(reference[name]["logged"]) > 4, name
            try:
                alike(result, reference[name])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def test_configure_model_on_the_meta_device(ranks: WarmRanks) -> None:
    """Values are made by reset_parameters, so they are not one device's, but all ranks' own are the same."""
    first, second = ranks.run(2, fit, SHARES, "configured, meta", {})
    alike(first, second)
    assert first["metrics"]["val_loss"] < 2


def no_measuring(names: list[str]) -> list[str]:
    """With manual optimization and a plan to make, fits run too."""
    torch.manual_seed(8)
    recorder = Recorder()
    trainer = trainer_for((1, 1), recorder, {"strategy": {"plan": "auto", "check_loss": "warn"}, "max_steps": 3})
    trainer.fit(Manual(), *loaders((1, 1), 4, 26))
    return [key for key in trainer.callback_metrics if key in names]


def test_manual_optimization_plans_by_declared_speed(ranks: WarmRanks) -> None:
    assert ranks.run(2, no_measuring, ["loss_step"]) == [["loss_step"]] * 2


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Rising(Plain):
    """Its validation loss rises from the third epoch on, so that one epoch is best and the fit stops early."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        epoch = self.current_epoch
        loss = (0.1 * (epoch - 1) ** 2 + 1) * (1 + batch[0][:, 0].mean())
        self.log("val_loss", loss, sync_dist=True)


def monitored(shares: tuple[int, ...] | None, folder: str) -> dict[str, Any]:
    torch.manual_seed(8)
    keeper = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=1)
    stopper = EarlyStopping("val_loss", patience=2)
    options = {"callbacks": [keeper, stopper], "enable_checkpointing": True, "max_epochs": 9}
    trainer = trainer_for(shares, Recorder(), options)
    trainer.fit(Rising(), *loaders(shares, 4, 10))
    best = keeper.best_model_score
    assert best is not None
    return {
        "best": float(best),
        "path": keeper.best_model_path.rpartition("/")[2],
        "stopped": stopper.stopped_epoch,
        "epochs": trainer.current_epoch,
    }


def test_checkpoints_and_early_stopping_see_one_devices_values(ranks: WarmRanks, tmp_path: Any) -> None:
    reference = monitored(None, str(tmp_path / "one"))
    assert reference["stopped"] == 3
    for result in ranks.run(2, monitored, SHARES, str(tmp_path / "two")):
        assert result.pop("best") == pytest.approx(reference["best"], rel=1e-12)
        assert result == {key: value for key, value in reference.items() if key != "best"}


# -- loops -------------------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[tuple[Any, Any]] = []
        self.by_epoch: list[tuple[Any, Any]] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.by_batch.append((prediction, indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.by_epoch.append((predictions, indices))


def loops(shares: tuple[int, ...] | None, first_fit: bool) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder, writer = Plain(), Recorder(), Writer()
    trainer = trainer_for(shares, recorder, {"callbacks": [writer]})
    train, val = loaders(shares, 4, 10)
    if first_fit:
        trainer.fit(module, train, val)
    result = {"validated": trainer.validate(module, val, verbose=False)[0]}
    result["tested"] = trainer.test(module, val, verbose=False)[0]
    predicted = trainer.predict(module, val)
    assert predicted is not None
    result["predicted"] = [value.tolist() for value in predicted if value is not None]
    result["gaps"] = [value for value in predicted if value is None]
    result["written"] = [(p.tolist(), list(i)) for p, i in writer.by_batch if p is not None]
    if first_fit:
        # modules that ran without gradients train on
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, train, val)
    result["fit"] = outcome(trainer, module, recorder)["parameters"]
    return result


@pytest.mark.parametrize("first_fit", [True, False], ids=["after a fit", "alone"])
def test_validate_test_and_predict(ranks: WarmRanks, first_fit: bool) -> None:
    reference = loops(None, first_fit)
    results = ranks.run(2, loops, SHARES, first_fit)
    for result in results:
        for key in ("validated", "tested"):
            assert result[key] == pytest.approx(reference[key], rel=1e-12)
        for name, value in reference["fit"].items():
            assert torch.allclose(result["fit"][name], value, rtol=0, atol=1e-11), name
    # each sample once over the ranks, under its own index; 11 samples: the last batch of 3 is split 2 and 1
    x = points(11, seed=6).tensors[0][:, 0].tolist()
    together = sorted(v for result in results for batch in result["predicted"] for v in batch)
    assert together == sorted(x)
    written = {
        i: v for result in results for batch, indices in result["written"] for i, v in zip(indices, batch, strict=True)
    }
    assert [written[i] for i in range(11)] == x


def predict_one(samples: int) -> tuple[list[Any], list[Any]]:
    module, writer = Plain(), Writer()
    trainer = trainer_for(SHARES, Recorder(), {"callbacks": [writer]})
    loader = torch.utils.data.DataLoader(points(samples), batch_size=2)
    predicted = trainer.predict(module, loader)
    assert predicted is not None
    return [value.tolist() for value in predicted], [list(i) for _, i in writer.by_batch]


def test_a_rank_without_samples_predicts_nothing(ranks: WarmRanks) -> None:
    """5 samples: four, then one for rank 0 alone; rank 1's repetition of it must not be written anywhere."""
    (first, first_indices), (second, second_indices) = ranks.run(2, predict_one, 5)
    x = points(5).tensors[0][:, 0].tolist()
    assert first == [x[:3], [x[4]]]
    assert first_indices == [[0, 1, 2], [4]]
    assert [batch for batch in second if batch] == [[x[3]]]
    assert [batch for batch in second_indices if batch] == [[3]]


def meta_again_and_again(times: int) -> list[float]:
    return [fit(SHARES, "configured, meta", {})["metrics"]["val_loss"] for _ in range(times)]


@pytest.mark.slow
def test_ranks_send_alike_whatever_python_does_with_ids(ranks: WarmRanks) -> None:
    """Which tensors were sent was remembered by ``id``, and freed tensors' ids are reused: ranks hung, now and then."""
    first, second = ranks.run(2, meta_again_and_again, 8, timeout=100)
    assert first == second


def fit_twice(batches: tuple[int, int]) -> list[tuple[int | None, int]]:
    torch.manual_seed(8)
    trainer = trainer_for((1, 1), Recorder(), {"strategy": {"plan": "auto"}, "max_epochs": 1})
    module, seen = Plain(), []
    for batch in batches:
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, *loaders((1, 1), batch, 24))
        seen.append((trainer.strategy.global_batch_size, trainer.strategy.plan.global_batch_size))
    return seen


def test_a_second_fit_takes_its_own_loaders_batch(ranks: WarmRanks) -> None:
    assert ranks.run(2, fit_twice, (4, 12)) == [[(4, 4), (12, 12)]] * 2


class Counted(Plain):
    """Counts its steps in what is not restored after probing."""

    def __init__(self, width: int, calls: list[int]) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
        self.note = calls.append

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.note(len(batch[0]))
        return super().training_step(batch, batch_idx)


def fit_measured(folder: str, width: int) -> tuple[int, tuple[int, ...], list[str]]:
    os.environ["LIGHTNING_HETERO_CACHE"] = folder
    torch.manual_seed(8)
    calls: list[int] = []
    cluster = Cluster("two", tuple(Device("d", "n", 2**30, speed) for speed in (5e9, 2e9)), emulate=True)
    trainer = pl.Trainer(
        strategy=HeteroFSDPStrategy(cluster, check_loss="off", summary=False),
        devices=2,
        max_steps=2,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with Said() as said:
        trainer.fit(Counted(width, calls), DataLoader(points(24), batch_size=2))
    return len(calls), trainer.strategy.plan.batch_shares, [text for text in said.infos if "earlier run" in text]


def test_what_was_measured_is_measured_once(ranks: WarmRanks, tmp_path: Path) -> None:
    first = ranks.run(2, fit_measured, str(tmp_path), 8)
    again = ranks.run(2, fit_measured, str(tmp_path), 8)
    other = ranks.run(2, fit_measured, str(tmp_path), 9)
    for rank in range(2):
        assert again[rank][0] < first[rank][0]
        assert other[rank][0] == first[rank][0]
        assert again[rank][1] == first[rank][1]
    assert [len(result[0][2]) for result in (first, again, other)] == [0, 1, 0]
    assert len(list(tmp_path.iterdir())) == 4
