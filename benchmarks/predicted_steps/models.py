"""The models of the settings, each an unchanged LightningModule, and what they train on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hetero_speedup.model import DigitClassifier, ViTSize, digit_loader
from lightning_hetero.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class GPTSize:
    """Size of the transformer for text.

    Args:
        depth: number of blocks.
        width: embedding width.
        heads: attention heads.
        context: tokens of a sample.
        vocabulary: tokens that there are.
    """

    depth: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    vocabulary: int = 256

    def build(self) -> GPT:
        """Return the model with fresh weights."""
        return GPT(GPTConfig(self.vocabulary, self.context, self.width, self.depth, self.heads))


Size = ViTSize | GPTSize


class TextModel(LightningModule):
    """A plain LightningModule that predicts the next token."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.model = size.build()

    def training_step(self, batch: tuple[Tensor], batch_index: int) -> Tensor:
        """Return the mean cross-entropy of tokens ``(b, context + 1)``."""
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def module_of(size: Size) -> LightningModule:
    """The module that trains a model of this size."""
    return DigitClassifier(size) if isinstance(size, ViTSize) else TextModel(size)


def loader_of(size: Size, batch_size: int, global_batch: int, steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """What it trains on: scanned digits, or tokens drawn at random; enough for so many global batches."""
    if isinstance(size, ViTSize):
        return digit_loader(batch_size, global_batch, steps)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocabulary, (global_batch * steps, size.context + 1), generator=drawn)
    return DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True)
