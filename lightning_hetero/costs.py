"""What every unit of a model costs: the file between profiling and planning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.records import Record, boolean, integer, number, read_json, shown, text, write_json

SCHEMA = 1

_NEXT_STEP = "give the path of a costs file, or write one with ModelCosts.save(path)"
_TIMING_KEYS = ("forward_fixed_s", "forward_per_sample_s", "backward_fixed_s", "backward_per_sample_s")
_UNIT_KEYS = (
    "name",
    "parameters",
    "forward_flops",
    "backward_flops",
    "kept_activation_bytes",
    "output_bytes",
)


@dataclass(frozen=True)
class UnitTiming:
    """Measured seconds of one unit on one type of device, as fixed + per sample of the micro-batch."""

    forward_fixed_s: float
    forward_per_sample_s: float
    backward_fixed_s: float
    backward_per_sample_s: float

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
        parameters: number of parameters.
        forward_flops: floating-point operations of a forward per sample, a multiply-add counting as 2.
        backward_flops: the same of a backward.
        kept_activation_bytes: bytes per sample that the forward keeps for the backward.
        output_bytes: bytes per sample of the unit's output.
        timings: measured seconds by device type; empty where nothing was measured.
        is_block: whether it is one of the repeated blocks that FSDP2 wraps one by one; the others form the root group.
    """

    name: str
    parameters: int
    forward_flops: float
    backward_flops: float
    kept_activation_bytes: int
    output_bytes: int
    timings: Mapping[str, UnitTiming] = field(default_factory=dict)
    is_block: bool = True


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model, unit by unit in the order of its forward.

    Args:
        model: name of the model.
        units: at least one unit; names are distinct.
        dtype: of parameters and compute when the seconds and bytes were taken ("float32", "bfloat16", ...).
        loss_bytes: bytes per sample that the loss keeps beside the last output (logits, targets, their gradient).

    Raises:
        HeteroError: if there is no unit or a name is used twice.
    """

    model: str
    units: tuple[UnitCost, ...]
    dtype: str = "float32"
    loss_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))
        problems = [] if self.units else ["there is no unit: give at least one"]
        names = [unit.name for unit in self.units]
        problems += [
            f"unit name {name!r} is used {names.count(name)} times: give every unit its own"
            for name in dict.fromkeys(names)
            if names.count(name) > 1
        ]
        raise_all(HeteroError, f"costs of model {self.model!r} are not valid", problems)

    @property
    def parameters(self) -> int:
        """Number of parameters of all units."""
        return sum(unit.parameters for unit in self.units)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, whole or not at all; :meth:`load` gives equal costs back."""
        write_json(Path(path), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as plain data."""
        units = [
            asdict(unit) | {"timings": {kind: asdict(timing) for kind, timing in unit.timings.items()}}
            for unit in self.units
        ]
        top = {"schema": SCHEMA, "model": self.model, "dtype": self.dtype, "loss_bytes": self.loss_bytes}
        return top | {"units": units}

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
        top = record.mapping(data, "", ["schema", "model", "units"], ["dtype", "loss_bytes"]) or {}
        if "schema" in top and top["schema"] != SCHEMA:
            record.note("schema", f"is {shown(top['schema'])}: this version reads schema {SCHEMA}")
        model = record.take(top, "model", "", text, "")
        dtype = record.take(top, "dtype", "", text, "float32")
        loss_bytes = record.take(top, "loss_bytes", "", integer(0), 0)
        items = record.items(top["units"], "units", "unit") if "units" in top else []
        units = [_read_unit(record, item, place) for place, item in items]
        record.finish()
        return cls(model, tuple(units), dtype, loss_bytes)


def _read_unit(record: Record, value: object, place: str) -> UnitCost:
    unit = record.mapping(value, place, _UNIT_KEYS, ["timings", "is_block"]) or {}
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
    )


def _read_timing(record: Record, value: object, place: str) -> UnitTiming:
    timing = record.mapping(value, place, _TIMING_KEYS) or {}
    # A fit of measured times may give a small negative fixed part, so only the sum must not be negative.
    seconds = {key: record.take(timing, key, place, number(), 0.0) for key in _TIMING_KEYS}
    for phase in ("forward", "backward"):
        one_sample_s = seconds[f"{phase}_fixed_s"] + seconds[f"{phase}_per_sample_s"]
        if seconds[f"{phase}_per_sample_s"] < 0 or one_sample_s < 0:
            record.note(place, f"{phase} of one sample takes {one_sample_s:g} s: no time may be negative")
    return UnitTiming(**seconds)
