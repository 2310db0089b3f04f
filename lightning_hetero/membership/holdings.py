"""Bytes of each rank: what it holds of the model between steps, and what it writes of a checkpoint.

Parameters, gradients and optimizer states of the rank's own rows or units; what comes and goes within a step is the
memory model's (:mod:`lightning_hetero.simulator.memory`). Buffers, and states of one number per parameter (Adam's
count of steps), are not counted.

FSDP2 shards dimension 0: rank i of G holds rows i * ceil(n / G) and following. It keeps and gathers ceil(n / G) rows
from every rank, the last ones' too, who own fewer or none. A parameter of fewer rows than ranks (a position embedding
of shape (1, tokens, width)) is so padded to G rows: gathered, it takes G times its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.membership.pipelines import PipelineMembership
from lightning_hetero.membership.shards import ShardMembership
from lightning_hetero.simulator.memory import StateBytes


@dataclass(frozen=True)
class Holdings:
    """What one rank holds of a model between two steps.

    Args:
        rank: whose.
        elements: of parameters that it owns, alone or with other replicas.
        parameter_bytes: of parameters, with the rows that pad them.
        gradient_bytes: of gradients.
        optimizer_bytes: of the optimizer's states.
    """

    rank: int
    elements: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class CheckpointPart:
    """What is written of a checkpoint in one place.

    Args:
        writers: ranks that hold it; one of them writes it. Of several, torch's planner takes the one with the least to
            write so far.
        size_bytes: of parameters, a tied one under each of its names, and of the optimizer's states.
    """

    writers: tuple[int, ...]
    size_bytes: int


def owned_elements(parameters: Sequence[ParameterShape], size: int, *, by_name: bool = False) -> NDArray[np.int64]:
    """Return how many elements each rank of a shard group of ``size`` owns, shape (size,).

    Args:
        parameters: of the model.
        size: of the group.
        by_name: whether a tied parameter counts under each of its names.
    """
    rows = np.array([each.rows for each in parameters], dtype=np.int64)[:, np.newaxis]
    widths = np.array([each.width * (each.names if by_name else 1) for each in parameters], dtype=np.int64)
    chunks = -(-rows // size)
    owned: NDArray[np.int64] = widths @ np.clip(rows - np.arange(size) * chunks, 0, chunks)
    return owned


def padded_elements(parameters: Iterable[ParameterShape], size: int) -> int:
    """Return how many elements each rank of a shard group of ``size`` keeps, padding included."""
    return sum(-(-each.rows // size) * each.width for each in parameters)


def shard_holdings(
    membership: ShardMembership, parameters: Sequence[ParameterShape], state: StateBytes | None = None
) -> tuple[Holdings, ...]:
    """Return what each rank of a shard plan holds, in rank order.

    Args:
        membership: of the plan.
        parameters: of the model.
        state: bytes per parameter; by default 32-bit AdamW.
    """
    state = state or StateBytes()
    sizes = {len(replica) for replica in membership.replicas}
    owned = {size: owned_elements(parameters, size).tolist() for size in sizes}
    padded = {size: padded_elements(parameters, size) for size in sizes}
    return tuple(
        _holdings(
            rank,
            owned[len(membership.replica_of(rank))][membership.place_of(rank)],
            padded[len(membership.replica_of(rank))],
            state,
        )
        for rank in range(membership.world_size)
    )


def stage_holdings(
    membership: PipelineMembership, parameters: Sequence[ParameterShape], state: StateBytes | None = None
) -> tuple[Holdings, ...]:
    """Return what each rank of a pipeline plan holds, in rank order; arguments as :func:`shard_holdings`."""
    state = state or StateBytes()
    elements = [0] * membership.world_size
    for each in parameters:
        for rank in membership.owners_of(each):
            elements[rank] += each.elements
    return tuple(_holdings(rank, count, count, state) for rank, count in enumerate(elements))


def _holdings(rank: int, elements: int, padded: int, state: StateBytes) -> Holdings:
    sizes = (padded * state.parameter, elements * state.gradient, elements * state.optimizer)
    return Holdings(rank, elements, *(round(size) for size in sizes))


def shard_checkpoint(
    membership: ShardMembership,
    parameters: Sequence[ParameterShape],
    state: StateBytes | None = None,
    *,
    one_file: bool = False,
) -> tuple[CheckpointPart, ...]:
    """Return the parts of a checkpoint of hetero_fsdp.

    Where groups cross by ownership, rank 0's group writes the model and the others nothing; where FSDP2 knows all
    replicas, any one that holds a part may write it.

    Args:
        membership: of the plan.
        parameters: of the model.
        state: bytes per parameter; by default 32-bit AdamW.
        one_file: whether rank 0 writes everything, gathered; else each rank its own rows
            (``save_distributed_checkpoint=True``).
    """
    state = state or StateBytes()
    if one_file:
        return (_file(parameters, state),)
    first = membership.replica_of(0)
    owned = owned_elements(parameters, len(first)).tolist()
    named = owned_elements(parameters, len(first), by_name=True).tolist()
    holders = list(zip(*membership.replicas, strict=True)) if membership.is_native else [(rank,) for rank in first]
    return tuple(
        CheckpointPart(ranks, _written_bytes(count, names, state))
        for ranks, count, names in zip(holders, owned, named, strict=True)
        if count
    )


def stage_checkpoint(
    membership: PipelineMembership, parameters: Sequence[ParameterShape], state: StateBytes | None = None
) -> tuple[dict[int, int], CheckpointPart]:
    """Return bytes that each rank sends to rank 0 for a checkpoint of hetero_pipe, and the one file that it writes.

    Args:
        membership: of the plan.
        parameters: of the model.
        state: bytes per parameter; by default 32-bit AdamW.
    """
    state = state or StateBytes()
    sent: dict[int, int] = {}
    for each in parameters:
        owners = membership.owners_of(each)
        if 0 not in owners:
            size = _written_bytes(each.elements, each.elements * each.names, state)
            sent[owners[0]] = sent.get(owners[0], 0) + size
    return sent, _file(parameters, state)


def _file(parameters: Iterable[ParameterShape], state: StateBytes) -> CheckpointPart:
    """What rank 0 writes where it writes everything."""
    parameters = tuple(parameters)
    named = sum(each.elements * each.names for each in parameters)
    return CheckpointPart((0,), _written_bytes(sum(each.elements for each in parameters), named, state))


def _written_bytes(elements: int, named_elements: int, state: StateBytes) -> int:
    return round(named_elements * state.parameter + elements * state.optimizer)
