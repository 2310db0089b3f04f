"""The user's step on the first real samples, before training starts: no trace of it remains."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_hetero.data import UnevenLoader
from lightning_hetero.profiler.flops import FlopCounter
from lightning_hetero.strategies import torch_adapter
from lightning_hetero.strategies.gradients import GradientReduction
from lightning_hetero.strategies.instruments import Instruments
from lightning_hetero.strategies.probe import StepMeasurement
from lightning_hetero.strategies.untouched import same_random_states, seed_all, untouched


class FirstBatch:
    """Runs the user's step on real samples before training starts, without a trace.

    Args:
        module: the user's module, sharded, at rest (in the middle of a step its parameters may be gathered ones).
        loader: the training loader, from whose dataset the samples come; None where the batch is given.
        rank: this rank; ranks take different samples.
        to_device: the strategy's ``batch_to_device``.
        context: the precision plugin's context for a training step, entered around forward.
        instruments: time this rank, count its memory, emulate its device.
        reduction: sums gradients as in training; None leaves it to FSDP2.
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
        reduction: GradientReduction | None = None,
    ) -> None:
        self.module = module
        self.loader = loader
        self.rank = rank
        self._to_device = to_device
        self._context = context
        self._instruments = instruments
        self._reduction = reduction
        self._parameters = list(module.parameters())

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

    def measure_crossing(self, samples: int) -> StepMeasurement:
        """As :meth:`measure_step`, of a step whose gradients are summed over all groups (a collective of all ranks)."""
        return self.measure_step(samples, crosses=True)

    def measure_accumulating(self, samples: int) -> StepMeasurement:
        """As :meth:`measure_step`, of a step that adds to gradients that are there: the peak of micro-batches."""
        return self.measure_step(samples, accumulates=True)

    def measure_step(self, samples: int, crosses: bool = False, accumulates: bool = False) -> StepMeasurement:
        """Run forward and backward of so many samples; return busy seconds and peak bytes.

        As in Lightning's own steps, the gradients of the step before live through the forward: call
        :meth:`forget_gradients` after the last one.
        """
        with untouched(self.module):
            read_s = time.perf_counter()
            batch = self.batch(samples)
            # workers read ahead
            input_s = 0.0 if self.loader is None or self.loader.num_workers else time.perf_counter() - read_s
            self._instruments.take_peak_bytes()
            self._instruments.take_busy_s()
            self._instruments.wait()
            began_s = time.perf_counter()
            with self._instruments.step(batch):
                if self._reduction is not None:
                    self._reduction.begin_forward()
                loss = self._step(batch)
                if not accumulates:
                    self.forget_gradients()
                if loss is not None and loss.requires_grad:
                    with self._reduced(crosses):
                        # a share of zero leaves no gradient behind, and costs what a real one costs
                        (loss * 0.0).backward()  # type: ignore[no-untyped-call]
            busy_s = self._instruments.take_busy_s()
            self._instruments.wait()  # for what the root reduces after the last unit
            wall_s = time.perf_counter() - began_s
        return StepMeasurement(busy_s, self._instruments.take_peak_bytes(), wall_s, input_s)

    def _reduced(self, crosses: bool) -> AbstractContextManager[None]:
        """The context of a backward: its gradients are summed in the group, and over all groups where it crosses."""
        if self._reduction is None:
            return nullcontext()
        # FSDP2's own hybrid sharding would keep what it has not summed over all groups for the next backward
        return self._reduction.backward(is_last=crosses or not self._reduction.crosses)

    def count_flops(self) -> float:
        """Return the FLOPs of forward and backward of one sample."""
        with untouched(self.module):
            batch = self.batch(1)
            with self._instruments.step(batch), FlopCounter() as counter:
                loss = self._step(batch)
                if loss is not None and loss.requires_grad:
                    (loss * 0.0).backward()  # type: ignore[no-untyped-call]
        self.forget_gradients()
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

    def batch_norms(self, batch: Any) -> list[str]:
        """Return the BatchNorm layers that normalise over ``batch`` itself while the user's step runs on it.

        A layer may be in training mode now and still be frozen by the step, so only running it tells.
        """
        names = torch_adapter.batch_norms(self.module)
        found: set[nn.Module] = set()
        if not names:
            return []
        hooks = [layer.register_forward_pre_hook(lambda m, _: found.add(m) if m.training else None) for layer in names]
        try:
            with untouched(self.module), torch.no_grad():
                for layer in names:
                    layer.training = True
                with self._instruments.step(batch):
                    self._step(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [name for layer, name in names.items() if layer in found]

    def _step(self, batch: Any) -> Tensor | None:
        step: Any = self.module.training_step
        arguments = (batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else (batch,)
        with self._context():
            output = step(*arguments)
        if isinstance(output, dict):
            output = output.get("loss")
        return output if isinstance(output, Tensor) else None

    def forget_gradients(self) -> None:
        """Leave no gradient behind."""
        for parameter in self._parameters:
            parameter.grad = None
