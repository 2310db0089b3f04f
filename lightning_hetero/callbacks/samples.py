"""How many samples a training batch has on this rank, under any strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.data import extract_batch_size


def step_samples(trainer: pl.Trainer, batch: Any) -> int:
    """Samples of the training batch at hand that go through this rank.

    Under hetero_fsdp those of its share (0 where it only takes part), under hetero_pipe those of its pipeline, else
    those that Lightning finds in the batch.

    Args:
        trainer: in a training step.
        batch: of this rank.
    """
    strategy: Any = trainer.strategy
    if hasattr(strategy, "batch_samples") and hasattr(strategy, "pipeline_index"):
        return int(strategy.plan.split(strategy.batch_samples())[strategy.pipeline_index()])
    if hasattr(strategy, "step_samples"):
        return int(strategy.step_samples())
    return int(extract_batch_size(batch))
