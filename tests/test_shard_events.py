"""The event simulation of shard plans, against the closed form and by hand."""

import dataclasses
import random
import time

import pytest

from lightning_hetero.cluster import Cluster, Device, Fabric, Link
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.comm import Network, spread_of
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.shard_events import Overheads, simulate_shard
from lightning_hetero.simulator.shard_prediction import predict_shard
from lightning_hetero.simulator.topology import Topology

STATE = StateBytes()
LINK = Link(1e9, 1e-3)


def cluster_of(*types: str, per_node: int = 8, within: Link = LINK, between: Link | None = None) -> Cluster:
    devices = tuple(Device(kind, f"n{rank // per_node}", 2**40, None) for rank, kind in enumerate(types))
    return Cluster("c", devices, within, between)


def model_of(parameters: list[int], roots: tuple[int, int] | None = None) -> ModelCosts:
    units = [UnitCost(f"b{i}", count, 1.0, 2.0, 100, 10) for i, count in enumerate(parameters)]
    if roots is not None:
        first, last = roots
        units = [
            UnitCost("embed", first, 1.0, 2.0, 100, 10, is_block=False),
            *units,
            UnitCost("head", last, 1.0, 2.0, 100, 10, is_block=False),
        ]
    return ModelCosts("m", tuple(units))


def timings_of(costs: ModelCosts, seconds: dict[str, float]) -> dict[str, tuple[UnitTiming, ...]]:
    return {kind: tuple(UnitTiming(0.0, each, 0.0, 2 * each) for _ in costs.units) for kind, each in seconds.items()}


def plan_of(cluster: Cluster, groups: list[list[int]], mode: str = "FULL_SHARD", share: int = 2, **more) -> ShardPlan:
    shares = more.pop("shares", (share,) * cluster.world_size)
    return ShardPlan(
        sum(shares),
        shares,
        groups,
        cluster.device_types(),
        reshard_after_forward=mode == "FULL_SHARD",
        modes=(mode,) * len(groups),
        **more,
    )


@pytest.mark.parametrize("seconds", [1e-4, 5e-3, 0.5])  # communication, nothing, compute is what limits
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_equals_the_closed_form_where_that_is_exact(seconds, micro_batches):
    # one group in a node, all units blocks, one after the other as slow as the slowest rank
    cluster = cluster_of("a", "a", "b", "b")
    costs = model_of([4_000_000] * 6)
    timings = timings_of(costs, {"a": seconds, "b": 2 * seconds})
    plan = plan_of(cluster, [[0, 1, 2, 3]], shares=(9, 9, 6, 6), micro_batches=(micro_batches,))
    simulated = simulate_shard(plan, cluster, costs, timings, STATE)
    predicted = predict_shard(plan, cluster, costs, timings, STATE)
    assert simulated.step_s == pytest.approx(predicted.step_s, rel=1e-9)
    assert simulated.busy_s == pytest.approx(predicted.busy_s, rel=1e-9)
    assert tuple(peak.size_bytes for peak in simulated.peaks) == predicted.peak_bytes


def random_case(seed: int):
    chance = random.Random(seed)
    ranks = chance.randint(2, 8)
    cluster = cluster_of(*(chance.choice("ab") for _ in range(ranks)))
    order = list(range(ranks))
    cuts = sorted(chance.sample(range(1, ranks), chance.randint(0, min(2, ranks - 1))))
    groups = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, ranks], strict=True)]
    roots = (chance.randint(1, 10**6), chance.randint(1, 10**6)) if chance.random() < 0.5 else None
    costs = model_of([chance.randint(10**5, 10**7) for _ in range(chance.randint(1, 7))], roots)
    timings = timings_of(costs, {"a": 10 ** chance.uniform(-4, -1), "b": 10 ** chance.uniform(-4, -1)})
    plan = plan_of(
        cluster,
        groups,
        chance.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        shares=tuple(chance.randint(1, 6) for _ in range(ranks)),
        micro_batches=tuple(chance.randint(1, 3) for _ in groups),
    )
    return plan, cluster, costs, timings


