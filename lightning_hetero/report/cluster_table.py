"""A cluster as a table, with who else uses its devices."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_hetero.cluster import Cluster, Link
from lightning_hetero.profiler.busy import BUSY, DeviceUse, users_text
from lightning_hetero.units import format_bytes, format_bytes_per_s, format_flops_per_s, format_seconds


def cluster_table(cluster: Cluster, uses: Sequence[DeviceUse] = ()) -> Table:
    """One line a rank; with ``uses``, one per rank, also how much of the device's memory there is in all."""
    table = Table(title=cluster.name, title_justify="left")
    for name in ("rank", "node", "type", "name", "free memory", "of", "speed", "uuid"):
        table.add_column(name, justify="left" if name in ("node", "type", "name", "uuid") else "right")
    for rank, device in enumerate(cluster.devices):
        speed = device.speed_flops_per_s
        table.add_row(
            str(rank),
            device.node,
            device.type,
            device.name or "-",
            format_bytes(device.memory_bytes),
            format_bytes(uses[rank].total_bytes) if uses else "-",
            "-" if speed is None else format_flops_per_s(speed),
            device.uuid or "-",
        )
    return table


def cluster_lines(cluster: Cluster, uses: Sequence[DeviceUse] = ()) -> list[str]:
    """Links, and who uses busy devices."""
    lines = [
        f"{where}: {_link(link)}"
        for where, link in (("within a node", cluster.within_node), ("between nodes", cluster.between_nodes))
        if link is not None
    ]
    for rank, use in enumerate(uses):
        if use.taken_bytes > BUSY * use.total_bytes or use.users:
            lines.append(f"rank {rank} is busy: {format_bytes(use.taken_bytes)} are taken{users_text(use.users)}")
    return lines


def _link(link: Link) -> str:
    return f"{format_bytes_per_s(link.bandwidth_bytes_per_s)}, {format_seconds(link.latency_s)} latency"
