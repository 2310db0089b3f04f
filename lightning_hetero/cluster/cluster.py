"""The devices that a job runs on, one per rank, and the links between them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hetero.cluster.device import Device
from lightning_hetero.cluster.discovery import discoverer
from lightning_hetero.cluster.link import Link
from lightning_hetero.cluster.reader import Content, read_data, read_file
from lightning_hetero.cluster.writer import to_data, write_file
from lightning_hetero.errors import ClusterError, raise_all


@dataclass(frozen=True)
class Cluster:
    """One device per rank, in rank order, and the links between them.

    Args:
        name: what to call it in messages and reports.
        devices: ``devices[r]`` is the device of rank r; the ranks of a node follow one another.
        within_node: link between two ranks of a node; ``None`` where it is not known.
        between_nodes: link between ranks of different nodes, or a :class:`~lightning_hetero.cluster.Fabric`; ``None``
            where it is not known.
        emulate: whether CPU ranks are to behave like these devices. Then every device needs a speed.
        within_pair: link between the first and second, third and fourth, ... rank of a node, where it is another than
            ``within_node`` (two dies of one package, two cards on a bridge).

    Raises:
        ClusterError: listing every problem.
    """

    name: str
    devices: tuple[Device, ...]
    within_node: Link | None = None
    between_nodes: Link | None = None
    emulate: bool = False
    within_pair: Link | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        problems = [] if self.devices else ["it has no device: give at least one"]
        if not self.name:
            problems.append(f"name is {self.name!r}: give a non-empty text")
        if self.emulate:
            problems += [
                f"rank {rank} ({device.type}) has no speed: an emulated device needs one, such as 6 GFLOP/s"
                for rank, device in enumerate(self.devices)
                if device.speed_flops_per_s is None
            ]
        uuids = Counter(device.uuid for device in self.devices if device.uuid is not None)
        problems += [
            f"uuid {uuid!r} is listed {count} times: a device serves one rank only"
            for uuid, count in uuids.items()
            if count > 1
        ]
        raise_all(ClusterError, f"cluster {self.name!r} is not valid", problems)

    @property
    def world_size(self) -> int:
        """Number of ranks, which is the number of devices."""
        return len(self.devices)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in the order of their first rank."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    @property
    def types(self) -> tuple[str, ...]:
        """The distinct device types, in the order of their first rank."""
        return tuple(dict.fromkeys(self.device_types()))

    def device_types(self) -> tuple[str, ...]:
        """The device type of every rank."""
        return tuple(device.type for device in self.devices)

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """The ranks of the node called ``node``, in order."""
        return tuple(rank for rank, device in enumerate(self.devices) if device.node == node)

    def describe(self) -> str:
        """One line for messages: ``two-fast-two-slow: 2 x fast, 2 x slow on 2 nodes (emulated)``."""
        counts = Counter(self.device_types())
        devices = ", ".join(f"{counts[kind]} x {kind}" for kind in self.types)
        nodes = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
        return f"{self.name}: {devices} on {nodes}{' (emulated)' if self.emulate else ''}"

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file.

        .. code-block:: yaml

            schema: 1
            name: two-fast-two-slow
            emulate: true                # optional, default false: CPU ranks behave like these devices
            nodes:                       # ranks are counted node after node, entry after entry
              - name: fast
                devices: [{type: fast, count: 2, memory: 2 GiB, speed: 6 GFLOP/s, true_speed: 5 GFLOP/s}]
            links:                       # optional, and so is each of them
              within_pair: {bandwidth: 50 GB/s, latency: 5 us}     # ranks 0 and 1, 2 and 3, ... of a node
              within_node: {bandwidth: 10 GB/s, latency: 10 us}
              between_nodes: {bandwidth: 1 GB/s, latency: 50 us, nics: 2, half_bandwidth_nodes: 16}

        ``count`` is 1 by default. ``speed`` is needed only under ``emulate: true``, ``memory`` only for a
        type that ``lightning_hetero.cluster.peaks`` does not know. ``name`` and ``uuid`` are what
        discovery writes down of a real device. ``nics`` (network cards of a node, of the given bandwidth each) and
        ``half_bandwidth_nodes`` (:class:`~lightning_hetero.cluster.Fabric`) may be left out.

        Raises:
            ClusterError: listing every problem with its place, value and next step.
        """
        return cls._from(*read_file(Path(path)))

    @classmethod
    def from_dict(cls, data: object) -> Cluster:
        """Build a cluster from what a cluster file holds; errors as in :meth:`from_yaml`."""
        return cls._from(read_data(data, "cluster description"), "cluster description")

    @classmethod
    def _from(cls, content: Content, source: str) -> Cluster:
        try:
            return cls(**vars(content))
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from None

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster file, whole or not at all; ``from_yaml`` gives an equal cluster back.

        Raises:
            ClusterError: if the ranks of a node do not follow one another, which the file cannot say.
        """
        write_file(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`to_yaml` writes, as plain data; errors as there."""
        return to_data(self)

    @classmethod
    def discover(cls, *, dtype: str = "float32", measure_speed: bool = True, measure_links: bool = True) -> Cluster:
        """Find out what every rank really is, and measure it.

        With an initialised default process group all ranks must call it, and all get the same cluster;
        without one it describes the local devices.

        Args:
            dtype: torch's name of the dtype whose matmul speed is measured ("float32", "bfloat16").
            measure_speed: whether to measure matmul speed; otherwise speeds are ``None``.
            measure_links: whether to measure links; otherwise, and with one rank, they are ``None``.

        Raises:
            ClusterError: if torch is missing, or ``dtype`` is not a floating-point dtype.
        """
        return discoverer()(dtype=dtype, measure_speed=measure_speed, measure_links=measure_links)
