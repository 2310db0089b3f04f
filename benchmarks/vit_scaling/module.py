"""The LightningModules, the same for every arm."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.hetero_speedup.model import shard
from benchmarks.vit_scaling.shapes import Shape


class Classifier(LightningModule):
    """Mean cross-entropy of images by class, or of tokens by the next one.

    Args:
        shape: of the model.
        compile: whether each block is compiled.
    """

    def __init__(self, shape: Shape, compile: bool = False) -> None:
        super().__init__()
        self.model = shape.build()
        if compile:
            for block in self.model.blocks:  # type: ignore[union-attr]
                block.compile()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the loss of inputs (b, ...) and targets (b,) or (b, sequence)."""
        inputs, targets = batch
        logits = self.model(inputs)
        loss = cross_entropy(logits.flatten(0, -2), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class FullyShardedClassifier(Classifier):
    """What a user writes for Lightning's ModelParallelStrategy: FSDP2 on each block and on the root."""

    def configure_model(self) -> None:
        """Shard over the strategy's data-parallel mesh."""
        assert self.device_mesh is not None
        shard(self.model, self.device_mesh["data_parallel"])
