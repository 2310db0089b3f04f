"""The benchmark of planning time: one small case, in a process of its own, and what it writes."""

import json

import pytest
from rich.console import Console

from benchmarks.planner_scaling.__main__ import DEVICES, PROMISED, UNITS, print_results
from benchmarks.planner_scaling.cases import make_case
from benchmarks.planner_scaling.measure import measure
from benchmarks.planner_scaling.planners import PLANNERS


def test_cases_have_three_types_on_nodes_of_eight():
    cluster, costs, training = make_case(1024, 98)
    assert len(cluster.types) == 3
    assert len(cluster.nodes) == 128
    assert (len(costs.units), training.global_batch_size) == (98, 4096)
    assert make_case(4, 26)[0].types == ("large", "middle", "small")


def test_what_is_promised_is_measured():
    assert PROMISED == (1024, 98)
    assert PROMISED[0] in DEVICES
    assert PROMISED[1] in UNITS
    assert set(PLANNERS) == {"pipeline", "shard"}


@pytest.mark.parametrize("planner", sorted(PLANNERS))
@pytest.mark.parametrize("devices", [4, 8])
def test_the_smallest_clusters_hold_the_model(planner, devices):
    """Those with the least memory by far; of a larger one each rank holds less."""
    case = make_case(devices, PROMISED[1])
    plan = PLANNERS[planner](*case)
    plan.validate(case[0])
    assert plan.predicted_step_s >= plan.lower_bound_s > 0


def test_the_peak_is_that_of_the_plan_and_not_of_what_started_it():
    # Without torch, whose import alone takes more.
    held = bytearray(b"x") * 300_000_000
    row = measure("shard", 4, 26, 2)
    assert 10**7 < row["peak_rss_before_bytes"] <= row["peak_rss_bytes"] < len(held)
    assert row["processor_s"] == min(row["all_processor_s"])
    assert len(row["all_processor_s"]) == 2


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_a_case_is_measured(planner):
    row = measure(planner, 4, 26, 1)
    assert row["predicted_step_s"] >= row["lower_bound_s"] > 0
    assert 0 < row["processor_s"] < 60
    assert row["peak_rss_bytes"] < 10**9
    assert len(row["all_processor_s"]) == 1
    json.dumps(row)
    console = Console(record=True, width=120)
    print_results({"growth": {planner: {"by_devices": [row | {"infeasible": "no"}, row]}}}, console)
    text = console.export_text()
    assert "does not fit" in text
    assert f"{row['predicted_step_s'] / row['lower_bound_s'] - 1:.1%}" in text
