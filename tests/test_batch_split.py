"""split_batch: known answers, brute force over all splits, and properties."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.errors import HeteroError, InfeasibleError
from lightning_hetero.planner import slowest_seconds, split_batch


def all_splits(total, ranks):
    """Every way to write ``total`` as an ordered sum of ``ranks`` whole numbers >= 0."""
    for bars in itertools.combinations(range(total + ranks - 1), ranks - 1):
        cuts = (-1, *bars, total + ranks - 1)
        yield tuple(cuts[i + 1] - cuts[i] - 1 for i in range(ranks))


def sorted_seconds(seconds, fixed, shares):
    return sorted((f + s * b for s, f, b in zip(seconds, fixed, shares, strict=True)), reverse=True)


@pytest.mark.parametrize(
    ("seconds", "fixed", "total", "limits", "shares"),
    [
        ([1 / 6, 1 / 6, 1 / 3, 1 / 3], None, 128, {}, (43, 43, 21, 21)),
        ([1, 1, 1, 1], None, 10, {}, (3, 3, 2, 2)),
        ([1, 2], None, 9, {}, (6, 3)),
        ([1, 1], [0, 4], 10, {}, (7, 3)),
        ([1, 1], 5.0, 10, {}, (5, 5)),
        ([1, 100], None, 10, {}, (10, 0)),
        ([1, 100], None, 10, {"min_samples": 1}, (9, 1)),
        ([1, 1, 2], None, 10, {"max_samples": [2, None, 2]}, (2, 6, 2)),
        ([1, 1], None, 10, {"max_samples": 5}, (5, 5)),
        ([3.0], [1.0], 7, {}, (7,)),
        ([1, 1, 1], None, 3, {"min_samples": [0, 2, 0]}, (1, 2, 0)),
    ],
)
def test_known_answers(seconds, fixed, total, limits, shares):
    assert split_batch(seconds, fixed, total, **limits) == shares


@pytest.mark.parametrize("seed", range(150))
def test_no_split_is_better(seed):
    """Exactly optimal, and the second slowest rank and so on too, with and without limits."""
    dice = random.Random(seed)
    ranks, total = dice.randint(1, 4), dice.randint(1, 14)
    # Small whole numbers make many ties, others none.
    draw = (lambda: float(dice.randint(1, 4))) if seed % 2 else (lambda: dice.uniform(0.1, 3))
    seconds, fixed = [draw() for _ in range(ranks)], [draw() * dice.randint(0, 3) for _ in range(ranks)]
    lows, highs = [0] * ranks, [None] * ranks
    if seed % 3:
        lows = [dice.randint(0, 2) for _ in range(ranks)]
        highs = [dice.choice([None, low + dice.randint(0, 6)]) for low in lows]
    fitting = [
        shares
        for shares in all_splits(total, ranks)
        if all(
            low <= share <= (total if high is None else high)
            for low, share, high in zip(lows, shares, highs, strict=True)
        )
    ]
    if not fitting:
        with pytest.raises(InfeasibleError):
            split_batch(seconds, fixed, total, max_samples=highs, min_samples=lows)
        return
    shares = split_batch(seconds, fixed, total, max_samples=highs, min_samples=lows)
    assert shares in fitting
    best = min(sorted_seconds(seconds, fixed, other) for other in fitting)
    assert sorted_seconds(seconds, fixed, shares) == best


seconds_lists = st.lists(st.floats(1e-4, 1e2), min_size=1, max_size=12)


@st.composite
def cases(draw):
    seconds = draw(seconds_lists)
    fixed = draw(st.lists(st.floats(0, 10), min_size=len(seconds), max_size=len(seconds)))
    total = draw(st.integers(1, 100_000))
    caps = draw(st.lists(st.integers(0, 50_000), min_size=len(seconds), max_size=len(seconds)))
    return seconds, fixed, total, caps


@given(cases())
def test_sums_keeps_limits_and_is_never_slower_than_even(case):
    seconds, fixed, total, caps = case
    ranks = len(seconds)
    even = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    shares = split_batch(seconds, fixed, total)
    assert sum(shares) == total
    assert min(shares) >= 0
    assert slowest_seconds(seconds, fixed, shares) <= slowest_seconds(seconds, fixed, even)
    caps[0] += max(0, total - sum(caps))
    capped = split_batch(seconds, fixed, total, max_samples=caps)
    assert sum(capped) == total
    assert all(share <= cap for share, cap in zip(capped, caps, strict=True))
    assert slowest_seconds(seconds, fixed, capped) >= slowest_seconds(seconds, fixed, shares)


@given(cases())
def test_moving_one_sample_never_helps(case):
    """Proves the optimum for sizes beyond brute force: seconds only rise, so no other split gains."""
    seconds, fixed, total, _ = case
    shares = split_batch(seconds, fixed, total)
    bottleneck = slowest_seconds(seconds, fixed, shares)
    busiest = [rank for rank, share in enumerate(shares) if fixed[rank] + seconds[rank] * share == bottleneck and share]
    if not busiest:
        return  # a rank without samples is the slowest by its fixed seconds alone
    for rank in range(len(shares)):
        if rank not in busiest:
            assert fixed[rank] + seconds[rank] * (shares[rank] + 1) >= bottleneck


@given(cases(), st.data())
def test_a_faster_device_never_makes_it_slower(case, data):
    seconds, fixed, total, _ = case
    before = slowest_seconds(seconds, fixed, split_batch(seconds, fixed, total))
    rank = data.draw(st.integers(0, len(seconds) - 1))
    faster = list(seconds)
    faster[rank] *= data.draw(st.floats(0.1, 1))
    assert slowest_seconds(faster, fixed, split_batch(faster, fixed, total)) <= before


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_matter(case, dice):
    seconds, fixed, total, _ = case
    order = list(range(len(seconds)))
    dice.shuffle(order)
    shares = split_batch(seconds, fixed, total)
    permuted = split_batch([seconds[i] for i in order], [fixed[i] for i in order], total)
    assert sorted(zip(seconds, fixed, shares, strict=True)) == sorted(
        (seconds[i], fixed[i], share) for i, share in zip(order, permuted, strict=True)
    )


@given(st.integers(1, 200), st.integers(1, 10**6))
def test_equal_devices_differ_by_one_sample_at_most(ranks, total):
    shares = split_batch([0.37] * ranks, None, total)
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@settings(deadline=None)
@given(st.integers(1, 6 * 10**6))
def test_seconds_lost_beside_the_fixed_ones_still_end(total):
    """Per-sample seconds below the rounding of the fixed ones make very many equal finishing times.

    Up to 5,684,341 samples of 1e-20 s round away beside 1000 s (half a unit in the last place, 5.7e-14 s).
    """
    shares = split_batch([1e-20, 1e-19, 1.0], [1e3, 1e3, 0.0], total)
    assert sum(shares) == total
    assert slowest_seconds([1e-20, 1e-19, 1.0], [1e3, 1e3, 0.0], shares) == 1e3


def test_a_thousand_ranks_and_a_million_samples_take_little():
    dice = random.Random(0)
    seconds = [dice.choice([1.0, 1.7, 3.1]) * dice.uniform(0.98, 1.02) for _ in range(1024)]
    fixed = [dice.uniform(0, 5) for _ in range(1024)]
    taken = []
    for _ in range(5):
        start_s = time.perf_counter()
        shares = split_batch(seconds, fixed, 10**6)
        taken.append(time.perf_counter() - start_s)
    assert sum(shares) == 10**6
    assert min(taken) < 0.05
    # Optimal: one sample fewer on the busiest rank would have to go where it is finished no earlier.
    bottleneck = slowest_seconds(seconds, fixed, shares)
    following = min(f + s * (b + 1) for s, f, b in zip(seconds, fixed, shares, strict=True))
    assert following >= bottleneck


def test_numpy_arrays_are_fine():
    numpy = pytest.importorskip("numpy")
    shares = split_batch(numpy.array([1.0, 2.0]), numpy.zeros(2), numpy.int64(9), max_samples=numpy.array([5, 9]))
    assert shares == (5, 4)
    assert all(type(share) is int for share in shares)


@pytest.mark.parametrize(
    ("arguments", "limits", "expected"),
    [
        (([1, 1, 1], None, 2), {"min_samples": 1}, "2 samples, fewer than the 3 that 3 ranks"),
        (([1, 1], None, 10), {"max_samples": [2, 3]}, "10 samples, more than the 5 that 2 ranks"),
        (([1, 1], None, 10), {"max_samples": [2, 30], "min_samples": 3}, "rank 0 takes at least 3"),
    ],
)
def test_infeasible_names_the_numbers(arguments, limits, expected):
    with pytest.raises(InfeasibleError) as caught:
        split_batch(*arguments, **limits)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "limits", "expected"),
    [
        (([], None, 1), {}, "seconds_per_sample is empty"),
        (([1, 0], None, 1), {}, "seconds_per_sample[1] is 0"),
        (([1, float("nan")], None, 1), {}, "seconds_per_sample[1] is nan"),
        (([1, 1], [1], 1), {}, "fixed_seconds has 1 values for 2 ranks"),
        (([1, 1], [1, -1], 1), {}, "fixed_seconds[1] is -1"),
        (([1, 1], None, 0), {}, "global_batch is 0"),
        (([1, 1], None, 2.5), {}, "global_batch is 2.5"),
        (([1, 1], None, 2), {"max_samples": [1, -1]}, "max_samples[1] is -1"),
        (([1, 1], None, 2), {"min_samples": [0.5, 0]}, "min_samples[0] is 0.5"),
    ],
)
def test_malformed_arguments(arguments, limits, expected):
    with pytest.raises(HeteroError) as caught:
        split_batch(*arguments, **limits)
    assert expected in str(caught.value)
    assert not isinstance(caught.value, InfeasibleError)