@pytest.mark.parametrize("seed", range(60))
def test_is_within_the_bounds_of_the_closed_form(seed):
    plan, cluster, costs, timings = random_case(seed)
    simulated = simulate_shard(plan, cluster, costs, timings, STATE)
    predicted = predict_shard(plan, cluster, costs, timings, STATE)
    # FSDP2 gathers the root's parameters again for backward, which the closed form leaves out
    root = sum(unit.parameters for unit in costs.units if not unit.is_block) * STATE.gathered
    gathers = [Network.of(cluster).all_gather_s(root, spread_of(cluster, group)) for group in plan.groups]
    again = max(plan.micro_batches) * max(gathers)
    # and it has one crossing of the whole model, where each unit crosses by itself, with latencies of its own
    lanes = dict(zip(map(str, simulated.timeline.resource_names), simulated.timeline.busy_s, strict=True))
    crossing = sum(busy for name, busy in lanes.items() if name.endswith("cross"))
    assert crossing >= predicted.crossing_s * (1 - 1e-6)
    # padding to whole rows per rank
    assert simulated.step_s <= (max(predicted.group_s) + again + crossing) * (1 + 1e-3)
    assert simulated.step_s >= max(predicted.busy_s) * (1 - 1e-9)
    assert simulated.busy_s == pytest.approx(predicted.busy_s, rel=1e-9)
    for busy, exposed in zip(simulated.busy_s, simulated.exposed_s, strict=True):
        assert busy + exposed == pytest.approx(simulated.step_s)
        assert exposed >= -1e-12


def test_prefetch_orders_the_step_by_what_it_hides():
    # 4 blocks; a gather and a reduction of 40 ms beside 100 ms of forward and 200 of backward
    cluster = cluster_of("a", "a", within=Link(1e9, 0.0))
    costs = model_of([20_000_000] * 4)
    timings = timings_of(costs, {"a": 0.05})
    step_s = {
        when: simulate_shard(
            plan_of(cluster, [[0, 1]], options={"backward_prefetch": when}), cluster, costs, timings, STATE
        ).step_s
        for when in ("BACKWARD_PRE", "BACKWARD_POST", "NONE")
    }
    compute, gather = 4 * 0.3, 0.04
    ends = 3 * gather  # the first gather of each pass, and the last reduction
    assert step_s["BACKWARD_PRE"] == pytest.approx(compute + ends)
    assert step_s["BACKWARD_POST"] == pytest.approx(compute + ends + 3 * gather)
    assert step_s["NONE"] == pytest.approx(compute + ends + 3 * 2 * gather)


def test_blocking_collectives_hide_nothing_in_forward_unless_asked_for():
    cluster = cluster_of("a", "a", within=Link(1e9, 0.0))
    costs, plan = model_of([20_000_000] * 4), plan_of(cluster, [[0, 1]])
    timings = timings_of(costs, {"a": 0.05})
    hidden = simulate_shard(plan, cluster, costs, timings, STATE).step_s
    blocking = simulate_shard(plan, cluster, costs, timings, STATE, execution=Execution(blocking=True)).step_s
    explicit = Execution(blocking=True, forward_prefetch=True)
    assert blocking == pytest.approx(hidden + 3 * 0.04)
    assert simulate_shard(plan, cluster, costs, timings, STATE, execution=explicit).step_s == pytest.approx(hidden)


def test_more_gathers_in_flight_help_where_units_are_unequal():
    # a block with little compute before one with many parameters: gathered two ahead, the large one is hidden
    cluster = cluster_of("a", "a", within=Link(1e9, 0.0))
    costs = model_of([100_000, 100_000, 40_000_000, 100_000])
    timings = {"a": tuple(UnitTiming(0.0, s, 0.0, 2 * s) for s in (0.1, 0.001, 0.1, 0.1))}
    times = [
        simulate_shard(
            plan_of(cluster, [[0, 1]], "SHARD_GRAD_OP", share=1, options={"limit_all_gathers": limit}),
            cluster,
            costs,
            timings,
            STATE,
        ).step_s
        for limit in (1, 2, 3, False)
    ]
    assert times[0] > times[1] > times[2] == pytest.approx(times[3])


