"""Run a micro-batch of nothing there and back through the stages of a plan, before training, and time it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_hetero.data import default_seed
from lightning_hetero.models.chain import UnitChain, Values
from lightning_hetero.profiler.memory import tensors_in
from lightning_hetero.profiler.speed import wait_for
from lightning_hetero.strategies.instruments import Instruments
from lightning_hetero.strategies.pipe.assembly import Assembly
from lightning_hetero.strategies.pipe.call import Call
from lightning_hetero.strategies.pipe.nested import mapped
from lightning_hetero.strategies.pipe.randomness import Draws
from lightning_hetero.strategies.pipe.steps import Context, Instrumented
from lightning_hetero.strategies.untouched import untouched

REPEATS = 5
"""timed runs, after one that tells the ranks what messages look like"""


class Rehearsal:
    """A plan's stages without the user's step: the model's inputs are zeros, and its outputs are the loss.

    Gradients, random states and buffers are left as they were.

    Args:
        assembly: this rank's part of the plan.
        module: the user's.
        call: with what its step calls the model.
        instruments: measure this rank and emulate its device.
        forward_context: around forwards.
        device: of this rank.
    """

    def __init__(
        self,
        assembly: Assembly,
        module: pl.LightningModule,
        call: Call,
        instruments: Instruments,
        forward_context: Context,
        device: torch.device,
    ) -> None:
        self._assembly, self._module, self._call = assembly, module, call
        self._instruments, self._forward_context, self._device = instruments, forward_context, device

    @property
    def micro_batches(self) -> int:
        """That are run: the fewest that the schedule of this rank's pipeline allows."""
        return self._assembly.plan.runnable(self._assembly.pipeline, 1)

    def time_s(self, barrier: Callable[[], None]) -> float:
        """Median seconds of a run on this rank; 0 for one without stages (a collective)."""
        taken = []
        with untouched(self._module):
            for _ in range(1 + REPEATS):
                barrier()
                began_s = time.perf_counter()
                self._run()
                taken.append(time.perf_counter() - began_s)
        return statistics.median(taken[1:])

    def _run(self) -> None:
        assembly, count = self._assembly, self.micro_batches
        if assembly.runtime is None:
            return
        samples = assembly.plan.micro_batch_size
        work = RehearsalWork(
            assembly.placement.chain, self._inputs, samples, count, self._instruments, self._forward_context
        )
        gradients = assembly.gradients
        gradients.begin(keep=True)
        try:
            shapes = [("rehearsal", samples)] * count
            assembly.runtime.run(assembly.schedule(count, training=True), work, shapes)
            wait_for(self._device)
        finally:
            gradients.put_back()

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        floats = (p.dtype for p in self._module.parameters() if p.is_floating_point())
        dtype = next(floats, torch.get_default_dtype())
        arguments = self._call.arguments(self._assembly.plan.micro_batch_size, dtype)
        moved: tuple[tuple[Any, ...], dict[str, Any]] = mapped(arguments, Tensor, lambda each: each.to(self._device))
        return moved


class RehearsalWork(Instrumented):
    """A step of micro-batches of nothing.

    Args:
        chain: the model.
        inputs: makes the model's arguments.
        samples: of a micro-batch.
        count: of micro-batches.
        instruments: of this rank.
        forward_context: around forwards.
    """

    def __init__(
        self,
        chain: UnitChain,
        inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]],
        samples: int,
        count: int,
        instruments: Instruments,
        forward_context: Context,
    ) -> None:
        draws = [Draws(default_seed(), 0, k, kind="rehearsal") for k in range(count)]
        super().__init__(draws, [None] * count, instruments, forward_context)
        self._samples = [samples] * count
        self._chain, self._inputs = chain, inputs

    def begin(self, micro_batch: int) -> Values:
        """The model's inputs."""
        args, kwargs = self._inputs()
        return self._chain.begin(*args, **kwargs)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """A loss that depends on all of the output, and gives it gradients of zero."""
        parts = [each.float().mean() for each in tensors_in(output) if each.requires_grad]
        return torch.stack(parts).sum() * 0.0 if parts else None

    def stage_is_done(self, stage: int) -> None:
        """Nothing is summed over ranks."""
