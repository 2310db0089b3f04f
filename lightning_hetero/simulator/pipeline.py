"""Simulate the step of a pipeline, or of several that reduce their gradients at the end.

One pipeline: each rank computes its row of the schedule in order; a forward's output and a backward's gradient travel
over the link to the neighbouring stage, one message at a time in each direction, while the ranks compute on (receives
posted ahead, sends not waited for). With free messages and equal stages, 1F1B and GPipe take
``(stages - 1 + micro_batches) * (forward + backward)``. GPipe takes exactly ``sum(f) + (m - 1) * max(f)`` forward,
and the same backward; with one ratio of backward to forward that is ``sum(t) + (m - 1) * max(t)``.

Several pipelines: what a stage has computed is reduced with the owners of the same units in the other pipelines once
each owner's last backward is done. Every rank takes part in one reduction at a time, and all walk through them in one
order, so none waits for ever.

Not in it: the optimizer's own seconds, and that messages and reductions of different ranks share a network port.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule, needs
from lightning_hetero.simulator.engine import TaskGraph, Timeline


@dataclass(frozen=True)
class StageSeconds:
    """How long one micro-batch takes in one stage.

    Args:
        forward_s: seconds of a forward.
        backward_s: seconds of a backward, with the recomputed forward where activations are checkpointed.
        input_share: part of a backward that finds gradients of inputs (action ``I``); the rest is ``W``. A half, as
            of matrix products, where nothing else is known.
    """

    forward_s: float
    backward_s: float
    input_share: float = 0.5

    def of(self, kind: str) -> float:
        """Seconds of an action of ``kind``."""
        if kind == FORWARD:
            return self.forward_s
        if kind == BACKWARD:
            return self.backward_s
        return self.backward_s * (self.input_share if kind == BACKWARD_INPUT else 1 - self.input_share)

    @property
    def both_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class PipelineTimeline:
    """What a pipeline did in one step.

    Args:
        step_s: seconds until its last action ended.
        busy_s: per rank of the pipeline, seconds of computing.
        stage_end_s: per stage, when its last action ended.
        timeline: every action and message; compute tasks are named by their :class:`Action`.
    """

    step_s: float
    busy_s: tuple[float, ...]
    stage_end_s: tuple[float, ...]
    timeline: Timeline

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do not compute, from 0 to 1."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0

    def idle_shares(self) -> tuple[float, ...]:
        """Per rank of the pipeline, the share of the step in which it does not compute."""
        return tuple(1 - busy / self.step_s if self.step_s else 0.0 for busy in self.busy_s)


def simulate_pipeline(
    schedule: Schedule, stages: Sequence[StageSeconds], hop_s: Sequence[float] | None = None
) -> PipelineTimeline:
    """Run one pipeline's schedule.

    Args:
        schedule: what each rank does, in order.
        stages: seconds of each stage, shape (stages,).
        hop_s: seconds that a micro-batch's message takes between stage s and s + 1, either way
            (``Link.seconds``), shape (stages - 1,); by default messages are free. Between stages of one rank there
            is no message, whatever is given.

    Raises:
        DeadlockError: if the order never ends, naming what waits for what.
        HeteroError: if lengths do not agree, or an action waits for one that is not in the schedule.
    """
    hops = [0.0] * max(0, len(stages) - 1) if hop_s is None else list(hop_s)
    problems = []
    if len(stages) != schedule.stages:
        problems.append(f"stages has {len(stages)} entries for {schedule.stages} stages: give one each")
    if len(hops) != schedule.stages - 1:
        problems.append(f"hop_s has {len(hops)} entries for {schedule.stages} stages: give one less than stages")
    raise_all(HeteroError, "the pipeline cannot be simulated", problems)
    graph = TaskGraph()
    tasks, owner = _add_compute(graph, schedule, stages)
    _connect(graph, schedule, tasks, owner, hops)
    timeline = graph.run()
    stage_end = [0.0] * schedule.stages
    for action, task in tasks.items():
        stage_end[action.stage] = max(stage_end[action.stage], timeline.end_s[task])
    busy = timeline.busy_s[: len(schedule.rows)]
    return PipelineTimeline(max(stage_end, default=0.0), busy, tuple(stage_end), timeline)


def _add_compute(
    graph: TaskGraph, schedule: Schedule, stages: Sequence[StageSeconds]
) -> tuple[dict[Action, int], dict[int, int]]:
    """Add every rank's actions in order; returns the task of each, and the rank of each stage."""
    tasks: dict[Action, int] = {}
    owner: dict[int, int] = {}
    seconds = {(s, kind): stage.of(kind) for s, stage in enumerate(stages) for kind in "FBIW"}
    devices = [graph.add_resource(f"rank {rank}") for rank in range(len(schedule.rows))]
    for rank, row in enumerate(schedule.rows):
        for action in row:
            tasks[action] = graph.add_task(action, devices[rank], seconds[action.stage, action.kind])
            owner[action.stage] = rank
    return tasks, owner


