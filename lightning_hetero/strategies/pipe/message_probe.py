"""Measure what a message between two stages takes, sent and received as a step does it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.cluster import Cluster, Link
from lightning_hetero.models.chain import Values
from lightning_hetero.profiler.speed import wait_for
from lightning_hetero.strategies.pipe.lines import Lines, MakeGroup
from lightning_hetero.strategies.pipe.mail import Letter, Mail

REPEATS = 9
"""times that a message goes through all ranks and back, after one that tells what it looks like"""

SMALL_BYTES, LARGE_BYTES = 2**10, 2**21


def with_measured_links(cluster: Cluster, rank: int, device: torch.device, make_group: MakeGroup) -> Cluster:
    """The cluster with links as messages between its ranks find them (a collective).

    Links that the cluster gives stay as they are, but those of emulated devices: they are not emulated, so messages
    take what they take here.

    Args:
        cluster: one device per rank.
        rank: this rank.
        device: where its values lie.
        make_group: makes a process group of ranks; called on all ranks in the same order.
    """
    by_node = [cluster.ranks_of(node) for node in cluster.nodes]
    within = next((ranks for ranks in by_node if len(ranks) > 1), ())
    firsts = tuple(ranks[0] for ranks in by_node)

    def measured(given: Link | None, ranks: Sequence[int]) -> Link | None:
        if len(ranks) < 2 or not (cluster.emulate or given is None):
            return given
        return _link(ranks, rank, device, make_group)

    # on all ranks in this order
    within_node = measured(cluster.within_node, within)
    return replace(cluster, within_node=within_node, between_nodes=measured(cluster.between_nodes, firsts))


def _link(ranks: Sequence[int], rank: int, device: torch.device, make_group: MakeGroup) -> Link:
    lines = Lines(ranks, itertools.pairwise(ranks), device, make_group)
    own: tuple[float, float] | None = None
    if rank in ranks:
        mail = Mail(ranks, rank, device, lines)
        small_s, large_s = (_seconds(mail, rank, ranks, size, device) for size in (SMALL_BYTES, LARGE_BYTES))
        if rank == ranks[0]:
            own = small_s, large_s
    every: list[tuple[float, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for group in lines.groups:
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    # the first rank has seen the whole way
    small_s, large_s = next(each for each in every if each is not None)
    moving_s = max(large_s - small_s, 1e-9)
    return Link((LARGE_BYTES - SMALL_BYTES) / moving_s, max(0.0, small_s - SMALL_BYTES / LARGE_BYTES * moving_s))


def _seconds(mail: Mail, rank: int, ranks: Sequence[int], size_bytes: int, device: torch.device) -> float:
    """Seconds of one message: the median of so many ways through all stages and back, over their messages."""
    taken = []
    for _ in range(1 + REPEATS):
        own = torch.zeros(size_bytes // 4, device=device)
        wait_for(device)
        began_s = time.perf_counter()
        _there_and_back(mail, ranks.index(rank), len(ranks), own)
        wait_for(device)  # NCCL's work.wait() has the stream wait, not the host
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:]) / (2 * (len(ranks) - 1))


def _there_and_back(mail: Mail, stage: int, stages: int, own: Tensor) -> None:
    """One micro-batch's messages, as if stages computed nothing."""
    after, before = stage + 1 < stages, stage > 0
    expected = [Letter(stage - 1, stage, 0)] if before else []
    expected += [Letter(stage + 1, stage, 0, forward=False)] if after else []
    mail.begin(expected, [("messages", own.numel())], answered=True)
    values: Values = {"values": own.requires_grad_()}
    if before:
        values = mail.take(Letter(stage - 1, stage, 0))
    if after:
        mail.send(Letter(stage, stage + 1, 0), values)
        mail.take(Letter(stage + 1, stage, 0, forward=False))
    if before:
        mail.send(Letter(stage, stage - 1, 0, forward=False), {"values": own.detach()})
    mail.end()
