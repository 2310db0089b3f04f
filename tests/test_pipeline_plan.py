"""Pipeline plans as data: written, read, and checked with every problem listed."""

import dataclasses
import json

import pytest

from lightning_hetero import PipelinePlan
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import PlanError
from lightning_hetero.plan import ModelKey, Pipeline, RankPrediction, Stage
from lightning_hetero.schedule import interleaved_1f1b, one_f_one_b

NAMES = ("embed", "b0", "b1", "b2", "head")


def make_plan(**changes):
    plan = PipelinePlan(
        global_batch_size=31,
        micro_batch_size=4,
        pipelines=(
            Pipeline((2, 0), (Stage((0, 3), 3, True), Stage((3, 5), 1)), 6),
            Pipeline((1,), (Stage((0, 5), 1),), 2),
        ),
        device_types=("fast", "fast", "slow", "slow"),
        unit_names=NAMES,
        schedule="1f1b",
        model=ModelKey("vit", 1000),
        predicted_step_s=1.5,
        lower_bound_s=1.25,
        predictions=(RankPrediction(1.0, 0.2, 5), RankPrediction(1.25, 0.0)) * 2,
        reasons=("because",),
    )
    return dataclasses.replace(plan, **changes)


def with_stages(*units, ranks=(0, 1), micro_batches=8, **more):
    stages = tuple(Stage(each) for each in units)
    return make_plan(pipelines=(Pipeline(ranks, stages, micro_batches),), **more)


def problems_of(plan, **against):
    with pytest.raises(PlanError) as caught:
        plan.validate(**against)
    return str(caught.value).splitlines()[1:]


def make_cluster(*types):
    return Cluster("c", tuple(Device(kind, "n", 1, None) for kind in types))


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        make_plan(model=None, predicted_step_s=None, lower_bound_s=None, predictions=(), reasons=()),
        with_stages((0, 1), (1, 2), (2, 4), (4, 5), schedule="interleaved_1f1b"),
        with_stages((0, 1), (1, 5), schedule="zero_bubble"),
    ],
)
def test_reads_back_equal(tmp_path, plan):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert PipelinePlan.load(path) == plan
    written = json.loads(path.read_text())
    assert (written["schema"], written["kind"]) == (1, "pipeline")


def test_what_follows_from_it():
    plan = make_plan()
    assert plan.world_size == 4
    assert plan.idle_ranks == (3,)
    assert plan.gap == pytest.approx(0.2)
    assert make_plan(lower_bound_s=None).gap is None
    assert plan.schedule_of(0) == one_f_one_b(2, 6, (3, 1))
    assert [plan.owners(unit) for unit in (0, 4)] == [(2, 1), (0, 1)]
    interleaved = with_stages((0, 1), (1, 2), (2, 4), (4, 5), schedule="interleaved_1f1b")
    assert interleaved.schedule_of(0) == interleaved_1f1b(2, 2, 8)
    assert interleaved.pipelines[0].stages_of(1) == (1, 3)
    assert interleaved.pipelines[0].stages_of(3) == ()
    assert interleaved.owners(2) == (0,)


