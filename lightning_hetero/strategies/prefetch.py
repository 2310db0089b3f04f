"""When each block's parameters are gathered: explicit prefetch lists, and gathers that wait for gradients.

In a backward of blocks 2, 1, 0, with two all-gathers in flight::

    BACKWARD_PRE    gather 1 | compute 2 | reduce 2 | gather 0 | compute 1 | reduce 1 | compute 0 | reduce 0
    BACKWARD_POST              compute 2 | gather 1 | reduce 2 | compute 1 | gather 0 | reduce 1 | compute 0 | reduce 0
    NONE                       compute 2 | reduce 2 | gather 1 | compute 1 | reduce 1 | gather 0 | compute 0 | reduce 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_hetero.models.units import Unit
from lightning_hetero.strategies.options import ShardingOptions
from lightning_hetero.strategies.overlap import OverlappedReduceScatter
from lightning_hetero.strategies.sharding import parameters_within


def order_gathers(
    root: nn.Module,
    units: Sequence[Unit],
    options: ShardingOptions,
    reduce_scatter: OverlappedReduceScatter | None,
    *,
    roomy: bool = False,
    planned_by_two: bool = False,
) -> None:
    """Have each block gather others ahead, in forward and in backward, as the options say.

    On gloo a rank that is early waits in the next collective, block by block, unless that was issued long before: with
    room for it, all are, and ranks meet once a step. What disturbs one of them for a moment then costs nobody.

    Args:
        root: the sharded model.
        units: its units; those marked as blocks gather each other ahead, in their order.
        options: ``backward_prefetch``, ``forward_prefetch`` and ``limit_all_gathers``.
        reduce_scatter: reduces gradients on gloo, where nothing runs ahead unless it is asked for; None on NCCL, where
            FSDP2's own prefetch is kept if it does what the options say.
        roomy: whether all blocks' parameters stay gathered from forward to backward anyway, and their gradients have
            room beside them: then nothing limits what is in flight, unless the options do.
        planned_by_two: whether memory is planned with two reductions in flight, which then stay so: emulated devices,
            whose memory is held against their plan.
    """
    modules: list[FSDPModule] = [module for module in root.modules() if isinstance(module, FSDPModule)]
    blocks: list[FSDPModule] = [u.module for u in units if u.is_block and isinstance(u.module, FSDPModule)]
    on_gloo = reduce_scatter is not None
    unlimited = options.gathers_ahead is None or (roomy and on_gloo and options.limit_all_gathers is None)
    ahead = len(blocks) if unlimited else options.gathers_ahead or 0
    if reduce_scatter is not None and roomy and not planned_by_two:
        reduce_scatter.in_flight = len(modules)
    when = options.backward if ahead else "NONE"
    for module in modules:
        module.set_modules_to_forward_prefetch([])
        # a list with a module that is gathered already turns FSDP2's own prefetch off
        module.set_modules_to_backward_prefetch([] if when == "BACKWARD_PRE" else [module])
    for index, block in enumerate(blocks):
        if options.gathers_forward(on_gloo):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        if when == "BACKWARD_PRE" and (on_gloo or ahead > 1):
            block.set_modules_to_backward_prefetch(_before(blocks, index, ahead))
    if on_gloo or when == "BACKWARD_POST":
        shared = reduce_scatter or OverlappedReduceScatter()
        places = {block: index for index, block in enumerate(blocks)}
        for module in modules:
            after = _before(blocks, places.get(module, 0), ahead) if when == "BACKWARD_POST" else []
            comm: Any = UnitReduceScatter(shared, _trained_dtype(module), after)  # torch's base class is private
            module.set_custom_reduce_scatter(comm)


class UnitReduceScatter:
    """One unit's reduce-scatter, by a comm that all units share.

    Args:
        shared: reduces.
        dtype: of the unit's sharded parameters. FSDP2 casts a result of another type at once, so it is waited for;
            None where nothing of the unit is trained.
        gather_before: units whose gather is issued when this unit's gradients are there, before they are reduced.
    """

    def __init__(
        self, shared: OverlappedReduceScatter, dtype: torch.dtype | None, gather_before: Iterable[FSDPModule] = ()
    ) -> None:
        self._shared = shared
        self._dtype = dtype
        self._gather_before = list(gather_before)
        self._has_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer. FSDP2 asks for two: one to copy gradients into, and one for their sum.

        When it asks for the first, gradients are there and the stream is still the one that computes. (In the call
        itself it is the stream of reductions, whose memory a gather must not use.)
        """
        self._has_input = not self._has_input
        if self._has_input:
            for module in self._gather_before:
                module.unshard(async_op=True)
        return self._shared.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Start the reduction; end it too, unless it may overlap."""
        self._shared(output_tensor, input_tensor, group, op, async_op)
        if output_tensor.dtype != self._dtype:
            self._shared.wait()


def _before(blocks: Sequence[FSDPModule], index: int, count: int) -> list[FSDPModule]:
    """Return the ``count`` blocks before one, as backward meets them."""
    return list(reversed(blocks[max(0, index - count) : index]))


def _trained_dtype(module: Any) -> torch.dtype | None:
    """Return the type of the trained parameters that FSDP2 gathers with ``module``; it takes one type only."""
    wrapped: nn.Module = module
    inner = parameters_within(wrapped)
    return next((p.dtype for p in wrapped.parameters() if p.requires_grad and p not in inner), None)
