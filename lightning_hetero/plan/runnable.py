"""What plans say that the strategies cannot do yet: told when a plan is made, and again before it is run."""

from __future__ import annotations

from lightning_hetero.plan.pipeline import PipelinePlan
from lightning_hetero.plan.shard import ShardPlan


def not_runnable_yet(plan: ShardPlan | PipelinePlan) -> list[str]:
    """Why a plan cannot be run, one sentence each with what to do; empty where it can be."""
    if isinstance(plan, PipelinePlan):
        return ["pipelines are planned, and not run yet: hetero_fsdp runs a shard plan (--strategy hetero_fsdp)"]
    return []
