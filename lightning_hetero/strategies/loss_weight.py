"""What a rank's loss counts for when it is a mean over other items than samples, such as unpadded tokens.

A loss that is a mean over its batch's items is scaled by own items / all items, and gradients are summed: that is the
mean over all items of the global batch, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_hetero.collate import MicroBatches
from lightning_hetero.data import batch_size_of
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import even_parts

Gather = Callable[[Sequence[float]], list[list[float]]]
"""this rank's numbers -> every rank's, in rank order, in 64 bits (a collective)"""


def loss_weight_problems(loss_weight: Any) -> list[str]:
    """Say what is wrong with the argument."""
    if loss_weight is None or callable(loss_weight):
        return []
    return [f"loss_weight={loss_weight!r}: give a function of a batch that returns a number, or None"]


def parts_of(batch: Any, samples: int) -> list[tuple[Any, bool]]:
    """Return a rank's micro-batches, or its one batch, each with whether it has samples of its own.

    Args:
        batch: as a step takes it.
        samples: this rank's; where there are fewer than micro-batches, the last ones repeat another one's sample.
    """
    if not isinstance(batch, MicroBatches):
        return [(batch, samples > 0)]
    sizes = even_parts(samples, len(batch))
    return [(part, size > 0) for part, size in zip(batch, sizes, strict=True)]


@dataclass(frozen=True)
class BatchWeights:
    """What every rank's part of one batch counts for.

    Attributes:
        items: per rank, what ``loss_weight`` gave; 0 for a rank that only repeats another one's sample.
        sizes: per rank, the samples of its batch as Lightning counts them, with the same zeros.
        rank: this rank.
        parts: this rank's items, one number per micro-batch.
    """

    items: tuple[float, ...]
    sizes: tuple[int, ...]
    rank: int
    parts: tuple[float, ...]

    @property
    def own(self) -> float:
        """Items of this rank."""
        return self.items[self.rank]

    @property
    def total(self) -> float:
        """Items of the global batch."""
        return math.fsum(self.items)

    def factor(self, items: float) -> float:
        """Return what part of the global batch so many items are; 0 where it has none."""
        return items / self.total if self.total > 0 else 0.0


class LossWeight:
    """The user's function, checked.

    Args:
        function: takes a batch as ``training_step`` does, on its device; returns a number or a tensor of one element.
        rank: this rank, named in errors.
    """

    def __init__(self, function: Callable[[Any], Any], rank: int) -> None:
        self._function = function
        self._rank = rank

    @classmethod
    def of_user(cls, given: Callable[[Any], Any] | None, module: pl.LightningModule, rank: int) -> LossWeight | None:
        """Return the argument, else the module's method ``loss_weight``, else None.

        A plain attribute of that name (a number, a tensor, a submodule) is none of ours.
        """
        if given is None and callable(getattr(type(module), "loss_weight", None)):
            given = module.loss_weight  # type: ignore[assignment]
        return None if given is None else cls(given, rank)

    def of(self, batch: Any, step: int) -> float:
        """Return what a batch counts for.

        Raises:
            HeteroError: it is negative, not finite, or no number; names rank and step.
        """
        weight = self._number(batch, step)
        raise_all(HeteroError, "loss_weight cannot be used", _problems([weight], step, first_rank=self._rank))
        return weight

    def of_ranks(self, parts: Sequence[tuple[Any, bool]], step: int, gather: Gather) -> BatchWeights:
        """Return what the batch at hand counts for on every rank (one collective of two 64-bit numbers a rank).

        Args:
            parts: this rank's micro-batches, or its one batch, each with whether it has samples of its own.
            step: named in errors.
            gather: the collective.

        Raises:
            HeteroError: on all ranks alike, where any rank's weight is negative or not finite.
        """
        own = tuple(self._number(part, step) if counts else 0.0 for part, counts in parts)
        size = sum(batch_size_of(part) for part, counts in parts if counts)
        # a bad part must not be hidden by the sum: the first bad one is sent
        bad = [items for items in own if not _is_valid(items)]
        ranks = gather([bad[0] if bad else math.fsum(own), float(size)])
        items = [numbers[0] for numbers in ranks]
        raise_all(HeteroError, "loss_weight cannot be used", _problems(items, step))
        return BatchWeights(tuple(items), tuple(int(numbers[1]) for numbers in ranks), self._rank, own)

    def _number(self, batch: Any, step: int) -> float:
        with torch.no_grad():
            weight = self._function(batch)
        try:
            return float(weight.detach() if isinstance(weight, Tensor) else weight)
        except (TypeError, ValueError, RuntimeError):
            found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
            raise HeteroError(
                f"loss_weight gave {found} on rank {self._rank} in step {step}: return a number, or a tensor of one "
                "element, such as the unpadded tokens of the batch"
            ) from None


def _problems(weights: Sequence[float], step: int, first_rank: int = 0) -> list[str]:
    return [
        f"rank {rank}, step {step}: it gave {weight:g}; return a finite number >= 0, such as the unpadded tokens of "
        "the batch"
        for rank, weight in enumerate(weights, start=first_rank)
        if not _is_valid(weight)
    ]


def _is_valid(weight: float) -> bool:
    return math.isfinite(weight) and weight >= 0


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return ``factor * loss``; for a factor of 0 what is 0, and has gradients of 0, whatever the loss is.

    The mean over no items is not a number, and so are its gradients; they must not reach the other ranks' sum. The
    backward runs all the same, since it takes part in collectives.
    """
    if factor != 0.0:
        return loss * factor
    _silence(loss.grad_fn)
    nothing: Tensor = _Nothing.apply(loss)
    return nothing


class _Nothing(torch.autograd.Function):
    """Zero, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.zeros_like(gradients[0])


def _silence(node: Any) -> None:
    """Make zeros of all gradients that the graph behind a node will compute."""
    seen, left = set(), [node]
    while left:
        node = left.pop()
        if node is None or node in seen or not node.next_functions:
            continue  # leaves only store what they are given
        seen.add(node)
        node.register_hook(_zeros)
        left += [following for following, _ in node.next_functions]


def _zeros(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)
