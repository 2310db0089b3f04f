"""The real set-up of hetero_fsdp for one rank of many, and one step of it, without the others.

The strategy's own set-up runs: groups, meshes, FSDP2, crossing, prefetch. What is not there is a network (torch's
"fake" process group returns at once and computes nothing) and memory (fake tensors have shapes and no values).
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale.recorder import Recorded, Recorder, made_groups
from lightning_hetero import checkpoint
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.models.shapes import unit_parameters
from lightning_hetero.models.units import find_units
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy, fsdp
from lightning_hetero.strategies.groups import ShardGroups


@dataclass(frozen=True)
class ShardRank:
    """What one rank really has and does.

    Args:
        set_up_s: seconds of the set-up.
        groups: ranks of every process group that was made after the first, in order.
        elements: of parameters that it owns.
        parameter_bytes: of parameters that it keeps, padding included.
        optimizer_bytes: of the optimizer's states after a step, those of one number aside.
        written_bytes: of its own part of a distributed checkpoint, tensors of one number aside.
        seen: collectives of a step.
    """

    set_up_s: float
    groups: tuple[tuple[int, ...], ...]
    elements: int
    parameter_bytes: int
    optimizer_bytes: int
    written_bytes: int
    seen: tuple[Recorded, ...]


class Module(pl.LightningModule):
    """A LightningModule around a model on meta, made anew with tensors that have no values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).float().square().mean()
        return loss


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of so many, in a process group that communicates with nobody."""
    hook = sys.excepthook  # torch puts one more around it each time
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        # DTensor keeps what it found for a mesh, and takes that of another rank of the same mesh for the same
        _clear_sharding_prop_cache()


def parameters_of(model: nn.Module) -> tuple[ParameterShape, ...]:
    """Return the parameters of a model as hetero_fsdp finds them in :class:`Module`."""
    module = Module(model)
    return unit_parameters(module, find_units(module))


def costs_of(model: nn.Module) -> ModelCosts:
    """Return the model's units with their sizes alone, which is what collectives follow from."""
    module = Module(model)
    units = find_units(module)
    sizes: Counter[str] = Counter()
    for each in unit_parameters(module, units):
        sizes[each.unit] += each.elements
    return ModelCosts(
        type(model).__name__, tuple(UnitCost(u.name, sizes[u.name], 0, 0, 0, 0, is_block=u.is_block) for u in units)
    )


def run_shard_rank(
    plan: ShardPlan, rank: int, model: nn.Module, inputs: Tensor, *, with_values: bool = False
) -> ShardRank:
    """Set up one rank and run one step.

    Args:
        plan: for all ranks.
        rank: which one.
        model: on meta; it is left as it is.
        inputs: what it takes, on meta; one sample.
        with_values: whether tensors are real ones, which is faster for small models.
    """
    mode = nullcontext() if with_values else FakeTensorMode()
    with fake_world(rank, plan.world_size), made_groups() as groups, mode:
        begin_s = time.perf_counter()
        with unset_fake_temporarily():
            # what environment_is_there makes for configure_model
            init_device_mesh("cpu", (plan.world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        module = _with_fake_values(Module(model))
        strategy = _strategy(plan, rank)
        strategy.model = module
        with mock.patch.object(fsdp, "ShardGroups", _RealGroups):
            strategy._shard(module)
        set_up_s = time.perf_counter() - begin_s
        optimizer = torch.optim.AdamW(module.parameters())
        with Recorder() as recorder:
            _step(
                strategy,
                module,
                plan.micro_batches_of(plan.group_of(rank)),
                torch.zeros(inputs.shape, dtype=inputs.dtype),
            )
            optimizer.step()
        held = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
        states = [s for each in optimizer.state.values() for s in each.values() if isinstance(s, Tensor) and s.ndim]
        written = _written(strategy, module, optimizer)
        return ShardRank(
            set_up_s,
            tuple(groups),
            sum(tensor.numel() for tensor in held),
            sum(tensor.untyped_storage().nbytes() for tensor in held),
            sum((s.to_local() if isinstance(s, DTensor) else s).nbytes for s in states),
            written,
            tuple(recorder.seen),
        )


class _RealGroups(ShardGroups):
    """A mesh is a tensor with values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            super().__init__(*args, **kwargs)


class _Environment(LightningEnvironment):
    """Says who this rank is."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._global_rank, self._world_size = rank, world_size

    def local_rank(self) -> int:
        return 0


def _strategy(plan: ShardPlan, rank: int) -> HeteroFSDPStrategy:
    devices = tuple(Device(kind, f"node-{r // 8}", 80 * 2**30, 1e14) for r, kind in enumerate(plan.device_types))
    strategy = HeteroFSDPStrategy(
        cluster=Cluster("many", devices),
        plan=plan,
        parallel_devices=[torch.device("cpu")],
        cluster_environment=_Environment(rank, plan.world_size),
    )
    strategy.num_nodes = plan.world_size
    return strategy


def _with_fake_values(module: Module) -> Module:
    """The same module, its tensors on the CPU, under a fake mode; the model that it was made of stays on meta."""
    memo: dict[int, Any] = {}
    for parameter in module.model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty(parameter.shape), requires_grad=parameter.requires_grad)
    for buffer in module.model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return Module(copy.deepcopy(module.model, memo))


def _step(strategy: HeteroFSDPStrategy, module: Module, micro_batches: int, batch: Tensor) -> None:
    """As MicroBatchSteps and FSDPSteps run it, without Lightning's loop around."""
    for index in range(micro_batches):
        is_last = index == micro_batches - 1
        if is_last:
            strategy.gradients.begin_forward()
        loss = module.training_step(batch, 0)
        with strategy.gradients.backward(is_last=is_last):
            loss.backward()  # type: ignore[no-untyped-call]


def _written(strategy: HeteroFSDPStrategy, module: Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank offers to a distributed checkpoint."""
    groups = strategy.groups
    if groups.crosses and not groups.is_first:
        return 0
    state = checkpoint._sharded_state(module, [optimizer])
    size_bytes = 0
    for part, values in state.items():
        with unset_fake_temporarily():  # borders are computed in tensors
            plan = create_default_local_save_plan(_flat(values, part), is_coordinator=False)
        for item in plan.items:
            if item.tensor_data is None or not item.tensor_data.size:
                continue
            size_bytes += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return size_bytes


def _flat(values: Any, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        found |= _flat(value, key) if isinstance(value, dict) else {key: value}
    return found
