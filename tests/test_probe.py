"""Measuring a rank: it never tries what might not fit, and runs as many steps as every other rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.strategies.probe import MEMORY_SHARE, RankMeasurement, StepMeasurement, measure_rank

MOMENTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=4)
"""bytes without samples beyond what is resident, and bytes per sample, of each moment of a step"""


def measured(
    moments: list[tuple[int, int]], resident: int, capacity: int, most: int, s_per_sample: float = 1e-3
) -> tuple[RankMeasurement, list[int]]:
    tried: list[int] = []

    def run(samples: int) -> StepMeasurement:
        tried.append(samples)
        peak = resident + max(fixed + per_sample * samples for fixed, per_sample in moments)
        return StepMeasurement(samples * s_per_sample, peak)

    return measure_rank(run, most, capacity_bytes=capacity, resident_bytes=resident), tried


@given(MOMENTS, st.integers(0, 10**6), st.integers(1, 10**8), st.integers(1, 300))
def test_nothing_is_tried_that_might_not_fit(moments, resident, capacity, most):
    found, tried = measured(moments, resident, capacity, most)
    needs = {n: resident + max(fixed + per_sample * n for fixed, per_sample in moments) for n in tried}
    # one and two samples are where measuring starts; without them nothing is known
    assert all(need <= MEMORY_SHARE * capacity for n, need in needs.items() if n > 2)
    assert 1 <= found.samples <= most


@given(MOMENTS, st.integers(1, 10**8), st.integers(1, 300))
def test_every_rank_runs_as_many_steps(moments, capacity, most):
    _, tried = measured(moments, 0, capacity, most)
    _, others = measured([(0, 0)], 0, 10**12, most, s_per_sample=1.0)
    assert len(tried) == len(others)


def test_all_that_fits_is_measured_where_memory_is_no_matter():
    found, tried = measured([(1000, 10)], 0, 10**9, 64)
    assert found.samples == max(tried) == 64
    assert found.bytes_per_sample == 10
    assert found.base_bytes == 1000


def test_a_line_through_small_peaks_is_not_believed():
    """One and two samples peak at another moment than many do, so their line says that any number fits."""
    found, tried = measured([(10_000, 0), (0, 4_000)], 90_000, 200_000, 512)
    assert found.samples == max(tried) == 22  # 90 kB of 0.9 x 200 kB are free, and a sample takes 4


def test_what_is_beside_computing_is_measured_where_all_ranks_compute_for_as_long():
    """This rank's share is half of what an even split gives it; medians count."""
    beside = {
        "plain": iter([9.0] * 3 + [0.0, 0.0, 5.0] * 3 + [0.1, 0.2, 0.9]),
        "crossing": iter([0.5, 0.4, 3.0]),
    }
    ran: dict[str, list[int]] = {"plain": [], "crossing": []}

    def run(samples: int, kind: str = "plain") -> StepMeasurement:
        ran[kind].append(samples)
        return StepMeasurement(0.1 + 0.1 * samples, None, 0.1 + 0.1 * samples + next(beside[kind]), 0.02 * samples)

    def share_of(s_per_sample: float) -> float:
        assert s_per_sample == pytest.approx(0.1)
        return 2.2

    found = measure_rank(run, 4, run_crossing=lambda samples: run(samples, "crossing"), share_of=share_of)
    assert (ran["plain"][-3:], ran["crossing"]) == ([2] * 3, [2] * 3)
    assert found.overhead_s == pytest.approx(0.2)
    assert found.crossed_s == pytest.approx(0.5)
    assert found.input_s_per_sample == pytest.approx(0.02)


@pytest.mark.parametrize(("share", "runs"), [(0.2, 1), (12.0, 12), (30.0, 20), (500.0, 20)])
@pytest.mark.parametrize("seconds", [False, True])
def test_a_share_is_run_as_far_as_memory_and_the_budget_allow(share, runs, seconds):
    tried: list[int] = []

    def run(samples: int) -> StepMeasurement:
        tried.append(samples)
        return StepMeasurement((0.1 if seconds else 0.001) * samples, 1000 + (0 if seconds else 10) * samples)

    capacity = 10**9 if seconds else round((1000 + 10 * 20) / MEMORY_SHARE) + 1
    found = measure_rank(run, 8, capacity_bytes=capacity, resident_bytes=1000, share_of=lambda _: share)
    assert tried[-3:] == [runs] * 3
    assert (found.samples, found.crossed_s) == (8, None)


@pytest.mark.parametrize(
    ("capacity", "tried", "extra"), [(10**6, [4, 16], 5), (int((1000 + 16 * 10) / 0.9), [3, 3], 40)]
)
def test_what_accumulating_adds_is_measured_where_it_fits(capacity, tried, extra):
    seen = []

    def accumulating(samples: int) -> StepMeasurement:
        seen.append(samples)
        return StepMeasurement(0.1, 1000 + 10 * samples + (40 if samples < 5 else 5))

    def run(samples: int) -> StepMeasurement:
        return StepMeasurement(1e-3 * samples, 1000 + 10 * samples)

    found = measure_rank(run, 16, capacity_bytes=capacity, resident_bytes=1000, run_accumulating=accumulating)
    assert (seen, found.accumulating_bytes) == (tried, extra)


def test_no_step_is_longer_than_the_budget_allows():
    found, _ = measured([(0, 0)], 0, 10**9, 1000, s_per_sample=0.1)
    assert found.samples == 20


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 8))
def test_flat_peaks_promise_no_more_room_than_there_is(state, resident, most, times):
    """A state outweighs the activations of every step that ran, and not those of a larger share."""
    per_sample = state // most
    found, _ = measured([(state, 0), (0, per_sample)], resident, 10**12, most)
    assert found.base_bytes == resident
    share = found.samples * times
    needed = resident + max(state, per_sample * share)
    assert found.bytes_per_sample * share + found.base_bytes >= needed * (1 - 1e-9)


def test_a_slow_rank_still_measures_two_sizes():
    found, tried = measured([(1000, 10)], 0, 10**9, 4, s_per_sample=1.5)
    assert found.samples == max(tried) == 2
    assert (found.base_bytes, found.bytes_per_sample) == (1000, 10)
