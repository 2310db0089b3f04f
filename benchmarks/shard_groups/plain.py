"""Options on equal devices that compute for real: hetero_fsdp, and a plain FSDP2 loop with the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from benchmarks.hetero_speedup.arms import equal_strategy, fit, plain_loop
from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.gate import Gate
from benchmarks.hetero_speedup.model import DigitClassifier, shard


@dataclass(frozen=True)
class Ours:
    """hetero_fsdp with options, equal shares.

    Args:
        options: of the strategy's constructor.
        groups: ranks that shard together; one group of all if empty.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()

    def __call__(self, case: Case, rank: int, gate: Gate) -> None:
        """Run it in one rank."""
        fit(case, DigitClassifier(case.size), equal_strategy(case, self.groups, **self.options), [], gate)


@dataclass(frozen=True)
class Plain:
    """FSDP2 in a plain loop, with the same.

    Args:
        mesh_shape: (ranks,), or (replicas, ranks of each) for FSDP2's hybrid sharding.
        options: of ``fully_shard``.
        recompute: whether blocks are computed again in backward.
        gather_ahead: how many blocks are gathered ahead by explicit lists; 0 leaves FSDP2 its own order.
    """

    mesh_shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = False
    gather_ahead: int = 0

    def __call__(self, case: Case, rank: int, gate: Gate) -> None:
        """Run it in one rank."""
        plain_loop(case, gate, self.mesh_shape, self._shard)

    def _shard(self, model: Any, mesh: DeviceMesh) -> None:
        if self.recompute:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        shard(model, mesh, **self.options)
        blocks = list(model.blocks)
        for index, block in enumerate(blocks if self.gather_ahead else []):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + self.gather_ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - self.gather_ahead) : index][::-1])


PAIRS: dict[str, tuple[Ours, Plain]] = {
    "FULL_SHARD": (Ours(), Plain((2,))),
    "SHARD_GRAD_OP": (Ours({"reshard_after_forward": False}), Plain((2,), {"reshard_after_forward": False})),
    "HYBRID_1": (Ours(groups=((0,), (1,))), Plain((2, 1))),
    "activation_checkpointing": (Ours({"activation_checkpointing": True}), Plain((2,), recompute=True)),
    "limit_all_gathers=3": (
        Ours({"limit_all_gathers": 3, "forward_prefetch": True}),
        Plain((2,), gather_ahead=2),
    ),
}
"""by name: ours, and the plain loop with the same options"""
