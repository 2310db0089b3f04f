"""When this rank ran which unit, and which action of a pipeline's schedule, in one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from lightning_hetero.profiler.step_timeline import Stamp

UnitSpan = tuple[str, str, float, float]
"""a unit's name, its phase, and the seconds at which it begins and ends"""

ActionSpan = tuple[str, float, float]
"""an action as it prints (``2F0``), and the seconds at which it begins and ends"""


class SpanRecorder:
    """Notes begins and ends, in seconds from :meth:`start`. A listener of unit marks and of a stage's actions.

    On CPU by the host's clock; on CUDA by events on the current stream, which :meth:`stop` waits for.

    Args:
        device: where units run.
        action: what a pipeline's stage runs at the moment, as it prints; None where there is no pipeline.
    """

    def __init__(self, device: torch.device, action: Callable[[], str | None] = lambda: None) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._action = action
        self._begin: Stamp = 0.0
        self._open_units: dict[tuple[int, str], Stamp] = {}
        self._units: list[tuple[int, str, Stamp, Stamp]] = []
        self._open_action: tuple[str, Stamp] | None = None
        self._actions: list[tuple[str, Stamp, Stamp]] = []
        self.step_s = 0.0
        self.actions: list[ActionSpan] = []

    def start(self) -> None:
        """Time 0 is now; a device has done what it was given before."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self._begin = self._now()

    def stop(self) -> None:
        """The step has ended; read what was noted."""
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self.step_s = self._since(end)
        self.actions = [(name, self._since(begin), self._since(stop)) for name, begin, stop in self._actions]

    def unit_spans(self, names: Sequence[str]) -> list[UnitSpan]:
        """The units' spans, in the order of their ends.

        Args:
            names: of the units, by index.
        """
        return [(names[index], phase, self._since(begin), self._since(end)) for index, phase, begin, end in self._units]

    def begin(self, unit_index: int, phase: str) -> None:
        """A unit begins ``phase``; what has no index is half of a backward, which its action stands for."""
        if unit_index >= 0:
            self._open_units[unit_index, phase] = self._now()

    def end(self, unit_index: int, phase: str) -> None:
        """It ends."""
        begin = self._open_units.pop((unit_index, phase), None)
        if begin is not None:
            self._units.append((unit_index, phase, begin, self._now()))

    def begin_action(self) -> None:
        """A stage begins to run something."""
        name = self._action()
        self._open_action = None if name is None else (name, self._now())

    def end_action(self) -> None:
        """It is done."""
        if self._open_action is not None:
            self._actions.append((*self._open_action, self._now()))
            self._open_action = None

    def _since(self, stamp: Stamp) -> float:
        if isinstance(stamp, torch.cuda.Event):
            assert isinstance(self._begin, torch.cuda.Event)
            return float(self._begin.elapsed_time(stamp)) / 1e3
        assert isinstance(self._begin, float)
        return stamp - self._begin

    def _now(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
