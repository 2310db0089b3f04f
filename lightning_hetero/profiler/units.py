"""Measure a model's units one by one, so that a model larger than the device can be profiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_hetero.cluster import Device
from lightning_hetero.costs import ModelCosts, TimingPoint, UnitCost, UnitTiming
from lightning_hetero.emulation import Emulation
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.models.units import Unit, find_units, original_class
from lightning_hetero.profiler.analytic import Counted, Loss, costs_of, count_units
from lightning_hetero.profiler.calls import UnitCall
from lightning_hetero.profiler.devices import describe, free_bytes
from lightning_hetero.profiler.meta import fused_attention, materialise
from lightning_hetero.profiler.rehearsal import Computing, Rehearsal
from lightning_hetero.profiler.speed import MATMUL_DTYPES
from lightning_hetero.profiler.structure import settings
from lightning_hetero.units import format_bytes

MICRO_BATCHES = (1, 2, 4)
"""micro-batch sizes that are measured by default, in samples"""

REPEATS = 5
"""timed repeats of each size by default; the median counts"""

Progress = Callable[[int, int, str], None]
"""``progress(done, total, what)``: so many measurements of so many are done, ``what`` comes next"""


def profile_units(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    name: str | None = None,
    dtype: str = "float32",
    device: torch.device | str | None = None,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    repeats: int = REPEATS,
    loss: Loss | None = None,
    wrap: set[type[nn.Module]] | None = None,
    progress: Progress | None = None,
    remark: Callable[[str], None] | None = None,
    emulated: Device | None = None,
    computing: Computing = nullcontext,
) -> ModelCosts:
    """Costs of a model with the seconds of its units on this device.

    The model runs once on the meta device, where FLOPs are counted and the shapes of every unit's inputs are learned.
    Then one unit after another is brought to the device, fed random inputs of these shapes, and its forward and
    backward are timed: the median of the repeats, after a warm-up, by events on CUDA and the clock on CPU. Units that
    are alike (class, shapes, settings) are measured once. What runs between units has no seconds of its own.

    Args:
        model: on meta, or anywhere with its values; it is not changed.
        inputs: examples of what it takes, with the batch first; only shapes and dtypes are used.
        name: of the model in the costs; by default its class.
        dtype: of parameters and compute: "float64", "float32", "bfloat16" or "float16".
        device: where units run; by default CUDA where there is one, else the processor.
        micro_batches: sizes that are measured, in samples. One that does not fit the memory is left out with a
            remark.
        repeats: timed repeats of each size.
        loss: from the output to a loss, for ``loss_bytes``; without one these are 0.
        wrap: as :func:`~lightning_hetero.models.units.find_units` takes it.
        progress: is told before each measurement and at the end.
        remark: is told what is shared and what was left out.
        emulated: a device that this processor behaves like meanwhile: the seconds are then that device's, emulated.
        computing: makes a context around each timed forward, such as autocast's; kept bytes are those without it.

    Returns:
        Costs with the seconds under the device's type, the measured points beside each fit; kept activation bytes are
        those of this device's kernels.

    Raises:
        HeteroError: listing bad arguments; or naming a unit of which no size fits the device, with the bytes.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check(where, micro_batches, repeats)
    if where == torch.device("cuda"):  # without an index: the current one
        where = torch.device("cuda", torch.cuda.current_device())
    counted = count_units(model, inputs, dtype=dtype, loss=loss, wrap=wrap)
    costs = costs_of(counted, name or type(model).__name__, inputs, dtype)
    runs = _Runs(counted, model, where, dtype, sorted(set(micro_batches)), repeats, wrap, emulated, computing)
    kind, own_name = describe(where)
    measured = runs.measure(progress or (lambda done, total, what: None), remark or (lambda text: None))
    units = tuple(_with_measured(cost, measured.get(cost.name), kind) for cost in costs.units)
    return replace(costs, units=units, devices={kind: own_name})


@dataclass(frozen=True)
class _Measured:
    """What one unit took; per sample where it says so."""

    points: tuple[TimingPoint, ...]
    more_kept_bytes: int
    """per sample, by how much this device's kernels keep more than what was counted on meta"""

    def times(self, calls: int) -> _Measured:
        points = tuple(
            TimingPoint(point.samples, calls * point.forward_s, calls * point.backward_s) for point in self.points
        )
        return _Measured(points, calls * self.more_kept_bytes)


def _with_measured(cost: UnitCost, measured: _Measured | None, kind: str) -> UnitCost:
    if measured is None:  # never called: it takes no time
        return replace(cost, timings={kind: UnitTiming(0.0, 0.0, 0.0, 0.0)})
    kept_bytes = max(0, cost.kept_activation_bytes + measured.more_kept_bytes)
    return replace(cost, timings={kind: UnitTiming.fitted(measured.points)}, kept_activation_bytes=kept_bytes)


def _check(device: torch.device, micro_batches: Sequence[int], repeats: int) -> None:
    problems = []
    if device.type not in ("cuda", "cpu"):
        problems.append(f"device is {device}: units are timed on cuda or cpu; without one, count them (--analytic)")
    elif device.type == "cuda" and not torch.cuda.is_available():
        problems.append(f"device is {device}, and torch sees no CUDA device: give cpu, or count them (--analytic)")
    if not micro_batches or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in micro_batches):
        problems.append(f"micro_batches are {list(micro_batches)}: give whole numbers of samples, each 1 or more")
    if repeats < 1:
        problems.append(f"repeats is {repeats}: give 1 or more")
    raise_all(HeteroError, "units cannot be measured", problems)


