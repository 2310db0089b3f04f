"""partition_units: known answers, brute force over all cuts and orders, and properties."""

import itertools
import math
import random
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_hetero.errors import InfeasibleError
from lightning_hetero.planner import Partition, bottleneck, partition_units


def all_cuts(units, stages):
    for inner in itertools.combinations(range(1, units), stages - 1):
        yield (0, *inner, units)


def stage_seconds(seconds, order, counts):
    """Correctly rounded seconds of each stage, so that they depend on no order of summing."""
    starts = [0, *itertools.accumulate(counts)]
    return [math.fsum(seconds[d][starts[i] : starts[i + 1]]) for i, d in enumerate(order)]


def brute_force(seconds, fixed_order, memory=None, capacity=None):
    """All partitions, as (bottleneck, order, cut), that fit."""
    devices, units = len(seconds), len(seconds[0])
    spans = [(a, b) for a in range(units) for b in range(a + 1, units + 1)]
    took = [{span: math.fsum(row[slice(*span)]) for span in spans} for row in seconds]
    if memory is not None:
        for d, row in enumerate(memory):
            for span in spans:
                if sum(row[slice(*span)]) > capacity[d]:
                    took[d][span] = math.inf
    orders = [tuple(range(devices))] if fixed_order else itertools.permutations(range(devices))
    for order in orders:
        for cut in all_cuts(units, devices):
            worst = max(took[d][cut[i], cut[i + 1]] for i, d in enumerate(order))
            if worst < math.inf:
                yield worst, order, cut


def check(partition, seconds):
    """Every device once, every unit once, nothing empty, and the bottleneck is the slowest stage."""
    assert sorted(partition.order) == list(range(len(seconds)))
    assert len(partition.counts) == len(seconds)
    assert min(partition.counts) >= 1
    assert sum(partition.counts) == len(seconds[0])
    assert partition.bottleneck_s == max(stage_seconds(seconds, partition.order, partition.counts))


@pytest.mark.parametrize(
    ("seconds", "free", "order", "counts", "bottleneck_s"),
    [
        ([[1, 1, 1, 1]], False, (0,), (4,), 4),
        ([[1] * 6] * 2, False, (0, 1), (3, 3), 3),
        # What need not be full is even, and later stages hold less.
        ([[1] * 10] * 4, False, (0, 1, 2, 3), (3, 3, 2, 2), 3),
        ([[0.1] * 10] * 4, False, (0, 1, 2, 3), (3, 3, 2, 2), math.fsum([0.1] * 3)),
        ([[9, 1, 1, 1, 1, 1, 1]] * 4, False, (0, 1, 2, 3), (1, 2, 2, 2), 9),
        ([[1] * 9, [2] * 9], False, (0, 1), (6, 3), 6),
        # Alike devices stay in ascending order; a dear last unit goes to the device that does it well.
        ([[1, 1, 1, 9], [2, 2, 2, 3]], True, (0, 1), (3, 1), 3),
        ([[2, 2, 2, 3], [1, 1, 1, 9]], True, (1, 0), (3, 1), 3),
        ([[2, 2, 2, 3], [1, 1, 1, 9]], False, (0, 1), (3, 1), 9),
        ([[1, 1, 1, 1]] * 4, True, (0, 1, 2, 3), (1, 1, 1, 1), 1),
        ([[0, 0, 0], [0, 0, 0]], True, (0, 1), (2, 1), 0),
    ],
)
def test_known_answers(seconds, free, order, counts, bottleneck_s):
    partition = partition_units(seconds, fixed_order=not free)
    assert partition == Partition(order, counts, bottleneck_s)
    assert partition.starts == tuple(sum(counts[:i]) for i in range(len(counts)))


def test_a_device_that_can_do_little_gets_the_unit_that_it_can_do():
    """Taking as much as possible would leave device 1 nothing that is small enough for it."""
    seconds = [[1, 1, 1, 1], [50, 50, 1, 50], [1, 1, 1, 1]]
    assert partition_units(seconds) == Partition((0, 1, 2), (2, 1, 1), 2)
    room = {"memory_bytes": [4, 4, 1, 4], "capacity_bytes": [12, 2, 12]}
    assert partition_units([[1] * 4] * 3, **room).counts == (2, 1, 1)
    assert partition_units([[1] * 4] * 3, fixed_order=False, **room).counts == (2, 1, 1)


def random_case(seed):
    """Random times and bytes; alike devices and ties in many, units that few devices can hold in some."""
    dice = random.Random(seed)
    devices = dice.randint(1, 4)
    units = dice.randint(devices, 8)
    draw = (
        lambda: float(dice.randint(0, 4)),
        lambda: dice.uniform(0, 3),
        lambda: 10 ** dice.uniform(-4, 1),
    )[seed % 3]
    kinds = [[draw() for _ in range(units)] for _ in range(dice.randint(1, devices))]
    seconds = [list(dice.choice(kinds)) for _ in range(devices)]
    if seed % 2 == 0:
        return seconds, None, None
    per_unit = [dice.randint(0, 5) for _ in range(units)]
    memory = [per_unit] * devices
    if seed % 4 == 1:
        memory = [[dice.randint(0, 5) for _ in range(units)] for _ in range(devices)]
    return seconds, memory, [dice.choice([6, 9, 12, 20]) for _ in range(devices)]


