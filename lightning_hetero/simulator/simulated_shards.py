"""One step of a shard plan, by the model that plans are made with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import DeviceConstants
from lightning_hetero.simulator.shard_prediction import predict_shard
from lightning_hetero.simulator.shard_step import Passes, Traffic, group_s
from lightning_hetero.simulator.simulated_step import (
    COMMUNICATION,
    COMPUTE,
    RankSeconds,
    SimulatedStep,
    StepSpan,
    whole_step,
)


def simulated_shards(
    plan: ShardPlan,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    constants: Mapping[str, DeviceConstants],
) -> SimulatedStep:
    """Simulate one step; arguments and errors as of :func:`~lightning_hetero.simulator.simulate.simulate`.

    What of a group's seconds is not there when its links cost nothing is exposed communication, and so is the crossing
    between groups, which nothing hides.
    """
    timings = unit_timings(costs, cluster)
    found = predict_shard(plan, cluster, costs, timings, training.state)
    is_block = np.array([unit.is_block for unit in costs.units])
    plain = {kind: Passes.of(row) for kind, row in timings.items()}
    again = {kind: passes.checkpointed(is_block) for kind, passes in plain.items()}
    silent = Traffic.none(len(costs.units))
    seconds: dict[int, RankSeconds] = {}
    for index, group in enumerate(plan.groups):
        mode, count = plan.mode_of(index), plan.micro_batches_of(index)
        passes = [(again if plan.checkpoints(rank) else plain)[cluster.devices[rank].type] for rank in group]
        computing_s = group_s(passes, [plan.batch_shares[rank] for rank in group], count, silent, mode)
        owned = costs.parameters / (1 if mode == "NO_SHARD" else len(group))
        exposed_s = max(0.0, found.group_s[index] - computing_s) + found.crossing_s
        for rank in group:
            seconds[rank] = RankSeconds(
                plan.batch_shares[rank], found.busy_s[rank], exposed_s, owned, found.peak_bytes[rank]
            )
    spans = []
    for rank in range(plan.world_size):
        busy_s, exposed_s = seconds[rank].busy_s, seconds[rank].exposed_s
        spans.append(StepSpan(rank, COMPUTE, "compute", 0.0, busy_s))
        if exposed_s:
            spans.append(StepSpan(rank, COMMUNICATION, "exposed communication", found.step_s - exposed_s, found.step_s))
    return whole_step(
        plan.STRATEGY,
        plan.global_batch_size,
        cluster,
        [seconds[rank] for rank in range(plan.world_size)],
        found.step_s,
        spans,
        constants,
        ["the order within the step is not simulated: computing is drawn first, exposed communication last"],
    )
