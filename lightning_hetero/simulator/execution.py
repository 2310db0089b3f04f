"""How a shard plan is run: the engine and its options of communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import ShardPlan

ENGINES = ("fsdp2", "fsdp1")
"""what :mod:`lightning_hetero.strategies` builds on, and ``FullyShardedDataParallel``"""

PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NONE")


@dataclass(frozen=True)
class Execution:
    """How a plan is run; the options are those of hetero_fsdp.

    Args:
        engine: one of :data:`ENGINES`.
        backward_prefetch: "BACKWARD_PRE", "BACKWARD_POST" or "NONE".
        forward_prefetch: whether blocks gather the next ones in forward by an explicit list; only matters where
            ``blocking``, since a host that runs ahead of its device issues them early anyway.
        limit_all_gathers: True or None for 2 in flight, a number in flight, or False for no limit.
        blocking: whether collectives hold up the rank that issues them unless they are explicit (gloo).

    Raises:
        HeteroError: listing values that are not valid.
    """

    engine: str = "fsdp2"
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool | None = None
    limit_all_gathers: bool | int | None = None
    blocking: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.engine not in ENGINES:
            problems.append(f"engine is {self.engine!r}: give one of {', '.join(ENGINES)}")
        if self.backward_prefetch not in PREFETCHES:
            problems.append(f"backward_prefetch is {self.backward_prefetch!r}: give one of {', '.join(PREFETCHES)}")
        limit = self.limit_all_gathers
        if limit is not None and not isinstance(limit, bool) and limit < 1:
            problems.append(f"limit_all_gathers is {limit!r}: give True, False, or 1 and more in flight")
        raise_all(HeteroError, "a step cannot be run so", problems)

    @classmethod
    def of(cls, plan: ShardPlan, *, engine: str = "fsdp2", blocking: bool = False) -> Execution:
        """As a plan's options say.

        Args:
            plan: whose.
            engine: one of :data:`ENGINES`.
            blocking: as above; by default, on gloo, blocks gather the next ones in forward.
        """
        names = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
        given: dict[str, Any] = {name: plan.options[name] for name in names if plan.options.get(name) is not None}
        if blocking:
            given.setdefault("forward_prefetch", True)
        return cls(engine=engine, blocking=blocking, **given)

    @property
    def gathers_ahead(self) -> int | None:
        """How many blocks may be gathered beside the one that computes; None for no limit."""
        if self.limit_all_gathers is False:
            return None
        if self.engine == "fsdp1" or self.limit_all_gathers is None or self.limit_all_gathers is True:
            return 1
        return self.limit_all_gathers - 1

    def forward_ahead(self, blocks: int) -> int:
        """The same in forward, of so many blocks."""
        if self.blocking and not self.forward_prefetch:
            return 0
        return blocks if self.gathers_ahead is None else self.gathers_ahead

    def backward_ahead(self, blocks: int) -> int:
        """How many blocks are gathered ahead by backward prefetch: 0 is none."""
        if self.backward_prefetch == "NONE":
            return 0
        if self.engine == "fsdp1":
            return 1
        return blocks if self.gathers_ahead is None else self.gathers_ahead
