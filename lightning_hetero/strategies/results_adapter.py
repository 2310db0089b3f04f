"""How logged values come together over ranks: Lightning's results, which are private (checked with 2.5 to 2.6.6).

The loops keep what ``self.log`` gets in objects of private classes, and ``log`` has no argument for how ranks are
weighed: subclasses of these classes, in the loops of our Trainers, are the way in.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor

from lightning_hetero.collate import MicroBatches
from lightning_hetero.strategies.loss_weight import BatchWeights

__all__ = ["WeightedReduction", "as_it_is", "put_micro_batch", "weigh_logged_values"]


class WeightedReduction(Protocol):
    """What a strategy offers so that logged values are those of one device over the global batch."""

    def step_samples(self) -> int:
        """Return this rank's samples in the current step; 0 where it takes part without any."""

    def micro_batch(self) -> tuple[int, int]:
        """Return which micro-batch of the step is at hand, and how many there are."""

    def begin_batch(self, training: bool, batch: Any = None) -> None:
        """Note that the next batch starts, before any hook sees it."""

    def batch_weights(self) -> BatchWeights | None:
        """Return what each rank's part of the batch at hand counts for; None where that is its samples."""

    def step_items(self) -> float:
        """Return what this rank's batch at hand counts for, where there are :meth:`batch_weights`."""

    def end_batch(self, training: bool) -> None:
        """Note that the batch has ended, after every hook has seen it."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of a vector (a collective)."""


class _WeightedMetric(_ResultMetric):
    """A logged value whose reduction over ranks counts samples.

    Lightning averages both the sum of values x batch size and the integer count of samples over ranks; the second is
    floored, and values logged on a step are averaged unweighted (DESIGN 9, fact 4). Here both are summed. On a rank
    that takes part in a step without samples nothing is counted.
    """

    def __init__(self, metric: _ResultMetric, owner: WeightedReduction) -> None:
        super().__init__(metric.meta, metric.is_tensor)
        self.owner = owner
        self.in_batch = False
        self.given_size = False  # whether the user said the batch size
        self._parts: list[tuple[Tensor, float]] = []  # of the step's micro-batches so far

    def update(self, value: Any, batch_size: int) -> None:
        if not self.is_tensor:
            super().update(value, batch_size)
            return
        if value.dtype not in (torch.float32, torch.float64):
            # as Lightning does: values are kept in 32 bits or more
            value = value.to(torch.get_default_dtype())
        own = self.owner.step_samples() if self.in_batch else batch_size
        weights = self.owner.batch_weights() if self.in_batch and self._is_weighted_mean else None
        if self.in_batch and self.owner.micro_batch()[1] > 1:
            counted = own if own == 0 or not self.meta.on_epoch else batch_size
            self._parts.append((value.detach(), counted if weights is None else self.owner.step_items()))
            index, count = self.owner.micro_batch()
            if index < count - 1:
                return  # ranks of other groups may have more or fewer of them: they meet at the last one
            value, batch_size = self._joined()
            own = batch_size
        if weights is not None:
            self._update_mean_of_items(value, weights, batch_size)
        elif self._is_weighted_mean:
            # a value logged on_step alone comes with batch size 1: Lightning does not look for the real one
            weight = own if own == 0 or not self.meta.on_epoch else batch_size
            self._update_mean(value, weight)
        elif own > 0:
            super().update(value, batch_size)
        elif self.meta.sync.should:
            super().update(self._neutral(value), 0)
        elif self._forward_cache is None:
            self._forward_cache = value.detach()

    def _joined(self) -> tuple[Tensor, int]:
        """Return one value for all micro-batches, and what it weighs."""
        values, weights = zip(*self._parts, strict=True)
        self._parts = []
        counted = [value for value, weight in zip(values, weights, strict=True) if weight] or list(values[:1])
        if self.meta.is_mean_reduction:
            total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
            return (total / sum(weights) if sum(weights) else values[0]), sum(weights)
        joined = counted[0]
        for value in counted[1:]:
            joined = joined + value if self.meta.is_sum_reduction else self.meta.reduce_fx(joined, value)
        return joined, sum(weights)

    def _update_mean(self, value: Tensor, weight: int) -> None:
        weighted = value * weight if weight else torch.zeros_like(value)
        if self.meta.on_step:
            pair = torch.stack([weighted.detach(), torch.as_tensor(float(weight)).to(value)])
            total = self.owner.sum_over_ranks(pair)
            self._forward_cache = total[0] / total[1]
            if not self.meta.on_epoch:
                self.value = self._forward_cache
                return
        self.value = self.value + weighted
        self.cumulated_batch_size = self.cumulated_batch_size + weight

    def _update_mean_of_items(self, value: Tensor, weights: BatchWeights, batch_size: int) -> None:
        """On one device the value is the mean over the global batch's items, and an epoch weighs it by its samples."""
        factor = weights.factor(weights.own)
        part = value * factor if factor else torch.zeros_like(value)  # the mean over no items is not a number
        everyones, own_size = float(sum(weights.sizes)), weights.sizes[weights.rank]
        if self.given_size and own_size:
            own_size = batch_size
        if self.meta.on_step or self.given_size:
            total = self.owner.sum_over_ranks(torch.stack([part.detach(), torch.as_tensor(float(own_size)).to(part)]))
            everyones = float(total[1])
            if self.meta.on_step:
                self._forward_cache = total[0]
                if not self.meta.on_epoch:
                    self.value = self._forward_cache
                    return
        if weights.total:
            self.value = self.value + part * everyones
            self.cumulated_batch_size = self.cumulated_batch_size + own_size

    def compute(self) -> Tensor:
        if not self.is_tensor:
            with warnings.catch_warnings():
                # a rank that had no sample yet has nothing to add to a metric; torchmetrics takes it for a mistake
                warnings.filterwarnings(
                    "ignore", message=".*was called before the ``update`` method", category=UserWarning
                )
                return super().compute()
        if not self._is_weighted_mean:
            return super().compute()
        pair = torch.stack([self.value, self.cumulated_batch_size.to(self.value)])
        total = self.owner.sum_over_ranks(pair)
        return total[0] / total[1].clamp(min=1)  # where no batch had an item

    @property
    def _is_weighted_mean(self) -> bool:
        sync = self.meta.sync
        return bool(self.meta.is_mean_reduction and sync.should and not sync.rank_zero_only)

    def _neutral(self, value: Tensor) -> Tensor:
        """Return what leaves a sum, minimum or maximum over ranks as it is."""
        if self.meta.is_max_reduction:
            return torch.full_like(value, float("-inf"))
        if self.meta.is_min_reduction:
            return torch.full_like(value, float("inf"))
        return torch.zeros_like(value)


