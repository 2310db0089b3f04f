"""What a module's step calls its model with, learned from its first samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_hetero.errors import HeteroError, UnsupportedError
from lightning_hetero.strategies import lightning_adapter
from lightning_hetero.strategies.pipe.roles import Roles
from lightning_hetero.strategies.untouched import untouched

if TYPE_CHECKING:
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy

_SAMPLES = 2  # of the batch from which shapes are learned


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor."""

    index: int


@dataclass(frozen=True)
class Call:
    """With what a step calls its model, tensors apart from the rest; what all ranks know of it."""

    structure: Any
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def tensors(self) -> list[Tensor]:
        """Zeros in the place of the tensors."""
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in self.shapes]

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these tensors in their places."""
        args, kwargs = _filled(self.structure, tensors)
        return args, kwargs

    def arguments(self, samples: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of zeros with so many samples; floating-point ones of ``dtype``."""
        learned = self.shapes[0][0][0] if self.shapes[0][0] else None
        tensors = []
        for shape, kind in self.shapes:
            size = (samples, *shape[1:]) if shape and shape[0] == learned else shape
            tensors.append(torch.zeros(size, dtype=dtype if kind.is_floating_point else kind))
        return self.filled(tensors)

    def taking_tensors(self, model: nn.Module) -> nn.Module:
        """The model as one that takes its tensors in a row, and is called with all the rest that the step gives it."""
        args, kwargs = self.structure
        is_plain = not kwargs and all(isinstance(arg, _Place) for arg in args)
        return model if is_plain else _CalledAs(model, self)


class _CalledAs(nn.Module):
    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = self._call.filled(tensors)
        return self.model(*args, **kwargs)


def find_call(strategy: HeteroPipelineStrategy, trainer: pl.Trainer, model: nn.Module, name: str) -> Call:
    """With what a step calls the model, learned on rank 0 from the first samples (a collective).

    Raises:
        UnsupportedError: on all ranks, where the step does not call it.
    """
    lightning_adapter.set_up_data(trainer)
    call = strategy.broadcast(_call_of(strategy, trainer, model, name) if strategy.is_global_zero else None)
    if isinstance(call, str):
        raise UnsupportedError(call)
    found: Call = call
    return found


def _call_of(strategy: HeteroPipelineStrategy, trainer: pl.Trainer, model: nn.Module, name: str) -> Call | str:
    """Run the user's step on the first samples up to the model; a text where that cannot be."""
    module = strategy.lightning_module
    assert module is not None
    try:
        step, batch = _step_and_batch(strategy, trainer)
        roles = Roles(module, model, name)
        with untouched(module), torch.no_grad():
            args, kwargs = roles.catch(step, batch, *_step_arguments(step))
    except HeteroError as error:
        return str(error)
    tensors: list[Tensor] = []
    structure = _emptied((args, kwargs), tensors)
    if not tensors:
        return f"self.{name}(...) is called without a tensor: there is nothing to plan by"
    return Call(structure, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def _step_and_batch(strategy: HeteroPipelineStrategy, trainer: pl.Trainer) -> tuple[Any, Any]:
    module: Any = strategy.lightning_module
    if trainer.state.fn == TrainerFn.FITTING:
        batch = strategy.loaders.first_batch(_SAMPLES)
        step = module.training_step
    else:
        names: dict[Any, str] = {TrainerFn.VALIDATING: "validation_step", TrainerFn.TESTING: "test_step"}
        name = names.get(trainer.state.fn, "predict_step")
        step = getattr(module, name)
        batch = next(iter(lightning_adapter.evaluation_loader(trainer)), None)
    if batch is None:
        raise HeteroError("the loader has no batch: there is nothing to plan by")
    return step, batch


def _step_arguments(step: Any) -> tuple[int, ...]:
    return (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()


def _emptied(value: Any, into: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        into.append(value)
        return _Place(len(into) - 1)
    if isinstance(value, dict):
        return {key: _emptied(item, into) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_emptied(item, into) for item in value)
    return value


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_filled(item, tensors) for item in value)
    return value
