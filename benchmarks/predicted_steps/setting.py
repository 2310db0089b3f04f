"""What is predicted and measured: one model and global batch on one set of emulated devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hetero_speedup.model import ViTSize
from benchmarks.predicted_steps.models import Size
from lightning_hetero.cluster import Cluster, Device

FSDP, PIPE = "hetero_fsdp", "hetero_pipe"
MIB = 2**20

SMALL = ViTSize(depth=4, width=128, heads=4)


@dataclass(frozen=True)
class Setting:
    """One run.

    Args:
        name: what the table calls it.
        strategy: "hetero_fsdp" or "hetero_pipe".
        declared: speed of each rank's device as the cluster file says it, in GFLOP/s.
        true: the speed that it really has; by default the declared one. Only measuring tells.
        global_batch: samples of a step over all ranks.
        size: of the model.
        options: of the strategy.
        memory_mib: memory of each device; one number is that of all.
        groups: of hetero_fsdp, ranks that shard together, where no option says it: an earlier fit has sharded the
            module so, and the strategy keeps that.
        link: between ranks, as the cluster file says it: a name of :data:`LINKS`, or "" for none.
        types: of the devices; by default each declared speed is one.
    """

    name: str
    strategy: str
    declared: tuple[float, ...]
    true: tuple[float, ...] = ()
    global_batch: int = 32
    size: Size = SMALL
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_mib: tuple[int, ...] = (1024,)
    groups: tuple[tuple[int, ...], ...] = ()
    types: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.declared)

    @property
    def true_speeds(self) -> tuple[float, ...]:
        """In GFLOP/s."""
        return self.true or self.declared

    def cluster(self) -> Cluster:
        """The emulated devices."""
        memory = self.memory_mib * (self.world_size if len(self.memory_mib) == 1 else 1)
        types = self.types or tuple(f"{speed:g} GFLOP/s" for speed in self.declared)
        devices = tuple(
            Device(kind, "here", mib * MIB, declared * 1e9, true * 1e9)
            for kind, mib, declared, true in zip(types, memory, self.declared, self.true_speeds, strict=True)
        )
        return Cluster(self.name, devices, emulate=True)
