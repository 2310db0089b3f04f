"""Partition a chain of units over devices of unequal speed and memory, exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.errors import HeteroError, InfeasibleError, raise_all
from lightning_hetero.planner import orders
from lightning_hetero.planner.bottleneck import Optimum, StageCosts, least_bottleneck
from lightning_hetero.planner.cut import Longs, least_sum_cut
from lightning_hetero.planner.orders import Level
from lightning_hetero.units import format_bytes

# Moves between states of a free order that are searched: 5 to 15 s and 400 MB at the limit.
MOST_MOVES = 24_000_000
# Of those, how many are searched only to say in an error whether another order would fit.
_MOVES_FOR_ADVICE = 1_000_000
# Resolution of the second criterion, relative to the bottleneck: squares of it still sum exactly in floats.
_STEPS = 2**20


@dataclass(frozen=True)
class Partition:
    """A cut of units 0, 1, 2, ... into stages, each a run of units on one device.

    Args:
        order: index of the device that runs each stage; every device once.
        counts: units of each stage, at least 1.
        bottleneck_s: seconds of the slowest stage for one micro-batch, forward and backward.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]
    bottleneck_s: float

    @property
    def starts(self) -> tuple[int, ...]:
        """First unit of each stage."""
        return (0, *accumulate(self.counts[:-1]))


@dataclass(frozen=True)
class _Problem:
    """The checked arguments, in whole numbers, by device type.

    Args:
        kinds: type of each device. Types are numbered by what they are (seconds, bytes, capacity), never by
            where a device stands in the list, so that results do not depend on the listing.
        seconds: per type the running sum of seconds, in units of ``1 / seconds_scale`` seconds.
        memory: per type the running sum of bytes, in units of ``1 / memory_scale`` bytes; all zero without
            limits.
        capacity: per type, in the same units.
    """

    kinds: tuple[int, ...]
    seconds: tuple[list[int], ...]
    seconds_scale: int
    memory: tuple[list[int], ...]
    capacity: tuple[int, ...]
    memory_scale: int

    @property
    def units(self) -> int:
        """How many units the chain has."""
        return len(self.seconds[0]) - 1


def partition_units(
    seconds: Sequence[Sequence[float]],
    *,
    fixed_order: bool = True,
    memory_bytes: Sequence[float] | Sequence[Sequence[float]] | None = None,
    capacity_bytes: Sequence[float] | None = None,
) -> Partition:
    """Cut a chain of units into one stage per device, so that the slowest stage takes the fewest seconds.

    The result is exact: no other cut, and with ``fixed_order=False`` no other order of the devices, has a
    smaller bottleneck, and none that equals it only by rounding is taken for better. Every device gets at
    least one unit. What is tied:

    - Cut: among the cuts that reach the bottleneck in the chosen order, the sum of squared stage seconds is
      least (resolved to a millionth of the bottleneck), so what need not be full is even; then later stages
      hold fewer units.
    - Order: always the same one for the same set of devices, however they are listed; devices that are alike
      in seconds, bytes and capacity stand in ascending index.

    Args:
        seconds: ``seconds[d][u]`` are the forward and backward seconds of unit u on device d for one
            micro-batch, zero or more. Shape (devices, units).
        fixed_order: whether stage i is on device i. Otherwise the best order is found.
        memory_bytes: bytes that each unit takes, shape (units,) or, where it depends on the device,
            (devices, units). Needs ``capacity_bytes``. Bytes that depend on the *stage* (activations of the
            micro-batches in flight) can only be given for the worst stage here.
        capacity_bytes: bytes that each device has for its units, shape (devices,).

    Returns:
        The partition.

    Raises:
        InfeasibleError: if there are fewer units than devices, or no cut fits the memory. Then the error
            names the cut with the smallest largest shortage, and the bytes missing on each device.
        HeteroError: if an argument is malformed, listing every problem; or if the free order of so many
            different devices is too large to search exactly (``MOST_MOVES``). Devices that are alike in
            seconds, bytes and capacity are one type, and the search grows with the product over types of
            (devices of the type + 1): three types of 199 devices each, or 20 devices all different, are just
            allowed. There is no inexact fallback.

    Notes:
        Seconds are binary fractions, so they are summed and compared as whole numbers. A fixed order is a
        chains-on-chains problem on unequal processors (Pinar and Aykanat 2004); in free order the state of
        the search counts devices used *per type* and not which ones they are.
    """
    problem = _checked(seconds, memory_bytes, capacity_bytes)
    devices = len(problem.kinds)
    if problem.units < devices:
        raise InfeasibleError(
            f"{devices} devices cannot share {problem.units} units: each needs at least one unit; "
            f"use at most {problem.units} of the devices or cut the model into more units"
        )
    levels = _levels(problem.kinds, fixed_order)
    optimum = least_bottleneck(_stage_seconds(problem), levels)
    if optimum is None:
        raise InfeasibleError(_shortage(problem, levels, fixed_order))
    return Partition(
        _devices_of(optimum, problem.kinds, fixed_order),
        _evenest_cut(optimum, problem.seconds),
        optimum.limit / problem.seconds_scale,
    )