def test_a_good_plan_validates():
    make_plan().validate(make_cluster("fast", "fast", "slow", "slow"), ModelKey("other name", 1000), NAMES)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (with_stages((0, 2), (3, 5)), "stages[1].units begins with unit 3: unit 2 before it belong to no stage"),
        (with_stages((0, 3), (2, 5)), "stages[1].units begins with unit 2: unit 2 belong to a stage before it"),
        (with_stages((0, 3), (1, 5)), "begins with unit 1: units 1 to 2 belong to a stage before it"),
        (with_stages((1, 3), (3, 5)), "stages[0].units begins with unit 1: unit 0 before it"),
        (with_stages((0, 3), (3, 4)), "stages end before unit 4: unit 4 belong to no stage"),
        (with_stages((0, 3), (3, 6)), "stages go on to unit 5, the model's last one is 4"),
        (with_stages((0, 5), (5, 5)), "stages[1].units is [5, 5], which holds no unit"),
        (with_stages((0, 5)), "has 1 stages on 2 ranks"),
        (with_stages((0, 5), ranks=()), "ranks is empty"),
        (with_stages(), "stages is empty"),
        (with_stages((0, 2), (2, 5), ranks=(1, 1)), "rank 1 is used 2 times"),
        (with_stages((0, 2), (2, 5), ranks=(1, 4)), "rank 4 is used, device_types has ranks 0 to 3"),
        (with_stages((0, 1), (1, 2), (2, 4), (4, 5)), "only interleaved_1f1b takes more"),
        (
            with_stages((0, 2), (2, 5), micro_batches=7),
            "run 7 micro-batches of 4 samples, a global batch of 31 makes 8",
        ),
        (make_plan(schedule="2f2b"), "schedule is '2f2b': give one of gpipe"),
        (make_plan(pipelines=()), "pipelines is empty"),
        (make_plan(micro_batch_size=0), "micro_batch_size is 0"),
        (make_plan(predictions=(RankPrediction(1, 0),)), "predictions has 1 entries"),
        (make_plan(pipelines=(Pipeline((0, 1), (Stage((0, 2), 1), Stage((2, 5), 2)), 8),)), "wait for ever"),
        (make_plan(pipelines=(Pipeline((0,), (Stage((0, 5), 9),), 8),)), "warmup of stage 0 is 9: give 1 to 8"),
        (
            make_plan(schedule="zero_bubble", pipelines=(Pipeline((0,), (Stage((0, 5), 1, True),), 8),)),
            "has activation_checkpointing, which zero_bubble",
        ),
        (
            with_stages(*((u, u + 1) for u in range(5)), ranks=(0,), schedule="interleaved_1f1b", unit_names=NAMES[:4]),
            "has 5 stages, the model has 4 units: use at most 4",
        ),
        (
            with_stages(
                (0, 1),
                (1, 3),
                (3, 5),
                ranks=(0, 1, 2),
                schedule="interleaved_1f1b",
                micro_batches=7,
                global_batch_size=28,
            ),
            "7 micro-batches do not fill 2 equal rounds",
        ),
    ],
)
def test_faults_of_the_plan_itself(plan, expected):
    found = problems_of(plan)
    assert any(expected in problem for problem in found), found


def test_every_problem_is_listed():
    plan = make_plan(
        global_batch_size=100,
        pipelines=(Pipeline((0, 0), (Stage((0, 2), 1), Stage((3, 5), 1)), 6), Pipeline((9,), (Stage((1, 4)),), 0)),
    )
    found = problems_of(plan, cluster=make_cluster("fast"), model=ModelKey("m", 1), unit_names=("a",))
    for part in (
        "run 6 micro-batches of 4 samples, a global batch of 100 makes 25",
        "rank 0 is used 2 times",
        "rank 9 is used",
        "pipelines[0].stages[1].units begins with unit 3",
        "pipelines[1].stages[0].units begins with unit 1",
        "pipelines[1].stages end before unit 4",
        "pipelines[1].micro_batches is 0",
        "for 4 ranks, cluster 'c' has 1",
        "vit with 1000 parameters, this is m with 1",
        "unit_names has 5 units, the model has 1",
    ):
        assert any(part in problem for problem in found), part
    assert len(found) == 10


def test_faults_against_cluster_and_model():
    found = problems_of(make_plan(), cluster=make_cluster("fast", "slow", "slow", "slow"))
    (problem,) = found
    assert "device_types[1] is 'fast', rank 1 of cluster 'c' is 'slow': make a new plan" in problem
    (problem,) = problems_of(make_plan(), unit_names=("embed", "b0", "x", "b2", "head"))
    assert "unit_names[2] is 'b1', unit 2 of the model is 'x'" in problem


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d.update(schema=2), "schema: is 2"),
        (lambda d: d.update(kind="shard"), "kind: is 'shard'"),
        (lambda d: d.update(pipeline=[]), "unknown key 'pipeline': did you mean 'pipelines'?"),
        (lambda d: d.update(pipelines=[]), "pipelines: is []"),
        (lambda d: d["pipelines"][0].pop("ranks"), "pipelines[0]: key 'ranks' is missing"),
        (lambda d: d["pipelines"][1].update(ranks=["x"]), "pipelines[1].ranks: [0] 'x' is not valid"),
        (lambda d: d["pipelines"][0]["stages"][1].update(units=[3]), "stages[1].units: is [3]: give the first unit"),
        (lambda d: d["pipelines"][0]["stages"][1].update(units=[3, "4"]), "stages[1].units: [1] '4' is not valid"),
        (lambda d: d["pipelines"][0]["stages"][0].update(warmup=0), "stages[0].warmup: 0 is not valid"),
        (lambda d: d["pipelines"][0].update(stages=3), "pipelines[0].stages: is 3"),
        (lambda d: d["pipelines"][0].update(micro_batches=5), "run 7 micro-batches"),
    ],
)
def test_bad_files_name_place_and_value(tmp_path, change, expected):
    path = tmp_path / "plan.json"
    data = make_plan().to_dict()
    data = json.loads(json.dumps(data))
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        PipelinePlan.load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
