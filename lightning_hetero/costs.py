"""What every unit of a model costs: the file between profiling and planning."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.records import Record, boolean, integer, number, read_json, shown, text, tuple_of, write_json

SCHEMA = 1

_NEXT_STEP = 'give the path of a costs file, or write one with "lightning-hetero profile" or ModelCosts.save(path)'
_TIMING_KEYS = ("forward_fixed_s", "forward_per_sample_s", "backward_fixed_s", "backward_per_sample_s")
_UNIT_KEYS = (
    "name",
    "parameters",
    "forward_flops",
    "backward_flops",
    "kept_activation_bytes",
    "output_bytes",
)
_UNIT_OPTIONAL = ("timings", "is_block", "shared_parameters", "inner_gradient_bytes", "largest_parameter")


@dataclass(frozen=True)
class TimingPoint:
    """What was measured with one micro-batch size.

    Args:
        samples: of the micro-batch.
        forward_s: seconds of a forward, a median of several.
        backward_s: the same of a backward.
    """

    samples: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class UnitTiming:
    """Measured seconds of one unit on one type of device, as fixed + per sample of the micro-batch.

    Args:
        forward_fixed_s: seconds of a forward that do not depend on the samples.
        forward_per_sample_s: seconds that each sample adds to it.
        backward_fixed_s: the same of a backward.
        backward_per_sample_s: the same of a backward.
        points: what the line was fitted to; empty where that is not known. Planning uses the line.
    """

    forward_fixed_s: float
    forward_per_sample_s: float
    backward_fixed_s: float
    backward_per_sample_s: float
    points: tuple[TimingPoint, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(self.points))

    @classmethod
    def fitted(cls, points: Sequence[TimingPoint]) -> UnitTiming:
        """The line through measured points that is closest to them in relative terms.

        Neither part is negative: where the closest line would have a negative one, it is zero. A single size tells
        nothing about the fixed part, which is then zero.

        Args:
            points: at least one; sizes of 1 sample and more.

        Raises:
            HeteroError: if there is no point, or one has no samples or negative seconds.
        """
        problems = [] if points else ["there is no point: measure at least one micro-batch size"]
        problems += [
            f"{point} is not valid: give 1 sample or more, and seconds of 0 or more"
            for point in points
            if point.samples < 1 or point.forward_s < 0 or point.backward_s < 0
        ]
        raise_all(HeteroError, "the seconds of a unit cannot be fitted", problems)
        sizes = [point.samples for point in points]
        forward = _fit(sizes, [point.forward_s for point in points])
        backward = _fit(sizes, [point.backward_s for point in points])
        return cls(*forward, *backward, tuple(points))

    def forward_s(self, samples: int) -> float:
        """Seconds of one forward with a micro-batch of ``samples``."""
        return self.forward_fixed_s + self.forward_per_sample_s * samples

    def backward_s(self, samples: int) -> float:
        """Seconds of one backward with a micro-batch of ``samples``."""
        return self.backward_fixed_s + self.backward_per_sample_s * samples


@dataclass(frozen=True)
class UnitCost:
    """Cost of one unit.

    Args:
        name: the unit's name in the model ("blocks.3").
        parameters: number of parameters; those shared between units (tied weights) count with the first.
        forward_flops: floating-point operations of a forward per sample, a multiply-add counting as 2.
        backward_flops: the same of a backward.
        kept_activation_bytes: bytes per sample that the forward keeps for the backward.
        output_bytes: bytes per sample that are passed on: of the unit's output or, where that is more, of what the
            next unit takes.
        timings: measured seconds by device type; empty where nothing was measured.
        is_block: whether it is one of the repeated blocks that FSDP2 wraps one by one; the others form the root group.
        shared_parameters: number of its parameters that count with an earlier unit (tied weights); a stage without
            that unit needs a copy of them.
        inner_gradient_bytes: bytes per sample of the largest gradient inside the unit, which is there while all that
            the unit keeps is: taken for as large as the largest tensor that it keeps. 0 where it was not counted.
        largest_parameter: elements of its largest parameter, whose gradient is added as a whole; 0 if not known.
    """

    name: str
    parameters: int
    forward_flops: float
    backward_flops: float
    kept_activation_bytes: int
    output_bytes: int
    timings: Mapping[str, UnitTiming] = field(default_factory=dict)
    is_block: bool = True
    shared_parameters: int = 0
    inner_gradient_bytes: int = 0
    largest_parameter: int = 0


@dataclass(frozen=True)
class InputShape:
    """One tensor that a model takes.

    Args:
        shape: of one sample, without the batch dimension.
        dtype: torch's name of it ("float32", "int64").
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model, unit by unit in the order of its forward.

    Args:
        model: name of the model.
        units: at least one unit; names are distinct.
        dtype: of parameters and compute when the seconds and bytes were taken ("float32", "bfloat16", ...).
        loss_bytes: bytes per sample that the loss keeps beside the last output (logits, targets, their gradient).
        inputs: what the model took when its costs were taken; empty where that is not known.
        devices: by device type, what the measured device calls itself ("NVIDIA H200").

    Raises:
        HeteroError: if there is no unit or a name is used twice.
    """

    model: str
    units: tuple[UnitCost, ...]
    dtype: str = "float32"
    loss_bytes: int = 0
    inputs: tuple[InputShape, ...] = ()
    devices: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        object.__setattr__(self, "inputs", tuple(self.inputs))
        problems = [] if self.units else ["there is no unit: give at least one"]
        names = [unit.name for unit in self.units]
        problems += [
            f"unit name {name!r} is used {names.count(name)} times: give every unit its own"
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ]
        raise_all(HeteroError, f"costs of model {self.model!r} are not valid", problems)

    @cached_property  # searches ask thousands of times
    def parameters(self) -> int:
        """Number of parameters of all units."""
        return sum(unit.parameters for unit in self.units)

    @cached_property  # searches ask thousands of times
    def alike(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Units that cost the same between neighbours that do: an index of each sort, and how many there are of it."""
        looks = [
            (u.parameters, u.is_block, u.forward_flops, u.backward_flops, tuple(sorted(u.timings.items())))
            for u in self.units
        ]
        around = list(zip([None, *looks[:-1]], looks, [*looks[1:], None], strict=True))
        first = {look: index for index, look in reversed(list(enumerate(around)))}
        counts = Counter(around)
        order = sorted(first.values())
        return tuple(order), tuple(counts[around[index]] for index in order)

    @property
    def timed_types(self) -> tuple[str, ...]:
        """Device types on which every unit was measured."""
        first = self.units[0].timings
        return tuple(kind for kind in first if all(kind in unit.timings for unit in self.units))

    def with_timings_of(self, other: ModelCosts) -> ModelCosts:
        """These costs, with the seconds that ``other`` has for further device types beside their own.

        Args:
            other: costs of the same model with the same inputs and dtype, measured on other devices. For a type
                that both have, these ones' seconds stay.

        Raises:
            HeteroError: listing every difference that makes the two costs of different things.
        """
        raise_all(HeteroError, f"costs of {self.model!r} and {other.model!r} do not go together", self._unlike(other))
        units = tuple(
            replace(unit, timings={**theirs.timings, **unit.timings})
            for unit, theirs in zip(self.units, other.units, strict=True)
        )
        return replace(self, units=units, devices={**other.devices, **self.devices})

    def _unlike(self, other: ModelCosts) -> list[str]:
        pairs = {
            "model": (self.model, other.model),
            "dtype": (self.dtype, other.dtype),
            "inputs": tuple(", ".join(map(str, costs.inputs)) for costs in (self, other)),
            "parameters": (self.parameters, other.parameters),
            "units": tuple(" ".join(unit.name for unit in costs.units) for costs in (self, other)),
        }
        return [
            f"{name}: {shown(one)} and {shown(two)}: write them to two files, or profile with equal settings"
            for name, (one, two) in pairs.items()
            if one != two
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, whole or not at all; :meth:`load` gives equal costs back."""
        write_json(Path(path), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as plain data; optional fields that say nothing are left out."""
        top: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.model,
            "dtype": self.dtype,
            "loss_bytes": self.loss_bytes,
        }
        if self.inputs:
            top["inputs"] = [{"shape": list(each.shape), "dtype": each.dtype} for each in self.inputs]
        if self.devices:
            top["devices"] = dict(self.devices)
        return top | {"units": [_unit_data(unit) for unit in self.units]}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelCosts:
        """Read what :meth:`save` wrote, possibly edited by hand.

        Raises:
            HeteroError: listing every problem with its place, value and next step.
        """
        return cls.from_dict(read_json(Path(path), "costs file", HeteroError, _NEXT_STEP), f"costs file {path}")

    @classmethod
    def from_dict(cls, data: object, source: str = "costs") -> ModelCosts:
        """Build costs from what a costs file holds; ``source`` names it in the error."""
        record = Record(source, HeteroError)
        optional = ["dtype", "loss_bytes", "inputs", "devices"]
        top = record.mapping(data, "", ["schema", "model", "units"], optional) or {}
        if "schema" in top and top["schema"] != SCHEMA:
            record.note("schema", f"is {shown(top['schema'])}: this version reads schema {SCHEMA}")
        items = record.items(top["units"], "units", "unit") if "units" in top else []
        inputs = record.items(top["inputs"], "inputs", "input") if top.get("inputs") else []
        units = tuple(_read_unit(record, item, place) for place, item in items)
        model = record.take(top, "model", "", text, "")
        dtype = record.take(top, "dtype", "", text, "float32")
        loss_bytes = record.take(top, "loss_bytes", "", integer(0), 0)
        shapes = tuple(_read_input(record, item, place) for place, item in inputs)
        devices = _read_devices(record, top.get("devices", {}))
        record.finish()
        return cls(model, units, dtype, loss_bytes, shapes, devices)


