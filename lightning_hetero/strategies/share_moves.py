"""Which batch shares hold for which training batch, where they move in mid-run.

Loaders read ahead, so a move takes effect from a batch that no rank's loader has drawn yet, and what holds for a batch
must be the same when its indices are drawn, when it is handed out, and after a resume::

    batch      0 ... 17 | 18  19 | 20  21 ...
               handed   | drawn  | not drawn: a move decided now begins at the largest first such batch of any rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_hetero.plan import ShardPlan

Position = tuple[int, int]
"""epoch, and batch in it"""


class ShareMoves:
    """The plans of a fit, each with the training batch from which it holds; they differ in their shares alone.

    Args:
        plan: what holds from the start.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._entries: list[tuple[Position, ShardPlan]] = [((0, 0), plan)]

    def __len__(self) -> int:
        return len(self._entries) - 1

    def at(self, position: Position) -> ShardPlan:
        """Return what holds for a batch."""
        return next(plan for since, plan in reversed(self._entries) if since <= position)

    def is_pending(self, position: Position) -> bool:
        """Whether a move is decided that does not hold for this batch yet."""
        return self._entries[-1][0] > position

    def add(self, position: Position, plan: ShardPlan) -> None:
        """Have ``plan`` hold from a batch on, which comes after all moves so far."""
        assert position > self._entries[-1][0], (position, self._entries[-1][0])
        self._entries.append((position, plan))

    def to_state(self) -> list[dict[str, Any]]:
        """Return plain data for a checkpoint, the first shares included; empty where nothing moved."""
        if not len(self):
            return []
        return [
            {"epoch": epoch, "batch": batch, "batch_shares": list(plan.batch_shares)}
            for (epoch, batch), plan in self._entries
        ]

    @classmethod
    def from_state(cls, state: list[Mapping[str, Any]], plan: ShardPlan) -> ShareMoves:
        """Return what :meth:`to_state` wrote, of a fit with the devices and the global batch of ``plan``."""
        moves = cls(_with_shares(plan, state[0]["batch_shares"]))
        for entry in state[1:]:
            moves.add((int(entry["epoch"]), int(entry["batch"])), _with_shares(plan, entry["batch_shares"]))
        return moves


def _with_shares(plan: ShardPlan, shares: list[int]) -> ShardPlan:
    """Return the plan with other shares; of them nothing is predicted."""
    found = tuple(int(share) for share in shares)
    if found == plan.batch_shares:
        return plan
    return replace(plan, batch_shares=found, micro_batch_sizes=(), predictions=(), predicted_step_s=None)
