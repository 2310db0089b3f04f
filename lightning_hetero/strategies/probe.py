"""Measure a rank by running the user's own step on a few samples, and leave no trace of it.

The times are those of the model's units (UnitTimer): a rank's own speed, though it runs in lock-step with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

REPEATS = 2
STEPS = 2 + 2 * REPEATS
"""steps that :func:`measure_rank` runs; the same on every rank, since each step is collective"""


NEGLIGIBLE = 0.05
"""a fixed part below this share of the step is taken for noise, which a line would carry far beyond its points"""


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured.

    Attributes:
        seconds_per_sample: forward and backward of all units, per sample.
        fixed_s: what a step takes besides, however few its samples are.
        samples: the largest number of samples that was run.
        base_bytes: memory at a step without samples, by the line through both sizes; None where none is counted.
        bytes_per_sample: what each sample adds to the peak; None where none is counted.
    """

    seconds_per_sample: float
    fixed_s: float
    samples: int
    base_bytes: int | None = None
    bytes_per_sample: float | None = None


@dataclass(frozen=True)
class StepMeasurement:
    """One step: busy seconds and, where the device counts it, peak bytes."""

    busy_s: float
    peak_bytes: int | None


def measure_rank(run: Callable[[int], StepMeasurement], max_samples: int, budget_s: float = 4.0) -> RankMeasurement:
    """Time steps of two sizes and fit ``fixed + per sample``.

    Args:
        run: runs one forward and backward of so many samples.
        max_samples: never run more.
        budget_s: how long the larger step should take; its size is chosen so, from a step of one sample.

    Returns:
        The fit. Where the two sizes do not allow a sensible line (noise, or one sample at most), time is taken to be
        proportional to samples.
    """
    run(1)
    single = run(1)
    samples = max(1, min(max_samples, int(budget_s / max(single.busy_s, 1e-9))))
    # far apart, so that noise in the smaller one moves the slope little
    few = max(1, samples // 4)
    small, large = [], []
    for _ in range(REPEATS):
        small.append(run(few))
        large.append(run(samples))
    # whatever disturbs a step makes it longer, so the shortest one is the truest
    per_sample, fixed = _line(few, min(m.busy_s for m in small), samples, min(m.busy_s for m in large))
    peaks = (small[-1].peak_bytes, large[-1].peak_bytes)
    if peaks[0] is None or peaks[1] is None:
        return RankMeasurement(per_sample, fixed, samples)
    bytes_per_sample, base = _line(few, peaks[0], samples, peaks[1])
    return RankMeasurement(per_sample, fixed, samples, int(base), bytes_per_sample)


def _line(x0: int, y0: float, x1: int, y1: float) -> tuple[float, float]:
    """Return slope and intercept through two points, or (y1 / x1, 0) where the intercept may be noise."""
    if x1 > x0:
        slope = (y1 - y0) / (x1 - x0)
        intercept = y1 - slope * x1
        if slope > 0 and intercept >= NEGLIGIBLE * y1:
            return slope, intercept
    return y1 / x1, 0.0
