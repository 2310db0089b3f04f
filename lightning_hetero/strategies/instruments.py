"""What measures this rank while it trains, and emulates its device where the cluster file says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hetero.cluster import Device
from lightning_hetero.costs import ModelCosts
from lightning_hetero.emulation import Emulation
from lightning_hetero.emulation_report import EmulationReport
from lightning_hetero.models.units import Unit
from lightning_hetero.profiler.marks import UnitListener, UnitMarks
from lightning_hetero.profiler.shared_peak import cuda_peak
from lightning_hetero.profiler.speed import wait_for
from lightning_hetero.profiler.timer import UnitTimer


class ActionListener(UnitListener, Protocol):
    """Is told of units, and of the actions of a pipeline's stages that they run in."""

    def begin_action(self) -> None:
        """A stage has what its next action needs, and runs it."""

    def end_action(self) -> None:
        """It is done."""


class Instruments:
    """Marks on the model's units, a timer of this rank's own seconds, and the emulation of a device.

    Args:
        module: the model, wrapped already.
        units: its units.
        root_device: where it runs.
        rank: this rank.
        emulated: the device to behave like; None runs as fast as the real one does.
        costs: seconds of an emulated device's units, in place of FLOPs / speed.
        recomputed: names of the units whose forward runs again in their backward.
        halves: whether backwards run in two halves.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        root_device: torch.device,
        rank: int,
        *,
        emulated: Device | None = None,
        costs: ModelCosts | None = None,
        recomputed: Collection[str] = (),
        halves: bool = False,
    ) -> None:
        self.module = module
        self.units = tuple(units)
        self.timer = UnitTimer(root_device)
        self._listeners: list[ActionListener] = []
        self._own_peak = cuda_peak(root_device).reader() if root_device.type == "cuda" else None
        self._root_device = root_device
        self._emulation: Emulation | None = None
        self._marks: UnitMarks | None = None
        self._inside = False
        self._device_s = 0.0  # of the emulated device's clock when busy seconds were taken last
        self._queued = False  # whether actions have run since then
        if emulated is not None:
            # the timer stands around the emulation, so that what it reads includes the sleep
            self._emulation = Emulation(
                emulated, rank, units, costs, listeners=[self.timer], recomputed=recomputed, halves=halves
            )
            self._emulation.start(module)
        else:
            self._marks = UnitMarks(units, [self.timer], halves)
            self._marks.attach()

    def listen(self, listener: ActionListener) -> None:
        """Have one more listener told of units and of a stage's actions, beside the strategy's own timer.

        What the strategy takes from the timer is not touched, and the time between a begin and an end includes the
        sleep of an emulated device.
        """
        self._listeners.insert(0, listener)
        for marks in (self._marks, self._emulation):
            if marks is not None:
                marks.listen(listener)

    def unlisten(self, listener: ActionListener) -> None:
        """Have it told no longer."""
        self._listeners = [each for each in self._listeners if each is not listener]
        for marks in (self._marks, self._emulation):
            if marks is not None:
                marks.unlisten(listener)

    @property
    def emulation(self) -> Emulation | None:
        """The emulation of this rank's device; None where it is real."""
        return self._emulation

    @contextmanager
    def action(self, batch: Any, samples: int) -> Iterator[None]:
        """Around what a stage of a pipeline runs, one action after the other as in an accelerator's queue."""
        self._queued = True
        for listener in self._listeners:
            listener.begin_action()
        try:
            with self.step(batch, samples, chained=True):
                yield
        finally:
            for listener in self._listeners:
                listener.end_action()

    def count(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the memory that was made outside of steps."""
        if self._emulation is not None:
            self._emulation.count(self.module, optimizers)

    def at_step(self, steps_done: int) -> None:
        """Say how many optimizer steps are done; emulated devices may change by them."""
        if self._emulation is not None:
            self._emulation.steps_done = steps_done

    @contextmanager
    def step(self, batch: Any = None, samples: int | None = None, chained: bool = False) -> Iterator[None]:
        """Emulate what runs inside; within another such step it changes nothing.

        Args:
            batch: what the step was given; its tensors count as memory.
            samples: in each forward; by default those of the batch.
            chained: whether units follow one another as in an accelerator's queue, over steps too.
        """
        if self._emulation is None or self._inside:
            yield
            if self._marks is not None:
                self._marks.close()
            return
        self._inside = True
        try:
            with self._emulation.step(batch, samples, chained):
                yield
        finally:
            self._inside = False

    @contextmanager
    def half(self, which: str | None) -> Iterator[None]:
        """Within a step: what runs inside is a half of a backward, "I" or "W"; None for anything else."""
        if which is None:
            yield
            return
        listeners: list[UnitListener] = [*self._listeners, self.timer]
        for listener in listeners:
            listener.begin(-1, "backward")
        try:
            with nullcontext() if self._emulation is None else self._emulation.half(which):
                yield
        finally:
            for listener in reversed(listeners):
                listener.end(-1, "backward")

    def resume(self, at_s: float | None) -> None:
        """Say that the device had nothing to do until ``at_s`` (``time.perf_counter``); None: until its next unit."""
        if self._emulation is not None:
            self._emulation.resume(at_s)

    def wait(self) -> None:
        """Wait until the real device has done all that it was given, collectives included."""
        wait_for(self._root_device)

    def take_busy_s(self) -> float:
        """Return the seconds that this rank's own units took since the last call."""
        timed_s = self.timer.take_s()
        if self._emulation is None:
            return timed_s
        device_s, self._device_s = self._emulation.device_s - self._device_s, self._emulation.device_s
        queued, self._queued = self._queued, False
        # in a queue, what the host does between the marks is none of the device's time
        return device_s if queued else timed_s

    def take_peak_bytes(self) -> int | None:
        """Return the peak memory since the last call; None where nothing counts it."""
        if self._own_peak is not None:
            return self._own_peak.take()
        return None if self._emulation is None else self._emulation.take_peak_bytes()

    def peak_bytes(self) -> int | None:
        """Return the peak memory since :meth:`take_peak_bytes`, and go on counting; None where nothing counts it."""
        if self._own_peak is not None:
            return self._own_peak.peek()
        return None if self._emulation is None else self._emulation.peak_bytes()

    def report(self) -> EmulationReport | None:
        """Return what was emulated, or None on real devices."""
        return None if self._emulation is None else self._emulation.report()

    def close(self) -> None:
        """Take the marks off the model."""
        if self._emulation is not None:
            self._emulation.stop()
        if self._marks is not None:
            self._marks.detach()
