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
from lightning_hetero.schedule import Action, peaks_in_flight
from lightning_hetero.simulator.calibration import DeviceConstants
from lightning_hetero.simulator.pipeline import PipelineTimeline, simulate_pipeline, simulate_reductions
from lightning_hetero.simulator.pipeline_memory import StageUnits, rank_memory
from lightning_hetero.simulator.simulated_step import COMPUTE, RankSeconds, SimulatedStep, StepSpan, whole_step


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
    seconds = pipelines_seconds(plan, cluster, costs, training)
    timelines = [simulate_pipeline(plan.schedule_of(index), own.stages, own.hop_s) for index, own in enumerate(seconds)]
    designs = [
        PipelineDesign(
            pipeline.ranks,
            tuple(stop - start for start, stop in (stage.units for stage in pipeline.stages)),
            pipeline.micro_batches,
        )
        for pipeline in plan.pipelines
    ]
    reductions = Problem(cluster, costs, training, unit_timings(costs, cluster)).reductions(designs)
    ends = [timeline.stage_end_s for timeline in timelines]
    step_s = max(timeline.step_s for timeline in timelines)
    if reductions:
        step_s = simulate_reductions(ends, reductions, [len(one.ranks) for one in plan.pipelines]).step_s
    exposed = dict.fromkeys(range(plan.world_size), 0.0)
    for reduction in reductions:
        for rank in {plan.pipelines[pipeline].rank_of(stage) for pipeline, stage in reduction.owners}:
            exposed[rank] += reduction.seconds
    ranks = [RankSeconds(0, 0.0, 0.0, 0.0, 0)] * plan.world_size
    spans: list[StepSpan] = []
    for index, timeline in enumerate(timelines):
        for place, rank in enumerate(plan.pipelines[index].ranks):
            ranks[rank] = _rank(plan, costs, training, index, rank, timeline.busy_s[place], exposed[rank])
        spans += _spans(plan, index, timeline)
    return whole_step(plan.STRATEGY, plan.global_batch_size, cluster, ranks, step_s, spans, constants)


def _rank(
    plan: PipelinePlan,
    costs: ModelCosts,
    training: Training,
    index: int,
    rank: int,
    busy_s: float,
    exposed_s: float,
) -> RankSeconds:
    pipeline = plan.pipelines[index]
    own = {
        stage: StageUnits(*pipeline.stages[stage].units, pipeline.stages[stage].activation_checkpointing)
        for stage in pipeline.stages_of(rank)
    }
    row = plan.schedule_of(index).rows[pipeline.ranks.index(rank)]
    memory = rank_memory(costs, own, peaks_in_flight(row), pipeline.micro_batches, state=training.state)
    units = [unit for stage in own.values() for unit in costs.units[stage.start : stage.stop]]
    samples = min(pipeline.micro_batches * plan.micro_batch_size, plan.global_batch_size)
    parameters = sum(unit.parameters for unit in units)
    return RankSeconds(samples, busy_s, exposed_s, parameters, memory.peak_bytes(plan.micro_batch_size))


def _spans(plan: PipelinePlan, index: int, timeline: PipelineTimeline) -> list[StepSpan]:
    pipeline, own = plan.pipelines[index], timeline.timeline
    return [
        StepSpan(pipeline.rank_of(action.stage), COMPUTE, str(action), start_s, end_s)
        for action, start_s, end_s in zip(own.names, own.start_s, own.end_s, strict=True)
        if isinstance(action, Action)  # and no message, which two ranks share
    ]
