"""Plans of given groups by what ranks measured: micro-batches where memory is what limits, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import InfeasibleError
from lightning_hetero.plan import even_parts
from lightning_hetero.planner.measured import MeasuredRanks, OncePerStep, plan_measured
from lightning_hetero.planner.one_group import plan_one_group

FAST_SMALL = MeasuredRanks(
    seconds_per_sample=(1.0, 1.0, 2.0, 2.0),
    fixed_seconds=(0.0,) * 4,
    fixed_bytes=(100,) * 4,
    bytes_per_sample=(10.0,) * 4,
    accumulating_bytes=(20,) * 4,
)
ONE, PAIRS = ((0, 1, 2, 3),), ((0, 1), (2, 3))


def cluster(*memories: int) -> Cluster:
    return Cluster("c", tuple(Device(f"d{i}", "n", memory, 1e9) for i, memory in enumerate(memories)))


def planned(ranks: MeasuredRanks, memories: tuple[int, ...], groups=ONE, batch: int = 48, **options):
    modes = options.pop("modes", ("FULL_SHARD",) * len(groups))
    return plan_measured(cluster(*memories), ranks, global_batch_size=batch, groups=groups, modes=modes, **options)


def test_with_memory_enough_it_is_the_plan_of_one_micro_batch():
    found = planned(FAST_SMALL, (10_000,) * 4)
    assert found.batch_shares == (16, 16, 8, 8)
    assert found.micro_batches == ()
    assert found.predicted_step_s == 16


def test_small_memory_makes_more_and_smaller_micro_batches():
    # 170 bytes hold 7 samples at once, 5 beside the gradients of earlier ones
    found = planned(FAST_SMALL, (170, 170, 10_000, 10_000))
    assert found.batch_shares == (16, 16, 8, 8)
    assert found.micro_batches == (4,)
    assert found.micro_batch_sizes == (4, 4, 2, 2)
    assert [each.peak_memory_bytes for each in found.predictions] == [160, 160, 140, 140]
    assert any("4 micro-batches" in reason for reason in found.reasons)
    found.validate(cluster(170, 170, 10_000, 10_000))


def test_the_first_micro_batch_adds_to_no_gradients():
    """Of 15 samples in 2 parts, 8 come first, without earlier gradients; 7 then, with 20 bytes of them."""
    ranks = MeasuredRanks((1.0, 1.0), (0.0, 0.0), (100, 100), (10.0, 10.0), (2, 20))
    found = planned(ranks, (185, 10_000), ((0, 1),), 30)
    assert (found.batch_shares, found.micro_batches) == ((15, 15), (2,))
    assert [each.peak_memory_bytes for each in found.predictions] == [180, 190]


def test_groups_have_numbers_of_their_own():
    found = planned(FAST_SMALL, (170, 170, 10_000, 10_000), PAIRS)
    assert found.micro_batches == (4, 1)
    assert found.micro_batch_sizes == (4, 4, 8, 8)


def test_a_micro_batch_costs_what_it_measured_beside_computing():
    free = planned(FAST_SMALL, (170, 170, 10_000, 10_000))
    dear = planned(replace(FAST_SMALL, overhead_s=(0.5,) * 4), (170, 170, 10_000, 10_000))
    too_dear = planned(replace(FAST_SMALL, overhead_s=(100.0,) * 4), (170, 170, 10_000, 10_000))
    assert free.predicted_step_s == 16
    assert dear.predicted_step_s == pytest.approx(16 + 4 * 0.5)
    assert too_dear.micro_batches == ()
    assert too_dear.batch_shares == (7, 7, 17, 17)
    assert too_dear.predicted_step_s == pytest.approx(34 + 100)


def test_groups_have_what_their_own_micro_batches_take():
    """A rank alone has nobody to wait for; the step is that of the slower group with its own communication."""
    found = planned(replace(FAST_SMALL, overhead_s=(1.0, 1.0, 3.0, 3.0)), (10_000,) * 4, PAIRS)
    assert found.batch_shares == (16, 16, 8, 8)
    assert found.predicted_step_s == 16 + 3
    assert [each.busy_s for each in found.predictions] == [16] * 4


def test_what_a_step_takes_once_is_counted_once():
    once = OncePerStep(crossing_s=2.0, optimizer_s=0.5, input_s_per_sample=0.25)
    ranks = replace(FAST_SMALL, overhead_s=(0.125,) * 4, once=once)
    plain = planned(ranks, (10_000,) * 4)
    assert plain.predicted_step_s == 16 + 0.125 + 2 + 0.5 + 0.25 * 16
    assert plain.predictions[0].idle_share == pytest.approx(1 - 16 / plain.predicted_step_s)
    split = planned(ranks, (170, 170, 10_000, 10_000))
    assert split.micro_batches == (4,)
    assert split.predicted_step_s == 16 + 4 * 0.125 + 2 + 0.5 + 0.25 * 16
    assert "communication and Python 500 ms, gradients between groups 2 s, optimizer 500 ms, input 4 s" in " ".join(
        split.reasons
    )


def test_an_optimizer_that_was_not_measured_is_said():
    found = planned(replace(FAST_SMALL, once=OncePerStep(optimizer_s=None)), (10_000,) * 4)
    assert found.predicted_step_s == 16
    assert "optimizer's step could not be measured" in found.reasons[-1]


def test_a_batch_that_does_not_fit_at_once_is_cut():
    tight = (170,) * 4
    with pytest.raises(InfeasibleError, match="memory of all ranks holds 28"):
        planned(FAST_SMALL, tight, micro_batches=False)
    found = planned(FAST_SMALL, tight)
    assert found.batch_shares == (16, 16, 8, 8)
    assert found.micro_batches == (4,)


def test_a_rank_that_holds_no_sample_is_refused_as_ever():
    with pytest.raises(InfeasibleError, match=r"rank 0 .* are missing"):
        planned(FAST_SMALL, (105, 10_000, 10_000, 10_000))


def test_modes_and_groups_are_in_the_plan():
    found = planned(FAST_SMALL, (10_000,) * 4, PAIRS, modes=("SHARD_GRAD_OP", "NO_SHARD"))
    assert (found.groups, found.modes, found.reshard_after_forward) == (PAIRS, ("SHARD_GRAD_OP", "NO_SHARD"), False)
    assert "2 shard groups" in found.reasons[0]
    alone = planned(FAST_SMALL, (10_000,) * 4, modes=("NO_SHARD",))
    assert alone.mode_of(0) == "NO_SHARD"
    alone.validate()


def test_replicas_wait_for_nobody_within_a_step():
    # of 15 and 7 samples in 3 micro-batches, 5, 5, 5 and 3, 2, 2: in a group, the second is the slower one once
    ranks = MeasuredRanks((1.0, 2.0), (0.0, 0.0), (100, 100), (10.0, 10.0))
    together, apart = (
        planned(ranks, (150, 10_000), ((0, 1),), 22, modes=(mode,)) for mode in ("FULL_SHARD", "NO_SHARD")
    )
    assert (
        (together.batch_shares, together.micro_batches) == (apart.batch_shares, apart.micro_batches) == ((15, 7), (3,))
    )
    assert (together.predicted_step_s, apart.predicted_step_s) == (16, 15)


RANKS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(100, 400), st.integers(1, 30)), min_size=4, max_size=4
)


@given(RANKS, st.integers(4, 200), st.sampled_from([ONE, PAIRS, ((0,), (1, 2, 3))]), st.integers(0, 20))
def test_every_micro_batch_fits_and_none_is_worse_than_one(ranks, batch, groups, beside):
    measured = MeasuredRanks(
        tuple(float(r[0]) for r in ranks),
        tuple(float(r[1]) for r in ranks),
        (90,) * 4,
        tuple(float(r[3]) for r in ranks),
        (5,) * 4,
        (beside / 10,) * 4,
    )
    devices = cluster(*(r[2] for r in ranks))
    try:
        found = planned(measured, tuple(r[2] for r in ranks), groups, batch)
    except InfeasibleError:
        # only where a rank cannot hold a sample at all, with or without gradients of earlier ones
        assert any(r[2] < 90 + 5 + r[3] for r in ranks)
        return
    found.validate(devices)
    for rank, r in enumerate(ranks):
        count = found.micro_batches_of(found.group_of(rank))
        size = -(-found.batch_shares[rank] // count)
        assert 90 + (5 if count > 1 else 0) + r[3] * size <= r[2]
        busy = r[1] * count + r[0] * found.batch_shares[rank]
        assert busy + beside / 10 * count <= found.predicted_step_s * (1 + 1e-9)
    if found.micro_batches:
        # ranks that shard wait for each other in every micro-batch
        marching = 0.0
        for group, count in zip(found.groups, found.micro_batches, strict=True):
            sizes = {rank: even_parts(found.batch_shares[rank], count) for rank in group}
            seconds = [max(ranks[r][1] + ranks[r][0] * max(1, sizes[r][k]) for r in group) for k in range(count)]
            marching = max(marching, sum(seconds) + beside / 10 * count)
        assert found.predicted_step_s == pytest.approx(marching)
    try:
        plain = plan_one_group(
            devices,
            global_batch_size=batch,
            seconds_per_sample=measured.seconds_per_sample,
            fixed_seconds=measured.fixed_seconds,
            fixed_bytes=measured.fixed_bytes,
            bytes_per_sample=measured.bytes_per_sample,
        )
    except InfeasibleError:
        return
    assert found.predicted_step_s <= plain.predicted_step_s + beside / 10 + 1e-9
