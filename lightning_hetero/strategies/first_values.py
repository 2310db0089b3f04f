"""The values that a model begins with: made where a module has none yet, and rank 0's on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError


def materialise(path: str, module: nn.Module, device: torch.device) -> None:
    """Give a module on the meta device memory and initial values, as Lightning's ModelParallelStrategy does.

    Args:
        path: name of the module, for the message.
        module: its own parameters and buffers are made, not those of its children.
        device: where.

    Raises:
        UnsupportedError: if it has no ``reset_parameters()``.
    """
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in own):
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise UnsupportedError(
            f"{path or type(module).__name__} ({type(module).__name__}) was made on the meta device and has no "
            "reset_parameters() to give it values: add one, or build it on a real device"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def take_from_rank_0(tensor: Tensor, device: torch.device) -> None:
    """Take rank 0's values, in place (a collective).

    Args:
        tensor: alike on all ranks but for its values.
        device: of this rank; NCCL takes nothing that is on the CPU still.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        value = tensor.detach()
        sent = value.to(device)
        dist.broadcast(sent, src=0)
        if sent is not value:
            value.copy_(sent)
