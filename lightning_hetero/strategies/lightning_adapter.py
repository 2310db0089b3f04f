"""All that this package knows of Lightning's private parts, in one place (checked with 2.5 to 2.6.6).

Each piece says which private name it touches and why nothing public will do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor

from lightning_hetero.data import with_batch_sampler

__all__ = [
    "SubprocessLauncher",
    "batches_to_skip",
    "drop_loader_states",
    "forget_train_dataloader",
    "give_device_mesh",
    "init_process_group",
    "keep_users_samplers",
    "reduce_over_ranks",
    "train_loaders",
    "trainer_arguments",
    "users_samplers_kept",
    "weigh_logged_values",
    "with_index_tracking",
    "without_index_tracking",
]

SubprocessLauncher = _SubprocessScriptLauncher
init_process_group = _init_dist_connection
reduce_over_ranks = _sync_ddp_if_available


class WeightedReduction(Protocol):
    """What a strategy offers so that logged values are those of one device over the global batch."""

    def step_samples(self) -> int:
        """Return this rank's samples in the current step; 0 where it takes part without any."""

    def begin_batch(self, training: bool) -> None:
        """Note that the next batch starts, before any hook sees it."""

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

    def update(self, value: Any, batch_size: int) -> None:
        if not self.is_tensor:
            super().update(value, batch_size)
            return
        if value.dtype not in (torch.float32, torch.float64):
            # as Lightning does: values are kept in 32 bits or more
            value = value.to(torch.get_default_dtype())
        own = self.owner.step_samples() if self.in_batch else batch_size
        if self._is_weighted_mean:
            # a value logged on_step alone comes with batch size 1: Lightning does not look for the real one
            weight = own if own == 0 or not self.meta.on_epoch else batch_size
            self._update_mean(value, weight)
        elif own > 0:
            super().update(value, batch_size)
        elif self.meta.sync.should:
            super().update(self._neutral(value), 0)
        elif self._forward_cache is None:
            self._forward_cache = value.detach()

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
        return total[0] / total[1]

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
        return self._batch

    @batch.setter
    def batch(self, batch: Any) -> None:
        self._batch = batch
        if batch is not None:
            self.owner.begin_batch(self.training)

    def __setitem__(self, key: str, metric: _ResultMetric) -> None:
        super().__setitem__(key, _WeightedMetric(metric, self.owner))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        self[key].in_batch = self.batch is not None
        super().update_metrics(key, value, batch_size)


def weigh_logged_values(trainer: pl.Trainer, owner: WeightedReduction) -> None:
    """Make ``self.log(..., sync_dist=True)`` weigh ranks by samples in all loops of ``trainer``.

    The loops keep their results in the private attribute ``_results``; ``log`` has no argument for the reduction.
    """
    trainer.fit_loop.epoch_loop._results = _WeightedResults(True, owner)
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results = _WeightedResults(False, owner)


def keep_users_samplers(trainer: pl.Trainer) -> None:
    """Stop Lightning from replacing samplers before ``Strategy.process_dataloader`` sees them (fact 14).

    The connector's ``use_distributed_sampler`` is read at that moment and has no setter on the Trainer.
    """
    connector = trainer._accelerator_connector
    if not hasattr(connector, "_hetero_users_choice"):
        connector._hetero_users_choice = connector.use_distributed_sampler  # type: ignore[attr-defined]
    connector.use_distributed_sampler = False


def users_samplers_kept(trainer: pl.Trainer) -> bool:
    """Whether the user passed ``Trainer(use_distributed_sampler=False)``: their loaders are to be left alone."""
    choice = getattr(trainer._accelerator_connector, "_hetero_users_choice", None)
    return choice is False


class _OwnIndices(_IndexBatchSamplerWrapper):
    """Notes no index where a rank only repeats another one's sample, so that nothing is written for it."""

    def __init__(self, batch_sampler: Any, has_samples: Callable[[int], bool]) -> None:
        super().__init__(batch_sampler)
        self._has_samples = has_samples

    def __next__(self) -> list[int]:
        batch = super().__next__()
        if not self._has_samples(len(self.seen_batch_indices) - 1):
            self.seen_batch_indices[-1] = []
        return batch


def with_index_tracking(batch_sampler: Any, has_samples: Callable[[int], bool]) -> Any:
    """Return a batch sampler off which Lightning's prediction loop reads the indices; it asks for this very class."""
    return _OwnIndices(batch_sampler, has_samples)


def without_index_tracking(loader: Any) -> Any:
    """Return the loader that Lightning wrapped for predicting as it was before; any other one as it is."""
    wrapper = getattr(loader, "batch_sampler", None)
    if not isinstance(wrapper, _IndexBatchSamplerWrapper):
        return loader
    return with_batch_sampler(loader, wrapper._batch_sampler)


def trainer_arguments() -> dict[str, Any]:
    """Return ``devices`` and ``precision`` as the user passed them to the Trainer being built; {} outside of that.

    The connector replaces ``devices="auto"`` on CPU by 1 and ``precision="16-mixed"`` by ``bf16-mixed`` before a
    strategy can look, so the arguments are read from its ``__init__``, which is on the stack when it calls
    ``Strategy._configure_launcher``.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_filename.endswith("accelerator_connector.py"):
            return {name: frame.f_locals.get(name) for name in ("devices", "precision")}
        frame = frame.f_back
    return {}


def train_loaders(trainer: pl.Trainer) -> int:
    """Return the number of training loaders that the fit loop combines; 0 before they are set up."""
    combined = trainer.fit_loop._combined_loader
    return 0 if combined is None else len(combined.flattened)


def batches_to_skip(trainer: pl.Trainer) -> int:
    """Return how many batches of the epoch a resumed fit has behind it; 0 for a fresh one or at an epoch's end.

    Lightning's own count. Its mechanism for stateful loaders is not used: it loads their states only if the loaders are
    set up after the restoration (``trainer.estimated_stepping_batches`` sets them up before), and refuses a checkpoint
    with a loader's state on one device, whose loader is a plain one.
    """
    loop = trainer.fit_loop
    if not loop.restarting:
        return 0
    done = loop.epoch_loop.batch_progress.current.ready
    return 0 if done >= trainer.num_training_batches else done


def drop_loader_states(checkpoint: dict[str, Any]) -> None:
    """Leave the loaders' states out of a checkpoint, in place, so that one device's plain loader can resume it."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    fit_loop.get("state_dict", {}).pop("combined_loader", None)


def forget_train_dataloader(trainer: pl.Trainer) -> None:
    """Have Lightning set the training loader up again (a checkpoint brought another global batch size)."""
    trainer.fit_loop._combined_loader = None


def give_device_mesh(module: pl.LightningModule, mesh: Any) -> None:
    """Make ``LightningModule.device_mesh`` available in ``configure_model``, as ModelParallelStrategy does."""
    module._device_mesh = mesh