def _levels(kinds: tuple[int, ...], fixed_order: bool) -> list[Level]:
    if fixed_order:
        return orders.fixed_order(kinds)
    counts = [count for _, count in sorted(Counter(kinds).items())]
    moves = orders.moves_of(counts)
    if moves > MOST_MOVES:
        raise HeteroError(
            f"the free order of {len(kinds)} devices of {len(counts)} types has {moves:,} moves, more than "
            f"the {MOST_MOVES:,} that are searched: give devices of nearly equal seconds and capacity the same "
            f"values (one type each), use fewer devices, or set fixed_order=True"
        )
    return orders.free_order(counts)


def _stage_seconds(problem: _Problem) -> list[StageCosts]:
    return [
        StageCosts(time, 0, StageCosts(memory, capacity, [problem.units] * (problem.units + 1)).within(0))
        for time, memory, capacity in zip(problem.seconds, problem.memory, problem.capacity, strict=True)
    ]


def _devices_of(optimum: Optimum, kinds: tuple[int, ...], fixed_order: bool) -> tuple[int, ...]:
    """The device of each stage: of those of its type, the first that is left."""
    if fixed_order:
        return tuple(range(len(kinds)))
    waiting = {kind: iter([d for d, other in enumerate(kinds) if other == kind]) for kind in set(kinds)}
    return tuple(next(waiting[kind]) for kind in optimum.kinds)


