"""How many ranks there are, and whether they are those that the cluster and the Trainer speak of."""

from __future__ import annotations

import os
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_hetero.cluster import Cluster


def launched_on_node(environment: ClusterEnvironment) -> int | None:
    """How many ranks of this node torchrun has started; None where it was not torchrun."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if environment.creates_processes_externally and text.isdigit() else None


def number_of_devices(devices: Any) -> int | None:
    """Return the number that ``Trainer(devices=...)`` asks for, or None for "auto"."""
    if isinstance(devices, list | tuple):
        return len(devices)
    text = str(devices).strip()
    if devices is None or text in ("auto", "-1"):
        return None
    if "," in text:
        return len([part for part in text.split(",") if part])
    return int(text) if text.isdigit() else None


def cluster_problems(cluster: Cluster, devices: Any, num_nodes: int, world_size: int, accelerator: Any) -> list[str]:
    """What keeps the ranks from being the cluster's devices.

    Args:
        cluster: one device for each rank.
        devices: as the Trainer was given them.
        num_nodes: the Trainer's.
        world_size: number of ranks, as the launcher says.
        accelerator: the Trainer's.
    """
    problems = []
    if cluster.emulate and not isinstance(accelerator, CPUAccelerator):
        problems.append(
            f"cluster {cluster.name!r} is emulated by CPU ranks, but the accelerator is "
            f"{type(accelerator).__name__}: pass Trainer(accelerator='cpu')"
        )
    asked = number_of_devices(devices)
    ranks = world_size if asked is None or not cluster.emulate else asked * num_nodes
    if ranks != cluster.world_size:
        problems.append(
            f"cluster {cluster.name!r} has {cluster.world_size} devices, but {ranks} ranks were asked "
            f"for (devices={devices!r}, num_nodes={num_nodes}): one rank per device; "
            + ("leave devices out, or " if cluster.emulate else "")
            + f"make both {cluster.world_size}"
        )
    return problems


def node_problems(local_rank: int, local_devices: int, devices: Any) -> list[str]:
    """What keeps this rank from having a device of its node to itself.

    Args:
        local_rank: as the launcher gave it.
        local_devices: how many devices the Trainer takes on this node.
        devices: as the Trainer was given them.
    """
    if local_rank < local_devices:
        return []
    problem = (
        f"this is rank {local_rank} of its node, but the Trainer takes {local_devices} devices there "
        f"(devices={devices!r}): leave devices out, or start as many processes on the node as it has devices"
    )
    return [problem]
