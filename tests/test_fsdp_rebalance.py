"""Batch shares that move in mid-run: when, to what, from which batch on, and that nothing else changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.rebalance.recovery import recovery
from lightning_hetero.cluster import Cluster, Device, SpeedChange
from lightning_hetero.plan import RankPrediction, ShardPlan
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.rebalance import Rebalance
from tests.fits import Fit, Recorder, plan_for
from tests.harness import WarmRanks
from tests.odd_fits import Plain, Said, Stream, points, trainer_for
from tests.test_rebalance_decisions import plan

# -- moving, with seconds that do not depend on this machine ----------------------------------------------------------

QUICK = Rebalance(window=3, patience=2)


class Clock(pl.Callback):
    """Gives a rank's units seconds per sample that change with the batch; notes what was run, and under which shares.

    Args:
        seconds: per rank, (before, after).
        since: the batch from which the second holds.
    """

    def __init__(self, seconds: tuple[tuple[float, float], ...], since: int) -> None:
        self.seconds, self.since = seconds, since
        self.batches = self.samples = 0
        self.run: list[tuple[int, ...]] = []
        self.lengths: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.strategy: Any = trainer.strategy
        self.strategy.instruments.timer.take_s = self.take_s
        self.strategy.train_loader.take_waited_s = lambda: 0.0

    def take_s(self) -> float:
        """Of the batch before; asked at the start of each."""
        own = self.seconds[self.strategy.global_rank][self.batches > self.since]
        seconds, self.samples = own * self.samples, self.strategy.step_samples()
        self.batches += 1
        return seconds

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.run.append(self.strategy._sizes)
        self.lengths.append(len(batch[0]))


class Saving(pl.Callback):
    """Saves after one step."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def moving(
    shares: tuple[int, ...],
    rebalance: Any,
    *,
    workers: int = 0,
    samples: int = 136,
    steps: int = 40,
    seconds: tuple[tuple[float, float], ...] = ((1.0, 1.0), (1.0, 2.0), (1.0, 1.0)),
    since: int = 10,
    details: dict[str, Any] | None = None,
    peak_bytes: tuple[int, ...] | None = None,
    save: tuple[str, int] | None = None,
    resume: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder, clock = Plain(), Recorder(), Clock(seconds, since)
    given = plan_for(Fit(shares=shares)) if details is None else plan(*shares, **details)
    given = ShardPlan(**{**vars(given), "device_types": tuple(f"d{r}" for r in range(len(shares)))})
    own = {"plan": given, "rebalance": rebalance}
    callbacks = [clock, *([Saving(*save)] if save else [])]
    options = {"strategy": own, "callbacks": callbacks, "max_steps": steps, "max_epochs": -1, **options}
    trainer = trainer_for(shares, recorder, options)
    strategy: Any = trainer.strategy
    if peak_bytes is not None:
        strategy.rebalancer._peak_bytes = lambda: float(peak_bytes[trainer.global_rank])
    own_loader = {"num_workers": workers, "prefetch_factor": 3, "persistent_workers": True} if workers else {}
    train = DataLoader(points(samples), batch_size=sum(shares) // len(shares), shuffle=True, **own_loader)
    val = DataLoader(points(11, seed=6), batch_size=3)
    with Said() as said:
        trainer.fit(module, train, val, ckpt_path=resume)
    return {
        "losses": [step["loss_step"] for step in recorder.logged if "loss_step" in step],
        "val": [step["val_loss"] for step in recorder.logged if "val_loss" in step],
        "run": clock.run,
        "lengths": clock.lengths,
        "shares": strategy.plan.batch_shares,
        "moves": strategy.rebalancer.moves.to_state(),
        "said": [text for text in said.infos if "shares" in text],
    }


def same_curve(moved: dict[str, Any], still: dict[str, Any]) -> None:
    assert len(moved["losses"]) == len(still["losses"]) > 20
    assert moved["losses"] == pytest.approx(still["losses"], rel=0, abs=1e-10)
    assert moved["val"] == pytest.approx(still["val"], rel=0, abs=1e-10)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        pytest.param(0, {"accumulate_grad_batches": 3, "steps": 26}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(1, {"val_check_interval": 4}, marks=pytest.mark.slow),
    ],
    ids=["plain", "accumulation", "workers", "a worker and validation within epochs"],
)
def test_a_rank_that_slows_gets_less_and_nothing_else_changes(
    ranks: WarmRanks, workers: int, options: dict[str, Any]
) -> None:
    """Epochs of 17 batches, read ahead by up to 6 of them."""
    timeout = 60 + 60 * workers  # starting a worker takes seconds where other things run
    still = ranks.run(2, moving, (4, 4), False, **options)[0]
    first, second = ranks.run(2, moving, (4, 4), QUICK, workers=workers, timeout=timeout, **options)
    assert still["moves"] == []
    assert still["shares"] == (4, 4)
    assert first["run"] == second["run"]
    for rank, result in enumerate((first, second)):
        same_curve(result, still)
        assert result["shares"] == split_batch((1.0, 2.0), None, 8, min_samples=1) == (6, 2)
        # what was read is what all ranks took it to be
        assert result["lengths"] == [max(1, sizes[rank]) for sizes in result["run"]]
    assert {sum(sizes) for sizes in first["run"]} == {8}
    assert [entry["batch_shares"] for entry in first["moves"]] == [[4, 4], [6, 2]]
    moved = first["moves"][1]
    at = moved["epoch"] * 17 + moved["batch"]
    assert first["run"][:at] == [(4, 4)] * at
    assert set(first["run"][at:]) == {(6, 2)}
    assert moved["batch"] % options.get("accumulate_grad_batches", 1) == 0
    assert at <= 10 + 9 + 20  # three windows, of which one began before, and what was read ahead


