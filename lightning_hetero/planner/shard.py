"""Plan hetero_fsdp: shard groups, modes, shares, micro-batches and checkpointing of the fastest step that fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ShardPlan
from lightning_hetero.plan.shard import MODES
from lightning_hetero.planner.shard_candidates import ShardSearch
from lightning_hetero.planner.shard_explain import explained, reasons_of
from lightning_hetero.planner.shard_infeasible import refuse
from lightning_hetero.planner.shard_options import ShardOptions
from lightning_hetero.planner.shard_search import NothingFitsError, ShardPlanner
from lightning_hetero.planner.training import Training


def plan_shard(
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    *,
    modes: Iterable[str] = MODES,
    checkpointing: bool = True,
    accumulate: bool = True,
) -> ShardPlan:
    """The plan with the fastest predicted step that fits every device's memory.

    Args:
        cluster: one device per rank, with the links between them; a link that is not given costs nothing.
        costs: of the model.
        training: global batch, precision and optimizer.
        modes: sharding modes that may be used: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD".
        checkpointing: whether ranks may checkpoint activations; they do where memory asks for it.
        accumulate: whether groups may run several micro-batches; they do where memory asks for it.

    Returns:
        The plan, with predictions, a lower bound on the step time, and reasons. It is never slower than the even
        plan (one group, even shares, FULL_SHARD), where that one fits.

    Raises:
        InfeasibleError: if nothing fits: how many bytes are missing on which ranks, and the changes that would do.
        HeteroError: if an argument is malformed, or seconds are not known.
    """
    return search_shard(
        cluster, costs, training, modes=modes, checkpointing=checkpointing, accumulate=accumulate, explain=False
    ).plan


def search_shard(
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    *,
    modes: Iterable[str] = MODES,
    checkpointing: bool = True,
    accumulate: bool = True,
    explain: bool = True,
) -> ShardSearch:
    """As :func:`plan_shard`, with all that explains the plan.

    Args:
        cluster: as there, and so are ``costs``, ``training``, ``modes``, ``checkpointing`` and ``accumulate``.
        explain: whether to find out what limits the plan and what would help, by some more searches.

    Returns:
        The plan, what else was tried and why it is not the plan, what limits it, and which changes would help.

    Raises:
        HeteroError: as :func:`plan_shard`.
    """
    options = ShardOptions(tuple(modes), checkpointing, accumulate)
    planner = ShardPlanner(cluster, costs, training, options)
    try:
        search = planner.search()
    except NothingFitsError:
        refuse(planner)
    search = replace(search, plan=replace(search.plan, reasons=reasons_of(planner, search)))
    return explained(planner, search) if explain else search