def test_overheads():
    cluster, costs = cluster_of("a", "b"), model_of([1000, 1000])
    timings = timings_of(costs, {"a": 0.1, "b": 0.1})
    plan = plan_of(cluster, [[0, 1]], share=1)
    plain = simulate_shard(plan, cluster, costs, timings, STATE)
    slow = Overheads(optimizer_s_per_parameter={"b": 1e-4})
    optimizer = simulate_shard(plan, cluster, costs, timings, STATE, overheads=slow)
    assert optimizer.step_s == pytest.approx(plain.step_s + 1000 * 1e-4)  # half of 2,000
    assert optimizer.exposed_s[0] == pytest.approx(optimizer.exposed_s[1] + 1000 * 1e-4)
    reading = simulate_shard(plan, cluster, costs, timings, STATE, overheads=Overheads(input_s_per_sample=2.0))
    assert reading.step_s == pytest.approx(2.0)  # hidden up to the step's own seconds
    hidden = simulate_shard(plan, cluster, costs, timings, STATE, overheads=Overheads(input_s_per_sample=0.2))
    assert hidden.step_s == pytest.approx(plain.step_s)
    # two gathers and a reduction of two units, each of 4,000 bytes of which a rank sends half
    lost = simulate_shard(plan, cluster, costs, timings, STATE, overheads=Overheads(contention_bytes_per_s=1e5))
    assert lost.busy_s[0] == pytest.approx(plain.busy_s[0] + 5 * 2000 / 1e5)  # the last one meets no compute
    with pytest.raises(HeteroError, match=r"input_s_per_sample is -1.*\n.*contention_bytes_per_s is 0"):
        Overheads(input_s_per_sample=-1, contention_bytes_per_s=0)


def test_groups_of_unequal_size_wait_for_each_other_once():
    cluster = cluster_of("a", "a", "b", "b", "b")
    costs = model_of([1_000_000] * 4)
    timings = timings_of(costs, {"a": 0.1, "b": 0.05})
    plan = plan_of(cluster, [[0, 1], [2, 3, 4]], share=1)
    simulated = simulate_shard(plan, cluster, costs, timings, STATE)
    predicted = predict_shard(plan, cluster, costs, timings, STATE)
    # the crossing of all but the last unit is hidden
    assert max(predicted.group_s) < simulated.step_s < predicted.step_s
    slow, fast = simulated.exposed_s[0], simulated.exposed_s[2]
    assert fast > slow + 0.5


def test_fsdp1_reduces_nothing_across_hybrid_groups_of_one_rank():
    cluster = cluster_of("a", "a", "a", "a")
    costs, timings = model_of([1_000_000] * 4), timings_of(model_of([1] * 4), {"a": 0.01})
    alone = plan_of(cluster, [[0], [1], [2], [3]])
    together = plan_of(cluster, [[0, 1, 2, 3]], "NO_SHARD")
    fsdp1 = Execution(engine="fsdp1")
    assert simulate_shard(alone, cluster, costs, timings, STATE, execution=fsdp1).communication_s == (0.0,) * 4
    for plan, execution in ((together, fsdp1), (alone, Execution()), (together, Execution())):
        simulated = simulate_shard(plan, cluster, costs, timings, STATE, execution=execution)
        reduced = Topology(cluster).seconds("all_reduce", 4e6, Topology(cluster).place([0, 1, 2, 3]))
        assert simulated.communication_s == pytest.approx((4 * reduced,) * 4, rel=1e-5)


def test_fsdp1_refuses_what_it_cannot_run():
    cluster = cluster_of("a", "a", "a")
    costs = model_of([1000])
    plan = plan_of(cluster, [[0], [1, 2]], micro_batches=(1, 2))
    with pytest.raises(HeteroError, match=r"unequal size.*\n.*micro-batches"):
        simulate_shard(plan, cluster, costs, timings_of(costs, {"a": 0.1}), STATE, execution=Execution(engine="fsdp1"))


def test_a_type_without_timings_is_named():
    cluster, costs = cluster_of("a", "b"), model_of([1000])
    with pytest.raises(HeteroError, match="device type 'b' has no timings"):
        simulate_shard(plan_of(cluster, [[0, 1]]), cluster, costs, timings_of(costs, {"a": 1.0}), STATE)


def test_equal_ranks_are_simulated_once():
    fabric = Fabric(25e9, 1e-5, nics=4)
    costs = model_of([10_000_000] * 48, (1000, 1000))
    timings = timings_of(costs, {"a": 0.01})
    tasks = set()
    begin = time.perf_counter()
    for ranks in (16, 1024):
        cluster = dataclasses.replace(cluster_of(*["a"] * ranks), between_nodes=fabric)
        groups = [list(range(start, start + 8)) for start in range(0, ranks, 8)]
        simulated = simulate_shard(plan_of(cluster, groups), cluster, costs, timings, STATE)
        tasks.add(len(simulated.timeline.names))
        assert len(simulated.busy_s) == ranks
    assert tasks == {2 * 50 + 2 * 49 + 2 * 49 + 1}  # compute; gathers; reductions and all-reduces; optimizer
    assert time.perf_counter() - begin < 10
