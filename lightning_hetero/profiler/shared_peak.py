"""A peak that several readers may each begin anew, without taking it from the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from weakref import WeakSet

import torch


class SharedPeak:
    """A counter of a peak that can only be begun anew for all, made one for each reader.

    Args:
        read: returns the most since ``reset``.
        reset: begins anew at what is there now.
    """

    def __init__(self, read: Callable[[], int], reset: Callable[[], None]) -> None:
        self._read, self._reset = read, reset
        self._readers: WeakSet[PeakReader] = WeakSet()

    def reader(self) -> PeakReader:
        """One more reader, that begins now."""
        reader = PeakReader(self)
        reader.take()
        self._readers.add(reader)
        return reader

    def begin_anew(self) -> int:
        """Begin anew; every reader keeps the most until then, which is returned."""
        most = self._read()
        for reader in self._readers:
            reader.note(most)
        self._reset()
        return most

    def read(self) -> int:
        """Return the most since anyone began anew."""
        return self._read()


class PeakReader:
    """Sees a :class:`SharedPeak` as if it were alone."""

    def __init__(self, shared: SharedPeak) -> None:
        self._shared = shared
        self._most = 0

    def note(self, most: int) -> None:
        """Hear of a peak before the counter begins anew."""
        self._most = max(self._most, most)

    def peek(self) -> int:
        """Return the most since the last :meth:`take`, in bytes."""
        return max(self._most, self._shared.read())

    def take(self) -> int:
        """Return the same and begin anew."""
        most = max(self._most, self._shared.begin_anew())
        self._most = 0
        return most


def cuda_peak(device: torch.device) -> SharedPeak:
    """The peak of memory that torch has allocated on a CUDA device; one for all that ask in this process."""
    return _cuda_peak(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_peak(index: int) -> SharedPeak:
    return SharedPeak(lambda: torch.cuda.max_memory_allocated(index), lambda: torch.cuda.reset_peak_memory_stats(index))
