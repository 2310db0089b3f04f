"""From one rank of a pipeline to the others: batches that it reads, what comes out at its end."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.strategies.pipe.nested import found_in, mapped

_FRAME = 2048
"""bytes of the first message: what a batch is made of, which mostly fits"""

_ALIGNED = 16
"""bytes at whose multiples a tensor begins in a message"""


class Hand:
    """Hands values from one rank to the other ranks of its pipeline, over the CPU.

    Args:
        giver: the rank that has them.
        rank: this rank.
        group: a gloo process group of the ranks that take the same values; None where this rank is alone.
    """

    def __init__(self, giver: int, rank: int, group: Any) -> None:
        self._giver, self._rank, self._group = giver, rank, group
        self._under_way: list[tuple[Any, Tensor]] = []  # until they have left
        self._asked: Asked | None = None

    @property
    def alone(self) -> bool:
        """Whether nobody else takes what this rank has."""
        return self._group is None

    @property
    def gives(self) -> bool:
        """Whether this rank gives."""
        return self._rank == self._giver

    def give(self, value: Any) -> Any:
        """Return the giver's ``value`` on every rank (a collective); tensors travel as they are, the rest pickled."""
        if self.alone:
            return value
        if not self.gives:
            return self.ask().take()
        self.hand_on(value)
        return value

    def hand_on(self, value: Any) -> None:
        """Begin to send, on the giver; it goes on, and waits at the next one for what has not left yet."""
        self.end()
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> _Slot:
            tensors.append(tensor)
            return _Slot(tuple(tensor.shape), tensor.dtype, len(tensors) - 1)

        content = pickle.dumps(mapped(value, Tensor, take))
        framed = len(content).to_bytes(8, "little") + content
        sent = [torch.frombuffer(bytearray(framed[:_FRAME].ljust(_FRAME, b"\0")), dtype=torch.uint8)]
        if len(framed) > _FRAME:
            sent.append(torch.frombuffer(bytearray(framed[_FRAME:]), dtype=torch.uint8))
        if tensors:
            sent.append(_packed(tensors))
        self._under_way = [self._broadcast(tensor) for tensor in sent]

    def ask(self) -> Asked:
        """Ask for a value, on the others; what was asked for before comes first, wanted or not."""
        self.end()
        self._asked = Asked(self._broadcast)
        return self._asked

    def go_on(self) -> None:
        """Ask for the rest of what was asked for, if its beginning has come; waits for nothing."""
        if self._asked is not None:
            self._asked.go_on()

    def end(self) -> None:
        """Wait for what is under way."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []
        if self._asked is not None:
            self._asked.take()
            self._asked = None

    def _broadcast(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Begin to give or to take a tensor; (work, tensor)."""
        return dist.broadcast(tensor, self._giver, group=self._group, async_op=True), tensor


class Asked:
    """A value that was asked for: a frame, and where that says so its rest, and tensors.

    Args:
        begin: to take a tensor; returns the work and the tensor.
    """

    def __init__(self, begin: Callable[[Tensor], tuple[Any, Tensor]]) -> None:
        self._begin = begin
        self._work, self._frame = begin(torch.empty(_FRAME, dtype=torch.uint8))
        self._length = 0  # of frame and rest, once the frame has come
        self._rest: tuple[Any, Tensor] | None = None
        self._skeleton: Any = None
        self._slots: list[_Slot] | None = None
        self._packed: tuple[Any, Tensor] | None = None
        self._values: list[Any] = []  # the one that came

    def go_on(self) -> None:
        """Ask for what comes next, as far as that is known; waits for nothing.

        A broadcast may come by way of another rank, which asks for it when it goes on itself: that one may be in a
        collective of the user's that needs this rank.
        """
        if self._slots is None and self._work.is_completed():
            self._ask_for_rest()
            if self._rest is None or self._rest[0].is_completed():
                self._open()

    def take(self) -> Any:
        """Wait for the value; the same each time."""
        if not self._values:
            if self._slots is None:
                self._open()
            self._values.append(self._filled())
        return self._values[0]

    def _ask_for_rest(self) -> None:
        if self._length:
            return
        self._work.wait()
        self._length = 8 + int.from_bytes(self._frame[:8].numpy().tobytes(), "little")
        if self._length > _FRAME:
            self._rest = self._begin(torch.empty(self._length - _FRAME, dtype=torch.uint8))

    def _open(self) -> None:
        self._ask_for_rest()
        framed = self._frame.numpy().tobytes()
        if self._rest is not None:
            work, rest = self._rest
            work.wait()
            framed += rest.numpy().tobytes()
        self._skeleton = pickle.loads(framed[8 : self._length])
        self._slots = found_in(self._skeleton, _Slot)
        if self._slots:
            nbytes = sum(_padded(slot.nbytes) for slot in self._slots)
            self._packed = self._begin(torch.empty(nbytes, dtype=torch.uint8))

    def _filled(self) -> Any:
        if self._packed is None:
            return self._skeleton
        work, packed = self._packed
        work.wait()
        tensors = _unpacked(packed, self._slots or ())
        return mapped(self._skeleton, _Slot, lambda slot: tensors[slot.index])


class _Slot:
    """Stands for a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> None:
        self.shape, self.dtype, self.index = shape, dtype, index

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """All bytes of tensors in one: a message costs as much as many a batch's bytes."""
    packed = torch.zeros(sum(_padded(tensor.nbytes) for tensor in tensors), dtype=torch.uint8)
    at = 0
    for tensor in tensors:
        packed[at : at + tensor.nbytes].copy_(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        at += _padded(tensor.nbytes)
    return packed


def _unpacked(packed: Tensor, slots: Sequence[_Slot]) -> list[Tensor]:
    """The tensors again, as views."""
    found, at = [], 0
    for slot in slots:
        found.append(packed[at : at + slot.nbytes].view(slot.dtype).view(slot.shape))
        at += _padded(slot.nbytes)
    return found
