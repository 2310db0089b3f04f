"""Numbers of every rank: collected step by step without a collective, brought together now and then, and named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

Rows = list[list[list[float]]]
"""by rank, by step, the numbers"""


class RankValues(Metric):
    """Rows of numbers of this rank; :meth:`compute` gives those of all ranks, apart.

    Args:
        trainer: whose ranks.
        width: numbers in a row.
    """

    full_state_update = False
    rows: Tensor

    def __init__(self, trainer: pl.Trainer, width: int) -> None:
        ranks = trainer.world_size
        device = trainer.strategy.root_device

        def gather(own: Tensor, group: Any = None) -> list[Tensor]:
            own = own.to(device)
            everyones = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(everyones, own)
            return [each.cpu() for each in everyones]

        super().__init__(dist_sync_fn=gather, distributed_available_fn=lambda: ranks > 1 and dist.is_initialized())
        # 64-bit wherever there is: of seconds since a machine's start, microseconds matter
        self.add_state("rows", torch.zeros(0, width, dtype=torch.float64), dist_reduce_fx=None)
        self._added: list[list[float]] = []

    def add(self, row: Sequence[float | None]) -> None:
        """Add a row, of which None is a number that there is not; cheap enough for every step."""
        self._added.append([math.nan if value is None else float(value) for value in row])

    def update(self, rows: Tensor) -> None:
        """Take rows, shape (steps, width), into the state."""
        self.rows = torch.cat([self.rows, rows])

    def compute(self) -> Tensor:
        """All rows, shape (ranks, steps, width); every rank has to have as many (a collective)."""
        return self.rows if self.rows.ndim == 3 else self.rows[None]

    def take(self) -> Rows:
        """Return all rows and begin anew (a collective); empty where there are none."""
        if not self._added:
            return []
        self.update(torch.tensor(self._added, dtype=torch.float64))
        rows: Rows = self.compute().tolist()
        self.reset()
        return rows

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self._added = []


def gather_objects(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return every rank's value, by rank (a collective)."""
    if trainer.world_size < 2 or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values


def gather_once(trainer: pl.Trainer, row: Sequence[float | None]) -> list[list[float]]:
    """Return every rank's numbers, by rank (a collective)."""
    values = RankValues(trainer, len(row))
    values.add(row)
    return [rows[0] for rows in values.take()]


def named(what: str, by_rank: Sequence[float | None]) -> dict[str, float]:
    """The names under which one number of every rank is logged; nothing where no rank has it.

    Returns:
        ``device/<what>`` for the mean, ``device/<what>_rank_{r}``, ``device/min_<what>``, ``device/max_<what>``.
    """
    there = {rank: value for rank, value in enumerate(by_rank) if value is not None and not math.isnan(value)}
    if not there:
        return {}
    found = {f"device/{what}": sum(there.values()) / len(there)}
    found |= {f"device/{what}_rank_{rank}": value for rank, value in there.items()}
    return {**found, f"device/min_{what}": min(there.values()), f"device/max_{what}": max(there.values())}
