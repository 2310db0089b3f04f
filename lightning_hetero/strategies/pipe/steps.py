"""The work of one step at the two ends of a pipeline: the user's step on micro-batches, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hetero.data import batch_size_of
from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import UnitChain, Values
from lightning_hetero.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from lightning_hetero.strategies.instruments import Instruments
from lightning_hetero.strategies.loss_check import cut
from lightning_hetero.strategies.loss_weight import scaled
from lightning_hetero.strategies.micro_batches import loss_in
from lightning_hetero.strategies.pipe.logs import LoggedValue, MetricState, StepLog
from lightning_hetero.strategies.pipe.nested import found_in
from lightning_hetero.strategies.pipe.randomness import Draws
from lightning_hetero.strategies.pipe.roles import Roles

Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class StepResult:
    """What a pipeline's last stage tells all ranks of a training step.

    Args:
        loss: this pipeline's part of the mean over the global batch.
        dtype: of the loss.
        logged: what the step logged.
        metrics: what has changed in the torchmetrics objects.
        extras: what else the step returned, by key: per micro-batch, joined where it is per sample.
        buffers: those outside the split model that the step has changed.
    """

    loss: float
    dtype: torch.dtype
    logged: Mapping[str, LoggedValue] = field(default_factory=dict)
    metrics: Mapping[str, MetricState] = field(default_factory=dict)
    extras: Mapping[str, Any] | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


class Instrumented:
    """What both kinds of work have: random states, and the contexts around what is computed."""

    def __init__(
        self,
        draws: Sequence[Draws],
        batches: Sequence[Any],
        instruments: Instruments,
        forward_context: Context,
    ) -> None:
        self._draws, self._batches = draws, batches
        self._instruments, self.forward_context = instruments, forward_context
        self._samples = [batch_size_of(batch) for batch in batches]

    def draws(self, micro_batch: int) -> Draws:
        """Random states of a micro-batch."""
        return self._draws[micro_batch]

    def inputs_came(self, at_s: float | None) -> None:
        """What is emulated had nothing to do until then."""
        self._instruments.resume(at_s)

    @contextmanager
    def computing(self, micro_batch: int, received: Sequence[Tensor | None], kind: str = FORWARD) -> Iterator[None]:
        """Measure, and emulate where the cluster says so."""
        held = [tensor for tensor in received if tensor is not None]
        half = kind if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) else None
        samples = self._samples[micro_batch]
        with self._instruments.action(held, samples), self._instruments.half(half):
            yield


class TrainingWork(Instrumented):
    """A training step of one pipeline.

    Args:
        step: the user's, taking a batch.
        weights: per micro-batch, its share of the global batch.
        counted: per micro-batch, its samples of the global batch; 0 where it only fills the schedule.
        captures: a context around the step up to the model.
        scale: of the loss, for fp16.
        done: is told of stages that have run their last backward.
        log: of what the step logs.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        chain: UnitChain,
        roles: Roles,
        log: StepLog,
        weights: Sequence[float],
        counted: Sequence[int],
        captures: Context,
        scale: Callable[[Tensor], Tensor],
        done: Callable[[int], None],
        draws: Sequence[Draws],
        batches: Sequence[Any],
        instruments: Instruments,
        forward_context: Context,
    ) -> None:
        super().__init__(draws, batches, instruments, forward_context)
        self._step, self._chain, self._roles, self._log = step, chain, roles, log
        self._weights, self._scale, self.stage_is_done = weights, scale, done
        self._counted, self._captures = counted, captures
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []

    def begin(self, micro_batch: int) -> Values:
        """Run the user's step up to the model."""
        self._draws[micro_batch].begin_step()
        with self._log.silent(), self._captures():
            args, kwargs = self._roles.catch(self._step, self._batches[micro_batch])
        return self._chain.begin(*args, **kwargs)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Run the user's step with the model's output."""
        weight, samples = self._weights[micro_batch], self._samples[micro_batch]
        check_output(output, samples)
        draws = self._draws[micro_batch]

        def give() -> Any:
            draws.end_model()
            return output

        draws.begin_step()
        counted = self._counted[micro_batch]
        self._log.begin_micro_batch(weight, counted)
        with self._log.noting() if counted else self._log.filling():
            result = self._roles.answer(give, self._step, self._batches[micro_batch])
        loss = loss_in(result)
        if loss is None:
            raise UnsupportedError(
                f"training_step returned {type(result).__name__} and no loss for micro-batch {micro_batch}: a pipeline "
                'runs the backward of every one; return a loss tensor, or a dict with "loss" (a loss times 0 skips it)'
            )
        if loss.ndim and loss.numel() != 1:
            raise UnsupportedError(f"training_step returned a loss of shape {list(loss.shape)}: return its mean")
        weighted = scaled(loss, weight)
        self._losses.append(weighted.detach())
        self._outputs.append(_detached(result) if counted else None)
        return self._scale(weighted)

    def result(self) -> StepResult:
        """What to tell the other ranks."""
        loss = float(torch.stack([each.reshape(()).double() for each in self._losses]).sum())
        outputs = [
            (output, size) for output, size in zip(self._outputs, self._samples, strict=True) if output is not None
        ]
        extras = None
        if outputs and isinstance(outputs[0][0], dict):
            keys = [key for key in outputs[0][0] if key != "loss"]
            extras = {key: join_outputs([(output[key], size) for output, size in outputs]) for key in keys}
        log = self._log
        return StepResult(loss, self._losses[0].dtype, log.logged, log.metric_states(), extras, log.changed_buffers())


class EvaluationWork(Instrumented):
    """The forwards of one evaluation batch, in chunks of what the model was called with."""

    def __init__(
        self,
        chain: UnitChain,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None,
        samples: int,
        sizes: Sequence[int],
        draws: Sequence[Draws],
        instruments: Instruments,
        forward_context: Context,
    ) -> None:
        super().__init__(draws, [None] * len(sizes), instruments, forward_context)
        self._samples = list(sizes)
        self._chain, self._arguments, self._all = chain, arguments, samples
        self.outputs: list[Any] = []

    def begin(self, micro_batch: int) -> Values:
        """One chunk of the arguments; on the first stage."""
        assert self._arguments is not None
        start = sum(self._samples[:micro_batch])
        stop = start + self._samples[micro_batch]
        args, kwargs = self._arguments
        if len(self._samples) > 1:
            args, kwargs = cut(args, self._all, start, stop), cut(kwargs, self._all, start, stop)
        return self._chain.begin(*args, **kwargs)

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        """Keep the output; on the last stage."""
        self.outputs.append(output)
        return None

    def stage_is_done(self, stage: int) -> None:
        """Without a backward it never is."""


def check_output(output: Any, samples: int) -> None:
    """Refuse a model whose output is not per sample: micro-batches would not be parts of the batch.

    Raises:
        UnsupportedError: naming the shape.
    """
    shapes = [tuple(tensor.shape) for tensor in found_in(output, Tensor)]
    bad = [shape for shape in shapes if shape and shape[0] != samples]
    if bad:
        raise UnsupportedError(
            f"the model returned a tensor of shape {list(bad[0])} for a micro-batch of {samples} samples: its first "
            "dimension is to be the batch's, or the parts of a batch could not be told apart; move it there in the "
            "model's forward"
        )


def join_outputs(parts: Sequence[tuple[Any, int]]) -> Any:
    """Put outputs of parts of a batch together: tensors per sample one after the other, all else as the last has it.

    Args:
        parts: (output, samples).
    """
    values = [value for value, _ in parts]
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        per_sample = all(value.ndim and value.shape[0] == size for value, size in parts)
        return torch.cat(values) if per_sample else values[-1]
    if isinstance(first, dict):
        return {key: join_outputs([(value[key], size) for value, size in parts]) for key in first}
    if isinstance(first, list | tuple):
        joined = [join_outputs([(value[i], size) for value, size in parts]) for i in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return values[-1]


def can_be_joined(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether outputs of parts of a batch, put together, are what the model would return for the batch."""
    for output, size in zip(outputs, sizes, strict=True):
        if not isinstance(output, Tensor | tuple | list) and type(output) is not dict:
            return False
        if any(not tensor.ndim or tensor.shape[0] != size for tensor in found_in(output, Tensor)):
            return False
    return True


def _detached(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().cpu())
