"""From what ranks measured to batch shares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import InfeasibleError
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.planner.measured import MeasuredRanks, OncePerStep, plan_measured
from lightning_hetero.planner.one_group import plan_one_group
from lightning_hetero.strategies.layout import Layout
from lightning_hetero.strategies.probe import RankMeasurement

SAME_CLASS = 0.05
"""devices of one type whose measured speeds differ by less than this share count as equal"""


def pool_measurements(
    measured: Sequence[RankMeasurement], device_types: Sequence[str], groups: Sequence[Sequence[int]] = ()
) -> MeasuredRanks:
    """Put the ranks' measurements together; devices of a type that measured about alike count as one class.

    Each rank's measurement is noisy; a class's median is less so, and equal devices then get equal shares.

    Args:
        measured: of each rank.
        device_types: of each rank.
        groups: ranks that wait for each other in every micro-batch; by default all of them.
    """
    per_sample = [0.0] * len(measured)
    fixed = [0.0] * len(measured)
    for kind in set(device_types):
        members = [r for r, t in enumerate(device_types) if t == kind]
        # noise makes a step longer, so the least fixed part of a type is the truest
        least_s = min(measured[r].fixed_s for r in members)
        for r in members:
            fixed[r] = least_s
            per_sample[r] = (measured[r].step_s - least_s) / measured[r].samples
        for alike in _classes(members, per_sample):
            median = statistics.median(per_sample[r] for r in alike)
            for r in alike:
                per_sample[r] = median
    overhead_s = _least_of_groups([m.overhead_s for m in measured], groups or [range(len(measured))])
    base = [m.base_bytes for m in measured]
    growth = [m.bytes_per_sample for m in measured]
    counted = all(b is not None for b in base) and all(g is not None for g in growth)
    return MeasuredRanks(
        tuple(per_sample),
        tuple(fixed),
        tuple(b for b in base if b is not None) if counted else None,
        tuple(g for g in growth if g is not None) if counted else None,
        tuple(m.accumulating_bytes for m in measured),
        overhead_s,
        _once(measured, overhead_s),
    )


def _least_of_groups(seconds: Sequence[float], groups: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """By rank, the least of its group: the slowest rank waits for nobody, others for it."""
    least = {rank: min(seconds[each] for each in group) for group in groups for rank in group}
    return tuple(least[rank] for rank in range(len(seconds)))


def _once(measured: Sequence[RankMeasurement], overhead_s: Sequence[float]) -> OncePerStep:
    steps = [m.optimizer_s for m in measured]
    crossed = [m.crossed_s - own_s for m, own_s in zip(measured, overhead_s, strict=True) if m.crossed_s is not None]
    return OncePerStep(
        # as above: of the slowest group, for which others wait
        crossing_s=max(0.0, min(crossed, default=0.0)),
        optimizer_s=None if None in steps else max(step for step in steps if step is not None),
        input_s_per_sample=max(m.input_s_per_sample for m in measured),
    )


def _classes(ranks: Sequence[int], seconds: Sequence[float]) -> list[list[int]]:
    """Cut the ranks, sorted by speed, wherever a class would spread over more than SAME_CLASS."""
    classes: list[list[int]] = []
    for rank in sorted(ranks, key=lambda r: seconds[r]):
        if classes and seconds[rank] <= seconds[classes[-1][0]] * (1 + SAME_CLASS):
            classes[-1].append(rank)
        else:
            classes.append([rank])
    return classes


def state_to_come_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Return the bytes of optimizer state on this rank that the first step will make, and no probe sees.

    Two values a parameter for Adam and its kin, one for SGD with momentum and RMSprop, none for plain SGD; an optimizer
    of another kind is taken for one of Adam's. Zero where a checkpoint brought the state already.
    """
    total = 0
    for optimizer in optimizers:
        if optimizer.state:
            continue
        per_parameter = 2
        if isinstance(optimizer, torch.optim.SGD):
            per_parameter = 1 if optimizer.defaults.get("momentum") else 0
        elif isinstance(optimizer, torch.optim.RMSprop | torch.optim.Adagrad):
            per_parameter = 1
        total += per_parameter * local_bytes(p for group in optimizer.param_groups for p in group["params"])
    return total


def local_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards of parameters."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(shard.numel() * shard.element_size() for shard in shards)


def plan_from(
    cluster: Cluster,
    model: ModelKey,
    global_batch_size: int,
    costs: MeasuredRanks,
    layout: Layout,
    *,
    micro_batches: bool,
) -> ShardPlan:
    """Return the plan for these groups with the fastest predicted step that fits every device's memory."""
    try:
        plan = plan_measured(
            cluster,
            costs,
            global_batch_size=global_batch_size,
            groups=layout.groups,
            modes=layout.modes,
            model=model,
            micro_batches=micro_batches,
        )
    except InfeasibleError as error:
        if not layout.reason or len(layout.groups) == 1:
            raise
        raise InfeasibleError(
            f"{error}\nEach node holds the whole model here; sharding_strategy='FULL_SHARD' shards it over all ranks"
        ) from error
    return replace(plan, reasons=(layout.reason, *plan.reasons)) if layout.reason else plan


def declared_plan(
    cluster: Cluster, model: ModelKey, global_batch_size: int, *, reshard_after_forward: bool
) -> ShardPlan:
    """Return the plan by declared speeds, even where a device has none; what holds until ranks are measured."""
    speeds = [device.speed_flops_per_s for device in cluster.devices]
    known = all(speed for speed in speeds)
    shares = plan_one_group(
        cluster,
        model=model,
        global_batch_size=global_batch_size,
        seconds_per_sample=[1.0 / speed if known and speed else 1.0 for speed in speeds],
        reshard_after_forward=reshard_after_forward,
    )
    # the unit of time is arbitrary here, so nothing is predicted
    return ShardPlan(
        global_batch_size=shares.global_batch_size,
        batch_shares=shares.batch_shares,
        groups=shares.groups,
        device_types=shares.device_types,
        model=model,
        reshard_after_forward=reshard_after_forward,
        reasons=("shares by declared speed; nothing was measured",) if known else ("even shares: no speed is known",),
    )
