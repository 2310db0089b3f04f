"""What both kinds of plan have: what they were made for, and what they expect of each rank."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_hetero.errors import PlanError
from lightning_hetero.records import Record, integer, number, optional, read_json, shown, text, write_json

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class ModelKey:
    """What tells whether a plan was made for a model: its name and its number of parameters."""

    name: str
    parameters: int


@dataclass(frozen=True)
class RankPrediction:
    """What a plan expects of one rank in one step.

    Args:
        busy_s: seconds of computing.
        idle_share: share of the step in which the rank waits, from 0 to 1.
        peak_memory_bytes: peak memory in bytes, ``None`` where memory was not given to the planner.
    """

    busy_s: float
    idle_share: float
    peak_memory_bytes: int | None = None

    @classmethod
    def of(cls, busy_s: float, step_s: float, peak_memory_bytes: int | None = None) -> RankPrediction:
        """A rank that computes for ``busy_s`` of the step's ``step_s`` seconds."""
        # Rounding must not make a rank that is always busy idle for less than nothing.
        idle = min(1.0, max(0.0, 1 - busy_s / step_s)) if step_s else 0.0
        return cls(busy_s, idle, peak_memory_bytes)


class PlanFile(ABC):
    """A plan as a versioned JSON file: written whole, read and checked with every problem listed."""

    KIND: ClassVar[str]
    STRATEGY: ClassVar[str]
    predicted_step_s: float | None
    lower_bound_s: float | None
    predictions: tuple[RankPrediction, ...]
    reasons: tuple[str, ...]

    @property
    def gap(self) -> float | None:
        """By how much the predicted step exceeds the lower bound, as a share of it; ``None`` where one is missing."""
        if self.predicted_step_s is None or not self.lower_bound_s:
            return None
        return self.predicted_step_s / self.lower_bound_s - 1

    def lasting(self, step_s: float, *reasons: str) -> Self:
        """The same plan with another predicted step time, and further reasons."""
        if step_s == self.predicted_step_s and not reasons:
            return self
        predictions = tuple(RankPrediction.of(each.busy_s, step_s, each.peak_memory_bytes) for each in self.predictions)
        found: Self = replace(
            self,  # type: ignore[type-var]
            predicted_step_s=step_s,
            predictions=predictions,
            reasons=(*self.reasons, *reasons),
        )
        return found

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as plain data."""

    @abstractmethod
    def validate(self) -> None:
        """Check the plan in itself.

        Raises:
            PlanError: listing every problem.
        """

    @classmethod
    @abstractmethod
    def _read(cls, record: Record, data: object) -> Self:
        """Build a plan from what a file holds; what is wrong is noted in ``record``."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, whole or not at all; :meth:`load` gives an equal plan back."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote, possibly edited by hand, and check the plan in itself.

        Raises:
            PlanError: listing every problem with its place, value and next step.
        """
        next_step = 'give the path of a plan file, or plan="auto"'
        return cls.from_dict(read_json(Path(path), "plan file", PlanError, next_step), f"plan file {path}")

    @classmethod
    def from_dict(cls, data: object, source: str = "plan") -> Self:
        """Build a plan from what a plan file holds; ``source`` names it in the error."""
        found = data.get("kind", cls.KIND) if isinstance(data, Mapping) else cls.KIND
        if found != cls.KIND:  # all of its keys would be wrong, too
            wanted = f"give a plan made for {cls.STRATEGY}"
            raise PlanError(f"{source}: kind: is {shown(found)}, not {cls.KIND!r}: {wanted}")
        record = Record(source, PlanError)
        plan = cls._read(record, data)
        record.finish()
        try:
            plan.validate()
        except PlanError as error:
            raise PlanError(f"{source}: {error}") from None
        return plan


@lru_cache(maxsize=4096)  # searches ask thousands of times, mostly the same
def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Split ``total`` into whole parts that differ by at most one, larger ones first."""
    return tuple(total // parts + (index < total % parts) for index in range(parts))


def read_model(record: Record, value: object) -> ModelKey | None:
    if value is None:
        return None
    model = record.mapping(value, "model", ["name", "parameters"]) or {}
    name = record.take(model, "name", "model", text, "")
    return ModelKey(name, record.take(model, "parameters", "model", integer(0), 0))


def read_predictions(record: Record, value: object) -> tuple[RankPrediction, ...]:
    if not value:
        return ()
    predictions = []
    for place, item in record.items(value, "predictions", "prediction"):
        entry = record.mapping(item, place, ["busy_s", "idle_share"], ["peak_memory_bytes"]) or {}
        busy_s = record.take(entry, "busy_s", place, number(0), 0.0)
        idle_share = record.take(entry, "idle_share", place, number(0, 1), 0.0)
        peak = record.take(entry, "peak_memory_bytes", place, optional(integer(0)), None)
        predictions.append(RankPrediction(busy_s, idle_share, peak))
    return tuple(predictions)