def _evenest_cut(optimum: Optimum, seconds: Sequence[list[int]]) -> tuple[int, ...]:
    """The cut within the optimum with the least sum of squared stage seconds."""
    quantum = max(optimum.limit, 1)
    # Rounded unit by unit, so that equal units count as equal wherever they stand. A unit above the limit is in no
    # stage of such a device, and would only cost the others their digits.
    rows = [
        np.array([0, *accumulate(min(_STEPS * (b - a) // quantum, 2 * _STEPS) for a, b in pairwise(row))], np.float64)
        for row in seconds
    ]

    def square(stage: int, start: Longs, end: Longs) -> NDArray[Any]:
        row = rows[optimum.kinds[stage]]
        return np.asarray(row[end] - row[start]) ** 2

    return least_sum_cut([optimum.ends[kind] for kind in optimum.kinds], square)


def _shortage(problem: _Problem, levels: list[Level], fixed_order: bool) -> str:
    """Which bytes are missing where, in the cut whose largest shortage is least, and what can be done."""
    anything = [problem.units] * (problem.units + 1)
    costs = [StageCosts(row, room, anything) for row, room in zip(problem.memory, problem.capacity, strict=True)]
    optimum = least_bottleneck(costs, levels)
    assert optimum is not None, "without limits some cut exists, as there are enough units"
    scale = problem.memory_scale

    def missing(stage: int, start: Longs, end: Longs) -> NDArray[Any]:
        kind = optimum.kinds[stage]
        row = np.array([value / scale for value in problem.memory[kind]])
        return np.asarray(row[end] - row[start] - problem.capacity[kind] / scale).clip(min=0)

    counts = least_sum_cut([optimum.ends[kind] for kind in optimum.kinds], missing)
    lines, start = [], 0
    for device, kind, count in zip(
        _devices_of(optimum, problem.kinds, fixed_order), optimum.kinds, counts, strict=True
    ):
        row, room = problem.memory[kind], problem.capacity[kind]
        needed = row[start + count] - row[start]
        if needed > room:
            what = f"unit {start}" if count == 1 else f"units {start} to {start + count - 1}"
            lines.append(
                f"device {device} has {_bytes(room, scale)} and {what} need {_bytes(needed, scale)}: "
                f"{_bytes(needed - room, scale)} missing"
            )
        start += count
    over = "cuts" if fixed_order else "cuts and device orders"
    steps = ["smaller micro-batches", "activation checkpointing", "one more device, or a larger one"]
    if fixed_order and _fits_in_another_order(problem):
        steps.insert(0, "fixed_order=False, with which they fit")
    return "\n".join(
        [
            f"the units do not fit the devices; of all {over}, the one with the smallest largest shortage leaves:",
            *(f"  - {line}" for line in lines),
            f"try {'; '.join(steps)}",
        ]
    )


def _fits_in_another_order(problem: _Problem) -> bool:
    """Whether some order of the devices fits; ``False`` too where there are too many to look at."""
    counts = [count for _, count in sorted(Counter(problem.kinds).items())]
    if orders.moves_of(counts) > _MOVES_FOR_ADVICE:
        return False
    return least_bottleneck(_stage_seconds(problem), orders.free_order(counts)) is not None


def _bytes(count: int, scale: int) -> str:
    """Exact bytes, and what they are in larger units where that is shorter to read."""
    exact = f"{count / scale:,.0f} bytes" if count % scale == 0 else f"{count / scale:,} bytes"
    return exact if count < 1024 * scale else f"{format_bytes(count / scale)} ({exact})"


def _checked(
    seconds: Sequence[Sequence[float]],
    memory_bytes: Sequence[Any] | None,
    capacity_bytes: Sequence[float] | None,
) -> _Problem:
    """The arguments in whole numbers by device type, or an error that lists every problem."""
    times = _rows(seconds)
    units = len(times[0]) if times else 0
    problems = [] if times else ["seconds is empty: give one row per device"]
    problems += _row_problems("seconds", times, units)
    if times and not units:
        problems.append("seconds[0] is empty: give one value per unit")
    if (memory_bytes is None) != (capacity_bytes is None):
        problems.append("memory_bytes and capacity_bytes belong together: give both or neither")
    sizes, room = [[0] * units] * len(times), [0] * len(times)
    if memory_bytes is not None and capacity_bytes is not None:
        per_device = any(hasattr(value, "__len__") for value in memory_bytes)
        sizes = _rows(memory_bytes) if per_device else _rows([memory_bytes]) * len(times)
        room = _rows([capacity_bytes])[0]
        if len(sizes) != len(times):
            problems.append(f"memory_bytes has {len(sizes)} rows for {len(times)} devices: give one per device")
        if per_device:
            problems += _row_problems("memory_bytes", sizes, units)
        else:
            problems += _row_problems("memory_bytes", sizes[:1], units, index=False)
        problems += _row_problems("capacity_bytes", [room], len(times), index=False)
    raise_all(HeteroError, "the units cannot be partitioned", problems)
    return _by_type(times, sizes, room)


def _rows(values: Any) -> list[list[Any]]:
    """Rows of plain Python numbers from any nesting of sequences and arrays."""
    return [
        row.tolist()
        if isinstance(row, np.ndarray)
        else [value.item() if isinstance(value, np.generic) else value for value in row]
        for row in values
    ]


def _row_problems(name: str, rows: list[list[Any]], width: int, *, index: bool = True) -> list[str]:
    problems = []
    for number, row in enumerate(rows):
        place = f"{name}[{number}]" if index else name
        if len(row) != width:
            problems.append(f"{place} has {len(row)} values where {width} are wanted")
        problems += [
            f"{place}[{entry}] is {value!r}: give a finite number, zero or more"
            for entry, value in enumerate(row)
            # First what is true of nearly all values, since there are many.
            if not ((type(value) is float and 0 <= value < math.inf) or _is_fine(value))
        ]
    return problems


def _is_fine(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _by_type(times: list[list[Any]], sizes: list[list[Any]], room: list[Any]) -> _Problem:
    """Number the types of devices in the order of their values, and scale all values to whole numbers."""
    names = [(tuple(time), tuple(size), cap) for time, size, cap in zip(times, sizes, room, strict=True)]
    types = sorted(set(names))
    number = {name: kind for kind, name in enumerate(types)}
    seconds_scale = _common_denominator(value for time, _, _ in types for value in time)
    memory_scale = _common_denominator(value for _, size, cap in types for value in (*size, cap))
    return _Problem(
        kinds=tuple(number[name] for name in names),
        seconds=tuple(_running_sum(time, seconds_scale) for time, _, _ in types),
        seconds_scale=seconds_scale,
        memory=tuple(_running_sum(size, memory_scale) for _, size, _ in types),
        capacity=tuple(_whole(cap, memory_scale) for _, _, cap in types),
        memory_scale=memory_scale,
    )


def _common_denominator(values: Iterable[float]) -> int:
    # Denominators of floats are powers of two, so the largest is a multiple of every other.
    return max(value.as_integer_ratio()[1] for value in values)


def _whole(value: float, scale: int) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (scale // denominator)


def _running_sum(values: Sequence[float], scale: int) -> list[int]:
    return [0, *accumulate(_whole(value, scale) for value in values)]