def _unit_data(unit: UnitCost) -> dict[str, Any]:
    timings = {kind: asdict(timing) for kind, timing in unit.timings.items()}
    for timing in timings.values():
        points = timing.pop("points")
        if points:
            timing["points"] = list(points)
    data = asdict(unit) | {"timings": timings}
    if not unit.shared_parameters:
        del data["shared_parameters"]
    return data


def _read_input(record: Record, value: object, place: str) -> InputShape:
    data = record.mapping(value, place, ["shape", "dtype"]) or {}
    shape: tuple[int, ...] = record.take(data, "shape", place, tuple_of(integer(0)), ())
    return InputShape(shape, record.take(data, "dtype", place, text, "float32"))


def _read_devices(record: Record, value: object) -> dict[str, str]:
    devices = record.mapping(value, "devices", [], value if isinstance(value, Mapping) else []) or {}
    return {kind: record.take(devices, kind, "devices", text, "") for kind in devices}


def _read_unit(record: Record, value: object, place: str) -> UnitCost:
    unit = record.mapping(value, place, _UNIT_KEYS, _UNIT_OPTIONAL) or {}
    timings: dict[str, UnitTiming] = {}
    if not isinstance(unit.get("timings", {}), Mapping):
        record.note(f"{place}.timings", f"is {shown(unit['timings'])}: write a mapping of device type to seconds")
    else:
        for kind, timing in unit.get("timings", {}).items():
            timings[kind] = _read_timing(record, timing, f"{place}.timings[{kind!r}]")
    return UnitCost(
        name=record.take(unit, "name", place, text, ""),
        parameters=record.take(unit, "parameters", place, integer(0), 0),
        forward_flops=record.take(unit, "forward_flops", place, number(0), 0.0),
        backward_flops=record.take(unit, "backward_flops", place, number(0), 0.0),
        kept_activation_bytes=record.take(unit, "kept_activation_bytes", place, integer(0), 0),
        output_bytes=record.take(unit, "output_bytes", place, integer(0), 0),
        timings=timings,
        is_block=record.take(unit, "is_block", place, boolean, True),
        shared_parameters=record.take(unit, "shared_parameters", place, integer(0), 0),
        inner_gradient_bytes=record.take(unit, "inner_gradient_bytes", place, integer(0), 0),
        largest_parameter=record.take(unit, "largest_parameter", place, integer(0), 0),
    )


