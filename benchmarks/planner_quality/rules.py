"""The ways to cut that are compared, and an optimum that is found in another way than the planner's."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.planner import partition_units

Seconds = Sequence[Sequence[float]]
# seconds -> (device of each stage, units of each stage)
Rule = Callable[[Seconds], tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class Rules:
    """What can be compared here.

    Args:
        by_name: the rules.
        versions: of the libraries that some of them are.
        missing: why a library is left out.
    """

    by_name: dict[str, Rule]
    versions: dict[str, str]
    missing: dict[str, str]


def load_rules(packages: Path | None) -> Rules:
    """The rules, with DeepSpeed's and torchgpipe's balancers where they can be imported.

    Args:
        packages: folder that ``pip install --target`` made, searched after the environment's own.
    """
    if packages is not None:
        sys.path.append(str(packages))
    rules: dict[str, Rule] = {"even": even, "greedy share": greedy_share}
    versions, missing = {}, {}
    for library, module, rule in (
        ("torchgpipe", "torchgpipe.balance.blockpartition", torchgpipe),
        ("deepspeed", "deepspeed.runtime.utils", deepspeed),
    ):
        try:
            importlib.import_module(module)
        except Exception as error:  # old libraries fail to import in many ways, and each is a result
            missing[library] = f"{type(error).__name__}: {error}"
        else:
            rules[library] = rule
            versions[library] = _version(library)
    rules["ours, order as listed"] = ours
    rules["ours, free order"] = ours_free
    return Rules(rules, versions, missing)


def bottleneck(seconds: Seconds, order: Sequence[int], counts: Sequence[int]) -> float:
    """Seconds of the slowest stage."""
    ends = list(accumulate(counts))
    return max(
        math.fsum(seconds[device][end - count : end]) for device, count, end in zip(order, counts, ends, strict=True)
    )


def even(seconds: Seconds) -> tuple[Sequence[int], Sequence[int]]:
    """As many units on every device, the first ones with one more where it does not come out even."""
    devices, units = len(seconds), len(seconds[0])
    return range(devices), [units // devices + (stage < units % devices) for stage in range(devices)]


def greedy_share(seconds: Seconds) -> tuple[Sequence[int], Sequence[int]]:
    """Fill each device to its share of the total, by its speed on the whole model, at least one unit each."""
    devices, units = len(seconds), len(seconds[0])
    speeds = [1 / math.fsum(row) for row in seconds]
    work = list(accumulate(_mean_row(seconds)))
    counts: list[int] = []
    for stage in range(devices):
        start = sum(counts)
        wanted = work[-1] * math.fsum(speeds[: stage + 1]) / math.fsum(speeds)
        # The end nearest to the wanted one, leaving a unit for every device that follows.
        ends = range(start + 1, units - (devices - stage - 1) + 1)
        end = min(ends, key=lambda end: abs(work[end - 1] - wanted)) if stage < devices - 1 else units
        counts.append(end - start)
    return range(devices), counts


def torchgpipe(seconds: Seconds) -> tuple[Sequence[int], Sequence[int]]:
    """The ``blockpartition.solve`` of torchgpipe; it takes one whole cost per unit and knows no devices."""
    solve = importlib.import_module("torchgpipe.balance.blockpartition").solve
    nanoseconds = [round(value * 1e9) for value in _mean_row(seconds)]
    blocks = solve(nanoseconds, partitions=len(seconds))
    return range(len(seconds)), [len(block) for block in blocks]


def deepspeed(seconds: Seconds) -> tuple[Sequence[int], Sequence[int]]:
    """DeepSpeed's ``partition_balanced``; it takes one cost per unit and knows no devices."""
    partition_balanced = importlib.import_module("deepspeed.runtime.utils").partition_balanced
    borders = partition_balanced(_mean_row(seconds), len(seconds))
    return range(len(seconds)), [int(count) for count in np.diff(borders)]


def ours(seconds: Seconds) -> tuple[Sequence[int], Sequence[int]]:
    """``partition_units`` with the devices in the order in which they are listed, as for the others."""
    partition = partition_units(seconds)
    return partition.order, partition.counts


def ours_free(seconds: Seconds) -> tuple[Sequence[int], Sequence[int]]:
    """``partition_units`` over all orders of the devices."""
    partition = partition_units(seconds, fixed_order=False)
    return partition.order, partition.counts


def optimum(seconds: Seconds) -> float:
    """The least bottleneck in the order as listed, by a plain dynamic program over cuts, in floats.

    Slow and simple, and not the planner's method, so that it can vouch for it (to rounding, 1e-12).
    """
    units = len(seconds[0])
    best: NDArray[np.float64] = np.full(units + 1, np.inf)
    best[0] = 0
    for row in seconds:
        sums = np.concatenate([[0.0], np.cumsum(row)])
        stage = np.where(np.tri(units + 1, k=-1).T > 0, sums[None, :] - sums[:, None], np.inf)
        best = np.maximum(best[:, None], stage).min(axis=0)
    return float(best[-1])


def _mean_row(seconds: Seconds) -> list[float]:
    """What a balancer that knows no devices is told: each unit's seconds, averaged over the devices."""
    return [math.fsum(column) / len(seconds) for column in zip(*seconds, strict=True)]


def _version(library: str) -> str:
    for found in distributions(path=sys.path):
        if found.metadata["Name"].lower() == library:
            return found.version
    raise PackageNotFoundError(library)
