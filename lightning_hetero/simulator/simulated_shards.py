"""One step of a shard plan: every gather, reduction, forward and backward, on the streams that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator import shard_actions
from lightning_hetero.simulator.calibration import DeviceConstants
from lightning_hetero.simulator.devices_alone import alone_samples_per_s
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.shard_events import Lane, Overheads, SimulatedShardStep, simulate_shard
from lightning_hetero.simulator.simulated_step import (
    BETWEEN,
    COMMUNICATION,
    COMPUTE,
    REST,
    RankSeconds,
    SimulatedStep,
    StepSpan,
    whole_step,
)
from lightning_hetero.simulator.topology import Topology

_STREAMS = {
    shard_actions.COMPUTE: COMPUTE,
    shard_actions.SHARD: COMMUNICATION,
    shard_actions.CROSS: BETWEEN,
}


def simulated_shards(
    plan: ShardPlan,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    constants: Mapping[str, DeviceConstants],
    engine: str,
) -> SimulatedStep:
    """Simulate one step; arguments and errors as of :func:`~lightning_hetero.simulator.simulate.simulate`.

    Exposed communication is by how much the step is shorter with links that cost nothing, as far as the rank does not
    compute in that time; what else it does not compute in, it waits for other ranks. Emulated devices are CPU ranks,
    whose collectives are gloo's.
    """
    per_parameter = {kind: constants[kind].optimizer_s_per_parameter for kind in cluster.types if kind in constants}
    found = _events(plan, cluster, costs, training, per_parameter, engine)
    linkless = replace(cluster, within_pair=None, within_node=None, between_nodes=None)
    free = _events(plan, linkless, costs, training, per_parameter, engine)
    ranks = []
    for rank, device in enumerate(cluster.devices):
        group = plan.group_of(rank)
        owned = costs.parameters / (1 if plan.mode_of(group) == "NO_SHARD" else len(plan.groups[group]))
        optimizer_s = owned * per_parameter.get(device.type, 0.0)
        busy_s = found.busy_s[rank] - optimizer_s
        exposed_s = max(0.0, min(found.step_s - free.step_s, found.step_s - found.busy_s[rank]))
        peak_bytes = found.peaks[rank].size_bytes
        ranks.append(RankSeconds(plan.batch_shares[rank], busy_s, exposed_s, 0.0, peak_bytes, optimizer_s))
    alone = alone_samples_per_s(cluster, costs, plan.global_batch_size)
    return whole_step(
        plan.STRATEGY, plan.global_batch_size, alone, cluster, ranks, found.step_s, _spans(plan, found), constants
    )


def least_blocked_s(plan: ShardPlan, cluster: Cluster, costs: ModelCosts, training: Training) -> float:
    """Seconds of a step in which not even the rank that is blocked least computes, which is what runs measure.

    Beside exposed communication these hold what ranks wait for each other within a layer, which a rank cannot tell
    from it. Arguments and errors as of :func:`~lightning_hetero.simulator.simulate.simulate`.
    """
    found = _events(plan, cluster, costs, training, {}, "fsdp2")
    return found.step_s - max(found.busy_s)


def _events(
    plan: ShardPlan,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    optimizer_s_per_parameter: Mapping[str, float],
    engine: str,
) -> SimulatedShardStep:
    return simulate_shard(
        plan,
        cluster,
        costs,
        unit_timings(costs, cluster),
        training.state,
        execution=Execution.of(plan, engine=engine, blocking=cluster.emulate),
        topology=Topology(cluster, "gloo" if cluster.emulate else "nccl"),
        overheads=Overheads(optimizer_s_per_parameter=optimizer_s_per_parameter),
    )


def _spans(plan: ShardPlan, found: SimulatedShardStep) -> list[StepSpan]:
    """Of alike ranks the first one's; what crosses groups is drawn once for each rank that is drawn."""
    timeline = found.timeline
    lanes = [name for name in timeline.resource_names if isinstance(name, Lane)]
    drawn = sorted({lane.ranks[0] for lane in lanes if lane.stream == shard_actions.COMPUTE})
    spans = []
    for task, held, start_s, end_s in zip(
        timeline.names, timeline.resources, timeline.start_s, timeline.end_s, strict=True
    ):
        for resource in held:
            lane = timeline.resource_names[resource]
            if end_s <= start_s or not isinstance(lane, Lane) or lane.stream not in _STREAMS:
                continue
            is_optimizer = isinstance(task, shard_actions.ShardAction) and task.kind == shard_actions.OPTIMIZER
            stream = REST if is_optimizer else _STREAMS[lane.stream]
            ranks = [lane.ranks[0]] if lane.stream == shard_actions.COMPUTE else [r for r in drawn if r in lane.ranks]
            spans += [StepSpan(rank, stream, str(task), start_s, end_s) for rank in ranks]
    return spans
