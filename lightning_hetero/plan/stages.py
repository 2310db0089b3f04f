"""Pipelines of a plan and their stages, and what can be wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_hetero.records import Record, boolean, integer, tuple_of
from lightning_hetero.schedule import interleaving_problems, warmup_problems


@dataclass(frozen=True)
class Stage:
    """A contiguous run of units on one rank of a pipeline.

    Args:
        units: first unit and the one after the last, as indices: ``(0, 5)`` are units 0 to 4.
        warmup: forwards before the first backward; under 1F1B it is also how many micro-batches are in flight at
            most. Of no effect with other schedules.
        activation_checkpointing: whether its units keep only their inputs and run their forward again in backward.
    """

    units: tuple[int, int]
    warmup: int = 1
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(self.units))


@dataclass(frozen=True)
class Pipeline:
    """Ranks that hold one copy of the model between them.

    Args:
        ranks: in the order of their (first) stage.
        stages: in order; stage s is on ``ranks[s % len(ranks)]``. More than one per rank is for interleaved_1f1b.
        micro_batches: that it runs in a step.
    """

    ranks: tuple[int, ...]
    stages: tuple[Stage, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "stages", tuple(self.stages))

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank has."""
        return len(self.stages) // len(self.ranks)

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        return self.ranks[stage % len(self.ranks)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order; none for a rank of another pipeline."""
        return tuple(stage for stage in range(len(self.stages)) if self.rank_of(stage) == rank)


def stage_problems(pipeline: Pipeline, place: str, units: int) -> Iterator[str]:
    """What is wrong with a pipeline's stages: gaps, overlaps, empty ones, more than there are units or ranks."""
    stages = pipeline.stages
    if not stages:
        yield f"{place}.stages is empty: give one per rank"
        return
    if pipeline.ranks and len(stages) % len(pipeline.ranks):
        yield f"{place} has {len(stages)} stages on {len(pipeline.ranks)} ranks: give every rank as many"
    if len(stages) > units:
        yield f"{place} has {len(stages)} stages, the model has {units} units: use at most {units} stages"
    expected = 0
    for index, stage in enumerate(stages):
        start, stop = stage.units
        where = f"{place}.stages[{index}].units"
        if start >= stop:
            yield f"{where} is [{start}, {stop}], which holds no unit: give it at least one"
        if start > expected:
            yield f"{where} begins with unit {start}: {_units(expected, start)} before it belong to no stage"
        elif start < expected:
            yield f"{where} begins with unit {start}: {_units(start, min(stop, expected))} belong to a stage before it"
        expected = max(expected, stop)
    if expected < units:
        yield f"{place}.stages end before unit {expected}: {_units(expected, units)} belong to no stage"
    elif expected > units:
        yield f"{place}.stages go on to unit {expected - 1}, the model's last one is {units - 1}"


def _units(start: int, stop: int) -> str:
    return f"unit {start}" if stop - start == 1 else f"units {start} to {stop - 1}"


def schedule_problems(pipeline: Pipeline, place: str, schedule: str) -> Iterator[str]:
    """What a schedule does not allow of a pipeline."""
    count, ranks, stages = pipeline.micro_batches, len(pipeline.ranks), pipeline.stages
    if count < 1:
        yield f"{place}.micro_batches is {count}: give at least 1, or remove the pipeline"
        return
    if ranks and len(stages) > ranks and schedule != "interleaved_1f1b":
        yield f"{place} has {len(stages)} stages on {ranks} ranks: only interleaved_1f1b takes more than one each"
    if schedule == "interleaved_1f1b" and ranks:
        yield from (f"{place}: {problem}" for problem in interleaving_problems(ranks, count))
    if schedule == "1f1b":
        depths = [stage.warmup for stage in stages]
        yield from (f"{place}: {problem}" for problem in warmup_problems(depths, len(stages), count))
    if schedule == "zero_bubble":
        yield from (
            f"{place}.stages[{index}] has activation_checkpointing, which zero_bubble's halves of a backward cannot "
            "both run a forward for: turn it off, or use another schedule"
            for index, stage in enumerate(stages)
            if stage.activation_checkpointing
        )


def read_pipeline(record: Record, value: object, place: str) -> Pipeline:
    """A pipeline from its place in a file; what is wrong with it is noted in ``record``."""
    data = record.mapping(value, place, ["ranks", "stages", "micro_batches"]) or {}
    stages = record.items(data["stages"], f"{place}.stages", "stage") if "stages" in data else []
    return Pipeline(
        ranks=record.take(data, "ranks", place, tuple_of(integer(0)), ()),
        stages=tuple(_read_stage(record, item, where) for where, item in stages),
        micro_batches=record.take(data, "micro_batches", place, integer(1), 1),
    )


def _read_stage(record: Record, value: object, place: str) -> Stage:
    data = record.mapping(value, place, ["units"], ["warmup", "activation_checkpointing"]) or {}
    units: tuple[int, ...] = record.take(data, "units", place, tuple_of(integer(0)), (0, 0))
    if len(units) != 2:
        record.note(f"{place}.units", f"is {list(units)}: give the first unit and the one after the last, as [0, 5]")
        units = (0, 0)
    return Stage(
        units=(units[0], units[1]),
        warmup=record.take(data, "warmup", place, integer(1), 1),
        activation_checkpointing=record.take(data, "activation_checkpointing", place, boolean, False),
    )
