"""Losses that are means over other items than samples: gradients, logs and the check count what loss_weight says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.loss_weight import BatchWeights, LossWeight, scaled
from tests.fits import Recorder
from tests.harness import WarmRanks
from tests.odd_fits import CLASSES, Plain, Said, outcome, trainer_for
from tests.test_fsdp_exactness import WEIGHTS, WithLoss, alike

PADDING = -100
LENGTHS = (4, 1, 2, 0, 3, 0, 4, 1)
"""tokens of the samples, over and over: every global batch of four has some, a rank's share of it may have none"""


def sequences(samples: int, lengths: tuple[int, ...] = LENGTHS) -> TensorDataset:
    """Sequences of up to four tokens, each six numbers and a class; the rest is padding."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 4, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (samples, 4), generator=generator)
    for sample in range(samples):
        y[sample, lengths[sample % len(lengths)] :] = PADDING
    return TensorDataset(x, y)


def tokens(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != PADDING).sum()


class Tokens(Plain):
    """A mean over the tokens that are no padding; of no tokens it is 0 / 0, and so are its gradients."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(self.model(x.flatten(0, 1)), y.flatten().clamp(min=0), reduction="none")
        mask = (y != PADDING).flatten()
        return (each * mask).sum() / mask.sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("only_step", loss, on_step=True, on_epoch=False, sync_dist=True)
        self.log("only_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        count = int(tokens(batch))
        self.log("by_tokens", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=count)
        self.log("epoch_by_tokens", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=count)
        return loss


class Weighted(Tokens):
    """The same, saying itself what its loss counts for."""

    def loss_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return tokens(batch)


class Factor(Tokens):
    """Has a number of that name, which is none of ours."""

    loss_weight = 0.5


def fit(
    shares: tuple[int, ...] | None,
    how: str,
    lengths: tuple[int, ...] = LENGTHS,
    samples: int = 27,
    batch: int = 4,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(8)
    kinds: dict[str, Any] = {"method": Weighted, "number": Factor}
    module, recorder = kinds.get(how, Tokens)(), Recorder()
    options = dict(options)
    own = {"loss_weight": tokens} if how == "argument" else {}
    options["strategy"] = {**own, **options.pop("strategy", {})}
    trainer = trainer_for(shares, recorder, options)
    size = batch // (len(shares) if shares else 1)
    train = DataLoader(sequences(samples, lengths), batch_size=size)
    # the last validation batch is short: on one device too, an epoch weighs batches by samples
    val = DataLoader(sequences(7, (3, 1, 0, 4, 2)), batch_size=size)
    with Said():
        trainer.fit(module, train, val)
    return {**outcome(trainer, module, recorder), "gradients": recorder.gradients}


@pytest.mark.parametrize("shares", [(3, 1), pytest.param((2, 1, 3), marks=pytest.mark.slow), (0, 4)])
@pytest.mark.parametrize(("how", "options"), [("argument", {"accumulate_grad_batches": 2}), ("method", {})])
def test_the_result_is_the_mean_over_all_items(
    ranks: WarmRanks, shares: tuple[int, ...], how: str, options: dict[str, Any]
) -> None:
    """Gradients, parameters and logs, on step and epoch, in training and validation; ranks without tokens too."""
    options = {**options, "batch": sum(shares)}
    reference = fit(None, how, **options)
    assert all(math.isfinite(value) for logged in reference["logged"] for value in logged.values())
    for result in ranks.run(len(shares), fit, shares, how, **options):
        alike(result, reference)
        for left, right in zip(result["gradients"], reference["gradients"], strict=True):
            for name, gradient in right.items():
                assert torch.allclose(left[name], gradient, rtol=0, atol=1e-12), name


def test_without_loss_weight_it_is_not(ranks: WarmRanks) -> None:
    """What the tests above would find: each rank's mean weighted by samples is another one."""
    full = (4, 1, 2, 3)  # a rank without tokens would make it NaN
    reference = fit(None, "nothing", full, 24)
    for how in ("nothing", "number"):
        result = ranks.run(2, fit, (3, 1), how, full, 24)[0]
        assert result["logged"][0]["loss_step"] != pytest.approx(reference["logged"][0]["loss_step"], rel=1e-3)


def micro(plan: ShardPlan, how: str) -> dict[str, Any]:
    return fit(plan.batch_shares, how, strategy={"plan": plan})


def test_micro_batches_count_their_own_items(ranks: WarmRanks) -> None:
    reference = fit(None, "method")
    plan = ShardPlan(4, (3, 1), ((0, 1),), ("d0", "d1"), micro_batches=(2,))
    for result in ranks.run(2, micro, plan, "method"):
        alike(result, reference)


# -- no items ----------------------------------------------------------------------------------------------------------


def one_step(shares: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(8)
    before = {name: p.detach().double() for name, p in Weighted().named_parameters()}
    result = fit(shares, "method", lengths, samples=4, max_steps=1, limit_val_batches=0)
    return {**result, "before": before}


def test_a_global_batch_without_items_changes_nothing(ranks: WarmRanks) -> None:
    for result in ranks.run(2, one_step, (3, 1), (0,)):
        for name, value in result["before"].items():
            assert torch.allclose(result["parameters"][name], value, atol=1e-7), name
        for gradient in result["gradients"][0].values():
            assert not gradient.any()
        assert all(value == 0 for key, value in result["metrics"].items() if "loss" in key or "only" in key)


def test_a_rank_without_items_adds_nothing(ranks: WarmRanks) -> None:
    """Its own mean is 0 / 0, in the loss and in every gradient."""
    for result in ranks.run(2, one_step, (3, 1), (4, 2, 1, 0)):
        assert all(gradient.isfinite().all() for gradient in result["gradients"][0].values())
        assert any(gradient.any() for gradient in result["gradients"][0].values())
        assert all(math.isfinite(value) for value in result["metrics"].values())


def test_a_loss_that_counts_for_nothing_has_gradients_of_zero() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * torch.tensor([1.0, float("nan"), float("inf")])).sum() / torch.zeros(())
    nothing = scaled(loss, 0.0)
    nothing.backward()
    assert float(nothing.detach()) == 0
    assert weight.grad is not None
    assert not weight.grad.any()
    assert float(scaled(torch.tensor(3.0), 0.25)) == 0.75


# -- what the function may return --------------------------------------------------------------------------------------


def bad_weight(value: Any) -> None:
    def weigh(batch: tuple[Tensor, Tensor]) -> Any:
        if torch.distributed.get_rank() == 1 and len(steps) == 2:
            return value
        steps.append(1)
        return tokens(batch)

    steps: list[int] = []
    trainer = trainer_for((3, 1), Recorder(), {"strategy": {"loss_weight": weigh}, "max_steps": 4})
    trainer.fit(Tokens(), DataLoader(sequences(24), batch_size=2), DataLoader(sequences(4), batch_size=2))


@pytest.mark.parametrize("value", [-1.5, float("nan"), float("inf"), torch.tensor(-2)])
def test_a_weight_that_cannot_be_is_an_error_on_all_ranks(ranks: WarmRanks, value: Any) -> None:
    for status, *rest in ranks.run_outcomes(2, bad_weight, value):
        assert (status, rest[0]) == ("error", "HeteroError"), rest
        assert "rank 1, step 2" in rest[1]
        assert f"{float(value):g}" in rest[1]


@pytest.mark.parametrize("value", [None, torch.ones(2), "three"])
def test_what_is_no_number_is_an_error(value: Any) -> None:
    weight = LossWeight(lambda batch: value, rank=1)
    with pytest.raises(HeteroError, match="on rank 1 in step 7: return a number"):
        weight.of(None, 7)


@pytest.mark.parametrize("value", [3, 2.5, torch.tensor(4), torch.ones(1)])
def test_numbers_and_tensors_of_one_element_are_taken(value: Any) -> None:
    assert LossWeight(lambda batch: value, rank=0).of(None, 0) == float(value)


def test_what_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(HeteroError, match=r"loss_weight=3: give a function"):
        HeteroFSDPStrategy(loss_weight=3)  # type: ignore[arg-type]


def test_large_counts_keep_their_last_digit() -> None:
    """2^53 - 1 tokens: in 32 bits two ranks' counts would be equal."""
    weights = BatchWeights((2.0**53 - 1, 1.0), (3, 1), 1, (1.0,))
    assert weights.total == 2.0**53
    assert weights.factor(weights.own) == 2.0**-53


# -- the loss check ----------------------------------------------------------------------------------------------------


def class_weights(batch: tuple[Tensor, Tensor]) -> Tensor:
    return WEIGHTS[batch[1]].sum()


def check(name: str) -> list[str]:
    torch.manual_seed(8)
    own: dict[str, Any] = {"check_loss": "warn"}
    if "class" in name:
        module: Any = WithLoss("class weights")
        x = torch.randn(20, 6, dtype=torch.float64)
        train = DataLoader(TensorDataset(x, torch.arange(20) % CLASSES), batch_size=2)
        own |= {"loss_weight": class_weights} if "weighted" in name else {}
    else:
        module = Weighted() if name == "weighted tokens" else Tokens()
        own |= {"loss_weight": lambda batch: len(batch[0])} if "wrongly" in name else {}
        train = DataLoader(sequences(20, (4, 2, 1, 3)), batch_size=2)
    with Said() as said:
        trainer_for((3, 1), Recorder(), {"strategy": own, "max_steps": 1}).fit(module, train)
    return said.warned


def test_the_loss_check_counts_items(ranks: WarmRanks) -> None:
    assert ranks.run(2, check, "weighted tokens")[0] == []
    assert ranks.run(2, check, "weighted classes")[0] == []
    for name in ("tokens", "classes"):
        (warned,) = ranks.run(2, check, name)[0]
        assert "not a mean over samples" in warned
        assert "loss_weight=" in warned
    (warned,) = ranks.run(2, check, "wrongly weighted tokens")[0]
    assert "not a mean over what loss_weight counts" in warned


# -- what it costs -----------------------------------------------------------------------------------------------------


def collectives(how: str) -> int:
    calls = []
    gather = HeteroFSDPStrategy.gather_vector
    HeteroFSDPStrategy.gather_vector = lambda self, values: calls.append(1) or gather(self, values)  # type: ignore
    fit((3, 1), how, (4, 1, 2, 3), 24, max_epochs=1, limit_val_batches=0)
    return len(calls)


def test_one_collective_a_step_and_none_without(ranks: WarmRanks) -> None:
    assert ranks.run(2, collectives, "nothing") == [0, 0]
    assert ranks.run(2, collectives, "method") == [6, 6]
