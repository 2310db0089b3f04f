"""Blocks that are computed again in backward, or compiled: the same numbers, less memory, more time, no renaming."""

from __future__ import annotations

import functools
import time
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.emulation import Emulation
from lightning_hetero.models.units import find_units
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator import shard_memory
from lightning_hetero.simulator.sharded_memory import GLOO_BUFFERS
from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.block_forwards import BlockForwards
from tests import memory_fits, odd_fits
from tests.fits import Fit, whole
from tests.harness import WarmRanks
from tests.memory_fits import Size, measured_units, parameters_outside_units, peaks_of_a_rank
from tests.option_fits import Droppings, Plain, dropped

DROPPINGS = Fit(shares=(3, 2))


# -- computed again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "again", "forwards"),
    [
        ({"activation_checkpointing": True}, (), [[6, 6, 6, 6]] * 2),
        pytest.param({"activation_checkpointing": 2}, (), [[3, 6, 3, 6]] * 2, marks=pytest.mark.slow),
        ({"activation_checkpointing": 3, "sharding_strategy": "FULL_SHARD"}, (), [[3, 3, 6, 3]] * 2),
        ({}, (True, False), [[6, 6, 6, 6], [3, 3, 3, 3]]),
    ],
    ids=str,
)
def test_gradients_are_the_same_when_blocks_are_computed_again(
    ranks: WarmRanks, options: dict[str, Any], again: tuple[bool, ...], forwards: list[list[int]]
) -> None:
    """Dropout included, to the last bit; and what runs again is what was asked for, on each rank."""
    expected = ranks.run(2, dropped, DROPPINGS)
    found = ranks.run(2, dropped, DROPPINGS.on(options=options), again)
    assert [each["forwards"] for each in expected] == [[3] * 4] * 2
    assert [each["forwards"] for each in found] == forwards
    for one, other in zip(found, expected, strict=True):
        assert one["names"] == other["names"]
        assert one["own forward"] == [False] * 4  # taken off at the end
        for step, reference in zip(one["gradients"], other["gradients"], strict=True):
            assert step.keys() == reference.keys()
            for name, gradient in reference.items():
                assert torch.equal(step[name], gradient), name


def test_every_nth_block_on_the_ranks_that_a_plan_names(ranks: WarmRanks) -> None:
    found = ranks.run(2, dropped, DROPPINGS.on(options={"activation_checkpointing": 2}), (True, True))
    assert [each["forwards"] for each in found] == [[3, 6, 3, 6]] * 2


def test_a_forward_of_the_users_own_comes_back() -> None:
    model = Droppings()
    own = functools.partial(model.blocks[0].forward, scale=2.0)
    model.blocks[0].forward = own
    forwards = BlockForwards(find_units(model), recompute_every=1)
    assert forwards.recomputed == {f"blocks.{index}" for index in range(4)}
    out = model(torch.randn(2, 64))
    out.sum().backward()
    assert [block.forwards for block in model.blocks] == [2] * 4
    with torch.no_grad():
        model(torch.randn(2, 64))
    assert [block.forwards for block in model.blocks] == [3] * 4
    forwards.close()
    assert model.blocks[0].forward is own
    assert "forward" not in model.blocks[1].__dict__


