"""Who shards with whom: as a plan or an option says, else by what is known before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_hetero.cluster import Cluster
from lightning_hetero.models.units import Unit
from lightning_hetero.plan import ShardPlan
from lightning_hetero.planner.node_groups import groups_by_links
from lightning_hetero.simulator.memory import StateBytes

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy
    from lightning_hetero.strategies.options import ShardingOptions


class Layout(NamedTuple):
    """Who shards with whom.

    Args:
        groups: of ranks; each rank is in one.
        modes: how each group holds the model.
        reason: why it was chosen; empty where it was asked for.
    """

    groups: tuple[tuple[int, ...], ...]
    modes: tuple[str, ...]
    reason: str = ""

    @classmethod
    def of_plan(cls, plan: ShardPlan) -> Layout:
        """Return the groups of a plan."""
        return cls(plan.groups, tuple(plan.mode_of(index) for index in range(len(plan.groups))))

    @classmethod
    def chosen(cls, module: nn.Module, units: Sequence[Unit], cluster: Cluster, *, reshards: bool) -> Layout:
        """Return a group for each node where the links between nodes are what limits, else one of all ranks.

        Args:
            module: not sharded yet.
            units: of it; blocks are gathered one by one, the others together.
            cluster: one device per rank.
            reshards: whether parameters are gathered again for backward.
        """
        blocks = [sum(p.numel() for p in unit.module.parameters()) for unit in units if unit.is_block]
        parameters = list(module.parameters())
        total = sum(p.numel() for p in parameters)
        width = sum(p.numel() * p.element_size() for p in parameters) / total
        # taken for trained by one of Adam's kind, and gathered and reduced as wide as it is held
        state = StateBytes(width, width, 2 * width, width, width)
        choice = groups_by_links(
            cluster, [*blocks, max(0, total - sum(blocks))], state=state, reshard_after_forward=reshards
        )
        mode = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
        return cls(choice.groups, (mode,) * len(choice.groups), choice.reason)


def find_layout(strategy: HeteroFSDPStrategy, module: nn.Module, units: Sequence[Unit]) -> Layout:
    """Return who shards with whom: as the plan or the options say, as the module is sharded already, else as chosen.

    Args:
        strategy: whose ranks (a collective).
        module: the user's.
        units: of it.
    """
    if strategy.plan is not None and strategy.plan_is_given:
        return Layout.of_plan(strategy.plan)
    asked = strategy.options.layout(strategy.world_size)
    if asked is not None:
        return asked
    assert strategy.cluster is not None
    sharded: list[tuple[int, ...] | None] = strategy.gather_objects(ranks_sharded_over(module, strategy.global_rank))
    known = {ranks for ranks in sharded if ranks is not None}
    if None not in sharded:
        groups = tuple(sorted(known))
        return Layout(groups, ("FULL_SHARD" if strategy.reshards else "SHARD_GRAD_OP",) * len(groups))
    chosen = Layout.chosen(module, units, strategy.cluster, reshards=strategy.reshards)
    if chosen.reason:
        rank_zero_info(f"hetero_fsdp: {chosen.reason}")
    return chosen


def reshards_after_forward(
    module: nn.Module, cluster: Cluster, options: ShardingOptions, plan: ShardPlan | None, rank: int
) -> bool:
    """Return whether this rank frees parameters between forward and backward: as asked, else where they are large."""
    if plan is not None:
        return plan.mode_of(plan.group_of(rank)) == "FULL_SHARD"
    if options.reshards is not None:
        return options.reshards
    return not is_small(module, cluster)


def is_small(module: nn.Module, cluster: Cluster) -> bool:
    """Return whether the whole model's parameters take at most a tenth of every device's memory."""
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    return whole * 10 <= min(device.memory_bytes for device in cluster.devices)


def march_together(module: nn.Module, plan: ShardPlan | None) -> bool:
    """Return whether all groups are known to run as many micro-batches; for a sharded module, whether they were."""
    mesh = mesh_sharded_over(module)
    if mesh is not None:
        return mesh.ndim == 2
    # without a plan, micro-batches are planned later
    return plan is not None and len({plan.micro_batches_of(index) for index in range(len(plan.groups))}) == 1


def mesh_sharded_over(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh that a module is sharded over already, by an earlier fit or ``configure_model``; else None."""
    return next((p.device_mesh for p in module.parameters() if isinstance(p, DTensor)), None)


def ranks_sharded_over(module: nn.Module, rank: int) -> tuple[int, ...] | None:
    """Return the ranks that a module is sharded over already, if it is."""
    mesh = mesh_sharded_over(module)
    if mesh is None:
        return None
    rows = [mesh.mesh.tolist()] if mesh.ndim == 1 else mesh.mesh.flatten(0, -2).tolist()
    return next((tuple(row) for row in rows if rank in row), None)
