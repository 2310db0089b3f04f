"""Makes a rank really compute everything twice: a slower device without sleeping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class _SecondGraph:
    """The second forward's graph, kept for the second backward."""

    def __init__(self, inputs: list[Tensor], output: Tensor) -> None:
        self.inputs = inputs
        self.output: Tensor | None = output

    def backward(self, gradient: Tensor) -> None:
        """Compute the same gradients as the real backward, and drop them."""
        assert self.output is not None
        # only toward the given tensors: no .grad is touched, no hook of an accumulated gradient runs
        torch.autograd.grad(self.output, self.inputs, gradient, allow_unused=True)
        self.output, self.inputs = None, []


class _SecondBackward(torch.autograd.Function):
    """The identity; its backward runs a second graph's backward first.

    It sits behind the unit's output, so FSDP2, whose own hooks are on what the unit returns, has unsharded
    the unit's parameters when it runs, and keeps them until the unit's real backward is through.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, second: _SecondGraph) -> Tensor:
        ctx.second = second
        return output.clone()  # FSDP2 warns of a view: later in-place work on one would drop its hook

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.second.backward(gradient)
        return gradient, None


class DoubledWork(Callback):
    """Repeats every unit's forward and backward on the ranks that are to be slow.

    Results are bitwise those of a rank without it: the repetition runs on detached inputs, leaves ``.grad``
    and the random state alone, and takes part in no collective. Hooks go on before the strategy wraps the
    model, so that they run while FSDP2 has the unit's parameters in place.

    Args:
        ranks: the ranks that compute twice.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)
        self._handles: list[RemovableHandle] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the hooks on, before the strategy sees the model."""
        if trainer.global_rank in self.ranks and not self._handles:
            self._handles = double(vit_units(pl_module.model))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def vit_units(vit: Any) -> list[nn.Module]:
    """Return the modules of a timm ViT that hold its work, in order."""
    return [vit.patch_embed, *vit.blocks, vit.norm, vit.head]


def double(units: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Make each unit compute forward and backward twice; returns the hooks' handles."""
    return [unit.register_forward_hook(_repeat_forward, with_kwargs=True) for unit in units]


def _repeat_forward(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    second_args = tuple(_detached(a) for a in args)
    second_kwargs = {name: _detached(a) for name, a in kwargs.items()}
    # a second draw of dropout masks must not shift the draws of the units that follow
    with torch.random.fork_rng(devices=[]):
        second_output = unit.forward(*second_args, **second_kwargs)
    if not output.requires_grad:
        return output
    inputs = [a for a in (*second_args, *second_kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
    inputs += [p for p in unit.parameters() if p.requires_grad]
    return _SecondBackward.apply(output, _SecondGraph(inputs, second_output))  # type: ignore[no-any-return]


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
