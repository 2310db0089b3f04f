"""Shard groups of any sizes give what one device gives, and replicas stay the same bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.ownership import Ownership, shard_slices
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Classifier, Fit, Order, cluster_for, dataset, on_a_rank, on_one_device, plan_for, run
from tests.harness import WarmRanks
from tests.test_fsdp_parity import assert_alike

LAYOUTS = {
    "4": ((0, 1, 2, 3),),
    "2,2": ((0, 1), (2, 3)),
    "1,3": ((0,), (1, 2, 3)),
    "3,1, mixed": ((0, 3, 2), (1,)),
    "1,1,2": ((0,), (1,), (2, 3)),
    "1,1,1,1": ((0,), (1,), (2,), (3,)),
    "2,3": ((0, 1), (2, 3, 4)),
}
SHARES = {4: (5, 2, 1, 4), 5: (3, 2, 1, 4, 2)}


def fit_for(layout: str, **changes: Any) -> Fit:
    groups = LAYOUTS[layout]
    ranks = sum(map(len, groups))
    epochs = 6 if changes.get("accumulate") == 3 else 2  # 10 steps and more
    return Fit(shares=SHARES[ranks], epochs=epochs, groups=groups).on(**changes)


PAIRS = {
    "2,2": {"reshard": True, "accumulate": 3, "network": "mlp", "clip": 0.3},
    "1,3": {"reshard": False, "accumulate": 1, "clip": 0.3, "validate": True},
    "3,1, mixed": {"reshard": True, "accumulate": 1, "network": "mlp"},
    "1,1,2": {"reshard": True, "accumulate": 3, "network": "mlp"},
    "1,1,1,1": {"reshard": False, "accumulate": 3, "network": "mlp", "clip": 0.1, "clip_by": "value"},
    "2,3": {"reshard": False, "accumulate": 3, "network": "mlp", "clip": 0.3, "options": {"cpu_offload": True}},
}


def on_a_rank_with_bits(fit: Fit) -> tuple[Any, list[Tensor]]:
    """What came of the fit, and the parameters that rank 0's replica and this one's hold, whole."""
    outcome = on_a_rank(fit)
    own = list(outcome.parameters.values())
    first = [value.clone() for value in own]
    for value in first:
        dist.broadcast(value, src=0)
    return outcome, [(mine != theirs).sum() for mine, theirs in zip(own, first, strict=True)]


def check(ranks: WarmRanks, fit: Fit) -> None:
    results = ranks.run(fit.ranks, on_a_rank_with_bits, fit)
    assert_alike(on_one_device(fit), [outcome for outcome, _ in results])
    for _, different in results:
        assert not any(int(count) for count in different)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in ("1,3", "3,1, mixed") else pytest.mark.slow) for name in PAIRS],
)
def test_groups_give_what_one_device_gives(ranks: WarmRanks, layout: str) -> None:
    check(ranks, fit_for(layout, **PAIRS[layout]))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "reshard", "accumulate"), list(product(LAYOUTS, [True, False], [1, 3])))
def test_every_layout(ranks: WarmRanks, layout: str, reshard: bool, accumulate: int) -> None:
    check(ranks, fit_for(layout, reshard=reshard, accumulate=accumulate, clip=0.3))


MICRO = {
    "one group": fit_for("4", micro_batches=(2,), validate=True),
    "equal groups": fit_for("2,2", micro_batches=(3, 1), network="mlp", clip=0.3),
    "groups that do not march together": fit_for("1,3", micro_batches=(1, 3), network="mlp", accumulate=3, clip=0.3),
    "a group of 5 ranks": fit_for("2,3", micro_batches=(2, 1), network="mlp"),
    "more micro-batches than samples": fit_for("1,1,2", micro_batches=(4, 1, 6), network="mlp", validate=True),
    "NO_SHARD, and recomputing on some ranks": fit_for(
        "1,3", modes=("FULL_SHARD", "NO_SHARD"), micro_batches=(1, 2), checkpointing=(True, False, True, False)
    ),
    "NO_SHARD alone": fit_for("4", modes=("NO_SHARD",), network="mlp", clip=0.3),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name.startswith("groups that do not") else pytest.mark.slow) for name in MICRO],
)
def test_micro_batches_give_what_one_device_gives(ranks: WarmRanks, name: str) -> None:
    check(ranks, MICRO[name])


def last_losses(fit: Fit) -> list[float]:
    """One device's training loss over the last epoch, for five seeds."""
    return [on_one_device(fit.on(seed=seed)).callback_metrics["train_loss_epoch"] for seed in range(5)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["4", "2,2", "1,3"])
