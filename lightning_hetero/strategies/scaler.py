"""A loss scaler for fp16 that skips a step on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.strategies import torch_adapter


class SharedGradScaler(torch_adapter.CheckedGradScaler):
    """``torch.amp.GradScaler`` with what it finds shared over all ranks.

    A rank holds its shards of the gradients only, and an infinity in another rank's would be news to it: the one would
    skip the step and the other not, and their scales would part. For sharded gradients torch shares within their
    mesh, which is one shard group; here all ranks of all groups agree.

    Args:
        share: takes a number per rank and returns the largest (a collective over all ranks).
        device: type of the devices, "cuda" or "cpu".
        **kwargs: as for ``torch.amp.GradScaler``.
    """

    def __init__(self, share: Callable[[Tensor], Tensor], device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._share = share

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, share: Callable[[Tensor], Tensor], device: str) -> SharedGradScaler:
        """Return one with the settings of ``scaler``, which has not scaled anything yet."""
        return cls(
            share,
            device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )

    def found_inf(self, found: Collection[Tensor], device: torch.device) -> None:
        """Replace what was found here by what any rank found. Called once per optimizer and step, on every rank."""
        own = torch.zeros((), dtype=torch.float32, device=device)
        for flag in found:
            own = torch.maximum(own, flag.to(device))
        anywhere = self._share(own)
        for flag in found:
            flag.copy_(anywhere)


def share_by_largest(found: Tensor) -> Tensor:
    """Return the largest of all ranks' numbers (a collective)."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found


def scale_loss(plugin: Any, loss: Tensor) -> Tensor:
    """Return the loss as a precision plugin scales it for a backward, where it does."""
    scaler = getattr(plugin, "scaler", None)
    return loss if scaler is None else scaler.scale(loss)


def share_scaler(plugin: Any, device: torch.device) -> None:
    """Have a precision plugin's scaler, where it has one, skip steps on all ranks together."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, SharedGradScaler):
        plugin.scaler = SharedGradScaler.like(scaler, share_by_largest, device.type)
