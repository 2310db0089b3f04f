"""Split a global batch over ranks of unequal speed, exactly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.errors import HeteroError, InfeasibleError, raise_all

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def split_batch(
    seconds_per_sample: Sequence[float],
    fixed_seconds: Sequence[float] | float | None,
    global_batch: int,
    *,
    max_samples: Sequence[int | None] | int | None = None,
    min_samples: Sequence[int] | int = 0,
) -> tuple[int, ...]:
    """Whole batch shares that sum to ``global_batch`` and minimise the slowest rank's seconds.

    Rank r takes ``fixed_seconds[r] + seconds_per_sample[r] * share[r]`` seconds. The result is exact: no
    other whole split has a smaller maximum. Among the splits that reach it, the second slowest rank is as
    fast as can be, then the third, and so on; what is still tied goes to the rank with fewer seconds per
    sample, then to the one with fewer fixed seconds, then to the lower rank. So shares depend on the order of
    the ranks only between ranks that are equal, and then by one sample.

    Args:
        seconds_per_sample: one per rank, above zero.
        fixed_seconds: seconds that a rank takes whatever its share, one per rank or one for all, zero or
            more; ``None`` is zero.
        global_batch: samples to split, at least 1.
        max_samples: upper limit per rank, or one for all; ``None`` is no limit.
        min_samples: lower limit per rank, or one for all.

    Returns:
        One share per rank.

    Raises:
        InfeasibleError: if the lower limits sum to more than the global batch, or the upper ones to less.
        HeteroError: if an argument is malformed, listing every problem.

    Notes:
        The samples that a rank takes are finished at seconds that only increase, so taking, over all ranks,
        the ``global_batch`` samples that would be finished first is optimal (an exchange argument; Fox 1966,
        "Discrete optimization via marginal analysis"). A bisection over the finishing time takes all but a
        few of them at once, a heap the rest. Time: O(ranks * log(global_batch)^2).
    """
    slope, fixed, low, high = _checked(seconds_per_sample, fixed_seconds, global_batch, max_samples, min_samples)
    shares = _bulk(slope, fixed, low, high, global_batch)
    return _one_by_one(slope.tolist(), fixed.tolist(), high.tolist(), shares.tolist(), global_batch)


def slowest_seconds(
    seconds_per_sample: Sequence[float], fixed_seconds: Sequence[float] | float | None, shares: Sequence[int]
) -> float:
    """Seconds of the slowest rank under ``shares``; arguments as in :func:`split_batch`."""
    fixed = _per_rank(fixed_seconds, len(seconds_per_sample), 0.0)
    return float(max(f + s * b for s, f, b in zip(seconds_per_sample, fixed, shares, strict=True)))


def _bulk(slope: _Floats, fixed: _Floats, low: _Ints, high: _Ints, global_batch: int) -> _Ints:
    """Shares that hold, of the samples that finish first, all but a few per rank."""
    few = 4 * len(slope)
    # Before ``early`` no sample is finished; by ``late`` every rank has taken all that it may.
    early = float(np.nextafter((fixed + slope).min(), -math.inf))
    late = float((fixed + slope * high).max())
    shares = low
    while global_batch - int(shares.sum()) > few:
        middle = early + (late - early) / 2
        if not early < middle < late:
            return _at_once(late, slope, fixed, high, shares, global_batch)
        taken = _finished_by(middle, slope, fixed, low, high)
        if int(taken.sum()) <= global_batch:
            early, shares = middle, taken
        else:
            late = middle
    return shares


def _at_once(time: float, slope: _Floats, fixed: _Floats, high: _Ints, shares: _Ints, global_batch: int) -> _Ints:
    """Fill up to ``global_batch`` with samples that all finish at the one number ``time``.

    Reached when seconds per sample are so small beside the fixed ones that many samples round to one
    number; the order among them is that of the ties in :func:`split_batch`.
    """
    filled = shares.copy()
    room = _finished_by(time, slope, fixed, shares, high) - shares
    for rank in np.lexsort((fixed, slope)):
        filled[rank] += min(int(room[rank]), global_batch - int(filled.sum()))
    return filled


def _finished_by(time: float, slope: _Floats, fixed: _Floats, low: _Ints, high: _Ints) -> _Ints:
    """Per rank the largest share within its limits that is finished by ``time``, or its lower limit.

    By bisection on whole numbers and not by dividing: rounding in ``(time - fixed) / slope`` could be off
    by a sample, and then the split would not be exact.
    """
    taken, above = low.copy(), high + 1
    while True:
        open_ranks = above - taken > 1
        if not open_ranks.any():
            return taken
        middle = (taken + above) // 2
        fits = fixed + slope * middle <= time
        taken = np.where(open_ranks & fits, middle, taken)
        above = np.where(open_ranks & ~fits, middle, above)


def _one_by_one(
    slope: list[float], fixed: list[float], high: list[int], shares: list[int], global_batch: int
) -> tuple[int, ...]:
    """Give every sample that is left to the rank that would be finished first with it."""

    def key(rank: int) -> tuple[float, float, float, int]:
        return (fixed[rank] + slope[rank] * (shares[rank] + 1), slope[rank], fixed[rank], rank)

    heap = [key(rank) for rank in range(len(shares)) if shares[rank] < high[rank]]
    heapq.heapify(heap)
    for _ in range(global_batch - sum(shares)):
        rank = heap[0][3]
        shares[rank] += 1
        if shares[rank] < high[rank]:
            heapq.heapreplace(heap, key(rank))
        else:
            heapq.heappop(heap)
    return tuple(shares)


def _checked(
    seconds_per_sample: Sequence[float],
    fixed_seconds: Sequence[float] | float | None,
    global_batch: int,
    max_samples: Sequence[int | None] | int | None,
    min_samples: Sequence[int] | int,
) -> tuple[_Floats, _Floats, _Ints, _Ints]:
    """The arguments as arrays, one entry per rank, or an error that lists every problem."""
    ranks = len(seconds_per_sample)
    fixed = _per_rank(fixed_seconds, ranks, 0.0)
    lows, highs = _per_rank(min_samples, ranks, 0), _per_rank(max_samples, ranks, None)
    problems = [] if ranks else ["seconds_per_sample is empty: give one value per rank"]
    if not _is_whole(global_batch) or global_batch < 1:
        problems.append(f"global_batch is {global_batch!r}: give a whole number of samples, at least 1")
    for name, values in (("fixed_seconds", fixed), ("min_samples", lows), ("max_samples", highs)):
        if len(values) != ranks:
            problems.append(f"{name} has {len(values)} values for {ranks} ranks: give one per rank")
    for rank, value in enumerate(seconds_per_sample):
        if not (math.isfinite(value) and value > 0):
            problems.append(f"seconds_per_sample[{rank}] is {value!r}: give a positive number of seconds")
    for rank, value in enumerate(fixed):
        if not (math.isfinite(value) and value >= 0):
            problems.append(f"fixed_seconds[{rank}] is {value!r}: give zero or a positive number of seconds")
    for name, limits in (("min_samples", lows), ("max_samples", highs)):
        for rank, limit in enumerate(limits):
            if limit is not None and (not _is_whole(limit) or limit < 0):
                problems.append(f"{name}[{rank}] is {limit!r}: give a whole number of samples, 0 or more")
    raise_all(HeteroError, "the batch cannot be split", problems)
    high = [global_batch if limit is None else min(int(limit), global_batch) for limit in highs]
    raise_all(InfeasibleError, "the batch cannot be split", _misfits(global_batch, lows, high))
    return (
        np.asarray(seconds_per_sample, dtype=np.float64),
        np.asarray(fixed, dtype=np.float64),
        np.asarray(lows, dtype=np.int64),
        np.asarray(high, dtype=np.int64),
    )


def _misfits(global_batch: int, lows: Sequence[int], high: Sequence[int]) -> list[str]:
    problems = [
        f"rank {rank} takes at least {low} samples (min_samples) and at most {top} (max_samples): "
        f"lower its min_samples or raise its max_samples"
        for rank, (low, top) in enumerate(zip(lows, high, strict=True))
        if low > top and low <= global_batch
    ]
    if sum(lows) > global_batch:
        problems.append(
            f"the global batch has {global_batch} samples, fewer than the {sum(lows)} that {len(lows)} ranks "
            f"take at least ({min(lows)} to {max(lows)} each): raise the global batch to {sum(lows)} "
            f"or use fewer ranks"
        )
    if sum(high) < global_batch:
        problems.append(
            f"the global batch has {global_batch} samples, more than the {sum(high)} that {len(high)} ranks "
            f"can take at most (max_samples {min(high)} to {max(high)} each): lower the global batch to "
            f"{sum(high)} or add ranks"
        )
    return problems


def _per_rank(value: Any, ranks: int, default: Any) -> Sequence[Any]:
    """One entry per rank from a sequence, from one value for all, or from the default."""
    if value is None:
        return [default] * ranks
    return [value] * ranks if isinstance(value, (int, float)) else list(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
