"""What the presets take, and the loss that they are trained with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.errors import HeteroError
from lightning_hetero.models.presets import PRESETS, ViTConfig


def preset_inputs(
    name: str, samples: int = 1, *, sequence: int | None = None, device: torch.device | str = "meta"
) -> list[Tensor]:
    """Example inputs of a preset.

    Args:
        name: a key of ``PRESETS``.
        samples: of the batch.
        sequence: tokens per sample of a GPT; by default its whole context.
        device: where they are; on meta they have no values, elsewhere they are zero.

    Returns:
        Images of shape (samples, 3, size, size), or token numbers of shape (samples, sequence).

    Raises:
        HeteroError: for a name that is not known, a sequence beyond the context, or one for a ViT.
    """
    if name not in PRESETS:
        raise HeteroError(f"the model preset {name!r} is not known: give one of {', '.join(PRESETS)}")
    config = PRESETS[name].config
    if isinstance(config, ViTConfig):
        if sequence is not None:
            raise HeteroError(f"sequence is {sequence}, and {name} takes images: leave it out")
        return [torch.zeros(samples, 3, config.image_size, config.image_size, device=device)]
    length = config.context if sequence is None else sequence
    if not 1 <= length <= config.context:
        raise HeteroError(f"sequence is {length}: {name} takes 1 to {config.context} tokens")
    return [torch.zeros(samples, length, dtype=torch.int64, device=device)]


def class_loss(logits: Any) -> Tensor:
    """Cross-entropy of logits (..., classes) with random classes, in their dtype: ViTs by image, GPTs by token."""
    rows = logits.flatten(0, -2)
    targets = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(rows, targets)
