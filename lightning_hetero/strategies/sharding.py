"""Wrap a model with FSDP2 so that gradients are summed, not averaged, over a shard group.

The strategy scales each rank's loss by its share of the global batch; the *sum* of the gradients is then exactly the
gradient of the mean over the global batch (DESIGN section 5).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_hetero.errors import UnsupportedError, raise_all
from lightning_hetero.models.units import Unit
from lightning_hetero.strategies.first_values import materialise, take_from_rank_0
from lightning_hetero.strategies.groups import ShardGroups
from lightning_hetero.strategies.options import ShardingOptions

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


def check_parameters(root: nn.Module) -> None:
    """Refuse what FSDP2 cannot shard, naming every such parameter.

    Raises:
        UnsupportedError: a model without parameters, with uninitialised (lazy) or with 0-dimensional ones.
    """
    parameters = list(root.named_parameters())
    problems = []
    if not parameters:
        problems.append(
            f"{type(root).__name__} has no parameters: there is nothing to train or to shard. Build the network in "
            "__init__, setup or configure_model"
        )
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problems.append(f"parameter {name} is uninitialised (a lazy module): run one batch through it first")
        elif parameter.ndim == 0:
            problems.append(f"parameter {name} has no dimensions; FSDP2 shards dimension 0: give it the shape [1]")
    raise_all(UnsupportedError, "hetero_fsdp cannot shard this model", problems)


def check_steps(module: nn.Module) -> None:
    """Refuse steps that fetch their own batches: whose samples would they be?

    Raises:
        UnsupportedError: naming every step with a ``dataloader_iter`` argument.
    """
    problems = [
        f"{name}(dataloader_iter) fetches batches by itself, so nothing is known of their sizes: "
        f"write {name}(batch, batch_idx)"
        for name in _STEP_METHODS
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True)
    ]
    raise_all(UnsupportedError, "hetero_fsdp cannot split these batches", problems)


def shard_module(
    root: nn.Module,
    units: Sequence[Unit],
    groups: ShardGroups,
    device: torch.device,
    *,
    reshard_after_forward: bool,
    options: ShardingOptions | None = None,
) -> None:
    """Apply ``fully_shard`` to each block, to the children that hold blocks, and to the root, in place.

    Modules that are already wrapped (by the user's ``configure_model``, or an earlier fit) are left as they are. Values
    are rank 0's everywhere: each module is materialised (if on the meta device), broadcast and sharded before the next,
    so that at most one of them is whole beyond what the user built.

    Args:
        root: the LightningModule.
        units: its units; those marked as blocks are wrapped on their own.
        groups: the layout; each module is sharded over the mesh of this rank's group.
        device: where this rank's shards live.
        reshard_after_forward: free a block's gathered parameters after its forward (less memory, one more all-gather).
        options: whose ``mixed_precision`` and ``cpu_offload`` hold for what is wrapped here.
    """
    _check_meshes(root, groups)
    options = options or ShardingOptions()
    _say_what_stays(root, options)
    # gradients that cross are read on the host at once: pinned, they may still be on their way
    pinned = CPUOffloadPolicy(pin_memory=not groups.crosses)
    offload = pinned if options.cpu_offload and device.type != "cpu" else OffloadPolicy()
    shared = _Broadcast(device)
    blocks = [unit.module for unit in units if unit.is_block]
    called = [child for child in root.children() if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
    holders = [child for child in called if any(block in set(child.modules()) for block in blocks)]
    outermost = set(root.children())
    for module in _wrappable(root, [*blocks, *(holder for holder in holders if holder not in blocks)]):
        if isinstance(module, FSDPModule) or not any(True for _ in module.parameters()):
            continue
        shared.from_rank_0(module)
        fully_shard(
            module,
            mesh=groups.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=options.policy(with_output=module in outermost),
            offload_policy=offload,
        )
    shared.from_rank_0(root)
    if not isinstance(root, FSDPModule):
        # the root's own parameters are used first in forward and last in backward: gathered once
        fully_shard(
            root,
            mesh=groups.mesh,
            reshard_after_forward=False,
            mp_policy=options.policy(with_output=True),
            offload_policy=offload,
        )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM, so the factor 1 needs plain sums as well (tried on torch 2.14)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _wrappable(root: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of ``modules`` that share no parameter with what is outside of them.

    FSDP2 would shard a shared parameter twice, and its two halves would train apart; wrapped with what holds both
    places, it is one.
    """
    places: dict[nn.Parameter, set[nn.Module]] = {}
    for place in root.modules():
        for parameter in place.parameters(recurse=False):
            places.setdefault(parameter, set()).add(place)

    def shares(module: nn.Module) -> bool:
        inside = set(module.modules())
        return any(not places[parameter] <= inside for parameter in module.parameters())

    apart = [module for module in modules if shares(module)]
    if apart:
        names = [name for name, module in root.named_modules() if module in apart]
        rank_zero_info(
            f"hetero_fsdp: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} share parameters with other "
            "modules (tied weights), so they are gathered together with what holds both, at a cost in memory"
        )
    return [module for module in modules if module not in apart]


_SHARDED_UNDER: weakref.WeakKeyDictionary[nn.Module, tuple[Any, bool]] = weakref.WeakKeyDictionary()
"""mixed precision and CPU offload that a model was sharded with by an earlier fit"""


def _say_what_stays(root: nn.Module, options: ShardingOptions) -> None:
    """Say where options come too late: what is sharded keeps what it was sharded with."""
    names = [name or type(root).__name__ for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    asked = (options.mixed_precision, bool(options.cpu_offload))
    if names and asked != _SHARDED_UNDER.get(root, (None, False)):
        rank_zero_info(
            f"hetero_fsdp: mixed_precision={asked[0]!r} and cpu_offload={asked[1]} does nothing to what is sharded "
            f"already (by configure_model, or an earlier fit): {', '.join(names[:4])}"
        )
    if not names:
        _SHARDED_UNDER[root] = asked


def _check_meshes(root: nn.Module, groups: ShardGroups) -> None:
    """Refuse parameters that are sharded already, and over other ranks than the plan's."""
    sharded = [(name, p) for name, p in root.named_parameters() if isinstance(p, DTensor)]
    if not sharded:
        return
    planned = groups.mesh.mesh.tolist()
    others = [
        f"{name} over ranks {parameter.device_mesh.mesh.tolist()}"
        for name, parameter in sharded
        if parameter.device_mesh.mesh.tolist() != planned
    ]
    if others:
        raise UnsupportedError(
            f"{others[0]} and {len(others) - 1} more parameters are sharded already (by configure_model, or by a fit "
            f"with another plan), and the plan shards over {planned}: leave fully_shard to the strategy, build the "
            "module anew, or use that plan"
        )


def use_reduce_scatter(root: nn.Module, reduce_scatter: Any) -> None:
    """Have all of ``root``'s FSDP2 modules reduce their gradients by ``reduce_scatter``."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reduce_scatter)


class _Broadcast:
    """Gives every rank the values of rank 0.

    What to send follows from the model alone, so that all ranks send the same: sharded parameters are done, and a
    buffer met again is sent again. Remembering tensors by ``id`` hung ranks: sharding frees them, and ids are reused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def from_rank_0(self, module: nn.Module) -> None:
        for name, child in module.named_modules():
            materialise(name, child, self.device)
        for tensor in self._pending(module):
            take_from_rank_0(tensor, self.device)

    def _pending(self, module: nn.Module) -> Iterator[Tensor]:
        for tensor in [*module.parameters(), *module.buffers()]:
            if not _is_sharded(tensor):
                yield tensor


def parameters_within(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that wrapped modules inside ``module`` have, so that it does not manage them itself."""
    return {
        parameter
        for child in module.modules()
        if child is not module and isinstance(child, FSDPModule)
        for parameter in child.parameters()
    }


def _is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor)


def register_steps(root: nn.Module) -> None:
    """Let FSDP2 gather the root's parameters in the steps, which Lightning calls instead of ``forward``."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in _STEP_METHODS:
        if hasattr(root, name) and name not in root.__dict__:
            register_fsdp_forward_method(root, name)
