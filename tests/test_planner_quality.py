"""The planner benchmark: its rules, its own optimum, and what it makes of them."""

import itertools
import random

import pytest

from benchmarks.planner_quality import rules
from benchmarks.planner_quality.clusters import Case, anchors, random_clusters
from benchmarks.planner_quality.quality import compare


def test_the_optimum_is_that_of_all_cuts():
    """It vouches for the planner, so it is itself held against every cut."""
    for seed in range(60):
        dice = random.Random(seed)
        devices, units = dice.randint(1, 4), dice.randint(4, 9)
        seconds = [[dice.uniform(0.1, 2) for _ in range(units)] for _ in range(devices)]
        cuts = [
            [b - a for a, b in itertools.pairwise((0, *inner, units))]
            for inner in itertools.combinations(range(1, units), devices - 1)
        ]
        best = min(rules.bottleneck(seconds, range(devices), counts) for counts in cuts)
        assert rules.optimum(seconds) == pytest.approx(best, rel=1e-12)


def test_even_and_greedy_share():
    seconds = [[1.0] * 7, [2.0] * 7]
    assert list(rules.even(seconds)[1]) == [4, 3]
    # Two thirds of 7 units is 4.67: the nearest end is 5.
    assert list(rules.greedy_share(seconds)[1]) == [5, 2]
    # A device whose share is less than half a unit gets one all the same.
    assert list(rules.greedy_share([[1.0] * 4, [100.0] * 4, [1.0] * 4])[1]) == [2, 1, 1]


def test_what_cannot_be_imported_is_named(tmp_path):
    """With an empty folder of packages DeepSpeed and torchgpipe are there or named as missing, never silent."""
    loaded = rules.load_rules(tmp_path)
    assert {"deepspeed", "torchgpipe"} == set(loaded.missing) | set(loaded.versions)
    assert set(loaded.versions) <= set(loaded.by_name)
    assert not set(loaded.missing) & set(loaded.by_name)


def test_cases_are_the_same_every_time():
    assert random_clusters(5) == random_clusters(5)
    assert random_clusters(5) != random_clusters(5, seed=1)
    names = [case.name for case in anchors()]
    assert len(names) == 21
    assert "2 GH-96 + 2 A100-40" in names


def test_a_comparison():
    cases = [
        Case("two types", ((1.0,) * 9, (2.0,) * 9), ("fast", "slow")),
        Case("order matters", ((1.0, 1.0, 8.0), (3.0, 3.0, 4.0)), ("a", "b")),
        Case("and here", ((3.0, 3.0, 4.0), (1.0, 1.0, 8.0)), ("b", "a")),
    ]
    loaded = rules.Rules({"even": rules.even, "ours": rules.ours, "ours, free order": rules.ours_free}, {}, {})
    told = []
    found = compare(cases, loaded, told.append)
    assert told == [case.name for case in cases]
    assert found["cases"] == 3
    assert found["rules"]["ours"]["ratios"] == [1.0] * 3
    # Optimum 6 (6 + 3 units); even 4 x 2. Then 4; even 4. Then 8; even 8, in the other order 4.
    assert found["rules"]["even"]["ratios"] == pytest.approx([8 / 6, 1.0, 1.0], abs=1e-6)
    assert found["rules"]["even"]["worst"] == pytest.approx(8 / 6)
    assert found["rules"]["even"]["mean"] == pytest.approx((8 / 6 + 2) / 3)
    assert found["rules"]["ours, free order"]["ratios"] == [1.0, 1.0, 0.5]
    assert found["free_order_checked"]["cases"] == 3
    assert found["free_order_checked"]["largest_gap"] < 1e-12


def test_a_rule_that_loses_a_unit_is_caught():
    case = Case("case", ((1.0,) * 3,), ("a",))
    broken = rules.Rules({"broken": lambda seconds: ([0], [2])}, {}, {})
    with pytest.raises(AssertionError, match="broken on case"):
        compare([case], broken, lambda name: None)
