"""Pipeline plans: which ranks run which units, in which order, with how many micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import PlanError, raise_all
from lightning_hetero.plan.common import (
    ModelKey,
    PlanFile,
    RankPrediction,
    even_parts,
    read_model,
    read_predictions,
)
from lightning_hetero.plan.stages import Pipeline, read_pipeline, schedule_problems, stage_problems
from lightning_hetero.records import Record, integer, number, optional, shown, text, tuple_of
from lightning_hetero.schedule import (
    FORWARD,
    SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    interleaving_problems,
)

SCHEMA = 1

_REPLAN = 'make a new plan (plan="auto")'


@dataclass(frozen=True)
class PipelinePlan(PlanFile):
    """Which ranks run which units, in which order, with how many micro-batches.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: samples of a micro-batch; the last one of the last pipeline may be smaller.
        pipelines: each with its own ranks, cut and number of micro-batches. A rank in none of them stays idle.
        device_types: type of device per rank that the plan was made for.
        unit_names: names of the model's units, in order.
        schedule: one of :data:`lightning_hetero.schedule.SCHEDULES`.
        model: the model that the plan was made for; ``None`` if it fits any with these units.
        predicted_step_s: predicted seconds of one optimizer step.
        lower_bound_s: seconds that no plan for the same devices, costs and batch can be below.
        predictions: one per rank, or none.
        reasons: why the plan is as it is, one sentence each.
    """

    KIND: ClassVar[str] = "pipeline"
    STRATEGY: ClassVar[str] = "hetero_pipe"

    global_batch_size: int
    micro_batch_size: int
    pipelines: tuple[Pipeline, ...]
    device_types: tuple[str, ...]
    unit_names: tuple[str, ...]
    schedule: str = "1f1b"
    model: ModelKey | None = None
    predicted_step_s: float | None = None
    lower_bound_s: float | None = None
    predictions: tuple[RankPrediction, ...] = ()
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Lists would compare unequal to the tuples that load() gives.
        for name in ("pipelines", "device_types", "unit_names", "predictions", "reasons"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.device_types)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks that no pipeline uses."""
        used = {rank for pipeline in self.pipelines for rank in pipeline.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in used)

    def schedule_of(self, pipeline: int, micro_batches: int | None = None) -> Schedule:
        """What each rank of a pipeline does, in order.

        Args:
            pipeline: its index.
            micro_batches: of a short batch, at most the plan's; by default the plan's. :meth:`runnable` says which
                numbers the schedule allows.
        """
        own = self.pipelines[pipeline]
        count = own.micro_batches if micro_batches is None else micro_batches
        return build_schedule(
            self.schedule,
            len(own.ranks),
            count,
            warmup=[min(stage.warmup, count) for stage in own.stages] if self.schedule == "1f1b" else None,
            stages_per_rank=own.stages_per_rank,
        )

    def forward_schedule(self, pipeline: int, micro_batches: int) -> Schedule:
        """The forwards alone of so many micro-batches, as evaluation runs them."""
        own = self.pipelines[pipeline]
        rows = tuple(
            tuple(Action(stage, FORWARD, k) for k in range(micro_batches) for stage in own.stages_of(rank))
            for rank in own.ranks
        )
        return Schedule(rows, len(own.stages), micro_batches, "forward")

    def micro_batches_before(self, pipeline: int) -> int:
        """How many micro-batches of a step are those of earlier pipelines: its own are numbered after them."""
        return sum(each.micro_batches for each in self.pipelines[:pipeline])

    def runnable(self, pipeline: int, micro_batches: int) -> int:
        """The least number of micro-batches from ``micro_batches`` on that a pipeline's schedule allows."""
        if self.schedule != "interleaved_1f1b":
            return max(1, micro_batches)
        ranks, count = len(self.pipelines[pipeline].ranks), max(1, micro_batches)
        while interleaving_problems(ranks, count):
            count += 1
        return count

    def split(self, samples: int) -> tuple[int, ...]:
        """How many samples of a batch each pipeline takes.

        The batch is cut into as few micro-batches as its samples need, of sizes that differ by one at most; they go
        to the pipelines in proportion to their micro-batches. A pipeline may get none.
        """
        counts = [pipeline.micro_batches for pipeline in self.pipelines]
        needed = max(1, -(-samples // self.micro_batch_size))
        while needed > sum(counts):  # a larger batch, such as one of evaluation
            counts = [count * 2 for count in counts]
        exact = [count * needed / sum(counts) for count in counts]
        dealt = [int(share) for share in exact]
        for index in sorted(range(len(exact)), key=lambda i: (dealt[i] - exact[i], i))[: needed - sum(dealt)]:
            dealt[index] += 1
        sizes = iter(even_parts(samples, needed))
        return tuple(sum(next(sizes) for _ in range(count)) for count in dealt)

    def owners(self, unit: int) -> tuple[int, ...]:
        """The rank of each pipeline that runs a unit, given by its index: who reduces its gradients."""
        return tuple(
            pipeline.rank_of(index)
            for pipeline in self.pipelines
            for index, stage in enumerate(pipeline.stages)
            if stage.units[0] <= unit < stage.units[1]
        )

    def validate(
        self,
        cluster: Cluster | None = None,
        model: ModelKey | None = None,
        unit_names: Sequence[str] | None = None,
    ) -> None:
        """Check the plan in itself and, where given, against the cluster and the model it is to run on.

        Args:
            cluster: that it is to run on.
            model: that it is to run.
            unit_names: of the model's units, in order.

        Raises:
            PlanError: listing every problem.
        """
        problems = [*self._batch_problems(), *self._rank_problems()]
        for index, pipeline in enumerate(self.pipelines):
            place = f"pipelines[{index}]"
            problems += stage_problems(pipeline, place, len(self.unit_names))
            problems += schedule_problems(pipeline, place, self.schedule)
        if len(self.predictions) not in (0, self.world_size):
            problems.append(
                f"predictions has {len(self.predictions)} entries, device_types has {self.world_size}: "
                "give one per rank, or none"
            )
        problems += [] if cluster is None else self._cluster_problems(cluster)
        problems += self._model_problems(model, unit_names)
        raise_all(PlanError, "the plan is not valid", problems)

    def _batch_problems(self) -> Iterator[str]:
        batch, size = self.global_batch_size, self.micro_batch_size
        for name, value in (("global_batch_size", batch), ("micro_batch_size", size)):
            if value < 1:
                yield f"{name} is {value}: give at least 1 sample"
        if not self.pipelines:
            yield "pipelines is empty: give at least one"
            return
        if min(batch, size) < 1:
            return
        count, wanted = sum(pipeline.micro_batches for pipeline in self.pipelines), -(-batch // size)
        if count != wanted:
            yield (
                f"the pipelines run {count} micro-batches of {size} samples, a global batch of {batch} makes {wanted}: "
                "change micro_batches, micro_batch_size or global_batch_size"
            )

    def _rank_problems(self) -> Iterator[str]:
        for index, pipeline in enumerate(self.pipelines):
            if not pipeline.ranks:
                yield f"pipelines[{index}].ranks is empty: give at least one rank, or remove the pipeline"
        used = Counter(rank for pipeline in self.pipelines for rank in pipeline.ranks)
        for rank, count in sorted(used.items()):
            if count > 1:
                yield f"rank {rank} is used {count} times: a rank belongs to one pipeline, once"
            if not 0 <= rank < self.world_size:
                yield f"rank {rank} is used, device_types has ranks 0 to {self.world_size - 1}: give one of those"
        if self.schedule not in SCHEDULES:
            yield f"schedule is {self.schedule!r}: give one of {', '.join(SCHEDULES)}"

    def _cluster_problems(self, cluster: Cluster) -> list[str]:
        if cluster.world_size != self.world_size:
            counts = f"{self.world_size} ranks, cluster {cluster.name!r} has {cluster.world_size}"
            return [f"the plan is for {counts}: {_REPLAN}, or start {self.world_size} ranks"]
        return [
            f"device_types[{rank}] is {planned!r}, rank {rank} of cluster {cluster.name!r} is {found!r}: "
            f"{_REPLAN}, or start the ranks in the order of the plan"
            for rank, (planned, found) in enumerate(zip(self.device_types, cluster.device_types(), strict=False))
            if planned != found
        ]

    def _model_problems(self, model: ModelKey | None, unit_names: Sequence[str] | None) -> Iterator[str]:
        if model is not None and self.model is not None and model.parameters != self.model.parameters:
            yield (
                f"model: the plan was made for {self.model.name} with {self.model.parameters} parameters, "
                f"this is {model.name} with {model.parameters}: {_REPLAN} for this model"
            )
        if unit_names is None or tuple(unit_names) == self.unit_names:
            return
        if len(unit_names) != len(self.unit_names):
            yield f"unit_names has {len(self.unit_names)} units, the model has {len(unit_names)}: {_REPLAN}"
        else:
            pairs = enumerate(zip(self.unit_names, unit_names, strict=True))
            index, (planned, found) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            yield f"unit_names[{index}] is {planned!r}, unit {index} of the model is {found!r}: {_REPLAN}"

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as plain data."""
        return {"schema": SCHEMA, "kind": self.KIND} | asdict(self)

    @classmethod
    def _read(cls, record: Record, data: object) -> PipelinePlan:
        return _read_plan(record, data)


_REQUIRED = ("schema", "kind", "global_batch_size", "micro_batch_size", "pipelines", "device_types", "unit_names")
_OPTIONAL = ("schedule", "model", "predicted_step_s", "lower_bound_s", "predictions", "reasons")


def _read_plan(record: Record, data: object) -> PipelinePlan:
    top = record.mapping(data, "", _REQUIRED, _OPTIONAL) or {}
    if "schema" in top and top["schema"] != SCHEMA:
        record.note("schema", f"is {shown(top['schema'])}: this version reads schema {SCHEMA}; {_REPLAN}")
    pipelines = record.items(top["pipelines"], "pipelines", "pipeline") if "pipelines" in top else []
    return PipelinePlan(
        global_batch_size=record.take(top, "global_batch_size", "", integer(1), 1),
        micro_batch_size=record.take(top, "micro_batch_size", "", integer(1), 1),
        pipelines=tuple(read_pipeline(record, item, place) for place, item in pipelines),
        device_types=record.take(top, "device_types", "", tuple_of(text), ()),
        unit_names=record.take(top, "unit_names", "", tuple_of(text), ()),
        schedule=record.take(top, "schedule", "", text, "1f1b"),
        model=read_model(record, top.get("model")),
        predicted_step_s=record.take(top, "predicted_step_s", "", optional(number(0)), None),
        lower_bound_s=record.take(top, "lower_bound_s", "", optional(number(0)), None),
        predictions=read_predictions(record, top.get("predictions") or []),
        reasons=record.take(top, "reasons", "", tuple_of(text), ()),
    )
