"""Make a CPU rank behave like a device of the cluster file: as slow, and with as much memory.

After each unit's real forward and backward the rank sleeps until the unit has taken its target: the FLOPs of
that very call over the device's speed, or the seconds that a costs file gives for the device's type. Sleeping
costs no CPU, so there may be more ranks than cores. What an emulation says is a rehearsal of a plan, never a
measurement of the device.

Deadlines are absolute: a sleep that woke late shortens what comes next, so that totals stay true::

    unit        |--compute--|----sleep----|~late|                  target of the first unit: up to "~"
    next unit                                   |--compute--|--|   ends where the targets' sum does

So do units without FLOPs (norms, embeddings), and the overruns of units shorter than a millisecond, spread
over the units that follow. Waiting for others never does: collectives run between the marks, where no clock
runs. A longer unit whose real compute overran its target is counted as late and not made up for.

A stage of a pipeline is emulated as an accelerator with a queue (``step(chained=True)``): its host launches ahead, so
that what Python does between two units takes no time of the device's, unless the next one's inputs were waited for::

    device      |---unit---|---unit---|  idle    |---unit---|
    host         launch, sleep | launch, sleep | wait |                ``resume`` says when the wait was over
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hetero.cluster import Device
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.emulation_report import EmulationReport, PhaseTally
from lightning_hetero.errors import ClusterError, EmulatedOutOfMemoryError, HeteroError, raise_all
from lightning_hetero.models.units import Unit
from lightning_hetero.profiler.flops import op_flops
from lightning_hetero.profiler.marks import Phase, UnitListener, UnitMarks
from lightning_hetero.profiler.memory import LiveStorages, tensors_in
from lightning_hetero.profiler.ops import OpObserver
from lightning_hetero.units import format_bytes

_SPIN_S = 60e-6
"""A sleep ends this long before its deadline (Linux wakes some 55 us late); the rest is waited for awake."""

_AWAKE_S = 1e-3
"""A shorter wait is spent awake: who gives up a CPU that others want gets it back a time slice (some 3 ms) later."""

_SHORT_S = 1e-3
"""Units with a shorter target are not timed one by one: scheduling and dispatch alone take that long."""

_LAG_S = 5e-3
"""How far the host may be behind in a chain of units too short to be timed before they count as late."""

_REPAID = 0.01
"""Share of a unit's target by which it is shortened, at most, for the sake of units too short to be timed."""

OUTSIDE = "outside units"
"""Name in reports of operations with FLOPs that ran in no unit; each takes its own FLOPs / speed."""


