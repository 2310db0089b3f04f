"""What a rank does in a step of a shard plan: order, partners and bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.errors import HeteroError
from lightning_hetero.membership.shards import ShardMembership
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.shard_actions import CROSS, SHARD, shard_actions

ELEMENTS = StateBytes(1, 1, 1, 1, 1)

SHAPES = {
    "embed": [(8, 8), (8,)],
    **{f"b{i}": [(16, 8), (16,), (8, 16), (8,)] for i in range(3)},
    "head": [(4, 8), (4,)],
}
COUNTS = {"embed": 72, "b0": 280, "b1": 280, "b2": 280, "head": 36}
COSTS = ModelCosts(
    "m", tuple(UnitCost(name, count, 1, 2, 0, 0, is_block=name[0] == "b") for name, count in COUNTS.items())
)


def plan_of(groups, mode="FULL_SHARD", **more) -> ShardPlan:
    ranks = sum(map(len, groups))
    reshards = mode == "FULL_SHARD"
    return ShardPlan(
        ranks, (1,) * ranks, groups, ("x",) * ranks, reshard_after_forward=reshards, modes=(mode,) * len(groups), **more
    )


def collectives(plan, rank=0, **more):
    """Kind, unit, elements and number of ranks of each."""
    found = shard_actions(plan, COSTS, rank, **{"state": ELEMENTS, "shapes": SHAPES} | more)
    return [(a.kind, a.unit, a.size_bytes, len(a.ranks)) for a in found if a.is_collective]


def gather(unit, size=280, ranks=4):
    return ("all_gather", unit, size, ranks)


def scatter(unit, size=280, ranks=4):
    return ("reduce_scatter", unit, size, ranks)


# These lists were recorded from the strategy's own set-up (torch 2.14) on a fake process group of 4 ranks: a model of
# an embedding, three blocks of two linear layers and a head.
FORWARD = [gather("root", 108), gather("b0"), gather("b1"), gather("b2")]
RECORDED = {
    "FULL_SHARD": [
        *FORWARD,
        *(gather("root", 108), gather("b2"), gather("b1"), scatter("b2"), gather("b0"), scatter("b1"), scatter("b0")),
        scatter("root", 108),
    ],
    "SHARD_GRAD_OP": [*FORWARD, scatter("b2"), scatter("b1"), scatter("b0"), scatter("root", 108)],
    "NO_SHARD": [*(("all_reduce", f"b{i}", 284, 4) for i in (2, 1, 0)), ("all_reduce", "root", 112, 4)],
}


@pytest.mark.parametrize("mode", RECORDED)
def test_one_group_is_what_was_recorded(mode):
    assert collectives(plan_of([(0, 1, 2, 3)], mode)) == RECORDED[mode]


def test_groups_of_equal_size_are_what_was_recorded():
    expected = [gather(unit, size, 2) for unit, size in (("root", 108), ("b0", 280), ("b1", 280), ("b2", 280))]
    expected += [gather("root", 108, 2), gather("b2", 280, 2), gather("b1", 280, 2)]
    for unit, ahead in (("b2", "b0"), ("b1", None), ("b0", None)):
        expected += [scatter(unit, 280, 2), ("all_reduce", unit, 140, 2)]
        expected += [gather(ahead, 280, 2)] if ahead else []
    expected += [scatter("root", 108, 2), ("all_reduce", "root", 54, 2)]
    assert collectives(plan_of([(0, 1), (2, 3)])) == expected


def test_groups_of_unequal_size_are_what_was_recorded():
    # rank 0 holds the model alone, and shares it with each of the three others
    found = collectives(plan_of([(0,), (1, 2, 3)]))
    assert found == [
        ("all_reduce", unit, size, 2)
        for unit, sizes in (
            ("b2", (109, 109, 74)),
            ("b1", (109, 109, 74)),
            ("b0", (109, 109, 74)),
            ("root", (49, 49, 20)),
        )
        for size in sizes
    ]


@pytest.mark.parametrize("groups", [[(0, 1), (2, 3, 4)], [(0,), (1, 2, 3)], [(3, 1), (0, 2, 4, 5, 6)]])
def test_partners_agree_on_every_collective(groups):
    plan = plan_of(groups)
    lists = {}
    for rank in range(plan.world_size):
        for action in shard_actions(plan, COSTS, rank, state=ELEMENTS, shapes=SHAPES):
            if action.is_collective:
                key = (action.kind, action.unit, action.size_bytes)
                lists.setdefault((action.ranks, action.stream), {}).setdefault(rank, []).append(key)
    for (ranks, _), by_rank in lists.items():
        assert set(by_rank) == set(ranks)  # all who are named take part
        assert len({tuple(each) for each in by_rank.values()}) == 1  # in one order, with one size


@pytest.mark.parametrize("groups", [[(0, 1), (2, 3, 4)], [(0,), (1, 2, 3)], [(0, 1, 2, 3, 4, 5, 6), (7, 8)]])
def test_what_crosses_is_each_element_once(groups):
    plan, costs = plan_of(groups), ModelCosts("m", COSTS.units[:-1])
    for replica in ShardMembership.of_plan(plan).replicas:
        elements = 0
        for rank in replica:
            found = shard_actions(plan, costs, rank, state=ELEMENTS)
            # each unit is one parameter, and travels with a number beside each run of it
            elements += sum(action.size_bytes - 1 for action in found if action.stream == CROSS)
        assert elements == costs.parameters


def test_nothing_waits_for_what_comes_later_and_streams_are_apart():
    for prefetch in ("BACKWARD_PRE", "BACKWARD_POST", "NONE"):
        for limit in (1, 2, 3, False):
            options = {"backward_prefetch": prefetch, "limit_all_gathers": limit}
            actions = shard_actions(plan_of([(0, 1), (2, 3, 4)], options=options), COSTS, 2)
            for index, action in enumerate(actions):
                assert all(before < index for before in action.after)
                assert all(actions[before].stream != action.stream for before in action.after)
            kinds = [(a.kind, a.unit) for a in actions]
            assert len([k for k in kinds if k[0] == "all_gather"]) == 8
            assert kinds[-1] == ("optimizer", "")


def test_prefetch_moves_gathers_before_or_behind_reductions():
    def backward(prefetch, limit=None):
        options = {"backward_prefetch": prefetch} | ({} if limit is None else {"limit_all_gathers": limit})
        found = shard_actions(plan_of([(0, 1)], options=options), COSTS, 0)
        start = next(i for i, a in enumerate(found) if a.kind == "backward")
        names = {"all_gather": "g", "reduce_scatter": "r", "backward": "B"}
        return " ".join(names[a.kind] + a.unit[1:] for a in found[start:-1] if a.unit[0] == "b")

    assert backward("BACKWARD_PRE") == "g2 g1 B2 r2 g0 B1 r1 B0 r0"
    assert backward("BACKWARD_POST") == "g2 B2 g1 r2 B1 g0 r1 B0 r0"
    assert backward("NONE") == "g2 B2 r2 g1 B1 r1 g0 B0 r0"
    assert backward("BACKWARD_PRE", 1) == backward("NONE")  # one in flight leaves no room for another
    assert backward("BACKWARD_PRE", 3) == "g2 g1 g0 B2 r2 B1 r1 B0 r0"
    assert backward("BACKWARD_PRE", False) == "g2 g1 g0 B2 r2 B1 r1 B0 r0"


def test_accumulation_reduces_in_the_group_each_time_and_crosses_once():
    found = shard_actions(plan_of([(0, 1), (2, 3)], micro_batches=(3, 3)), COSTS, 0)
    assert [a.micro_batch for a in found if a.kind == "reduce_scatter" and a.unit == "b0"] == [0, 1, 2]
    assert [a.micro_batch for a in found if a.kind == "all_reduce" and a.unit == "b0"] == [2]
    fsdp1 = shard_actions(plan_of([(0, 1), (2, 3)], micro_batches=(3, 3)), COSTS, 0, execution=Execution("fsdp1"))
    assert [a.micro_batch for a in fsdp1 if a.kind == "reduce_scatter" and a.unit == "b0"] == [2]  # no_sync


def test_fsdp1_pads_a_flat_parameter_and_keeps_the_root():
    fsdp1 = Execution(engine="fsdp1")
    found = collectives(plan_of([(0, 1, 2)]), execution=fsdp1)
    assert found.count(gather("root", 108, 3)) == 1  # 72 + 36
    assert found.count(gather("b1", 282, 3)) == 2  # 280, to a multiple of 3
    padded = 18 * 8 + 18 + 9 * 16 + 9  # FSDP2: each parameter to whole rows
    assert gather("b1", padded, 3) in collectives(plan_of([(0, 1, 2)]))
    reduced = collectives(plan_of([(0, 1, 2)], "NO_SHARD"), execution=fsdp1)
    assert [each for each in reduced if each[1] == "b1"] == [("all_reduce", "b1", 280, 3)]
    streams = {a.stream for a in shard_actions(plan_of([(0, 1, 2)], "NO_SHARD"), COSTS, 0, execution=fsdp1)}
    assert streams == {"compute", SHARD}


def test_fsdp1_limits_gathers_where_blocks_are_freed():
    for mode, limited in (("FULL_SHARD", True), ("SHARD_GRAD_OP", False)):
        found = shard_actions(plan_of([(0, 1)], mode), COSTS, 0, execution=Execution(engine="fsdp1"))
        last = next(a for a in found if a.kind == "all_gather" and a.unit == "b2")
        assert [found[before].unit for before in last.after] == (["b0"] if limited else [])


def test_bytes_follow_the_types():
    wide = StateBytes(parameter=4, gradient=4, optimizer=8, gathered=2, reduced=8)
    found = {
        (kind, unit): size for kind, unit, size, _ in collectives(plan_of([(0, 1), (2, 3)]), state=wide) if unit == "b0"
    }
    assert found == {("all_gather", "b0"): 560, ("reduce_scatter", "b0"): 2240, ("all_reduce", "b0"): 1120}
    crossing = collectives(plan_of([(0,), (1, 2, 3)]), state=wide)
    assert crossing[0] == ("all_reduce", "b2", 4 * 109, 2)


def test_bad_values_are_all_named():
    with pytest.raises(
        HeteroError, match=r"engine is 'ddp'.*\n.*backward_prefetch is 'no'.*\n.*limit_all_gathers is 0"
    ):
        Execution("ddp", "no", limit_all_gathers=0)


def test_actions_read_well():
    found = shard_actions(plan_of([(0, 1)], micro_batches=(2,)), COSTS, 0)
    assert str(found[0]) == "all_gather root"
    assert "backward b1 #1" in map(str, found)
    assert str(found[-1]) == "optimizer #1"


@pytest.fixture(scope="module")
def of_fsdp1():
    """What FullyShardedDataParallel does on 8 ranks, recorded in a process of its own."""
    script = Path(__file__).parent / "fsdp1_recording.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_1", "HYBRID_2", "HYBRID_4"])
def test_fsdp1_is_what_is_recorded(of_fsdp1, mode):
    # three blocks of 72 parameters and a root of 36
    units = [*(UnitCost(f"b{i}", 72, 1, 2, 0, 0) for i in range(3)), UnitCost("head", 36, 1, 2, 0, 0, is_block=False)]
    size = int(mode[7:]) if mode.startswith("HYBRID") else 8
    plan = plan_of(
        [tuple(range(start, start + size)) for start in range(0, 8, size)],
        "FULL_SHARD" if mode.startswith("HYBRID") else mode,
    )
    found = shard_actions(plan, ModelCosts("m", tuple(units)), 0, state=ELEMENTS, execution=Execution(engine="fsdp1"))
    expected = [(a.kind, a.size_bytes, len(a.ranks)) for a in found if a.is_collective]
    # over one rank nothing is sent: this is all that is left of HYBRID_1
    recorded = [tuple(each) for each in of_fsdp1[mode] if each[2] > 1]
    assert sorted(recorded) == sorted(expected)
    reductions = [each for each in recorded if each[0] != "all_gather"]
    assert reductions == [each for each in expected if each[0] != "all_gather"]
    assert (mode == "HYBRID_1") == (not recorded)