def test_a_move_is_said_once_with_its_reason(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, moving, (4, 4), QUICK)
    (said,) = first["said"]
    assert not second["said"]
    for text in ("rank 1 (d1)", "from 4, 4 to 6, 2", "epoch 0, batch 16"):
        assert text in said


def test_what_returns_to_its_speed_gets_its_share_back(ranks: WarmRanks) -> None:
    seconds = ((1.0, 1.0), (2.0, 1.0))
    expected = {"predictions": (RankPrediction(4.0, 0.0), RankPrediction(4.0, 0.0)), "groups": ((0, 1),)}
    result = ranks.run(2, moving, (4, 4), QUICK, seconds=seconds, since=20, details=expected, steps=50)[0]
    assert [entry["batch_shares"] for entry in result["moves"]] == [[4, 4], [6, 2], [4, 4]]


@pytest.mark.parametrize("settle", [True, False])
def test_the_first_window_settles_what_was_planned(ranks: WarmRanks, settle: bool) -> None:
    """A drift of 7 %, under the threshold; once, and not when it comes later."""
    details = {"predictions": (RankPrediction(20.0, 0.0), RankPrediction(20.0, 0.0)), "groups": ((0, 1),)}
    rule = Rebalance(window=3, patience=2, settle=settle)
    options = {"samples": 400, "steps": 16, "details": details}
    late = ranks.run(2, moving, (20, 20), rule, seconds=((1.0, 1.0), (1.0, 1.15)), since=4, **options)[0]
    assert late["moves"] == []
    early = ranks.run(2, moving, (20, 20), rule, seconds=((1.0, 1.0), (1.15, 1.15)), **options)[0]
    moved = [(0, 0, [20, 20]), (0, 4, [21, 19])] if settle else []
    assert [(entry["epoch"], entry["batch"], entry["batch_shares"]) for entry in early["moves"]] == moved


@pytest.mark.parametrize("settle", [True, False])
def test_five_windows_refine_by_a_smaller_gain_once(ranks: WarmRanks, settle: bool) -> None:
    """4 % between two ranks: 2 % to gain, under ``least_gain``; and 4 % more later, under ``least_gain`` again."""
    details = {"predictions": (RankPrediction(50.0, 0.0), RankPrediction(50.0, 0.0)), "groups": ((0, 1),)}
    rule = Rebalance(window=2, patience=2, settle=settle)
    options = {"samples": 1000, "steps": 40, "details": details, "seconds": ((1.0, 1.0), (1.04, 1.08)), "since": 22}
    first, second = ranks.run(2, moving, (50, 50), rule, **options)
    moved = [(0, 0, [50, 50]), (1, 2, [51, 49])] if settle else []
    assert [(entry["epoch"], entry["batch"], entry["batch_shares"]) for entry in first["moves"]] == moved
    assert first["run"] == second["run"]


