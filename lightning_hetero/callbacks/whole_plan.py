"""The plan that a run follows, as it is written beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl

from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.planned_stages import pipelines_seconds
from lightning_hetero.simulator.planned_step import PipelineSeconds, PlannedStep, plan_step
from lightning_hetero.strategies.base import HeteroStrategy

if TYPE_CHECKING:  # strategies import callbacks
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy


def whole_plan_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The plan of a strategy of ours as plain data; ``plan`` is None where there is none.

    Returns:
        ``plan``, as in a plan's file, and ``pipelines``: seconds of each pipeline's stages and messages, None where
        nothing was measured for the plan.
    """
    plan: Any = getattr(trainer.strategy, "plan", None)
    if not isinstance(plan, ShardPlan | PipelinePlan):
        return {"plan": None, "pipelines": None}
    seconds = _seconds(trainer, plan)
    return {"plan": plan.to_dict(), "pipelines": None if seconds is None else [each.to_dict() for each in seconds]}


def planned_step_of(trainer: pl.Trainer) -> PlannedStep | str:
    """When each rank is to do what in a step, or why nobody knows."""
    plan: Any = getattr(trainer.strategy, "plan", None)
    if not isinstance(plan, ShardPlan | PipelinePlan):
        return f"{type(trainer.strategy).__name__} has no plan"
    try:
        return plan_step(plan, _seconds(trainer, plan))
    except HeteroError as error:
        return str(error)


def _seconds(trainer: pl.Trainer, plan: ShardPlan | PipelinePlan) -> tuple[PipelineSeconds, ...] | None:
    strategy = trainer.strategy
    if not isinstance(plan, PipelinePlan) or not isinstance(strategy, HeteroStrategy):
        return None
    basis = cast("HeteroPipelineStrategy", strategy).basis
    if basis is None:
        return None
    return pipelines_seconds(plan, basis.cluster, basis.costs, basis.training)
