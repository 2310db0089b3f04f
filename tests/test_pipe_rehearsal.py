"""What messages take is found from a rehearsal of a plan's stages, and the plan's step is longer by it."""

from __future__ import annotations

import pytest

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.plan import Pipeline, PipelinePlan, Stage
from lightning_hetero.planner.rehearsed import extra_hop_s, longer_s, with_slower_links
from lightning_hetero.schedule import warmup_depths
from lightning_hetero.simulator.pipeline import StageSeconds, simulate_pipeline
from lightning_hetero.simulator.planned_step import PipelineSeconds


def plan_of(*stages: int, micro_batches: int = 8, schedule: str = "1f1b") -> PipelinePlan:
    """Pipelines of so many stages each, a rank and a unit for each stage."""
    pipelines, ranks = [], 0
    for count in stages:
        depths = warmup_depths(count, micro_batches, 0)
        own = tuple(Stage((index, index + 1), depth) for index, depth in enumerate(depths))
        pipelines.append(Pipeline(tuple(range(ranks, ranks + count)), own, micro_batches))
        ranks += count
    return PipelinePlan(
        sum(each.micro_batches for each in pipelines),
        1,
        tuple(pipelines),
        ("t",) * ranks,
        tuple(str(i) for i in range(max(stages))),
        schedule,
    )


def seconds_of(stages: int, hop_s: float = 0.001) -> PipelineSeconds:
    return PipelineSeconds(tuple(StageSeconds(0.01 * (i + 1), 0.02) for i in range(stages)), (hop_s,) * (stages - 1))


def step_s(plan: PipelinePlan, index: int, seconds: PipelineSeconds, count: int | None = None) -> float:
    return simulate_pipeline(plan.schedule_of(index, count), seconds.stages, seconds.hop_s).step_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_the_seconds_of_a_message_are_found_again(schedule: str) -> None:
    plan, planned, true = plan_of(3, schedule=schedule), seconds_of(3), seconds_of(3, hop_s=0.004)
    found = extra_hop_s(plan, [planned], [1], [step_s(plan, 0, true, 1)])
    assert found == pytest.approx(0.003)
    assert longer_s(plan, [planned], found) == pytest.approx(step_s(plan, 0, true) - step_s(plan, 0, planned))


def test_pipelines_of_one_stage_say_nothing_of_messages() -> None:
    plan = plan_of(2, 1)
    own = [seconds_of(2), seconds_of(1)]
    assert extra_hop_s(plan, own, [1, 1], [step_s(plan, 0, seconds_of(2, 0.003), 1), 9.0]) == pytest.approx(0.002)
    assert extra_hop_s(plan_of(1, 1), [own[1]] * 2, [1, 1], [9.0, 9.0]) == 0.0


def test_a_rehearsal_that_was_faster_than_planned_makes_nothing_shorter() -> None:
    plan, own = plan_of(2), seconds_of(2)
    assert extra_hop_s(plan, [own], [1], [0.0]) == 0.0
    assert longer_s(plan, [own], 0.0) == 0.0


def test_links_that_are_known_become_slower() -> None:
    device = Device("t", "n", 2**30, 1e9)
    found = with_slower_links(Cluster("c", (device, device), within_node=Link(1e9, 0.001)), 0.002)
    assert found.within_node == Link(1e9, 0.003)
    assert found.between_nodes is None
