"""State that does not depend on the plan it was saved under.

In one file a checkpoint has the very form that one device would write, so that one device, or any other plan, can
read it. Whole tensors are gathered one at a time and kept on rank 0 only; on loading every rank reads the file by
memory map and keeps its own rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_hetero.swap import put_in_place, remove

METADATA = "meta.pt"
"""file of a sharded checkpoint that holds all but tensors; the name that Lightning's own tools look for"""


def gather_state(state: Any, keep: bool) -> Any:
    """Return ``state`` with every sharded tensor whole and on the CPU (a collective; one tensor at a time).

    Args:
        state: nested dicts, lists and tuples of tensors and plain values, alike on all ranks.
        keep: whether this rank keeps the result; otherwise {} is returned.
    """
    whole = _map_tensors(state, lambda tensor: _whole(tensor, keep))
    return whole if keep else {}


def _whole(tensor: Tensor, keep: bool) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu() if keep else None


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole ``tensor``, sharded as ``like`` is; no communication."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.to(like.device_mesh.device_type)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def with_whole_tensors(value: Any, keep: bool) -> Any:
    """Return ``value`` with every sharded tensor in its dicts, lists and tuples whole (a collective).

    Args:
        value: alike on all ranks, but for what is not sharded.
        keep: whether this rank keeps them; elsewhere they are None.

    Returns:
        ``value`` itself where no tensor in it is sharded.
    """
    if isinstance(value, DTensor):
        return _whole(value, keep)
    if isinstance(value, dict):
        pairs = {key: with_whole_tensors(item, keep) for key, item in value.items()}
        return value if all(pairs[key] is item for key, item in value.items()) else pairs
    if type(value) in (list, tuple):
        items = [with_whole_tensors(item, keep) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    return value


def shard_state(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a whole-model state dict with this rank's part of what ``module`` holds sharded under the same name."""
    own = module.state_dict()
    return {
        name: shard_like(value, own[name]) if isinstance(value, Tensor) and name in own else value
        for name, value in state.items()
    }


def load_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load a whole-model state dict into a sharded (or plain) module."""
    module.load_state_dict(shard_state(state, module), strict=strict)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole optimizer state dict (torch's own form, by parameter number) into a sharded optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))

    def parts_of(number: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        like = by_number.get(number)
        return {
            name: shard_like(value, like)
            if isinstance(value, Tensor) and like is not None and value.shape == like.shape
            else value
            for name, value in values.items()
        }

    sharded = {number: parts_of(number, values) for number, values in state["state"].items()}
    optimizer.load_state_dict({"state": sharded, "param_groups": state["param_groups"]})


def read_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint of one file by memory map, so that ranks on a node share its pages."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    return state


def write_file(state: Any, path: Path) -> None:
    """Write ``state`` to ``path`` so that there is, at any moment, either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a sharded checkpoint."""
    return (path / METADATA).is_file()


def write_sharded(
    state: dict[str, Any],
    module: nn.Module,
    optimizers: list[Optimizer],
    path: Path,
    *,
    group: Any = None,
    writes: bool = True,
) -> None:
    """Write each rank's shards into the folder ``path`` (a collective); complete under its name or not there.

    Args:
        state: all that is not tensors of the model and the optimizers; rank 0's is written.
        module: the sharded model.
        optimizers: its optimizers.
        path: the same on every rank, on a file system that all ranks see.
        group: process group of ranks that together hold the model once; by default that is all of them.
        writes: whether this rank is in it. Other groups hold the same tensors on other meshes, and have nothing to add.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    rank = dist.get_rank()
    if rank == 0:
        remove(temporary)
        temporary.mkdir(parents=True)
    dist.barrier()
    if writes:
        save(_sharded_state(module, optimizers), checkpoint_id=temporary, process_group=group)
        if group is not None:
            dist.barrier(group)
    if rank == 0:
        torch.save(state, temporary / METADATA)
        put_in_place(temporary, path)
    dist.barrier()


def read_sharded(
    module: nn.Module, optimizers: list[Optimizer], path: Path, weights_only: bool | None, *, group: Any = None
) -> Any:
    """Load a sharded checkpoint in place, under any number of ranks (a collective); return all but the tensors.

    Args:
        module: the sharded model.
        optimizers: its optimizers.
        path: the folder.
        weights_only: as for ``torch.load``.
        group: process group of this rank's shard group; by default all ranks shard together.
    """
    options = StateDictOptions(strict=True)
    state = _sharded_state(module, optimizers)
    load(state, checkpoint_id=path, process_group=group)
    set_model_state_dict(module, state["state_dict"], options=options)
    for i, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(module, optimizer, state[f"optimizer_{i}"], options=options)
    return read_values(path, weights_only)


def read_values(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read all of a sharded checkpoint but the tensors of model and optimizers."""
    values: dict[str, Any] = torch.load(path / METADATA, map_location="cpu", weights_only=weights_only)
    return values


def _sharded_state(module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    state: dict[str, Any] = {"state_dict": get_model_state_dict(module)}
    for i, optimizer in enumerate(optimizers):
        state[f"optimizer_{i}"] = get_optimizer_state_dict(module, optimizer)
    return state
