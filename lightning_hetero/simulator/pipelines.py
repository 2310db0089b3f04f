"""Simulate the step of a whole pipeline plan: its pipelines, the reductions between them, the optimizer.

Pipelines run side by side and meet on links that have names (a link between two sites, a network port), which carry
one message at a time in each direction. When a stage's last backward is done, its gradients are reduced with those of
the same units in the other pipelines, and when all reductions of its rank are done its optimizer runs::

    pipeline 0, rank 0   | 0F0 | 0F1 |     | 0B0 | 0F2 | 0B1 | ... | gradients | optimizer |
    pipeline 1, rank 0   | 0F0 | 0B0 | ... |                       | gradients | optimizer |

Not in it: that a reduction and the last backwards' messages may share a link, and that computing and communication of
one device slow each other down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.schedule import FORWARD, Action, Schedule
from lightning_hetero.simulator.engine import TaskGraph, Timeline
from lightning_hetero.simulator.pipeline import (
    OURS,
    Hop,
    PointToPoint,
    StageSeconds,
    add_pipeline,
    compute_s,
    length_problems,
    stage_ends,
)
from lightning_hetero.simulator.planned_step import Span
from lightning_hetero.simulator.reductions import Reduction, ReductionTimeline, simulate_reductions

MESSAGE, GRADIENTS, OPTIMIZER = "messages", "communication", "optimizer"
"""kinds of spans beside those of actions"""


@dataclass(frozen=True)
class PipelineLoad:
    """What one pipeline does in a step.

    Args:
        schedule: what each of its ranks does.
        stages: seconds of each stage.
        hops: between stages, one less.
        optimizer_s: seconds of each stage's optimizer; by default none.
    """

    schedule: Schedule
    stages: tuple[StageSeconds, ...]
    hops: tuple[Hop, ...] = ()
    optimizer_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Message:
    """An output or a gradient on its way, while its sender computes on.

    Args:
        rank: that sends; ranks are counted through, those of the first pipeline first.
        receiver: the rank that it goes to.
        name: of what it is of ("0F1").
        start_s: when it leaves.
        end_s: when it is there.
    """

    rank: int
    receiver: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelinesTimeline:
    """What the pipelines of a plan did in one step.

    Args:
        step_s: seconds until the last rank had ended.
        busy_s: per pipeline and rank, seconds of computing, the optimizer included.
        stage_end_s: per pipeline and stage, when its last action ended, and its last send where sends block.
        reduction_end_s: when each reduction ended.
        exposed_communication_s: by how much the step is longer than with free messages and reductions.
        spans: of all ranks: actions, sends that hold a device, reductions, optimizer. Ranks are counted through, those
            of the first pipeline first.
        timeline: of actions and messages; tasks are named by their action, or ``(action, "sent")``.
        messages: that hold no device.
    """

    step_s: float
    busy_s: tuple[tuple[float, ...], ...]
    stage_end_s: tuple[tuple[float, ...], ...]
    reduction_end_s: tuple[float, ...]
    exposed_communication_s: float
    spans: tuple[Span, ...]
    timeline: Timeline
    messages: tuple[Message, ...] = ()

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they neither compute nor run the optimizer, from 0 to 1."""
        ranks = sum(map(len, self.busy_s))
        return 1 - sum(map(sum, self.busy_s)) / (ranks * self.step_s) if self.step_s else 0.0


def simulate_pipelines(
    pipelines: Sequence[PipelineLoad], reductions: Sequence[Reduction] = (), sending: PointToPoint = OURS
) -> PipelinesTimeline:
    """Run one step.

    Args:
        pipelines: what each of them does.
        reductions: of gradients, between stages of different pipelines (or of one, for tied parameters).
        sending: how the runtime sends.

    Raises:
        DeadlockError: if the order never ends, naming what waits for what.
        HeteroError: listing lengths that do not agree, and reductions of stages that are not there.
    """
    _check(pipelines, reductions)
    whole = _run(pipelines, reductions, sending)
    free = [replace(load, hops=tuple(Hop(0.0) for _ in load.hops)) for load in pipelines]
    return replace(whole, exposed_communication_s=whole.step_s - _run(free, (), OURS).step_s)


def _check(pipelines: Sequence[PipelineLoad], reductions: Sequence[Reduction]) -> None:
    problems = [] if pipelines else ["there is no pipeline: give at least one"]
    for index, load in enumerate(pipelines):
        found = length_problems(load.schedule, len(load.stages), len(load.hops))
        if load.optimizer_s and len(load.optimizer_s) != len(load.stages):
            given = len(load.optimizer_s)
            found.append(f"optimizer_s has {given} entries for {len(load.stages)} stages: give one each")
        problems += [f"pipeline {index}: {text}" for text in found]
    for index, each in enumerate(reductions):
        for pipeline, stage in each.owners:
            if not 0 <= pipeline < len(pipelines) or not 0 <= stage < len(pipelines[pipeline].stages):
                problems.append(f"reduction {index}: pipeline {pipeline} has no stage {stage}: name another owner")
    raise_all(HeteroError, "the pipelines cannot be simulated", problems)


