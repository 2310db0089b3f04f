"""The memory formula: by hand for small cases, and its properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.costs import UnitCost
from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator import MemoryPoint, RankMemory, StateBytes, shard_memory


def unit(name, parameters, kept=0, output=0):
    return UnitCost(name, parameters, 0.0, 0.0, kept, output)


BLOCKS = [unit("a", 100, kept=7, output=2), unit("b", 40, kept=5, output=3), unit("c", 60, kept=11, output=1)]


def points(memory):
    return {(point.phase, point.place): (point.fixed_bytes, point.bytes_per_sample) for point in memory.points}


def test_by_hand_in_a_group_of_three():
    """Shards of 34 + 14 + 20 = 68 parameters; parameter and moments 12 bytes each, gradient 4."""
    found = points(shard_memory(BLOCKS, 3))
    states = 68 * 12
    assert found == {
        # gathered: the unit and the larger of its copy and the next unit
        ("forward", "a"): (states + (100 + 100) * 4, 7),
        ("forward", "b"): (states + (40 + 60) * 4, 12),
        ("forward", "c"): (states + (60 + 60) * 4, 23),
        # unit and its gradient, the previous unit, gradients sharded so far; gradients of output and input
        ("backward", "c"): (states + 20 * 4 + (60 + 60 + 40) * 4, 23 + 1 + 3),
        ("backward", "b"): (states + 34 * 4 + (40 + 40 + 100) * 4, 12 + 3 + 2),
        ("backward", "a"): (states + 68 * 4 + (100 + 100) * 4, 7 + 2),
        ("step", ""): (states + 68 * 4, 0),
    }


def test_without_prefetch_nothing_waits():
    found = points(shard_memory(BLOCKS, 3, prefetch=False))
    assert found["forward", "b"][0] == 68 * 12 + (40 + 40) * 4
    assert found["backward", "b"][0] == 68 * 12 + 34 * 4 + (40 + 40) * 4


def test_parameters_kept_after_forward():
    found = points(shard_memory(BLOCKS, 3, reshard_after_forward=False))
    assert found["forward", "c"][0] == 68 * 12 + (200 + 60) * 4
    assert found["backward", "c"][0] == 68 * 12 + 20 * 4 + (200 + 60) * 4


def test_the_root_stays_gathered():
    found = points(shard_memory(BLOCKS, 3, root=["a"]))
    assert found["forward", "a"][0] == 68 * 12 + 100 * 4 + 40 * 4
    assert found["backward", "b"][0] == 68 * 12 + 34 * 4 + (100 + 100) * 4 + (40 + 40) * 4


def test_mixed_precision():
    """16-bit gathered parameters and gradients, 32-bit reduction: the reduce-scatter's copy is the larger."""
    found = points(shard_memory([unit("a", 100)], 1, state=StateBytes(gathered=2, reduced=4)))
    assert found["forward", "a"][0] == 100 * 12 + 200 * 2
    assert found["backward", "a"][0] == 100 * 12 + 100 * 4 + 100 * (2 + 4)


def test_temporaries_of_the_optimizer():
    found = points(shard_memory([unit("a", 100)], 1, state=StateBytes(step_temporary=4)))
    assert found["step", ""][0] == 100 * (12 + 4 + 4)


def test_peak_and_limit():
    memory = RankMemory((MemoryPoint("forward", "a", 100, 10.0), MemoryPoint("backward", "b", 160, 4.0)))
    assert memory.peak_bytes(0) == 160
    assert str(memory.peak(0)) == "backward of unit 'b'"
    assert memory.peak(11).phase == "forward"
    assert memory.peak_bytes(11) == 210
    assert memory.max_samples(159) == -1
    assert memory.max_samples(160) == 0
    assert memory.max_samples(200) == 10
    assert memory.max_samples(219) == 11
    assert RankMemory.measured(50, 0.0).max_samples(50) is None
    assert RankMemory.measured(50, 0.0).max_samples(49) == -1
    assert str(RankMemory.measured(50, 0.0).peak(3)) == "measured"


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 1e8)), min_size=1, max_size=5),
    st.integers(0, 10**12),
)
def test_the_limit_is_the_last_that_fits(lines, capacity):
    memory = RankMemory(tuple(MemoryPoint("forward", "u", fixed, per_sample) for fixed, per_sample in lines))
    if memory.peak_bytes(10**6) <= capacity:
        return  # hardly any growth: the limit is beyond what is worth checking one by one
    most = memory.max_samples(capacity)
    assert most is not None
    assert most == -1 or memory.peak_bytes(most) <= capacity
    assert memory.peak_bytes(most + 1) > capacity


unit_lists = st.lists(
    st.tuples(st.integers(0, 10**8), st.integers(0, 10**7), st.integers(0, 10**6)), min_size=1, max_size=8
).map(lambda rows: [unit(str(index), *row) for index, row in enumerate(rows)])


@given(unit_lists, st.integers(1, 63), st.integers(0, 100))
def test_larger_groups_and_fewer_samples_never_need_more(units, group_size, samples):
    memory = shard_memory(units, group_size)
    assert shard_memory(units, group_size + 1).peak_bytes(samples) <= memory.peak_bytes(samples)
    assert memory.peak_bytes(samples) <= memory.peak_bytes(samples + 1)
    assert memory.peak_bytes(samples) <= shard_memory(units, group_size, reshard_after_forward=False).peak_bytes(
        samples
    )
    # Never below what must be there at once: states with gradients, and the largest unit with its gradient.
    total = sum(each.parameters for each in units)
    assert memory.peak_bytes(0) >= 16 * total / group_size
    assert memory.peak_bytes(0) >= 12 * total / group_size + 8 * max(each.parameters for each in units)


def test_malformed_arguments():
    with pytest.raises(HeteroError) as caught:
        shard_memory([], 0, root=["x"])
    assert str(caught.value).count("\n  - ") == 3
    with pytest.raises(HeteroError, match="optimizer is -8"):
        StateBytes(optimizer=-8)
