"""What really goes to the process groups: every collective and message of a rank, as torch hands it to a backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "receive",
}


@dataclass(frozen=True)
class Recorded:
    """One collective or message.

    Args:
        kind: as the simulator names it, or torch's name of the operation.
        size_bytes: of the whole tensor: what an all-gather brings, what a reduction takes.
        ranks: of a collective: over which it runs; of a message: the other rank.
    """

    kind: str
    size_bytes: int
    ranks: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """Notes what is handed to process groups while it is on.

    Attributes:
        seen: in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(_recorded(str(func).split(".")[1], args))
        return func(*args, **(kwargs or {}))


def _recorded(name: str, args: Sequence[Any]) -> Recorded:
    position = next(i for i, each in enumerate(args) if isinstance(each, torch.ScriptObject))
    group = dist.ProcessGroup.unbox(args[position])
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [tensor for each in args for tensor in _tensors(each)]
    if name in ("send", "recv_"):
        return Recorded(_KINDS[name], sum(tensor.nbytes for tensor in tensors), (ranks[args[position + 1]],))
    if name.endswith("_base_"):  # output and input: the larger one is the whole
        return Recorded(_KINDS[name], max(tensor.nbytes for tensor in tensors), ranks)
    return Recorded(_KINDS.get(name, name), sum(tensor.nbytes for tensor in tensors), ranks)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


@contextmanager
def made_groups() -> Iterator[list[tuple[int, ...]]]:
    """Note the ranks of every process group that is made, this rank's and others', in order."""
    made: list[tuple[int, ...]] = []
    make = distributed_c10d._new_group_with_tag

    def noted(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        made.append(tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size())))
        return make(ranks, *args, **kwargs)

    with mock.patch.object(distributed_c10d, "_new_group_with_tag", noted):
        yield made
