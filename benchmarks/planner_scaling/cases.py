"""What is planned: three types of devices on nodes of eight, and a model of equal blocks."""

from __future__ import annotations

from lightning_hetero.cluster import Cluster, Device, Link
from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.planner.training import Training

GIB = 2**30
# Type, memory in GiB, FLOP/s: thirds of the nodes. 98 units over 4 devices need 57 GiB on each.
KINDS = (("large", 141, 300e12), ("middle", 80, 120e12), ("small", 64, 60e12))


def make_case(devices: int, units: int) -> tuple[Cluster, ModelCosts, Training]:
    """``devices`` on nodes of eight, of three types; blocks of 150 million parameters between embedding and head.

    The global batch is four samples per device. Memory is such that even four devices hold 98 units in one shard group,
    whose ranks all hold the same part of the model: both planners plan the same cases.
    """
    nodes = max(1, devices // 8)
    members = []
    for rank in range(devices):
        node = min(rank // 8, nodes - 1)
        kind, room, speed = KINDS[node * 3 // nodes] if nodes >= 3 else KINDS[rank * 3 // devices]
        members.append(Device(kind, f"node-{node}", room * GIB, speed))
    cluster = Cluster(f"{devices}-devices", tuple(members), Link(2e11, 1e-5), Link(2.5e10, 2e-5))
    embedding = UnitCost("embed", 100_000_000, 1e9, 2e9, 10_000_000, 8_000_000)
    blocks = (
        UnitCost(f"blocks.{index}", 150_000_000, 6e11, 1.2e12, 150_000_000, 8_000_000) for index in range(units - 2)
    )
    head = UnitCost("head", 100_000_000, 1e11, 2e11, 10_000_000, 4_000)
    costs = ModelCosts("blocks", (embedding, *blocks, head), loss_bytes=8_000)
    return cluster, costs, Training(4 * devices)
