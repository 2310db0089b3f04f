"""From what each rank measured to what a plan is made of."""

from __future__ import annotations

import pytest

from lightning_hetero.strategies.planning import pool_measurements
from lightning_hetero.strategies.probe import RankMeasurement


def test_ranks_of_a_type_that_are_about_as_fast_count_alike():
    measured = [RankMeasurement(10, step_s, fixed_s) for step_s, fixed_s in ((1.1, 0.2), (1.12, 0.1), (2.1, 0.1))]
    pooled = pool_measurements(measured, ["a", "a", "a"])
    assert pooled.fixed_seconds == pytest.approx((0.1, 0.1, 0.1))
    assert pooled.seconds_per_sample == pytest.approx((0.101, 0.101, 0.2))
    assert (pooled.fixed_bytes, pooled.bytes_per_sample) == (None, None)


def test_the_rank_that_waits_for_nobody_says_what_is_beside_computing():
    beside = ((0.03, 0.11), (0.09, 0.12), (0.07, 0.115))
    measured = [RankMeasurement(10, 1.0, 0.0, overhead_s=own, crossed_s=crossed) for own, crossed in beside]
    pooled = pool_measurements(measured, ["a", "b", "b"], ((0,), (1, 2)))
    assert pooled.overhead_s == pytest.approx((0.03, 0.07, 0.07))
    # of the group that is behind: the other one waits for it there, as it does not without
    assert pooled.once.crossing_s == pytest.approx(0.115 - 0.07)


@pytest.mark.parametrize("crossed", [None, 0.01])
def test_gradients_that_do_not_cross_or_hide_take_nothing(crossed):
    measured = [RankMeasurement(10, 1.0, 0.0, overhead_s=0.02, crossed_s=crossed)] * 2
    assert pool_measurements(measured, ["a", "a"], ((0,), (1,))).once.crossing_s == 0
