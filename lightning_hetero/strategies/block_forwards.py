"""Blocks whose forward is compiled, or computed again in backward in place of keeping its activations.

The blocks' ``forward`` is wrapped and not the modules, so that parameters keep their names; what FSDP2 and the marks
hook stays outside, so that in backward nothing is gathered or marked twice::

    FSDP2 gathers | mark | checkpoint( compiled( forward ) ) | mark | FSDP2 frees
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.models.units import Unit


class BlockForwards:
    """Wraps the forward of a model's blocks.

    Args:
        units: the model's units; those marked as blocks are wrapped.
        recompute_every: every n-th block keeps only its input, and computes its forward again in backward with the
            random numbers of the first time; 0 for none.
        compiled: whether ``torch.compile`` compiles each block's forward, for any batch size.

    Attributes:
        recomputed: names of the units that are computed again.
    """

    def __init__(self, units: Sequence[Unit], *, recompute_every: int = 0, compiled: bool = False) -> None:
        blocks = [unit for unit in units if unit.is_block]
        again = blocks[recompute_every - 1 :: recompute_every] if recompute_every else []
        self.recomputed = frozenset(unit.name for unit in again)
        self._changed: list[tuple[nn.Module, Any]] = []
        for unit in blocks:
            forward: Callable[..., Any] = unit.module.forward
            if compiled:
                # shares differ from rank to rank and move: sizes are symbols (0 and 1 stay special to torch)
                forward = torch.compile(forward, dynamic=True)
            if unit.name in self.recomputed:
                forward = _recomputing(forward)
            if forward != unit.module.forward:
                self._changed.append((unit.module, unit.module.__dict__.get("forward")))
                unit.module.__dict__["forward"] = forward

    def close(self) -> None:
        """Give the blocks the forward back that they had."""
        for module, before in self._changed:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
        self._changed.clear()


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # the block's own keywords may have the names of checkpoint's, which looks for devices in what it is given
        return checkpoint(lambda given, named: forward(*given, **named), args, kwargs, use_reentrant=False)

    return run
