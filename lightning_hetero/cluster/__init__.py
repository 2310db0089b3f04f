"""The cluster: devices, links, what a cluster file says and what known devices are capable of."""

from lightning_hetero.cluster.cluster import Cluster
from lightning_hetero.cluster.device import Device
from lightning_hetero.cluster.link import Fabric, Link
from lightning_hetero.cluster.speed_change import SpeedChange

__all__ = ["Cluster", "Device", "Fabric", "Link", "SpeedChange"]
