"""Live memory: the bytes of every storage that some tensor still holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hetero.profiler.ops import OpObserver
from lightning_hetero.profiler.shared_peak import SharedPeak


class LiveStorages:
    """Counts each live storage once: those added, and those that operations make while :meth:`observing`.

    Views share their storage, and a storage that was resized to nothing (FSDP2 frees gathered parameters so)
    counts nothing. Storages on the meta device hold no memory and do not count.

    Args:
        on_grow: called as ``on_grow(added_bytes, what)`` after the count grew; ``what`` names the operation,
            or the kind of thing that was added. What it raises comes out of the operation.

    Attributes:
        current_bytes: bytes that are live now. Between recounts it may hold storages that were freed unseen.
        peak_bytes: the most so far, since the start or :meth:`reset_peak`.
    """

    def __init__(self, on_grow: Callable[[int, str], None] | None = None) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self._on_grow = on_grow
        self._live: dict[int, _Entry] = {}

    def add(self, tensors: Iterable[Tensor], what: str = "tensors") -> None:
        """Count the storages of ``tensors``, local ones for a DTensor; none is counted twice."""
        grown = sum(self._see(tensor) for tensor in tensors)
        if grown > 0:
            self._grew(grown, what)

    def add_module(self, module: nn.Module) -> None:
        """Count a module's parameters, their gradients, and its buffers."""
        parameters = list(module.parameters())
        self.add(parameters, "parameters")
        self.add((p.grad for p in parameters if p.grad is not None), "gradients")
        self.add(module.buffers(), "buffers")

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Count an optimizer's state."""
        self.add(tensors_in(list(optimizer.state.values())), "optimizer state")

    def observing(self) -> AbstractContextManager[object]:
        """A context in which the results of all operations are counted."""

        def observe(op: Any, args: Any, kwargs: dict[str, Any], out: Any, began_s: float) -> None:
            self.observe(op, kwargs, out)

        return OpObserver(observe)

    def observe(self, op: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Count what an operation made, or wrote to by ``out=``."""
        if isinstance(out, Tensor):
            grown = self._see(out)
        else:
            grown = sum(self._see(tensor) for tensor in tensors_in(out))
        if "out" in kwargs:
            grown += sum(self._see(tensor) for tensor in tensors_in(kwargs["out"]))
        if grown > 0:
            self._grew(grown, str(op))

    def recount(self) -> int:
        """Ask every live storage for its size; returns and keeps the exact number of live bytes."""
        for entry in list(self._live.values()):
            storage = entry.reference()
            if storage is not None:
                self._resize(entry, storage.nbytes())
        return self.current_bytes

    def shared_peak(self) -> SharedPeak:
        """The peak, for several readers."""
        return SharedPeak(lambda: self.peak_bytes, self.reset_peak)

    def reset_peak(self) -> None:
        """Let the peak begin again at what is live now."""
        self.peak_bytes = self.recount()

    def _grew(self, grown: int, what: str) -> None:
        # FSDP2 frees gathered parameters unseen: a new peak is believed after asking each storage. Peaks
        # stop rising after the first step, and so does the asking.
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.recount())
        if self._on_grow is not None:
            self._on_grow(grown, what)

    def _see(self, tensor: Tensor) -> int:
        """Count a tensor's storage; returns by how many bytes the count grew."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.to_local()
        if tensor.layout is not torch.strided or tensor.is_meta:
            return 0
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return 0  # a fake tensor: DTensor runs an operation on whole shapes, the first time, to see what comes out
        key = id(storage)
        entry = self._live.get(key)
        if entry is None:
            # torch gives a storage one Python object for as long as it lives, so the id is its key and the
            # end of that object is its end.
            entry = self._live[key] = _Entry(weakref.ref(storage, lambda _: self._drop(key)))
        return self._resize(entry, storage.nbytes())

    def _resize(self, entry: _Entry, nbytes: int) -> int:
        grown = nbytes - entry.nbytes
        entry.nbytes = nbytes
        self.current_bytes += grown
        return grown

    def _drop(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self.current_bytes -= entry.nbytes


class _Entry:
    __slots__ = ("nbytes", "reference")

    def __init__(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.reference = reference
        self.nbytes = 0


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
