"""What would be silently wrong: losses that are no means, traces of probing, ranks without samples, kept batches."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from tests.fits import Fit, Recorder, plan_for
from tests.harness import WarmRanks
from tests.odd_fits import (
    Augmented,
    Logging,
    OwnBatches,
    Plain,
    Said,
    Stateful,
    Stream,
    layers,
    loaders,
    outcome,
    points,
    trainer_for,
)

EXACT = 1e-12


def alike(mine: dict[str, Any], reference: dict[str, Any], ignore: str = "local") -> None:
    """Parameters and all that was logged are the reference's."""
    for name, value in reference["parameters"].items():
        assert torch.allclose(mine["parameters"][name], value, rtol=0, atol=1e-11), name
    assert len(mine["logged"]) == len(reference["logged"])
    for left, right in zip(
        [*mine["logged"], mine["metrics"]], [*reference["logged"], reference["metrics"]], strict=True
    ):
        left, right = ({k: v for k, v in side.items() if ignore not in k} for side in (left, right))
        assert left == pytest.approx(right, rel=EXACT, abs=EXACT)


# -- the loss check ----------------------------------------------------------------------------------------------------


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(logits, dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def mixup(logits: Tensor, labels: Tensor) -> Tensor:
    share = float(np.random.beta(0.4, 0.4))
    others = labels[torch.randperm(len(labels))]
    return share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, others)


WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

LOSSES: dict[str, Any] = {
    "mean": F.cross_entropy,
    "smoothed mean": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "mean of squares and a constant": lambda out, y: (out - y[:, None]).square().mean() + 0.3,
    "mixup": mixup,
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "class weights": lambda out, y: nn.CrossEntropyLoss(weight=WEIGHTS)(out, y),
    "ignored samples": lambda out, y: F.cross_entropy(out, y.masked_fill(y == 0, -100)),
    "contrastive": contrastive,
}
FOUND = {"sum", "class weights", "ignored samples", "contrastive"}


class WithLoss(Plain):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        if name == "dropout":
            self.model = layers(nn.Dropout(0.5))
        elif "BatchNorm" in name:
            self.model = layers(nn.BatchNorm1d(8))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.name == "augmented":
            x = x + torch.randn_like(x)
        if self.name == "frozen BatchNorm":
            self.model[1].eval()
        loss: Tensor = LOSSES.get(self.name, F.cross_entropy)(self.model(x), y)
        return loss


def check(names: list[str], mode: str, data: str = "map") -> dict[str, list[str]]:
    warned = {}
    for name in names:
        torch.manual_seed(8)
        module = WithLoss(name)
        train: Any = loaders((3, 2), 5, 20)[0]
        if data == "stream":
            train = DataLoader(Stream(0, (6, 5)), batch_size=None)
        with Said() as said:
            trainer_for((3, 2), Recorder(), {"strategy": {"check_loss": mode}, "max_steps": 1}).fit(module, train)
        warned[name] = said.warned
    return warned


def test_losses_that_are_no_means_are_found_and_others_are_not(ranks: WarmRanks) -> None:
    silent = [*(name for name in LOSSES if name not in FOUND), "dropout", "augmented", "frozen BatchNorm"]
    found, others = ranks.run(2, check, [*silent, *FOUND, "BatchNorm"], "warn")
    assert not any(others.values())  # said once, by rank 0
    assert {name for name, warned in found.items() if warned} == FOUND | {"BatchNorm"}
    for name in FOUND:
        (message,) = found[name]
        assert "not a mean over samples" in message
        assert "check_loss='off' silences this" in message
    (message,) = found["BatchNorm"]
    assert "model.1" in message
    assert "GroupNorm" in message


def test_off_is_silent(ranks: WarmRanks) -> None:
    assert ranks.run(2, check, ["sum", "BatchNorm"], "off") == [{"sum": [], "BatchNorm": []}] * 2


@pytest.mark.parametrize("name", ["class weights", "BatchNorm"])
def test_error_ends_all_ranks(ranks: WarmRanks, name: str) -> None:
    for status, *rest in ranks.run_outcomes(2, check, [name], "error"):
        assert (status, rest[0]) == ("error", "UnsupportedError"), rest
        assert "check_loss='warn' or 'off'" in rest[1]


def test_the_loss_of_kept_batches_is_checked_too(ranks: WarmRanks) -> None:
    found, _ = ranks.run(2, check, ["mean", "sum"], "warn", "stream")
    assert not found["mean"]
    assert "not a mean over samples" in found["sum"][0]


# -- no trace of checking and measuring --------------------------------------------------------------------------------


def started(probed: bool) -> tuple[dict[str, Any], list[dict[str, float]]]:
    torch.manual_seed(8)
    np.random.seed(8)
    random.seed(8)
    module = Stateful()
    own: dict[str, Any] = {"plan": plan_for(Fit(shares=(3, 3)))}
    if probed:
        own = {"check_loss": "warn", "plan": "auto", "summary": True}
    recorder = Recorder()
    train = DataLoader(Augmented(24), batch_size=3)
    trainer = trainer_for((1, 1), recorder, {"strategy": own, "max_steps": 1})
    with Said(), same_shares(trainer.strategy) if probed else nullcontext():
        trainer.fit(module, train)
    return module.started, recorder.logged


@contextmanager
def same_shares(strategy: Any) -> Iterator[None]:
    """Measure and plan, and then take equal shares: with others a rank would read, and so draw, for other samples."""
    measured_plan = strategy._opening._measured_plan

    def planned(*args: Any) -> Any:
        plan = measured_plan(*args)
        return replace(plan, batch_shares=(3, 3))

    strategy._opening._measured_plan = planned
    yield


