"""Predict a run of the study."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from benchmarks.frontier import machine
from benchmarks.frontier.machine import Constants
from benchmarks.frontier.tables import GCDS_PER_NODE, LOCAL_BATCH, models
from benchmarks.frontier.vit import model_costs
from lightning_hetero.cluster import Cluster
from lightning_hetero.plan import ShardPlan
from lightning_hetero.plan.options import hybrid_size
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.shard_events import SimulatedShardStep, simulate_shard

MODES = ("NO_SHARD", "HYBRID_1", "HYBRID_2", "HYBRID_4", "HYBRID_8", "HYBRID_16", "FULL_SHARD", "SHARD_GRAD_OP")

NODES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to do.

    Args:
        step_s: seconds of a step.
        images_per_s: over all GCDs.
        exposed_s: seconds of a step in which a GCD does not compute.
        peak_bytes: of a GCD.
    """

    step_s: float
    images_per_s: float
    exposed_s: float
    peak_bytes: float

    @property
    def fits(self) -> bool:
        """Whether a GCD has that much memory."""
        return self.peak_bytes <= machine.MEMORY_BYTES


def is_possible(sharding: str, nodes: int) -> bool:
    """Whether there are as many GCDs as a group of the mode has."""
    size = hybrid_size(sharding)
    return size is None or size <= nodes * GCDS_PER_NODE


def plan_of(cluster: Cluster, sharding: str) -> ShardPlan:
    """The study's run of a mode: 32 images a GCD, every block recomputed."""
    ranks = cluster.world_size
    size = hybrid_size(sharding) or ranks
    mode = "FULL_SHARD" if hybrid_size(sharding) else sharding
    groups = tuple(tuple(range(start, start + size)) for start in range(0, ranks, size))
    return ShardPlan(
        ranks * LOCAL_BATCH,
        (LOCAL_BATCH,) * ranks,
        groups,
        cluster.device_types(),
        reshard_after_forward=mode == "FULL_SHARD",
        modes=(mode,) * len(groups),
        activation_checkpointing=(True,) * ranks,
    )


def simulate(
    model: str, sharding: str, nodes: int, constants: Constants, execution: Execution | None = None
) -> SimulatedShardStep:
    """The step of a run, event by event."""
    vit, cluster = models()[model], _cluster(nodes, constants)
    costs = model_costs(vit)
    return simulate_shard(
        plan_of(cluster, sharding),
        cluster,
        costs,
        machine.timings(vit, costs, constants),
        machine.STATE,
        execution=execution or Execution(engine="fsdp1"),
        overheads=machine.overheads(constants),
    )


def predict(
    model: str, sharding: str, nodes: int, constants: Constants = machine.FITTED, execution: Execution | None = None
) -> Prediction:
    """Predict a run.

    Args:
        model: one of the six.
        sharding: one of :data:`MODES`.
        nodes: of 8 GCDs.
        constants: of the machine.
        execution: by default FSDP1 with its defaults, as the study ran it.
    """
    step = simulate(model, sharding, nodes, constants, execution)
    images = nodes * GCDS_PER_NODE * LOCAL_BATCH
    peak = step.peaks[0].size_bytes + constants.process_bytes
    return Prediction(step.step_s, images / step.step_s, step.exposed_s[0], peak)


@lru_cache(maxsize=32)
def _cluster(nodes: int, constants: Constants) -> Cluster:
    return machine.cluster(nodes, constants)
