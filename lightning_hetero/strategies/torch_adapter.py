"""All that this package knows of torch's private parts, in one place (checked with torch 2.11 and 2.14).

Each piece says which private name it touches and why nothing public will do.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero.strategies.failure import Store


def set_unshard_async(root: nn.Module, enabled: bool) -> None:
    """Make the all-gathers of ``root``'s FSDP2 modules asynchronous, waited for when the parameters are needed.

    ``FSDPModule._set_unshard_async_op`` has no public form. On NCCL streams overlap without it; on gloo an all-gather
    blocks the rank's only thread, and prefetching does nothing unless it is asynchronous.
    """
    if isinstance(root, FSDPModule):
        root._set_unshard_async_op(enabled)


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
    if dist.get_backend() == "nccl":
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
