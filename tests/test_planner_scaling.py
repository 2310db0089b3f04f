"""The benchmark of planning time: one small case, in a process of its own, and what it writes."""

import json

from rich.console import Console

from benchmarks.planner_scaling.__main__ import print_results
from benchmarks.planner_scaling.cases import make_case
from benchmarks.planner_scaling.measure import measure
from benchmarks.planner_scaling.planners import PLANNERS


def test_cases_have_three_types_on_nodes_of_eight():
    cluster, costs, training = make_case(1024, 98)
    assert len(cluster.types) == 3
    assert len(cluster.nodes) == 128
    assert (len(costs.units), training.global_batch_size) == (98, 4096)
    assert make_case(4, 26)[0].types == ("large", "middle", "small")


def test_a_case_is_measured():
    assert "pipeline" in PLANNERS
    row = measure("pipeline", 4, 26, 1)
    assert row["predicted_step_s"] >= row["lower_bound_s"] > 0
    assert 0 < row["processor_s"] < 60
    assert row["peak_rss_bytes"] < 10**9
    assert len(row["all_processor_s"]) == 1
    json.dumps(row)
    console = Console(record=True, width=120)
    print_results({"growth": {"pipeline": {"by_devices": [row | {"infeasible": "no"}, row]}}}, console)
    text = console.export_text()
    assert "does not fit" in text
    assert f"{row['predicted_step_s'] / row['lower_bound_s'] - 1:.1%}" in text
