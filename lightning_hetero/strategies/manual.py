"""Manual optimization: backward and step inside ``training_step``, which FSDP2 takes for one forward.

FSDP2 ends a backward for the root's own parameters by a hook on what the forward returned, and gives them back sharded.
Within a step there is nothing returned yet, and the user's code may go on to use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from torch.distributed.fsdp import FSDPModule

from lightning_hetero.strategies import torch_adapter


class ManualSteps:
    """Keeps the root's parameters whole and up to date while a manual step runs."""

    def __init__(self) -> None:
        self._root: FSDPModule | None = None

    @contextmanager
    def step(self, module: pl.LightningModule) -> Iterator[None]:
        """Run a training step inside; with automatic optimization this does nothing."""
        if module.automatic_optimization or not isinstance(module, FSDPModule):
            yield
            return
        self._root = module
        try:
            yield
        finally:
            self._root = None

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
            torch_adapter.reshard(self._root)
            self._root.unshard()
