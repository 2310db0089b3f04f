"""Who shards with whom under a shard plan, who owns the same rows, and which process groups there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_hetero.errors import PlanError
from lightning_hetero.membership.groups import Groups, ProcessGroup
from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.ownership import Ownership
from lightning_hetero.plan import ShardPlan


def replicas_of(groups: Sequence[Sequence[int]], modes: Sequence[str]) -> Groups:
    """Return the sets of ranks that together hold one copy of the model, ascending: process groups sort their ranks.

    Args:
        groups: of the plan.
        modes: of each group; under NO_SHARD every rank holds a copy of its own.
    """
    found: list[tuple[int, ...]] = []
    for group, mode in zip(groups, modes, strict=True):
        found += [(rank,) for rank in group] if mode == "NO_SHARD" else [tuple(sorted(group))]
    return tuple(found)


@dataclass(frozen=True)
class ShardMembership:
    """Who shards with whom, and how gradients become sums over all ranks.

    Args:
        replicas: sets of ranks, ascending, each of which holds the model once; every rank is in one.
        may_wait: whether an all-reduce between groups may wait for the last of them, unit by unit: all groups run as
            many micro-batches, or an all-reduce does not hold up the rank that issues it (all backends but gloo).
    """

    replicas: Groups
    may_wait: bool = True

    @classmethod
    def of_plan(cls, plan: ShardPlan, *, blocking: bool = False) -> ShardMembership:
        """Return that of a plan.

        Args:
            plan: whose.
            blocking: whether an all-reduce holds up the rank that issues it (gloo).
        """
        count = len(plan.groups)
        march_together = len({plan.micro_batches_of(index) for index in range(count)}) == 1
        replicas = replicas_of(plan.groups, [plan.mode_of(index) for index in range(count)])
        return cls(replicas, march_together or not blocking)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._places)

    @property
    def is_native(self) -> bool:
        """Whether FSDP2 itself reduces across groups: a rectangle of more than one rank each way."""
        sizes = {len(replica) for replica in self.replicas}
        return len(self.replicas) > 1 and len(sizes) == 1 and sizes != {1} and self.may_wait

    @property
    def crosses(self) -> bool:
        """Whether gradients are summed by ownership, beside what FSDP2 does."""
        return len(self.replicas) > 1 and not self.is_native

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {r: (index, place) for index, replica in enumerate(self.replicas) for place, r in enumerate(replica)}

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that ``rank`` shards with, itself included.

        Raises:
            PlanError: if it is in no group.
        """
        return self.replicas[self._place(rank)[0]]

    def place_of(self, rank: int) -> int:
        """Return the index of ``rank`` in its replica: which rows it owns.

        Raises:
            PlanError: if it is in no group.
        """
        return self._place(rank)[1]

    def _place(self, rank: int) -> tuple[int, int]:
        if rank not in self._places:
            raise PlanError(f"rank {rank} is in no group: there are ranks 0 to {self.world_size - 1}")
        return self._places[rank]

    def ownership(self, parameters: Sequence[ParameterShape]) -> Ownership:
        """Return which rank owns which rows."""
        return Ownership.of_shards({each.name: each.shape for each in parameters}, self.replicas)

    def process_groups(self, parameters: Sequence[ParameterShape]) -> tuple[ProcessGroup, ...]:
        """Return the process groups that hetero_fsdp has, in the order in which every rank makes them.

        Args:
            parameters: of the model.
        """
        return tuple(self._process_groups(parameters))

    def _process_groups(self, parameters: Sequence[ParameterShape]) -> Iterator[ProcessGroup]:
        everyone = tuple(range(self.world_size))
        alone = [ProcessGroup("tensor parallel", (rank,)) for rank in everyone]
        yield ProcessGroup("world", everyone)
        yield from alone  # the mesh that configure_model is given has two dimensions
        if len(self.replicas) == 1:
            yield from alone
        elif self.is_native:
            yield from (ProcessGroup("replicate", same) for same in zip(*self.replicas, strict=True))
            yield from (ProcessGroup("shard", replica) for replica in self.replicas)
        else:
            yield from (ProcessGroup("shard", replica) for replica in self.replicas)
            owner_sets = self.ownership(parameters).owner_sets
            yield from (ProcessGroup("owners", owners) for owners in owner_sets if owners != everyone)
