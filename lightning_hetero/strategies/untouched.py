"""Run user code and leave no trace of it: for probes, checks, and ranks that take part in a step without samples."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hetero.strategies import torch_adapter

# what nn.Module and LightningModule keep for themselves; restored by the frameworks or not changed by a step
_NOT_USER_STATE = frozenset(
    {
        "_parameters",
        "_modules",
        "_buffers",
        "_hparams",
        "_log_hyperparams",
        "_example_input_array",
        "_trainer",
    }
)

Restore = Callable[[], Any]
"""gives a value back the content that it had, in place, and returns it"""


@contextmanager
def untouched(
    module: pl.LightningModule, *, silence_logs: bool = True, keep_numbers: bool = False, freeze_norms: bool = True
) -> Iterator[None]:
    """Restore on exit what a step may change besides parameters and their gradients.

    Restored: random states, buffers, torchmetrics objects, and the tensors, containers and plain values
    that the module or one of its submodules holds as attributes.

    Args:
        module: the user's module.
        silence_logs: make ``self.log`` do nothing meanwhile. A rank without samples logs, with weight 0, since logging
            may be a collective.
        keep_numbers: leave numbers, truth values and texts as the step leaves them. By a counter a manual step decides
            which optimizer steps, and that has to be the same on all ranks.
        freeze_norms: have BatchNorm use its running statistics meanwhile.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    inside_metrics = {part for metric in metrics for part in metric.modules()}
    children = [child for child in module.modules() if child not in inside_metrics]
    restore = [_keep_tensor(buffer) for child in children for buffer in child.buffers(recurse=False)]
    restore += [_keep_metric(metric) for metric in metrics]
    restore += [_keep_attributes(child, not keep_numbers) for child in children]
    try:
        for child in torch_adapter.batch_norms(module) if freeze_norms else ():
            child.training = False  # in training mode it refuses a single sample, which is all that there may be
        with same_random_states(), _silent(module, silence_logs):
            yield
    finally:
        for back in restore:
            back()


@contextmanager
def same_random_states() -> Iterator[None]:
    """Restore on exit the random states of torch (CPU and CUDA), numpy and Python."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_all(seed: int) -> None:
    """Put the random states of torch, numpy and Python at ``seed``."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _keep_metric(metric: Metric) -> Restore:
    """Keep a metric's states: tensors, lists of tensors, counters; not its functions and submodules."""
    kept = {
        name: _copy_state(value)
        for name, value in metric.__dict__.items()
        if isinstance(value, Tensor | list | int | float | bool | type(None)) or name == "_cache"
    }
    return lambda: metric.__dict__.update(kept)


def _copy_state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copy_state(item) for item in value]
    return value


def _keep_attributes(module: nn.Module, numbers: bool) -> Restore:
    kept = {
        name: _keep(value)
        for name, value in module.__dict__.items()
        if name not in _NOT_USER_STATE
        and not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and (
            isinstance(value, Tensor | list | dict | set | deque)
            or (isinstance(value, int | float | str | bool | type(None)) and (numbers or name == "training"))
        )
    }
    return lambda: module.__dict__.update({name: back() for name, back in kept.items()})


def _keep(value: Any) -> Restore:
    """Keep a value; containers are restored in place, so that other references to them see it too."""
    if isinstance(value, Tensor):
        return _keep_tensor(value)
    if isinstance(value, list | deque):
        items = [_keep_inner(item) for item in value]
        return lambda: _refill(value, items)
    if isinstance(value, dict):
        pairs = {key: _keep_inner(item) for key, item in value.items()}
        return lambda: _refill_dict(value, pairs)
    if isinstance(value, set):
        members = set(value)
        return lambda: _refill_set(value, members)
    return lambda: value


def _keep_inner(item: Any) -> Restore:
    # tensors in containers are what was appended, as a rule; copying them all in every step would be quadratic
    return _keep(item) if isinstance(item, list | deque | dict | set) else lambda: item


def _refill(value: Any, items: list[Restore]) -> Any:
    content = [back() for back in items]
    if len(value) != len(content) or any(now is not then for now, then in zip(value, content, strict=True)):
        value.clear()
        value.extend(content)
    return value


def _refill_dict(value: dict[Any, Any], pairs: dict[Any, Restore]) -> dict[Any, Any]:
    content = {key: back() for key, back in pairs.items()}
    if value.keys() != content.keys() or any(value[key] is not item for key, item in content.items()):
        value.clear()
        value.update(content)
    return value


def _refill_set(value: set[Any], members: set[Any]) -> set[Any]:
    if value != members:
        value.clear()
        value.update(members)
    return value


def _keep_tensor(tensor: Tensor) -> Restore:
    if tensor.grad_fn is not None or tensor.is_meta:
        return lambda: tensor  # belongs to a graph, and nobody changes it in place; or has no values here
    content = tensor.detach().clone()

    def back() -> Tensor:
        # only what was changed: writing would break the backward of a step that uses the tensor
        with torch.no_grad():
            if not torch.equal(tensor, content):
                tensor.copy_(content)
        return tensor

    return back


@contextmanager
def _silent(module: pl.LightningModule, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    # log_dict calls log; an attribute of the instance hides the method
    before = module.__dict__.get("log")
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        module.__dict__.pop("log", None)
        if before is not None:
            module.__dict__["log"] = before
