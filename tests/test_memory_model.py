"""The memory formula: by hand for small cases, and its properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.costs import UnitCost
from lightning_hetero.errors import HeteroError
from lightning_hetero.simulator import MemoryPoint, RankMemory, StateBytes, shard_memory, sharded_memory
from lightning_hetero.simulator.sharded_memory import GLOO_BUFFERS


def unit(name, parameters, kept=0, output=0):
    return UnitCost(name, parameters, 0.0, 0.0, kept, output)


BLOCKS = [unit("a", 100, kept=7, output=2), unit("b", 40, kept=5, output=3), unit("c", 60, kept=11, output=1)]


def points(memory):
    return {(point.phase, point.place): (point.fixed_bytes, point.bytes_per_sample) for point in memory.points}


def test_by_hand_in_a_group_of_three():
    """Shards of 34 + 14 + 20 = 68 parameters; parameter and moments 12 bytes each, gradient 4."""
    found = points(shard_memory(BLOCKS, 3))
    states = 68 * 12
    full = 68 * 16  # with the gradients of the step before
    assert found == {
        # what was gathered and its copy; then the unit and the next one; activations up to it
        ("gather in forward", "a"): (full + 2 * 100 * 4, 0),
        ("forward", "a"): (full + (100 + 40) * 4, 7),
        ("gather in forward", "b"): (full + 2 * 40 * 4, 7),
        ("forward", "b"): (full + (40 + 60) * 4, 12),
        ("gather in forward", "c"): (full + 2 * 60 * 4, 12),
        ("forward", "c"): (full + 60 * 4, 23),
        # unit, its gradient, the previous unit; gradients sharded so far, the one on its way; gradients of output and
        # input; then the gradient and its copy in place of the unit, whose activations are gone
        ("gather in backward", "c"): (states + 2 * 60 * 4, 23 + 1),
        ("backward", "c"): (states + (60 + 60 + 40) * 4, 23 + 1 + 3),
        ("reduce", "c"): (states + 20 * 4 + 40 * 4 + 2 * 60 * 4, 12 + 3),
        ("gather in backward", "b"): (states + 20 * 4 + 2 * 40 * 4 + 60 * 4, 12 + 3),
        ("backward", "b"): (states + 20 * 4 + (40 + 40 + 100) * 4 + 60 * 4, 12 + 3 + 2),
        ("reduce", "b"): (states + 34 * 4 + 100 * 4 + 2 * 40 * 4, 7 + 2),
        ("gather in backward", "a"): (states + 34 * 4 + 2 * 100 * 4 + 40 * 4, 7 + 2),
        ("backward", "a"): (states + 34 * 4 + (100 + 100) * 4 + 40 * 4, 7 + 2),
        ("reduce", "a"): (states + 68 * 4 + 2 * 100 * 4, 0),
        ("step", ""): (states + 68 * 4, 0),
    }


def test_a_gradient_inside_a_unit_comes_before_the_whole_gradient():
    a, b, c = BLOCKS
    found = points(shard_memory([a, replace(b, inner_gradient_bytes=10), replace(c, inner_gradient_bytes=3)], 3))
    # the unit, the one before it, the gradient on its way; what is kept, gradients of the output and of the inside
    assert found["inside backward", "b"] == (68 * 12 + 20 * 4 + (40 + 100) * 4 + 60 * 4, 12 + 3 + 10)
    assert ("inside backward", "c") not in found  # no larger than that of its input, which comes later


def test_without_prefetch_nothing_waits():
    found = points(shard_memory(BLOCKS, 3, prefetch=False))
    assert found["forward", "b"][0] == 68 * 16 + 40 * 4
    assert found["backward", "b"][0] == 68 * 12 + 20 * 4 + (40 + 40) * 4 + 60 * 4


def test_parameters_kept_after_forward():
    found = points(shard_memory(BLOCKS, 3, reshard_after_forward=False))
    assert found["forward", "b"][0] == 68 * 16 + (100 + 40 + 60) * 4
    assert found["gather in forward", "c"][0] == 68 * 16 + (140 + 2 * 60) * 4
    assert found["backward", "c"][0] == 68 * 12 + (200 + 60) * 4
    assert found["backward", "b"][0] == 68 * 12 + 20 * 4 + (140 + 40) * 4 + 60 * 4
    assert found == points(shard_memory(BLOCKS, 3, mode="SHARD_GRAD_OP"))
    assert ("gather in backward", "c") not in found


def test_the_root_stays_gathered():
    found = points(shard_memory(BLOCKS, 3, root=["a"]))
    assert found["forward", "a"][0] == 68 * 16 + 100 * 4 + 40 * 4
    assert found["backward", "b"][0] == 68 * 12 + 20 * 4 + (100 + 100) * 4 + (40 + 40) * 4 + 60 * 4
    assert found["reduce", "root"][0] == 68 * 16 + 2 * 100 * 4
    assert ("reduce", "a") not in found


def test_replicated():
    """Everything whole, nothing to gather; a gradient's copy is on its way while the next one comes to be."""
    found = points(shard_memory(BLOCKS, 3, mode="NO_SHARD"))
    assert found["forward", "a"] == (200 * 16, 7)
    assert found["backward", "b"] == (200 * 12 + 60 * 4 + 40 * 4 + 60 * 4, 17)
    assert found["reduce", "b"] == (200 * 12 + 100 * 4 + 40 * 4, 9)
    assert not any(phase.startswith("gather") for phase, _ in found)
    assert found == points(shard_memory(BLOCKS, 1, mode="NO_SHARD"))


