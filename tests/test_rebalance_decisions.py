"""When shares move, and to what: decided without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import RankPrediction, ShardPlan
from lightning_hetero.planner.batch import split_batch
from lightning_hetero.planner.moved_shares import Move, drifts, faster_shares, most_samples, moved_plan
from lightning_hetero.simulator.memory import RankMemory
from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.rebalance import Rebalance, rebalance_rule
from lightning_hetero.strategies.share_moves import ShareMoves

# -- deciding, without ranks -------------------------------------------------------------------------------------------


def plan(*shares: int, **details: Any) -> ShardPlan:
    groups = details.pop("groups", (tuple(range(len(shares))),))
    return ShardPlan(sum(shares), shares, groups, ("d",) * len(shares), **details)


def test_drift_counts_shares_of_the_time_alone() -> None:
    assert drifts((2.0, 4.0), (1.0, 2.0)) == (0.0, 0.0)
    assert drifts((1.0, 2.0), (1.0, 1.0)) == pytest.approx((-1 / 3, 1 / 3))
    assert drifts((0.0, 0.0), (1.0, 1.0)) == (0.0, 0.0)


def test_shares_follow_what_was_measured() -> None:
    move = faster_shares(plan(20, 20, 10, 10), (2.0, 1.0, 1.0, 1.0))
    assert move.shares == (12, 24, 12, 12)
    assert move.seconds == pytest.approx((1.2,) * 4)
    assert move.gain == pytest.approx(0.4)


def test_fixed_seconds_are_those_of_every_micro_batch() -> None:
    before = plan(8, 8, groups=((0,), (1,)), micro_batches=(1, 2))
    move = faster_shares(before, (1.0 + 8 * 0.5, 2 * 1.0 + 8 * 0.1), fixed_s=(1.0, 1.0))
    assert move.shares == split_batch((0.5, 0.1), (1.0, 2.0), 16, min_samples=1)


def test_shares_stay_where_nothing_is_gained() -> None:
    move = faster_shares(plan(3, 3), (1.0, 1.0))
    assert (move.shares, move.gain) == ((3, 3), 0.0)


def test_memory_and_ranks_without_samples_are_kept() -> None:
    assert faster_shares(plan(4, 4), (1.0, 4.0), max_samples=(5, None)).shares == (5, 3)
    assert faster_shares(plan(4, 4, 0), (1.0, 3.0, 0.5)).shares == (6, 2, 0)


def test_what_memory_holds() -> None:
    two = plan(8, 8, groups=((0,), (1,)), micro_batches=(1, 2))
    # without a line all of the peak grows with the samples: 100 / 80 x 8, and twice 100 / 80 x 4
    assert most_samples(two, (100, 100), (8, 8), (80, 80)) == (10, 10)
    assert most_samples(two, (100, 100), (8, 8), (None, 200)) == (None, 8)
    memory = [RankMemory.measured(40, 5.0)] * 2
    assert most_samples(two, (100, 100), (8, 8), (80, 60), memory) == (12, 24)


def test_a_moved_plan_is_valid() -> None:
    before = plan(8, 8, groups=((0,), (1,)), micro_batches=(1, 2), micro_batch_sizes=(8, 4), modes=("FULL_SHARD",) * 2)
    moved = moved_plan(before, Move((5, 11), (1.0, 1.1), 0.3), "why")
    moved.validate()
    assert (moved.batch_shares, moved.micro_batch_sizes) == ((5, 11), (5, 6))
    assert moved.predicted_step_s == 1.1
    assert moved.reasons[-1] == "why"


def test_a_moved_plan_predicts_what_the_plan_did() -> None:
    predictions = (RankPrediction.of(1.0, 1.25, 80), RankPrediction.of(0.75, 1.25, 80))
    before = plan(8, 8, predictions=predictions, predicted_step_s=1.25)
    moved = moved_plan(before, Move((6, 10), (1.5, 1.25), 0.2), "why", [RankMemory.measured(40, 5.0)] * 2)
    assert moved.predicted_step_s == 1.75  # a quarter of a second beside computing, as before
    assert [each.busy_s for each in moved.predictions] == [1.5, 1.25]
    assert [each.peak_memory_bytes for each in moved.predictions] == [70, 90]
    assert moved_plan(before, Move((6, 10), (1.5, 1.25), 0.2), "why").predictions[0].peak_memory_bytes is None


def test_moves_hold_from_their_batch_on_and_are_kept() -> None:
    first, second, third = plan(4, 4), plan(5, 3), plan(6, 2)
    moves = ShareMoves(first)
    assert moves.to_state() == []
    moves.add((0, 7), second)
    moves.add((2, 0), third)
    held = [moves.at(at).batch_shares for at in ((0, 0), (0, 6), (0, 7), (1, 0), (2, 0), (9, 9))]
    assert held == [(4, 4), (4, 4), (5, 3), (5, 3), (6, 2), (6, 2)]
    assert moves.is_pending((1, 99))
    assert not moves.is_pending((2, 0))
    again = ShareMoves.from_state(moves.to_state(), plan(1, 7))
    assert [again.at(at).batch_shares for at in ((0, 6), (0, 7), (2, 0))] == [(4, 4), (5, 3), (6, 2)]


def test_bad_values_are_refused_all_at_once() -> None:
    with pytest.raises(HeteroError) as error:
        Rebalance(threshold=0, window=0, patience=1.5, least_gain=1, settle=2)  # type: ignore[arg-type]
    for name in ("threshold=0", "window=0", "patience=1.5", "least_gain=1", "settle=2"):
        assert name in str(error.value)
    with pytest.raises(HeteroError, match=r"rebalance='yes': give True, False, a Rebalance\(threshold"):
        HeteroFSDPStrategy(rebalance="yes")  # type: ignore[arg-type]


def test_it_is_on_for_plans_of_our_own() -> None:
    assert rebalance_rule(None, plan_is_given=False) == Rebalance()
    assert rebalance_rule(None, plan_is_given=True) is None
    assert rebalance_rule(True, plan_is_given=True) == Rebalance()
    assert rebalance_rule(False, plan_is_given=False) is None
    assert rebalance_rule(Rebalance(0.5), plan_is_given=True) == Rebalance(0.5)