def test_bf16_mixed_ends_within_the_spread_of_seeds(ranks: WarmRanks, layout: str) -> None:
    fit = fit_for(layout, precision="bf16-mixed", epochs=6)
    spread = last_losses(fit)
    assert max(spread) - min(spread) < 0.5  # or anything would do
    for outcome in ranks.run(fit.ranks, on_a_rank, fit.on(seed=0), timeout=300):
        assert min(spread) <= outcome.callback_metrics["train_loss_epoch"] <= max(spread)


class Manual(Classifier):
    """Steps by hand."""

    automatic_optimization = False


class Sharded(Classifier):
    """Shards itself, over all ranks."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def refused_on_a_rank(fit: Fit, kind: str) -> str:
    """What a fit that cannot be is refused with."""
    strategy = HeteroFSDPStrategy(cluster=cluster_for(fit.ranks), plan=plan_for(fit), check_loss="off", summary=False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=fit.ranks, logger=False, enable_checkpointing=False, max_epochs=1
    )
    data = dataset(12, "32-true")
    module = {"manual": Manual, "sharded": Sharded}.get(kind, Classifier)("mlp")
    sampler = BatchSampler(Order(12), 2, False)
    loader = DataLoader(data, batch_sampler=_Own(sampler)) if kind == "kept" else DataLoader(data)
    with pytest.raises(UnsupportedError) as error:
        trainer.fit(module, loader)
    return str(error.value)


class _Own:
    """A batch sampler of the user's own."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(
    ("kind", "micro_batches", "words"),
    [
        ("manual", (1, 2), "2 micro-batches, and with manual optimization"),
        ("kept", (2, 1), "2 micro-batches, but the batches of DataLoader are kept"),
        ("sharded", (1, 1), "sharded already"),
    ],
)
def test_what_groups_cannot_do_is_refused_by_name(
    ranks: WarmRanks, kind: str, micro_batches: tuple[int, ...], words: str
) -> None:
    fit = Fit("mlp", shares=(2, 1), groups=((0,), (1,)), micro_batches=micro_batches)
    said = ranks.run(2, refused_on_a_rank, fit, kind)
    assert any(words in each for each in said)


# -- traffic, at the process group -------------------------------------------------------------------------------------


class AllReduces(TorchDispatchMode):
    """Elements of every all-reduce that this rank takes part in and not all ranks do (logged values are all ranks')."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce_" in str(func) and dist.ProcessGroup.unbox(args[1]).size() < dist.get_world_size():
            self.elements.append(sum(tensor.numel() for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def traffic_of_a_rank(fit: Fit) -> tuple[list[int], int, int]:
    """All-reduced elements, what ownership says of a step, and the shards' number of runs with other ranks."""
    strategy = HeteroFSDPStrategy(cluster=cluster_for(fit.ranks), plan=plan_for(fit), check_loss="off", summary=False)
    with AllReduces() as seen:
        run(fit.on(max_steps=2), strategy, rank_batch=1, devices=fit.ranks)
    module = strategy.lightning_module
    assert module is not None
    ownership = Ownership(
        each for name, p in module.named_parameters() for each in shard_slices(name, p.shape, strategy.groups.replicas)
    )
    rank = strategy.global_rank
    runs = sum(len(ownership.of_rank(rank, name)) for name, _ in module.named_parameters())
    return seen.elements, ownership.elements_summed(rank), runs


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_crosses_is_what_ownership_says(ranks: WarmRanks, accumulate: int) -> None:
    fit = fit_for("2,3", network="mlp", accumulate=accumulate)
    for elements, expected, runs in ranks.run(fit.ranks, traffic_of_a_rank, fit):
        # two steps; one number beside each run says whether there is a gradient
        assert sum(elements) == 2 * (expected + runs)