@pytest.mark.slow
def test_noise_and_what_slows_all_alike_move_nothing(ranks: WarmRanks) -> None:
    for seconds in (((1.0, 1.04), (1.0, 1.1)), ((1.0, 3.0), (1.0, 3.0))):
        result = ranks.run(2, moving, (4, 4), QUICK, seconds=seconds)[0]
        assert result["moves"] == []
    # a drift that whole samples cannot answer
    result = ranks.run(2, moving, (1, 1), QUICK, samples=40)[0]
    assert result["moves"] == []


@pytest.mark.slow
def test_a_share_stays_under_what_memory_holds(ranks: WarmRanks) -> None:
    """The devices have 16 GiB: where four samples took 13 of them no fifth one fits, where they took 12 it does."""
    result = ranks.run(2, moving, (4, 4), QUICK, peak_bytes=(13 * 2**30, 2**20))[0]
    assert result["moves"] == []
    result = ranks.run(2, moving, (4, 4), QUICK, peak_bytes=(12 * 2**30, 2**20))[0]
    assert result["shares"] == (5, 3)


@pytest.mark.slow
def test_shares_move_within_and_between_groups(ranks: WarmRanks) -> None:
    details = {"groups": ((0,), (1, 2)), "micro_batches": (2, 1)}
    still = ranks.run(3, moving, (4, 4, 4), False, details=details)[0]
    for result in ranks.run(3, moving, (4, 4, 4), QUICK, details=details):
        same_curve(result, still)
        assert result["shares"] == split_batch((1.0, 2.0, 1.0), None, 12, min_samples=1)


def test_by_default_a_given_plan_is_not_moved(ranks: WarmRanks) -> None:
    assert ranks.run(2, moving, (4, 4), None)[0]["moves"] == []


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_moved_shares(ranks: WarmRanks, tmp_path: Path) -> None:
    path = str(tmp_path / "moved.ckpt")
    still = ranks.run(2, moving, (4, 4), False)[0]
    saved = ranks.run(2, moving, (4, 4), QUICK, steps=30, save=(path, 29))[0]
    assert saved["shares"] == (6, 2)
    # where its clock is always slow: nothing drifts any more
    slow = ((1.0, 1.0), (2.0, 2.0))
    for rank, result in enumerate(ranks.run(2, moving, (4, 4), QUICK, seconds=slow, resume=path)):
        assert set(result["run"]) == {(6, 2)}
        assert result["lengths"] == [(6, 2)[rank]] * len(result["lengths"])
        assert result["moves"] == saved["moves"]
        assert result["losses"] == pytest.approx(still["losses"][29:], rel=0, abs=1e-10)
    assert (
        "goes on with the batch shares that had moved: 6, 2"
        in ranks.run(2, moving, (4, 4), QUICK, seconds=slow, resume=path)[0]["said"][0]
    )


@pytest.mark.slow
def test_other_ranks_or_a_rule_that_is_off_start_with_the_plan(ranks: WarmRanks, tmp_path: Path) -> None:
    path = str(tmp_path / "moved.ckpt")
    still = ranks.run(2, moving, (4, 4), False)[0]
    ranks.run(2, moving, (4, 4), QUICK, steps=30, save=(path, 29))
    for shares, rebalance in (((3, 3, 2), QUICK), ((4, 4), False)):
        result = ranks.run(len(shares), moving, shares, rebalance, resume=path, seconds=((1.0, 1.0),) * 3)[0]
        assert set(result["run"]) == {shares}
        assert result["moves"] == []
        assert result["losses"] == pytest.approx(still["losses"][29:], rel=0, abs=1e-10)


# -- where nothing moves -----------------------------------------------------------------------------------------------


