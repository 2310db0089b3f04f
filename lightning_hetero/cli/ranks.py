"""Commands that may run on every rank under torchrun or SLURM's ``srun``, or alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_hetero.cli.launch import launched
from lightning_hetero.doctor.place import Place
from lightning_hetero.errors import HeteroError

T = TypeVar("T")
_MEETING = timedelta(minutes=2)


@contextmanager
def process_group() -> Iterator[int]:
    """Join the other ranks if there are any; yields this rank, 0 when alone.

    Ranks are those of torchrun, or of ``srun``, as its environment gives them. On CUDA each takes the device of its
    local rank.

    Raises:
        HeteroError: the environment does not say which rank this is.
    """
    place = None if dist.is_initialized() else launched()
    if place is None:
        yield dist.get_rank() if dist.is_initialized() else 0
        return
    local_rank = place.local_rank
    has_own_device = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    if has_own_device:
        torch.cuda.set_device(local_rank)
    # gloo beside NCCL: objects are gathered over it, and a rank without a device of its own can join
    backend = "cpu:gloo,cuda:nccl" if has_own_device else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)  # torchrun's agent may hold the store
    else:
        _meet_under_slurm(place, backend)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _meet_under_slurm(place: Place, backend: str) -> None:
    address = f"tcp://{place.host}:{place.port}"
    try:
        dist.init_process_group(backend, address, _MEETING, rank=place.rank, world_size=place.world_size)
    except RuntimeError as error:
        raise HeteroError(
            f"SLURM's variables say that this is rank {place.rank} of {place.world_size}, but not all of them met at "
            f"{place.host}, port {place.port}, within {_MEETING.total_seconds():.0f} s. In a batch script, start it by "
            "srun, or unset SLURM_NTASKS to look at this machine alone; lightning-hetero doctor says who does not come"
        ) from error


def gathered(value: T) -> list[T]:
    """``value`` of every rank, in rank order; of this one alone where there are no others."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
