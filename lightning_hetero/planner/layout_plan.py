"""A shard plan whose layout is given by the name of a sharding option, with shares by speed: what a sweep compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, InfeasibleError, raise_all
from lightning_hetero.plan import ModelKey, ShardPlan, even_parts
from lightning_hetero.plan.options import hybrid_size
from lightning_hetero.plan.shard import MODES
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.shard_prediction import group_memory
from lightning_hetero.simulator.shard_step import Passes
from lightning_hetero.simulator.sharded_memory import ReduceBuffers

_SHORTEST_S = 1e-12


def layout_plan(
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    sharding: str,
    *,
    checkpointing: bool = False,
    even: bool = False,
    options: Mapping[str, Any] | None = None,
) -> ShardPlan:
    """The plan with this layout, one micro-batch a step, and shares by speed.

    Shares follow speed as far as memory lets them. Where nothing fits, they follow speed alone: compare the predicted
    peaks with the devices' memory. No step is predicted here.

    Args:
        cluster: one device per rank.
        costs: of the model.
        training: global batch, precision, optimizer.
        sharding: "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD" or "HYBRID_k" with neighbouring ranks in groups of k.
        checkpointing: whether blocks run their forward again in backward, on all ranks.
        even: whether every rank takes as many samples instead (the first ones one more where it does not divide).
        options: of communication, as a plan holds them ("backward_prefetch", "limit_all_gathers").

    Raises:
        HeteroError: if the option is not known, k does not divide the ranks, or seconds are not known.
    """
    raise_all(HeteroError, f"sharding {sharding!r} cannot be laid out", layout_problems(sharding, cluster.world_size))
    ranks, size = cluster.world_size, hybrid_size(sharding)
    width = ranks if size is None else size
    mode = "FULL_SHARD" if size is not None else sharding
    groups = tuple(tuple(range(start, start + width)) for start in range(0, ranks, width))
    shares = (
        even_parts(training.global_batch_size, ranks)
        if even
        else _by_speed(cluster, costs, training, width, mode, checkpointing)
    )
    return ShardPlan(
        global_batch_size=training.global_batch_size,
        batch_shares=shares,
        groups=groups,
        device_types=cluster.device_types(),
        model=ModelKey(costs.model, costs.parameters),
        reshard_after_forward=mode == "FULL_SHARD",
        modes=(mode,) * len(groups) if mode == "NO_SHARD" else (),
        activation_checkpointing=(True,) * ranks if checkpointing else (),
        options=options or {},
    )


def layout_problems(sharding: str, ranks: int) -> list[str]:
    """What keeps an option from being laid out over so many ranks, as texts."""
    size = hybrid_size(sharding)
    if size is None:
        return [] if sharding in MODES else [f"{sharding} is not known: use {', '.join(MODES)} or HYBRID_k"]
    if ranks % size:
        return [f"{sharding} does not divide {ranks} ranks: give a divisor of {ranks} as k"]
    return []


def _by_speed(
    cluster: Cluster, costs: ModelCosts, training: Training, width: int, mode: str, checkpointing: bool
) -> tuple[int, ...]:
    kinds = cluster.device_types()
    passes = {kind: Passes.of(row) for kind, row in unit_timings(costs, cluster).items()}
    if checkpointing:
        is_block = np.array([unit.is_block for unit in costs.units])
        passes = {kind: own.checkpointed(is_block) for kind, own in passes.items()}
    memory = group_memory(costs, training.state, ReduceBuffers.of(cluster), width, mode, checkpointing, False)
    most = {size: memory.max_samples(size) for size in {device.memory_bytes for device in cluster.devices}}
    # A fit in the noise may find that samples take no time.
    slopes = [max(passes[kind].per_sample_s, _SHORTEST_S) for kind in kinds]
    fixed = [passes[kind].fixed_s for kind in kinds]
    at_least = min(1, training.global_batch_size // len(kinds))
    try:
        limits = [most[device.memory_bytes] for device in cluster.devices]
        if any(limit is not None and limit < at_least for limit in limits):
            raise InfeasibleError("a device holds no sample")
        return split_batch(slopes, fixed, training.global_batch_size, max_samples=limits, min_samples=at_least)
    except InfeasibleError:
        return split_batch(slopes, fixed, training.global_batch_size, min_samples=at_least)
