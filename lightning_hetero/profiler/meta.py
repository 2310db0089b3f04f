"""A model without values: copied to the meta device, and unit by unit brought to a real one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

M = TypeVar("M", bound=nn.Module)

_INIT_STD = 0.02
_aten = torch.ops.aten


def meta_copy(module: M) -> M:
    """A copy whose parameters and buffers are on the meta device; the values are never copied.

    Tied parameters stay tied, and what needs no gradient stays so.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def materialise(module: M, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> M:
    """A copy of ``module`` on ``device``, its floating-point values in ``dtype``.

    Values that exist are copied. Those on meta are drawn: matrices small and normal, so that nothing overflows and no
    kernel meets denormal numbers, vectors one, buffers zero, which is a valid index.

    Args:
        module: on any device.
        device: where the copy goes.
        dtype: of its parameters and floating-point buffers.
        generator: of the random values, on ``device``.
    """
    copied = copy.deepcopy(module)
    if not any(tensor.is_meta for tensor in _tensors(copied)):
        return copied.to(device=device, dtype=dtype)
    # The dtype first: 16 bits of a large block need no 32 on the way.
    copied = copied.to(dtype=dtype).to_empty(device=device)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=_INIT_STD, generator=generator)
            else:
                parameter.fill_(1)
        for buffer in copied.buffers():
            buffer.zero_()
    return copied


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@contextmanager
def fused_attention() -> Iterator[None]:
    """On meta, let ``scaled_dot_product_attention`` keep and count what a fused kernel does.

    torch has no fused kernel for meta and writes the attention out there, as if the matrix of all scores were kept:
    for 257 tokens and 16 heads some 10 times as much as is kept on any real device. Attention on other devices, and
    what the fused kernel does not support, runs as ever.

    ``torch.nn.functional`` is changed while the context is open: by name, since ``nn.MultiheadAttention`` looks there
    too, and a function mode does not reach into it.
    """
    plain = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not query.is_meta:
            return plain(query, key, value, *args, **kwargs)
        fused = _fused(query, key, value, *args, **kwargs)
        return plain(query, key, value, *args, **kwargs) if fused is None else fused

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """What a fused kernel would return, or ``None`` where none would run."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    same = query.shape[:2] == key.shape[:2] and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if query.ndim != 4 or not same or (attn_mask is not None and attn_mask.requires_grad):
        return None
    # Dropout in a fused kernel keeps its random state and no mask: as if there were none.
    op = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu")  # noqa: B009  (a private name, as in flops.py)
    output: Tensor = op(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
