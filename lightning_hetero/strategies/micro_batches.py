"""Several micro-batches of a rank in one step: more and smaller ones where memory is small.

Ranks of a shard group run the same number of them, in lock-step; groups need not march together, since gradients cross
between them once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_hetero.collate import MicroBatches
from lightning_hetero.plan import even_parts
from lightning_hetero.strategies import results_adapter
from lightning_hetero.strategies.loss_weight import scaled

if TYPE_CHECKING:
    from lightning_hetero.strategies.fsdp import HeteroFSDPStrategy


class MicroBatchSteps:
    """Runs a strategy's steps of several micro-batches.

    All but the last run forward and backward inside ``training_step``; the last one's loss goes back to Lightning, with
    the value of the mean over all of them, and its backward completes the gradients. Gradients of the earlier ones are
    set aside meanwhile, since Lightning zeroes gradients in between.

    Args:
        strategy: whose steps.
    """

    def __init__(self, strategy: HeteroFSDPStrategy) -> None:
        self._strategy = strategy
        self._sizes: tuple[int, ...] = ()
        self.index = 0
        self._earlier: EarlierGradients | None = None

    @property
    def count(self) -> int:
        """How many micro-batches the step at hand has."""
        return max(1, len(self._sizes))

    def samples(self, own: int) -> int:
        """Return this rank's samples of the micro-batch at hand; ``own`` outside of micro-batches."""
        return self._sizes[self.index] if self._sizes else own

    def forget(self) -> None:
        """The next step begins."""
        self._sizes, self.index, self._earlier = (), 0, None

    def run(self, batches: MicroBatches, *rest: Any, **kwargs: Any) -> Any:
        """Return the output of the last micro-batch's step, its loss with the value of the mean over all."""
        strategy = self._strategy
        assert strategy.lightning_module is not None
        trainer = strategy.lightning_module.trainer
        self._sizes = even_parts(strategy.step_samples(), len(batches))
        earlier = EarlierGradients(strategy.gradients.parameters)
        earlier.set_aside()
        if not strategy.keeps_gradients():
            earlier.forget()  # of the step before: Lightning is about to zero them, and memory is what is short
        losses: list[Tensor | None] = []
        output = None
        try:
            for self.index, batch in enumerate(batches):
                results_adapter.put_micro_batch(trainer, batch)
                is_last = self.index == len(batches) - 1
                if is_last:
                    earlier.exchange()
                    strategy.gradients.begin_forward()
                output = strategy.own_step(batch, batch, *rest, **kwargs)
                losses.append(loss_in(output))
                if not is_last and losses[-1] is not None:
                    strategy.early_backward(losses[-1], batch)
        finally:
            results_adapter.put_micro_batch(trainer, batches)
        self._earlier = earlier
        weights = strategy.batch_weights()
        return with_mean_loss(output, losses, self._sizes if weights is None else weights.parts)

    def before_backward(self) -> None:
        """Put the gradients of earlier micro-batches where those of the last one will be added."""
        if self._earlier is not None:
            self._earlier.add()
            self._earlier = None

    def after_backward(self) -> None:
        """What is logged from here on is the whole step's."""
        self._sizes, self.index = (), 0


class EarlierGradients:
    """Gradients that are not to be touched for a while: set aside, and added to what has come since.

    Lightning zeroes gradients between a step's forward and its backward, so what earlier micro-batches leave has to
    be elsewhere meanwhile.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kept: list[Tensor | None] = []

    def set_aside(self) -> None:
        """Take all gradients off the parameters."""
        self._kept = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Drop what was set aside."""
        self._kept = [None] * len(self._kept)

    def exchange(self) -> None:
        """Put back what was set aside, and set aside what is there."""
        kept = self._kept
        self.set_aside()
        for parameter, gradient in zip(self._parameters, kept, strict=True):
            parameter.grad = gradient

    def add(self) -> None:
        """Add what was set aside to what is there."""
        for parameter, gradient in zip(self._parameters, self._kept, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():
                    parameter.grad += gradient
        self._kept = []


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in what a training step returned; None where it skipped the batch."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


def with_mean_loss(output: Any, losses: Sequence[Tensor | None], sizes: Sequence[float]) -> Any:
    """Return a step's output whose loss has the value of the mean over all micro-batches and the last one's graph.

    Args:
        output: of the last micro-batch.
        losses: of all of them.
        sizes: samples, or other items, that each counts for.
    """
    last = losses[-1]
    if last is None:
        return output
    if not sizes[-1]:
        last = scaled(last, 0.0)  # the mean over no items is not a number
    total = sum(sizes) or 1
    pairs = [(loss, size) for loss, size in zip(losses, sizes, strict=True) if loss is not None and size]
    mean = sum((loss.detach() * (size / total) for loss, size in pairs), start=torch.zeros_like(last))
    joined = last + (mean - last.detach()) if pairs else last
    return {**output, "loss": joined} if isinstance(output, dict) else joined