class Emulation:
    """One rank's emulated device.

    ::

        emulation = Emulation(device, rank, find_units(module))
        emulation.start(module, optimizers)           # after wrapping with DDP or FSDP2
        for batch in loader:
            with emulation.step(batch):               # around forward, backward and optimizer step
                ...
        emulation.stop()
        print(late_line([emulation.report()]))        # lightning_hetero.emulation_report; None: all were in time

    Args:
        device: the device to behave like; its ``actual_speed_flops_per_s`` is the speed.
        rank: this rank, named in errors.
        units: the model's units.
        costs: seconds per unit and device type, in place of FLOPs / speed.
        account_memory: whether going over ``device.memory_bytes`` is an error.
        listeners: told of units' begins and ends as well, around the emulation: the time between includes the
            sleep.
        recomputed: names of the units whose forward runs again in their backward. FLOPs of it are seen as they run;
            by costs, such a backward takes its own seconds and those of the forward.
        halves: whether backwards run in two halves, as with zero-bubble schedules.

    Attributes:
        device_s: seconds that units took the device so far, as its own clock would say: their targets, and by how much
            they were late. What the host does in units that take the device no time is not in it.
        hidden_total_s: seconds so far by which chained units ran for longer than their host was between their marks
            (an exported model's operations have none);
            less than zero where the host was there for longer, as in units that take the device no time.

    Raises:
        ClusterError: the device has no speed and there are no costs.
        HeteroError: the costs lack a unit or this device type; lists all that is missing.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        units: Sequence[Unit],
        costs: ModelCosts | None = None,
        account_memory: bool = True,
        listeners: Sequence[UnitListener] = (),
        recomputed: Collection[str] = (),
        halves: bool = False,
    ) -> None:
        self.device = device
        self.rank = rank
        self.units = tuple(units)
        self._recomputed = frozenset(recomputed)
        self.storages = LiveStorages(self._check_memory) if account_memory else None
        self.peak = None if self.storages is None else self.storages.shared_peak()
        self._own_peak = None if self.peak is None else self.peak.reader()
        self._timings = None if costs is None else _timings(self.units, costs, device.type)
        if costs is None and device.actual_speed_flops_per_s is None:
            raise ClusterError(
                f"rank {rank} ({device.type}) has no speed to emulate: give one, such as 6 GFLOP/s, or a costs file"
            )
        self._marks = UnitMarks(self.units, [*listeners, self], halves)
        self._backward_share = 1.0
        self._tallies: dict[tuple[str, Phase], PhaseTally] = {}
        self._open: tuple[int, Phase] | None = None
        self._began_s = 0.0
        self._flops = 0
        self._peak_bytes = 0
        self._chained = False
        self._chain_s: float | None = None  # where the next unit of a chain begins; None: where its host begins it
        self.hidden_total_s = 0.0
        self.device_s = 0.0
        self._overslept_s = 0.0
        self._owed_s = 0.0
        self._overruns: list[tuple[PhaseTally, float]] = []
        self._samples: int | None = None
        self._active = False
        self.steps_done = 0  # of the optimizer: what the device's schedule counts by

    def start(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Attach to the model, after any wrapping, and count what it holds already.

        Args:
            module: parameters, gradients and buffers are counted, of every rank its own shards.
            optimizers: whose state is counted.

        Raises:
            EmulatedOutOfMemoryError: these alone do not fit.
        """
        self._marks.attach()
        self.count(module, optimizers)

    def count(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        """Count what was made outside of steps, such as a restored optimizer state; once each."""
        if self.storages is not None:
            self.storages.add_module(module)
            for optimizer in optimizers:
                self.storages.add_optimizer(optimizer)

    def listen(self, listener: UnitListener) -> None:
        """Have one more listener told of units, around the emulation, and around those that listen already."""
        self._marks.listen(listener)

    def unlisten(self, listener: UnitListener) -> None:
        """Have it told no longer."""
        self._marks.unlisten(listener)

    def stop(self) -> None:
        """Detach from the model. What was reported so far stays."""
        self._marks.detach()

    @contextmanager
    def step(self, batch: object = None, samples: int | None = None, chained: bool = False) -> Iterator[None]:
        """Emulate what runs inside: forward, backward, optimizer step, collectives; training or not.

        Args:
            batch: what the step was given; its tensors count as memory.
            samples: samples in each forward, for costs; by default the first dimension of the batch's first
                tensor.
            chained: whether units follow one another as in the queue of an accelerator, over steps too: a unit begins
                where the one before was to end, or where :meth:`resume` says, and what Python does in between takes
                no time of the device's.

        Raises:
            EmulatedOutOfMemoryError: at the operation whose result does not fit any more.
        """
        if self._active:
            raise RuntimeError("an emulated step is running already: steps do not nest")
        tensors = list(tensors_in(batch))
        if samples is None:
            samples = next((tensor.shape[0] for tensor in tensors if tensor.ndim > 0), None)
        self._samples = samples
        if self.storages is not None:
            self.storages.add(tensors, "the batch")
        self._active, self._chained = True, chained
        device_s = self.device_s
        if not chained:
            self._chain_s = None
        try:
            with OpObserver(self._observe):
                yield
            self._marks.close()
        finally:
            self._active = False
            self._marks.close()  # after an exception, without sleeping
            self._end_step(self.device_s - device_s)

    def resume(self, at_s: float | None) -> None:
        """Tell chained steps that the device had nothing to do.

        Args:
            at_s: until then, on the clock of ``time.perf_counter``: the next unit's inputs came from another rank; None
                until its host begins the next unit.
        """
        self._chain_s = at_s

    def speed_flops_per_s(self) -> float:
        """The device's speed now, asked at every unit."""
        return (self.device.actual_speed_flops_per_s or 0.0) * self.device.speed_factor(self.steps_done)

    def peak_bytes(self) -> int | None:
        """The most that was live since :meth:`take_peak_bytes`; ``None`` where memory is not accounted."""
        return None if self._own_peak is None else self._own_peak.peek()

    def take_peak_bytes(self) -> int | None:
        """The most that was live since the last call; ``None`` where memory is not accounted."""
        if self._own_peak is None:
            return None
        peak_bytes = self._own_peak.take()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return peak_bytes

    def report(self) -> EmulationReport:
        """What ran so far."""
        peak_bytes = None if self._own_peak is None else max(self._peak_bytes, self._own_peak.peek())
        from_costs = self._timings is not None
        return EmulationReport.of(self.rank, self.device, self._tallies, from_costs=from_costs, peak_bytes=peak_bytes)

    def begin(self, unit_index: int, phase: Phase) -> None:
        """A unit's compute begins. Called by the marks; outside of steps nothing is emulated."""
        self._open = (unit_index, phase)
        self._flops = 0
        self._began_s = time.perf_counter()

    def end(self, unit_index: int, phase: Phase) -> None:
        """A unit's compute is done: sleep for what is left of its target. Called by the marks."""
        opened, self._open = self._open, None
        if not self._active or opened is None:
            return
        if self._timings is None:
            target_s = self._flops / self.speed_flops_per_s()
        else:
            target_s = self._target_from_costs(unit_index, phase) / self.device.speed_factor(self.steps_done)
        self._pace(self.units[unit_index].name, phase, self._began_s, target_s)

    def _target_from_costs(self, unit_index: int, phase: Phase) -> float:
        if self._samples is None:
            raise HeteroError(
                "emulation by a costs file needs the number of samples, and the batch holds no tensor: "
                "call step(batch, samples=...)"
            )
        assert self._timings is not None
        timing = self._timings[unit_index]
        if phase == "forward":
            return timing.forward_s(self._samples)
        again_s = timing.forward_s(self._samples) if self.units[unit_index].name in self._recomputed else 0.0
        return (timing.backward_s(self._samples) + again_s) * self._backward_share

    @contextmanager
    def half(self, which: str) -> Iterator[None]:
        """Within a step: what runs inside is one half of a backward.

        By costs each half takes half of the backward's seconds, which is what planning takes them for; by FLOPs it
        takes its own.

        Args:
            which: "I", in which units are marked as ever, or "W", which is paced as a whole.
        """
        began_s = time.perf_counter()
        self._backward_share = 0.5
        try:
            yield
            self._marks.close()  # a unit whose backward is open still is this half's
            if which == "W" and self._timings is not None:
                target_s = sum(self._target_from_costs(index, "backward") for index in range(len(self.units)))
                factor = self.device.speed_factor(self.steps_done)
                self._pace("gradients of parameters", "backward", began_s, target_s / factor)
        finally:
            self._backward_share = 1.0

    def _observe(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, began_s: float) -> None:
        if self.storages is not None:
            self.storages.observe(op, kwargs, out)
        if self._timings is not None:
            return  # counting takes time, and costs say what units take
        flops = op_flops(op, args, kwargs, out)
        if self._open is not None:
            self._flops += flops
        elif flops:
            self._pace(OUTSIDE, "forward", began_s, flops / self.speed_flops_per_s())

    def _pace(self, name: str, phase: Phase, began_s: float, target_s: float) -> None:
        """Let ``target_s`` seconds have passed since ``began_s``, less what is overdue."""
        if self._chained:
            tally = self._tallies.setdefault((name, phase), PhaseTally())
            self._pace_chained(tally, began_s, target_s, has_marks=name != OUTSIDE)
            return
        done_s = time.perf_counter()
        overrun_s = done_s - began_s - target_s
        repaid_s = min(self._owed_s, _REPAID * target_s)
        deadline_s = began_s + target_s - self._overslept_s - repaid_s
        tally = self._tallies.setdefault((name, phase), PhaseTally())
        if overrun_s <= 0:
            _sleep_until(deadline_s)
            self._overslept_s = time.perf_counter() - deadline_s
            self._owed_s -= repaid_s
        elif target_s >= _SHORT_S:
            tally.add_late(overrun_s)
            self.device_s += overrun_s
            self._overslept_s = 0.0  # made up for, the CPU would only stay behind
        else:
            self._owed_s += overrun_s
            if target_s > 0:
                self._overruns.append((tally, overrun_s))
        self.device_s += target_s
        tally.add(target_s, time.perf_counter() - began_s)

    def _pace_chained(self, tally: PhaseTally, began_s: float, target_s: float, *, has_marks: bool) -> None:
        """Let a unit end ``target_s`` seconds after the end of the one before in its chain."""
        start_s = began_s if self._chain_s is None else min(self._chain_s, began_s)
        deadline_s = start_s + target_s
        late_s = time.perf_counter() - deadline_s
        device_s = target_s
        self._chain_s = deadline_s
        if late_s <= 0:
            _sleep_until(deadline_s)
        elif late_s > (0.0 if target_s >= _SHORT_S else _LAG_S):
            tally.add_late(late_s)
            device_s += late_s
            self._chain_s = None
        ended_s = time.perf_counter()
        self.device_s += device_s
        self.hidden_total_s += device_s - (ended_s - began_s if has_marks else 0.0)
        tally.add(target_s, ended_s - start_s)

    def _end_step(self, device_s: float) -> None:
        """Count short units as late where they were not made up for. The next step owes nothing.

        A millisecond is scheduling, but not where the whole step took the device less.
        """
        if min(self._owed_s, sum(overrun_s for _, overrun_s in self._overruns)) > min(_SHORT_S, device_s):
            for tally, overrun_s in self._overruns:
                tally.add_late(overrun_s)
        self._overslept_s = self._owed_s = 0.0
        self._overruns.clear()

    def _check_memory(self, added_bytes: int, what: str) -> None:
        storages, limit = self.storages, self.device.memory_bytes
        if storages is None or storages.current_bytes <= limit or storages.recount() <= limit:
            return
        free = max(0, limit - (storages.current_bytes - added_bytes))
        who = f"rank {self.rank} (emulated {self.device.type}, {format_bytes(limit)})"
        raise EmulatedOutOfMemoryError(
            f"{who} is out of memory: {what} wants {format_bytes(added_bytes)} ({added_bytes} bytes), "
            f"{format_bytes(free)} ({free} bytes) are free: give the rank fewer samples, or shard the model "
            "over more ranks"
        )


def _timings(units: Sequence[Unit], costs: ModelCosts, device_type: str) -> list[UnitTiming]:
    by_name = {cost.name: cost for cost in costs.units}
    problems = []
    found = []
    for unit in units:
        cost = by_name.get(unit.name)
        if cost is None:
            problems.append(f"unit {unit.name!r} has no costs: profile this model, or add it")
        elif device_type not in cost.timings:
            known = ", ".join(cost.timings) or "none"
            problems.append(f"unit {unit.name!r} has no timing for device type {device_type!r} (has: {known})")
        else:
            found.append(cost.timings[device_type])
    raise_all(HeteroError, f"costs of model {costs.model!r} cannot emulate a {device_type}", problems)
    return found


def _sleep_until(deadline_s: float) -> None:
    left_s = deadline_s - time.perf_counter()
    if left_s > _AWAKE_S:
        time.sleep(left_s - _SPIN_S)
    while time.perf_counter() < deadline_s:
        pass
