"""The study's tables; ``data/README.md`` says where they are from."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"

LOCAL_BATCH = 32
"""images per GCD and step"""

GCDS_PER_NODE = 8


@dataclass(frozen=True)
class ViT:
    """One of the six models; cf. ``lightning_hetero.models.presets``, which builds them.

    Args:
        name: of the model.
        width: of the residual stream.
        depth: number of blocks.
        swiglu_width: hidden width of the three-matrix MLP.
        heads: attention heads per block.
        patch_size: pixels along each side of a patch.
    """

    name: str
    width: int
    depth: int
    swiglu_width: int
    heads: int
    patch_size: int

    @property
    def tokens(self) -> int:
        """Of an image of 224 x 224, with the class token."""
        return (224 // self.patch_size) ** 2 + 1


@dataclass(frozen=True)
class Throughput:
    """A run of the study.

    Args:
        model: name of the model.
        sharding: mode.
        nodes: of 8 GCDs each.
        images_per_s: over all of them.
    """

    model: str
    sharding: str
    nodes: int
    images_per_s: float


@dataclass(frozen=True)
class Memory:
    """A peak of the study.

    Args:
        model: name of the model.
        sharding: mode.
        nodes: ``None`` where the study gives one number for all.
        peak_gb: 10^9 bytes of a GCD.
    """

    model: str
    sharding: str
    nodes: int | None
    peak_gb: float


@dataclass(frozen=True)
class CommOption:
    """A run of vit_5b on 8 nodes.

    Args:
        sharding: mode.
        backward_prefetch: "BACKWARD_PRE", "BACKWARD_POST" or "NONE".
        limit_all_gathers: whether FSDP's rate limiter was on.
        images_per_s: over all GCDs.
    """

    sharding: str
    backward_prefetch: str
    limit_all_gathers: bool
    images_per_s: float


@cache
def models() -> dict[str, ViT]:
    """The six models by name."""
    return {
        row["model"]: ViT(
            row["model"],
            int(row["width"]),
            int(row["depth"]),
            int(row["swiglu_hidden_dim"]),
            int(row["heads"]),
            int(row["patch_size"]),
        )
        for row in _rows("models")
    }


@cache
def weak_scaling() -> tuple[Throughput, ...]:
    """Throughput by model, mode and nodes, without the runs under DDP, which are not like for like."""
    rows = _rows("weak_scaling")
    found = (Throughput(r["model"], r["sharding"], int(r["nodes"]), float(r["images_per_s"])) for r in rows)
    return tuple(row for row in found if row.sharding != "DDP")


@cache
def memory() -> tuple[Memory, ...]:
    """Peaks, without those under DDP."""
    found = (
        Memory(r["model"], r["sharding"], None if r["nodes"] == "any" else int(r["nodes"]), float(r["peak_active_gb"]))
        for r in _rows("memory")
    )
    return tuple(row for row in found if row.sharding != "DDP")


@cache
def comm_options() -> tuple[CommOption, ...]:
    """Prefetch and limit."""
    return tuple(
        CommOption(r["sharding"], r["backward_prefetch"], r["limit_all_gathers"] == "true", float(r["images_per_s"]))
        for r in _rows("comm_options_vit_5b_8_nodes")
    )


def _rows(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
