"""What a plan says of memory and time holds for what runs on emulated devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.models.inputs import class_loss
from lightning_hetero.profiler.analytic import analytic_costs
from lightning_hetero.profiler.meta import meta_copy
from lightning_hetero.strategies import HeteroPipelineStrategy
from lightning_hetero.strategies.pipe.stage import Stage
from tests.harness import WarmRanks

SPEEDS = {"fast": 2.0, "slow": 1.0}
BATCH = 32


def model() -> nn.Module:
    """Large enough that Python's small tensors do not count."""
    vit: nn.Module = timm.models.VisionTransformer(
        img_size=32, patch_size=4, in_chans=1, num_classes=10, embed_dim=96, depth=6, num_heads=3
    )
    return vit


def costs(block_ms: float) -> ModelCosts:
    """Counted bytes, and seconds that are given."""
    found = analytic_costs(meta_copy(model()), [torch.zeros(2, 1, 32, 32)], loss=class_loss)
    units = []
    for unit in found.units:
        per_sample = block_ms / 1e3 if unit.is_block else 0.0
        timings = {k: UnitTiming(0.0, per_sample / s, 0.0, 2 * per_sample / s) for k, s in SPEEDS.items()}
        units.append(replace(unit, timings=timings))
    return replace(found, units=tuple(units))


class Images(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(kinds: tuple[str, ...], block_ms: float, options: dict[str, Any]) -> dict[str, Any]:
    devices = tuple(Device(kind, "n", 2**30, SPEEDS[kind] * 1e9) for kind in kinds)
    in_flight: dict[int, int] = {}
    plain = Stage.forward

    def forward(self: Stage, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        in_flight[self.index] = max(in_flight.get(self.index, 0), self.in_flight)
        return found

    Stage.forward = forward  # type: ignore[method-assign]
    strategy = HeteroPipelineStrategy(
        Cluster("c", devices, emulate=True), costs=costs(block_ms), global_batch_size=BATCH, summary=False, **options
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=len(kinds),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(3 * BATCH, 1, 32, 32), torch.zeros(3 * BATCH, dtype=torch.int64))
    trainer.fit(Images(), DataLoader(data, BATCH))
    assert strategy.plan is not None
    return {"plan": strategy.plan, "summaries": strategy.summaries, "in_flight": in_flight}


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (("fast", "fast", "slow"), {"pipelines": 1, "micro_batch_size": 4, "schedule": "1f1b"}),
        pytest.param(
            ("fast", "slow"), {"pipelines": 1, "micro_batch_size": 8, "schedule": "gpipe"}, marks=pytest.mark.slow
        ),
        pytest.param(("fast", "fast", "slow"), {"pipelines": 2, "micro_batch_size": 4}, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "gpipe", "two pipelines"],
)
def test_accounted_peaks_are_those_of_the_plan(
    ranks: WarmRanks, kinds: tuple[str, ...], options: dict[str, Any]
) -> None:
    found = ranks.run(len(kinds), fit, kinds, 0.2, options, process_group=False)
    plan = found[0]["plan"]
    for summary, planned in zip(found[0]["summaries"], plan.predictions, strict=True):
        assert planned.peak_memory_bytes == pytest.approx(summary.peak_bytes, rel=0.05), f"rank {summary.rank}"
    for rank, own in enumerate(found):
        for pipeline in plan.pipelines:
            for stage in pipeline.stages_of(rank):
                depth = pipeline.stages[stage].warmup if plan.schedule == "1f1b" else pipeline.micro_batches
                assert own["in_flight"][stage] <= depth
