"""From what a run planned and measured to the figures that the benchmark stands for. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

SKIPPED_STEPS = 1
"""first ones, in which memory is found and kernels are chosen"""

MOST = 0.05
"""by which a prediction may be off, as a share of what was measured"""

MOST_LATE = 0.02
"""share of its time by which a device may be late before a setting is labelled"""

Row = dict[str, Any]


def row_of(planned: Mapping[str, Any], told: Mapping[str, Any], step_s: Sequence[float]) -> Row:
    """The row of one setting.

    Args:
        planned: what was said before the first step: ``predicted_step_s``.
        told: what the run told at its end: ``plan``, and of all ``ranks`` what was planned and measured.
        step_s: of every step, the first ones too.

    Returns:
        Seconds and bytes as planned and measured, errors (predicted over measured, less 1) and how late the emulation
        was; all raw values stay in it.
    """
    measured_s = median(step_s[SKIPPED_STEPS:])
    ranks = told["ranks"]
    return {
        "predicted_step_s": planned["predicted_step_s"],
        "measured_step_s": measured_s,
        "error": error(planned["predicted_step_s"], measured_s),
        "busy_errors": [error(rank["predicted_busy_s"], rank["busy_s"]) for rank in ranks],
        "memory_errors": [error(rank["predicted_peak_bytes"], rank["peak_bytes"]) for rank in ranks],
        "late_share": max(late_share(rank["emulation"]) for rank in ranks),
        "raw_step_s": list(step_s),
        **told,
    }


def error(predicted: float | None, measured: float | None) -> float | None:
    """Predicted over measured, less 1; None where one of them is not there."""
    return None if predicted is None or not measured else predicted / measured - 1


def late_share(emulation: Mapping[str, Any]) -> float:
    """By how much a device's time was longer since its CPU did not keep up."""
    return float(emulation["late_s"] / emulation["target_s"]) if emulation["target_s"] else 0.0


def worst(errors: Iterable[float | None]) -> float | None:
    """The error that is farthest from 0; None where nothing was compared."""
    known = [each for each in errors if each is not None]
    return max(known, key=abs, default=None)


def problems(rows: Mapping[str, Row]) -> list[str]:
    """What is more than :data:`MOST` off, or was not predicted at all."""
    found = []
    for name, row in rows.items():
        for what, value in (("step", row["error"]), ("memory", worst(row["memory_errors"]))):
            if value is None:
                found.append(f"{name}: {what} was not predicted")
            elif abs(value) > MOST:
                found.append(f"{name}: {what} predicted {value:+.1%} off")
    return found


def summary(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Over all settings of each strategy: how many, the mean and the largest absolute errors."""
    found = {}
    for strategy in dict.fromkeys(row["strategy"] for row in rows.values()):
        own = [row for row in rows.values() if row["strategy"] == strategy]
        steps = [abs(row["error"]) for row in own if row["error"] is not None]
        found[strategy] = {
            "settings": len(own),
            "mean_step_error": sum(steps) / len(steps) if steps else None,
            "largest_step_error": max(steps, default=None),
            "largest_busy_error": _largest(own, "busy_errors"),
            "largest_memory_error": _largest(own, "memory_errors"),
            "labelled_late": sum(row["late_share"] > MOST_LATE for row in own),
        }
    return found


def _largest(rows: Sequence[Row], name: str) -> float | None:
    value = worst(worst(row[name]) for row in rows)
    return None if value is None else abs(value)
