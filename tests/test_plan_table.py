"""Plans as tables: every rank's part is there, beside the even plan."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.plan import ModelKey, PipelinePlan, ShardPlan
from lightning_hetero.plan.common import RankPrediction
from lightning_hetero.plan.stages import Pipeline, Stage
from lightning_hetero.report.plan_table import mean_idle, plan_lines, plan_table

GIB = 2**30
DEVICES = tuple(
    Device(kind, node, 80 * GIB, 1e12) for kind, node in (("H100", "a"), ("H100", "a"), ("A100", "b"), ("A100", "c"))
)
CLUSTER = Cluster("mixed", DEVICES)
TYPES = CLUSTER.device_types()
FAST, SLOW = RankPrediction(0.9, 0.1, 3 * GIB), RankPrediction(1.0, 0.0, 2 * GIB)
SHARD = ShardPlan(
    12,
    (4, 4, 2, 2),
    ((0, 1), (2, 3)),
    TYPES,
    ModelKey("vit", 10),
    predicted_step_s=1.0,
    predictions=(FAST, FAST, SLOW, SLOW),
    lower_bound_s=0.8,
)
EVEN = replace(
    SHARD,
    batch_shares=(3, 3, 3, 3),
    groups=((0, 1, 2, 3),),
    predicted_step_s=1.5,
    predictions=(RankPrediction(0.75, 0.5, GIB),) * 2 + (RankPrediction(1.5, 0.0, None),) * 2,
)
PIPE = PipelinePlan(
    12,
    2,
    (Pipeline((2, 0), (Stage((0, 1), 2), Stage((1, 4), 1, True)), 4), Pipeline((1,), (Stage((0, 4)),), 2)),
    TYPES,
    ("embed", "blocks.0", "blocks.1", "head"),
    predicted_step_s=2.0,
)


def shown(table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=250, highlight=False).print(table)
    return out.getvalue().splitlines()


def row(lines, *texts):
    """Cells of the only line that has all of ``texts``."""
    (line,) = [line for line in lines if all(text in line for text in texts)]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_shard_plan():
    lines = shown(plan_table(SHARD, CLUSTER))
    assert lines[0].strip() == "hetero_fsdp of vit on mixed, global batch 12 samples"
    assert row(lines, "H100") == ["0 to 1", "a", "H100", "0", "2", "FULL_SHARD", "4", "900 ms", "10.0 %", "3 GiB"]
    # neighbours of one type that do the same share a line, on whatever node
    assert row(lines, "A100") == ["2 to 3", "b to c", "A100", "1", "2", "FULL_SHARD", "2", "1 s", "0.0 %", "2 GiB"]


def test_beside_the_even_plan():
    lines = shown(plan_table(SHARD, CLUSTER, EVEN))
    assert row(lines, "H100")[10:] == ["3", "50.0 %", "1 GiB"]
    assert row(lines, "A100")[-1] == "-"


def test_what_differs_from_rank_to_rank_has_its_own_line():
    plan = replace(SHARD, batch_shares=(5, 3, 2, 2), micro_batches=(2, 1), activation_checkpointing=(True, False) * 2)
    lines = shown(plan_table(plan, CLUSTER))
    first, second, third, fourth = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines[4:8])
    assert first[:9] == ["0", "a", "H100", "0", "2", "FULL_SHARD", "5", "2", "yes"]
    assert second[:9] == ["1", "a", "H100", "0", "2", "FULL_SHARD", "3", "2", "-"]
    assert (third[8], fourth[8]) == ("yes", "-")


def test_a_pipeline_plan():
    lines = shown(plan_table(PIPE, replace(CLUSTER, emulate=True)))
    assert "2 pipelines, 1f1b, micro-batches of 2, emulated devices" in lines[0]
    assert row(lines, "blocks.0 to head (3)")[:3] == ["0", "a", "H100"]
    assert row(lines, "blocks.0 to head (3)")[3:] == ["0", "1", "blocks.0 to head (3)", "4", "1", "yes"]
    assert row(lines, "embed to head (4)")[3:5] == ["1", "0"]
    assert row(lines, " embed  ")[0] == "2"
    assert row(lines, "idle")[:6] == ["3", "c", "A100", "idle", "-", "-"]


def test_a_pipeline_plan_beside_the_even_one():
    even = replace(
        PIPE,
        pipelines=(Pipeline((0, 1, 2, 3), tuple(Stage((i, i + 1)) for i in range(4)), 6),),
        predictions=(FAST, FAST, SLOW, SLOW),
    )
    assert row(shown(plan_table(PIPE, CLUSTER, even)), "idle", "A100")[-3:] == ["1", "0.0 %", "2 GiB"]


def test_lines_against_the_even_plan_and_the_bound():
    step, even, bound = plan_lines(SHARD, EVEN)
    assert step == "step time 1 s, throughput 12 samples/s, idle share 5.0 %"
    assert even.endswith("throughput 8 samples/s, idle share 25.0 %: this plan is 1.50 x as fast")
    assert bound.endswith("below 800 ms: this one is 25.0 % above that bound")
    assert mean_idle(PIPE) is None
    assert plan_lines(PIPE) == [
        "step time 2 s, throughput 6 samples/s, idle share -",
        "no even plan fits the memory of these devices",
    ]


def test_more_devices_than_units_have_no_even_pipeline():
    plan = replace(PIPE, device_types=TYPES * 2)
    assert plan_lines(plan)[1] == "there is no even plan: 8 devices and 4 units"


@pytest.mark.parametrize("size", [1, 8, 1024])
def test_a_large_cluster_stays_readable(size):
    ranks = 1024
    devices = tuple(Device("H100" if rank < 512 else "A100", f"n{rank // 8}", GIB, 1e12) for rank in range(ranks))
    groups = tuple(tuple(range(first, first + size)) for first in range(0, ranks, size))
    kinds = tuple(device.type for device in devices)
    plan = ShardPlan(ranks, (1,) * ranks, groups, kinds, predictions=(FAST,) * ranks)
    lines = shown(plan_table(plan, Cluster("large", devices)))
    assert len(lines) < 10
    group = {1: "512 to 1023", 8: "64 to 127", 1024: "0"}[size]
    assert row(lines, "A100")[:5] == ["512 to 1023", "n64 to n127", "A100", group, str(size)]
