"""With what a model calls its units: shapes by number of samples, learned on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.costs import InputShape
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.models.units import Unit

_PROBES = (2, 3)  # samples; a batch of one is refused by BatchNorm, and may be squeezed


@dataclass(frozen=True)
class TensorShape:
    """The shape of a tensor with n samples: ``fixed + per_sample x n`` in each dimension.

    Args:
        fixed: of each dimension.
        per_sample: of each dimension: (1, 0, 0) for a batch first, (4, 0) for four windows a sample.
        dtype: of the tensor.
        requires_grad: whether its gradient is wanted.
    """

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def of(self, samples: int) -> tuple[int, ...]:
        """The shape with so many samples."""
        return tuple(base + samples * each for base, each in zip(self.fixed, self.per_sample, strict=True))

    def bytes(self, samples: int) -> int:
        """Bytes with so many samples."""
        count = 1
        for size in self.of(samples):
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class UnitCall:
    """With what a unit is called: nested arguments, with a :class:`TensorShape` in place of each tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def shapes(self) -> list[TensorShape]:
        """The shapes of all tensors, in order."""
        found: list[TensorShape] = []
        _replaced((self.args, self.kwargs), TensorShape, found.append)
        return found

    def arguments(self, make: Callable[[TensorShape], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with the tensors that ``make`` returns."""
        args, kwargs = _replaced((self.args, self.kwargs), TensorShape, make)
        return args, kwargs


@dataclass(frozen=True)
class Calls:
    """All calls of a model's units.

    Args:
        order: unit indices in the order of their first call.
        first: by unit index, its first call.
        times: by unit index, how often it is called in one forward; units that are not called are absent.
    """

    order: tuple[int, ...]
    first: dict[int, UnitCall]
    times: dict[int, int]


def input_shapes(inputs: Sequence[Tensor]) -> tuple[InputShape, ...]:
    """What the inputs are for one sample.

    Raises:
        HeteroError: if there is no input, one is no tensor, or their first dimensions differ.
    """
    problems = [] if inputs else ["there is no input: give the tensors that the model takes, with the batch first"]
    for index, each in enumerate(inputs):
        if not isinstance(each, Tensor) or each.ndim == 0:
            problems.append(f"inputs[{index}] is {each!r}: give a tensor with the batch as its first dimension")
    if not problems and len({len(each) for each in inputs}) > 1:
        sizes = ", ".join(str(len(each)) for each in inputs)
        problems.append(f"the first dimensions of the inputs are {sizes}: give as many samples in each")
    raise_all(HeteroError, "example inputs are not valid", problems)
    return tuple(InputShape(tuple(each.shape[1:]), dtype_name(each.dtype)) for each in inputs)


def meta_batch(inputs: Sequence[Tensor], samples: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs like these with so many samples, on meta; floating-point ones in ``dtype``."""
    return [
        torch.empty((samples, *each.shape[1:]), dtype=dtype if each.is_floating_point() else each.dtype, device="meta")
        for each in inputs
    ]


def learn_calls(model: nn.Module, units: Sequence[Unit], inputs: Sequence[Tensor], dtype: torch.dtype) -> Calls:
    """Run ``model`` on meta with two batch sizes and compare what its units are called with.

    Args:
        model: on meta.
        units: of this model.
        inputs: examples, from :func:`input_shapes`; only shapes and dtypes are used.
        dtype: of floating-point inputs.

    Raises:
        HeteroError: if the model cannot run on meta, or calls its units differently with more samples.
    """
    small, large = (_record(model, units, meta_batch(inputs, samples, dtype)) for samples in _PROBES)
    if [index for index, _ in small] != [index for index, _ in large]:
        raise HeteroError(
            f"{type(model).__name__} calls other units with {_PROBES[1]} samples than with {_PROBES[0]}: "
            "its costs cannot be given per sample"
        )
    first: dict[int, UnitCall] = {}
    times: dict[int, int] = {}
    for (index, few), (_, many) in zip(small, large, strict=True):
        times[index] = times.get(index, 0) + 1
        if index not in first:
            args, kwargs = _between(few, many)
            first[index] = UnitCall(args, kwargs)
    return Calls(tuple(first), first, times)


def run_on_meta(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    """``model(*batch)``, with an error that says what it is about."""
    try:
        return model(*batch)
    except Exception as error:
        shapes = ", ".join(str(list(each.shape)) for each in batch)
        raise HeteroError(
            f"{type(model).__name__} cannot run without values, on the meta device, with inputs {shapes} "
            f"({type(error).__name__}: {error}): give inputs that it takes; a forward that looks at values "
            "(.item(), data-dependent shapes) cannot be profiled unit by unit"
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _record(model: nn.Module, units: Sequence[Unit], batch: Sequence[Tensor]) -> list[tuple[int, Any]]:
    seen: list[tuple[int, Any]] = []

    def hook(index: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((index, (args, kwargs)))

        return before

    handles = [unit.module.register_forward_pre_hook(hook(index), with_kwargs=True) for index, unit in enumerate(units)]
    try:
        run_on_meta(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _between(few: Any, many: Any) -> Any:
    """Nested values of two calls as one, with a :class:`TensorShape` in place of each pair of tensors."""
    if isinstance(few, Tensor) and isinstance(many, Tensor):
        step = _PROBES[1] - _PROBES[0]
        slopes = tuple((b - a) // step for a, b in zip(few.shape, many.shape, strict=True))
        fixed = tuple(a - _PROBES[0] * slope for a, slope in zip(few.shape, slopes, strict=True))
        return TensorShape(fixed, slopes, few.dtype, few.requires_grad)
    if isinstance(few, dict):
        return {key: _between(value, many[key]) for key, value in few.items()}
    if isinstance(few, (tuple, list)):
        return _like(few, [_between(a, b) for a, b in zip(few, many, strict=True)])
    return few


def _replaced(value: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, dict):
        return {key: _replaced(item, kind, make) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _like(value, [_replaced(item, kind, make) for item in value])
    return value


def _like(sequence: Any, items: list[Any]) -> Any:
    if hasattr(sequence, "_fields"):  # a named tuple
        return type(sequence)(*items)
    return type(sequence)(items)
