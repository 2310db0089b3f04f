"""Recognise devices again: which rank of one cluster is which of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_hetero.cluster.cluster import Cluster
from lightning_hetero.units import format_bytes, format_flops_per_s

SAME_SPEED = 0.1
"""speeds that differ by less than this share count as one: measured ones jitter"""


@dataclass(frozen=True)
class Recognised:
    """How the ranks of a cluster correspond to those of an earlier one.

    Args:
        ranks: by rank of the new cluster, the rank that the device had; ``None`` for one that was not there.
        missing: earlier ranks whose device is not there any more.
    """

    ranks: tuple[int | None, ...]
    missing: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether every device is there and has the rank that it had."""
        return not self.missing and self.ranks == tuple(range(len(self.ranks)))


def recognise(found: Cluster, known: Cluster) -> Recognised:
    """Match the devices of two clusters: by UUID where both have one, else by node and type, in rank order.

    Speed and free memory play no part: they change from one measurement to the next.

    Args:
        found: what is there now.
        known: what was there before.
    """
    by_uuid = {device.uuid: rank for rank, device in enumerate(known.devices) if device.uuid is not None}
    ranks: list[int | None] = [
        by_uuid.get(device.uuid) if device.uuid is not None else None for device in found.devices
    ]
    # Devices without a UUID can be told apart by node and type only: of each kind as many as before, if possible of the
    # ranks that they had, and in the order that they had.
    for kind in dict.fromkeys((device.node, device.type) for device in found.devices):
        here = [rank for rank in _of_kind(found, kind) if ranks[rank] is None]
        before = [rank for rank in _of_kind(known, kind) if rank not in ranks]
        if any(found.devices[rank].uuid is not None for rank in here):
            # two UUIDs that differ are two devices
            before = [rank for rank in before if known.devices[rank].uuid is None]
        chosen = sorted(before, key=lambda rank: (rank not in here, rank))[: len(here)]
        staying = here if len(here) <= len(chosen) else sorted(here, key=lambda rank: (rank not in chosen, rank))
        for rank, other in zip(sorted(staying[: len(chosen)]), sorted(chosen), strict=True):
            ranks[rank] = other
    left = [rank for rank in range(known.world_size) if rank not in ranks]
    return Recognised(tuple(ranks), tuple(left))


def _of_kind(cluster: Cluster, kind: tuple[str, str]) -> list[int]:
    return [rank for rank, device in enumerate(cluster.devices) if (device.node, device.type) == kind]


def changes(found: Cluster, known: Cluster) -> list[str]:
    """What is different from before, one sentence each; jitter of measured speeds is no difference.

    Args:
        found: what is there now.
        known: what was there before.
    """
    matched = recognise(found, known)
    lines = [
        f"rank {rank}, {known.devices[rank].type} on {known.devices[rank].node}, is not there any more"
        for rank in matched.missing
    ]
    for rank, before in enumerate(matched.ranks):
        lines += _rank_changes(found, known, rank, before)
    return lines


def _rank_changes(found: Cluster, known: Cluster, rank: int, before: int | None) -> Iterator[str]:
    device = found.devices[rank]
    who = f"rank {rank}, {device.type} on {device.node},"
    if before is None:
        yield f"{who} is new"
        return
    earlier = known.devices[before]
    if before != rank:
        yield f"{who} was rank {before}: give the ranks the order of the plan, or plan again"
    now, then = device.speed_flops_per_s, earlier.speed_flops_per_s
    if now is not None and then is not None and abs(now - then) > SAME_SPEED * then:
        yield f"{who} now measures {format_flops_per_s(now)}, before {format_flops_per_s(then)}"
    if abs(device.memory_bytes - earlier.memory_bytes) > SAME_SPEED * earlier.memory_bytes:
        free, was_free = format_bytes(device.memory_bytes), format_bytes(earlier.memory_bytes)
        yield f"{who} now has {free} free, before {was_free}"
