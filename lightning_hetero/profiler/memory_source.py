"""How much memory a rank uses: by torch's allocator on CUDA, by live tensors on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hetero.profiler.memory import LiveStorages, tensors_in
from lightning_hetero.profiler.shared_peak import SharedPeak, cuda_peak


class MemorySource(Protocol):
    """Where a rank's bytes are read."""

    kind: str

    def open(self, module: nn.Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Begin to look at a batch."""

    def close(self) -> None:
        """The batch is over."""

    def take_peak_bytes(self) -> int:
        """Return the most that was in use since the last call."""

    def now(self) -> dict[str, int]:
        """Return what is in use now, and what the allocator holds: bytes by name."""


class AllocatorMemory:
    """Torch's CUDA allocator.

    Args:
        device: whose memory.
    """

    kind = "allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = cuda_peak(device).reader()

    def open(self, module: nn.Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Every batch is looked at."""
        self._peak.take()

    def close(self) -> None:
        """Nothing is to be undone."""

    def take_peak_bytes(self) -> int:
        """Return the most that was allocated."""
        return self._peak.take()

    def now(self) -> dict[str, int]:
        """Return allocated, reserved and active bytes; active ones include blocks that another stream still uses."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        names = {"current": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes"}
        return {name: int(stats[key]["all"]["current"]) for name, key in names.items()}


class CountedMemory:
    """Live tensors that an emulation counts already.

    Args:
        storages: those that it counts.
        peak: their peak.
    """

    kind = "counted"

    def __init__(self, storages: LiveStorages, peak: SharedPeak) -> None:
        self._storages, self._peak = storages, peak.reader()

    def open(self, module: nn.Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Every batch is counted."""
        self._peak.take()

    def close(self) -> None:
        """The emulation goes on."""

    def take_peak_bytes(self) -> int:
        """Return the most that was live."""
        return self._peak.take()

    def now(self) -> dict[str, int]:
        """Return live bytes."""
        return {"current": self._storages.recount()}


class SampledMemory:
    """Live tensors, counted in some batches only: every operation is looked at then, which takes time."""

    kind = "counted"

    def __init__(self) -> None:
        self._storages = LiveStorages()
        self._stack = ExitStack()

    def open(self, module: nn.Module, optimizers: Sequence[Optimizer], batch: object) -> None:
        """Count what there is, and what operations make from here on."""
        self.close()
        self._storages = LiveStorages()
        self._storages.add_module(module)
        for optimizer in optimizers:
            self._storages.add_optimizer(optimizer)
        self._storages.add(tensors_in(batch), "the batch")
        self._storages.reset_peak()
        self._stack.enter_context(self._storages.observing())

    def close(self) -> None:
        """Look no longer."""
        self._stack.close()

    def take_peak_bytes(self) -> int:
        """Return the most that was live."""
        peak_bytes = self._storages.peak_bytes
        self._storages.reset_peak()
        return peak_bytes

    def now(self) -> dict[str, int]:
        """Return live bytes."""
        return {"current": self._storages.recount()}
