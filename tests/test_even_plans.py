"""The even plans that are shown are those that the searches compare with."""

import random
from dataclasses import replace

import pytest

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.planner.even import even_pipeline_plan, even_shard_plan
from lightning_hetero.planner.pipeline import search_pipeline
from lightning_hetero.planner.shard import search_shard
from lightning_hetero.planner.training import Training

KINDS = ("a", "b", "c")


def problem(seed: int) -> tuple[Cluster, ModelCosts, Training]:
    """A random cluster of up to four devices, a model of up to seven units and a batch."""
    draw = random.Random(seed)
    devices = tuple(Device(draw.choice(KINDS), f"n{rank // 2}", 2**33, 1e12) for rank in range(draw.randint(2, 4)))
    cluster = Cluster("c", devices, Link(draw.uniform(1e9, 1e11), 1e-5), Link(draw.uniform(1e8, 1e10), 1e-5))
    units = []
    for index in range(draw.randint(4, 7)):
        timings = {kind: UnitTiming(*(draw.uniform(1e-4, 1e-2) for _ in range(4))) for kind in KINDS}
        size = draw.randint(10_000, 1_000_000)
        units.append(UnitCost(f"u{index}", size, 1e9, 2e9, 10 * size, size, timings, is_block=index > 0))
    return cluster, ModelCosts("m", tuple(units)), Training(draw.randint(8, 40))


@pytest.mark.parametrize("seed", range(8))
def test_the_shard_plan_is_that_of_the_search(seed):
    cluster, costs, training = problem(seed)
    even = even_shard_plan(cluster, costs, training)
    even.validate(cluster)
    search = search_shard(cluster, costs, training, explain=False)
    assert max(even.batch_shares) - min(even.batch_shares) <= 1
    assert even.predicted_step_s == pytest.approx(search.even.predicted_step_s)
    assert search.plan.predicted_step_s <= even.predicted_step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_the_pipeline_plan_is_that_of_the_search(seed):
    cluster, costs, training = problem(seed)
    cluster = replace(cluster, devices=cluster.devices[:3])  # a search that explains itself plans many times
    even = even_pipeline_plan(cluster, costs, training)
    even.validate(cluster)
    (pipeline,) = even.pipelines
    counts = [last - first for first, last in (stage.units for stage in pipeline.stages)]
    assert max(counts) - min(counts) <= 1
    search = search_pipeline(cluster, costs, training)
    assert even.predicted_step_s == pytest.approx(search.even_step_s)
    assert search.plan.predicted_step_s <= even.predicted_step_s * (1 + 1e-9)


def test_without_memory_there_is_no_even_pipeline_but_its_shard_plan_says_what_it_needs():
    cluster, costs, training = problem(0)
    small = replace(cluster, devices=tuple(replace(device, memory_bytes=1000) for device in cluster.devices))
    assert even_pipeline_plan(small, costs, training) is None
    assert min(each.peak_memory_bytes for each in even_shard_plan(small, costs, training).predictions) > 1000
    many = replace(cluster, devices=cluster.devices[:1] * 9)
    assert even_pipeline_plan(many, costs, training) is None
