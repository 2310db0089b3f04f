"""One simulated step: what it is made of, against what plans predict."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_hetero.cluster import Link
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.errors import HeteroError, PlanError
from lightning_hetero.planner.even import even_shard_plan
from lightning_hetero.planner.layout_plan import layout_plan
from lightning_hetero.planner.pipeline import plan_pipeline
from lightning_hetero.planner.shard import plan_shard
from lightning_hetero.planner.sweep import Sweep
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import DeviceConstants
from lightning_hetero.simulator.chrome_trace import simulated_trace, write_trace
from lightning_hetero.simulator.devices_alone import alone_samples_per_s
from lightning_hetero.simulator.simulate import simulate
from tests.calibration_runs import cluster, costs

CLUSTER, COSTS, TRAINING = cluster(), costs(), Training(40)


def plans():
    shards = plan_shard(CLUSTER, COSTS, TRAINING)
    return [shards, even_shard_plan(CLUSTER, COSTS, TRAINING), plan_pipeline(CLUSTER, COSTS, TRAINING)]


@pytest.mark.parametrize("plan", plans(), ids=["hetero_fsdp", "even", "hetero_pipe"])
def test_a_plan_of_the_planner_takes_what_it_predicts(plan):
    step = simulate(plan, CLUSTER, COSTS, TRAINING)
    assert step.step_s == pytest.approx(plan.predicted_step_s, rel=0.01)
    for rank, predicted in zip(step.ranks, plan.predictions, strict=True):
        assert rank.busy_s == pytest.approx(predicted.busy_s, rel=1e-9)
        assert rank.peak_bytes == predicted.peak_memory_bytes


@pytest.mark.parametrize("plan", plans(), ids=["hetero_fsdp", "even", "hetero_pipe"])
def test_the_parts_of_every_rank_sum_to_the_step(plan):
    constants = {kind: DeviceConstants(1.0, None, 0.01, 1e-9, 300.0, 100.0) for kind in CLUSTER.types}
    step = simulate(plan, CLUSTER, COSTS, TRAINING, constants=constants)
    plain = simulate(plan, CLUSTER, COSTS, TRAINING)
    assert step.step_s > plain.step_s + 0.01
    for rank in step.ranks:
        assert rank.busy_s + rank.exposed_s + rank.rest_s + rank.idle_s == pytest.approx(step.step_s)
        assert rank.energy_j == pytest.approx(300 * rank.busy_s + 100 * (step.step_s - rank.busy_s))
    assert step.energy_j == pytest.approx(sum(rank.energy_j for rank in step.ranks))
    assert plain.energy_j is None
    assert "watts of fast, slow are not known" in plain.no_energy
    assert any("take no time" in text for text in plain.assumed)
    assert not any("take no time" in text for text in step.assumed)
    for span in step.spans:
        assert 0 <= span.start_s <= span.end_s <= step.step_s * (1 + 1e-9)


def test_free_links_expose_nothing_and_slow_ones_all_of_their_seconds():
    plan = layout_plan(CLUSTER, COSTS, TRAINING, "NO_SHARD")
    free = simulate(plan, replace(CLUSTER, within_node=None, between_nodes=None), COSTS, TRAINING)
    slow = simulate(plan, replace(CLUSTER, within_node=Link(1e8, 0), between_nodes=Link(1e8, 0)), COSTS, TRAINING)
    assert free.exposed_share == 0
    assert slow.step_s == pytest.approx(free.step_s + slow.ranks[0].exposed_s)


def test_shares_of_a_layout_follow_speed_unless_they_are_to_be_even():
    by_speed = layout_plan(CLUSTER, COSTS, Training(48), "HYBRID_4")
    assert by_speed.batch_shares == (8, 8, 8, 8, 4, 4, 4, 4)
    assert by_speed.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout_plan(CLUSTER, COSTS, Training(48), "HYBRID_4", even=True).batch_shares == (6,) * 8
    checkpointed = layout_plan(CLUSTER, COSTS, Training(48), "SHARD_GRAD_OP", checkpointing=True)
    assert checkpointed.checkpoints(3)
    assert checkpointed.mode_of(0) == "SHARD_GRAD_OP"
    for sharding, expected in (("HYBRID_3", "does not divide 8 ranks"), ("FULL", "is not known")):
        with pytest.raises(HeteroError, match=expected):
            layout_plan(CLUSTER, COSTS, Training(48), sharding)


def test_shares_of_a_layout_stay_within_memory_where_they_can():
    small = replace(CLUSTER.devices[0], memory_bytes=CLUSTER.devices[0].memory_bytes // 4)
    tight = replace(CLUSTER, devices=(small, *CLUSTER.devices[1:]))
    shares = layout_plan(tight, COSTS, Training(12_000), "FULL_SHARD").batch_shares
    assert shares[0] < shares[1]
    step = simulate(layout_plan(tight, COSTS, Training(12_000), "FULL_SHARD"), tight, COSTS, Training(12_000))
    assert step.fits
    plan = layout_plan(tight, COSTS, Training(900_000), "FULL_SHARD")
    assert not simulate(plan, tight, COSTS, Training(900_000)).fits


def test_what_does_not_go_together_is_said_at_once():
    plan = plan_pipeline(CLUSTER, COSTS, TRAINING)
    with pytest.raises(HeteroError) as raised:
        simulate(plan, CLUSTER, costs(300, blocks=5), Training(41))
    for text in ("the costs are of width-300", "its global batch is 40, the training's is 41", "it cuts 8 units"):
        assert text in str(raised.value)
    with pytest.raises(PlanError, match="cluster 'two-kinds' has 4"):
        simulate(plan, cluster(nodes=1), COSTS, TRAINING)


def test_a_trace_has_every_span_and_says_that_nothing_was_run(tmp_path):
    step = simulate(plan_pipeline(CLUSTER, COSTS, TRAINING), CLUSTER, COSTS, TRAINING)
    write_trace(tmp_path / "t.json", simulated_trace(step, "a test"))
    trace = json.loads((tmp_path / "t.json").read_text())
    assert "nothing was run" in trace["otherData"]["label"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(step.spans)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert all(name.startswith("SIMULATED rank") for name in names)
    assert {event["pid"] for event in spans} == {span.rank for span in step.spans}
    assert max(event["ts"] + event["dur"] for event in spans) <= step.step_s * 1e6 * (1 + 1e-9)
    assert len(
        {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    ) == len({(span.rank, span.stream) for span in step.spans})


def overlapping(step):
    """Pairs of spans on one stream of one rank of which the second begins before the first has ended."""
    by_stream = {}
    for span in sorted(step.spans, key=lambda each: each.start_s):
        by_stream.setdefault((span.rank, span.stream), []).append(span)
    return [
        (first, second)
        for own in by_stream.values()
        for first, second in pairwise(own)
        if second.start_s < first.end_s * (1 - 1e-9)
    ]


@pytest.mark.parametrize("sharding", ["HYBRID_4", "HYBRID_2", "NO_SHARD", "hetero_pipe", "hetero_fsdp"])
def test_spans_on_one_stream_do_not_overlap(sharding):
    step = Sweep(global_batch=64).point(CLUSTER, COSTS, sharding).step
    assert step.spans
    assert not overlapping(step)
    if sharding.startswith("HYBRID"):
        assert {"communication", "between groups"} < {span.stream for span in step.spans}


def test_messages_of_a_pipeline_go_from_its_stages_to_the_next_ones():
    plan = plan_pipeline(CLUSTER, COSTS, TRAINING)
    step = simulate(plan, CLUSTER, COSTS, TRAINING)
    sent = Counter((span.rank, span.stream) for span in step.spans if span.stream.startswith("messages"))
    expected = Counter()
    for pipeline in plan.pipelines:
        ranks = [pipeline.rank_of(stage) for stage in range(len(pipeline.stages))]
        for one, other in pairwise(ranks):
            if one != other:
                expected[one, f"messages to rank {other}"] += pipeline.micro_batches
                expected[other, f"messages to rank {one}"] += pipeline.micro_batches
    assert sent == expected


def test_a_rank_with_nothing_to_do_is_not_said_to_do_as_others():
    plan = plan_pipeline(cluster(nodes=1), COSTS, TRAINING)
    wider = replace(plan, device_types=CLUSTER.device_types(), predictions=())
    step = simulate(wider, CLUSTER, COSTS, TRAINING)
    label = simulated_trace(step, "a test")["otherData"]["label"]
    assert label.endswith("4 of 8 ranks are drawn, 4 have nothing to do")
    alike = Sweep(global_batch=64).point(CLUSTER, COSTS, "FULL_SHARD").step
    assert simulated_trace(alike, "a test")["otherData"]["label"].endswith(
        "2 of 8 ranks are drawn, 6 do as one of these"
    )


def test_the_devices_alone_do_not_depend_on_the_plan():
    rate = 4 * 2e12 + 4 * 1e12
    work = sum(unit.forward_flops + unit.backward_flops for unit in COSTS.units)
    sweep = Sweep(global_batch=64, checkpointing=True)
    steps = [
        sweep.point(CLUSTER, COSTS, each).step for each in ("FULL_SHARD", "HYBRID_4", "hetero_pipe", "hetero_fsdp")
    ]
    idle = replace(
        plan_pipeline(cluster(nodes=1), COSTS, TRAINING), device_types=CLUSTER.device_types(), predictions=()
    )
    for step in (*steps, simulate(idle, CLUSTER, COSTS, TRAINING)):
        assert step.alone_samples_per_s == pytest.approx(rate / work)
        assert 0 < step.share_of_alone < 1


def test_the_devices_alone_have_their_fixed_seconds_once():
    unit = COSTS.units[0]
    timings = {"fast": UnitTiming(0.1, 0.01, 0.1, 0.03), "slow": UnitTiming(0.5, 0.1, 1.5, 0.1)}
    measured = ModelCosts("m", (replace(unit, timings=timings),))
    # 4 fast ones: (T - 0.2) / 0.04 samples each; 4 slow ones: (T - 2) / 0.2, once a step takes longer than that.
    assert alone_samples_per_s(CLUSTER, measured, 60) == pytest.approx(60 / (0.2 + 60 * 0.04 / 4))
    long_s = (600 + 4 * (0.2 / 0.04 + 2 / 0.2)) / (4 / 0.04 + 4 / 0.2)
    assert alone_samples_per_s(CLUSTER, measured, 600) == pytest.approx(600 / long_s)


def test_a_sweep_needs_one_batch():
    for batches in ((None, None), (2, 2)):
        with pytest.raises(HeteroError, match="and not both"):
            Sweep(*batches)
    point = Sweep(global_batch=40).point(CLUSTER, COSTS, "HYBRID_3")
    assert point.step is None
    assert point.to_dict()["problem"] == "HYBRID_3 does not divide 8 ranks: give a divisor of 8 as k"
