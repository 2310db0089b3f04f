"""Time the optimizer's step on copies of this rank's parameters, before training: nothing of the user's is changed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_hetero.profiler.speed import wait_for

REPEATS = 3
"""timed steps, after one that makes the states"""

MEMORY_SHARE = 0.5
"""share of the memory at hand that the copies may fill"""

_COPIES = 4
"""a copied parameter, its gradient, and two states"""

Around = Callable[[], AbstractContextManager[Any]]


def optimizer_s(
    optimizers: Sequence[Optimizer],
    free_bytes: float,
    around: Around,
    device: torch.device,
    barrier: Callable[[], None],
    agree: Callable[[int], int] = lambda count: count,
) -> float | None:
    """Seconds of a step of all optimizers on this rank's own parameters (a collective).

    Copies of the parameters are stepped by optimizers with the same settings; where memory is small only the first of
    them, and the seconds are then those of all, by their bytes.

    Args:
        optimizers: whose settings and parameters are copied.
        free_bytes: memory that nothing else needs meanwhile.
        around: entered around each step, as in training.
        device: of this rank; its shards are there, or on the host.
        barrier: waits for all ranks, which step at one time in training, too.
        agree: from the number of parameters that fit here to the number that every rank copies.

    Returns:
        The median of some steps; None for optimizers that are not
        torch's own, which might keep or change something else, and for those that need a closure.
    """
    if not all(_is_known(each) for each in optimizers):
        return None
    copies, copied_bytes = _copies(optimizers, agree(_count_that_fits(optimizers, free_bytes)))
    barrier()
    if not copied_bytes:
        return 0.0
    return statistics.median(_steps(copies, around, device)) * sum(map(_bytes, _trained(optimizers))) / copied_bytes


def _is_known(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def _count_that_fits(optimizers: Sequence[Optimizer], free_bytes: float) -> int:
    """How many parameters, the first ones, may be copied; one at least."""
    room, count = MEMORY_SHARE * free_bytes / _COPIES, 0
    for parameter in _trained(optimizers):
        room -= _bytes(parameter)
        if room < 0:
            break
        count += 1
    return max(1, count)


def _copies(optimizers: Sequence[Optimizer], count: int) -> tuple[list[Optimizer], int]:
    """Optimizers with copies of the first ``count`` parameters, and the bytes of these."""
    copies, copied_bytes, left = [], 0, count
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            own = _trained_in(group)[:left]
            left -= len(own)
            copied_bytes += sum(map(_bytes, own))
            if own:
                groups.append({**group, "params": [_copy(parameter) for parameter in own]})
        if groups:
            make: Any = type(optimizer)
            copies.append(make(groups))
    return copies, copied_bytes


def _copy(parameter: Tensor) -> torch.nn.Parameter:
    """Its values, where they are, with a gradient of zero: what a step takes does not depend on them."""
    copy = torch.nn.Parameter(parameter.detach().clone())
    copy.grad = torch.zeros_like(copy)
    return copy


def _steps(copies: Sequence[Optimizer], around: Around, device: torch.device) -> Iterator[float]:
    for repeat in range(1 + REPEATS):
        wait_for(device)
        began_s = time.perf_counter()
        with around():
            for copy in copies:
                copy.step()
        wait_for(device)
        if repeat:
            yield time.perf_counter() - began_s


def _trained(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in _trained_in(group)]


def _trained_in(group: dict[str, Any]) -> list[Tensor]:
    """Those that this rank steps; a pipeline's other stages are on meta."""
    return [parameter for parameter in group["params"] if parameter.requires_grad and not parameter.is_meta]


def _bytes(parameter: Tensor) -> int:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.numel() * own.element_size()
