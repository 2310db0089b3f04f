"""From raw step times to the tables' figures. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.hetero_speedup.conductor import FAILED
from benchmarks.hetero_speedup.speedup import ArmTimes

OK, OUT_OF_MEMORY = "ok", "out of memory"

Row = dict[str, Any]
"""of a table, as it is written to JSON"""

_REASONS = (
    re.compile(r"((?:rank \d+ [^\n]*)?is out of memory[^\n]*)"),
    re.compile(r"((?:CUDA|HIP) out of memory[^\n]*)"),
    re.compile(r"InfeasibleError: ([^\n]*)"),
)


def out_of_memory(error: BaseException) -> str | None:
    """Why an arm's failure is that memory does not suffice; None where it is another one.

    Args:
        error: with the text of what its rank raised.
    """
    for pattern in _REASONS:
        found = pattern.search(str(error))
        if found:
            return found.group(1).strip()
    return None


def steady(times: ArmTimes, skipped: int) -> ArmTimes:
    """The same without the first ``skipped`` steps of each turn, which take what was read while the arm waited."""
    return ArmTimes(times.images_per_step, [turn[skipped:] for turn in times.turns], times.info)


def row_of(
    labels: Mapping[str, Any],
    times: ArmTimes,
    ranks: int,
    *,
    flops_per_sample: float,
    skipped_steps: int = 0,
    peak_flops_per_s: float | None = None,
) -> Row:
    """A row from an arm's raw times.

    Args:
        labels: what the row is of.
        times: of the arm; with an excuse in it, the row says so and has no rates.
        ranks: devices of the arm.
        flops_per_sample: of forward and backward; 0 where nothing is computed.
        skipped_steps: first steps of each turn that do not count.
        peak_flops_per_s: dense peak of the device, where one is known.

    Returns:
        ``labels``; what the arm said of itself; ``outcome``; all raw ``step_s``, by turn; and of those that count:
        ``median_step_s`` (over turns of medians), ``images_per_s``, ``tflops_per_device`` and ``mfu``.
    """
    row: Row = {**labels, "ranks": ranks, "images_per_step": times.images_per_step}
    row |= {name: value for name, value in times.info.items() if name != FAILED}
    row |= {"step_s": times.turns, "skipped_steps": skipped_steps}
    if FAILED in times.info:
        return row | {"outcome": OUT_OF_MEMORY, "why": times.info[FAILED]}
    counted = steady(times, skipped_steps)
    rate = counted.images_per_s
    flops_per_s = flops_per_sample * rate / ranks
    return row | {
        "outcome": OK,
        "median_step_s": counted.step_s,
        "images_per_s": rate,
        "tflops_per_device": flops_per_s / 1e12,
        "mfu": None if peak_flops_per_s is None else flops_per_s / peak_flops_per_s,
    }


def add_scaling(rows: Sequence[Row]) -> None:
    """Put ``efficiency`` into rows of weak scaling: the rate over so many times what one rank does alone.

    The base of a row is the row of the same model, emulated or not, with one rank; without one it gets none.
    """
    base = {(row["model"], row["emulated"]): row for row in rows if row["ranks"] == 1 and row["outcome"] == OK}
    for row in rows:
        one = base.get((row["model"], row["emulated"]))
        if one is not None and row["outcome"] == OK:
            row["efficiency"] = row["images_per_s"] / (row["ranks"] * one["images_per_s"])


SYNTHETIC, REAL, SILENT, READING = "synthetic data", "image files", "no communication", "input alone"


def limits(rows: Sequence[Row]) -> dict[str, Any]:
    """Tell input, communication and compute of a step apart.

    Args:
        rows: of one model: synthetic data, image files, synthetic data without communication.

    Returns:
        ``compute_s``: a step without communication; ``communication_s``: by how much a step with it is longer;
        ``input_s``: by how much one with image files is longer still. Each may be negative by noise; they add up to
        ``step_s``, a step with image files. ``limited_by``: the largest. Empty where a row is missing.
    """
    seconds = {row["arm"]: row["median_step_s"] for row in rows if row["outcome"] == OK}
    if not {SYNTHETIC, REAL, SILENT} <= set(seconds):
        return {}
    parts = {
        "compute_s": seconds[SILENT],
        "communication_s": seconds[SYNTHETIC] - seconds[SILENT],
        "input_s": seconds[REAL] - seconds[SYNTHETIC],
    }
    largest = max(parts, key=lambda name: parts[name])
    return {**parts, "step_s": seconds[REAL], "limited_by": largest.removesuffix("_s")}


def ratios(rows: Sequence[Row], arm: str) -> dict[str, float]:
    """Rate of one arm over that of each other one, by name; empty where it has none."""
    rates = {row["arm"]: row["images_per_s"] for row in rows if row["outcome"] == OK}
    if arm not in rates:
        return {}
    return {name: rates[arm] / rate for name, rate in rates.items() if name != arm}
