"""Collate a rank's samples of one step micro-batch by micro-batch, so that any collate of the user's works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_hetero.plan import even_parts


class MicroBatches(list[Any]):
    """A rank's samples of one step, as the batches that its group runs one after the other."""


class MicroCollate:
    """Collates a rank's samples into micro-batches, the larger ones first.

    Args:
        collate: the user's; called once for each micro-batch.
        count: micro-batches of the rank's group. With fewer samples than that, the last
            micro-batches repeat the first sample; they count with weight 0.
        samples: of a full micro-batch, where a short batch is to make fewer of them.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], count: int, samples: int | None = None) -> None:
        self.collate = collate
        self.count = count
        self.samples = samples

    def __call__(self, samples: Sequence[Any]) -> MicroBatches:
        """Return the micro-batches."""
        found, at = MicroBatches(), 0
        count = self.count if self.samples is None else min(self.count, -(-len(samples) // self.samples))
        for size in even_parts(len(samples), count):
            found.append(self.collate(list(samples[at : at + size]) or [samples[0]]))
            at += size
        return found
