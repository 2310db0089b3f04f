"""Shard plans as data: written, read, checked, and split for short batches."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import PlanError
from lightning_hetero.plan import ModelKey, RankPrediction, ShardPlan


def make_plan(**changes):
    plan = ShardPlan(
        global_batch_size=12,
        batch_shares=(5, 2, 1, 4),
        groups=((0, 1, 2, 3),),
        device_types=("fast", "fast", "slow", "slow"),
        model=ModelKey("vit", 1000),
        reshard_after_forward=False,
        predicted_step_s=1.25,
        predictions=(RankPrediction(1.0, 0.2, 5), RankPrediction(1.25, 0.0)) * 2,
        reasons=("because",),
    )
    return dataclasses.replace(plan, **changes)


def make_cluster(*types):
    return Cluster("c", tuple(Device(kind, "n", 1, None) for kind in types))


def problems_of(plan, **against):
    with pytest.raises(PlanError) as caught:
        plan.validate(**against)
    return str(caught.value).splitlines()[1:]


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        make_plan(model=None, predicted_step_s=None, predictions=(), reasons=()),
        make_plan(groups=((0, 2), (1, 3))),
        make_plan(batch_shares=(12, 0, 0, 0)),
    ],
)
def test_reads_back_equal(tmp_path, plan):
    path = tmp_path / "plans" / "plan.json"
    plan.save(path)
    assert ShardPlan.load(path) == plan
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"]
    written = json.loads(path.read_text())
    assert written["schema"] == 1
    assert written["kind"] == "shard"


def test_lists_become_tuples():
    assert make_plan(batch_shares=[5, 2, 1, 4], groups=[[0, 1, 2, 3]]) == make_plan()


def test_optional_keys_have_defaults():
    data = {
        key: make_plan().to_dict()[key]
        for key in ("schema", "kind", "global_batch_size", "batch_shares", "groups", "device_types")
    }
    plan = ShardPlan.from_dict(data)
    assert plan == ShardPlan(12, (5, 2, 1, 4), ((0, 1, 2, 3),), ("fast", "fast", "slow", "slow"))
    assert plan.reshard_after_forward


def test_a_good_plan_validates():
    cluster = make_cluster("fast", "fast", "slow", "slow")
    make_plan().validate(cluster, ModelKey("another name for it", 1000))
    make_plan(model=None).validate(cluster, ModelKey("any", 7))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_shares": (5, 2, 1, 5)}, "batch_shares sum to 13, global_batch_size is 12"),
        ({"batch_shares": (5, 2, -1, 6)}, "batch_shares[2] is -1"),
        ({"global_batch_size": 0, "batch_shares": (0, 0, 0, 0)}, "global_batch_size is 0"),
        ({"groups": ((0, 1), (2,))}, "groups lack rank 3"),
        ({"groups": ((0, 1, 2), (2, 3))}, "groups hold rank 2 2 times"),
        ({"groups": ((0, 1, 2, 3, 4),)}, "groups hold rank 4, batch_shares has 4 ranks (0 to 3)"),
        ({"groups": ((0, 1, 2, 3), ())}, "groups[1] is empty"),
        ({"device_types": ("fast",)}, "device_types has 1 entries, batch_shares has 4"),
        ({"predictions": (RankPrediction(1.0, 0.0),)}, "predictions has 1 entries"),
    ],
)
def test_faults_of_the_plan_itself(changes, expected):
    problems = problems_of(make_plan(**changes))
    assert len(problems) == 1
    assert expected in problems[0]


def test_faults_against_the_cluster():
    problems = problems_of(make_plan(), cluster=make_cluster("fast", "slow", "slow", "fast"))
    assert len(problems) == 2
    assert "device_types[1] is 'fast', rank 1 of cluster 'c' is 'slow'" in problems[0]
    assert "device_types[3]" in problems[1]
    (problem,) = problems_of(make_plan(), cluster=make_cluster("fast", "fast"))
    assert "for 4 ranks, cluster 'c' has 2" in problem


def test_faults_against_the_model():
    (problem,) = problems_of(make_plan(), model=ModelKey("gpt", 999))
    assert "vit with 1000 parameters, this is gpt with 999" in problem
    assert 'plan="auto"' in problem


def test_all_faults_at_once():
    plan = make_plan(batch_shares=(5, 2, 1, 5), groups=((0, 1, 2),))
    problems = problems_of(plan, cluster=make_cluster("fast", "slow"), model=ModelKey("m", 1))
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema": 2}, "schema: is 2: this version reads schema 1"),
        ({"kind": "pipeline"}, "kind: is 'pipeline'"),
        ({"batch_share": [1]}, "unknown key 'batch_share': did you mean 'batch_shares'?"),
        ({"global_batch_size": "12"}, "global_batch_size: '12' is not valid: write a whole number >= 1"),
        ({"batch_shares": [5, 2, 1.5, 4]}, "batch_shares: [2] 1.5 is not valid"),
        ({"batch_shares": 12}, "batch_shares: 12 is not a list"),
        ({"groups": [[0, 1, 2, True]]}, "groups: [0] [3] True is not valid"),
        ({"device_types": ["fast", "fast", 3, "slow"]}, "device_types: [2] 3 is not a text"),
        ({"reshard_after_forward": 1}, "reshard_after_forward: 1 is neither true nor false"),
        ({"model": {"name": "m"}}, "model: key 'parameters' is missing"),
        ({"model": "m"}, "model: is 'm', not a mapping"),
        ({"predicted_step_s": -1}, "predicted_step_s: -1 is not valid"),
        ({"predictions": [{"busy_s": 1, "idle_share": 2}] * 4}, "predictions[0].idle_share: 2 is not valid"),
        ({"batch_shares": [5, 2, 1, 5]}, "batch_shares sum to 13"),
    ],
)
def test_bad_files_name_place_and_value(tmp_path, changes, expected):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(make_plan().to_dict() | changes))
    with pytest.raises(PlanError) as caught:
        ShardPlan.load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_bad_file_lists_all_problems():
    with pytest.raises(PlanError) as caught:
        ShardPlan.from_dict({"schema": 9, "kind": "shard", "global_batch_size": 0, "groups": [], "grups": 1})
    message = str(caught.value)
    assert message.startswith("plan has 5 problems")
    for part in ("schema", "global_batch_size: 0", "'batch_shares' is missing", "'device_types'", "'grups'"):
        assert part in message


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "schema: 1"])
def test_not_json(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json is not JSON: .* line 1"):
        ShardPlan.load(path)


def test_json_that_is_no_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[1]")
    with pytest.raises(PlanError, match=r"is \[1\], not a mapping"):
        ShardPlan.load(path)


def test_missing_file(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json does not exist"):
        ShardPlan.load(tmp_path / "nowhere.json")


def test_short_batches():
    plan = make_plan()
    assert plan.samples(12) == (5, 2, 1, 4)
    assert plan.samples(0) == (0, 0, 0, 0)
    assert plan.samples(6) == (3, 1, 0, 2)  # 2.5, 1, 0.5, 2: the largest share takes the tied remainder
    assert plan.samples(1) == (1, 0, 0, 0)


@pytest.mark.parametrize("count", [-1, 13])
def test_batches_that_are_not_short(count):
    with pytest.raises(PlanError, match=f"a batch of {count} samples .* global batch of 12"):
        make_plan().samples(count)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.data())
def test_short_batches_are_whole_and_proportional(shares, data):
    total = sum(shares)
    plan = ShardPlan(total, tuple(shares), (tuple(range(len(shares))),), ("t",) * len(shares))
    count = data.draw(st.integers(0, total))
    split = plan.samples(count)
    assert sum(split) == count
    for samples, share in zip(split, shares, strict=True):
        assert 0 <= samples <= share
        assert abs(samples - count * share / total) < 1
