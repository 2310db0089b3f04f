"""Move a plan's batch shares to what its ranks measured while they trained, under what their memory holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hetero.plan import RankPrediction, ShardPlan
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.simulator.memory import RankMemory


@dataclass(frozen=True)
class Move:
    """Shares that would be faster.

    Attributes:
        shares: samples per rank; they sum to the plan's global batch.
        seconds: per rank, busy seconds to expect with them.
        gain: the share of the slowest rank's seconds that they save, from 0 to 1.
    """

    shares: tuple[int, ...]
    seconds: tuple[float, ...]
    gain: float


def drifts(measured_s: Sequence[float], expected_s: Sequence[float]) -> tuple[float, ...]:
    """Return by how much each rank's share of all busy seconds differs from the expected share, as a part of it.

    Only what ranks take compared with each other counts: where all are slower alike there is nothing to move.

    Args:
        measured_s: busy seconds per rank.
        expected_s: what was expected of them, in any unit; above zero.

    Returns:
        One number per rank; 1 is twice the share that was expected, -0.5 half of it.
    """
    measured, expected = math.fsum(measured_s), math.fsum(expected_s)  # the same on every host
    if measured <= 0:
        return (0.0,) * len(measured_s)
    return tuple(
        (own / measured) / (planned / expected) - 1 for own, planned in zip(measured_s, expected_s, strict=True)
    )


def faster_shares(
    plan: ShardPlan,
    measured_s: Sequence[float],
    fixed_s: Sequence[float] | None = None,
    max_samples: Sequence[int | None] | None = None,
) -> Move:
    """Return the shares that make the slowest rank as fast as can be; those of the plan where none are faster.

    Args:
        plan: whose shares were run.
        measured_s: per rank, busy seconds of a step with them.
        fixed_s: per rank, seconds of each micro-batch that do not depend on its samples; by default none.
        max_samples: per rank, the most samples that its memory holds; ``None`` is no limit.

    Returns:
        Shares of at least one sample, but for ranks that had none: what they would take is not known, and they keep
        none.
    """
    per_sample, fixed, low, high = [], [], [], []
    for rank, (share, seconds) in enumerate(zip(plan.batch_shares, measured_s, strict=True)):
        limit = None if max_samples is None else max_samples[rank]
        own_fixed = 0.0 if fixed_s is None else fixed_s[rank] * plan.micro_batches_of(plan.group_of(rank))
        # what is fixed was measured before training; it may have shrunk since
        own_fixed = min(own_fixed, seconds / 2)
        fixed.append(own_fixed)
        per_sample.append(max(seconds - own_fixed, 1e-12) / share if share else 1.0)
        low.append(1 if share else 0)
        high.append(limit if share else 0)
    shares = split_batch(per_sample, fixed, plan.global_batch_size, max_samples=high, min_samples=low)
    seconds_then = tuple(
        f + s * share if share else own for f, s, share, own in zip(fixed, per_sample, shares, measured_s, strict=True)
    )
    busiest = max(measured_s)
    gain = 1 - max(seconds_then) / busiest if busiest > 0 else 0.0
    if gain <= 0:
        return Move(plan.batch_shares, tuple(measured_s), 0.0)
    return Move(shares, seconds_then, gain)


def most_samples(
    plan: ShardPlan,
    capacity_bytes: Sequence[int],
    most_run: Sequence[int],
    peak_bytes: Sequence[int | None],
    memory: Sequence[RankMemory] | None = None,
) -> tuple[int | None, ...]:
    """Return the most samples per rank that its memory holds, as far as is known; never fewer than it has run.

    Args:
        plan: whose micro-batches count: memory grows with the largest of them.
        capacity_bytes: memory per rank.
        most_run: per rank, the largest share so far.
        peak_bytes: per rank, the peak memory so far; ``None`` where nothing counts it.
        memory: per rank, its memory as a function of the samples of a micro-batch, where that was measured. Without it,
            all of the peak is taken to grow with the samples: more than it does, so what is allowed fits.

    Returns:
        One number per rank; ``None`` where nothing limits it, or nothing is known.
    """
    limits: list[int | None] = []
    for rank, capacity in enumerate(capacity_bytes):
        count = plan.micro_batches_of(plan.group_of(rank))
        run, peak = max(most_run[rank], 1), peak_bytes[rank]
        if memory is not None:
            largest = memory[rank].max_samples(capacity)
        elif peak:
            largest = capacity * -(-run // count) // peak
        else:
            largest = None
        limits.append(None if largest is None else max(run, largest * count))
    return tuple(limits)


def moved_plan(plan: ShardPlan, move: Move, why: str, memory: Sequence[RankMemory] | None = None) -> ShardPlan:
    """Return the plan with other shares.

    Args:
        plan: what was run; groups, modes and micro-batches stay.
        move: the shares and what to expect of them.
        why: added to the plan's reasons.
        memory: as of :func:`most_samples`; without it, nothing is predicted of peak memory.

    Returns:
        A plan whose predictions are those of the move; what the step took beside computing stays.
    """
    beside_s = 0.0
    if plan.predictions and plan.predicted_step_s is not None:
        beside_s = max(0.0, plan.predicted_step_s - max(each.busy_s for each in plan.predictions))
    step_s = max(move.seconds) + beside_s
    sizes = tuple(-(-share // plan.micro_batches_of(plan.group_of(rank))) for rank, share in enumerate(move.shares))
    peaks = [None if memory is None else memory[rank].peak_bytes(size) for rank, size in enumerate(sizes)]
    return replace(
        plan,
        batch_shares=move.shares,
        micro_batch_sizes=sizes if plan.micro_batch_sizes else (),
        predicted_step_s=step_s,
        predictions=tuple(
            RankPrediction.of(seconds, step_s, peak) for seconds, peak in zip(move.seconds, peaks, strict=True)
        ),
        reasons=(*plan.reasons, why),
        lower_bound_s=None,
    )
