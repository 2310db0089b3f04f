"""What plans say that the strategies cannot do yet: told when a plan is made, and again before it is run."""

from __future__ import annotations

from lightning_hetero.plan.pipeline import PipelinePlan
from lightning_hetero.plan.shard import ShardPlan


def not_runnable_yet(plan: ShardPlan | PipelinePlan) -> list[str]:
    """Why a plan cannot be run, one sentence each with what to do; empty where it can be."""
    if isinstance(plan, PipelinePlan):
        return ["pipelines are planned, and not run yet: hetero_fsdp runs a shard plan (--strategy hetero_fsdp)"]
    problems = []
    if len(plan.groups) > 1:
        shown = ", ".join(map(str, map(list, plan.groups[:4]))) + (", ..." if len(plan.groups) > 4 else "")
        problems.append(
            f"the plan has {len(plan.groups)} groups, {shown}: hetero_fsdp shards over one group of all ranks, so far; "
            "put them together as one group, or make a new plan (plan='auto')"
        )
    if "NO_SHARD" in plan.modes:
        problems.append(
            f"modes is {list(plan.modes)}: hetero_fsdp shards every parameter, so far; use FULL_SHARD or SHARD_GRAD_OP"
        )
    if any(count > 1 for count in plan.micro_batches):
        problems.append(
            f"micro_batches is {list(plan.micro_batches)}: hetero_fsdp runs one micro-batch a step by the plan, so "
            "far; set it to 1 and use accumulate_grad_batches"
        )
    if any(plan.activation_checkpointing):
        named = [rank for rank, is_on in enumerate(plan.activation_checkpointing) if is_on]
        problems.append(
            f"activation_checkpointing is on for ranks {named}: hetero_fsdp does not switch it on, so far; turn it "
            "off in the plan, and on in the model if memory asks for it"
        )
    return problems
