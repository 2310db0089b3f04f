"""One row of numbers from every rank, and what loggers are told of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class RankTable(Metric):
    """The latest numbers of every rank; ``compute`` gives all of them on each rank, by one collective.

    Args:
        rank: this rank.
        world_size: number of ranks.
        columns: numbers of a rank.
    """

    full_state_update = False
    table: Tensor

    def __init__(self, rank: int, world_size: int, columns: int) -> None:
        super().__init__()
        self._rank = rank
        # a rank fills its own row, so that the sum over ranks is all rows; NaN where it has no such number
        self.add_state("table", torch.zeros(world_size, columns, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Sequence[float | None]) -> None:
        """Note this rank's numbers; None where it has none."""
        row = [math.nan if value is None else value for value in values]
        self.table[self._rank] = torch.tensor(row, dtype=self.table.dtype, device=self.table.device)

    def compute(self) -> Tensor:
        """Return the numbers of all ranks, of shape (ranks, columns)."""
        return self.table


def logged(name: str, values: Sequence[float]) -> Mapping[str, float]:
    """What loggers are told of one number of every rank; ranks that have none (NaN) are left out.

    Args:
        name: of the number, with its unit ("power_w").
        values: by rank.

    Returns:
        ``device/power_w`` (the mean), ``device/power_w_rank_0``, ..., ``device/min_power_w``, ``device/max_power_w``;
        nothing where no rank has it.
    """
    there = {rank: value for rank, value in enumerate(values) if not math.isnan(value)}
    if not there:
        return {}
    found = {f"device/{name}": sum(there.values()) / len(there)}
    found |= {f"device/{name}_rank_{rank}": value for rank, value in there.items()}
    return found | {f"device/min_{name}": min(there.values()), f"device/max_{name}": max(there.values())}
