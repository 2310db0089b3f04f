"""All that this package knows of torch's private parts, in one place (checked with torch 2.11 and 2.14).

Each piece says which private name it touches and why nothing public will do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_hetero.strategies.peers import Store


def set_unshard_async(root: nn.Module, enabled: bool) -> None:
    """Make the all-gathers of ``root``'s FSDP2 modules asynchronous, waited for when the parameters are needed.

    ``FSDPModule._set_unshard_async_op`` has no public form. On NCCL streams overlap without it; on gloo an all-gather
    blocks the rank's only thread, and prefetching does nothing unless it is asynchronous.
    """
    if isinstance(root, FSDPModule):
        root._set_unshard_async_op(enabled)


class CheckedGradScaler(torch.amp.GradScaler):
    """A loss scaler that hands on what it found in the gradients, before anything is decided by it.

    ``GradScaler._unscale_grads_`` is where every path comes by, of optimizers that unscale by themselves too, and has
    no public form; torch's own ShardedGradScaler overrides it likewise (torch 2.11 to 2.14).
    """

    def found_inf(self, found: Collection[Tensor], device: torch.device) -> None:
        """See, and possibly change in place, whether infinities were found: above 0, a number per device."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # a rank may have no gradient, and step() refuses to know nothing
        found = found or {found_inf.device: found_inf}
        self.found_inf(found.values(), inv_scale.device)
        return found


def finish_backward(root: FSDPModule) -> None:
    """End a backward that ran inside ``root``'s forward: reduce gradients of its own parameters and shard them again.

    ``FSDPState._root_post_backward_final_callback`` is what FSDP2 queues for the end of a backward by hooks on what
    wrapped modules returned; a root within its forward has returned nothing. A second call finds nothing left to do.
    From torch 2.13 on it says that no forward of the root is at hand any more: else, on CUDA, what is gathered next
    does not wait for the optimizer's step.
    """
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None


def reshard(root: nn.Module) -> None:
    """Free all gathered parameters in ``root``: ``parameters()`` are the shards then."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def batch_norms(module: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that normalise over this rank's samples only, in training mode, and their names.

    ``_BatchNorm`` is the base of all of them and has no public name.
    """
    return {
        child: name
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm) and child.training
    }


def default_store() -> Store:
    """Return the default process group's store, on a connection of its own where the store has one.

    ``distributed_c10d._get_default_store`` has no public form; the store is where a failing rank can still be heard
    when collectives no longer work.
    """
    store: Any = distributed_c10d._get_default_store()
    try:
        own: Store = store.clone()
        return own
    except (AttributeError, NotImplementedError, RuntimeError):
        return cast(Store, store)


def abort_process_group() -> None:
    """Close this rank's connections so that ranks that wait for it stop waiting.

    ``distributed_c10d._abort_process_group`` is what NCCL needs: ``destroy_process_group`` waits for the collectives
    that will never end. gloo closes its connections on destruction.
    """
    if "nccl" in dist.get_backend_config():  # alone, or beside gloo for what is on the host
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def first_half_of_backward(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[dict[str, Any]]:
    """Run the half of a backward that finds the gradients of ``inputs``; return what the other half needs.

    ``torch.distributed.pipelining._backward`` splits a backward without computing anything twice, for torch's own
    zero-bubble schedules; torch has no public form of it (torch 2.11 to 2.14). All roots must need some of the inputs,
    and all inputs must be needed: before 2.13 it raises else, and later ones leave gradients of parameters out.

    Returns:
        Per set of parameters ("params") the nodes where the graph of inputs branches off to them ("intermediates"), and
        what came in there, for each of a node's outputs ("grads").
    """
    _, halves = stage_backward_input(
        list(roots), list(gradients), list(inputs), iter(cast(Sequence[nn.Parameter], weights))
    )
    return halves


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread.

    ``torch._C._current_graph_task_id`` has no public form; torch's own activation checkpointing asks it (torch 2.11 to
    2.14).
    """
    return bool(torch._C._current_graph_task_id() != -1)
