"""Run user code and leave no trace of it: for probes, checks, and ranks that take part in a step without samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

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


@contextmanager
def untouched(module: pl.LightningModule, *, silence_logs: bool = True) -> Iterator[None]:
    """Restore on exit what a step may change besides parameters and their gradients.

    Restored: random state (CPU and CUDA), buffers (BatchNorm), torchmetrics objects, and the lists, dicts, sets and
    plain values that the LightningModule holds as attributes.

    Args:
        module: the user's module.
        silence_logs: make ``self.log`` do nothing meanwhile. A rank without samples logs, with weight 0, since logging
            may be a collective.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    metrics = [(metric, _copy_of(metric.__dict__)) for metric in module.modules() if isinstance(metric, Metric)]
    state = _user_state(module)
    try:
        with torch.random.fork_rng(devices=devices), _silent(module, silence_logs):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for metric, values in metrics:
            metric.__dict__.update(values)
        _restore(module, state)


def _copy_of(values: dict[str, Any]) -> dict[str, Any]:
    """Copy a metric's states: tensors, lists of tensors, counters; not its functions and submodules."""
    return {
        name: _copy_value(value)
        for name, value in values.items()
        if isinstance(value, Tensor | list | int | float | bool | type(None)) or name == "_cache"
    }


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copy_value(item) for item in value]
    return value


def _user_state(module: nn.Module) -> dict[str, Any]:
    return {
        name: copy.copy(value)
        for name, value in module.__dict__.items()
        if name not in _NOT_USER_STATE
        and not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and isinstance(value, list | dict | set | int | float | str | bool | type(None))
    }


def _restore(module: nn.Module, state: dict[str, Any]) -> None:
    for name, value in state.items():
        current = module.__dict__.get(name)
        # in place, so that other references to the container see it restored too
        if isinstance(value, list) and isinstance(current, list):
            current[:] = value
        elif isinstance(value, dict | set) and isinstance(current, dict | set) and type(value) is type(current):
            current.clear()
            current.update(value)
        else:
            module.__dict__[name] = value


@contextmanager
def _silent(module: pl.LightningModule, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    # log_dict calls log; an attribute of the instance hides the method
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        module.__dict__.pop("log", None)
