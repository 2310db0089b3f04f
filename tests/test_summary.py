"""The table that a fit ends with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.plan import RankPrediction, ShardPlan
from lightning_hetero.strategies.summary import RankSummary, print_summary

RANK = RankSummary(0, "a", samples=2, steps=9, step_s=1.0, busy_s=0.6, flops_per_sample=1e12, peak_bytes=2**30)
PLAN = ShardPlan(
    4, (2, 2), ((0, 1),), ("a", "b"), predicted_step_s=0.6, predictions=(RankPrediction.of(0.6, 0.6, 2**30),) * 2
)


@pytest.mark.parametrize(("busy_s", "line"), [(0.6, "40% of a step is none of the units' compute"), (0.95, None)])
def test_what_a_plan_does_not_count_is_said_where_it_matters(capsys, busy_s, line):
    print_summary([replace(RANK, busy_s=0.1), replace(RANK, rank=1, busy_s=busy_s)], PLAN)
    shown = capsys.readouterr().out
    assert "together 4.00 samples/s" in shown
    assert "medians over full steps: 9, without the first" in shown
    assert ("none of the units' compute" in shown) == (line is not None)
    assert line is None or line in shown


def test_nothing_is_said_of_a_plan_that_predicts_nothing(capsys):
    print_summary([RANK, replace(RANK, rank=1)], replace(PLAN, predicted_step_s=None, predictions=()))
    assert "none of the units' compute" not in capsys.readouterr().out