class _Runs:
    """The measurements of one model on one device."""

    def __init__(
        self,
        counted: Counted,
        model: nn.Module,
        device: torch.device,
        dtype: str,
        sizes: list[int],
        repeats: int,
        wrap: set[type[nn.Module]] | None,
        emulated: Device | None,
        computing: Computing,
    ) -> None:
        self._emulated, self._computing = emulated, computing
        self.counted, self.device, self.sizes, self.repeats = counted, device, sizes, repeats
        self.dtype = MATMUL_DTYPES[dtype]
        # The units with their values, where there are some.
        self.units = find_units(model, wrap)
        self.alike: dict[object, list[int]] = {}
        for index in counted.calls.order:
            signature = _signature(counted.units[index].module, counted.calls.first[index])
            self.alike.setdefault(signature, []).append(index)

    def measure(self, progress: Progress, remark: Callable[[str], None]) -> dict[str, _Measured]:
        """By unit name, what each unit that is called took."""
        found: dict[str, _Measured] = {}
        total = len(self.alike) * len(self.sizes)
        for place, members in enumerate(self.alike.values()):
            first = self.units[members[0]].name
            if len(members) > 1:
                last = self.units[members[-1]].name
                remark(f"{len(members)} units are alike, {first} to {last}: {first} is measured for all of them")

            def step(done: int, samples: int, base: int = place * len(self.sizes), name: str = first) -> None:
                progress(base + done, total, f"{name}, {samples} sample{'s' if samples > 1 else ''}")

            measured = self._measure_one(members[0], step, remark)
            for index in members:
                found[self.units[index].name] = measured.times(self.counted.calls.times[index])
        progress(total, total, "done")
        return found

    def _measure_one(self, index: int, step: Callable[[int, int], None], remark: Callable[[str], None]) -> _Measured:
        fitting, problem = self._fitting_sizes(index, remark)
        if not fitting:
            raise HeteroError(problem)
        # The seed, so that every run of the profiler sees the same values.
        generator = torch.Generator(self.device).manual_seed(index)
        module = materialise(self.units[index].module, self.device, self.dtype, generator)
        module.train(self.units[index].module.training)
        emulation = self._emulation(module)
        around = nullcontext if emulation is None else lambda samples: emulation.step(samples=samples)
        now = None if emulation is None else lambda: emulation.device_s
        rehearsal = Rehearsal(
            module, self.counted.calls.first[index], self.device, generator, around, now, self._computing
        )
        points: list[TimingPoint] = []
        more = 0
        try:
            for done, samples in enumerate(fitting):
                step(done, samples)
                try:
                    more = (rehearsal.kept_bytes(samples) - self._kept_on_meta(index, samples)) // samples
                    points.append(rehearsal.time(samples, self.repeats))
                except torch.OutOfMemoryError as error:
                    problem = f"unit {self.units[index].name!r} with {samples} samples does not fit {self.device}"
                    if not points:
                        raise HeteroError(f"{problem}: give smaller micro-batches, or count it (--analytic)") from error
                    remark(f"{problem}: the sizes from {samples} on are left out")
                    break
        finally:
            if emulation is not None:
                emulation.stop()
            del rehearsal, module
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return _Measured(tuple(points), more)

    def _emulation(self, module: nn.Module) -> Emulation | None:
        """What makes a unit take as long as on the emulated device, where there is one."""
        if self._emulated is None:
            return None
        emulation = Emulation(self._emulated, 0, [Unit("unit", module, True)], account_memory=False)
        emulation.start(module)
        return emulation

    def _kept_on_meta(self, index: int, samples: int) -> int:
        """What the unit by itself keeps on meta: in the model it may keep more of its inputs, or less."""
        module, call = self.counted.units[index].module, self.counted.calls.first[index]
        with fused_attention():
            return Rehearsal(module, call, torch.device("meta")).kept_bytes(samples)

    def _fitting_sizes(self, index: int, remark: Callable[[str], None]) -> tuple[list[int], str]:
        """Sizes whose estimated bytes the device has, and what to say where there is none."""
        unit, tally = self.units[index], self.counted.tallies[index]
        parameters = sum(parameter.numel() for parameter in unit.module.parameters())
        kept = self.counted.per_sample(tally.kept_bytes + 2 * tally.output_bytes)
        free, fitting, problem = free_bytes(self.device), [], ""
        for samples in self.sizes:
            # Parameters and gradients; activations and, at worst, as much again of their gradients.
            needed = 2 * parameters * self.dtype.itemsize + 2 * kept * samples
            if needed <= free:
                fitting.append(samples)
            elif not problem:
                problem = (
                    f"unit {unit.name!r} with {samples} samples needs {format_bytes(needed)}, {self.device} has "
                    f"{format_bytes(free)} free ({needed - free} bytes are missing)"
                )
        if problem and fitting:
            remark(f"{problem}: sizes from there on are left out")
        return fitting, f"{problem}: give smaller micro-batches, or count it (--analytic)"


def _signature(module: nn.Module, call: UnitCall) -> object:
    """What makes two units cost the same: classes, shapes, settings, and what they are called with."""
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for source in (module.named_parameters(), module.named_buffers())
        for name, tensor in source
    )
    return original_class(module), tensors, tuple(settings(module)), repr(module), repr(call)
