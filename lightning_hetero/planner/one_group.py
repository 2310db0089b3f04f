"""Plan hetero_fsdp with one shard group: who takes how many samples, under memory, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import HeteroError, InfeasibleError, raise_all
from lightning_hetero.plan import ModelKey, RankPrediction, ShardPlan, even_parts
from lightning_hetero.planner.batch import slowest_seconds, split_batch
from lightning_hetero.simulator.memory import RankMemory
from lightning_hetero.units import format_bytes, format_seconds


def plan_one_group(
    cluster: Cluster,
    *,
    global_batch_size: int,
    seconds_per_sample: Sequence[float],
    fixed_seconds: Sequence[float] | None = None,
    model: ModelKey | None = None,
    memory: Sequence[RankMemory] | None = None,
    fixed_bytes: Sequence[int] | None = None,
    bytes_per_sample: Sequence[float] | None = None,
    capacity_bytes: Sequence[int] | None = None,
    min_samples: int = 1,
    reshard_after_forward: bool = True,
) -> ShardPlan:
    """The fastest plan with all ranks in one shard group.

    Rank r is busy for ``fixed_seconds[r] + seconds_per_sample[r] * share`` seconds, and the step lasts as
    long as its busiest rank; the shares make that a minimum under every rank's memory, exactly.

    Args:
        cluster: one device per rank.
        global_batch_size: samples per optimizer step over all ranks.
        seconds_per_sample: per rank, measured seconds of forward and backward per sample.
        fixed_seconds: per rank, seconds of a step that do not depend on its share; by default none.
        model: what the plan is for; ``None`` makes a plan that fits any model.
        memory: per rank, its predicted memory (:func:`~lightning_hetero.simulator.shard_memory`).
        fixed_bytes: per rank, measured bytes without samples; instead of ``memory``.
        bytes_per_sample: per rank, measured bytes per sample; with ``fixed_bytes``.
        capacity_bytes: per rank, bytes that it may use; by default the memory of its device.
        min_samples: the least share. A rank with none still computes one sample with weight 0, so a
            smaller share than 1 saves nothing.
        reshard_after_forward: carried into the plan.

    Returns:
        The plan, with a prediction per rank and its reasons. Without any memory argument, memory is not
        limited and the predicted peak is ``None``.

    Raises:
        InfeasibleError: if a rank cannot hold its states and ``min_samples``, or the global batch is
            too small or too large, with the numbers, ranks and next steps.
        HeteroError: if an argument is malformed.
    """
    memories = _memories(cluster, memory, fixed_bytes, bytes_per_sample)
    capacities = _capacities(cluster, capacity_bytes)
    _check_lengths(cluster, seconds_per_sample, fixed_seconds)
    limits = _memory_limits(cluster, memories, capacities, min_samples)
    _check_batch(cluster, global_batch_size, limits, min_samples)
    shares = split_batch(
        seconds_per_sample, fixed_seconds, global_batch_size, max_samples=limits, min_samples=min_samples
    )
    speeds = _Seconds(seconds_per_sample, fixed_seconds or [0.0] * cluster.world_size)
    step_s = slowest_seconds(seconds_per_sample, fixed_seconds, shares)
    predictions = tuple(
        RankPrediction.of(
            speeds.busy_s(rank, share), step_s, None if memories is None else memories[rank].peak_bytes(share)
        )
        for rank, share in enumerate(shares)
    )
    return ShardPlan(
        global_batch_size=global_batch_size,
        batch_shares=shares,
        groups=(tuple(range(cluster.world_size)),),
        device_types=cluster.device_types(),
        model=model,
        reshard_after_forward=reshard_after_forward,
        predicted_step_s=step_s,
        predictions=predictions,
        reasons=_reasons(cluster, speeds, shares, limits, min_samples),
    )


@dataclass(frozen=True)
class _Seconds:
    per_sample: Sequence[float]
    fixed: Sequence[float]

    def busy_s(self, rank: int, share: int) -> float:
        return float(self.fixed[rank] + self.per_sample[rank] * share)


def _memories(
    cluster: Cluster,
    memory: Sequence[RankMemory] | None,
    fixed_bytes: Sequence[int] | None,
    bytes_per_sample: Sequence[float] | None,
) -> list[RankMemory] | None:
    problems = []
    if memory is not None and fixed_bytes is not None:
        problems.append("memory and fixed_bytes are both given: give one of them")
    if (fixed_bytes is None) != (bytes_per_sample is None):
        problems.append("of fixed_bytes and bytes_per_sample only one is given: give both or none")
    named = {"memory": memory, "fixed_bytes": fixed_bytes, "bytes_per_sample": bytes_per_sample}
    problems += _wrong_lengths(cluster, named)
    raise_all(HeteroError, "memory of the ranks is not valid", problems)
    if fixed_bytes is not None and bytes_per_sample is not None:
        pairs = zip(fixed_bytes, bytes_per_sample, strict=True)
        return [RankMemory.measured(fixed, per_sample) for fixed, per_sample in pairs]
    return None if memory is None else list(memory)


def _capacities(cluster: Cluster, capacity_bytes: Sequence[int] | None) -> list[int]:
    raise_all(
        HeteroError,
        "capacity of the ranks is not valid",
        _wrong_lengths(cluster, {"capacity_bytes": capacity_bytes}),
    )
    return [device.memory_bytes for device in cluster.devices] if capacity_bytes is None else list(capacity_bytes)


def _check_lengths(
    cluster: Cluster, seconds_per_sample: Sequence[float], fixed_seconds: Sequence[float] | None
) -> None:
    named = {"seconds_per_sample": seconds_per_sample, "fixed_seconds": fixed_seconds}
    raise_all(HeteroError, "seconds of the ranks are not valid", _wrong_lengths(cluster, named))


def _wrong_lengths(cluster: Cluster, named: Mapping[str, Sequence[object] | None]) -> list[str]:
    return [
        f"{name} has {len(values)} entries, cluster {cluster.name!r} has {cluster.world_size} ranks: give one per rank"
        for name, values in named.items()
        if values is not None and len(values) != cluster.world_size
    ]


def _memory_limits(
    cluster: Cluster, memories: list[RankMemory] | None, capacities: list[int], min_samples: int
) -> list[int | None]:
    """The most samples per rank that its memory holds; ``None`` where memory sets no limit."""
    if memories is None:
        return [None] * cluster.world_size
    limits = [memory.max_samples(capacity) for memory, capacity in zip(memories, capacities, strict=True)]
    problems = []
    for rank, limit in enumerate(limits):
        if limit is None or limit >= min_samples:
            continue
        peak, capacity = memories[rank].peak(min_samples), capacities[rank]
        needed = peak.needed_bytes(min_samples)
        missing = needed - capacity
        samples = f"{min_samples} sample{'s' if min_samples != 1 else ''}"
        problems.append(
            f"{_who(cluster, rank)} needs {format_bytes(needed)} ({peak}, {samples}), "
            f"{format_bytes(capacity)} are free: {format_bytes(missing)} ({missing} bytes) are missing"
            f"{_remedy(peak.fixed_bytes > capacity)}"
        )
    raise_all(InfeasibleError, "the model does not fit", problems)
    return limits


def _remedy(states_alone: bool) -> str:
    if states_alone:
        return (
            "; states and the largest unit exceed it without any sample: add ranks to share the states, "
            "wrap smaller blocks, use a lower precision, or leave this device out"
        )
    return "; use activation checkpointing or a lower precision, or leave this device out"


def _check_batch(cluster: Cluster, global_batch_size: int, limits: Sequence[int | None], min_samples: int) -> None:
    """Say in the words of a plan what ``split_batch`` would refuse in those of a split."""
    problems = []
    least = min_samples * cluster.world_size
    if 0 < global_batch_size < least:
        problems.append(
            f"global_batch_size is {global_batch_size}, below {least}, the least that "
            f"{cluster.world_size} ranks take ({min_samples} each): set it to {least} or more, or use "
            f"at most {global_batch_size // min_samples} ranks"
        )
    known = [limit for limit in limits if limit is not None]
    if len(known) == len(limits) and sum(known) < global_batch_size:
        steps = -(-global_batch_size // max(sum(known), 1))
        held = "; ".join(f"{_who(cluster, rank)}: {limit}" for rank, limit in enumerate(known[:16]))
        held += f"; and {len(known) - 16} more" if len(known) > 16 else ""
        problems.append(
            f"global_batch_size is {global_batch_size}, but the memory of all ranks holds {sum(known)} "
            f"samples ({held}): lower it to {sum(known)} or less, split it by gradient accumulation "
            f"(accumulate_grad_batches={steps}), or use activation checkpointing"
        )
    raise_all(InfeasibleError, "no plan exists", problems)


def _reasons(
    cluster: Cluster,
    seconds: _Seconds,
    shares: tuple[int, ...],
    limits: Sequence[int | None],
    min_samples: int,
) -> tuple[str, ...]:
    step_s = slowest_seconds(seconds.per_sample, seconds.fixed, shares)
    pace = max(range(len(shares)), key=lambda rank: seconds.busy_s(rank, shares[rank]))
    reasons = [
        f"all {len(shares)} ranks shard the model as one group",
        f"shares make the slowest rank as fast as whole samples allow: {_shares_by_type(cluster, shares)}",
        f"{_who(cluster, pace)} sets the pace: {format_seconds(step_s)} for its {shares[pace]} samples",
        _against_even(seconds, shares, limits, step_s),
    ]
    if any(limit is not None and limit == share for limit, share in zip(limits, shares, strict=True)):
        free = split_batch(seconds.per_sample, seconds.fixed, sum(shares), min_samples=min_samples)
        reasons += [
            f"{_who(cluster, rank)} is held at {share} samples by its memory; by speed it would take {free[rank]}"
            for rank, share in enumerate(shares)
            if share == limits[rank] and free[rank] > share
        ]
    return tuple(reasons)


def _against_even(seconds: _Seconds, shares: tuple[int, ...], limits: Sequence[int | None], step_s: float) -> str:
    ranks, total = len(shares), sum(shares)
    even = even_parts(total, ranks)
    tight = [rank for rank, limit in enumerate(limits) if limit is not None and even[rank] > limit]
    if tight:
        return f"an even split of {max(even)} samples a rank would not fit the memory of rank {tight[0]}"
    even_s = slowest_seconds(seconds.per_sample, seconds.fixed, even)
    return f"an even split would take {format_seconds(even_s)}, {even_s / step_s:.2f} x as long"


def _shares_by_type(cluster: Cluster, shares: tuple[int, ...]) -> str:
    texts = []
    for kind in cluster.types:
        own = [share for share, device in zip(shares, cluster.devices, strict=True) if device.type == kind]
        span = f"{min(own)}" if min(own) == max(own) else f"{min(own)} to {max(own)}"
        texts.append(f"{len(own)} x {kind} take {span} each")
    return ", ".join(texts)


def _who(cluster: Cluster, rank: int) -> str:
    device = cluster.devices[rank]
    return f"rank {rank} ({device.type} on {device.node})"
