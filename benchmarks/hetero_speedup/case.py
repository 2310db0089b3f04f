"""What is compared: sizes and devices, and how often each arm is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hetero_speedup.model import ViTSize
from lightning_hetero.cluster import Cluster

PINNED_CLUSTER = Path(__file__).with_name("two_fast_two_slow.yaml")


@dataclass(frozen=True)
class Case:
    """One model and global batch on one set of devices.

    Args:
        name: what tables and progress call it.
        world_size: ranks of the distributed arms.
        global_batch: samples of one step of the distributed arms.
        solo_batch: samples of one step of a device alone; any size gives its rate, small ones sooner.
        cluster_path: cluster file of emulated devices; None to compute for real.
        doubled_ranks: ranks that compute everything twice.
        size: the model.
        max_steps: bound on the steps of an arm; sets the length of the data set.
    """

    name: str
    world_size: int
    global_batch: int
    solo_batch: int
    cluster_path: Path | None = None
    doubled_ranks: tuple[int, ...] = ()
    size: ViTSize = field(default_factory=ViTSize)
    max_steps: int = 100

    @property
    def local_batch(self) -> int:
        """Batch size of the loader: each rank's part of an even split."""
        return self.global_batch // self.world_size

    @property
    def emulated(self) -> bool:
        """Whether step times come from emulated devices."""
        return self.cluster_path is not None

    def kind_of_rank(self) -> tuple[str, ...]:
        """The kind of every rank's device; ranks of one kind run alone at one rate."""
        if self.cluster_path is None:
            return tuple("doubled" if r in self.doubled_ranks else "plain" for r in range(self.world_size))
        return tuple(device_kinds(Cluster.from_yaml(self.cluster_path)))

    def rank_of_kind(self) -> dict[str, int]:
        """One rank for each kind, the first."""
        kinds = self.kind_of_rank()
        return {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}


def device_kinds(cluster: Cluster) -> list[str]:
    """Name the kinds: the device's type, with its speed where one type runs at several."""
    speeds: dict[str, set[float | None]] = {}
    for device in cluster.devices:
        speeds.setdefault(device.type, set()).add(device.actual_speed_flops_per_s)
    return [
        d.type if len(speeds[d.type]) == 1 else f"{d.type} at {(d.actual_speed_flops_per_s or 0) / 1e9:g} GFLOP/s"
        for d in cluster.devices
    ]


@dataclass(frozen=True)
class Effort:
    """How often a case's arms are measured.

    Args:
        turns: turns of every arm, alternating.
        steps: measured steps of an arm's turn.
        warmup_steps: steps of every arm before the first turn, not measured.
        settling_steps: further ones of hetero_fsdp, whose shares may move once after the first of them.
    """

    turns: int
    steps: int
    warmup_steps: int = 1
    settling_steps: int = 0

    @property
    def steps_per_arm(self) -> int:
        """All steps of one arm that does not settle."""
        return self.warmup_steps + self.turns * self.steps
