"""Shard groups that hetero_fsdp chooses by itself: a group for each node where the links between nodes are slow."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.utils.data import DataLoader

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.errors import InfeasibleError
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.planner.measured import MeasuredRanks
from lightning_hetero.planner.node_groups import groups_by_links
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.groups import ShardGroups
from lightning_hetero.strategies.layout import Layout
from lightning_hetero.strategies.planning import plan_from
from tests.fits import Classifier, Fit, Outcome, dataset, on_one_device, run
from tests.harness import WarmRanks
from tests.option_fits import QUIET
from tests.test_fsdp_parity import assert_alike

FAST, SLOW = Link(100e9, 0.0), Link(1e9, 0.0)
PARAMETERS = [10**7] * 8
STATE = StateBytes()
ALL = (tuple(range(6)),)
BY_NODE = ((0, 1, 2, 3), (4, 5))


def nodes(*sizes: int, memory: int = 2**36, between: Link | None = SLOW, emulate: bool = False) -> Cluster:
    devices = [Device("a", f"n{n}", memory, 1e12) for n, size in enumerate(sizes) for _ in range(size)]
    return Cluster("nodes", tuple(devices), FAST, between, emulate)


def chosen(cluster: Cluster, reshards: bool = True) -> Any:
    return groups_by_links(cluster, PARAMETERS, state=STATE, reshard_after_forward=reshards)


def test_slow_links_between_nodes_make_a_group_for_each() -> None:
    found = chosen(nodes(4, 2))
    assert found.groups == BY_NODE
    # By hand, of 320 MB. Together, three transfers in a ring of six, five sixths over the slow link. Apart: three
    # quarters within the larger node, thrice; then both owners of a node's half reduce it.
    together = 3 * 0.320 * 5 / 6
    apart = 3 * 0.320 * 3 / 4 / 100 + 0.160
    assert f"{1000 * apart:.1f} ms with a group for each node, {1000 * together:.0f} ms with one" in found.reason


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(nodes(6), id="one node"),
        pytest.param(nodes(4, 2, between=None), id="a link that is not known"),
        pytest.param(nodes(4, 2, emulate=True), id="links that are not emulated"),
    ],
)
def test_nothing_to_choose(cluster: Cluster) -> None:
    found = chosen(cluster)
    assert (found.groups, found.reason) == (ALL, "")


def test_groups_must_be_worth_their_crossing() -> None:
    # FSDP's three transfers in one group of two nodes of one; by node, the two of an all-reduce
    assert chosen(nodes(1, 1)).groups == ((0,), (1,))
    kept = chosen(nodes(1, 1), reshards=False)
    assert kept.groups == ((0, 1),)
    assert kept.reason.startswith("one shard group: a step sends for")


def test_every_node_must_hold_the_model() -> None:
    states = 16 * sum(PARAMETERS)
    # in the node of two each has half of the states, and may give half of its memory for them
    assert chosen(nodes(4, 2, memory=states)).groups == BY_NODE
    tight = chosen(nodes(4, 2, memory=states - 1))
    assert tight.groups == ALL
    assert "node 'n1'" in tight.reason
    one_small = nodes(4, 2)
    small = replace(one_small.devices[5], memory_bytes=states - 1)
    assert chosen(replace(one_small, devices=(*one_small.devices[:5], small))).groups == ALL


# -- in the strategy ---------------------------------------------------------------------------------------------------

FIT = Fit(network="mlp", shares=(1, 1, 1), max_steps=12, clip=0.3)
TWO_NODES = nodes(1, 2, memory=2**34, between=Link(1e6, 0.0))


def by_itself(fit: Fit) -> tuple[Outcome, Any]:
    """A fit with nothing said; its shares are those that ranks measure, and do not change the numbers."""
    strategy = HeteroFSDPStrategy(cluster=TWO_NODES, check_loss="off", summary=False)
    found = run(fit, strategy, rank_batch=1, devices=fit.ranks)
    assert strategy.plan is not None
    return found, (strategy.plan.groups, strategy.plan.reasons[0])


def test_the_strategy_chooses_and_says_so(ranks: WarmRanks) -> None:
    results = ranks.run(3, by_itself, FIT)
    for _, (groups, reason) in results:
        assert groups == ((0,), (1, 2))
        assert reason.startswith("a shard group for each node: a step sends for")
    assert_alike(on_one_device(FIT), [found for found, _ in results])


def again_elsewhere() -> tuple[Any, ...]:
    """The groups of a second fit of the same module, by a strategy that would have chosen others."""
    module = Classifier("mlp")
    found = []
    for cluster in (TWO_NODES, nodes(3, memory=2**34)):
        strategy = HeteroFSDPStrategy(cluster=cluster, check_loss="off", summary=False)
        trainer = pl.Trainer(strategy=strategy, devices=3, max_steps=1, **QUIET)
        trainer.fit(module, DataLoader(dataset(12, "32-true"), batch_size=1))
        assert strategy.plan is not None
        found.append(strategy.plan.groups)
    return tuple(found)


def test_what_is_sharded_keeps_its_groups(ranks: WarmRanks) -> None:
    for found in ranks.run(3, again_elsewhere):
        assert found == (((0,), (1, 2)),) * 2


def test_what_does_not_fit_in_groups_says_that_one_group_may() -> None:
    cluster = nodes(1, 2, memory=100)
    costs = MeasuredRanks((1.0,) * 3, (0.0,) * 3, fixed_bytes=(99,) * 3, bytes_per_sample=(2.0,) * 3)
    groups = Layout(((0,), (1, 2)), ("FULL_SHARD",) * 2, "a shard group for each node")
    with pytest.raises(InfeasibleError, match=r"sharding_strategy='FULL_SHARD'"):
        plan_from(cluster, ModelKey("m", 1), 6, costs, groups, micro_batches=True)
    asked = groups._replace(reason="")
    with pytest.raises(InfeasibleError) as caught:
        plan_from(cluster, ModelKey("m", 1), 6, costs, asked, micro_batches=True)
    assert "FULL_SHARD" not in str(caught.value)


# -- equal groups ------------------------------------------------------------------------------------------------------


def how_groups_reduce(plans: list[ShardPlan | None]) -> list[bool]:
    """Whether FSDP2 reduces across two groups of two by itself, by plan; None plans in the fit."""
    found = []
    for plan in plans:
        options: dict[str, Any] = {"plan": plan} if plan else {"sharding_strategy": "HYBRID_2"}
        strategy = HeteroFSDPStrategy(cluster=nodes(4, memory=2**34), check_loss="off", summary=False, **options)
        trainer = pl.Trainer(strategy=strategy, devices=4, max_steps=1, **QUIET)
        trainer.fit(Classifier("mlp"), DataLoader(dataset(16, "32-true"), batch_size=2))
        found.append(strategy.groups.is_native)
    return found


def group_timeouts() -> tuple[list[list[int]], list[Any]]:
    """Ranks of each group that a native mesh is made of, and the timeouts asked for."""
    asked: list[Any] = []
    new_group = dist.new_group

    def noted(*args: Any, timeout: Any = None, **options: Any) -> Any:
        asked.append(timeout)
        return new_group(*args, timeout=timeout, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        patch.setattr(device_mesh, "new_group", noted)
        groups = ShardGroups(((0, 1), (2, 3)), dist.get_rank(), torch.device("cpu"), timedelta(seconds=77))
    assert groups.is_native
    assert groups.shard_group is groups.mesh.get_group("shard")
    return [dist.get_process_group_ranks(groups.mesh.get_group(name)) for name in ("replicate", "shard")], asked


def test_groups_of_a_native_mesh_wait_as_long_as_was_asked(ranks: WarmRanks) -> None:
    found = ranks.run(4, group_timeouts)
    assert [own for own, _ in found] == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert all(asked == [timedelta(seconds=77)] * 4 for _, asked in found)


@pytest.mark.slow
def test_groups_that_may_not_march_together_cross_by_ownership(ranks: WarmRanks) -> None:
    plan = ShardPlan(8, (2,) * 4, ((0, 1), (2, 3)), ("a",) * 4, modes=("FULL_SHARD",) * 2)
    plans = [plan, replace(plan, micro_batches=(2, 2)), replace(plan, micro_batches=(2, 1)), None]
    assert ranks.run(4, how_groups_reduce, plans) == [[True, True, False, False]] * 4
