"""When each rank is to do what: by simulation it is what the planner predicted, and by hand what 1F1B is."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from lightning_hetero.errors import HeteroError
from lightning_hetero.planner import plan_pipeline
from lightning_hetero.planner.planned_stages import pipelines_seconds
from lightning_hetero.simulator.planned_step import PipelineSeconds, by_rank, plan_step
from tests.pipeline_cases import random_case
from tests.report_runs import SECONDS, pipeline_plan, shard_plan


def test_a_shard_plan_computes_then_waits() -> None:
    step = plan_step(shard_plan())
    assert (step.step_s, step.assumed) == (1.0, "")
    found = {rank: [(span.kind, span.start_s, span.end_s) for span in own] for rank, own in by_rank(step).items()}
    assert found == {0: [("compute", 0, 0.8), ("idle", 0.8, 1.0)], 1: [("compute", 0, 0.9), ("idle", 0.9, 1.0)]}


def test_a_pipeline_by_hand() -> None:
    step = plan_step(pipeline_plan(), [SECONDS])
    found = {rank: [(span.name, span.start_s, span.end_s) for span in own] for rank, own in by_rank(step).items()}
    assert found == {
        0: [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        1: [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    }
    assert step.step_s == 9


@pytest.mark.parametrize("seed", range(12))
def test_what_is_drawn_is_what_the_planner_predicted(seed: int) -> None:
    case = random_case(seed)
    try:
        plan = plan_pipeline(*case)
    except HeteroError:
        return  # nothing fits
    step = plan_step(plan, pipelines_seconds(plan, *case))
    for rank, spans in by_rank(step).items():
        busy_s = sum(span.end_s - span.start_s for span in spans)
        assert busy_s == pytest.approx(plan.predictions[rank].busy_s)
        assert all(one.end_s <= two.start_s + 1e-12 for one, two in itertools.pairwise(spans))
    last_s = max(span.end_s for span in step.spans)
    if len(plan.pipelines) == 1:  # no gradients to reduce between pipelines
        assert last_s == pytest.approx(plan.predicted_step_s)
    assert last_s <= step.step_s * (1 + 1e-9)
    assert step.step_s == pytest.approx(plan.predicted_step_s)


def test_a_stage_that_recomputes_takes_its_forward_twice() -> None:
    for seed in range(12):
        case = random_case(seed)
        try:
            plan = plan_pipeline(*case)
        except HeteroError:
            continue  # nothing fits
        first, *others = plan.pipelines
        stages = tuple(replace(stage, activation_checkpointing=True) for stage in first.stages)
        again = replace(plan, pipelines=(replace(first, stages=stages), *others))
        found = pipelines_seconds(again, *case)[0].stages
        plain = tuple(replace(stage, activation_checkpointing=False) for stage in first.stages)
        once = pipelines_seconds(replace(plan, pipelines=(replace(first, stages=plain), *others)), *case)[0].stages
        assert [each.backward_s for each in found] == pytest.approx([each.both_s for each in once])
        assert [each.forward_s for each in found] == [each.forward_s for each in once]
        return
    raise AssertionError("none of the cases has a plan")


def test_without_seconds_a_forward_is_a_third_and_that_is_said() -> None:
    step = plan_step(pipeline_plan())
    assert "a forward is taken as a third" in step.assumed
    assert [(span.name, span.start_s, span.end_s) for span in by_rank(step)[0]] == [
        ("0F0", 0, pytest.approx(1)),
        ("0F1", pytest.approx(1), pytest.approx(2)),
        ("0B0", pytest.approx(4), pytest.approx(6)),
        ("0B1", pytest.approx(7), pytest.approx(9)),
    ]


def test_what_is_written_is_read_and_what_is_wrong_is_named() -> None:
    data = json.loads(json.dumps(SECONDS.to_dict()))
    assert PipelineSeconds.from_dict(data, "x") == SECONDS
    data["stages"][1]["forward_s"] = -1
    data["hop_s"] = []
    with pytest.raises(HeteroError, match=r"x has 2 problems(.|\n)*hop_s(.|\n)*stages\[1\].forward_s|stages\[1\]"):
        PipelineSeconds.from_dict(data, "x")


def test_a_plan_without_predictions_and_seconds_of_another_plan() -> None:
    with pytest.raises(HeteroError, match="the plan predicts no seconds"):
        plan_step(pipeline_plan(predicted=False))
    with pytest.raises(HeteroError, match="seconds of 2 pipelines are given, the plan has 1"):
        plan_step(pipeline_plan(), [SECONDS, SECONDS])
    short = PipelineSeconds(SECONDS.stages[:1], ())
    with pytest.raises(HeteroError, match="pipeline 0: seconds of 1 stages are given, it has 2"):
        plan_step(pipeline_plan(), [short])
