"""Measure a rank by running the user's own step on a few samples, and leave no trace of it.

The times are those of the model's units (UnitTimer): a rank's own speed, though it runs in lock-step with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

REPEATS = 2
STEPS = 2 + 3 * REPEATS
"""steps that :func:`measure_rank` runs; the same on every rank, since each step is collective"""


NEGLIGIBLE = 0.05
"""a fixed part below this share of the step is taken for noise, which a line would carry far beyond its points"""


MEMORY_SHARE = 0.9
"""share of a device's memory that measuring may fill"""


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured.

    Attributes:
        samples: the larger number of samples that was run.
        step_s: seconds of all units, forward and backward, for so many samples.
        fixed_s: what of it does not depend on the samples, by the line through both sizes; 0 where that is noise.
        base_bytes: memory at a step without samples, by the line through both sizes; None where none is counted.
        bytes_per_sample: what each sample adds to the peak; None where none is counted.
    """

    samples: int
    step_s: float
    fixed_s: float
    base_bytes: int | None = None
    bytes_per_sample: float | None = None


@dataclass(frozen=True)
class StepMeasurement:
    """One step: busy seconds and, where the device counts it, peak bytes."""

    busy_s: float
    peak_bytes: int | None


def measure_rank(
    run: Callable[[int], StepMeasurement], max_samples: int, budget_s: float = 4.0, capacity_bytes: int | None = None
) -> RankMeasurement:
    """Time steps of two sizes and fit ``fixed + per sample``.

    Args:
        run: runs one forward and backward of so many samples.
        max_samples: never run more.
        budget_s: how long the larger step may take; its size is chosen so, from a step of one or two samples.
        capacity_bytes: memory of the device; where peaks are known, the larger step is chosen to fit it.

    Returns:
        The shortest time of either size, since whatever disturbs a step makes it longer, and the line through them.
    """
    one, pair = run(1), min(2, max_samples)
    two = run(pair)
    samples = min(max_samples, int(budget_s / max(two.busy_s / pair, 1e-9)))
    if capacity_bytes is not None and one.peak_bytes is not None and two.peak_bytes is not None:
        samples = min(samples, _samples_within(MEMORY_SHARE * capacity_bytes, one.peak_bytes, two.peak_bytes))
    samples = max(1, samples)
    few = max(1, samples // 4)
    small, large = [], []
    for _ in range(REPEATS):
        # the small ones are cheap, and noise in them would tilt the line
        small += [run(few), run(few)]
        large.append(run(samples))
    step_s = min(m.busy_s for m in large)
    fixed_s = _intercept(few, min(m.busy_s for m in small), samples, step_s)
    peaks = (small[-1].peak_bytes, large[-1].peak_bytes)
    if peaks[0] is None or peaks[1] is None:
        return RankMeasurement(samples, step_s, fixed_s)
    base_bytes = _intercept(few, peaks[0], samples, peaks[1])
    return RankMeasurement(samples, step_s, fixed_s, int(base_bytes), (peaks[1] - base_bytes) / samples)


def _samples_within(limit_bytes: float, peak_of_one: int, peak_of_two: int) -> int:
    """Return how many samples fit, by the line through the peaks of one and of two."""
    growth = max(1, peak_of_two - peak_of_one)
    return 1 + int((limit_bytes - peak_of_one) / growth)


def _intercept(x0: int, y0: float, x1: int, y1: float) -> float:
    """Return where the line through two points meets x = 0; 0 where it would be noise, or there is no line."""
    if x1 <= x0 or y1 <= y0:
        return 0.0
    intercept = y1 - (y1 - y0) / (x1 - x0) * x1
    return intercept if intercept >= NEGLIGIBLE * y1 else 0.0
