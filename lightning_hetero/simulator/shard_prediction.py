"""What a shard plan is expected to do: seconds and bytes, as it is written, whoever made it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.plan import RankPrediction, ShardPlan
from lightning_hetero.simulator.comm import Network, Spread, spread_of
from lightning_hetero.simulator.memory import MemoryPoint, RankMemory, StateBytes
from lightning_hetero.simulator.shard_step import Passes, Traffic, busy_s, crossing_s, group_s
from lightning_hetero.simulator.sharded_memory import ReduceBuffers, shard_memory


@dataclass(frozen=True)
class ShardPrediction:
    """Seconds and bytes of one step of a shard plan.

    Args:
        step_s: seconds of the step.
        group_s: seconds of each group until the crossing.
        crossing_s: seconds of reducing gradients across groups.
        busy_s: per rank, seconds that it computes.
        peaks: per rank, the moment of its peak memory, in a micro-batch of its largest size.
        peak_bytes: per rank, bytes at that moment.
    """

    step_s: float
    group_s: tuple[float, ...]
    crossing_s: float
    busy_s: tuple[float, ...]
    peaks: tuple[MemoryPoint, ...]
    peak_bytes: tuple[int, ...]

    def put_into(self, plan: ShardPlan) -> ShardPlan:
        """The plan with what is predicted of it."""
        predictions = tuple(
            RankPrediction.of(busy_s, self.step_s, peak_bytes)
            for busy_s, peak_bytes in zip(self.busy_s, self.peak_bytes, strict=True)
        )
        return replace(plan, predicted_step_s=self.step_s, predictions=predictions)


def predict_shard(
    plan: ShardPlan,
    cluster: Cluster,
    costs: ModelCosts,
    timings: dict[str, tuple[UnitTiming, ...]],
    state: StateBytes,
) -> ShardPrediction:
    """Predict one step of a plan by the models of ``shard_step`` and ``sharded_memory``.

    Args:
        plan: for this cluster.
        cluster: one device per rank.
        costs: of the model.
        timings: of every unit by device type (:func:`~lightning_hetero.planner.seconds.unit_timings`).
        state: bytes per parameter.

    Raises:
        PlanError: if the plan is not valid or not for this cluster.
    """
    plan.validate(cluster)
    network = Network.of(cluster)
    is_block = np.array([unit.is_block for unit in costs.units])
    plain = {kind: Passes.of(each) for kind, each in timings.items()}
    again = {kind: passes.checkpointed(is_block) for kind, passes in plain.items()}
    buffers = ReduceBuffers.of(cluster)
    groups, busy = [], [0.0] * plan.world_size
    peaks: dict[int, tuple[MemoryPoint, int]] = {}
    memories: dict[tuple[int, str, bool, bool], RankMemory] = {}
    needed: dict[tuple[object, ...], tuple[MemoryPoint, int]] = {}  # equal ranks are asked for once
    for index, group in enumerate(plan.groups):
        mode, count = plan.mode_of(index), plan.micro_batches_of(index)
        passes = [(again if plan.checkpoints(r) else plain)[cluster.devices[r].type] for r in group]
        traffic = Traffic.of(costs, state, network, spread_of(cluster, group), mode)
        groups.append(group_s(passes, [plan.batch_shares[r] for r in group], count, traffic, mode))
        for rank, own in zip(group, passes, strict=True):
            busy[rank] = busy_s(own, plan.batch_shares[rank], count)
            samples = max(1, -(-plan.batch_shares[rank] // count))
            key = (len(group), mode, plan.checkpoints(rank), count > 1)
            if (key, samples) not in needed:
                if key not in memories:
                    memories[key] = group_memory(costs, state, buffers, *key)
                peak = memories[key].peak(samples)
                needed[key, samples] = (peak, peak.needed_bytes(samples))
            peaks[rank] = needed[key, samples]
    crossing = crossing_s(costs.parameters, state, network, *replicas(plan, cluster))
    return ShardPrediction(
        max(groups) + crossing,
        tuple(groups),
        crossing,
        tuple(busy),
        tuple(peaks[r][0] for r in range(plan.world_size)),
        tuple(peaks[r][1] for r in range(plan.world_size)),
    )


def group_memory(
    costs: ModelCosts,
    state: StateBytes,
    buffers: ReduceBuffers,
    size: int,
    mode: str,
    checkpointing: bool,
    accumulates: bool,
) -> RankMemory:
    """Memory of a rank in a group of ``size``, as a function of the samples of its micro-batch."""
    return shard_memory(
        costs.units,
        size,
        state=state,
        root=[unit.name for unit in costs.units if not unit.is_block],
        mode=mode,
        checkpointing=checkpointing,
        loss_bytes=costs.loss_bytes,
        accumulates=accumulates,
        buffers=buffers,
    )


def replicas(plan: ShardPlan, cluster: Cluster) -> tuple[set[int], Spread]:
    """The numbers of ranks that share the rows of a replica, and how replicas lie on nodes.

    A replica that spans several nodes counts as on a node of its own: its rows' owners are here and there.
    """
    sizes: set[int] = set()
    nodes: Counter[object] = Counter()
    for index, group in enumerate(plan.groups):
        is_whole = plan.mode_of(index) == "NO_SHARD"
        sizes.add(1 if is_whole else len(group))
        for replica in [(rank,) for rank in group] if is_whole else [group]:
            homes = {cluster.devices[rank].node for rank in replica}
            nodes[homes.pop() if len(homes) == 1 else replica] += 1
    return sizes, tuple(sorted(nodes.values(), reverse=True))
