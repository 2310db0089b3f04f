"""The planners that are measured, by name; each takes a cluster, costs and training and returns a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.planner import Training, plan_pipeline, plan_shard

# A plan has predicted_step_s and lower_bound_s.
PLANNERS: dict[str, Callable[[Cluster, ModelCosts, Training], Any]] = {"pipeline": plan_pipeline, "shard": plan_shard}
