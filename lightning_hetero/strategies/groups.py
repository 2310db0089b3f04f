"""The shard groups of a plan as process groups and meshes: who shards with this rank, and who holds the same rows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_hetero.membership.groups import Groups
from lightning_hetero.membership.shards import ShardMembership
from lightning_hetero.ownership import Ownership


class ShardGroups:
    """Makes the process groups of a layout (collective: all ranks make all of them, in one order).

    Equal groups are FSDP2's own hybrid sharding: a mesh of two dimensions, over which it reduces by itself. FSDP2 needs
    a rectangle for that, so groups of unequal size get a mesh each, and their gradients cross by ownership
    (:class:`~lightning_hetero.strategies.crossing.Crossing`). So do those of equal groups that may not march together
    where FSDP2's all-reduce blocks the rank (gloo): a group that is early would wait in it, unit by unit.

    Args:
        replicas: sets of ranks, each of which holds the model once.
        rank: this rank.
        device: of this rank.
        timeout: for collectives.
        march_together: whether all groups run as many micro-batches, so that their last backwards begin together.

    Attributes:
        membership: the same as data.
        mesh: to shard over: one dimension, or two for native hybrid sharding.
        is_native: whether FSDP2 reduces across groups by itself.
    """

    def __init__(
        self, replicas: Groups, rank: int, device: torch.device, timeout: timedelta, *, march_together: bool = True
    ) -> None:
        self.replicas = replicas
        self.rank = rank
        self._timeout = timeout
        self.membership = ShardMembership(replicas, march_together or device.type != "cpu")
        self.is_native = self.membership.is_native
        if len(replicas) == 1:
            self.mesh = init_device_mesh(
                device.type, (len(replicas[0]), 1), mesh_dim_names=("data_parallel", "tensor_parallel")
            )["data_parallel"]
        elif self.is_native:
            # a mesh that makes its groups itself gives them torch's default timeout
            columns = tuple(zip(*replicas, strict=True))
            made = {ranks: self._new(ranks) for ranks in (*columns, *replicas)}
            holders = next(ranks for ranks in columns if rank in ranks)
            self.mesh = DeviceMesh.from_group(
                [made[holders], made[self.own]],
                device.type,
                torch.tensor(replicas),
                mesh_dim_names=("replicate", "shard"),
            )
        else:
            made = {replica: self._new(replica) for replica in replicas}
            self.mesh = DeviceMesh.from_group(made[self.own], device.type, mesh_dim_names=("shard",))

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks that this one shards with."""
        return self.membership.replica_of(self.rank)

    @property
    def shard_group(self) -> Any:
        """The process group of the ranks that this one shards with."""
        return self.mesh.get_group("shard" if self.is_native else 0)

    @property
    def crosses(self) -> bool:
        """Whether gradients have to be summed by ownership, beside what FSDP2 does."""
        return self.membership.crosses

    @property
    def is_first(self) -> bool:
        """Whether this rank is in the group that speaks for all: rank 0's."""
        return 0 in self.own

    def for_owners(self, ownership: Ownership) -> dict[tuple[int, ...], Any]:
        """Make a process group for each set of ranks that own something together (a collective)."""
        return {owners: self._new(owners) for owners in ownership.owner_sets}

    def _new(self, ranks: tuple[int, ...]) -> Any:
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        return dist.new_group(list(ranks), timeout=self._timeout)
