"""The even plans: what people run without a planner, to compare with."""

from __future__ import annotations

import math

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ModelKey, PipelinePlan, ShardPlan, even_parts
from lightning_hetero.planner.design_search import Space, even_designs
from lightning_hetero.planner.pipeline import micro_batch_sizes, policies_of
from lightning_hetero.planner.pipeline_design import Problem
from lightning_hetero.planner.pipeline_plan import plan_of
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.shard_prediction import predict_shard


def even_shard_plan(cluster: Cluster, costs: ModelCosts, training: Training) -> ShardPlan:
    """One shard group, equal shares (the first ranks take one sample more where they do not divide), FULL_SHARD.

    It is predicted whether it fits the memory or not: compare its peaks with the devices'.

    Args:
        cluster: one device per rank.
        costs: of the model.
        training: global batch, precision, optimizer.

    Raises:
        HeteroError: if seconds are not known.
    """
    batch, ranks = training.global_batch_size, cluster.world_size
    plan = ShardPlan(
        global_batch_size=batch,
        batch_shares=even_parts(batch, ranks),
        groups=(tuple(range(ranks)),),
        device_types=cluster.device_types(),
        model=ModelKey(costs.model, costs.parameters),
    )
    found = predict_shard(plan, cluster, costs, unit_timings(costs, cluster), training.state)
    return found.put_into(plan)


def even_pipeline_plan(
    cluster: Cluster, costs: ModelCosts, training: Training, *, schedules: tuple[str, ...] = ("1f1b", "gpipe")
) -> PipelinePlan | None:
    """One pipeline over all devices in their order, with equally many units each.

    Of micro-batch sizes, schedules and warm-ups the best is taken.

    Args:
        cluster: one device per rank.
        costs: of the model.
        training: global batch, precision, optimizer.
        schedules: that it may have.

    Returns:
        The plan; ``None`` where none fits the memory, or there are more devices than units.

    Raises:
        HeteroError: if seconds are not known.
    """
    problem = Problem(cluster, costs, training, unit_timings(costs, cluster))
    space = Space(micro_batch_sizes(training.global_batch_size), policies_of(schedules, 2, True))
    outcomes = [(problem.evaluate(design), design) for design in even_designs(problem, space)]
    fitting = [(outcome, design) for outcome, design in outcomes if math.isfinite(outcome.step_s)]
    if not fitting:
        return None
    outcome, design = min(fitting, key=lambda pair: pair[0].step_s)
    return plan_of(problem, design, outcome)