@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("block", range(8))
def test_no_partition_is_better(block, fixed_order):
    """Exactly the optimum, to the last bit, in 50 cases a block."""
    for seed in range(50 * block, 50 * block + 50):
        seconds, memory, capacity = random_case(seed)
        fitting = list(brute_force(seconds, fixed_order, memory, capacity))
        limits = {"fixed_order": fixed_order, "memory_bytes": memory, "capacity_bytes": capacity}
        if not fitting:
            with pytest.raises(InfeasibleError):
                partition_units(seconds, **limits)
            continue
        partition = partition_units(seconds, **limits)
        check(partition, seconds)
        best, _, _ = min(fitting)
        assert partition.bottleneck_s == best, seed
        cut = (*partition.starts, len(seconds[0]))
        assert (best, partition.order, cut) in fitting, seed
        # Of the best cuts in this order the most even one, by squares of whole quanta of seconds.
        squares = {
            other: math.fsum((s / (best or 1)) ** 2 for s in stage_seconds(seconds, order, np.diff(other)))
            for worst, order, other in fitting
            if worst == best and order == partition.order
        }
        assert squares[cut] <= min(squares.values()) + 1e-4, seed


def test_all_three_ways_to_answer_are_tested(monkeypatch):
    """The thorough search is rarely needed: check that the cases above do reach it, with either answer."""
    answers = []
    original = bottleneck._all_positions

    def watched(*arguments):
        answers.append(original(*arguments) is not None)
        return original(*arguments)

    monkeypatch.setattr(bottleneck, "_all_positions", watched)
    for seed in range(400):
        seconds, _, _ = random_case(seed)
        partition_units(seconds, fixed_order=False)
    assert min(answers.count(True), answers.count(False)) > 5


values = st.floats(0, 100) | st.integers(0, 5)


@st.composite
def clusters(draw, values=values):
    """Seconds of up to 9 devices of up to 3 types, for up to 24 units."""
    units = draw(st.integers(1, 24))
    rows = draw(st.lists(st.lists(values, min_size=units, max_size=units), min_size=1, max_size=3))
    kinds = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=min(units, 9)))
    return [rows[kind] for kind in kinds]


either = st.booleans()


@settings(deadline=None)
@given(clusters(), either)
def test_nothing_empty_and_never_slower_than_even(seconds, fixed_order):
    partition = partition_units(seconds, fixed_order=fixed_order)
    check(partition, seconds)
    devices, units = len(seconds), len(seconds[0])
    even = [units // devices + (stage < units % devices) for stage in range(devices)]
    assert partition.bottleneck_s <= max(stage_seconds(seconds, range(devices), even))
    assert partition_units(seconds, fixed_order=False).bottleneck_s <= partition_units(seconds).bottleneck_s


@settings(deadline=None)
@given(clusters(), either, st.data())
def test_fits_memory(seconds, fixed_order, data):
    units = len(seconds[0])
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=units, max_size=units))
    room = data.draw(st.lists(st.integers(0, 400), min_size=len(seconds), max_size=len(seconds)))
    unlimited = partition_units(seconds, fixed_order=fixed_order)
    try:
        partition = partition_units(seconds, fixed_order=fixed_order, memory_bytes=sizes, capacity_bytes=room)
    except InfeasibleError:
        # Then the cut that is best without limits does not fit either.
        taken = stage_seconds([sizes] * len(seconds), unlimited.order, unlimited.counts)
        assert any(need > room[d] for need, d in zip(taken, unlimited.order, strict=True))
        return
    check(partition, seconds)
    taken = stage_seconds([sizes] * len(seconds), partition.order, partition.counts)
    assert all(need <= room[d] for need, d in zip(taken, partition.order, strict=True))
    assert partition.bottleneck_s >= unlimited.bottleneck_s


@settings(deadline=None)
@given(clusters(), either, st.data())
def test_a_faster_or_larger_device_never_makes_it_slower(seconds, fixed_order, data):
    units, devices = len(seconds[0]), len(seconds)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=units, max_size=units))
    room = data.draw(st.lists(st.integers(5, 90), min_size=devices, max_size=devices))
    limits = {"fixed_order": fixed_order, "memory_bytes": sizes}
    try:
        before = partition_units(seconds, capacity_bytes=room, **limits).bottleneck_s
    except InfeasibleError:
        assume(False)
    device = data.draw(st.integers(0, devices - 1))
    faster = [list(row) for row in seconds]
    faster[device] = [value * data.draw(st.floats(0, 1)) for value in faster[device]]
    assert partition_units(faster, capacity_bytes=room, **limits).bottleneck_s <= before
    room[device] += data.draw(st.integers(0, 50))
    assert partition_units(seconds, capacity_bytes=room, **limits).bottleneck_s <= before


