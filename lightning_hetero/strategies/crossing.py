"""Sums gradients over shard groups that FSDP2 cannot see as one mesh, beside the backward of the next units.

FSDP2 reduces a unit's gradients within the rank's own group; this adds what the other groups have, once a step. Each
unit's rows are cut where the owners change (:mod:`lightning_hetero.ownership`), and all rows of a unit with the same
owners travel as one bucket. All ranks walk the units in one order, so that nothing deadlocks: a unit is sent when its
own group is done with it and all units before it are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_hetero.ownership import Ownership
from lightning_hetero.strategies.sharding import parameters_within

OwnerGroups = Mapping[tuple[int, ...], Any]
"""a process group for each set of owners"""


@dataclass
class _Run:
    """Elements of a parameter's local gradient that the same ranks own."""

    parameter: nn.Parameter
    start: int
    stop: int


@dataclass(eq=False)
class _Unit:
    """The parameters of one wrapped module, which FSDP2 reduces at once."""

    buckets: dict[tuple[int, ...], list[_Run]] = field(default_factory=dict)
    forwards: int = 0
    reduced: int = 0

    @property
    def is_done(self) -> bool:
        # a module that ran twice in forward is reduced twice in backward
        return self.reduced > 0 and self.reduced >= self.forwards


@dataclass
class _Sent:
    work: Any
    buffer: Tensor
    runs: list[_Run]


def _none_running() -> int:
    return 0


class Crossing:
    """Crosses the gradients of one model.

    Args:
        root: the sharded model.
        ownership: of all ranks, with the names of ``root.named_parameters()``.
        groups: a process group for each set of owners.
        rank: this rank.
        running: how many of the reductions in the group that were begun last have not ended.

    Attributes:
        is_last: whether the backward at hand is the last one before the step: gradients of earlier ones only add up
            in the group.
    """

    def __init__(
        self,
        root: nn.Module,
        ownership: Ownership,
        groups: OwnerGroups,
        rank: int,
        running: Callable[[], int] = _none_running,
    ) -> None:
        self._groups = groups
        self._running = running
        self.is_last = False
        names = {parameter: name for name, parameter in root.named_parameters()}
        wrapped = [module for module in root.modules() if isinstance(module, FSDPModule)]
        managed: set[nn.Parameter] = set()  # a tied parameter is managed by the first module that has it
        units = {module: _unit_of(module, names, ownership, rank, managed) for module in [*wrapped[1:], wrapped[0]]}
        modules = [*reversed(wrapped[1:]), wrapped[0]]  # as backward goes; FSDP2 reduces the root last
        self._units = [units[module] for module in modules]
        self._next = 0
        self._reduced: list[_Unit] = []
        self._settled = 0
        self._sent: list[_Sent] = []
        self._hooks: list[Any] = []
        for module, unit in zip(modules, self._units, strict=True):
            # on a mesh of one dimension FSDP2 calls it after every reduction, with a group of one rank, too
            module.set_all_reduce_hook(self._hook_of(unit))
            self._hooks.append(module.register_forward_pre_hook(_counted(unit)))

    def _hook_of(self, unit: _Unit) -> Callable[[Tensor], None]:
        def was_reduced(output: Tensor) -> None:
            if self.is_last:
                self._was_reduced(unit)

        return was_reduced

    def begin(self) -> None:
        """A forward begins: what its modules run from here on is counted."""
        for unit in self._units:
            unit.forwards = unit.reduced = 0
        self._next = self._settled = 0
        self._reduced.clear()

    def _was_reduced(self, unit: _Unit) -> None:
        """FSDP2 has begun to reduce a unit in the group: send the units whose gradients have come to rest."""
        self._reduced.append(unit)
        # of the one at hand, FSDP2 puts the gradients in their places after this
        resting = len(self._reduced) - max(1, self._running())
        for earlier in self._reduced[self._settled : resting]:
            earlier.reduced += 1
        self._settled = max(self._settled, resting)
        while self._next < len(self._units) and self._units[self._next].is_done:
            self._send(self._units[self._next])
            self._next += 1

    def finish(self) -> None:
        """Send what is left, in the same order on all ranks, and wait for all of it."""
        for unit in self._units[self._next :]:
            self._send(unit)
        self._next = len(self._units)
        while self._sent:
            self._receive()

    def forget(self) -> None:
        """Drop what a failed step has left on its way."""
        self._sent.clear()
        self.is_last = False

    def _send(self, unit: _Unit) -> None:
        for owners in sorted(unit.buckets):
            runs = [run for run in unit.buckets[owners] if run.parameter.requires_grad]
            if runs:
                buffer = _packed(runs)
                work = dist.all_reduce(buffer, group=self._groups[owners], async_op=True)
                self._sent.append(_Sent(work, buffer, runs))
        while self._sent and self._sent[0].work.is_completed():
            self._receive()

    def _receive(self) -> None:
        sent = self._sent.pop(0)
        sent.work.wait()
        _unpack(sent.buffer, sent.runs)

    def close(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()


def _counted(unit: _Unit) -> Callable[..., None]:
    def count(*args: Any) -> None:
        unit.forwards += torch.is_grad_enabled()

    return count


def _unit_of(
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    ownership: Ownership,
    rank: int,
    managed: set[nn.Parameter],
) -> _Unit:
    inner = managed | parameters_within(module)
    unit = _Unit()
    for parameter in module.parameters():
        if parameter in inner:
            continue
        managed.add(parameter)
        for piece in ownership.of_rank(rank, names[parameter]):
            offset = ownership.start(rank, piece.parameter)
            run = _Run(parameter, piece.start - offset, piece.stop - offset)
            unit.buckets.setdefault(piece.owners, []).append(run)
    return unit


def _packed(runs: Sequence[_Run]) -> Tensor:
    """Return the gradients one after the other, and for each whether there is one: another group may have used it."""
    dtype = next((run.parameter.grad.dtype for run in runs if run.parameter.grad is not None), runs[0].parameter.dtype)
    device = runs[0].parameter.device
    buffer = torch.zeros(sum(run.stop - run.start for run in runs) + len(runs), dtype=dtype, device=device)
    at = 0
    for index, run in enumerate(runs):
        if run.parameter.grad is not None:
            buffer[at : at + run.stop - run.start].copy_(_local(run.parameter.grad)[run.start : run.stop])
            buffer[index - len(runs)] = 1.0
        at += run.stop - run.start
    return buffer


def _unpack(buffer: Tensor, runs: Sequence[_Run]) -> None:
    # asking is a wait for the device, and where this rank has all gradients there is nothing to ask
    has_all = all(run.parameter.grad is not None for run in runs)
    used = [1.0] * len(runs) if has_all else buffer[-len(runs) :].tolist()
    at = 0
    for run, count in zip(runs, used, strict=True):
        if count > 0:
            if run.parameter.grad is None:
                run.parameter.grad = torch.zeros_like(run.parameter)
            _local(run.parameter.grad)[run.start : run.stop].copy_(buffer[at : at + run.stop - run.start])
        at += run.stop - run.start


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's rows, flat, in place."""
    with torch.no_grad():
        rows = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        return rows.view(-1)
