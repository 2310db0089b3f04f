"""What the last stage logs in a training step, on every rank: the same values, those of the whole global batch.

The last stage of each pipeline runs the user's step, once per micro-batch. What it logs is noted there, joined over
micro-batches and pipelines as one device would have it for the whole batch, and logged once on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_hetero.strategies.results_adapter import as_it_is
from lightning_hetero.strategies.untouched import untouched

_DROPPED = ("sync_dist", "sync_dist_group", "enable_graph", "metric_attribute")
"""arguments of ``log`` that mean nothing once a value is the global batch's"""


@dataclass
class LoggedValue:
    """One name that was logged in a step.

    Args:
        arguments: of ``self.log``, without name, value and batch size.
        values: per call, the value and what it weighs.
        sizes: per call, the samples: as the user said, or the micro-batch's.
        metric: dotted name of the torchmetrics object, where that is what was logged.
    """

    arguments: dict[str, Any]
    values: list[tuple[Tensor, float]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    metric: str | None = None


@dataclass
class MetricState:
    """What a rank without a metric's updates has to know of them."""

    updates: int
    forward_cache: Any = None


class StepLog:
    """Notes what a step logs, instead of logging it.

    Args:
        module: the user's.
        prefix: name of the split model in it.
    """

    def __init__(self, module: pl.LightningModule, prefix: str) -> None:
        self._module, self._prefix = module, prefix
        self._metrics = {id(child): name for name, child in module.named_modules() if isinstance(child, Metric)}
        self._updates: dict[str, int] = {}
        self._buffers: dict[str, tuple[int, int]] = {}
        self.logged: dict[str, LoggedValue] = {}
        self.weight, self.samples = 0.0, 0

    def begin_step(self) -> None:
        """Forget the step before."""
        self.logged = {}
        self._updates = {name: metric._update_count for name, metric in self._named_metrics()}
        self._buffers = {name: (id(buffer), buffer._version) for name, buffer in self._outside_buffers()}

    def begin_micro_batch(self, weight: float, samples: int) -> None:
        """Say what the values that are logged from here on count for."""
        self.weight, self.samples = weight, samples

    def noting(self) -> AbstractContextManager[None]:
        """Note instead of logging, meanwhile; ``log_dict`` calls ``log``."""
        return self._logging_by(self._note)

    def silent(self) -> AbstractContextManager[None]:
        """Log nothing, meanwhile."""
        return self._logging_by(lambda *args, **kwargs: None)

    @contextmanager
    def _logging_by(self, log: Callable[..., None]) -> Iterator[None]:
        self._module.__dict__["log"] = log
        try:
            yield
        finally:
            self._module.__dict__.pop("log", None)

    def filling(self) -> AbstractContextManager[None]:
        """Keep nothing of a step on samples that only fill a schedule: no logs, no metric's update, no buffer."""
        return untouched(self._module)

    def _note(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        positional = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        arguments = {key: item for key, item in arguments.items() if key not in _DROPPED}
        entry = self.logged.setdefault(name, LoggedValue(arguments))
        entry.sizes.append(self.samples if batch_size is None else batch_size)
        if isinstance(value, Metric):
            entry.metric = self._metrics.get(id(value))
            value = value._forward_cache
            if not isinstance(value, Tensor):
                return
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        entry.values.append((tensor.to("cpu"), self.weight))

    def metric_states(self) -> dict[str, MetricState]:
        """What has changed in the metrics during the step."""
        for child in self._module.modules():
            if isinstance(child, MetricCollection):
                child.values(copy_state=False)  # those that share a state get its number of updates now
        return {
            name: MetricState(metric._update_count, _on_cpu(metric._forward_cache))
            for name, metric in self._named_metrics()
            if metric._update_count != self._updates.get(name, 0)
        }

    def take_metric_states(self, states: Mapping[str, MetricState]) -> None:
        """Let this rank's metrics know of updates on the last stage; their values come together in ``compute``."""
        for name, metric in self._named_metrics():
            if name in states:
                metric._update_count = states[name].updates
                metric._computed = None
                metric._forward_cache = _to(states[name].forward_cache, metric.device)

    def changed_buffers(self) -> dict[str, Tensor]:
        """Buffers outside the split model that the step has changed: a running mean of targets, a queue."""
        return {
            name: buffer.detach().cpu()
            for name, buffer in self._outside_buffers()
            if self._buffers.get(name) != (id(buffer), buffer._version)
        }

    def take_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give this rank's buffers the values that the last stage's have."""
        for name, value in buffers.items():
            path, _, own = name.rpartition(".")
            holder = self._module.get_submodule(path)
            before = getattr(holder, own)
            if before is not None and before.shape == value.shape and before.dtype == value.dtype:
                with torch.no_grad():
                    before.copy_(value)
            else:
                setattr(holder, own, value.to(self._module.device))

    def _outside_buffers(self) -> Iterator[tuple[str, Tensor]]:
        prefix = f"{self._prefix}."
        return ((name, buffer) for name, buffer in self._module.named_buffers() if not name.startswith(prefix))

    def log_all(self, logged: Mapping[str, LoggedValue], device: torch.device) -> None:
        """Log for this rank what :func:`join_logs` made of all pipelines' notes, in a :func:`values_are_everyones`."""
        metrics = dict(self._named_metrics())
        for name, entry in logged.items():
            # in name only: Lightning would warn of values that are not synchronised
            arguments = {**entry.arguments, "batch_size": max(1, round(sum(entry.sizes))), "sync_dist": True}
            if entry.metric is not None:
                metric = metrics[entry.metric]
                if entry.values:
                    metric._forward_cache = entry.values[0][0].to(device)
                self._module.log(name, metric, **arguments)
            else:
                self._module.log(name, entry.values[0][0].to(device), **arguments)

    def _named_metrics(self) -> Iterator[tuple[str, Any]]:
        # the counters of torchmetrics have no setters; Lightning reads the same private names
        return ((name, child) for name, child in self._module.named_modules() if isinstance(child, Metric))


def _on_cpu(value: Any) -> Any:
    return _to(value, torch.device("cpu"))


def _to(value: Any, device: torch.device) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().to(device))


@contextmanager
def values_are_everyones(strategy: Any) -> Iterator[None]:
    """Values logged meanwhile are the same on all ranks: Lightning takes and keeps the strategy's reduction, none."""
    strategy.__dict__["reduce"] = as_it_is
    try:
        yield
    finally:
        del strategy.__dict__["reduce"]


def join_logs(pipelines: Sequence[Mapping[str, LoggedValue]]) -> dict[str, LoggedValue]:
    """One value for each name: over micro-batches and pipelines, by its own ``reduce_fx``."""
    found: dict[str, LoggedValue] = {}
    for logged in pipelines:
        for name, entry in logged.items():
            known = found.setdefault(name, LoggedValue(entry.arguments, metric=entry.metric))
            known.values += entry.values
            known.sizes += entry.sizes
    for entry in found.values():
        if entry.values:
            entry.values = [(_joined(entry.values, entry.arguments.get("reduce_fx", "mean")), 1.0)]
    return found


def _joined(values: Sequence[tuple[Tensor, float]], reduce_fx: Any) -> Tensor:
    counted = [(value, weight) for value, weight in values if weight] or [(values[0][0], 1.0)]
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    tensors = [value for value, _ in counted]
    if name == "mean":
        total = sum(weight for _, weight in counted)
        first, weight = counted[0]
        joined = first * (weight / total)
        for value, weight in counted[1:]:
            joined = joined + value * (weight / total)
        return joined if len(counted) > 1 else first
    if name == "sum":
        return torch.stack(tensors).sum(0)
    if name in ("max", "min"):
        stacked = torch.stack(tensors)
        return stacked.amax(0) if name == "max" else stacked.amin(0)
    joined = tensors[0]
    for value in tensors[1:]:
        joined = reduce_fx(torch.stack([joined, value]))
    return joined
