"""When each rank is to do what in a step: what a plan predicts, as spans of time that can be drawn.

Of a pipeline plan the schedule is simulated: every action has a start and an end, and what is between two is a bubble.
A shard plan predicts seconds of computing and of the step, and no order: a rank computes, then waits::

    shard       | computing          | waiting, exposed communication |
    pipeline    | 0F0 | 0F1 | bubble | 0B0 | 0F2 | 0B1 | ...          | gradients between pipelines |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.records import Record, number
from lightning_hetero.schedule import Action
from lightning_hetero.simulator.pipeline import StageSeconds, simulate_pipeline

COMPUTE, IDLE = "compute", "idle"
"""kinds of spans of a shard plan; those of a pipeline are the kinds of actions: F, B, I, W"""

FORWARD_SHARE = 1 / 3
"""of an action's seconds, where a plan was made elsewhere and says only what both take: a backward has two products of
matrices for each one of a forward"""


@dataclass(frozen=True)
class Span:
    """What a rank does from one moment to another.

    Attributes:
        rank: the rank.
        kind: of what it does.
        name: of it, such as an action's text.
        start_s: when it begins, from the step's start.
        end_s: when it ends.
    """

    rank: int
    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PlannedStep:
    """A step as planned.

    Attributes:
        step_s: seconds of it.
        spans: of all ranks.
        assumed: what had to be assumed, in words; empty where nothing was.
    """

    step_s: float
    spans: tuple[Span, ...]
    assumed: str = ""


@dataclass(frozen=True)
class PipelineSeconds:
    """What one micro-batch takes in a pipeline.

    Attributes:
        stages: seconds of each stage.
        hop_s: of its message between stage s and s + 1; one less than stages.
    """

    stages: tuple[StageSeconds, ...]
    hop_s: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"stages": [asdict(stage) for stage in self.stages], "hop_s": list(self.hop_s)}

    @classmethod
    def from_dict(cls, data: object, source: str) -> PipelineSeconds:
        """From what :meth:`to_dict` gives.

        Raises:
            HeteroError: listing every problem; ``source`` names where it was.
        """
        record = Record(source, HeteroError)
        top = record.mapping(data, "", ("stages", "hop_s")) or {}
        stages = []
        for place, item in record.items(top.get("stages"), "stages", "stage"):
            entry = record.mapping(item, place, ("forward_s", "backward_s"), ("input_share",)) or {}
            stages.append(
                StageSeconds(
                    record.take(entry, "forward_s", place, number(0), 0.0),
                    record.take(entry, "backward_s", place, number(0), 0.0),
                    record.take(entry, "input_share", place, number(0, 1), 0.5),
                )
            )
        hops = top.get("hop_s")
        if not isinstance(hops, list) or len(hops) != len(stages) - 1:
            record.note("hop_s", f"is {hops!r}: give one number of seconds less than stages")
            hops = []
        found = tuple(record.take({"hop_s": hop}, "hop_s", "", number(0), 0.0) for hop in hops)
        record.finish()
        return cls(tuple(stages), found)


def plan_step(plan: ShardPlan | PipelinePlan, pipelines: Sequence[PipelineSeconds] | None = None) -> PlannedStep:
    """What a plan predicts of a step, in time.

    Args:
        plan: with predictions.
        pipelines: of a pipeline plan, what micro-batches take in each pipeline; without, it follows from what the plan
            expects each rank to compute, and :attr:`PlannedStep.assumed` says how.

    Raises:
        HeteroError: if the plan predicts no seconds, or ``pipelines`` are those of another plan.
    """
    if isinstance(plan, ShardPlan):
        return _shard_step(plan)
    assumed = ""
    if pipelines is None:
        pipelines = _from_predictions(plan)
        assumed = "a forward is taken as a third of what forward and backward take, and messages as free"
    spans: list[Span] = []
    ends = []
    _check(plan, pipelines)
    for index, (pipeline, seconds) in enumerate(zip(plan.pipelines, pipelines, strict=True)):
        simulated = simulate_pipeline(plan.schedule_of(index), seconds.stages, seconds.hop_s)
        ends.append(simulated.step_s)
        timeline = simulated.timeline
        for action, start_s, end_s in zip(timeline.names, timeline.start_s, timeline.end_s, strict=True):
            if isinstance(action, Action):  # and no message
                spans.append(Span(pipeline.rank_of(action.stage), action.kind, str(action), start_s, end_s))
    return PlannedStep(max([plan.predicted_step_s or 0.0, *ends]), tuple(spans), assumed)


def _shard_step(plan: ShardPlan) -> PlannedStep:
    if not plan.predictions or plan.predicted_step_s is None:
        raise HeteroError("the plan predicts no seconds: it was written by hand, or made without measuring")
    step_s = plan.predicted_step_s
    spans = []
    for rank, prediction in enumerate(plan.predictions):
        busy_s = min(prediction.busy_s, step_s)
        spans.append(Span(rank, COMPUTE, "compute", 0.0, busy_s))
        if busy_s < step_s:
            spans.append(Span(rank, IDLE, "waiting, exposed communication", busy_s, step_s))
    return PlannedStep(step_s, tuple(spans))


def _from_predictions(plan: PipelinePlan) -> tuple[PipelineSeconds, ...]:
    if not plan.predictions:
        raise HeteroError("the plan predicts no seconds: it was written by hand, or made without measuring")
    found = []
    for pipeline in plan.pipelines:
        stages = []
        for index in range(len(pipeline.stages)):
            busy_s = plan.predictions[pipeline.rank_of(index)].busy_s
            both_s = busy_s / pipeline.micro_batches / pipeline.stages_per_rank
            stages.append(StageSeconds(FORWARD_SHARE * both_s, (1 - FORWARD_SHARE) * both_s))
        found.append(PipelineSeconds(tuple(stages), (0.0,) * (len(stages) - 1)))
    return tuple(found)


def _check(plan: PipelinePlan, pipelines: Sequence[PipelineSeconds]) -> None:
    problems = []
    if len(pipelines) != len(plan.pipelines):
        problems.append(f"seconds of {len(pipelines)} pipelines are given, the plan has {len(plan.pipelines)}")
    for index, (pipeline, seconds) in enumerate(zip(plan.pipelines, pipelines, strict=False)):
        if len(seconds.stages) != len(pipeline.stages):
            problems.append(
                f"pipeline {index}: seconds of {len(seconds.stages)} stages are given, it has {len(pipeline.stages)}"
            )
    raise_all(HeteroError, "the plan's step cannot be simulated: give the seconds of this plan", problems)


def by_rank(step: PlannedStep) -> Mapping[int, list[Span]]:
    """The spans of each rank, in order of time."""
    found: dict[int, list[Span]] = {}
    for span in sorted(step.spans, key=lambda each: (each.rank, each.start_s)):
        found.setdefault(span.rank, []).append(span)
    return found