class _WeightedResults(_ResultCollection):
    """A loop's results, holding :class:`_WeightedMetric` objects."""

    def __init__(self, training: bool, owner: WeightedReduction) -> None:
        self._batch: Any = None
        self.owner = owner
        super().__init__(training)

    @property
    def batch(self) -> Any:
        """The batch at hand. Lightning sets it before the first hook that may log, and a strategy's hook runs last."""
        # Lightning looks for the number of samples in it, and would find micro-batches of unequal sizes
        return self._batch[0] if isinstance(self._batch, MicroBatches) else self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        ended = self._batch is not None and batch is None
        self._batch = batch
        if batch is not None:
            self.owner.begin_batch(self.training, batch)
        elif ended:
            self.owner.end_batch(self.training)

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        super().__setitem__(key, _WeightedMetric(metric, self.owner))

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        value.given_size = batch_size is not None
        return super()._extract_batch_size(value, batch_size, meta)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self[key].in_batch = self.batch is not None
        if isinstance(self._batch, MicroBatches):
            batch_size = self.owner.step_samples()
        super().update_metrics(key, value, batch_size)


def as_it_is(value: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduction over ranks of what is the same on all of them, or each rank's own."""
    return value


class _StageResults(_WeightedResults):
    """A training loop's results where what a step logs is made the same on all ranks before it is logged.

    What hooks log is taken as each rank has it, without Lightning's advice to synchronise it.
    """

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        dict.__setitem__(self, key, metric)

    def log(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("sync_dist"):
            kwargs.update(sync_dist=True, sync_dist_fn=as_it_is)
        super().log(*args, **kwargs)

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        if batch_size is None and self.batch is not None:
            batch_size = self.owner.batch_samples()  # type: ignore[attr-defined]
        return super()._extract_batch_size(value, batch_size, meta)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        _ResultCollection.update_metrics(self, key, value, batch_size)


class _PipelineResults(_WeightedResults):
    """An evaluation's results where ranks of one pipeline see the same batch: each value counts once a pipeline."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as with ``sync_dist=True``, or the pipelines' values would be different ones."""
        if not kwargs.get("rank_zero_only"):
            kwargs["sync_dist"] = True
        super().log(*args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if self.batch is None:
            batch_size = self.owner.loop_samples(batch_size if self[key].given_size else None)  # type: ignore[attr-defined]
        super().update_metrics(key, value, batch_size)
        metric = self[key]
        cache = metric._forward_cache
        if self.batch is not None and not metric.is_tensor and metric.meta.on_step and isinstance(cache, Tensor):
            # of a torchmetrics object a step's value is this pipeline's; the epoch's comes together by itself
            weight = self.owner.step_samples()
            count = torch.as_tensor(float(weight), dtype=torch.float64, device=cache.device)
            pair = torch.stack([cache.double() * weight if weight else torch.zeros_like(count), count])
            total = self.owner.sum_over_ranks(pair)
            metric._forward_cache = (total[0] / total[1]).to(cache)


def weigh_logged_values(trainer: pl.Trainer, owner: WeightedReduction, *, training: bool = True) -> None:
    """Make ``self.log(..., sync_dist=True)`` weigh ranks by samples in all loops of ``trainer``.

    ``training`` says whether the training loop's are; a pipeline's last stages weigh them. The loops keep their results
    in the private attribute ``_results``; ``log`` has no argument for the reduction.
    """
    trainer.fit_loop.epoch_loop._results = (_WeightedResults if training else _StageResults)(True, owner)
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results = _WeightedResults(False, owner) if training else _PipelineResults(False, owner)


def put_micro_batch(trainer: pl.Trainer, batch: Any) -> None:
    """Let what is logged from here on count for ``batch``: the training loop's results keep the batch at hand.

    They take it by a property that Lightning sets once a step and :class:`_WeightedResults` takes for its start.
    """
    results = trainer.fit_loop.epoch_loop._results
    results._batch = batch  # type: ignore[attr-defined]
    results.batch_size = None  # which Lightning looks for once a step
