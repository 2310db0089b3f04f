"""The models: those of the Frontier study and a GPT, at their own size or scaled down to what a CPU can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.models.inputs import class_loss
from lightning_hetero.models.presets import PRESETS, ViTConfig
from lightning_hetero.profiler.analytic import analytic_costs
from lightning_hetero.profiler.model_flops import model_flops

GPT_NAME = "gpt_1_4b"
VITS = tuple(name for name, preset in PRESETS.items() if isinstance(preset.config, ViTConfig))
SMALL_IMAGE = 112  # pixels: half the study's, and so a quarter of its tokens


@dataclass(frozen=True)
class Shape:
    """A preset, with width and depth divided.

    Args:
        preset: a key of ``PRESETS``.
        width_divisor: what the width is divided by, and the MLP's, the heads, a GPT's vocabulary and context with it.
        depth_divisor: what the number of blocks is divided by.

    Raises:
        HeteroError: for a name that is not known, or a divisor below 1.
    """

    preset: str
    width_divisor: int = 1
    depth_divisor: int = 1

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise HeteroError(f"the model {self.preset!r} is not known: give one of {', '.join(PRESETS)}")
        for name in ("width_divisor", "depth_divisor"):
            if getattr(self, name) < 1:
                raise HeteroError(f"{name} is {getattr(self, name)}: give 1, for the model's own size, or more")

    @property
    def scaled(self) -> bool:
        """Whether it is smaller than the preset."""
        return self.width_divisor > 1 or self.depth_divisor > 1

    @property
    def config(self) -> ViTConfig | GPTConfig:
        """Its sizes; the width is rounded to whole heads, and there is at least one of everything."""
        full, by = PRESETS[self.preset].config, self.width_divisor
        heads = max(1, round(full.heads / by))
        width = heads * max(1, round(full.width / by / heads))
        depth = max(1, round(full.depth / self.depth_divisor))
        if isinstance(full, GPTConfig):
            mlp = None if full.mlp_width is None else max(1, round(full.mlp_width / by))
            vocabulary, context = max(1, full.vocabulary // by), max(1, full.context // by)
            return replace(
                full, width=width, depth=depth, heads=heads, mlp_width=mlp, vocabulary=vocabulary, context=context
            )
        swiglu = max(1, round(full.swiglu_width / by))
        image = full.image_size if by == 1 else SMALL_IMAGE
        return replace(full, width=width, depth=depth, heads=heads, swiglu_width=swiglu, image_size=image)

    def build(self, device: str | None = None) -> nn.Module:
        """The model, on torch's default device unless said otherwise."""
        config = self.config
        with torch.device(device if device is not None else torch.get_default_device()):
            model: nn.Module = config.build() if isinstance(config, ViTConfig) else GPT(config)
        return model

    def inputs(self, samples: int, device: str = "meta") -> Tensor:
        """Images (samples, 3, size, size), or tokens (samples, context); zeros."""
        config = self.config
        if isinstance(config, ViTConfig):
            return torch.zeros(samples, 3, config.image_size, config.image_size, device=device)
        return torch.zeros(samples, config.context, dtype=torch.int64, device=device)

    def describe(self) -> dict[str, Any]:
        """What the results say of it."""
        config, full = self.config, PRESETS[self.preset].config
        return {
            "scaled_down": self.scaled,
            "width_divisor": self.width_divisor,
            "depth_divisor": self.depth_divisor,
            "config": vars(config),
            "full_config": vars(full),
            "parameters": parameters(self),
            "flops_per_sample": flops_per_sample(self),
        }


@cache
def flops_per_sample(shape: Shape) -> float:
    """FLOPs of one sample's forward and backward, counted on meta; a multiply-add counts as 2."""
    return model_flops(shape.build("meta"), [shape.inputs(1)]).model


@cache
def parameters(shape: Shape) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in shape.build("meta").parameters())


@cache
def costs(shape: Shape, dtype: str = "float32") -> ModelCosts:
    """FLOPs and bytes of its units, counted on meta."""
    return analytic_costs(shape.build("meta"), [shape.inputs(2)], name=shape.preset, dtype=dtype, loss=class_loss)


def local_batch(shape: Shape, flops: float, most: int = 32) -> int:
    """Samples of a rank whose step is about ``flops``: 1 to ``most``; 32 is what the study took."""
    return max(1, min(most, round(flops / flops_per_sample(shape))))
