"""hetero_auto plans both ways, takes the faster, and says why."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import TimingPoint, UnitTiming
from lightning_hetero.errors import HeteroError, InfeasibleError
from lightning_hetero.plan import Pipeline, PipelinePlan, ShardPlan, Stage
from lightning_hetero.strategies import HeteroAutoStrategy, HeteroFSDPStrategy, HeteroPipelineStrategy
from lightning_hetero.strategies.auto import decide
from lightning_hetero.strategies.pipe.planning import _pooled
from tests.harness import WarmRanks
from tests.pipe_fits import Pictures, pictures

SLOW_LINK = Link(bandwidth_bytes_per_s=2e5, latency_s=1e-3)


def shard(seconds: float) -> ShardPlan:
    return ShardPlan(8, (4, 4), ((0, 1),), ("a", "a"), predicted_step_s=seconds)


def pipe(seconds: float) -> PipelinePlan:
    pipeline = Pipeline((0, 1), (Stage((0, 1)), Stage((1, 2))), 2)
    return PipelinePlan(8, 4, (pipeline,), ("a", "a"), ("x", "y"), predicted_step_s=seconds)


def test_the_faster_one_is_taken_with_the_reason() -> None:
    assert decide(shard(2.0), pipe(1.0)) == (
        True,
        "hetero_pipe, since its step is predicted to take 1 s, and that of hetero_fsdp 2 s",
    )
    assert decide(shard(1.0), pipe(2.0))[0] is False
    assert decide(shard(1.0), pipe(1.0))[0] is False


def test_the_one_that_fits_is_taken() -> None:
    missing = InfeasibleError("rank 0 lacks 5 bytes\nand more")
    assert decide(missing, pipe(9.0)) == (True, "hetero_pipe, since hetero_fsdp does not fit: rank 0 lacks 5 bytes")
    assert decide(shard(9.0), missing)[0] is False
    with pytest.raises(HeteroError, match=r"neither hetero_fsdp nor hetero_pipe fits"):
        decide(missing, missing)


def fit(link: Link | None, manual: bool = False, again: bool = False) -> tuple[str, str, int]:
    pl.seed_everything(0, verbose=False)
    devices = tuple(Device("core", node, 2**33, None) for node in ("one", "two"))
    strategy = HeteroAutoStrategy(Cluster("c", devices, between_nodes=link), global_batch_size=8, summary=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        num_nodes=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module: Any = Pictures(drop=0.0)
    module.automatic_optimization = not manual
    loader = DataLoader(pictures(16, torch.float32), 4)
    trainer.fit(module, loader)
    if again:
        other = Pictures(depth=5, drop=0.0)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(other, loader)
        assert trainer.strategy.assembly.placement.root is other  # type: ignore[attr-defined]
    return type(trainer.strategy).__name__, strategy.reason, trainer.global_step


def test_over_a_slow_link_it_runs_as_a_pipeline_and_so_does_another_module_after_it(ranks: WarmRanks) -> None:
    for name, reason, steps in ranks.run(2, fit, SLOW_LINK, False, True, process_group=False):
        assert name == HeteroPipelineStrategy.__name__
        assert reason.startswith("hetero_pipe, since its step is predicted to take ")
        assert steps == 4


def test_the_name_is_known() -> None:
    trainer = pl.Trainer(strategy="hetero_auto", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, HeteroAutoStrategy)
    trainer = pl.Trainer(strategy="hetero_pipe", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, HeteroPipelineStrategy)


def plain_fit() -> tuple[str, str]:
    pl.seed_everything(0, verbose=False)
    devices = tuple(Device("core", "one", 2**33, None) for _ in range(2))

    class Whole(Pictures):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.net(images.flatten(1)), labels)

        def __init__(self) -> None:
            super().__init__()
            self.model = None
            self.brightness = self.temperature = None
            self.net = Layered()

    strategy = HeteroAutoStrategy(Cluster("c", devices), global_batch_size=8, summary=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Whole(), DataLoader(pictures(16, torch.float32), 4))
    return type(trainer.strategy).__name__, strategy.reason


class Layered(torch.nn.Module):
    """A model that looks at values: nothing can cut it into units."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 8), torch.nn.Linear(8, 3)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.one(pixels)
        return self.two(hidden if float(hidden.detach().sum()) > -1e9 else -hidden)


def test_a_model_that_cannot_be_split_is_sharded(ranks: WarmRanks) -> None:
    for name, reason in ranks.run(2, plain_fit, process_group=False):
        assert name == HeteroFSDPStrategy.__name__
        assert reason.startswith("hetero_fsdp, since the model cannot be split into stages: ")


def test_a_model_whose_samples_take_no_time_in_the_noise_can_be_planned() -> None:
    """Where more samples took no longer, no line says what one takes: the largest size's seconds do, as a whole."""
    flat = [TimingPoint(1, 2e-3, 3e-3), TimingPoint(8, 2e-3, 3e-3)]
    falling = [TimingPoint(1, 2e-3, 3e-3), TimingPoint(8, 1.6e-3, 2.4e-3)]
    own = {"a": UnitTiming.fitted(flat), "b": UnitTiming.fitted(falling)}
    assert sum(each.forward_per_sample_s + each.backward_per_sample_s for each in own.values()) == 0
    found = _pooled(["core"], [own], [1.0])["core"]
    assert found["a"].forward_per_sample_s == pytest.approx(2e-3 / 8)
    assert found["b"].backward_per_sample_s == pytest.approx(2.4e-3 / 8)
    assert found["a"].forward_fixed_s == found["b"].backward_fixed_s == 0
    growing = UnitTiming.fitted([TimingPoint(1, 2e-3, 3e-3), TimingPoint(8, 4e-3, 6e-3)])
    assert _pooled(["core"], [{"a": growing}], [1.0])["core"] == {"a": growing}
