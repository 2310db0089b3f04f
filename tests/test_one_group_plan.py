"""plan_one_group: shares by speed under memory, what it predicts, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import UnitCost
from lightning_hetero.errors import HeteroError, InfeasibleError
from lightning_hetero.plan import ModelKey
from lightning_hetero.planner import plan_one_group
from lightning_hetero.simulator import shard_memory

GIB = 2**30


def make_cluster(*types, memory_bytes=2 * GIB):
    return Cluster("test", tuple(Device(kind, f"node-{kind}", memory_bytes, None) for kind in types))


CLUSTER = make_cluster("fast", "fast", "slow", "slow")
SECONDS = [1 / 6, 1 / 6, 1 / 3, 1 / 3]


def test_shares_follow_speed():
    plan = plan_one_group(CLUSTER, global_batch_size=128, seconds_per_sample=SECONDS, model=ModelKey("vit", 9))
    assert plan.batch_shares == (43, 43, 21, 21)
    assert plan.groups == ((0, 1, 2, 3),)
    assert plan.device_types == ("fast", "fast", "slow", "slow")
    assert plan.predicted_step_s == pytest.approx(43 / 6)
    assert [each.busy_s for each in plan.predictions] == pytest.approx([43 / 6, 43 / 6, 7, 7])
    assert [each.idle_share for each in plan.predictions] == pytest.approx([0, 0, 1 / 43, 1 / 43])
    assert all(each.peak_memory_bytes is None for each in plan.predictions)
    plan.validate(CLUSTER, ModelKey("vit", 9))


def test_reasons_tell_the_even_split():
    plan = plan_one_group(CLUSTER, global_batch_size=128, seconds_per_sample=SECONDS)
    text = "\n".join(plan.reasons)
    assert "2 x fast take 43 each, 2 x slow take 21 each" in text
    assert "rank 0 (fast on node-fast) sets the pace" in text
    assert "an even split would take 10.67 s, 1.49 x as long" in text


def test_fixed_seconds_shift_shares():
    plan = plan_one_group(make_cluster("a", "b"), global_batch_size=10, seconds_per_sample=[1, 1], fixed_seconds=[0, 4])
    assert plan.batch_shares == (7, 3)
    assert plan.predicted_step_s == 7


def test_measured_memory_limits_shares():
    plan = plan_one_group(
        CLUSTER,
        global_batch_size=128,
        seconds_per_sample=SECONDS,
        fixed_bytes=[GIB] * 4,
        bytes_per_sample=[GIB / 38] * 4,
    )
    assert plan.batch_shares == (38, 38, 26, 26)
    assert plan.predictions[0].peak_memory_bytes == 2 * GIB
    assert "rank 0 (fast on node-fast) is held at 38 samples by its memory; by speed it would take 43" in plan.reasons
    assert any("even split would take" in reason for reason in plan.reasons)


def test_an_even_split_that_does_not_fit_is_said():
    plan = plan_one_group(
        make_cluster("big", "small"),
        global_batch_size=10,
        seconds_per_sample=[1, 1],
        fixed_bytes=[0, 0],
        bytes_per_sample=[1, 1],
        capacity_bytes=[100, 3],
    )
    assert plan.batch_shares == (7, 3)
    assert any("would not fit the memory of rank 1" in reason for reason in plan.reasons)


def test_modelled_memory_limits_shares():
    units = [UnitCost(f"blocks.{i}", 10**6, 0, 0, 10**6, 10**4) for i in range(4)]
    memory = shard_memory(units, 2)
    capacity = memory.peak_bytes(6)
    plan = plan_one_group(
        make_cluster("a", "b"),
        global_batch_size=16,
        seconds_per_sample=[1, 3],
        memory=[memory] * 2,
        capacity_bytes=[capacity, 10**9],
    )
    assert plan.batch_shares == (6, 10)
    assert [each.peak_memory_bytes for each in plan.predictions] == [capacity, memory.peak_bytes(10)]


def test_every_rank_takes_a_sample():
    plan = plan_one_group(make_cluster("a", "b"), global_batch_size=8, seconds_per_sample=[1, 1000])
    assert plan.batch_shares == (7, 1)


def test_fewer_samples_than_ranks():
    with pytest.raises(InfeasibleError) as caught:
        plan_one_group(CLUSTER, global_batch_size=3, seconds_per_sample=SECONDS)
    assert "global_batch_size is 3, below 4" in str(caught.value)
    assert "at most 3 ranks" in str(caught.value)


def test_a_batch_that_memory_does_not_hold():
    with pytest.raises(InfeasibleError) as caught:
        plan_one_group(
            CLUSTER,
            global_batch_size=128,
            seconds_per_sample=SECONDS,
            fixed_bytes=[GIB] * 4,
            bytes_per_sample=[GIB / 28] * 4,
        )
    message = str(caught.value)
    assert "global_batch_size is 128, but the memory of all ranks holds 112 samples" in message
    assert "rank 3 (slow on node-slow): 28" in message
    assert "accumulate_grad_batches=2" in message


def test_a_unit_that_fits_no_device():
    units = [UnitCost("embed", 10, 0, 0, 1, 1), UnitCost("blocks.0", 10**9, 0, 0, 1, 1)]
    with pytest.raises(InfeasibleError) as caught:
        plan_one_group(CLUSTER, global_batch_size=8, seconds_per_sample=SECONDS, memory=[shard_memory(units, 4)] * 4)
    problems = str(caught.value).splitlines()[1:]
    assert len(problems) == 4
    # 250 million parameters a rank with 12 bytes of states and 4 of gradient; the whole unit's gradient
    # and the copy of it that is sent, 4 bytes each; a few bytes of the small unit and of activations are within
    # the tolerance.
    needed = 250_000_000 * 16 + 10**9 * 8
    for rank, problem in enumerate(problems):
        assert f"rank {rank} (" in problem
        assert "reduce of unit 'blocks.0', 1 sample" in problem
        assert "2 GiB are free" in problem
        assert "add ranks to share the states" in problem
        missing = int(problem.split(" bytes) are missing")[0].rpartition("(")[2])
        assert missing == pytest.approx(needed - 2 * GIB, rel=1e-6)


def test_a_rank_that_lacks_room_for_one_sample_only():
    with pytest.raises(InfeasibleError) as caught:
        plan_one_group(
            make_cluster("a", "b"),
            global_batch_size=8,
            seconds_per_sample=[1, 1],
            fixed_bytes=[10, 10],
            bytes_per_sample=[5, 5],
            capacity_bytes=[100, 12],
        )
    message = str(caught.value)
    assert "rank 1 (b on node-b) needs 15 B (measured, 1 sample), 12 B are free: 3 B (3 bytes) are missing" in message
    assert "activation checkpointing" in message
    assert "rank 0" not in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"seconds_per_sample": [1.0]}, "seconds_per_sample has 1 entries, cluster 'test' has 4 ranks"),
        ({"fixed_seconds": [1.0] * 5}, "fixed_seconds has 5 entries"),
        ({"fixed_bytes": [1] * 4}, "only one is given"),
        ({"fixed_bytes": [1] * 3, "bytes_per_sample": [1] * 4}, "fixed_bytes has 3 entries"),
        ({"capacity_bytes": [1]}, "capacity_bytes has 1 entries"),
        ({"seconds_per_sample": [0.0] * 4}, "seconds_per_sample[0] is 0.0"),
        ({"global_batch_size": 0}, "global_batch is 0"),
    ],
)
def test_malformed_arguments(arguments, expected):
    with pytest.raises(HeteroError) as caught:
        plan_one_group(CLUSTER, **({"global_batch_size": 8, "seconds_per_sample": SECONDS} | arguments))
    assert expected in str(caught.value)


@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 5)), min_size=1, max_size=6),
    st.integers(6, 5000),
)
def test_never_slower_than_even_and_consistent(ranks, batch):
    seconds, fixed = [each[0] for each in ranks], [each[1] for each in ranks]
    cluster = make_cluster(*(f"t{rank}" for rank in range(len(ranks))))
    plan = plan_one_group(cluster, global_batch_size=batch, seconds_per_sample=seconds, fixed_seconds=fixed)
    plan.validate(cluster)
    count = len(ranks)
    even_s = max(fixed[rank] + seconds[rank] * (batch // count + (rank < batch % count)) for rank in range(count))
    assert plan.predicted_step_s <= even_s
    assert plan.predicted_step_s == max(each.busy_s for each in plan.predictions)
    assert min(each.idle_share for each in plan.predictions) == 0
    assert min(plan.batch_shares) >= 1