MEMORY = [
    Size((5, 3), depth=4, again=(True, False)),
    pytest.param(Size((8, 4), again=(True, False)), marks=pytest.mark.slow),
    pytest.param(Size((8, 4), again=(True, True)), marks=pytest.mark.slow),
    pytest.param(Size((12, 9), again=(True, True), reshard=False), marks=pytest.mark.slow),
    pytest.param(Size((8, 5, 2, 1), again=(True, True, False, True)), marks=pytest.mark.slow),
    pytest.param(Size((20, 3), depth=4, width=96, again=(True, True)), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size", MEMORY, ids=str)
def test_peaks_are_smaller_and_as_predicted(ranks: WarmRanks, size: Size) -> None:
    units = measured_units(size)
    outside = parameters_outside_units(size, units)
    units[0] = replace(units[0], parameters=units[0].parameters + outside)
    root = [unit.name for unit in units if not unit.is_block]
    accounted = ranks.run(size.ranks, peaks_of_a_rank, size)
    without = ranks.run(size.ranks, peaks_of_a_rank, replace(size, again=()))
    for rank, share in enumerate(size.shares):
        memory = shard_memory(
            units,
            size.ranks,
            root=root,
            reshard_after_forward=size.reshard,
            checkpointing=size.again[rank],
            buffers=GLOO_BUFFERS,
        )
        assert memory.peak_bytes(share) == pytest.approx(accounted[rank][-1], rel=0.05), f"rank {rank}"
        if size.again[rank]:
            # one sample has little to save beside the model's states
            assert accounted[rank][-1] < (0.8 if share > 1 else 1.0) * without[rank][-1]


def _targets(again: bool) -> dict[str, float]:
    """Emulated seconds of the blocks, by phase, in one fit."""
    size = Size((2, 2), depth=3, again=(again, again))
    cluster = Cluster("c", tuple(Device("t", "n", 2**34, 1e12) for _ in range(2)), emulate=True)
    plan = ShardPlan(4, (2, 2), ((0, 1),), ("t", "t"), activation_checkpointing=size.again)
    strategy = HeteroFSDPStrategy(cluster=cluster, plan=plan, check_loss="off", summary=False)
    memory_fits._fit(size, strategy, [], batch_size=1)
    report = strategy.summaries[0].emulation
    assert report is not None
    blocks = [phase for phase in report.phases if ".blocks." in phase.unit]
    return {name: sum(phase.target_s for phase in blocks if phase.phase == name) for name in ("forward", "backward")}


def test_computing_again_takes_emulated_time(ranks: WarmRanks) -> None:
    plain, again = ranks.run(2, _targets, False)[0], ranks.run(2, _targets, True)[0]
    assert again["forward"] == pytest.approx(plain["forward"])
    # torch stops a second forward once it has all that backward needs, so the last product is left out
    extra_s = again["backward"] - plain["backward"]
    assert 0.5 * plain["forward"] < extra_s < plain["forward"]


def test_computing_again_takes_its_time_by_costs_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    timing = UnitTiming(0.01, 0.005, 0.02, 0.01)
    costs = ModelCosts("m", tuple(UnitCost(name, 1, 1.0, 2.0, 1, 1, {"t": timing}) for name in ("0", "1")))
    emulation = Emulation(Device("t", "n", 2**30, None), 0, find_units(model), costs, recomputed=["1"])
    emulation.start(model)
    batch = torch.randn(2, 4)
    with emulation.step(batch):
        model(batch).sum().backward()
    targets = {(phase.unit, phase.phase): phase.target_s for phase in emulation.report().phases}
    assert targets["0", "backward"] == pytest.approx(0.04)
    assert targets["1", "backward"] == pytest.approx(0.04 + 0.02)


# -- compiled ----------------------------------------------------------------------------------------------------------


class Counted(pl.Callback):
    """How many frames were compiled after each batch."""

    def __init__(self) -> None:
        from torch._dynamo.testing import CompileCounter

        self.backend = CompileCounter()
        self.after: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.after.append(self.backend.frame_count)


def _compiled(sizes: tuple[tuple[int, ...], ...], options: dict[str, Any], count: bool) -> dict[str, Any]:
    """Train on batches of the given sizes per rank; say what was compiled when, and what came of it."""
    # dynamo looks at inputs' gradients while it guards them
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    counted = Counted()
    if count:
        torch.compile = functools.partial(torch.compile, backend=counted.backend)  # type: ignore[assignment]
    torch.manual_seed(4)
    module = Plain(odd_fits.layers(nn.Linear(8, 8)))
    fit = Fit(shares=tuple(own[0] for own in sizes))
    trainer = odd_fits.trainer_for(
        fit.shares, odd_fits.Recorder(), {"max_epochs": 1, "callbacks": [counted], "strategy": options}
    )
    own = sizes[trainer.strategy.global_rank]
    started_s = time.perf_counter()
    trainer.fit(module, DataLoader(odd_fits.Stream(0, own), batch_size=None))
    seconds = time.perf_counter() - started_s
    parameters = {name: whole(parameter) for name, parameter in module.named_parameters()}
    return {"after": counted.after, "parameters": parameters, "seconds": seconds}


MOVING = ((2, 3, 5, 4, 9, 7, 6, 3), (4, 3, 7, 2, 5, 8, 3, 10))


@pytest.mark.parametrize(
    "options",
    [{"compile": True}, pytest.param({"compile": True, "activation_checkpointing": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_shares_that_move_compile_nothing_anew(ranks: WarmRanks, options: dict[str, Any]) -> None:
    expected = ranks.run(2, _compiled, MOVING, {}, True)
    for one, other in zip(ranks.run(2, _compiled, MOVING, options, True), expected, strict=True):
        assert other["after"][-1] == 0
        assert one["after"][0] >= 3  # one per block
        assert len(set(one["after"])) == 1, one["after"]
        for name, value in other["parameters"].items():
            assert torch.allclose(one["parameters"][name], value, rtol=1e-12, atol=1e-13), name


@pytest.mark.slow
def test_compiled_by_torchs_own_compiler(ranks: WarmRanks) -> None:
    expected = ranks.run(2, _compiled, MOVING, {}, False)
    for one, other in zip(
        ranks.run(2, _compiled, MOVING, {"compile": True}, False, timeout=300), expected, strict=True
    ):
        print(f"compiled in {one['seconds']:.0f} s, else {other['seconds']:.1f} s")
        for name, value in other["parameters"].items():
            assert torch.allclose(one["parameters"][name], value, rtol=1e-9, atol=1e-11), name
