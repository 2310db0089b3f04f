"""How many samples and FLOPs a rank's training step has."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_hetero.collate import MicroBatches
from lightning_hetero.data import batch_size_of
from lightning_hetero.errors import HeteroError
from lightning_hetero.profiler.model_flops import CallRecorder, StepFlops, skeleton
from lightning_hetero.strategies import torch_adapter
from lightning_hetero.strategies.base import HeteroStrategy


class StepWatch:
    """Watches the first training batch of a fit and counts its FLOPs on the meta device.

    Args:
        module: the user's, before it is wrapped; one that is built in ``configure_model`` is looked at later.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._skeleton = _skeleton_of(module)
        self._recorder: CallRecorder | None = None

    @property
    def active(self) -> bool:
        """Whether the batch at hand is watched."""
        return self._recorder is not None

    def see_wrapped(self, module: nn.Module) -> None:
        """Look at a model that was not there before it was wrapped; the next batch is watched."""
        if self._skeleton is None:
            self._skeleton = _skeleton_of(module)

    def begin(self, trainer: pl.Trainer) -> None:
        """Watch the batch that begins."""
        if self._recorder is None:
            self._recorder = CallRecorder(self._module, torch_adapter.in_backward, _ignored(trainer, self._module))
            self._recorder.attach()

    def end(self) -> None:
        """Watch no longer."""
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def count(self, trainer: pl.Trainer, batch: Any) -> StepFlops | str:
        """Return the FLOPs of a sample, as far as this rank computes it, or why they cannot be counted."""
        recorder = self._recorder
        self.end()
        assert recorder is not None
        if self._skeleton is None:
            return "the module has no parameters"
        if not recorder.calls:
            return _nothing_called(trainer, has_samples=samples_in(trainer, batch) > 0)
        try:
            return recorder.step_flops(self._skeleton).per(max(1, samples_run(trainer, batch)))
        except HeteroError as error:
            return str(error)


def pipeline_of(trainer: pl.Trainer) -> int:
    """Index of the pipeline that this rank is a part of; -1 where each rank computes its samples alone."""
    strategy = trainer.strategy
    return strategy.pipeline_index() if isinstance(strategy, HeteroStrategy) else -1


def samples_in(trainer: pl.Trainer, batch: Any) -> float:
    """Samples of this rank in the training batch at hand, as they count in the global batch.

    Of a pipeline all ranks have all of its samples. Where ranks share a batch (tensor parallelism), each has its part.
    """
    strategy = trainer.strategy
    if isinstance(strategy, HeteroStrategy):
        return float(strategy.rank_samples())
    replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
    return batch_size_of(batch) * int(replicas) / trainer.world_size


def samples_run(trainer: pl.Trainer, batch: Any) -> int:
    """Samples that went through this rank's modules: one, too, where it only keeps the others company."""
    if pipeline_of(trainer) >= 0:
        return int(samples_in(trainer, batch))
    if isinstance(batch, MicroBatches):
        return sum(batch_size_of(each) for each in batch)
    return batch_size_of(batch)


def _nothing_called(trainer: pl.Trainer, *, has_samples: bool) -> StepFlops | str:
    if pipeline_of(trainer) >= 0 and not has_samples:
        return StepFlops(0.0)  # a rank without a stage
    if pipeline_of(trainer) >= 0:
        return "its stages call no module of the model, which was exported: pass flops_per_sample"
    return "training_step calls no submodule: pass flops_per_sample"


def _skeleton_of(module: nn.Module) -> nn.Module | None:
    return skeleton(module) if any(True for _ in module.parameters()) else None


def _ignored(trainer: pl.Trainer, module: nn.Module) -> list[nn.Module]:
    """Metrics, whose updates must not run on anything else, and a model that was cut: its stages run by themselves."""
    metrics = [each for each in module.modules() if isinstance(each, Metric | MetricCollection)]
    found = [inner for metric in metrics for inner in metric.modules()]
    strategy: Any = trainer.strategy
    if pipeline_of(trainer) >= 0:
        cut = strategy.assembly.placement.model
        found += [each for each in module.modules() if any(inner is cut for inner in each.modules())]
    return found
