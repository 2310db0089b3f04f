"""What shard plans may use."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan.shard import MODES


@dataclass(frozen=True)
class ShardOptions:
    """What plans may use.

    Args:
        modes: sharding modes, some of :data:`~lightning_hetero.plan.shard.MODES`.
        checkpointing: whether ranks may checkpoint activations.
        accumulate: whether groups may run more than one micro-batch.

    Raises:
        HeteroError: if there is no mode, or one is not known.
    """

    modes: tuple[str, ...] = MODES
    checkpointing: bool = True
    accumulate: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"mode {mode!r} is not known: give some of {', '.join(MODES)}" for mode in self.modes if mode not in MODES
        ]
        if not self.modes:
            problems.append(f"there is no mode: give some of {', '.join(MODES)}")
        raise_all(HeteroError, "shard plans cannot be searched", problems)
