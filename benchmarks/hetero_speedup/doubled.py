"""Makes a rank really compute everything twice: a slower device without sleeping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn


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

    It makes the unit's output, so FSDP2, whose own hooks are on what the unit returns, has unsharded the unit's
    parameters when it runs, and keeps them until the unit's real backward is through.
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
    and the random state alone, and takes part in no collective. It is inside the units' own forward, not in
    hooks around it, so that whoever times a unit finds it slow, as on a slow device.

    Args:
        ranks: the ranks that compute twice.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = frozenset(ranks)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Slow the units down, before the strategy sees the model."""
        if trainer.global_rank in self.ranks:
            double(vit_units(pl_module.model))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the units their own forward back."""
        if trainer.global_rank in self.ranks:
            undouble(vit_units(pl_module.model))


def vit_units(vit: Any) -> list[nn.Module]:
    """Return the modules of a timm ViT that hold its work, in order."""
    return [vit.patch_embed.proj, *vit.blocks, vit.norm, vit.head]


def double(units: Iterable[nn.Module]) -> None:
    """Make each unit compute forward and backward twice."""
    for unit in units:
        unit.forward = MethodType(_twice, unit)


def undouble(units: Iterable[nn.Module]) -> None:
    """Take :func:`double` back."""
    for unit in units:
        del unit.forward


def _twice(unit: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    # of the class: FSDP2 puts a class of its own under the unit, with the same forward
    forward = type(unit).forward
    output: Tensor = forward(unit, *args, **kwargs)
    second_args = tuple(_detached(a) for a in args)
    second_kwargs = {name: _detached(a) for name, a in kwargs.items()}
    # a second draw of dropout masks must not shift the draws of the units that follow
    with torch.random.fork_rng(devices=[]), _parameter_aliases(unit) as aliases:
        # views: hooks that others put on a submodule's inputs may not stand on leaves (torch refuses)
        second_output = forward(
            unit, *(_viewed(a) for a in second_args), **{name: _viewed(a) for name, a in second_kwargs.items()}
        )
    if not output.requires_grad:
        return output
    inputs = [a for a in (*second_args, *second_kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
    inputs += aliases
    return _SecondBackward.apply(output, _SecondGraph(inputs, second_output))  # type: ignore[no-any-return]


@contextmanager
def _parameter_aliases(unit: nn.Module) -> Iterator[list[Tensor]]:
    """Let the unit compute with leaves of its parameters' storages, so that no hook on a parameter is met twice."""
    places = [
        (module, name, parameter)
        for module in unit.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    aliases = {parameter: _detached(parameter) for _, _, parameter in places}
    for module, name, parameter in places:
        module._parameters[name] = aliases[parameter]
    try:
        yield list(aliases.values())
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _viewed(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) else value