def kept_batches() -> list[str]:
    trainer = trainer_for((1, 1), Recorder(), {"strategy": {"plan": "auto", "rebalance": True}, "max_steps": 2})
    with Said() as said:
        trainer.fit(Plain(), DataLoader(Stream(0, (3, 3)), batch_size=None))
    return [text for text in said.infos if "rebalance" in text]


def test_batches_of_the_users_own_are_left_alone_and_it_is_said(ranks: WarmRanks) -> None:
    first, second = ranks.run(2, kept_batches)
    assert len(first) == 1
    assert "rebalance does nothing here" in first[0]
    assert not second


# -- what is measured --------------------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """On rank 1 a sample takes its time from the 60th on."""

    def __init__(self, rank: int) -> None:
        self.data, self.rank, self.asked = points(400), rank, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        if self.rank == 1 and self.asked > 60:
            time.sleep(0.04)
        return self.data[index]


class UnitsAlone(Clock):
    """Seconds of units from the clock, those of the loader as they are."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.strategy: Any = trainer.strategy
        self.strategy.instruments.timer.take_s = self.take_s


def slow_input() -> tuple[int, ...]:
    clock = UnitsAlone(((0.02, 0.02),) * 2, 0)
    own = {"plan": plan_for(Fit(shares=(4, 4))), "rebalance": QUICK}
    trainer = trainer_for((4, 4), Recorder(), {"strategy": own, "callbacks": [clock], "max_steps": 40})
    with Said():
        trainer.fit(Plain(), DataLoader(Slow(trainer.global_rank), batch_size=4))
    strategy: Any = trainer.strategy
    shares: tuple[int, ...] = strategy.plan.batch_shares
    return shares


@pytest.mark.slow
def test_a_rank_whose_input_is_slow_is_a_slow_rank(ranks: WarmRanks) -> None:
    """Three times as slow: 6, 2 by the numbers; a busy machine may make it less clear."""
    for shares in ranks.run(2, slow_input):
        assert shares[0] >= 5


def emulated_cluster(changes: tuple[SpeedChange, ...]) -> Cluster:
    # three products of 6 x 8 and 8 x 3 numbers, less the first layer's gradient of its input, at 10 ms a sample
    devices = tuple(Device(f"d{r}", "n", 2**34, 3.5e4, speed_schedule=changes if r else ()) for r in range(2))
    return Cluster("throttled", devices, emulate=True)


def single_precision(samples: int) -> TensorDataset:
    x, y = points(samples).tensors
    return TensorDataset(x.float(), y)


def throttled(changes: tuple[SpeedChange, ...]) -> dict[str, Any]:
    strategy = HeteroFSDPStrategy(cluster=emulated_cluster(changes), check_loss="off", summary=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=34,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with Said() as said:
        trainer.fit(Plain(), DataLoader(single_precision(600), batch_size=8))
    assert strategy.plan is not None
    assert strategy.rebalancer.moves is not None
    return {
        "planned": strategy.rebalancer.moves.at((0, 0)).batch_shares,
        "shares": strategy.plan.batch_shares,
        "said": [text for text in said.infos if "shares move" in text],
    }


@pytest.mark.slow
def test_an_emulated_device_that_throttles_is_found(ranks: WarmRanks) -> None:
    """Measured, planned and rebalanced by default; how closely is benchmarks/rebalance's to say."""
    result = ranks.run(2, throttled, (SpeedChange(8, 0.4),))[0]
    assert result["planned"][0] in (7, 8, 9)
    assert result["shares"][0] > result["planned"][0]
    assert "rank 1 (d1)" in result["said"][0]


# -- the benchmark's figures -------------------------------------------------------------------------------------------


def test_figures_of_the_benchmark() -> None:
    good = recovery([1.0] * 10 + [2.0] * 12 + [1.04] * 16, 1.0, 10)
    assert good["recovered"]
    assert good["steps_to_recover"] == 12 - 1  # three steps at a time: the last slow one is outvoted
    assert good["efficiency_at_once"] == 0.5
    never = recovery([1.0] * 10 + [2.0] * 28, 1.0, 10)
    assert not never["recovered"]
    assert never["steps_to_recover"] is None
