"""Measure a rank by running the user's own step on a few samples, and leave no trace of it.

The times are those of the model's units (UnitTimer): a rank's own speed, though it runs in lock-step with the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

REPEATS = 3
"""of each size that is timed"""


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
        base_bytes: memory at a step without samples, by the line through both sizes and no less than what is
            resident; None where none is counted.
        bytes_per_sample: what each sample adds to the peak; None where none is counted.
        overhead_s: what a step takes beside the units, waiting for others included: communication, and Python; the
            median of steps in which all ranks compute for about as long.
        accumulating_bytes: what a micro-batch that adds to gradients holds beside that.
        crossed_s: as ``overhead_s``, of steps whose gradients are summed over all groups; None where that is no more
            than every step does. Groups are then not made to wait for one another by ``overhead_s``.
        input_s_per_sample: to read and collate a sample, where nobody does so ahead.
        optimizer_s: of one step of the optimizer on the rank's shards; None where it was not measured.
    """

    samples: int
    step_s: float
    fixed_s: float
    base_bytes: int | None = None
    bytes_per_sample: float | None = None
    overhead_s: float = 0.0
    accumulating_bytes: int = 0
    crossed_s: float | None = None
    input_s_per_sample: float = 0.0
    optimizer_s: float | None = None


@dataclass(frozen=True)
class StepMeasurement:
    """One step: busy seconds, peak bytes where the device counts them, and seconds from start to end.

    ``input_s`` is what reading its samples took, before it began.
    """

    busy_s: float
    peak_bytes: int | None
    wall_s: float = 0.0
    input_s: float = 0.0

    @property
    def beside_s(self) -> float:
        """Seconds of it that are none of the units'."""
        return max(0.0, self.wall_s - self.busy_s)


