"""How a sharded model's gradients become sums over all ranks, once a step and beside the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_hetero.ownership import Ownership
from lightning_hetero.strategies.crossing import Crossing
from lightning_hetero.strategies.groups import ShardGroups
from lightning_hetero.strategies.micro_batches import EarlierGradients
from lightning_hetero.strategies.overlap import OverlappedReduceScatter
from lightning_hetero.strategies.sharding import use_reduce_scatter


class GradientReduction:
    """Reduces within this rank's shard group at every backward, and across groups at the last one of a step.

    Args:
        module: the sharded model, at rest.
        groups: its layout.
        device: of this rank; on CPU, reductions in the group run beside the backward by our own means.

    Attributes:
        parameters: the shards. Between forward and backward ``module.parameters()`` may be the gathered ones.
        reduce_scatter: what reduces within the group beside the backward; None where streams do so.
    """

    def __init__(self, module: nn.Module, groups: ShardGroups, device: torch.device) -> None:
        self.parameters = list(module.parameters())
        self._module = module
        self._is_native = groups.is_native
        self.reduce_scatter: OverlappedReduceScatter | None = None
        if device.type == "cpu":
            self.reduce_scatter = OverlappedReduceScatter()
            use_reduce_scatter(module, self.reduce_scatter)
        self._crossing: Crossing | None = None
        if groups.crosses:
            shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
            ownership = Ownership.of_shards(shapes, groups.replicas)
            self._crossing = Crossing(
                module, ownership, groups.for_owners(ownership), groups.rank, running=self._reductions_running
            )

    def _reductions_running(self) -> int:
        return 0 if self.reduce_scatter is None else self.reduce_scatter.running

    @property
    def crosses(self) -> bool:
        """Whether gradients cross between groups by ownership."""
        return self._crossing is not None

    def begin_forward(self) -> None:
        """The forward of a step, or of its last micro-batch, begins."""
        if self._crossing is not None:
            self._crossing.begin()

    @contextmanager
    def backward(self, *, is_last: bool, complete: bool = False) -> Iterator[None]:
        """Run one backward inside; gradients are summed when it ends.

        Args:
            is_last: whether the step follows: gradients cross between groups.
            complete: whether gradients that are there already have crossed (manual optimization may call backward
                several times): they are left out of this crossing. All of it then comes after the backward: which
                forwards a backward belongs to is not known.
        """
        reduction, crossing = self.reduce_scatter, self._crossing
        earlier = EarlierGradients(self.parameters) if complete and crossing is not None else None
        if earlier is not None:
            earlier.set_aside()
        if reduction is not None:
            # FSDP2 reads what it accumulates onto, or reduces again, at once
            reduction.overlap = not self._is_native and all(p.grad is None for p in self.parameters)
        if crossing is not None:
            crossing.is_last = is_last and not complete
            if complete:
                crossing.begin()
        if self._is_native:
            _set_requires_all_reduce(self._module, is_last)
        try:
            yield
            if reduction is not None:
                reduction.wait()
            if crossing is not None and is_last:
                crossing.finish()
            if earlier is not None:
                earlier.add()
        finally:
            if reduction is not None:
                reduction.forget()
            if crossing is not None:
                crossing.forget()

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._crossing is not None:
            self._crossing.close()


def _set_requires_all_reduce(module: nn.Module, required: bool) -> None:
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(required)


def clip_by_one_norm(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients by the norm that rank 0 finds, so that replicas stay bitwise equal.

    Every group holds the whole model, so its own norm is the global one, but for rounding, which depends on the layout.

    Args:
        parameters: those of an optimizer; each group's shards make up the model once.
        max_norm: as for ``torch.nn.utils.clip_grad_norm_``, whose rule this is.

    Returns:
        The norm.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    dist.broadcast(norm, src=0)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for gradient in gradients:
            local: Any = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
    return norm