def test_gradients_on_their_way():
    found = points(shard_memory(BLOCKS, 3, buffers=GLOO_BUFFERS))
    states = 68 * 12
    assert found["backward", "a"][0] == states + 34 * 4 + (100 + 100) * 4 + (40 + 60) * 4
    # two on their way, the third one sent, and the copy of the first, whose end is waited for
    assert found["reduce", "a"][0] == states + 68 * 4 + (40 + 60) * 4 + 100 * 4 + max(100, 60) * 4


def test_checkpointing_keeps_inputs():
    found = points(shard_memory(BLOCKS, 3, checkpointing=True))
    # the inputs are the outputs of the unit before: none, 2, 3
    assert [found["forward", name][1] for name in "abc"] == [0, 2, 5]
    # what c keeps comes back beside the inputs of a and b
    assert found["backward", "c"][1] == (0 + 2 + 11) + 1 + 3
    assert found["reduce", "c"][1] == 2 + 3
    plain = points(shard_memory(BLOCKS, 3))
    assert {key: fixed for key, (fixed, _) in found.items()} == {key: fixed for key, (fixed, _) in plain.items()}


def test_the_root_is_not_checkpointed():
    found = points(shard_memory(BLOCKS, 3, root=["c"], checkpointing=True))
    assert [found["forward", name][1] for name in "abc"] == [0, 2, 2 + 11]


def test_the_loss():
    found = points(shard_memory(BLOCKS, 3, loss_bytes=9))
    assert found["loss", ""] == (68 * 16, 23 + 9)
    assert points(shard_memory(BLOCKS, 3, loss_bytes=9, mode="SHARD_GRAD_OP"))["loss", ""] == (68 * 16 + 800, 23 + 9)


def test_accumulation_keeps_all_gradients():
    found = points(shard_memory(BLOCKS, 3, accumulates=True))
    plain = points(shard_memory(BLOCKS, 3))
    assert found["backward", "c"][0] == plain["backward", "c"][0] + 68 * 4
    # what has just been reduced is added to what is there
    assert found["reduce", "c"][0] == 68 * 16 + 20 * 4 + 40 * 4 + 2 * 60 * 4
    assert found["forward", "c"] == plain["forward", "c"]


def test_mixed_precision():
    """16-bit gathered parameters and gradients, 32-bit reduction: the reduce-scatter's copy is the larger."""
    found = points(shard_memory([unit("a", 100)], 1, state=StateBytes(gathered=2, reduced=4)))
    assert found["gather in forward", "a"][0] == 100 * 16 + 200 * 2
    assert found["backward", "a"][0] == 100 * 12 + 100 * (2 + 2)
    assert found["reduce", "a"][0] == 100 * 12 + 100 * 4 + 100 * (2 + 4)


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
    assert shard_memory(units, group_size, checkpointing=True).peak_bytes(samples) <= memory.peak_bytes(samples)
    assert memory.peak_bytes(samples) <= shard_memory(units, group_size, accumulates=True).peak_bytes(samples)
    # Never below what must be there at once: states with gradients, and the largest unit with its gradient.
    total = sum(each.parameters for each in units)
    assert memory.peak_bytes(0) >= 16 * total / group_size
    assert memory.peak_bytes(0) >= 12 * total / group_size + 8 * max(each.parameters for each in units)


@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(0, 10**7), st.integers(0, 10**6), st.integers(0, 10**5)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 50),
)
def test_what_is_left_out_of_rows_is_never_the_peak(rows, mode, checkpointing, accumulates, samples):
    units = [unit(f"{row}.{i}", *sizes) for row, (count, *sizes) in enumerate(rows) for i in range(count)]
    options = {"mode": mode, "checkpointing": checkpointing, "accumulates": accumulates, "buffers": GLOO_BUFFERS}
    short = shard_memory(units, 3, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_memory, "_inside", lambda units, root, edge: [False] * len(units))
        long = shard_memory(units, 3, **options)
    assert set(short.points) <= set(long.points)
    assert short.peak_bytes(samples) == long.peak_bytes(samples)


def test_malformed_arguments():
    with pytest.raises(HeteroError) as caught:
        shard_memory([], 0, root=["x"], mode="HYBRID")
    assert str(caught.value).count("\n  - ") == 4
    with pytest.raises(HeteroError, match="optimizer is -8"):
        StateBytes(optimizer=-8)
