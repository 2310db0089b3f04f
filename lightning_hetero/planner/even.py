"""The even plans: what people run without a planner, to compare with."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ModelKey, Pipeline, PipelinePlan, RankPrediction, ShardPlan, Stage
from lightning_hetero.planner.design_search import Space, even_designs
from lightning_hetero.planner.pipeline import micro_batch_sizes, policies_of
from lightning_hetero.planner.pipeline_design import Design, Outcome, Problem
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
        batch_shares=tuple(batch // ranks + (rank < batch % ranks) for rank in range(ranks)),
        groups=(tuple(range(ranks)),),
        device_types=cluster.device_types(),
        model=ModelKey(costs.model, costs.parameters),
    )
    found = predict_shard(plan, cluster, costs, unit_timings(costs, cluster), training.state)
    predictions = tuple(
        RankPrediction(found.busy_s[rank], found.idle_share(rank), found.peak_bytes[rank]) for rank in range(ranks)
    )
    return replace(plan, predicted_step_s=found.step_s, predictions=predictions)


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
    return PipelinePlan(
        global_batch_size=training.global_batch_size,
        micro_batch_size=design.micro_batch_size,
        pipelines=_pipelines(design, outcome),
        device_types=cluster.device_types(),
        unit_names=tuple(unit.name for unit in costs.units),
        schedule=design.policy.schedule,
        model=ModelKey(costs.model, costs.parameters),
        predicted_step_s=outcome.step_s,
        predictions=tuple(_prediction(outcome, rank) for rank in range(cluster.world_size)),
    )


def _pipelines(design: Design, outcome: Outcome) -> tuple[Pipeline, ...]:
    made = []
    for pipeline, recompute in zip(design.pipelines, outcome.checkpointing, strict=True):
        depths = design.policy.in_flight(len(pipeline.ranks), pipeline.micro_batches)
        stages = map(Stage, pipeline.borders, depths, recompute)
        made.append(Pipeline(pipeline.ranks, tuple(stages), pipeline.micro_batches))
    return tuple(made)


def _prediction(outcome: Outcome, rank: int) -> RankPrediction:
    busy_s = outcome.busy_s.get(rank, 0.0)
    idle = min(1.0, max(0.0, 1 - busy_s / outcome.step_s)) if outcome.step_s else 0.0
    return RankPrediction(busy_s, idle, outcome.peak_bytes.get(rank, 0))
