"""Manual optimization: backward and step inside ``training_step``, which FSDP2 takes for one forward.

FSDP2 ends a backward for the root's own parameters by a hook on what the forward returned, and gives them back sharded.
Within a step there is nothing returned yet, and the user's code may go on to use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_hetero.strategies import torch_adapter

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


class ManualSteps:
    """Keeps the root's parameters whole and up to date while a manual step runs."""

    def __init__(self) -> None:
        self._root: FSDPModule | None = None
        self._shards: dict[str, nn.Parameter] = {}

    def know(self, module: pl.LightningModule) -> None:
        """Note the shards of a module at rest: those are what optimizers have."""
        self._shards = dict(module.named_parameters())

    @contextmanager
    def step(self, module: pl.LightningModule) -> Iterator[None]:
        """Run a training step inside; with automatic optimization this does nothing."""
        if module.automatic_optimization or not isinstance(module, FSDPModule):
            yield
            return
        self._root = module
        for name in _TOGGLES:
            # an attribute of the instance hides the method
            module.__dict__[name] = self._then_freeze(getattr(module, name), module)
        try:
            yield
        finally:
            self._root = None
            for name in _TOGGLES:
                module.__dict__.pop(name, None)

    def _then_freeze(self, toggle: Callable[..., None], module: pl.LightningModule) -> Callable[..., None]:
        """Have what freezes an optimizer's parameters, the shards, freeze the gathered ones as well."""

        def toggled(*args: Any, **kwargs: Any) -> None:
            toggle(*args, **kwargs)
            for name, parameter in module.named_parameters():
                shard = self._shards.get(name, parameter)
                if parameter.requires_grad != shard.requires_grad:
                    parameter.requires_grad_(shard.requires_grad)

        return toggled

    def end_backward(self) -> None:
        """Reduce the gradients of the root's own parameters; call while reductions are awaited."""
        if self._root is not None:
            torch_adapter.finish_backward(self._root)

    def after_backward(self) -> None:
        """Make the root's own parameters whole again."""
        if self._root is not None:
            self._root.unshard()

    def after_optimizer_step(self) -> None:
        """Gather what the optimizer has changed."""
        if self._root is not None:
            torch_adapter.reshard(cast(nn.Module, self._root))
            self._root.unshard()
