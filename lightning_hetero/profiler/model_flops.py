"""FLOPs of a training step, counted on the meta device from what the step calls its modules with.

The first step is watched: which modules it calls from outside, and with what shapes. Each such call then runs forward
and backward on a copy without values. Attention counts as the products that it stands for, causal or not; what a
backward computes again (activation checkpointing) is counted apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from lightning_hetero.errors import HeteroError
from lightning_hetero.models.units import original_class
from lightning_hetero.profiler.flops import op_flops
from lightning_hetero.profiler.memory import tensors_in
from lightning_hetero.profiler.meta import fused_attention
from lightning_hetero.profiler.ops import OpObserver

_AS_STOPPED: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs, a multiply-add counting as 2.

    Attributes:
        model: of forwards and backwards: what MFU counts.
        recomputed: of forwards that a backward ran again; HFU counts them too.
    """

    model: float
    recomputed: float = 0.0

    def per(self, samples: float) -> StepFlops:
        """The same for one of so many samples."""
        return StepFlops(self.model / samples, self.recomputed / samples)


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class ModuleCall:
    """With what a module was called.

    Args:
        name: dotted, from the root; empty for the root.
        args: as called, with shapes in place of tensors.
        kwargs: likewise.
        grad: whether gradients were recorded.
        again: whether it ran within a backward, to compute again what was not kept.
        stopped: whether it was stopped there before its end, since nothing of the rest is kept.
    """

    name: str
    args: Any
    kwargs: Any
    grad: bool
    again: bool = False
    stopped: bool = False

    @classmethod
    def of(cls, name: str, args: Any, kwargs: Any, *, again: bool = False) -> ModuleCall:
        """The call at hand."""
        return cls(name, _mapped(args, Tensor, _shape_of), _mapped(kwargs, Tensor, _shape_of), _records(), again)

    def key(self) -> Hashable:
        """What calls that take as many FLOPs have in common."""
        return self.name, repr(self.args), repr(self.kwargs), self.grad, self.again, self.stopped


