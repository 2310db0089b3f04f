"""What a shard plan says beyond shares and groups: modes, micro-batches, checkpointing, its bound."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import PlanError
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.strategies.loaders import Loaders


def make_plan(**changes):
    plan = ShardPlan(
        global_batch_size=12,
        batch_shares=(5, 2, 1, 4),
        groups=((0, 2), (1, 3)),
        device_types=("fast", "fast", "slow", "slow"),
        predicted_step_s=1.5,
        modes=("FULL_SHARD", "NO_SHARD"),
        micro_batches=(2, 1),
        micro_batch_sizes=(3, 2, 1, 4),
        activation_checkpointing=(True, False, False, True),
        lower_bound_s=1.2,
    )
    return dataclasses.replace(plan, **changes)


def problems_of(plan):
    with pytest.raises(PlanError) as caught:
        plan.validate()
    return str(caught.value).splitlines()[1:]


def test_reads_back_equal(tmp_path):
    make_plan().validate()
    make_plan().save(tmp_path / "plan.json")
    assert ShardPlan.load(tmp_path / "plan.json") == make_plan()


def test_a_plain_plan_has_a_file_as_before():
    plain = ShardPlan(2, (1, 1), ((0, 1),), ("t", "t"))
    known = "schema kind global_batch_size batch_shares groups device_types model reshard_after_forward"
    assert list(plain.to_dict()) == [*known.split(), "predicted_step_s", "predictions", "reasons"]
    assert ShardPlan.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain


def test_what_a_plan_says_of_groups_and_ranks():
    plan = make_plan()
    assert [plan.mode_of(group) for group in (0, 1)] == ["FULL_SHARD", "NO_SHARD"]
    assert [plan.micro_batches_of(group) for group in (0, 1)] == [2, 1]
    assert [plan.group_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [plan.checkpoints(rank) for rank in range(4)] == [True, False, False, True]
    assert [plan.micro_batch_samples(rank) for rank in range(4)] == [(3, 2), (2,), (1, 0), (4,)]
    assert plan.micro_batch_samples(0, samples=4) == (2, 2)
    assert plan.gap == pytest.approx(0.25)
    with pytest.raises(PlanError, match="rank 7 is in no group"):
        plan.group_of(7)


def test_what_a_plain_plan_says():
    plain = ShardPlan(2, (1, 1), ((0, 1),), ("t", "t"), reshard_after_forward=False)
    assert plain.mode_of(0) == "SHARD_GRAD_OP"
    assert dataclasses.replace(plain, reshard_after_forward=True).mode_of(0) == "FULL_SHARD"
    assert plain.micro_batches_of(0) == 1
    assert not plain.checkpoints(1)
    assert plain.gap is None


@given(st.integers(0, 1000), st.integers(1, 40))
def test_micro_batches_are_even_and_large_ones_first(share, count):
    plan = ShardPlan(max(share, 1), (share,), ((0,),), ("t",), micro_batches=(count,))
    samples = plan.micro_batch_samples(0)
    assert sum(samples) == share
    assert len(samples) == count
    assert list(samples) == sorted(samples, reverse=True)
    assert samples[0] - samples[-1] <= 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"modes": ("FULL_SHARD",)}, "modes has 1 entries, groups has 2"),
        ({"modes": ("FULL_SHARD", "HYBRID")}, "modes[1] is 'HYBRID': give one of FULL_SHARD"),
        ({"micro_batches": (2, 1, 1)}, "micro_batches has 3 entries, groups has 2"),
        ({"micro_batches": (2, 0)}, "micro_batches[1] is 0: give 1 or more"),
        ({"micro_batch_sizes": (3, 2, 1)}, "micro_batch_sizes has 3 entries, batch_shares has 4"),
        ({"micro_batch_sizes": (5, 2, 1, 4)}, "micro_batch_sizes[0] is 5: a share of 5 in 2 micro-batches makes 3"),
        ({"activation_checkpointing": (True,)}, "activation_checkpointing has 1 entries"),
    ],
)
def test_faults(changes, expected):
    problems = problems_of(make_plan(**changes))
    assert len(problems) == 1
    assert expected in problems[0]


def test_mode_and_reshard_of_one_group_agree():
    one = {"groups": ((0, 1, 2, 3),), "micro_batches": (1,), "micro_batch_sizes": ()}
    (problem,) = problems_of(make_plan(**one, modes=("SHARD_GRAD_OP",)))
    assert "modes[0] is SHARD_GRAD_OP, reshard_after_forward is true: set it to false" in problem
    make_plan(**one, modes=("SHARD_GRAD_OP",), reshard_after_forward=False).validate()
    make_plan(**one, modes=("NO_SHARD",)).validate()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"modes": "FULL_SHARD"}, "modes: 'FULL_SHARD' is not a list"),
        ({"micro_batches": [0, 1]}, "micro_batches: [0] 0 is not valid"),
        ({"activation_checkpointing": [1, 0, 0, 0]}, "activation_checkpointing: [0] 1 is neither true nor false"),
        ({"lower_bound_s": -1}, "lower_bound_s: -1 is not valid"),
        ({"micro_batch": [1]}, "did you mean 'micro_batches'?"),
    ],
)
def test_bad_files(changes, expected):
    with pytest.raises(PlanError) as caught:
        ShardPlan.from_dict(make_plan().to_dict() | changes)
    assert expected in str(caught.value)


def test_hetero_fsdp_takes_all_that_a_plan_says():
    plan = make_plan()
    loaders = Loaders(SimpleNamespace(plan=plan), None)
    loaders.check_plan(Cluster("c", tuple(Device(kind, "n", 1, None) for kind in plan.device_types)), ModelKey("m", 1))
    assert loaders.global_batch_size == plan.global_batch_size


def test_hetero_fsdp_takes_what_a_plan_for_one_group_says():
    plan = ShardPlan(
        4,
        (3, 1),
        ((0, 1),),
        ("t", "t"),
        modes=("FULL_SHARD",),
        micro_batches=(1,),
        micro_batch_sizes=(3, 1),
        activation_checkpointing=(False, False),
    )
    loaders = Loaders(SimpleNamespace(plan=plan), None)
    loaders.check_plan(Cluster("c", (Device("t", "n", 1, None),) * 2), ModelKey("m", 1))
    assert loaders.global_batch_size == 4
