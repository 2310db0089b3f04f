"""One step of a pipeline plan: every action of its schedules, messages between stages, gradients between pipelines."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import PipelinePlan
from lightning_hetero.planner.pipeline_design import PipelineDesign, Problem
from lightning_hetero.planner.planned_stages import pipelines_seconds
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.schedule import peaks_in_flight
from lightning_hetero.simulator.calibration import DeviceConstants
from lightning_hetero.simulator.devices_alone import alone_samples_per_s
from lightning_hetero.simulator.pipeline import Hop, compute_s
from lightning_hetero.simulator.pipeline_memory import StageUnits, rank_memory
from lightning_hetero.simulator.pipelines import (
    GRADIENTS,
    OPTIMIZER,
    PipelineLoad,
    PipelinesTimeline,
    simulate_pipelines,
)
from lightning_hetero.simulator.reductions import Reduction
from lightning_hetero.simulator.simulated_step import (
    COMMUNICATION,
    COMPUTE,
    MESSAGES,
    REST,
    RankSeconds,
    SimulatedStep,
    StepSpan,
    whole_step,
)

_STREAMS = {GRADIENTS: COMMUNICATION, OPTIMIZER: REST}


def simulated_pipelines(
    plan: PipelinePlan,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    constants: Mapping[str, DeviceConstants],
) -> SimulatedStep:
    """Simulate one step; arguments and errors as of :func:`~lightning_hetero.simulator.simulate.simulate`.

    A rank that is in no pipeline waits for the whole step. Reductions of gradients between pipelines are exposed; a
    message that a stage waits for counts as waiting.
    """
    loads = tuple(_loads(plan, cluster, costs, training, constants))
    reductions = Problem(cluster, costs, training, unit_timings(costs, cluster)).reductions(_designs(plan))
    timeline = simulate_pipelines(loads, reductions)
    ranks = [RankSeconds(0, 0.0, 0.0, 0.0, 0)] * plan.world_size
    for index, (pipeline, load) in enumerate(zip(plan.pipelines, loads, strict=True)):
        for row, (rank, busy_s) in enumerate(zip(pipeline.ranks, compute_s(load.schedule, load.stages), strict=True)):
            ranks[rank] = RankSeconds(
                min(pipeline.micro_batches * plan.micro_batch_size, plan.global_batch_size),
                busy_s,
                _exposed_s(plan, reductions, rank),
                0.0,
                _peak_bytes(plan, costs, training, index, row, load),
                sum(load.optimizer_s[row :: len(pipeline.ranks)]),
            )
    alone = alone_samples_per_s(cluster, costs, plan.global_batch_size)
    return whole_step(
        plan.STRATEGY, plan.global_batch_size, alone, cluster, ranks, timeline.step_s, _spans(plan, timeline), constants
    )


def _loads(
    plan: PipelinePlan,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    constants: Mapping[str, DeviceConstants],
) -> list[PipelineLoad]:
    found = []
    for index, own in enumerate(pipelines_seconds(plan, cluster, costs, training)):
        pipeline = plan.pipelines[index]
        optimizers = []
        for stage, each in enumerate(pipeline.stages):
            device = constants.get(cluster.devices[pipeline.rank_of(stage)].type, DeviceConstants())
            parameters = sum(unit.parameters for unit in costs.units[each.units[0] : each.units[1]])
            optimizers.append(device.optimizer_s_per_parameter * parameters)
        hops = tuple(map(Hop, own.hop_s))
        found.append(PipelineLoad(plan.schedule_of(index), own.stages, hops, tuple(optimizers)))
    return found


def _designs(plan: PipelinePlan) -> list[PipelineDesign]:
    return [
        PipelineDesign(
            pipeline.ranks,
            tuple(stop - start for start, stop in (stage.units for stage in pipeline.stages)),
            pipeline.micro_batches,
        )
        for pipeline in plan.pipelines
    ]


def _exposed_s(plan: PipelinePlan, reductions: list[Reduction], rank: int) -> float:
    """Seconds of the reductions that a rank takes part in."""
    return sum(
        reduction.seconds
        for reduction in reductions
        if any(plan.pipelines[pipeline].rank_of(stage) == rank for pipeline, stage in reduction.owners)
    )


def _peak_bytes(
    plan: PipelinePlan, costs: ModelCosts, training: Training, index: int, row: int, load: PipelineLoad
) -> int:
    pipeline = plan.pipelines[index]
    own = {
        stage: StageUnits(*pipeline.stages[stage].units, pipeline.stages[stage].activation_checkpointing)
        for stage in pipeline.stages_of(pipeline.ranks[row])
    }
    in_flight = peaks_in_flight(load.schedule.rows[row])
    memory = rank_memory(costs, own, in_flight, pipeline.micro_batches, state=training.state)
    return memory.peak_bytes(plan.micro_batch_size)


def _spans(plan: PipelinePlan, timeline: PipelinesTimeline) -> list[StepSpan]:
    """Those of the timeline, whose ranks are counted through the pipelines."""
    ranks = [rank for pipeline in plan.pipelines for rank in pipeline.ranks]
    spans = [
        StepSpan(ranks[span.rank], _STREAMS.get(span.kind, COMPUTE), span.name, span.start_s, span.end_s)
        for span in timeline.spans
    ]
    return spans + [
        StepSpan(ranks[each.rank], f"{MESSAGES} to rank {ranks[each.receiver]}", each.name, each.start_s, each.end_s)
        for each in timeline.messages
    ]
