"""Gradients of a rank's parameters: made in the schedule, summed over their owners, released to Lightning.

Lightning zeroes gradients between ``training_step``, in which a pipeline's whole schedule runs, and ``backward``. So
the schedule runs with ``p.grad`` set aside; what it made waits until the backward of the loss that Lightning got, a
small autograd function, adds it to ``p.grad`` multiplied by the incoming gradient (1 / accumulated batches)::

    training_step   set aside | schedule: p.grad | sums over owners begin as stages end | take
    zero_grad
    backward        p.grad += taken x incoming gradient

Which gradients are summed with whom follows from ownership: a unit that several pipelines have, a tied parameter, and
what is outside the split model and on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.ownership import Ownership


@dataclass
class _Shared:
    """Parameters that the same ranks own.

    Args:
        group: of the owners.
        names: of the parameters.
        stages: this rank's that run a backward of them; None where one is outside of all stages, so that no stage's end
            says that they are complete.
        open_stages: of these, those that have not run their last backward of the step.
        is_begun: whether their sum over the owners has begun in this step.
    """

    group: Any
    names: list[str]
    stages: frozenset[int] | None
    open_stages: set[int] = field(default_factory=set)
    is_begun: bool = False

    def begin_step(self) -> None:
        self.open_stages, self.is_begun = set(self.stages or ()), False


class OwnedGradients:
    """The gradients of one rank.

    Args:
        parameters: of this rank, by name; in the same order on all ranks, as far as they have them.
        ownership: of all ranks.
        stages_of: this rank's stages that run a backward of each parameter; those outside the model have none.
        rank: this rank.
        make_group: from ascending ranks to a process group; called on all ranks in the same order.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ownership: Ownership,
        stages_of: Mapping[str, frozenset[int]],
        rank: int,
        make_group: Callable[[Sequence[int]], Any],
    ) -> None:
        self._parameters = dict(parameters)
        groups = {owners: make_group(owners) for owners in ownership.owner_sets}
        shared: dict[tuple[int, ...], list[str]] = {}
        for name in self._parameters:
            pieces = ownership.of_rank(rank, name)
            if pieces:
                shared.setdefault(pieces[0].owners, []).append(name)
        # one order on all ranks, whose parameters come in one order: backward is done with the first ones last
        self._shared = [_Shared(groups[owners], names, _stages(names, stages_of)) for owners, names in shared.items()]
        self._shared.reverse()
        self._shared.sort(key=lambda each: each.stages is None)
        self._counted = [name for name in self._parameters if _first_owner(ownership, name) == rank]
        self._aside: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}
        self._works: list[tuple[Any, Tensor, list[str]]] = []
        self.ranks_with_gradient: dict[str, int] = {}
        """of the parameters that were summed over owners: on how many of them there was a gradient, the last time"""

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, *, keep: bool) -> None:
        """Set gradients aside before a schedule.

        Args:
            keep: whether they are still wanted; else they are dropped, which Lightning is about to do.
        """
        self._aside = {n: p.grad for n, p in self._parameters.items() if keep and p.grad is not None}
        self._taken, self._works = {}, []
        for each in self._shared:
            each.begin_step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def stage_is_done(self, stage: int) -> None:
        """Begin to sum what no later backward of this step adds to (not waited for).

        In one order on all ranks: where stages end in another order elsewhere, two sums would wait for each other on
        NCCL, whose groups take turns on a device.
        """
        for each in self._shared:
            each.open_stages.discard(stage)
        for each in self._shared:
            if each.stages is None or each.open_stages:
                return
            if not each.is_begun:
                self._begin_sum(each)

    def _begin_sum(self, shared: _Shared) -> None:
        shared.is_begun = True
        trained = [name for name in shared.names if self._parameters[name].requires_grad]
        gradients = {name: self._parameters[name].grad for name in trained}
        self._works += _sums(gradients, self._parameters, shared.group)

    def take(self, *, summed: bool) -> None:
        """Take the schedule's gradients off the parameters; put back what was set aside.

        Args:
            summed: whether they are summed over owners now; else :meth:`release` does it, with what has accumulated.
        """
        if summed:
            for each in self._shared:
                if not each.is_begun:
                    self._begin_sum(each)
            self._finish_sums()
        self._taken = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        for name, parameter in self._parameters.items():
            parameter.grad = self._aside.get(name)
        self._aside = {}

    def put_back(self) -> None:
        """Forget a schedule's gradients; put back what was set aside."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._aside.get(name)
        self.drop()

    def drop(self) -> None:
        """Forget a schedule that failed."""
        self._works, self._taken, self._aside = [], {}, {}

    def release(self, factor: float, *, sum_now: bool) -> None:
        """Add what was taken to the parameters' gradients.

        Args:
            factor: what it is multiplied by.
            sum_now: sum what is there then over owners: the last of several batches that accumulated.
        """
        for name, gradient in self._taken.items():
            parameter = self._parameters[name]
            with torch.no_grad():
                scaled = gradient if factor == 1.0 else gradient.mul_(factor)
                parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)
        self._taken = {}
        if sum_now:
            for each in self._shared:
                self._begin_sum(each)
            self._finish_sums()

    def _finish_sums(self) -> None:
        for work, flat, names in self._works:
            work.wait()
            self.ranks_with_gradient |= _spread(flat, names, self._parameters)
        self._works = []

    # -- norm ----------------------------------------------------------------------------------------------------------

    def squared_norm(self, gradients: Mapping[nn.Parameter, Tensor], device: torch.device) -> Tensor:
        """The sum of squares of those gradients that this rank answers for: each parameter counts on one rank."""
        own = [self._parameters[name] for name in self._counted]
        squares = [gradients[p].detach().double().square().sum() for p in own if p in gradients]
        return torch.stack(squares).sum().to(device) if squares else torch.zeros((), dtype=torch.float64, device=device)


def _stages(names: Sequence[str], stages_of: Mapping[str, frozenset[int]]) -> frozenset[int] | None:
    """Stages of some parameters; None where one has none."""
    stages = [stages_of.get(name) or None for name in names]
    return None if None in stages else frozenset().union(*(each for each in stages if each))


def _first_owner(ownership: Ownership, name: str) -> int:
    pieces = ownership.pieces.get(name, ())
    return pieces[0].owners[0] if pieces else -1


def _sums(
    gradients: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter], group: Any
) -> Iterable[tuple[Any, Tensor, list[str]]]:
    """Begin one sum for each type of the gradients: (work, flat sum, names).

    A gradient that is absent here may be present elsewhere, so it counts as zero; at the end of each flat tensor is,
    per gradient, on how many ranks it is present, so that one that nobody has stays absent.
    """
    by_type: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name in gradients:
        parameter = parameters[name]
        by_type.setdefault((parameter.dtype, parameter.device), []).append(name)
    found = []
    for (dtype, device), names in by_type.items():
        parts = [
            torch.zeros(parameters[name].numel(), dtype=dtype, device=device) if grad is None else grad.reshape(-1)
            for name, grad in ((name, gradients[name]) for name in names)
        ]
        present = torch.tensor([gradients[name] is not None for name in names], dtype=dtype, device=device)
        flat = torch.cat([*parts, present])
        found.append((dist.all_reduce(flat, group=group, async_op=True), flat, names))
    return found


def _spread(flat: Tensor, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Give the parameters their parts of a sum; returns on how many ranks each had a gradient."""
    present = flat[len(flat) - len(names) :].tolist()
    at = 0
    for name, owners_with_it in zip(names, present, strict=True):
        parameter = parameters[name]
        part = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
        if owners_with_it:
            parameter.grad = part  # a view: the flat sum lives as long as its parts
    return {name: int(owners_with_it) for name, owners_with_it in zip(names, present, strict=True)}


class Release(torch.autograd.Function):
    """A loss whose backward hands out gradients that were made before, multiplied by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, value: Tensor, hand_out: Callable[[Tensor], None]) -> Tensor:
        """Return ``value``; ``handle`` is any tensor that requires a gradient."""
        ctx.hand_out = hand_out
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hand out."""
        ctx.hand_out(gradients[0])
        return None, None, None