@settings(deadline=None)
@given(clusters(), st.randoms(use_true_random=False), either)
def test_listing_order_and_labels_do_not_matter(seconds, dice, with_memory):
    """The same stages on the same kinds of devices, whatever index the devices have."""
    units, devices = len(seconds[0]), len(seconds)
    room = [units + dice.randint(0, 2) for _ in range(devices)] if with_memory else None
    sizes = [1] * units if with_memory else None
    partition = partition_units(seconds, fixed_order=False, memory_bytes=sizes, capacity_bytes=room)
    listing = list(range(devices))
    dice.shuffle(listing)
    shuffled = [seconds[d] for d in listing]
    again = partition_units(
        shuffled,
        fixed_order=False,
        memory_bytes=sizes,
        capacity_bytes=room and [room[d] for d in listing],
    )
    assert (again.counts, again.bottleneck_s) == (partition.counts, partition.bottleneck_s)
    assert [shuffled[d] for d in again.order] == [seconds[d] for d in partition.order]


@settings(deadline=None)
@given(clusters(), st.sampled_from([2.0**-20, 0.5, 1024.0]))
def test_the_unit_of_time_does_not_matter(seconds, factor):
    scaled = [[value * factor for value in row] for row in seconds]
    assume(all(value * factor / factor == value for row in seconds for value in row))
    partition, again = (partition_units(rows, fixed_order=False) for rows in (seconds, scaled))
    assert (again.order, again.counts) == (partition.order, partition.counts)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 60), st.floats(1e-6, 1e3))
def test_equal_devices_and_units_differ_by_one(devices, units, second):
    assume(devices <= units)
    counts = partition_units([[second] * units] * devices, fixed_order=False).counts
    assert max(counts) - min(counts) <= 1
    assert list(counts) == sorted(counts, reverse=True)


def test_sums_are_exact():
    """Added up from the left in floats, 0.1 + 0.2 + 0.3 is more than 0.6, and 1e16 + 1 + 1 is 1e16."""
    seconds = [[0.1, 0.2, 0.3, 0.3, 0.2, 0.1]] * 2
    assert partition_units(seconds).bottleneck_s == math.fsum([0.1, 0.2, 0.3])
    lost = [[1e16, 1.0, 1.0, 1e16, 1.0]] * 2
    # [1e16, 1] and [1, 1e16, 1] take 1e16 + 2 at most; [1e16, 1, 1] and [1e16, 1] too, by the last bit.
    assert partition_units(lost).bottleneck_s == 1e16 + 2
    tiny = [[5e-324, 1.0, 5e-324, 1.0]] * 2
    assert partition_units(tiny).counts == (2, 2)


def two_types(per_type, units, jitter=0.1):
    dice = random.Random(7)
    work = [dice.uniform(0.5, 2) for _ in range(units)]
    rows = [[w * speed * dice.uniform(1 - jitter, 1 + jitter) for w in work] for speed in (1.0, 0.45)]
    return [rows[0]] * per_type + [rows[1]] * per_type


def test_sixteen_devices_of_two_types_in_free_order_take_little():
    seconds = two_types(8, 100)
    taken = []
    for _ in range(7):
        start_s = time.perf_counter()
        partition = partition_units(seconds, fixed_order=False)
        taken.append(time.perf_counter() - start_s)
    check(partition, seconds)
    assert min(taken) < 0.05


def test_sixteen_devices_all_different_take_seconds_at_most():
    dice = random.Random(3)
    seconds = [[dice.uniform(0.5, 2) for _ in range(40)] for _ in range(16)]
    start_s = time.perf_counter()
    partition = partition_units(seconds, fixed_order=False)
    assert time.perf_counter() - start_s < 5
    check(partition, seconds)
    lower = math.fsum(min(row[u] for row in seconds) for u in range(40)) / 16
    assert lower <= partition.bottleneck_s <= partition_units(seconds).bottleneck_s


def test_numpy_arrays_are_fine():
    seconds = np.array([[1.0, 1, 1, 1], [2, 2, 2, 2]], dtype=np.float32)
    partition = partition_units(seconds, memory_bytes=np.ones(4, dtype=np.int64), capacity_bytes=np.array([4, 4]))
    assert partition == Partition((0, 1), (3, 1), 3.0)
    assert all(type(n) is int for n in (*partition.order, *partition.counts))
    assert type(partition.bottleneck_s) is float
    per_device = partition_units(seconds, memory_bytes=np.array([[2] * 4, [1] * 4]), capacity_bytes=[4, 4])
    assert per_device.counts == (2, 2)


def test_the_smallest_and_the_largest_seconds_there_are() -> None:
    """Ratios of such seconds exceed what a float holds (found by hypothesis)."""
    partition = partition_units([[0.0, 0.0], [1.0, 5e-324]], fixed_order=False)
    assert (partition.order, partition.counts, partition.bottleneck_s) == ((0, 1), (1, 1), 5e-324)
    partition = partition_units([[1e300, 5e-324, 5e-324, 5e-324], [5e-324, 1e300, 1e300, 1e300]], fixed_order=False)
    assert (partition.order, partition.counts) == ((1, 0), (1, 3))
