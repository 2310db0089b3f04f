"""Set-up of 1,024 ranks as data: who is where, who owns what, what each holds and writes; no torch, no devices."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.scale.cases import PipelineCase, ShardCase, pipeline_cases, shard_cases
from benchmarks.scale.compare import PipelineSetUp, ShardSetUp
from benchmarks.scale.order import stuck
from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.errors import HeteroError, PlanError
from lightning_hetero.membership.groups import groups_of
from lightning_hetero.membership.holdings import owned_elements, padded_elements, shard_checkpoint
from lightning_hetero.membership.parameters import OUTSIDE, ParameterShape, parameters_of_costs, shapes_by_unit
from lightning_hetero.membership.shards import ShardMembership
from lightning_hetero.schedule import FORWARD
from lightning_hetero.simulator.pipeline import StageSeconds, simulate_pipeline
from lightning_hetero.simulator.pipeline_actions import PipelineTraffic

RANKS = 1024
WIDTH, DEPTH = 96, 4


def transformer(blocks: int = DEPTH) -> tuple[ParameterShape, ...]:
    """Parameters like a ViT's: one of a single row, rows that divide by no group's size, many more rows than ranks."""
    found = [
        ParameterShape("positions", "embed", (1, 17, WIDTH)),
        ParameterShape("embed.weight", "embed", (1000, WIDTH), ("head",), names=2),
    ]
    for index in range(blocks):
        unit = f"blocks.{index}"
        shapes = {"norm": (WIDTH,), "up": (4 * WIDTH + 5, WIDTH), "up_bias": (4 * WIDTH + 5,), "down": (WIDTH, 389)}
        found += [ParameterShape(f"{unit}.{name}", unit, shape) for name, shape in shapes.items()]
    return (*found, ParameterShape("norm.weight", "norm", (WIDTH,)))


def costs(blocks: int = DEPTH) -> ModelCosts:
    names = ("embed", *(f"blocks.{index}" for index in range(blocks)), "norm", "head")
    sizes = Counter(dict.fromkeys(names, 0))
    for each in transformer(blocks):
        sizes[each.unit] += each.elements
    return ModelCosts(
        "t", tuple(UnitCost(name, sizes[name], 0, 0, 0, 1000, is_block=name.startswith("blocks")) for name in names)
    )


SHARDS = {case.name: case for case in shard_cases()}
# two stages a rank take longest: a quarter of the ranks
PIPELINES = {case.name: case for case in (*pipeline_cases()[:2], *pipeline_cases(nodes=32)[2:])}
ELEMENTS = sum(each.elements for each in transformer())


def of_pipeline(case: PipelineCase) -> tuple[tuple[ParameterShape, ...], ModelCosts]:
    blocks = len(case.plan.unit_names) - 3
    return (*transformer(blocks), ParameterShape("temperature", OUTSIDE, (1,))), costs(blocks)


@pytest.mark.parametrize("case", SHARDS.values(), ids=SHARDS)
def test_every_row_is_owned_once_in_each_replica(case: ShardCase) -> None:
    membership = ShardMembership.of_plan(case.plan)
    replicas = [set(replica) for replica in membership.replicas]
    pieces = membership.ownership(transformer()).pieces
    for parameter in transformer():
        own = pieces[parameter.name]
        assert own[0].start == 0
        assert own[-1].stop == parameter.elements
        assert all(left.stop == right.start for left, right in pairwise(own))
    checked = {piece.owners for own in pieces.values() for piece in own}
    for owners in checked:
        assert [len(replica & set(owners)) for replica in replicas] == [1] * len(replicas)
        assert len(owners) == len(replicas)


@pytest.mark.parametrize("case", SHARDS.values(), ids=SHARDS)
def test_process_groups_are_those_that_ranks_need(case: ShardCase) -> None:
    setup = ShardSetUp(case, transformer(), costs())
    membership, groups = setup.membership, setup.groups
    assert groups[0].ranks == tuple(range(RANKS))
    for rank in (0, 7, 100, 511, 512, 530, 1023):
        own = groups_of(rank, groups)
        needed = {part.ranks for part in setup.traffic(rank)}
        assert needed <= {group.ranks for group in own}
        assert all(rank in part for part in needed)
        if len(membership.replicas) > 1:
            assert [g.ranks for g in own if g.purpose == "shard"] == [membership.replica_of(rank)]
    for purpose in ("shard", "replicate"):  # nobody is in two of these
        members = Counter(rank for group in groups if group.purpose == purpose for rank in group.ranks)
        assert set(members.values()) <= {1}
    assert all(group.ranks == tuple(sorted(set(group.ranks))) for group in groups)


@pytest.mark.parametrize("case", SHARDS.values(), ids=SHARDS)
def test_what_a_replica_holds_and_writes_is_the_model(case: ShardCase) -> None:
    setup = ShardSetUp(case, transformer(), costs())
    for replica in setup.membership.replicas:
        held = [setup.holdings[rank] for rank in replica]
        assert sum(each.elements for each in held) == ELEMENTS
        assert sum(each.gradient_bytes for each in held) == 4 * ELEMENTS
        assert sum(each.optimizer_bytes for each in held) == 8 * ELEMENTS
        assert len({each.parameter_bytes for each in held}) == 1
        assert sum(each.parameter_bytes for each in held) >= 4 * ELEMENTS
    tied = 1000 * WIDTH  # the file has it under both of its names
    expected = 4 * (ELEMENTS + tied) + 8 * ELEMENTS
    assert sum(part.size_bytes for part in setup.checkpoint) == expected
    (one,) = shard_checkpoint(setup.membership, transformer(), one_file=True)
    assert (one.writers, one.size_bytes) == ((0,), expected)
    writers = {rank for part in setup.checkpoint for rank in part.writers}
    first = set(range(RANKS)) if not setup.membership.crosses else set(setup.membership.replica_of(0))
    assert writers <= first
    assert len(setup.checkpoint) <= len(setup.membership.replica_of(0))


def test_a_parameter_of_one_row_is_padded_to_a_row_for_each_rank() -> None:
    parameters = [ParameterShape("positions", "embed", (1, 17, WIDTH)), ParameterShape("w", "b", (2048, 3))]
    assert owned_elements(parameters, 8).tolist() == [17 * WIDTH + 768, *[768] * 7]
    assert padded_elements(parameters, 8) == 17 * WIDTH + 768
    assert padded_elements(parameters, 1024) * 1024 == 1024 * 17 * WIDTH + 2048 * 3


def test_without_shapes_units_are_cut_by_elements() -> None:
    parameters = parameters_of_costs(costs())
    assert sum(each.elements for each in parameters) == ELEMENTS
    membership = ShardMembership(((0, 1, 2), (3, 4)))
    assert owned_elements(parameters, 3).sum() == ELEMENTS
    assert {len(piece.owners) for own in membership.ownership(parameters).pieces.values() for piece in own} == {2}
    assert shapes_by_unit(parameters)["blocks.0"] == ((costs().units[1].parameters,),)


def test_a_rank_that_is_not_there_is_named() -> None:
    with pytest.raises(PlanError, match="rank 5 is in no group: there are ranks 0 to 4"):
        ShardMembership(((0, 1, 2), (3, 4))).replica_of(5)


@pytest.mark.parametrize(
    ("replicas", "may_wait", "native"),
    [
        (((0, 1), (2, 3)), True, True),
        (((0, 1), (2, 3)), False, False),
        (((0, 1), (2, 3, 4)), True, False),
        (((0,), (1,)), True, False),
        (((0, 1),), True, False),
    ],
)
def test_fsdp2_reduces_across_groups_by_itself_where_they_are_a_rectangle(
    replicas: tuple[tuple[int, ...], ...], may_wait: bool, native: bool
) -> None:
    membership = ShardMembership(replicas, may_wait)
    assert membership.is_native == native
    assert membership.crosses == (len(replicas) > 1 and not native)


@pytest.mark.parametrize("case", PIPELINES.values(), ids=PIPELINES)
def test_every_pipeline_holds_the_model_once(case: PipelineCase) -> None:
    parameters, _ = of_pipeline(case)
    setup = PipelineSetUp(case, *of_pipeline(case))
    tied, outside = 1000 * WIDTH, 1
    whole = sum(each.elements for each in parameters)
    for pipeline in case.plan.pipelines:
        held = sum(setup.holdings[rank].elements for rank in pipeline.ranks)
        shared = tied if len({pipeline.rank_of(0), pipeline.rank_of(len(pipeline.stages) - 1)}) > 1 else 0
        assert held == whole + shared + outside * (len(pipeline.ranks) - 1)
    assert all(setup.holdings[rank].elements == outside for rank in case.plan.idle_ranks)
    # rank 0 has the first stage, and what is outside; the others' part is sent to it
    own = 12 * setup.holdings[0].elements + 4 * tied
    assert setup.file.size_bytes == 12 * whole + 4 * tied
    assert sum(setup.sent_bytes.values()) == setup.file.size_bytes - own
    assert set(setup.sent_bytes) <= set(case.plan.pipelines[0].ranks)


@pytest.mark.parametrize("case", PIPELINES.values(), ids=PIPELINES)
def test_pipelines_sum_with_all_that_have_the_same(case: PipelineCase) -> None:
    parameters, _ = of_pipeline(case)
    setup = PipelineSetUp(case, *of_pipeline(case))
    groups = {group.ranks for group in setup.groups if group.purpose == "owners"}
    summed = {
        part.ranks for rank in range(case.plan.world_size) for part in setup.traffic(rank) if part.kind == "all_reduce"
    }
    assert summed == groups
    for parameter in parameters:
        owners = set(setup.membership.owners_of(parameter))
        assert all(owners & set(pipeline.ranks) for pipeline in case.plan.pipelines)


@pytest.mark.parametrize("case", shard_cases(nodes=16), ids=lambda case: case.name)
def test_collectives_of_groups_end_whatever_waits(case: ShardCase) -> None:
    assert ShardSetUp(case, transformer(), costs()).stuck() == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDS.values(), ids=SHARDS)
def test_collectives_of_1024_ranks_end_whatever_waits(case: ShardCase) -> None:
    assert ShardSetUp(case, transformer(), costs()).stuck() == ""


@pytest.mark.parametrize("case", PIPELINES.values(), ids=PIPELINES)
def test_sums_and_messages_end_whatever_waits(case: PipelineCase) -> None:
    """Two stages a rank and two cuts: stages end in another order on ranks that sum the same parameters."""
    assert PipelineSetUp(case, *of_pipeline(case)).stuck() == ""


@pytest.mark.parametrize("case", PIPELINES.values(), ids=PIPELINES)
def test_messages_are_those_that_the_simulator_times(case: PipelineCase) -> None:
    setup = PipelineSetUp(case, *of_pipeline(case))
    for index in (0, len(case.plan.pipelines) - 1):
        pipeline = case.plan.pipelines[index]
        stages = [StageSeconds(1.0, 2.0)] * len(pipeline.stages)
        timeline = simulate_pipeline(case.plan.schedule_of(index), stages, [0.5] * (len(stages) - 1)).timeline
        simulated = Counter(name[0] for name in timeline.names if isinstance(name, tuple))
        sent = [action for rank in pipeline.ranks for action in setup.actions(rank) if action.kind == "send"]
        assert sum(simulated.values()) == len(sent) > 0
        ways = Counter((action.stage, action.micro_batch, action.kind == FORWARD) for action in simulated.elements())
        assert ways == Counter((action.stage, action.micro_batch, action.forward) for action in sent)


def test_orders_that_wait_for_ever_are_found() -> None:
    assert stuck({0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(0, 2), (1, 2)]}) == ""
    assert stuck({0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}).startswith("rank 0 waits in its")
    assert "for 1" in stuck({0: [(0, 1)], 1: []})


def test_costs_of_other_units_are_refused() -> None:
    case = PIPELINES["8 stages, two cuts"]
    setup = PipelineSetUp(case, *of_pipeline(case))
    with pytest.raises(HeteroError, match=r"the costs have units embed, blocks.0, blocks.1, ... \(7\), the plan"):
        PipelineTraffic(setup.membership, transformer(), costs())


def test_computing_takes_seconds() -> None:
    """Of the largest case; some 0.2 s on an idle core."""
    begin_s = time.process_time()
    ShardSetUp(SHARDS["groups of 8 and 16"], transformer(32), costs(32))
    assert time.process_time() - begin_s < 5
