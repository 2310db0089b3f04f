"""From a design and what it would take to a plan of pipelines."""

from __future__ import annotations

from lightning_hetero.plan import ModelKey, Pipeline, PipelinePlan, RankPrediction, Stage
from lightning_hetero.planner.pipeline_design import Design, Outcome, Problem


def plan_of(problem: Problem, design: Design, outcome: Outcome) -> PipelinePlan:
    """The plan that a design is, with its predictions; without a bound and reasons."""
    return PipelinePlan(
        global_batch_size=problem.training.global_batch_size,
        micro_batch_size=design.micro_batch_size,
        pipelines=_pipelines(design, outcome),
        device_types=problem.kinds,
        unit_names=tuple(unit.name for unit in problem.costs.units),
        schedule=design.policy.schedule,
        model=ModelKey(problem.costs.model, problem.costs.parameters),
        predicted_step_s=outcome.step_s,
        predictions=tuple(
            RankPrediction.of(outcome.busy_s.get(rank, 0.0), outcome.step_s, outcome.peak_bytes.get(rank, 0))
            for rank in range(len(problem.kinds))
        ),
    )


def _pipelines(design: Design, outcome: Outcome) -> tuple[Pipeline, ...]:
    made = []
    for pipeline, recompute in zip(design.pipelines, outcome.checkpointing, strict=True):
        depths = design.policy.in_flight(len(pipeline.ranks), pipeline.micro_batches)
        stages = tuple(
            Stage(border, depth, again)
            for border, depth, again in zip(pipeline.borders, depths, recompute, strict=True)
        )
        made.append(Pipeline(pipeline.ranks, stages, pipeline.micro_batches))
    return tuple(made)
