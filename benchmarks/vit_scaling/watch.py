"""What a rank notes beside its step times: its peak memory, and steps without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_hetero.callbacks.rank_values import gather_objects
from lightning_hetero.callbacks.run_facts import emulation_of
from lightning_hetero.profiler.memory_source import SampledMemory

COUNTED_STEPS = 2
"""the first steps, never timed: operations are looked at one by one; in the second the optimizer has its state"""


class PeakMemory(Callback):
    """Finds each rank's peak memory; must stand before the gate.

    On CPU the bytes of live tensors in the first two steps, on emulated devices what the emulation counts, on CUDA
    torch's allocator.

    Args:
        counts: whether to count on CPU.

    Attributes:
        peak_bytes: of every rank, once the fit has ended; None where nothing was counted.
    """

    def __init__(self, counts: bool) -> None:
        self.peak_bytes: list[int | None] = []
        self._counts, self._own = counts, 0
        self._counting: SampledMemory | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count, in the first steps of a real CPU rank."""
        on_cpu = trainer.strategy.root_device.type == "cpu"
        if self._counts and on_cpu and batch_idx < COUNTED_STEPS and emulation_of(trainer) is None:
            self._counting = SampledMemory()
            self._counting.open(pl_module, trainer.optimizers, batch)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """The step is over."""
        if self._counting is not None:
            self._own = max(self._own, self._counting.take_peak_bytes())
            self._counting.close()
            self._counting = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the ranks' peaks together."""
        emulation, device = emulation_of(trainer), trainer.strategy.root_device
        own: int | None = self._own if self._counts else None
        if device.type == "cuda":
            own = torch.cuda.max_memory_allocated(device)
        elif emulation is not None:
            own = emulation.report().peak_bytes
        self.peak_bytes = gather_objects(trainer, own)


class WithoutCommunication(Callback):
    """Takes the communication out of FSDP2's steps: gathers and reductions copy what this rank has itself.

    Copies, buffers, compute and optimizer stay as they are, and so do the small messages by which ranks agree on a
    step. Gradients are wrong: this is for timing alone. Must stand before the gate.
    """

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The strategy has sharded the model, and set its own communication."""
        for module in pl_module.modules():
            if isinstance(module, FSDPModule):
                comm: Any = OwnGather()  # torch's base classes are private
                module.set_custom_all_gather(comm)
                reduction: Any = OwnReduction()
                module.set_custom_reduce_scatter(reduction)


class OwnGather:
    """An all-gather that brings every rank's part from this rank."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Fill ``output_tensor``, shape (ranks * n,), with ``input_tensor``, shape (n,), over and over."""
        for part in output_tensor.view(-1, input_tensor.numel()):
            if part.data_ptr() != input_tensor.data_ptr():  # FSDP2 has put this rank's own in its place
                part.copy_(input_tensor.view(-1))


class OwnReduction:
    """A reduce-scatter that keeps the first part of this rank's gradients."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor``, shape (n,), from ``input_tensor``, shape (ranks * n,)."""
        output_tensor.copy_(input_tensor.view(-1)[: output_tensor.numel()].view_as(output_tensor))
