"""Simulate the step of one pipeline; pipelines.py has several, with what comes after their last backward.

Each rank computes its row of the schedule in order; a forward's output and a backward's gradient travel over the link
to the neighbouring stage, one message at a time in each direction, while the ranks compute on (receives posted ahead,
sends not waited for). With free messages and equal stages, 1F1B and GPipe take
``(stages - 1 + micro_batches) * (forward + backward)``. GPipe takes exactly ``sum(f) + (m - 1) * max(f)`` forward,
and the same backward; with one ratio of backward to forward that is ``sum(t) + (m - 1) * max(t)``.

Other runtimes send in other ways (:class:`PointToPoint`)::

    not blocking      device  | 0F1 | 0B0 | 0F2 |           blocking   device  | 0F1 | send | 0B0 | 0F2 | send |
                      link          | 0F1 sent |                       link          | 0F1  |

A message leaves whether or not its receiver is there yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule, needs
from lightning_hetero.simulator.engine import TaskGraph, Timeline


@dataclass(frozen=True)
class PointToPoint:
    """How a runtime sends from stage to stage; by default as ours does.

    Args:
        blocking: a sender's device is held while its message travels, as by Megatron's batched sends and receives that
            are waited for.
        gradient_first: a forward's output leaves only once the gradient has come that the backward after it needs, as
            in the instructions of DeepSpeed's pipeline engine (``RecvGrad``, ``SendActivation``, ``BackwardPass``):
            what the later stage computes and the messages both ways then lie one after the other. An output that
            the later stage needs before it makes that gradient leaves at once.
    """

    blocking: bool = False
    gradient_first: bool = False


OURS = PointToPoint()
"""receives posted ahead, sends not waited for"""


@dataclass(frozen=True)
class Hop:
    """The way between stage s and s + 1.

    Args:
        seconds: that a micro-batch's message takes, either way (``Link.seconds``).
        up: name of the link that carries messages to stage s + 1, where others share it; by default it is its own.
        down: the same for messages to stage s.
    """

    seconds: float
    up: Hashable | None = None
    down: Hashable | None = None


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
        stage_end_s: per stage, when its last action ended, and its last send where sends block.
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
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    hop_s: Sequence[float] | None = None,
    sending: PointToPoint = OURS,
) -> PipelineTimeline:
    """Run one pipeline's schedule.

    Args:
        schedule: what each rank does, in order.
        stages: seconds of each stage, shape (stages,).
        hop_s: seconds that a micro-batch's message takes between stage s and s + 1, either way
            (``Link.seconds``), shape (stages - 1,); by default messages are free. Between stages of one rank there
            is no message, whatever is given.
        sending: how the runtime sends.

    Raises:
        DeadlockError: if the order never ends, naming what waits for what.
        HeteroError: if lengths do not agree, or an action waits for one that is not in the schedule.
    """
    hops = [0.0] * max(0, len(stages) - 1) if hop_s is None else list(hop_s)
    raise_all(HeteroError, "the pipeline cannot be simulated", length_problems(schedule, len(stages), len(hops)))
    graph = TaskGraph()
    devices = [graph.add_resource(f"rank {rank}") for rank in range(len(schedule.rows))]
    last = add_pipeline(graph, devices, schedule, stages, [Hop(seconds) for seconds in hops], sending)
    timeline = graph.run()
    ends = stage_ends(schedule, last, timeline)
    return PipelineTimeline(max(ends, default=0.0), compute_s(schedule, stages), ends, timeline)


def length_problems(schedule: Schedule, stages: int, hops: int) -> list[str]:
    """What does not fit the schedule: one text for each."""
    problems = []
    if stages != schedule.stages:
        problems.append(f"stages has {stages} entries for {schedule.stages} stages: give one each")
    if hops != schedule.stages - 1:
        problems.append(f"hop_s has {hops} entries for {schedule.stages} stages: give one less than stages")
    return problems


def compute_s(schedule: Schedule, stages: Sequence[StageSeconds]) -> tuple[float, ...]:
    """Seconds of computing, per rank."""
    return tuple(sum(stages[action.stage].of(action.kind) for action in row) for row in schedule.rows)


def stage_ends(schedule: Schedule, last: Mapping[Action, int], timeline: Timeline) -> tuple[float, ...]:
    """When each stage ended; ``last`` is what :func:`add_pipeline` returns."""
    ends = [0.0] * schedule.stages
    for action, task in last.items():
        ends[action.stage] = max(ends[action.stage], timeline.end_s[task])
    return tuple(ends)


def add_pipeline(
    graph: TaskGraph,
    devices: Sequence[int],
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    hops: Sequence[Hop],
    sending: PointToPoint,
    links: dict[Hashable, int] | None = None,
) -> dict[Action, int]:
    """Add a pipeline's actions and messages to a graph.

    Args:
        graph: to add them to.
        devices: resource of each rank of the pipeline, in order.
        schedule: what each rank does.
        stages: seconds of each stage.
        hops: between stages.
        sending: how the runtime sends.
        links: resources of the links that have names, for all pipelines of the graph; new ones are added to it.

    Returns:
        For each action the task after which its device is free again: itself, or its send where sends block. A
        message's task is named ``(action, "sent")``.

    Raises:
        HeteroError: if an action waits for one that is not in the schedule.
    """
    named = {} if links is None else links
    own: dict[Hashable, int] = {}
    owner = {action.stage: rank for rank, row in enumerate(schedule.rows) for action in row}
    awaited, awaiting = _needs(schedule)
    seconds = {(s, kind): stage.of(kind) for s, stage in enumerate(stages) for kind in "FBIW"}
    tasks: dict[Action, int] = {}
    messages: dict[tuple[Action, int], int] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            task = tasks[action] = graph.add_task(action, devices[rank], seconds[action.stage, action.kind])
            for stage in awaiting.get(action, ()):
                hop = hops[min(stage, action.stage)]
                # A free message is no task, but for its place in the order of messages.
                if owner[stage] == rank or not (hop.seconds or sending.gradient_first):
                    continue
                name, ends = (hop.up if stage > action.stage else hop.down), (rank, owner[stage])
                among, key = (own, ends) if name is None else (named, name)
                if key not in among:
                    text = f"link {ends[0]} to {ends[1]}" if name is None else f"link {name}"
                    among[key] = graph.add_resource(text, in_order=False)
                held = (devices[rank], among[key]) if sending.blocking else (among[key],)
                messages[action, stage] = graph.add_task((action, "sent"), held, hop.seconds, (task,))
    for action, before in awaited.items():
        for one in before:
            graph.add_dependency(tasks[action], messages.get((one, action.stage), tasks[one]))
    if sending.gradient_first:
        _let_gradients_go_first(graph, schedule, tasks, messages, awaited)
    return tasks | {action: task for (action, _), task in messages.items()} if sending.blocking else tasks


def _needs(schedule: Schedule) -> tuple[dict[Action, list[Action]], dict[Action, list[int]]]:
    """Per action what it waits for, and the stages where it is waited for."""
    actions = dict.fromkeys(action for row in schedule.rows for action in row)
    split = {action.stage for action in actions if action.kind == BACKWARD_INPUT}
    awaited: dict[Action, list[Action]] = {}
    awaiting: dict[Action, list[int]] = {}
    absent = []
    for action in actions:
        if action.kind == BACKWARD_WEIGHT:
            continue  # its I comes before it in the same row
        awaited[action] = needs(action, schedule.stages, action.stage + 1 in split)
        for before in awaited[action]:
            if before not in actions:
                absent.append(f"{action} needs {before}, which is not in the schedule: add it")
            elif before.stage != action.stage:
                awaiting.setdefault(before, []).append(action.stage)
    raise_all(HeteroError, "the pipeline cannot be simulated", absent)
    return awaited, awaiting


def _let_gradients_go_first(
    graph: TaskGraph,
    schedule: Schedule,
    tasks: Mapping[Action, int],
    messages: Mapping[tuple[Action, int], int],
    awaited: Mapping[Action, Sequence[Action]],
) -> None:
    """Let each forward's message wait for the gradient that the next action of its rank waits for."""
    places = {action: place for row in schedule.rows for place, action in enumerate(row)}
    for row in schedule.rows:
        for action, following in pairwise(row):
            message = messages.get((action, action.stage + 1))
            if message is None or action.kind != FORWARD or following.kind not in (BACKWARD, BACKWARD_INPUT):
                continue
            target = Action(action.stage + 1, FORWARD, action.micro_batch)
            for gradient in awaited[following]:
                if gradient.stage == target.stage and places[gradient] < places[target]:
                    graph.add_dependency(message, messages.get((gradient, following.stage), tasks[gradient]))
