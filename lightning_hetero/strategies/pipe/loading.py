"""What the ranks of a pipeline read: the same batches, which one of them reads and hands on to the others."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hetero.collate import MicroBatches
from lightning_hetero.strategies.loss_check import cut


class Hand:
    """Hands batches from the rank that reads them to the other ranks of its pipeline, over the CPU.

    Args:
        reader: the rank that reads.
        rank: this rank.
        group: a gloo process group of the ranks that take the same batches; None where this rank is alone.
    """

    def __init__(self, reader: int, rank: int, group: Any) -> None:
        self._reader, self._rank, self._group = reader, rank, group
        self._under_way: list[tuple[Any, Tensor]] = []  # until they have left

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return self._rank == self._reader

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the reader's ``loader``, on every rank; the others do not touch theirs."""
        if self._group is None:
            yield from loader
            return
        if self.reads:
            for batch in loader:
                self.give((batch,))
                yield batch
            self.give(None)
            return
        while True:
            found = self.give(None)
            if found is None:
                return
            yield found[0]

    def give(self, value: Any) -> Any:
        """Return the reader's ``value`` on every rank (a collective); tensors travel as they are, the rest pickled."""
        if self._group is None:
            return value
        return self._hand_on(value) if self.reads else self._receive()

    def _hand_on(self, value: Any) -> Any:
        """Begin to send; the reader goes on, and waits at the next one for what has not left yet."""
        self._finish()
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> _Slot:
            tensors.append(tensor)
            return _Slot(tuple(tensor.shape), tensor.dtype, len(tensors) - 1)

        content = torch.frombuffer(bytearray(pickle.dumps(_mapped(value, Tensor, take))), dtype=torch.uint8)
        sent = [torch.tensor([len(content)]), content]
        # one for each type, since each costs as much as its messages
        sent += [torch.cat([t.detach().cpu().reshape(-1) for t in members]) for members in _by_type(tensors)]
        self._under_way = [(dist.broadcast(t, self._reader, group=self._group, async_op=True), t) for t in sent]
        return value

    def _receive(self) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, self._reader, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, self._reader, group=self._group)
        skeleton = pickle.loads(content.numpy().tobytes())
        tensors = [torch.empty(slot.shape, dtype=slot.dtype) for slot in found_in(skeleton, _Slot)]
        for members in _by_type(tensors):
            flat = torch.empty(sum(member.numel() for member in members), dtype=members[0].dtype)
            dist.broadcast(flat, self._reader, group=self._group)
            for member, part in zip(members, torch.split(flat, [m.numel() for m in members]), strict=True):
                member.set_(part.view_as(member))  # type: ignore[call-overload]  # no copy
        return _mapped(skeleton, _Slot, lambda slot: tensors[slot.index])

    def _finish(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []


def _by_type(tensors: list[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


class _Slot:
    """Stands for a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> None:
        self.shape, self.dtype, self.index = shape, dtype, index


def found_in(value: Any, kind: type) -> list[Any]:
    """All objects of a kind in nested containers, in order."""
    found: list[Any] = []

    def note(item: Any) -> Any:
        found.append(item)
        return item

    _mapped(value, kind, note)
    return found


def _mapped(value: Any, kind: type, function: Any) -> Any:
    if isinstance(value, MicroBatches):
        return MicroBatches(_mapped(item, kind, function) for item in value)
    return apply_to_collection(value, kind, function)


def shapes_of(value: Any) -> Any:
    """What the shapes of all that follows from a batch follow from: those of its tensors, hashable."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return tuple((str(key), shapes_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(shapes_of(item) for item in value)
    return type(value).__name__


def cut_whole(batch: Any, samples: int, sizes: Iterable[int]) -> MicroBatches:
    """Cut a batch that was collated whole, by the first dimension of its tensors."""
    found, at = MicroBatches(), 0
    for size in sizes:
        found.append(cut(batch, samples, at, at + size))
        at += size
    return found
