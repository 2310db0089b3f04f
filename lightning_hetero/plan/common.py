"""What both kinds of plan have: what they were made for, and what they expect of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_hetero.errors import PlanError
from lightning_hetero.records import Record, integer, number, optional, shown, text


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


def check_kind(data: object, kind: str, source: str) -> None:
    """Refuse a plan of another kind before its keys are looked at: all of them would be wrong.

    Raises:
        PlanError: naming the kind and what to give.
    """
    found = data.get("kind", kind) if isinstance(data, Mapping) else kind
    if found != kind:
        strategy = {"shard": "hetero_fsdp", "pipeline": "hetero_pipe"}[kind]
        raise PlanError(f"{source}: kind: is {shown(found)}, not {kind!r}: give a plan made for {strategy}")


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
