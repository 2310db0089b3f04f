"""Commands that may run on every rank under torchrun, or alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@contextmanager
def process_group() -> Iterator[int]:
    """Join the other ranks if there are any; yields this rank, 0 when alone.

    Ranks are those of torchrun, as its environment gives them. On CUDA each takes the device of its local rank.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_own_device = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    if has_own_device:
        torch.cuda.set_device(local_rank)
    # gloo beside NCCL: objects are gathered over it, and a rank without a device of its own can join
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_own_device else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def gathered(value: T) -> list[T]:
    """``value`` of every rank, in rank order; of this one alone where there are no others."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