def _connect(
    graph: TaskGraph, schedule: Schedule, tasks: dict[Action, int], owner: dict[int, int], hops: Sequence[float]
) -> None:
    """Let every action wait for what it needs: directly, or for the message that brings it."""
    split = {action.stage for action in tasks if action.kind == BACKWARD_INPUT}
    links: dict[tuple[int, int], int] = {}
    absent = []
    for action, task in tasks.items():
        if action.kind == BACKWARD_WEIGHT:
            continue  # its I comes before it in the same row
        for before in needs(action, schedule.stages, action.stage + 1 in split):
            if before not in tasks:
                absent.append(f"{action} needs {before}, which is not in the schedule: add it")
                continue
            hop = hops[min(action.stage, before.stage)] if before.stage != action.stage else 0.0
            ends = owner[before.stage], owner[action.stage]
            if not hop or ends[0] == ends[1]:
                graph.add_dependency(task, tasks[before])
                continue
            if ends not in links:
                links[ends] = graph.add_resource(f"link {ends[0]} to {ends[1]}", in_order=False)
            message = graph.add_task((before, "sent"), links[ends], hop, (tasks[before],))
            graph.add_dependency(task, message)
    raise_all(HeteroError, "the pipeline cannot be simulated", absent)


@dataclass(frozen=True)
class Reduction:
    """One reduction of gradients between the owners of the same units.

    Args:
        seconds: that it takes once all owners are there.
        owners: (pipeline, stage) of each.
    """

    seconds: float
    owners: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReductionTimeline:
    """When gradients were reduced.

    Args:
        step_s: when the last reduction and the last action of every pipeline had ended.
        order: indices of the reductions by their start: all ranks walk through them in this order.
    """

    step_s: float
    order: tuple[int, ...]


def simulate_reductions(
    stage_end_s: Sequence[Sequence[float]], reductions: Sequence[Reduction], rows: Sequence[int] | None = None
) -> ReductionTimeline:
    """Reduce gradients between pipelines, one reduction at a time on each rank.

    The next one is always that whose owners can begin first; of equals the longest, then the first. So reductions
    of different ranks run side by side, and sorted by their start they are an order in which no rank waits for ever.

    Args:
        stage_end_s: per pipeline and stage, when its last action ended.
        reductions: what is to be reduced.
        rows: per pipeline its number of ranks, where a rank has several stages; stage s is on rank s % ranks.
    """
    free: dict[tuple[int, int], float] = {}
    ranks = [len(ends) for ends in stage_end_s] if rows is None else list(rows)
    held = [[(pipeline, stage % ranks[pipeline]) for pipeline, stage in each.owners] for each in reductions]
    done = [max(stage_end_s[pipeline][stage] for pipeline, stage in each.owners) for each in reductions]
    heap = [(done[index], -each.seconds, index) for index, each in enumerate(reductions)]
    heapq.heapify(heap)
    order = []
    step = max(max(ends) for ends in stage_end_s)
    while heap:
        begin, _, index = heap[0]
        possible = max(done[index], max(free.get(port, 0.0) for port in held[index]))
        if possible > begin:
            heapq.heapreplace(heap, (possible, -reductions[index].seconds, index))
            continue
        heapq.heappop(heap)
        end = begin + reductions[index].seconds
        free.update(dict.fromkeys(held[index], end))
        step = max(step, end)
        order.append(index)
    return ReductionTimeline(step, tuple(order))