class CallRecorder:
    """Notes the outermost calls of a module's children while it is attached.

    Args:
        root: the module; its own forward is not watched, since a step need not call it.
        in_backward: says whether autograd is running a backward at the moment.
        ignored: modules whose calls are not what is computed, such as one that a pipeline has cut.
    """

    def __init__(self, root: nn.Module, in_backward: Callable[[], bool], ignored: Collection[nn.Module] = ()) -> None:
        self._root, self._in_backward = root, in_backward
        self._ignored = {id(module) for module in (root, *ignored)}
        self._handles: list[RemovableHandle] = []
        self._inside = 0
        self._call: ModuleCall | None = None
        self.calls: dict[Hashable, tuple[ModuleCall, int]] = {}

    def attach(self) -> None:
        """Begin."""
        for name, module in self._root.named_modules():
            if id(module) in self._ignored or isinstance(module, _UNCALLED):
                continue
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def detach(self) -> None:
        """End; what was noted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            if self._inside == 1:
                self._call = ModuleCall.of(name, args, kwargs, again=self._in_backward())

        return before

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = max(0, self._inside - 1)
        if self._inside or self._call is None:
            return
        # checkpointing stops a forward that has computed all that the backward needs, by an exception
        call = replace(self._call, stopped=self._call.again and output is None)
        self._call = None
        first, times = self.calls.get(call.key(), (call, 0))
        self.calls[call.key()] = first, times + 1

    def step_flops(self, skeleton: nn.Module) -> StepFlops:
        """FLOPs of all that was noted; arguments and errors as for :func:`call_flops`."""
        model = recomputed = 0.0
        for call, times in self.calls.values():
            flops = call_flops(skeleton, call)
            model += times * flops.model
            recomputed += times * flops.recomputed
        return StepFlops(model, recomputed)


def model_flops(model: nn.Module, inputs: Sequence[Tensor]) -> StepFlops:
    """FLOPs of one forward and backward of a model.

    Args:
        model: on any device; it is neither changed nor run.
        inputs: what it is called with; only shapes and types are used.

    Raises:
        HeteroError: if it cannot run without values.
    """
    with torch.enable_grad():
        return call_flops(skeleton(model), ModuleCall.of("", tuple(inputs), {}))


def call_flops(root: nn.Module, call: ModuleCall) -> StepFlops:
    """FLOPs of one call of a module, and of its backward where gradients were recorded.

    Args:
        root: a :func:`skeleton`.
        call: of one of its modules.

    Raises:
        HeteroError: if the module cannot run without values, with the first reason.
    """
    module = root.get_submodule(call.name)
    try:
        return _count(module, call, None)
    except Exception as error:
        try:
            # a step may cast what the modules themselves do not: autocast, mixed precision of shards
            return _count(_to_float32(module), call, torch.float32)
        except Exception:
            raise HeteroError(
                f"{type(module).__name__} {call.name!r} cannot run on the meta device, where FLOPs are counted "
                f"({type(error).__name__}: {error}): pass flops_per_sample"
            ) from error


def skeleton(module: nn.Module) -> nn.Module:
    """A copy that has a module's structure and shapes, and neither values nor hooks.

    Parameters and buffers are on the meta device, whole where the module's are shards; forwards are the classes' own,
    as before any wrapping or compiling. All other attributes are the module's own objects.
    """
    return _skeleton(module, {})


def _skeleton(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    if id(module) in made:
        known: nn.Module = made[id(module)]
        return known
    compiled = module.__dict__.get("_modules", {}).get("_orig_mod")
    if isinstance(compiled, nn.Module):
        made[id(module)] = _skeleton(compiled, made)
        return _skeleton(compiled, made)
    cls = original_class(module)
    copied: nn.Module = cls.__new__(cls)
    nn.Module.__init__(copied)
    made[id(module)] = copied
    own = {*copied.__dict__, "forward", "_compiled_call_impl"}
    for name, value in module.__dict__.items():
        if name not in own:
            copied.__dict__[name] = _attribute(value)
    copied.training = module.training
    for name, parameter in module._parameters.items():
        copied._parameters[name] = None if parameter is None else _parameter(parameter, made)
    for name, buffer in module._buffers.items():
        copied._buffers[name] = None if buffer is None else _on_meta(buffer)
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else _skeleton(child, made)
    return copied


def _parameter(parameter: nn.Parameter, made: dict[int, Any]) -> nn.Parameter:
    if id(parameter) not in made:
        made[id(parameter)] = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
    tied: nn.Parameter = made[id(parameter)]
    return tied


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # of a shard, the whole


def _attribute(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _on_meta(value)
    # what a forward puts into a list of its module stays out of the module's own
    return copy.copy(value) if type(value) in (list, dict, set) else value


def _to_float32(module: nn.Module) -> nn.Module:
    return skeleton(module).to(torch.float32)


class _Counter:
    """Counts forward and backward, and apart from them what a backward computes again."""

    def __init__(self) -> None:
        self.flops = self.recomputed = 0
        self.in_backward = False

    def observe(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, began_s: float) -> None:
        # a backward runs without recording gradients, and what it computes again with it
        if self.in_backward and torch.is_grad_enabled():
            self.recomputed += op_flops(op, args, kwargs, out)
        else:
            self.flops += op_flops(op, args, kwargs, out)


def _count(module: nn.Module, call: ModuleCall, dtype: torch.dtype | None) -> StepFlops:
    def make(shape: _Shape) -> Tensor:
        to = dtype if dtype is not None and shape.dtype.is_floating_point else shape.dtype
        made = torch.empty(shape.shape, dtype=to, device="meta")
        return made.requires_grad_(shape.requires_grad)

    counter = _Counter()
    args, kwargs = _mapped(call.args, _Shape, make), _mapped(call.kwargs, _Shape, make)
    with fused_attention(), torch.device("meta"), OpObserver(counter.observe):
        if call.again and not call.stopped:
            with torch.no_grad():
                module(*args, **kwargs)
            return StepFlops(0.0, float(counter.flops))
        run = partial(checkpoint, module, **_AS_STOPPED) if call.stopped else module
        with torch.set_grad_enabled(call.grad):
            outputs = [tensor for tensor in tensors_in(run(*args, **kwargs)) if tensor.requires_grad]
        if outputs:
            counter.in_backward = True
            torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
    return StepFlops(0.0, float(counter.recomputed)) if call.stopped else StepFlops(float(counter.flops))


def _records() -> bool:
    return torch.is_grad_enabled()


def _shape_of(tensor: Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _mapped(value: Any, kind: type, make: Callable[[Any], Any]) -> Any:
    """Nested values with ``make(item)`` in place of each ``kind``."""
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, dict):
        items = {key: _mapped(item, kind, make) for key, item in value.items()}
        return items if type(value) is dict else _like_dict(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, kind, make) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, kind, make) for item in value)
    return value


def _like_dict(like: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(like)(**items)
    except TypeError:
        return items
