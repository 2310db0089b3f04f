"""Batches of many forms, and modules that take them: mappings with texts, a user's own type, padded sequences."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.pipe_runs import Small


class Named(Small):
    """Takes batches of a tokenizer's kind of dict, with texts in them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) is UserDict
        assert len(batch["name"]) == len(batch["x"]) == len(batch["more"]["index"])
        for name, index in zip(batch["name"], batch["more"]["index"], strict=True):
            assert name == f"sample {int(index)}"
        loss = F.cross_entropy(self.model(batch["more"]["twice"][1]), batch["y"])
        self.log("train_loss", loss)
        return loss


@dataclass
class Batch:
    """A batch of a user's own type."""

    x: Tensor
    y: Tensor
    kind: str = "points"


class Typed(Small):
    """Takes such batches."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        assert batch.kind == "points"
        loss = F.cross_entropy(self.model(batch.x), batch.y)
        self.log("train_loss", loss)
        return loss


class Padded(Small):
    """A mean over items, of which samples have different numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, mask = batch
        losses = F.cross_entropy(self.model(x).transpose(1, 2), y, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss


def pad(samples: Any) -> Any:
    """Sequences of one to four copies of a sample."""
    x, y = default_collate(samples)
    lengths = (x[:, 0].abs() * 10).long() % 4 + 1
    mask = (torch.arange(4) < lengths[:, None]).double()
    noise = torch.arange(4, dtype=x.dtype)[None, :, None]
    return x[:, None] * (1 + noise), y[:, None].expand(-1, 4).contiguous(), mask


def mapped(samples: Any) -> Any:
    return UserDict(default_collate(samples))


def typed(samples: list[Any]) -> Any:
    return Batch(*default_collate(samples))


def items(batch: Any) -> Tensor:
    return batch[2].sum()  # type: ignore[no-any-return]
