"""Seconds that a rank's own units take, communication and waiting left out."""

from __future__ import annotations

import time

import torch


class UnitTimer:
    """Adds up the time between the marks of each unit's forward and backward.

    The marks lie inside FSDP2's collectives, so waiting for others is not counted. On CPU by the host's clock; on CUDA
    by events on the current stream, which are read when asked for.

    Args:
        device: where the units run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._busy_s = 0.0
        self._open: list[tuple[int, str, float | torch.cuda.Event]] = []
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, unit_index: int, phase: str) -> None:
        """Note that a unit begins ``phase``, "forward" or "backward"."""
        self._open.append((unit_index, phase, self._now()))

    def end(self, unit_index: int, phase: str) -> None:
        """Note that it ends; a unit within another (recomputed in its backward) counts once."""
        for position in range(len(self._open) - 1, -1, -1):
            if self._open[position][:2] == (unit_index, phase):
                started = self._open[position][2]
                del self._open[position:]
                if not self._open:
                    self._add(started, self._now())
                return

    def take_s(self) -> float:
        """Return the busy seconds since the last call and start from zero."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
            self._busy_s += sum(first.elapsed_time(last) for first, last in self._pairs) / 1e3
            self._pairs.clear()
        self._open.clear()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> None:
        if isinstance(first, float) and isinstance(last, float):
            self._busy_s += last - first
        elif isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
            self._pairs.append((first, last))
