"""Seconds that no pipeline plan can be below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lightning_hetero.planner.pipeline_design import Problem

_ROUNDS = 300


def lower_bound_s(problem: Problem, sizes: Sequence[int]) -> float:
    """Seconds that no pipeline plan for these devices, costs, batch and micro-batch sizes can be below.

    The larger of two bounds, both without messages, reductions and memory:

    - Work: every sample passes every unit on some device, and n_t devices of type t have n_t T seconds. For any
      prices p_t >= 0 of a second with sum(n_t p_t) = 1, ``T >= batch * sum_u min_t p_t c[t, u]`` (duality of linear
      programs), where c are seconds per sample at the best micro-batch size. Prices rise where a type is overloaded.
    - Way: one micro-batch passes all units, each on the device that is fastest for it.

    Args:
        problem: what is planned.
        sizes: micro-batch sizes that a plan may have.
    """
    counts = Counter(problem.kinds)
    kinds = list(counts)
    tables = [problem.table(size) for size in sizes]
    per_unit = np.array([[np.diagonal(table.both(kind), 1) for kind in kinds] for table in tables])
    per_sample = (per_unit / np.array(sizes, dtype=np.float64)[:, None, None]).min(axis=0)
    way = float(per_unit.min(axis=1).sum(axis=1).min())
    number = np.array([counts[kind] for kind in kinds], dtype=np.float64)
    # By speed at first: where all units favour types alike this is the optimum already.
    prices = 1 / np.maximum(per_sample.sum(axis=1), 1e-300)
    best = 0.0
    for turn in range(_ROUNDS):
        prices = prices / (number * prices).sum()
        priced = prices[:, None] * per_sample
        best = max(best, float(priced.min(axis=0).sum()))
        if len(kinds) == 1:
            break
        cheapest = priced.argmin(axis=0)
        load = np.array([per_sample[t, cheapest == t].sum() / number[t] for t in range(len(kinds))])
        # Most of the load moves between types that are nearly equal in price, so steps must become small.
        prices = prices * np.exp(0.3 / (1 + turn / 10) * (load / max(load.max(), 1e-300) - 0.5))
    return max(way, best * problem.training.global_batch_size)
