"""A rank keeps its units alone, with the values that one device would have; mixed precision; models without a chain."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.plan import Pipeline, PipelinePlan, Stage
from lightning_hetero.profiler.rehearsal import Rehearsal
from lightning_hetero.strategies import HeteroPipelineStrategy
from lightning_hetero.strategies.pipe.call import Call, _Place
from lightning_hetero.strategies.pipe.placement import Placement, find_model
from lightning_hetero.strategies.pipe.planning import _measured
from tests.harness import WarmRanks
from tests.pipe_fits import PipeFit, make_trainer, pictures, reference, run_pipeline

FIT = PipeFit(module={"drop": 0.1})


def test_other_stages_units_are_there_by_name_and_without_memory(ranks: WarmRanks) -> None:
    found = ranks.run(FIT.world, run_pipeline, FIT, process_group=False)
    names = [name for name, _ in FIT.make_module().named_parameters()]
    kept = [set(own["values"]) for own in found]
    assert set().union(*kept) == set(names)
    outside = {"brightness", "temperature"}
    assert kept[0] & kept[1] == kept[1] & kept[2] == outside
    assert {name for name in kept[1] if "blocks.4." in name} == kept[1] - outside
    for own in found:
        assert list(own["state"]) == list(FIT.make_module().state_dict())
        assert sum(t.nbytes for t in own["state"].values() if not t.is_meta) < 16 * sum(
            t.nbytes for n, t in own["values"].items() if n in own["state"]
        )


class OnMeta(pl.LightningModule):
    """Built without memory, as a model is that no device holds."""

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        with torch.device("meta"):
            self.model = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 9), nn.LayerNorm(9), nn.Linear(9, 7), nn.Linear(7, 3)
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_on_meta(world: int) -> dict[str, Tensor]:
    devices = tuple(Device("cpu", "n", 2**34, None) for _ in range(world))
    cut = {1: ((0, 5),), 2: ((0, 3), (3, 5))}[world]
    plan = PipelinePlan(
        4,
        2,
        (Pipeline(tuple(range(world)), tuple(Stage(units, 1) for units in cut), 2),),
        ("cpu",) * world,
        tuple(map(str, range(5))),
    )
    strategy = HeteroPipelineStrategy(Cluster("c", devices), plan=plan, summary=False)
    fit = PipeFit(precision="32-true")
    pl.seed_everything(5 + (world > 1 and int(os.environ["RANK"])), verbose=False)
    trainer = make_trainer(fit, strategy=strategy, devices=world)
    module = OnMeta()
    trainer.fit(module, DataLoader(pictures(8, torch.float32), 4))
    return {name: value.detach() for name, value in module.named_parameters() if not value.is_meta}


def test_a_model_made_on_meta_gets_one_devices_values_even_on_ranks_seeded_otherwise(ranks: WarmRanks) -> None:
    (alone,) = ranks.run(1, fit_on_meta, 1, process_group=False)
    assert alone["model.1.weight"].abs().sum() > 0
    parts = ranks.run(2, fit_on_meta, 2, process_group=False)
    assert set(parts[0]) == {f"model.{name}" for name in ("1.weight", "1.bias", "2.weight", "2.bias")}
    for part in parts:
        for name, value in part.items():
            assert torch.equal(value, alone[name]), name


def test_mixed_precision_is_one_devices(ranks: WarmRanks) -> None:
    fit = replace(FIT, precision="bf16-mixed", steps=1)
    (expected,) = ranks.run(1, reference, fit, process_group=False)
    for own in ranks.run(fit.world, run_pipeline, fit, process_group=False):
        for name, gradient in own["gradients"].items():
            assert torch.equal(gradient, expected["gradients"][name]), name


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_units_are_timed_in_the_dtype_that_steps_compute_in(precision: str, dtype: torch.dtype) -> None:
    seen = set()

    class Noted(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            found = super().forward(given)
            if not found.is_meta and not counting[0]:
                seen.add(found.dtype)
            return found

    counting = [False]
    kept_bytes = Rehearsal.kept_bytes

    def counted(self: Rehearsal, samples: int) -> int:
        counting[0] = True
        try:
            return kept_bytes(self, samples)
        finally:
            counting[0] = False

    root = nn.Module()
    root.model = nn.Sequential(Noted(8, 8), Noted(8, 4))
    plugin = MixedPrecision("bf16-mixed", "cpu") if precision == "bf16-mixed" else Precision()
    strategy = HeteroPipelineStrategy(
        Cluster("c", (Device("cpu", "n", 2**34, None),)),
        precision_plugin=plugin,
        parallel_devices=[torch.device("cpu")],
    )
    strategy.cluster_environment = LightningEnvironment()
    call = Call(((_Place(0),), {}), (((2, 8), torch.float32),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsal, "kept_bytes", counted)
        costs, _ = _measured(strategy, Placement(root, *find_model(root)), call, "float32", 4)
    assert seen == {dtype}
    assert [set(unit.timings) for unit in costs.units] == [{"cpu"}] * 2
    assert costs.units[0].output_bytes == 4 * 8


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, given: Tensor) -> Tensor:
        return self.inner(given)


def test_the_largest_child_with_a_chain_is_split() -> None:
    module = nn.Module()
    module.small = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module.large = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    module.other: Any = Unknown()
    assert find_model(module)[0] == "large"
    assert find_model(module, "small")[0] == "small"
    with pytest.raises(UnsupportedError, match=r"module='nope': Module has no submodule of that name"):
        find_model(module, "nope")
    with pytest.raises(UnsupportedError, match=r"Unknown has no known units .* unit_chain"):
        find_model(module, "other")