def measure_rank(
    run: Callable[[int], StepMeasurement],
    max_samples: int,
    budget_s: float = 2.0,
    capacity_bytes: int | None = None,
    resident_bytes: int = 0,
    run_crossing: Callable[[int], StepMeasurement] | None = None,
    share_of: Callable[[float], float] | None = None,
    run_accumulating: Callable[[int], StepMeasurement] | None = None,
) -> RankMeasurement:
    """Time steps of two sizes and fit ``fixed + per sample``.

    How many steps it runs depends on ``max_samples`` alone, since a step is collective; how large they are is each
    rank's own affair.

    Args:
        run: runs one forward and backward of so many samples.
        max_samples: the most that is timed; the same on every rank.
        budget_s: how long the longer steps may take; their size is chosen so, from a step of one or two samples. Two
            samples are run whatever they take, since one size alone gives no line.
        capacity_bytes: memory of the device; where peaks are known, no step is tried that might not fit it.
        resident_bytes: bytes that are there however few samples run (the rank's shards of the parameters).
        run_crossing: as ``run``, with gradients summed over all groups; None where that is no more than ``run`` does.
        share_of: returns how many samples of a global batch this rank has if it is split by speed, given what one takes
            it (a collective): with so many, as far as they fit and the budget allows, communication is timed. By
            default as many as the larger step has.
        run_accumulating: as ``run``, adding to the gradients of the step before; None where no step has micro-batches.

    Returns:
        The shortest time of either size, since whatever disturbs a step makes it longer, and the line through them.
    """
    one, pair = run(1), min(2, max_samples)
    two = run(pair)
    samples = max(pair, min(max_samples, int(budget_s / max(two.busy_s / pair, 1e-9))))
    limit_bytes = float("inf") if capacity_bytes is None else MEMORY_SHARE * capacity_bytes - resident_bytes
    samples = _climb(run, pair, two, samples, _rungs(max_samples), limit_bytes, resident_bytes)
    few = max(1, samples // 4)
    small, large = [], []
    for _ in range(REPEATS):
        # the small ones are cheap, and noise in them would tilt the line
        small += [run(few), run(few)]
        large.append(run(samples))
    step_s = min(m.busy_s for m in large)
    fixed_s = _intercept(few, min(m.busy_s for m in small), samples, step_s)
    s_per_sample = (step_s - fixed_s) / samples
    share = samples if share_of is None else min(share_of(s_per_sample), budget_s / max(s_per_sample, 1e-9))
    paced = max(1, int(min(round(share), _known_to_fit(samples, large[-1], limit_bytes, resident_bytes))))
    room_bytes = limit_bytes + resident_bytes
    found = RankMeasurement(
        samples,
        step_s,
        fixed_s,
        # side by side as in training: a rank that others wait for finds cores, links and other groups' gradients free
        overhead_s=_beside_s(run, paced),
        crossed_s=None if run_crossing is None else _beside_s(run_crossing, paced),
        input_s_per_sample=min(m.input_s for m in large) / samples,
        accumulating_bytes=_accumulating_bytes(run_accumulating, (few, small[-1]), (samples, large[-1]), room_bytes),
    )
    peaks = (small[-1].peak_bytes, large[-1].peak_bytes)
    if one.peak_bytes is None or peaks[0] is None or peaks[1] is None:
        return found
    base_bytes = _base_bytes(few, peaks[0], samples, peaks[1], resident_bytes)
    return replace(found, base_bytes=base_bytes, bytes_per_sample=(peaks[1] - base_bytes) / samples)


def _beside_s(run: Callable[[int], StepMeasurement], samples: int) -> float:
    """What a step takes beside its units; what is typical, since it is in every step: the least would be too little."""
    return statistics.median(run(samples).beside_s for _ in range(REPEATS))


def _accumulating_bytes(
    run: Callable[[int], StepMeasurement] | None,
    few: tuple[int, StepMeasurement],
    many: tuple[int, StepMeasurement],
    room_bytes: float,
) -> int:
    """By how much the peak is higher where gradients are added to those that are there; of many samples if they fit."""
    if run is None:
        return 0

    def more_bytes(samples: int, plain: StepMeasurement) -> int:
        return max(0, (run(samples).peak_bytes or 0) - (plain.peak_bytes or 0))

    of_few = more_bytes(*few)
    # a second step in either case, for the others' sake
    return more_bytes(*(many if (many[1].peak_bytes or 0) + of_few <= room_bytes else few))


def _known_to_fit(samples: int, step: StepMeasurement, limit_bytes: float, resident_bytes: int) -> float:
    """Return how many samples fit for sure, by one step's peak: what is not resident grows no faster than they do."""
    transient = 0 if step.peak_bytes is None else max(0, step.peak_bytes - resident_bytes)
    return samples * limit_bytes / transient if transient else float("inf")


def _rungs(max_samples: int) -> int:
    """Return how many doublings lead from two samples to the most."""
    return max(0, (max_samples - 1).bit_length() - 1)


def _climb(
    run: Callable[[int], StepMeasurement],
    samples: int,
    step: StepMeasurement,
    wanted: int,
    rungs: int,
    limit_bytes: float,
    resident_bytes: int,
) -> int:
    """Return the most samples up to ``wanted`` that are known to fit, by so many steps of growing size.

    A peak is the largest of several moments, each a line over the samples; so a line through two peaks may lie far
    below what more samples need, but with twice the samples what is not resident at most doubles.
    """

    def known_to_fit() -> int:
        return int(min(wanted, _known_to_fit(samples, step, limit_bytes, resident_bytes)))

    for _ in range(rungs):
        if 2 * samples <= known_to_fit() < wanted:
            samples *= 2
            step = run(samples)
        else:
            run(1)  # for the others' sake
    return max(1, known_to_fit())


def _intercept(x0: int, y0: float, x1: int, y1: float) -> float:
    """Return where the line through two points meets x = 0; 0 where it would be noise, or there is no line."""
    if x1 <= x0 or y1 <= y0:
        return 0.0
    intercept = y1 - (y1 - y0) / (x1 - x0) * x1
    return intercept if intercept >= NEGLIGIBLE * y1 else 0.0


def _base_bytes(few: int, few_bytes: int, samples: int, bytes_: int, resident_bytes: int) -> int:
    """Return the bytes at no samples, by the line through two peaks.

    Where more samples did not raise the peak, another moment than theirs made it. When theirs will is not known, only
    that what is not resident at most grows with the samples: the line from the resident bytes stays above every peak.
    """
    if samples <= few or bytes_ <= few_bytes:
        return min(resident_bytes, bytes_)
    return max(resident_bytes, int(bytes_ - (bytes_ - few_bytes) / (samples - few) * samples))
