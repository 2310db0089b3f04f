"""At the start of a fit: check the loss, measure the ranks, decide the batch shares."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hetero.cluster import Cluster
from lightning_hetero.data import UnevenLoader
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.planner.one_group import plan_one_group
from lightning_hetero.profiler.flops import FlopCounter
from lightning_hetero.strategies.instruments import Instruments
from lightning_hetero.strategies.probe import RankMeasurement, StepMeasurement, measure_rank
from lightning_hetero.strategies.untouched import same_random_states, seed_all, untouched

CHECK_SAMPLES = 8
"""samples on which the loss is checked"""

SAME_CLASS = 0.05
"""devices of one type whose measured speeds differ by less than this share count as equal"""


class FirstBatch:
    """Runs the user's step on real samples before training starts, without a trace.

    Args:
        module: the user's module, sharded.
        loader: the training loader, from whose dataset the samples come; None where the batch is given.
        rank: this rank; ranks take different samples.
        to_device: the strategy's ``batch_to_device``.
        context: the precision plugin's context for a training step, entered around forward.
        instruments: time this rank, count its memory, emulate its device.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        loader: UnevenLoader | None,
        rank: int,
        *,
        to_device: Callable[[Any], Any],
        context: Callable[[], Any],
        instruments: Instruments,
    ) -> None:
        self.module = module
        self.loader = loader
        self.rank = rank
        self._to_device = to_device
        self._context = context
        self._instruments = instruments

    def batch(self, samples: int) -> Any:
        """Return a batch of this many samples on the device; from the dataset's start where it is short."""
        assert self.loader is not None
        dataset: Any = self.loader.dataset
        length = len(self.loader.uneven.order)
        start = self.rank * samples
        indices = [(start + i) % length for i in range(samples)]
        order = self.loader.uneven.order
        if order.kind == "sampler":
            indices = [order.indices(0)[i] for i in indices]
        fetch = getattr(dataset, "__getitems__", None)
        collate: Any = self.loader.loader.collate_fn
        with same_random_states():  # a dataset may augment
            items = fetch(indices) if callable(fetch) else [dataset[i] for i in indices]
            return self._to_device(collate(items))

    def measure_step(self, samples: int) -> StepMeasurement:
        """Run forward and backward of so many samples; return busy seconds and peak bytes."""
        with untouched(self.module):
            batch = self.batch(samples)
            self._instruments.take_peak_bytes()
            self._instruments.timer.take_s()
            with self._instruments.step(batch):
                loss = self._step(batch)
                if loss is not None and loss.requires_grad:
                    # a share of zero leaves no gradient behind, and costs what a real one costs
                    (loss * 0.0).backward()  # type: ignore[no-untyped-call]
            busy_s = self._instruments.timer.take_s()
        self._forget_gradients()
        return StepMeasurement(busy_s, self._instruments.take_peak_bytes())

    def count_flops(self) -> float:
        """Return the FLOPs of forward and backward of one sample."""
        with untouched(self.module):
            batch = self.batch(1)
            with self._instruments.step(batch), FlopCounter() as counter:
                loss = self._step(batch)
                if loss is not None and loss.requires_grad:
                    (loss * 0.0).backward()  # type: ignore[no-untyped-call]
        self._forget_gradients()
        return float(counter.flops)

    def loss_of(self, batch: Any, seed: int) -> Tensor | None:
        """Return the loss of ``batch`` in eval mode, under the random state of ``seed``, without gradients."""
        training = {module for module in self.module.modules() if module.training}
        with untouched(self.module), torch.no_grad():
            seed_all(seed)
            for module in training:
                module.training = False
            try:
                with self._instruments.step(batch):
                    return self._step(batch)
            finally:
                for module in training:
                    module.training = True

    def _step(self, batch: Any) -> Tensor | None:
        step: Any = self.module.training_step
        arguments = (batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else (batch,)
        with self._context():
            output = step(*arguments)
        if isinstance(output, dict):
            output = output.get("loss")
        return output if isinstance(output, Tensor) else None

    def _forget_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


@dataclass(frozen=True)
class Costs:
    """What the plan is made from, per rank."""

    seconds_per_sample: tuple[float, ...]
    fixed_seconds: tuple[float, ...]
    fixed_bytes: tuple[int, ...] | None
    bytes_per_sample: tuple[float, ...] | None


def pool_measurements(measured: Sequence[RankMeasurement], device_types: Sequence[str]) -> Costs:
    """Put the ranks' measurements together; devices of a type that measured about alike count as one class.

    Each rank's measurement is noisy; a class's median is less so, and equal devices then get equal shares.
    """
    per_sample = [0.0] * len(measured)
    fixed = [0.0] * len(measured)
    for kind in set(device_types):
        members = [r for r, t in enumerate(device_types) if t == kind]
        # noise makes a step longer, so the least fixed part of a type is the truest
        least_s = min(measured[r].fixed_s for r in members)
        for r in members:
            fixed[r] = least_s
            per_sample[r] = (measured[r].step_s - least_s) / measured[r].samples
        for alike in _classes(members, per_sample):
            median = statistics.median(per_sample[r] for r in alike)
            for r in alike:
                per_sample[r] = median
    base = [m.base_bytes for m in measured]
    growth = [m.bytes_per_sample for m in measured]
    counted = all(b is not None for b in base) and all(g is not None for g in growth)
    return Costs(
        tuple(per_sample),
        tuple(fixed),
        tuple(b for b in base if b is not None) if counted else None,
        tuple(g for g in growth if g is not None) if counted else None,
    )


def _classes(ranks: Sequence[int], seconds: Sequence[float]) -> list[list[int]]:
    """Cut the ranks, sorted by speed, wherever a class would spread over more than SAME_CLASS."""
    classes: list[list[int]] = []
    for rank in sorted(ranks, key=lambda r: seconds[r]):
        if classes and seconds[rank] <= seconds[classes[-1][0]] * (1 + SAME_CLASS):
            classes[-1].append(rank)
        else:
            classes.append([rank])
    return classes


def state_to_come_bytes(optimizers: Sequence[Optimizer]) -> int:
    """Return the bytes of optimizer state on this rank that the first step will make, and no probe sees.

    Two values a parameter for Adam and its kin, one for SGD with momentum and RMSprop, none for plain SGD; an optimizer
    of another kind is taken for one of Adam's. Zero where a checkpoint brought the state already.
    """
    total = 0
    for optimizer in optimizers:
        if optimizer.state:
            continue
        per_parameter = 2
        if isinstance(optimizer, torch.optim.SGD):
            per_parameter = 1 if optimizer.defaults.get("momentum") else 0
        elif isinstance(optimizer, torch.optim.RMSprop | torch.optim.Adagrad):
            per_parameter = 1
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            total += per_parameter * local.numel() * local.element_size()
    return total


def measure(
    first: FirstBatch, max_samples: int, optimizers: Sequence[Optimizer], capacity_bytes: int
) -> RankMeasurement:
    """Measure this rank within its memory (a collective: every rank runs the same number of steps)."""
    measured = measure_rank(first.measure_step, max_samples, capacity_bytes=capacity_bytes)
    if measured.base_bytes is None:
        return measured
    return replace(measured, base_bytes=measured.base_bytes + state_to_come_bytes(optimizers))


def plan_from(
    cluster: Cluster, model: ModelKey, global_batch_size: int, costs: Costs, *, reshard_after_forward: bool
) -> ShardPlan:
    """Return the plan with the fastest predicted step that fits every device's memory."""
    return plan_one_group(
        cluster,
        model=model,
        global_batch_size=global_batch_size,
        seconds_per_sample=costs.seconds_per_sample,
        fixed_seconds=costs.fixed_seconds,
        fixed_bytes=costs.fixed_bytes,
        bytes_per_sample=costs.bytes_per_sample,
        reshard_after_forward=reshard_after_forward,
    )


def declared_plan(
    cluster: Cluster, model: ModelKey, global_batch_size: int, *, reshard_after_forward: bool
) -> ShardPlan:
    """Return the plan by declared speeds, even where a device has none; what holds until ranks are measured."""
    speeds = [device.speed_flops_per_s for device in cluster.devices]
    known = all(speed for speed in speeds)
    shares = plan_one_group(
        cluster,
        model=model,
        global_batch_size=global_batch_size,
        seconds_per_sample=[1.0 / speed if known and speed else 1.0 for speed in speeds],
        reshard_after_forward=reshard_after_forward,
    )
    # the unit of time is arbitrary here, so nothing is predicted
    return ShardPlan(
        global_batch_size=shares.global_batch_size,
        batch_shares=shares.batch_shares,
        groups=shares.groups,
        device_types=shares.device_types,
        model=model,
        reshard_after_forward=reshard_after_forward,
        reasons=("shares by declared speed; nothing was measured",) if known else ("even shares: no speed is known",),
    )