def _read_timing(record: Record, value: object, place: str) -> UnitTiming:
    timing = record.mapping(value, place, _TIMING_KEYS, ["points"]) or {}
    # A fit of measured times may give a small negative fixed part, so only the sum must not be negative.
    seconds = {key: record.take(timing, key, place, number(), 0.0) for key in _TIMING_KEYS}
    for phase in ("forward", "backward"):
        one_sample_s = seconds[f"{phase}_fixed_s"] + seconds[f"{phase}_per_sample_s"]
        if seconds[f"{phase}_per_sample_s"] < 0 or one_sample_s < 0:
            record.note(place, f"{phase} of one sample takes {one_sample_s:g} s: no time may be negative")
    points = record.items(timing["points"], f"{place}.points", "point") if timing.get("points") else []
    return UnitTiming(**seconds, points=tuple(_read_point(record, item, where) for where, item in points))


def _read_point(record: Record, value: object, place: str) -> TimingPoint:
    point = record.mapping(value, place, ["samples", "forward_s", "backward_s"]) or {}
    return TimingPoint(
        record.take(point, "samples", place, integer(1), 1),
        record.take(point, "forward_s", place, number(0), 0.0),
        record.take(point, "backward_s", place, number(0), 0.0),
    )


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(fixed, per sample) of the line with the least squares of relative deviations; neither is negative."""
    # Relative, since the noise of a long time is longer: otherwise the largest size alone would set the line.
    weights = [1 / max(value, 1e-12) ** 2 for value in seconds]
    total = sum(weights)
    mean_size = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_s = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (x - mean_size) ** 2 for w, x in zip(weights, sizes, strict=True))
    through_zero = sum(w * x * y for w, x, y in zip(weights, sizes, seconds, strict=True)) / sum(
        w * x * x for w, x in zip(weights, sizes, strict=True)
    )
    if len(set(sizes)) == 1:
        return 0.0, through_zero
    products = zip(weights, sizes, seconds, strict=True)
    slope = sum(w * (x - mean_size) * (y - mean_s) for w, x, y in products) / spread
    if slope <= 0:
        return mean_s, 0.0
    fixed = mean_s - slope * mean_size
    return (fixed, slope) if fixed > 0 else (0.0, through_zero)
