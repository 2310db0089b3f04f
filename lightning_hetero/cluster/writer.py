"""Write a cluster file that reads back as an equal cluster."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_hetero.cluster.device import Device
from lightning_hetero.cluster.link import Fabric, Link
from lightning_hetero.cluster.reader import SCHEMA
from lightning_hetero.errors import ClusterError
from lightning_hetero.records import write_text
from lightning_hetero.units import exact_bytes, exact_bytes_per_s, exact_flops_per_s, exact_seconds

if TYPE_CHECKING:
    from lightning_hetero.cluster.cluster import Cluster


def write_file(cluster: Cluster, path: Path) -> None:
    """Write ``cluster`` as YAML, whole or not at all."""
    write_text(path, yaml.safe_dump(to_data(cluster), sort_keys=False, allow_unicode=True))


def to_data(cluster: Cluster) -> dict[str, Any]:
    """What the file holds, as plain data: neighbouring equal devices are one entry with a count."""
    runs = [(node, list(devices)) for node, devices in groupby(cluster.devices, key=lambda d: d.node)]
    if len(runs) != len(cluster.nodes):
        order = ", ".join(node for node, _ in runs)
        raise ClusterError(
            f"cluster {cluster.name!r} cannot be written: the ranks of a node do not follow one another "
            f"(nodes in rank order: {order}); start the ranks node after node"
        )
    data: dict[str, Any] = {"schema": SCHEMA, "name": cluster.name, "emulate": cluster.emulate}
    data["nodes"] = [
        {"name": node, "devices": [_entry(device, len(list(same))) for device, same in groupby(devices)]}
        for node, devices in runs
    ]
    names = ("within_pair", "within_node", "between_nodes")
    links = {name: getattr(cluster, name) for name in names}
    if any(links.values()):
        data["links"] = {name: _link(link) for name, link in links.items() if link is not None}
    return data


def _entry(device: Device, count: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": device.type, "count": count, "memory": exact_bytes(device.memory_bytes)}
    speeds = {"speed": device.speed_flops_per_s, "true_speed": device.true_speed_flops_per_s}
    entry |= {key: exact_flops_per_s(speed) for key, speed in speeds.items() if speed is not None}
    if device.speed_schedule:
        changes = [{"step": change.step, "factor": change.factor} for change in device.speed_schedule]
        entry["speed_schedule"] = changes
    texts = {"name": device.name, "uuid": device.uuid}
    return entry | {key: text for key, text in texts.items() if text is not None}


def _link(link: Link) -> dict[str, Any]:
    data: dict[str, Any] = {
        "bandwidth": exact_bytes_per_s(link.bandwidth_bytes_per_s),
        "latency": exact_seconds(link.latency_s),
    }
    if isinstance(link, Fabric):
        data["nics"] = link.nics
        if link.half_bandwidth_nodes is not None:
            data["half_bandwidth_nodes"] = link.half_bandwidth_nodes
    return data
