"""Checkpoints of a pipeline: one file, as one device would write it; read from one device's or hetero_fsdp's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from lightning_hetero import checkpoint as state_io
from lightning_hetero.strategies.checkpoints import Checkpoints

if TYPE_CHECKING:
    from lightning_hetero.strategies.pipeline import HeteroPipelineStrategy


class PipeCheckpoints(Checkpoints):
    """Those of hetero_pipe: one file as one device would write it; read from hetero_fsdp's folders, too.

    What rank 0 has not is sent to it tensor by tensor; each rank reads the file by memory map and takes its own.

    Args:
        strategy: whose model and optimizers.
        weights_only: as for ``torch.load``.
    """

    _strategy: HeteroPipelineStrategy

    def model_state(self) -> dict[str, Any]:
        """Return the whole model on rank 0, nothing elsewhere (a collective)."""
        state = self._module.state_dict()
        owners = self._owners()
        found = {name: self._whole(value, owners.get(name) or (0,)) for name, value in state.items()}
        return found if self._strategy.is_global_zero else {}

    def _owners(self) -> Mapping[str, tuple[int, ...]]:
        return self._strategy.assembly.owners_of_names

    def _whole(self, value: Any, owners: tuple[int, ...]) -> Any:
        """A tensor on rank 0, from one of its owners; anything else as rank 0 has it."""
        if not isinstance(value, Tensor):
            return value
        if 0 in owners or self._strategy.world_size == 1:
            return value.detach().cpu() if self._strategy.is_global_zero else None
        rank, device = self._strategy.global_rank, self._strategy.root_device
        if rank == owners[0]:
            dist.send(value.detach().to(device).contiguous(), 0)
        if rank == 0:
            buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
            dist.recv(buffer, owners[0])
            return buffer.cpu()
        return None

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, nothing elsewhere (a collective)."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # a LightningOptimizer holds the real one
        state = optimizer.state_dict()
        owners = self._owners()
        names = self._names()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        whole = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            of = owners.get(names.get(id(parameter), ""), (0,))
            values = self._parameter_state(state["state"].get(number), of)
            if values is not None:
                whole[number] = values
        return {**state, "state": whole} if self._strategy.is_global_zero else {}

    def _parameter_state(self, values: Any, owners: tuple[int, ...]) -> Any:
        rank = self._strategy.global_rank
        if 0 in owners or self._strategy.world_size == 1:
            return _on_cpu(values) if rank == 0 and values is not None else None
        if rank == owners[0]:
            dist.send_object_list([_on_cpu(values)], 0, device=self._strategy.root_device)
        if rank == 0:
            received: list[Any] = [None]
            dist.recv_object_list(received, owners[0], device=self._strategy.root_device)
            return received[0]
        return None

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._module.named_parameters()}

    def _run_state(self) -> dict[str, Any]:
        return {"global_batch_size": self._strategy.global_batch_size, "batch_shares": None}

    def _restore_run(self, saved: dict[str, Any]) -> None:
        self._strategy.restore_global_batch(int(saved["global_batch_size"]))

    def _read_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        return read_folder(path, self._module, weights_only)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Give each rank the values of its units."""
        own = self._module.state_dict()
        state = {
            name: torch.empty_like(value, device="meta")
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].is_meta
            else value
            for name, value in checkpoint["state_dict"].items()
        }
        self._module.load_state_dict(state, strict=strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each rank the states of its parameters."""
        for optimizer, state in zip(self._strategy.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            own = {n for n, parameter in zip(numbers, parameters, strict=False) if not parameter.is_meta}
            kept = {number: values for number, values in state["state"].items() if number in own}
            optimizer.load_state_dict({"state": kept, "param_groups": state["param_groups"]})


def read_folder(path: Path, module: nn.Module, weights_only: bool | None) -> dict[str, Any]:
    """Read what a rank has from a folder that hetero_fsdp wrote, in the form of one file.

    Args:
        path: the folder, on a file system that all ranks see.
        module: of this rank; tensors that are on the meta device here are not read.
        weights_only: as for ``torch.load``.
    """
    metadata = FileSystemReader(path).read_metadata()
    own = {name for name, tensor in _named_tensors(module) if not tensor.is_meta}
    wanted: dict[str, Any] = {}
    found: dict[tuple[Any, ...], Any] = {}  # by the way to it: ("optimizer_0", "state", name, "exp_avg")
    for key, way in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            wanted[key] = None
            continue
        has_values = way[-1 if way[0] == "state_dict" else 2] in own
        empty = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu" if has_values else "meta")
        found[way] = empty
        if has_values:
            wanted[key] = empty
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )  # as it is to be
        load(wanted, storage_reader=FileSystemReader(path), no_dist=True)
    found |= {way: wanted[key] for key, way in metadata.planner_data.items() if key in wanted}
    rest: dict[str, Any] = torch.load(path / state_io.METADATA, map_location="cpu", weights_only=weights_only)
    optimizers = sorted({way[0] for way in found if way[0] != "state_dict"})
    return {
        **rest,
        "state_dict": {way[1]: value for way, value in found.items() if way[0] == "state_dict"},
        "optimizer_states": [_numbered(found, optimizer) for optimizer in optimizers],
    }


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _numbered(found: Mapping[tuple[Any, ...], Any], optimizer: str) -> dict[str, Any]:
    """An optimizer's state as torch's own, by parameter number, from one by name."""
    groups: dict[int, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for (kind, part, *inner), value in found.items():
        if kind == optimizer and part == "param_groups":
            groups.setdefault(inner[0], {})[inner[1]] = value
        elif kind == optimizer:
            values.setdefault(inner[0], {})[inner[1]] = value
    names = [name for index in sorted(groups) for name in groups[index]["params"]]
    at = 0
    for index in sorted(groups):
        count = len(groups[index]["params"])
        groups[index]["params"] = list(range(at, at + count))
        at += count
    state = {number: values[name] for number, name in enumerate(names) if name in values}
    return {"state": state, "param_groups": [groups[index] for index in sorted(groups)]}


def _on_cpu(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, dict):
        return {key: _on_cpu(item) for key, item in values.items()}
    return values
