"""Reduce-scatters that run beside the backward of the next block, where the backend would block.

On NCCL, FSDP2 overlaps them by streams. On gloo a reduce-scatter holds the rank's only thread until the slowest rank
has joined it, once per block. Nothing reads the result before the backward ends (unless gradients accumulate), so it
may be waited for then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed it"""


class OverlappedReduceScatter:
    """FSDP2's interface for a custom reduce-scatter (``FSDPModule.set_custom_reduce_scatter``).

    Args:
        in_flight: reductions that may run at once; each holds one block's gathered gradients.

    Attributes:
        overlap: whether the caller may go on before a reduction has ended. Only while no gradient is accumulated onto:
            FSDP2 adds to it at once.
    """

    def __init__(self, in_flight: int = 2) -> None:
        self.in_flight = in_flight
        self.overlap = False
        self._running: deque[tuple[Any, Tensor]] = deque()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for FSDP2 to copy gradients into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Start the reduction; end it too, unless it may overlap."""
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=True)
        # the buffer must outlive the reduction
        self._running.append((work, input_tensor))
        self.wait(leave=self.in_flight if self.overlap else 0)

    @property
    def running(self) -> int:
        """How many reductions have not been waited for."""
        return len(self._running)

    def wait(self, leave: int = 0) -> None:
        """Wait for all reductions but the ``leave`` last ones."""
        while len(self._running) > leave:
            work, _ = self._running.popleft()
            if work is not None:
                work.wait()

    def forget(self) -> None:
        """Drop what a failed step has left running."""
        self._running.clear()
        self.overlap = False
