"""Find the constants again from the study's tables: ``python -m benchmarks.frontier --fit``.

Minimised is the mean absolute relative error of throughput from 1 to 64 nodes, and a quarter of that of FULL_SHARD
alone; then, for ``process_bytes``, the largest relative error of a peak. ``memory_bytes_per_s`` is not fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.frontier import machine
from benchmarks.frontier.machine import Constants
from benchmarks.frontier.predict import plan_of, predict
from benchmarks.frontier.tables import GCDS_PER_NODE, LOCAL_BATCH, Throughput, memory, models, weak_scaling
from benchmarks.frontier.vit import model_costs
from lightning_hetero.cluster import Cluster
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.shard_actions import BACKWARD, COMPUTE, CROSS, OPTIMIZER, shard_actions
from lightning_hetero.simulator.shard_events import sent_bytes
from lightning_hetero.simulator.topology import Placement, Topology

MOST_NODES = 64

FIELDS = ("matmul_flops_per_s", "token_s", "contention_bytes_per_s", "hop_s", "half_bandwidth_nodes")
"""of :class:`Constants`, fitted to throughput"""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class _Action:
    stream: int
    after: tuple[int, ...]
    kind: str
    flops: float = 0.0
    tokens: float = 0.0
    parameters: float = 0.0
    size_bytes: float = 0.0
    sent_bytes: float = 0.0
    placement: Placement | None = None


class Case:
    """A run as a list of actions, whose seconds follow quickly from any constants.

    All ranks are equal, so each stream is one list: :meth:`step_s` is what ``simulate_shard`` finds, without a task
    graph. A test holds the two equal.
    """

    def __init__(self, row: Throughput, topology: Topology) -> None:
        vit = models()[row.model]
        costs = model_costs(vit)
        units = {unit.name: unit for unit in costs.units}
        plan = plan_of(topology.cluster, row.sharding)
        owners = 1 if plan.mode_of(0) == "NO_SHARD" else len(plan.groups[0])
        streams = {COMPUTE: 0, CROSS: 2}
        self.nodes = row.nodes
        self.images = row.nodes * GCDS_PER_NODE * LOCAL_BATCH
        self.actions = []
        for action in shard_actions(plan, costs, 0, state=machine.STATE, execution=Execution(engine="fsdp1")):
            stream = streams.get(action.stream, 1)
            if action.is_collective:
                place = topology.place(action.ranks)
                sizes = {"size_bytes": action.size_bytes, "sent_bytes": sent_bytes(action)}
                self.actions.append(_Action(stream, action.after, action.kind, **sizes, placement=place))
            elif action.kind == OPTIMIZER:
                self.actions.append(_Action(stream, action.after, action.kind, parameters=costs.parameters / owners))
            else:
                unit = units[action.unit]
                forward = action.kind != BACKWARD or unit.is_block  # a block is recomputed
                backward = action.kind == BACKWARD
                flops = LOCAL_BATCH * (forward * unit.forward_flops + backward * unit.backward_flops)
                passes = forward + backward * machine.BACKWARD_PASSES
                tokens = vit.tokens * LOCAL_BATCH * passes if unit.is_block else 0
                self.actions.append(_Action(stream, action.after, "compute", flops, tokens))

    def step_s(self, constants: Constants, topology: Topology) -> float:
        """Seconds of a step."""
        known: dict[tuple[object, ...], float] = {}
        free, ends, waiting_bytes = [0.0, 0.0, 0.0], [], 0.0
        for action in self.actions:
            if action.placement is not None:
                key = (action.kind, action.size_bytes, action.placement)
                if key not in known:
                    known[key] = topology.seconds(*key)
                seconds = known[key]
                waiting_bytes += action.sent_bytes
            elif action.kind == OPTIMIZER:
                seconds = action.parameters * machine.ADAMW_BYTES / constants.memory_bytes_per_s
            else:
                seconds = action.flops / constants.matmul_flops_per_s + action.tokens * constants.token_s
                seconds += waiting_bytes / constants.contention_bytes_per_s
                waiting_bytes = 0.0
            begin = max([free[action.stream], *(ends[index] for index in action.after)])
            free[action.stream] = begin + seconds
            ends.append(begin + seconds)
        return max(ends)


def fit(without: str | None = None, rounds: int = 160) -> Constants:
    """The constants that explain the tables best, from rough guesses.

    Args:
        without: name of a model that is left out, to be predicted from the others.
        rounds: of the search, from each of two starts.
    """
    guess = Constants(85e12, 0.5e-6, machine.FITTED.memory_bytes_per_s, 100e9, 40e-6, 6.0, 0.2e9)
    rows = [row for row in weak_scaling() if row.nodes <= MOST_NODES and row.model != without]
    clusters = {nodes: machine.cluster(nodes, guess) for nodes in {row.nodes for row in rows}}
    cases = [Case(row, Topology(clusters[row.nodes])) for row in rows]
    published = np.array([row.images_per_s for row in rows])
    full = np.array([row.sharding == "FULL_SHARD" for row in rows])

    def error(point: Vector) -> float:
        constants = _at(guess, point)
        topologies = {nodes: Topology(_linked(each, constants)) for nodes, each in clusters.items()}
        found = [case.images / case.step_s(constants, topologies[case.nodes]) for case in cases]
        errors = np.abs(np.array(found) / published - 1)
        return float(errors.mean() + errors[full].mean() / 4)

    best = min((minimise(error, np.zeros(len(FIELDS)), step, rounds) for step in (0.2, -0.3)), key=lambda each: each[1])
    return _with_process_bytes(_at(guess, best[0]), without)


def held_out_errors() -> dict[str, dict[str, float]]:
    """Of each model, the mean errors when the constants are fitted to the other models alone.

    Returns:
        By model: ``throughput`` (1 to 64 nodes) and ``memory``, mean absolute relative errors.
    """
    found = {}
    for model in dict.fromkeys(row.model for row in weak_scaling()):
        constants = fit(without=model)
        errors = [
            predict(model, row.sharding, row.nodes, constants).images_per_s / row.images_per_s - 1
            for row in weak_scaling()
            if row.model == model and row.nodes <= MOST_NODES
        ]
        peaks = [
            predict(model, row.sharding, row.nodes or 8, constants).peak_bytes / (row.peak_gb * 1e9) - 1
            for row in memory()
            if row.model == model
        ]
        found[model] = {"throughput": float(np.abs(errors).mean()), "memory": float(np.abs(peaks).mean())}
    return found


def minimise(error: Callable[[Vector], float], start: Vector, step: float, rounds: int) -> tuple[Vector, float]:
    """A minimum by the simplex of Nelder and Mead (1965).

    Args:
        error: of a point.
        start: a point.
        step: how far the first simplex reaches from it along each axis.
        rounds: how often the simplex moves.

    Returns:
        The best point found, and its error.
    """
    simplex = [start, *(start + step * axis for axis in np.eye(len(start)))]
    errors = [error(point) for point in simplex]
    for _ in range(rounds):
        order = np.argsort(errors)
        simplex, errors = [simplex[index] for index in order], [errors[index] for index in order]
        middle = np.mean(simplex[:-1], axis=0)
        away = middle - simplex[-1]
        reflected = middle + away
        found = error(reflected)
        if found < errors[0]:
            further = middle + 2 * away
            reached = error(further)
            simplex[-1], errors[-1] = (further, reached) if reached < found else (reflected, found)
        elif found < errors[-2]:
            simplex[-1], errors[-1] = reflected, found
        else:
            nearer = middle - away / 2
            found = error(nearer)
            if found < errors[-1]:
                simplex[-1], errors[-1] = nearer, found
            else:
                simplex = [simplex[0], *((point + simplex[0]) / 2 for point in simplex[1:])]
                errors = [errors[0], *(error(point) for point in simplex[1:])]
    index = int(np.argmin(errors))
    return simplex[index], errors[index]


def _at(guess: Constants, point: Sequence[float] | Vector) -> Constants:
    """The constants at a point: logarithms of factors to the guess."""
    factors = zip(FIELDS, np.exp(point), strict=True)
    return replace(guess, **{name: float(getattr(guess, name) * factor) for name, factor in factors})


def _linked(cluster: Cluster, constants: Constants) -> Cluster:
    """The cluster with the links of other constants."""
    small = machine.cluster(1, constants)
    return replace(
        cluster,
        within_pair=small.within_pair,
        within_node=small.within_node,
        between_nodes=small.between_nodes,
    )


def _with_process_bytes(constants: Constants, without: str | None) -> Constants:
    bare = replace(constants, process_bytes=0.0)
    peaks = [
        (predict(row.model, row.sharding, row.nodes or 8, bare).peak_bytes, row.peak_gb * 1e9)
        for row in memory()
        if row.model != without
    ]

    def worst(process_bytes: float) -> float:
        return max(abs((peak + process_bytes) / published - 1) for peak, published in peaks)

    return replace(constants, process_bytes=min((step * 1e7 for step in range(51)), key=worst))