def test_checking_and_measuring_leave_no_trace(ranks: WarmRanks) -> None:
    quiet, probed = ranks.run(2, started, False), ranks.run(2, started, True)
    for (left, left_log), (right, right_log) in zip(quiet, probed, strict=True):
        assert left.keys() == right.keys()
        assert {key: (left[key], right[key]) for key in left if left[key] != right[key]} == {}
        assert left_log == right_log  # the first step's own draws
        assert left["gradients"] == []


# -- ranks without samples ---------------------------------------------------------------------------------------------


def log_all(shares: tuple[int, ...] | None, batch: int, samples: int) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder = Logging(), Recorder()
    train, val = loaders(shares, batch, samples)
    trainer = trainer_for(shares, recorder, {})
    with warnings.catch_warnings():
        # "local" is logged so on purpose
        warnings.filterwarnings("ignore", message=r".*recommended to use `self.log\('(fit|val)/local'")
        trainer.fit(module, train, val)
    return {**outcome(trainer, module, recorder), "outputs": module.outputs}


@pytest.mark.parametrize(
    ("shares", "samples"),
    [((3, 1), 9), pytest.param((3, 0), 7, marks=pytest.mark.slow), ((0, 2), 6), ((2, 1, 1), 13)],
    ids=["short last batch", "second without", "first without", "three, last batch of one"],
)
def test_everything_logged_is_one_devices(ranks: WarmRanks, shares: tuple[int, ...], samples: int) -> None:
    """Means, sums, minima, maxima and metrics, on steps and epochs, in training and validation."""
    reference = log_all(None, sum(shares), samples)
    results = ranks.run(len(shares), log_all, shares, sum(shares), samples)
    for rank, result in enumerate(results):
        alike(result, reference)
        if shares[rank] == 0:
            assert result["outputs"] == []
            assert all(math.isnan(v) for k, v in result["metrics"].items() if "local" in k)
    assert sum(sum(result["outputs"]) for result in results) == 2 * samples


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = layers(nn.BatchNorm1d(8))


def running_statistics(shares: tuple[int, ...], samples: int) -> dict[str, Tensor]:
    module = Normed()
    train, val = loaders(shares, sum(shares), samples)
    trainer_for(shares, Recorder(), {"max_epochs": 1}).fit(module, train, val)
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_a_rank_without_samples_leaves_running_statistics_alone(ranks: WarmRanks) -> None:
    own, none = ranks.run(2, running_statistics, (4, 0), 12)
    assert own["model.1.num_batches_tracked"] == 3
    assert none["model.1.num_batches_tracked"] == 0
    assert float(none["model.1.running_mean"].abs().max()) == 0
    assert float(none["model.1.running_var"].min()) == float(none["model.1.running_var"].max()) == 1


# -- batches that the user makes ---------------------------------------------------------------------------------------

SIZES = ((3, 2, 4, 1), (1, 2, 2))
"""per rank, the sizes of its own batches; the second has fewer"""


def kept(rank_batches: str, limit: int | None) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder = Logging(), Recorder()
    options: dict[str, Any] = {"strategy": {"plan": "auto"}, "val_check_interval": 1.0}
    if limit is not None:
        options["limit_train_batches"] = limit
    trainer = trainer_for((1, 1), recorder, options)
    rank = trainer.global_rank
    if rank_batches == "stream":
        train = DataLoader(Stream(50 * rank, SIZES[rank]), batch_size=None)
    else:
        at = [50 * rank + sum(SIZES[rank][:i]) for i in range(len(SIZES[rank]))]
        own = [list(range(a, a + n)) for a, n in zip(at, SIZES[rank], strict=True)]
        train = DataLoader(points(100), batch_sampler=OwnBatches(own))
    with Said() as said:
        trainer.fit(module, train, DataLoader(points(11, seed=6), batch_size=2))
    return {**outcome(trainer, module, recorder), "said": [text for text in said.infos if "keeps the batches" in text]}


def kept_on_one_device(steps: int) -> dict[str, Any]:
    torch.manual_seed(8)
    module, recorder = Logging(), Recorder()
    x, y = points(100).tensors
    batches = []
    for step in range(steps):
        own = [slice(50 * r + sum(SIZES[r][:step]), 50 * r + sum(SIZES[r][: step + 1])) for r in range(2)]
        batches.append(TensorDataset(torch.cat([x[s] for s in own]), torch.cat([y[s] for s in own])))
    ends = np.cumsum([0] + [len(batch) for batch in batches]).tolist()
    indices = OwnBatches([list(range(a, b)) for a, b in pairwise(ends)])
    trainer = trainer_for(None, recorder, {})
    train = DataLoader(ConcatDataset(batches), batch_sampler=indices)
    trainer.fit(module, train, DataLoader(points(11, seed=6), batch_size=4))
    return outcome(trainer, module, recorder)


@pytest.mark.parametrize("limit", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank_batches", ["stream", "batch sampler"])
def test_kept_batches_are_weighted_and_end_together(ranks: WarmRanks, rank_batches: str, limit: int | None) -> None:
    """Also where reading ahead has fetched a batch that an epoch's limit leaves unused."""
    reference = kept_on_one_device(limit or min(map(len, SIZES)))
    first, second = ranks.run(2, kept, rank_batches, limit)
    alike(first, reference)
    alike(second, reference)
    assert len(first["said"]) == 1
    assert not second["said"]