def _run(
    pipelines: Sequence[PipelineLoad], reductions: Sequence[Reduction], sending: PointToPoint
) -> PipelinesTimeline:
    graph = TaskGraph()
    links: dict[Hashable, int] = {}
    last: list[dict[Action, int]] = []
    first_ranks: list[int] = []
    devices: list[int] = []
    for index, load in enumerate(pipelines):
        first_ranks.append(len(devices))
        own = [graph.add_resource(f"pipeline {index} rank {rank}") for rank in range(len(load.schedule.rows))]
        devices += own
        last.append(add_pipeline(graph, own, load.schedule, load.stages, load.hops, sending, links))
    timeline = graph.run()
    ends = [stage_ends(load.schedule, own, timeline) for load, own in zip(pipelines, last, strict=True)]
    rows = [len(load.schedule.rows) for load in pipelines]
    reduced = simulate_reductions(ends, reductions, rows)
    optimizers = _optimizers(pipelines, first_ranks, ends, reductions, reduced)
    spans = [*_computed(timeline, devices), *_reduced(first_ranks, rows, reductions, reduced), *optimizers]
    busy = [list(compute_s(load.schedule, load.stages)) for load in pipelines]
    for load, seconds in zip(pipelines, busy, strict=True):
        for stage, optimizer_s in enumerate(load.optimizer_s):
            seconds[stage % len(seconds)] += optimizer_s
    step_s = max([reduced.step_s, *(span.end_s for span in optimizers)])
    messages = () if sending.blocking else tuple(_messages(pipelines, first_ranks, last, timeline))
    return PipelinesTimeline(
        step_s, tuple(map(tuple, busy)), tuple(ends), reduced.end_s, 0.0, tuple(spans), timeline, messages
    )


def _computed(timeline: Timeline, devices: Sequence[int]) -> list[Span]:
    """Actions, and sends that hold a device."""
    rank_of = {device: rank for rank, device in enumerate(devices)}
    spans = []
    for name, held, start_s, end_s in zip(
        timeline.names, timeline.resources, timeline.start_s, timeline.end_s, strict=True
    ):
        ranks = [rank_of[resource] for resource in held if resource in rank_of]
        if isinstance(name, Action):
            spans.append(Span(ranks[0], name.kind, str(name), start_s, end_s))
        elif ranks and isinstance(name, tuple):
            spans.append(Span(ranks[0], MESSAGE, f"{name[0]} sent", start_s, end_s))
    return spans


def _messages(
    pipelines: Sequence[PipelineLoad],
    first_ranks: Sequence[int],
    last: Sequence[Mapping[Action, int]],
    timeline: Timeline,
) -> Iterator[Message]:
    """What is sent without holding a device. Tasks are those of the first pipeline, then those of the next one."""
    starts = [min(own.values()) for own in last]
    rows = [{one.stage: row for row, own in enumerate(load.schedule.rows) for one in own} for load in pipelines]
    for task, (name, start_s, end_s) in enumerate(zip(timeline.names, timeline.start_s, timeline.end_s, strict=True)):
        if isinstance(name, Action) or not isinstance(name, tuple) or end_s <= start_s:
            continue
        action = name[0]
        index = bisect_right(starts, task) - 1
        to_stage = action.stage + (1 if action.kind == FORWARD else -1)
        first, row_of = first_ranks[index], rows[index]
        yield Message(first + row_of[action.stage], first + row_of[to_stage], str(action), start_s, end_s)


def _reduced(
    first_ranks: Sequence[int], rows: Sequence[int], reductions: Sequence[Reduction], reduced: ReductionTimeline
) -> list[Span]:
    """Reductions, once for each rank that takes part."""
    spans = []
    for index, (each, end_s) in enumerate(zip(reductions, reduced.end_s, strict=True)):
        ranks = {first_ranks[pipeline] + stage % rows[pipeline] for pipeline, stage in each.owners}
        spans += [Span(rank, GRADIENTS, f"gradients {index}", end_s - each.seconds, end_s) for rank in sorted(ranks)]
    return spans


def _optimizers(
    pipelines: Sequence[PipelineLoad],
    first_ranks: Sequence[int],
    ends: Sequence[Sequence[float]],
    reductions: Sequence[Reduction],
    reduced: ReductionTimeline,
) -> list[Span]:
    """Each rank's optimizer, after its last action and its last reduction."""
    ready: dict[tuple[int, int], float] = {}
    rows = [len(load.schedule.rows) for load in pipelines]

    def later(pipeline: int, stage: int, moment_s: float) -> None:
        key = pipeline, stage % rows[pipeline]
        ready[key] = max(ready.get(key, 0.0), moment_s)

    for pipeline, stages in enumerate(ends):
        for stage, end_s in enumerate(stages):
            later(pipeline, stage, end_s)
    for each, end_s in zip(reductions, reduced.end_s, strict=True):
        for pipeline, stage in each.owners:
            later(pipeline, stage, end_s)
    spans = []
    for (pipeline, row), begin_s in ready.items():
        seconds = sum(pipelines[pipeline].optimizer_s[row :: rows[pipeline]])
        if seconds:
            spans.append(Span(first_ranks[pipeline] + row, OPTIMIZER, "optimizer", begin_s, begin_s + seconds))
    return spans
