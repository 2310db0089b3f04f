"""Simulate a step of a shard plan, event by event.

Every rank has a compute stream, its shard group a stream of gathers and reductions, and all groups one of what crosses
them; each stream runs in the order of :mod:`~lightning_hetero.simulator.shard_actions`, beside the others::

    compute   | F embed | F b0 | F b1 | F head | B head | B b1 | B b0 | B embed |           | optimizer |
    shard       | gather b0 | gather b1 |  gather b1 | gather b0 | reduce b1 | reduce b0 |
    cross                                                        | all-reduce b1 | all-reduce b0 |
    input     | reads the batch of the next step |

Ranks of a group that are alike (type, samples, recomputing) are simulated once, and so are groups that are alike, so
that a step of 1,024 equal ranks has as many tasks as one of two. A collective begins when all its ranks are there.

What crosses groups is simulated unit by unit: it begins when the last group is ready, and takes what the slowest of
the groups' first ranks needs for all its pieces, one after the other.

Seconds of compute are those of :mod:`~lightning_hetero.simulator.shard_step`, of communication those of
:mod:`~lightning_hetero.simulator.topology`. :class:`Overheads` has what comes on top; by default nothing does.

Not in it: what a host needs to launch its kernels, noise, memory that has to be freed first, traffic of other jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.engine import TaskGraph, Timeline
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.shard_actions import (
    BACKWARD,
    COMPUTE,
    CROSS,
    FORWARD,
    OPTIMIZER,
    SHARD,
    Shapes,
    ShardAction,
    shard_actions,
)
from lightning_hetero.simulator.shard_peaks import ShardPeak, shard_peaks
from lightning_hetero.simulator.shard_step import Passes
from lightning_hetero.simulator.topology import ALL_REDUCE, Topology


@dataclass(frozen=True)
class Overheads:
    """What a step takes beside compute and communication.

    Args:
        optimizer_s_per_parameter: seconds of the optimizer's step for each parameter that a rank owns, by device type.
        input_s_per_sample: seconds that a rank's loader needs for a sample; it works beside the step.
        contention_bytes_per_s: a collective costs the device that it runs on a second of compute for so many bytes that
            it sends, whether or not it is hidden: communication kernels take compute units and memory bandwidth.
            ``None`` for none.

    Raises:
        HeteroError: listing values that are not valid.
    """

    optimizer_s_per_parameter: Mapping[str, float] = field(default_factory=dict)
    input_s_per_sample: float = 0.0
    contention_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        seconds = {f"optimizer_s_per_parameter[{kind!r}]": s for kind, s in self.optimizer_s_per_parameter.items()}
        seconds["input_s_per_sample"] = self.input_s_per_sample
        problems = [f"{name} is {value!r}: give zero or more" for name, value in seconds.items() if not value >= 0]
        if self.contention_bytes_per_s is not None and not self.contention_bytes_per_s > 0:
            problems.append(f"contention_bytes_per_s is {self.contention_bytes_per_s!r}: give more than zero, or None")
        raise_all(HeteroError, "the overheads of a step are not valid", problems)


class Lane(NamedTuple):
    """One stream of the timeline.

    Args:
        ranks: that it stands for.
        stream: "compute", "shard", "cross" or "input".
    """

    ranks: tuple[int, ...]
    stream: str

    def __str__(self) -> str:
        first = f"rank {self.ranks[0]}" + (f" and {len(self.ranks) - 1} alike" if len(self.ranks) > 1 else "")
        return f"{first}: {self.stream}"


@dataclass(frozen=True)
class SimulatedShardStep:
    """What one step of a shard plan is expected to do.

    Args:
        step_s: seconds of the step.
        busy_s: per rank, seconds in which it computes: forward, backward, optimizer, and what contention adds.
        exposed_s: per rank, seconds in which it does not: communication that nothing hides, and waiting for others.
        communication_s: per rank, seconds of the collectives it takes part in, hidden or not.
        peaks: per rank, its peak memory.
        timeline: all tasks, named by their :class:`~lightning_hetero.simulator.shard_actions.ShardAction` (or "input");
            resources are named by their :class:`Lane`.
    """

    step_s: float
    busy_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    communication_s: tuple[float, ...]
    peaks: tuple[ShardPeak, ...]
    timeline: Timeline


def simulate_shard(
    plan: ShardPlan,
    cluster: Cluster,
    costs: ModelCosts,
    timings: Mapping[str, Sequence[UnitTiming]],
    state: StateBytes,
    *,
    execution: Execution | None = None,
    topology: Topology | None = None,
    overheads: Overheads | None = None,
    shapes: Shapes | None = None,
) -> SimulatedShardStep:
    """Simulate one step.

    Args:
        plan: for this cluster.
        cluster: one device per rank, and links.
        costs: of the model.
        timings: of every unit by device type (:func:`~lightning_hetero.planner.seconds.unit_timings`).
        state: bytes per parameter.
        execution: engine and options; by default FSDP2 with the plan's options.
        topology: what collectives cost; by default the cluster's links under NCCL.
        overheads: by default none.
        shapes: of the parameters, for exact sizes (:func:`~lightning_hetero.simulator.shard_actions.shard_actions`).

    Raises:
        PlanError: if the plan is not valid or not for this cluster.
        HeteroError: if a device type has no timings, or the engine cannot run the plan.
    """
    plan.validate(cluster)
    raise_all(
        HeteroError,
        "the step cannot be simulated",
        [
            f"device type {kind!r} has no timings: measure it, or give a speed"
            for kind in cluster.types
            if kind not in timings
        ],
    )
    execution = execution or Execution.of(plan)
    step = _Simulation(
        plan, cluster, costs, timings, state, execution, topology or Topology(cluster), overheads or Overheads(), shapes
    )
    return step.run()


class _Kind(NamedTuple):
    """Ranks of a group that are alike."""

    type: str
    share: int
    recomputes: bool


@dataclass
class _Groups:
    """Groups that are alike."""

    index: int  # of the first one
    kinds: dict[_Kind, list[int]]  # ranks, of all of them
    actions: tuple[ShardAction, ...]
    tasks: list[dict[_Kind | None, int]] = field(default_factory=list)  # per action, by kind; None for collectives
    compute: dict[_Kind, int] = field(default_factory=dict)  # resources
    shard: int = -1
    communication_s: float = 0.0


class _Simulation:
    def __init__(
        self,
        plan: ShardPlan,
        cluster: Cluster,
        costs: ModelCosts,
        timings: Mapping[str, Sequence[UnitTiming]],
        state: StateBytes,
        execution: Execution,
        topology: Topology,
        overheads: Overheads,
        shapes: Shapes | None,
    ) -> None:
        self.plan, self.cluster, self.costs, self.state = plan, cluster, costs, state
        self.execution, self.topology, self.overheads, self.shapes = execution, topology, overheads, shapes
        is_block = np.array([unit.is_block for unit in costs.units])
        plain = {kind: Passes.of(timings[kind]) for kind in cluster.types}
        self.passes = {(kind, False): passes for kind, passes in plain.items()}
        self.passes |= {(kind, True): passes.checkpointed(is_block) for kind, passes in plain.items()}
        self.places = {unit.name: place for place, unit in enumerate(costs.units)}
        self.graph = TaskGraph()
        self.lanes: list[Lane] = []
        self.known: dict[tuple[str, float, tuple[int, ...]], float] = {}

    def run(self) -> SimulatedShardStep:
        alike = self._alike()
        for groups in alike:
            self._add_streams(groups)
            self._add_actions(groups)
        self._add_crossing(alike)
        for groups in alike:
            self._add_end(groups)
        timeline = self.graph.run()
        return self._result(alike, timeline)

    # -- who is simulated ----------------------------------------------------------------------------------------------

    def _kind(self, rank: int) -> _Kind:
        device = self.cluster.devices[rank]
        return _Kind(device.type, self.plan.batch_shares[rank], self.plan.checkpoints(rank))

    def _alike(self) -> list[_Groups]:
        found: dict[object, _Groups] = {}
        for index, group in enumerate(self.plan.groups):
            kinds: dict[_Kind, list[int]] = defaultdict(list)
            for rank in group:
                kinds[self._kind(rank)].append(rank)
            counts = frozenset((kind, len(ranks)) for kind, ranks in kinds.items())
            place = self.topology.place(group)
            key = (self.plan.mode_of(index), self.plan.micro_batches_of(index), counts, place)
            if key in found:
                for kind, ranks in kinds.items():
                    found[key].kinds[kind] += ranks
                continue
            actions = shard_actions(
                self.plan, self.costs, min(group), state=self.state, execution=self.execution, shapes=self.shapes
            )
            found[key] = _Groups(index, dict(kinds), actions)
        return list(found.values())

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _resource(self, ranks: Sequence[int], stream: str) -> int:
        lane = Lane(tuple(ranks), stream)
        self.lanes.append(lane)
        return self.graph.add_resource(lane)

    def _add_streams(self, groups: _Groups) -> None:
        for kind, ranks in groups.kinds.items():
            groups.compute[kind] = self._resource(ranks, COMPUTE)
        groups.shard = self._resource([rank for ranks in groups.kinds.values() for rank in ranks], SHARD)

    def _add_actions(self, groups: _Groups) -> None:
        """All but the optimizer and what crosses groups."""
        waiting_bytes = 0.0  # sent since the last compute
        for action in groups.actions:
            added: dict[_Kind | None, int] = {}
            if action.is_collective:
                waiting_bytes += sent_bytes(action)
            if action.stream == CROSS or action.kind == OPTIMIZER:
                groups.tasks.append(added)
                continue
            if action.is_collective:
                before = [task for index in action.after for task in groups.tasks[index].values()]
                seconds = self._collective_s(action)
                groups.communication_s += seconds
                added[None] = self.graph.add_task(action, groups.shard, seconds, before)
            else:
                lost_s = waiting_bytes / (self.overheads.contention_bytes_per_s or float("inf"))
                waiting_bytes = 0.0
                for kind, ranks in groups.kinds.items():
                    before = [groups.tasks[index][None] for index in action.after]
                    seconds = self._compute_s(action, kind, ranks[0]) + lost_s
                    added[kind] = self.graph.add_task(action, groups.compute[kind], seconds, before)
            groups.tasks.append(added)

    def _compute_s(self, action: ShardAction, kind: _Kind, rank: int) -> float:
        passes, place = self.passes[kind.type, kind.recomputes], self.places[action.unit]
        samples = max(1, self.plan.micro_batch_samples(rank)[action.micro_batch])
        if action.kind == FORWARD:
            return float(passes.forward_fixed_s[place] + passes.forward_per_sample_s[place] * samples)
        assert action.kind == BACKWARD
        return float(passes.backward_fixed_s[place] + passes.backward_per_sample_s[place] * samples)

    def _collective_s(self, action: ShardAction) -> float:
        key = (action.kind, action.size_bytes, action.ranks)
        if key not in self.known:
            self.known[key] = self.topology.seconds(action.kind, action.size_bytes, self.topology.place(action.ranks))
        return self.known[key]

    def _add_crossing(self, alike: Sequence[_Groups]) -> None:
        """One task for each unit that crosses, in the one order in which all ranks walk through them."""
        own: list[dict[str, list[ShardAction]]] = []
        for groups in alike:
            crossing = [action for action in groups.actions if action.stream == CROSS]
            own.append({unit: list(each) for unit, each in groupby(crossing, key=lambda action: action.unit)})
        units = next((list(each) for each in own if each), [])
        if not units:
            return
        stream = self._resource(range(self.plan.world_size), CROSS)
        for unit in units:
            before, seconds, name = [], 0.0, None
            for groups, crossing_of in zip(alike, own, strict=True):
                mine = crossing_of.get(unit, [])
                taken = sum(self._collective_s(action) for action in mine)
                groups.communication_s += taken
                if name is None or taken > seconds:
                    name = mine[0] if mine else name
                seconds = max(seconds, taken)
                waits = {index for action in mine for index in action.after}
                before += [task for index in waits for task in groups.tasks[index].values()]
            self.graph.add_task(name, stream, seconds, before)

    def _add_end(self, groups: _Groups) -> None:
        """The optimizer, when all communication is over, and the loader's work on the next batch."""
        own = self.costs.parameters / self._owners(groups.index)
        last = self._last_tasks(groups)
        for kind, ranks in groups.kinds.items():
            seconds = own * self.overheads.optimizer_s_per_parameter.get(kind.type, 0.0)
            self.graph.add_task(groups.actions[-1], groups.compute[kind], seconds, last)
            if self.overheads.input_s_per_sample:
                reading_s = kind.share * self.overheads.input_s_per_sample
                self.graph.add_task("input", self._resource(ranks, "input"), reading_s)

    def _last_tasks(self, groups: _Groups) -> list[int]:
        """What the optimizer waits for: the last tasks of the streams of communication."""
        lasts = [self.graph.last_task(groups.shard)]
        lasts += [self.graph.last_task(index) for index, lane in enumerate(self.lanes) if lane.stream == CROSS]
        return [task for task in lasts if task is not None]

    def _owners(self, index: int) -> int:
        return 1 if self.plan.mode_of(index) == "NO_SHARD" else len(self.plan.groups[index])

    # -- result --------------------------------------------------------------------------------------------------------

    def _result(self, alike: Sequence[_Groups], timeline: Timeline) -> SimulatedShardStep:
        world = self.plan.world_size
        busy, sent = [0.0] * world, [0.0] * world
        for groups in alike:
            for kind, ranks in groups.kinds.items():
                for rank in ranks:
                    busy[rank] = timeline.busy_s[groups.compute[kind]]
                    sent[rank] = groups.communication_s
        step = timeline.makespan_s
        peaks = shard_peaks(self.plan, self.cluster, self.costs, self.state, self.execution)
        exposed = tuple(step - seconds for seconds in busy)
        return SimulatedShardStep(step, tuple(busy), exposed, tuple(sent), peaks, timeline)


def sent_bytes(action: ShardAction) -> float:
    """Bytes that each rank of a collective sends, in a ring."""
    ranks = len(action.ranks)
    return action.size_bytes * (ranks - 1) / ranks * (2 if action.kind == ALL_REDUCE else 1)
