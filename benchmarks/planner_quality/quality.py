"""Bottleneck over optimum, and planning time, of every rule over many cases."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.planner_quality.clusters import Case
from benchmarks.planner_quality.rules import Rules, bottleneck, optimum

# Orders of one cluster that are tried one by one, to check the free order.
MOST_ORDERS = 300


def compare(cases: Sequence[Case], rules: Rules, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every rule on every case.

    Args:
        cases: what to partition.
        rules: what to compare.
        tell: called with the case's name before each case.

    Returns:
        By rule: worst and mean of bottleneck / optimum (the optimum in the order as listed; free order can
        be below 1), in how many cases a device is left without units, planning seconds (median, worst), and
        the raw ratios.
    """
    found: dict[str, dict[str, list[Any]]] = {name: {"ratio": [], "seconds": [], "empty": []} for name in rules.by_name}
    for case in cases:
        tell(case.name)
        best = optimum(case.seconds)
        for name, rule in rules.by_name.items():
            start_s = time.perf_counter()
            order, counts = rule(case.seconds)
            found[name]["seconds"].append(time.perf_counter() - start_s)
            if sum(counts) != len(case.seconds[0]) or sorted(order) != list(range(len(case.seconds))):
                raise AssertionError(f"{name} on {case.name}: order {order}, counts {counts}")
            found[name]["ratio"].append(bottleneck(case.seconds, order, counts) / best)
            found[name]["empty"].append(min(counts) == 0)
    return {
        "cases": len(cases),
        "rules": {
            name: {
                "worst": max(results["ratio"]),
                "mean": statistics.fmean(results["ratio"]),
                "cases_with_an_empty_device": sum(results["empty"]),
                "median_planning_s": statistics.median(results["seconds"]),
                "worst_planning_s": max(results["seconds"]),
                "ratios": [round(ratio, 6) for ratio in results["ratio"]],
            }
            for name, results in found.items()
        },
        "free_order_checked": _check_free_orders(cases),
    }


def _check_free_orders(cases: Sequence[Case]) -> dict[str, Any]:
    """Compare free order with the plain dynamic program over every order of types, where there are few."""
    from lightning_hetero.planner import partition_units

    gaps = []
    for case in cases:
        orders = _distinct_orders(case)
        if orders is None:
            continue
        best = min(optimum(seconds) for seconds in orders)
        gaps.append(partition_units(case.seconds, fixed_order=False).bottleneck_s / best - 1)
    return {"cases": len(gaps), "largest_gap": max(map(abs, gaps), default=0.0), "most_orders": MOST_ORDERS}


def _distinct_orders(case: Case) -> list[list[tuple[float, ...]]] | None:
    """Seconds in every order of the devices that differs by type; ``None`` where there are too many."""
    orders: set[tuple[str, ...]] = {()}
    for _ in case.kinds:
        orders = {
            (*order, kind) for order in orders for kind in set(case.kinds) if order.count(kind) < case.kinds.count(kind)
        }
        if len(orders) > MOST_ORDERS:
            return None
    rows = dict(zip(case.kinds, case.seconds, strict=True))
    return [[rows[kind] for kind in order] for order in sorted(orders)]
