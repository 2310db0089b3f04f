"""Stage tables say what the memory model says, and cuts over them are the best."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.planner import partition_units
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.planner.stage_cut import find_cuts
from lightning_hetero.planner.stage_table import StageTable
from lightning_hetero.simulator.pipeline_memory import StageUnits, stage_memory
from tests.pipeline_cases import compositions, random_case


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_bytes_are_those_of_the_memory_model(seed, samples, in_flight, all_at_once, recompute):
    cluster, costs, training = random_case(seed)
    table = StageTable(costs, unit_timings(costs, cluster), training.state, samples)
    matrix = table.bytes(in_flight, all_at_once, recompute)
    count = in_flight if all_at_once else in_flight + 3
    for start, stop in itertools.combinations(range(len(costs.units) + 1), 2):
        memory = stage_memory(costs, StageUnits(start, stop, recompute), in_flight, count, state=training.state)
        assert matrix[start, stop] == memory.peak_bytes(samples)
    assert np.isinf(matrix[np.tri(len(matrix), dtype=bool)]).all()


def test_seconds_are_sums_over_units():
    cluster, costs, training = random_case(3)
    timings = unit_timings(costs, cluster)
    table = StageTable(costs, timings, training.state, 3)
    kind = cluster.types[0]
    forward = sum(each.forward_s(3) for each in timings[kind][1:4])
    backward = sum(each.backward_s(3) for each in timings[kind][1:4])
    plain, again = (table.seconds(kind, 1, 4, recompute) for recompute in (False, True))
    assert (plain.forward_s, plain.backward_s) == pytest.approx((forward, backward))
    assert again.backward_s == pytest.approx(forward + backward)
    assert table.both(kind)[1, 4] == pytest.approx(forward + backward)


def test_a_stage_is_checkpointed_only_where_it_does_not_fit():
    cluster, costs, training = random_case(3)
    kind = cluster.types[0]
    table = StageTable(costs, unit_timings(costs, cluster), training.state, 2)
    plain, again = table.bytes(2, False, False)[1, 3], table.bytes(2, False, True)[1, 3]
    assert again < plain
    seconds, forward = table.both(kind)[1, 3], table.forward(kind)[1, 3]
    assert table.choice(kind, plain, 2, False, True)[1, 3] == seconds
    assert table.choice(kind, plain - 1, 2, False, True)[1, 3] == seconds + forward
    assert table.choice(kind, plain - 1, 2, False, False)[1, 3] == np.inf
    assert table.choice(kind, again - 1, 2, False, True)[1, 3] == np.inf


def random_matrices(dice, stages, units):
    matrices = []
    for _ in range(stages):
        row = np.cumsum([0, *(dice.randint(1, 9) for _ in range(units))]).astype(float)
        matrix = row[None, :] - row[:, None]
        blocked = np.array([[dice.random() < 0.15 for _ in range(units + 1)] for _ in range(units + 1)])
        matrices.append(np.where(np.tri(units + 1, dtype=bool) | blocked, np.inf, matrix))
    return matrices, [np.array([dice.randint(0, 6) for _ in range(units + 1)], dtype=float) for _ in range(stages - 1)]


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_cuts_against_every_cut(seed):
    dice = random.Random(seed)
    units = dice.randint(1, 7)
    stages = dice.randint(1, min(4, units))
    matrices, hops = random_matrices(dice, stages, units)
    every = {}
    for counts in compositions(units, stages):
        ends = list(itertools.accumulate(counts))
        own = [matrix[a, b] for matrix, a, b in zip(matrices, [0, *ends[:-1]], ends, strict=True)]
        sent = [hop[b] for hop, b in zip(hops, ends, strict=False)]
        if np.isfinite(own).all():
            every[counts] = sum(own) + 2 * sum(sent), max(own + sent)
    slacks = (0.0, 0.3, np.inf)
    found = find_cuts(matrices, hops, slacks)
    assert bool(found) == bool(every)
    if found:
        least = min(slowest for _, slowest in every.values())
        assert found[0].slowest_s == least
        for cut in found:
            assert (cut.way_s, cut.slowest_s) == pytest.approx(every[cut.counts])
        ways = {cut.way_s for cut in found}
        for slack in slacks:
            assert min(way for way, slowest in every.values() if slowest <= least * (1 + slack)) in ways


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_the_least_bottleneck_is_that_of_partition_units(seed):
    """Where costs belong to units alone, the two exact methods agree."""
    dice = random.Random(seed)
    units, stages = dice.randint(4, 9), dice.randint(1, 4)
    rows = [[float(dice.randint(0, 20)) for _ in range(units)] for _ in range(stages)]
    matrices = []
    for row in rows:
        prefix = np.cumsum([0.0, *row])
        matrices.append(np.where(np.tri(units + 1, dtype=bool), np.inf, prefix[None, :] - prefix[:, None]))
    free = [np.zeros(units + 1)] * (stages - 1)
    assert find_cuts(matrices, free, (0.0,))[0].slowest_s == partition_units(rows).bottleneck_s
