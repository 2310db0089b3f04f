"""Simulate one step of a plan, as it is written, whoever made it: the front of all simulations."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import DeviceConstants
from lightning_hetero.simulator.simulated_pipelines import simulated_pipelines
from lightning_hetero.simulator.simulated_shards import simulated_shards
from lightning_hetero.simulator.simulated_step import SimulatedStep

Plan = ShardPlan | PipelinePlan


def simulate(
    plan: Plan,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    *,
    constants: Mapping[str, DeviceConstants] | None = None,
    engine: str = "fsdp2",
) -> SimulatedStep:
    """Simulate one optimizer step of a plan as it is written.

    Args:
        plan: for this cluster and this model. Its own predictions are not looked at.
        cluster: one device per rank, and the links.
        costs: of the model.
        training: precision and optimizer, and the plan's global batch.
        constants: by type of device, what a calibration found: the step's fixed seconds, the optimizer's, watts.
            Scales of compute and links are not looked at: they are in what
            :meth:`~lightning_hetero.simulator.calibration.Calibration.applied` gives. Nothing by default.
        engine: of shard plans, one of :data:`~lightning_hetero.simulator.execution.ENGINES`.

    Raises:
        PlanError: if the plan is not valid or not for this cluster.
        HeteroError: if plan, costs and training are of different models or batches, or seconds are not known.
    """
    plan.validate(cluster)
    raise_all(HeteroError, "the plan cannot be simulated", _problems(plan, costs, training))
    if isinstance(plan, ShardPlan):
        return simulated_shards(plan, cluster, costs, training, constants or {}, engine)
    return simulated_pipelines(plan, cluster, costs, training, constants or {})


def _problems(plan: Plan, costs: ModelCosts, training: Training) -> list[str]:
    problems = []
    if plan.model is not None and plan.model.parameters != costs.parameters:
        problems.append(
            f"it is for {plan.model.name} with {plan.model.parameters} parameters, the costs are of {costs.model} with "
            f"{costs.parameters}: give the costs of its model"
        )
    if plan.global_batch_size != training.global_batch_size:
        problems.append(
            f"its global batch is {plan.global_batch_size}, the training's is {training.global_batch_size}: make them "
            "equal"
        )
    if isinstance(plan, PipelinePlan) and plan.unit_names != tuple(unit.name for unit in costs.units):
        problems.append(
            f"it cuts {len(plan.unit_names)} units ({plan.unit_names[0]}, ...), the costs have {len(costs.units)} "
            f"({costs.units[0].name}, ...): give the costs that it was made from"
        )
    return problems
