"""Measure bandwidth and latency between ranks, by messages sent there and back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_hetero.cluster import Link
from lightning_hetero.profiler.speed import wait_for

_SMALL_BYTES = 4
_SMALL_REPEATS = 21
_LARGE_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
_LARGE_REPEATS = 7
_WARM_UP = 2


def measure_links(nodes: Sequence[str], device: torch.device) -> tuple[Link | None, Link | None]:
    """Links between ranks of one node and between nodes, measured over the default process group.

    A collective. On every node that has two ranks the first two exchange messages, then the first ranks of
    neighbouring nodes do (0 and 1, 2 and 3, ...); medians over the pairs are returned, the same on all ranks.

    Args:
        nodes: name of the node of every rank, in rank order.
        device: where this rank's messages lie.

    Returns:
        ``(within_node, between_nodes)``; ``None`` where there is no such pair of ranks.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    within = [(ranks[0], ranks[1]) for ranks in by_node.values() if len(ranks) > 1]
    firsts = [ranks[0] for ranks in by_node.values()]
    between = list(zip(firsts[::2], firsts[1::2], strict=False))
    return _measure_pairs(within, device), _measure_pairs(between, device)


def _measure_pairs(pairs: list[tuple[int, int]], device: torch.device) -> Link | None:
    if not pairs:
        return None
    rank = dist.get_rank()
    mine = None
    dist.barrier()
    for first, second in pairs:
        if rank in (first, second):
            mine = _there_and_back(second if rank == first else first, rank == first, device)
    # Only the first of a pair has seen the whole way, so only its figures count.
    every: list[Link | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    links = [link for link in every if link is not None]
    return Link(
        statistics.median(link.bandwidth_bytes_per_s for link in links),
        statistics.median(link.latency_s for link in links),
    )


def _there_and_back(peer: int, is_first: bool, device: torch.device) -> Link | None:
    latency_s = _one_way_s(peer, is_first, device, _SMALL_BYTES, _SMALL_REPEATS)
    size_bytes = _LARGE_BYTES[device.type]
    large_s = _one_way_s(peer, is_first, device, size_bytes, _LARGE_REPEATS)
    if not is_first:
        return None
    # A large message that seems no slower than a small one would give a bandwidth without meaning.
    moving_s = large_s - latency_s if large_s > latency_s else large_s
    return Link(size_bytes / moving_s, latency_s)


def _one_way_s(peer: int, is_first: bool, device: torch.device, size_bytes: int, repeats: int) -> float:
    """Half the median time of a message of ``size_bytes`` there and back."""
    message = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
    taken = []
    for _ in range(_WARM_UP + repeats):
        start_s = time.perf_counter()
        if is_first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        wait_for(device)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[_WARM_UP:]) / 2
