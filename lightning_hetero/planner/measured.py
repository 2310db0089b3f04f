"""Shares and micro-batches of given shard groups, from what their ranks measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import UnitTiming
from lightning_hetero.errors import InfeasibleError
from lightning_hetero.plan import ModelKey, RankPrediction, ShardPlan, even_parts
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.planner.one_group import plan_one_group
from lightning_hetero.simulator.memory import RankMemory
from lightning_hetero.simulator.shard_step import Passes, Traffic, group_s
from lightning_hetero.units import format_bytes, format_seconds

WORTH_IT = 0.01
"""a step must become faster by this share for another micro-batch"""

UNKNOWN_OPTIMIZER = "the optimizer's step could not be measured beforehand, and is not counted"
"""the reason of a plan that says so"""


@dataclass(frozen=True)
class OncePerStep:
    """Seconds of a step that do not depend on its micro-batches.

    Args:
        crossing_s: gradients that are summed over all groups, as far as that does not hide.
        optimizer_s: the slowest rank's optimizer; None where it was not measured.
        input_s_per_sample: to read and collate a sample, where nobody does so ahead.
    """

    crossing_s: float = 0.0
    optimizer_s: float | None = 0.0
    input_s_per_sample: float = 0.0

    def parts_s(self, shares: Sequence[int]) -> dict[str, float]:
        """Seconds by what takes them; ranks that shard wait for the one that reads most."""
        return {
            "gradients between groups": self.crossing_s,
            "optimizer": self.optimizer_s or 0.0,
            "input": self.input_s_per_sample * max(shares, default=0),
        }


@dataclass(frozen=True)
class MeasuredRanks:
    """What the ranks measured.

    Args:
        seconds_per_sample: of forward and backward, per rank.
        fixed_seconds: of a micro-batch, whatever its samples.
        fixed_bytes: without samples; None where memory is not counted.
        bytes_per_sample: what each sample of a micro-batch adds; None where memory is not counted.
        accumulating_bytes: what a step of several micro-batches holds beside that: the gradients of earlier ones.
        overhead_s: per rank, what a micro-batch takes its group beside computing: communication that does not hide,
            and Python. By default nothing.
        once: what a step takes once beside its micro-batches.
    """

    seconds_per_sample: Sequence[float]
    fixed_seconds: Sequence[float]
    fixed_bytes: Sequence[int] | None = None
    bytes_per_sample: Sequence[float] | None = None
    accumulating_bytes: Sequence[int] | None = None
    overhead_s: Sequence[float] = ()
    once: OncePerStep = OncePerStep()

    def group_overhead_s(self, group: Sequence[int]) -> float:
        """What a micro-batch takes a group beside computing."""
        return max((self.overhead_s[rank] for rank in group), default=0.0) if self.overhead_s else 0.0


def plan_measured(
    cluster: Cluster,
    ranks: MeasuredRanks,
    *,
    global_batch_size: int,
    groups: tuple[tuple[int, ...], ...],
    modes: tuple[str, ...],
    model: ModelKey | None = None,
    micro_batches: bool = True,
) -> ShardPlan:
    """The fastest shares for these groups under memory; more and smaller micro-batches where memory is what limits.

    Rank r of a group with m micro-batches is busy for ``m * fixed_seconds[r] + seconds_per_sample[r] * share`` seconds,
    takes ``m * overhead_s[r]`` beside that, and holds ``ceil(share / m)`` samples at once. Ranks that shard wait for
    each other in every micro-batch. What a step takes once comes on top.

    Args:
        cluster: one device per rank.
        ranks: what was measured.
        global_batch_size: samples per optimizer step over all ranks.
        groups: ranks that shard together.
        modes: of each group.
        model: what the plan is for.
        micro_batches: whether a step may have several.

    Returns:
        The plan, with a prediction per rank and its reasons.

    Raises:
        InfeasibleError: as of :func:`~lightning_hetero.planner.one_group.plan_one_group`; with micro-batches, only if a
            rank cannot hold a single sample.
        HeteroError: if an argument is malformed.
    """
    plain: ShardPlan | None = None
    try:
        plain = plan_one_group(
            cluster,
            global_batch_size=global_batch_size,
            seconds_per_sample=ranks.seconds_per_sample,
            fixed_seconds=ranks.fixed_seconds,
            fixed_bytes=ranks.fixed_bytes,
            bytes_per_sample=ranks.bytes_per_sample,
            model=model,
        )
    except InfeasibleError:
        if not micro_batches or ranks.fixed_bytes is None or not _holds_a_sample(cluster, ranks):
            raise
    best = None if plain is None else _with_overhead(_as_groups(plain, groups, modes), ranks)
    if micro_batches and ranks.fixed_bytes is not None:
        for counts in _counts(cluster, ranks, groups, global_batch_size):
            tried = _with_micro_batches(cluster, ranks, groups, modes, counts, global_batch_size, model)
            if tried is not None and (best is None or _step_s(tried) < _step_s(best) * (1 - WORTH_IT)):
                best = tried
    if best is None:
        raise InfeasibleError(
            f"no number of micro-batches lets the ranks hold {global_batch_size} samples a step: use activation "
            "checkpointing, or leave the smallest device out"
        )
    return _with_once(best, ranks)


def _with_overhead(plan: ShardPlan, ranks: MeasuredRanks) -> ShardPlan:
    """The plan of one micro-batch a step, with what that takes each group beside computing."""
    step_s = max(
        max(plan.predictions[rank].busy_s for rank in group) + ranks.group_overhead_s(group) for group in plan.groups
    )
    return plan.lasting(step_s)


def _with_once(plan: ShardPlan, ranks: MeasuredRanks) -> ShardPlan:
    """The plan with what its step takes once, and a reason that says what is beside computing."""
    parts = {"communication and Python": _beside_s(plan, ranks)} | ranks.once.parts_s(plan.batch_shares)
    once_s = math.fsum(ranks.once.parts_s(plan.batch_shares).values())
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
    reasons = []
    if parts:
        shown = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
        total = format_seconds(math.fsum(parts.values()))
        reasons.append(f"beside computing, a step takes {total}, as measured: {shown}")
    if ranks.once.optimizer_s is None:
        reasons.append(UNKNOWN_OPTIMIZER)
    return plan.lasting((plan.predicted_step_s or 0.0) + once_s, *reasons)


def _beside_s(plan: ShardPlan, ranks: MeasuredRanks) -> float:
    """What the micro-batches of a step take beside computing, of the group that takes longest."""
    counts = [plan.micro_batches_of(index) for index in range(len(plan.groups))]
    return max(count * ranks.group_overhead_s(group) for group, count in zip(plan.groups, counts, strict=True))


def _as_groups(plan: ShardPlan, groups: tuple[tuple[int, ...], ...], modes: tuple[str, ...]) -> ShardPlan:
    reshards = "FULL_SHARD" in modes
    if len(groups) == 1:
        return replace(
            plan, groups=groups, modes=modes if modes[0] == "NO_SHARD" else (), reshard_after_forward=reshards
        )
    shown = ", ".join(f"{list(group)} {mode}" for group, mode in zip(groups[:4], modes, strict=False))
    reasons = (f"{len(groups)} shard groups: {shown}{', ...' if len(groups) > 4 else ''}", *plan.reasons[1:])
    return replace(plan, groups=groups, modes=modes, reshard_after_forward=reshards, reasons=reasons)


def _memory(ranks: MeasuredRanks, rank: int, is_split: bool) -> RankMemory:
    """Memory of ``rank`` by the samples of a micro-batch."""
    assert ranks.fixed_bytes is not None
    assert ranks.bytes_per_sample is not None
    extra = ranks.accumulating_bytes[rank] if is_split and ranks.accumulating_bytes is not None else 0
    return RankMemory.measured(ranks.fixed_bytes[rank] + extra, ranks.bytes_per_sample[rank])


def _peak_bytes(ranks: MeasuredRanks, rank: int, sizes: Sequence[int]) -> int:
    """Of micro-batches of these samples: the first and largest one adds to no gradients, the others do."""
    first = _memory(ranks, rank, is_split=False).peak_bytes(max(1, sizes[0]))
    return max([first, *(_memory(ranks, rank, is_split=True).peak_bytes(max(1, size)) for size in sizes[1:2])])


def _holds(cluster: Cluster, ranks: MeasuredRanks, rank: int, is_split: bool) -> int:
    """The most samples of a micro-batch of ``rank``, under 0 where not even its states fit."""
    most = _memory(ranks, rank, is_split).max_samples(cluster.devices[rank].memory_bytes)
    return 2**31 if most is None else most


def _holds_a_sample(cluster: Cluster, ranks: MeasuredRanks) -> bool:
    return all(_holds(cluster, ranks, rank, is_split=True) >= 1 for rank in range(cluster.world_size))


def _counts(
    cluster: Cluster, ranks: MeasuredRanks, groups: tuple[tuple[int, ...], ...], global_batch_size: int
) -> Iterator[tuple[int, ...]]:
    """Numbers of micro-batches per group: those that let shares follow speed for growing parts of the step.

    Shares without any limit take ``T`` seconds; for each of some times from ``T`` on, a group takes the fewest
    micro-batches that let its ranks do as much as they can in that time.
    """
    free = split_batch(ranks.seconds_per_sample, ranks.fixed_seconds, global_batch_size, min_samples=1)
    for slack in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2):
        counts = []
        for group in groups:
            needed = 1
            for rank in group:
                if free[rank] * slack > _holds(cluster, ranks, rank, is_split=False):
                    held = max(1, _holds(cluster, ranks, rank, is_split=True))
                    needed = max(needed, -(-int(free[rank] * slack) // held))
            counts.append(needed)
        if max(counts) == 1:
            return
        yield tuple(counts)


def _with_micro_batches(
    cluster: Cluster,
    ranks: MeasuredRanks,
    groups: tuple[tuple[int, ...], ...],
    modes: tuple[str, ...],
    counts: tuple[int, ...],
    global_batch_size: int,
    model: ModelKey | None,
) -> ShardPlan | None:
    count_of = {rank: count for group, count in zip(groups, counts, strict=True) for rank in group}
    world = range(cluster.world_size)
    fixed = [ranks.fixed_seconds[rank] * count_of[rank] for rank in world]
    limits = [_holds(cluster, ranks, rank, is_split=count_of[rank] > 1) * count_of[rank] for rank in world]
    if min(limits) < 1 or sum(limits) < global_batch_size:
        return None
    beside = {rank: ranks.group_overhead_s(group) for group in groups for rank in group}
    taken = [own + beside[rank] * count_of[rank] for rank, own in enumerate(fixed)]
    shares = split_batch(ranks.seconds_per_sample, taken, global_batch_size, max_samples=limits, min_samples=1)
    step_s = max(
        _group_s(ranks, group, mode, count, shares) for group, mode, count in zip(groups, modes, counts, strict=True)
    )
    sizes = tuple(-(-share // count_of[rank]) for rank, share in enumerate(shares))
    predictions = []
    for rank, share in enumerate(shares):
        peak = _peak_bytes(ranks, rank, even_parts(share, count_of[rank]))
        busy_s = fixed[rank] + ranks.seconds_per_sample[rank] * share
        predictions.append(RankPrediction.of(busy_s, step_s, peak))
    split = [
        f"ranks {list(group)} run {count} micro-batches of at most {max(sizes[r] for r in group)} samples: more at "
        f"once do not fit {format_bytes(min(cluster.devices[r].memory_bytes for r in group))}"
        for group, count in zip(groups, counts, strict=True)
        if count > 1
    ]
    return ShardPlan(
        global_batch_size=global_batch_size,
        batch_shares=shares,
        groups=groups,
        device_types=cluster.device_types(),
        model=model,
        reshard_after_forward="FULL_SHARD" in modes,
        predicted_step_s=step_s,
        predictions=tuple(predictions),
        reasons=(
            f"{len(groups)} shard group(s); the slowest rank takes {format_seconds(step_s)}",
            *split,
        ),
        modes=modes,
        micro_batches=counts,
        micro_batch_sizes=sizes,
    )


def _group_s(ranks: MeasuredRanks, group: Sequence[int], mode: str, count: int, shares: Sequence[int]) -> float:
    """Seconds of a group's micro-batches, each with its overhead: as for a model of one unit and links of no cost."""
    passes = [
        Passes.of([UnitTiming(ranks.fixed_seconds[rank], ranks.seconds_per_sample[rank], 0.0, 0.0)]) for rank in group
    ]
    own = [shares[rank] for rank in group]
    return group_s(passes, own, count, Traffic.none(units=1), mode) + count * ranks.group_overhead_s(group)


def _step_s(plan: ShardPlan) -> float:
    return plan.predicted_step_s or float("inf")
