"""Seconds of a pipeline plan's stages and messages, from what the plan was made from."""

from __future__ import annotations

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import PipelinePlan
from lightning_hetero.planner.pipeline_design import Problem
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.planned_step import PipelineSeconds


def pipelines_seconds(
    plan: PipelinePlan, cluster: Cluster, costs: ModelCosts, training: Training
) -> tuple[PipelineSeconds, ...]:
    """What one micro-batch takes in each stage, and its message between two, for each pipeline.

    Args:
        plan: of these units.
        cluster: that it was made for, with the types that the costs know.
        costs: that it was made from.
        training: global batch, precision, optimizer.

    Raises:
        HeteroError: if seconds are not known.
    """
    problem = Problem(cluster, costs, training, unit_timings(costs, cluster))
    kinds, size = cluster.device_types(), plan.micro_batch_size
    table = problem.table(size)
    found = []
    for pipeline in plan.pipelines:
        stages = tuple(
            table.seconds(kinds[pipeline.rank_of(index)], *stage.units, stage.activation_checkpointing)
            for index, stage in enumerate(pipeline.stages)
        )
        counts = [stop - start for start, stop in (stage.units for stage in pipeline.stages)]
        found.append(PipelineSeconds(stages, problem.hops(pipeline.ranks, counts, size)))
    return tuple(found)
