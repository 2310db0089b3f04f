"""The arguments of hetero_fsdp, and those that the other strategies share, as a user may give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import ClusterError, HeteroError, PlanError
from lightning_hetero.plan import PipelinePlan, ShardPlan

CLUSTER_VARIABLE = "LIGHTNING_HETERO_CLUSTER"
"""environment variable that names a cluster file, for ``Trainer(strategy="hetero_fsdp")``"""

Plan = TypeVar("Plan", ShardPlan, PipelinePlan)


def argument_problems(check_loss: Any, reshard: Any, global_batch_size: Any, wrap: Any) -> list[str]:
    problems = []
    if check_loss not in ("warn", "error", "off"):
        problems.append(f"check_loss={check_loss!r}: use 'warn', 'error' or 'off'")
    if not isinstance(reshard, bool) and reshard != "auto":
        problems.append(f"reshard_after_forward={reshard!r}: use True, False or 'auto'")
    whole = isinstance(global_batch_size, int) and not isinstance(global_batch_size, bool)
    if global_batch_size is not None and not (whole and global_batch_size > 0):
        problems.append(f"global_batch_size={global_batch_size!r}: give a whole number of samples, 1 or more")
    is_set = isinstance(wrap, set | frozenset) and all(isinstance(kind, type) for kind in wrap)
    if wrap is not None and not is_set:
        problems.append(f"wrap={wrap!r}: give a set of classes, such as {{nn.TransformerEncoderLayer}}")
    return problems


def read_costs(costs: str | Path | ModelCosts | None) -> ModelCosts | None:
    if isinstance(costs, ModelCosts | None):
        return costs
    if not isinstance(costs, str | Path):
        raise HeteroError(f"costs={costs!r} is a {type(costs).__name__}: pass ModelCosts, the path of a file, or None")
    return ModelCosts.load(costs)


def read_plan(plan: str | Path | Plan, kind: type[Plan]) -> Plan:
    """The plan of a kind that a user gave, as an object or as the path of one."""
    if isinstance(plan, kind):
        return plan
    if not isinstance(plan, str | Path):
        raise PlanError(f"plan={plan!r} is a {type(plan).__name__}: pass 'auto', a {kind.__name__} or the path of one")
    return kind.load(plan)


def read_cluster(cluster: Cluster | str | Path | None) -> Cluster | None:
    """The cluster that a user gave, as an object, a path, or by the environment; None where nothing says one."""
    if cluster is None:
        cluster = os.environ.get(CLUSTER_VARIABLE) or None
    if isinstance(cluster, Cluster) or cluster is None:
        return cluster
    if not isinstance(cluster, str | Path):
        raise ClusterError(
            f"cluster={cluster!r} is a {type(cluster).__name__}: pass a Cluster, the path of a cluster file, or None"
        )
    return Cluster.from_yaml(cluster)
