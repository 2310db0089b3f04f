"""Floating-point operations, counted as they are dispatched; a multiply-add counts as 2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_hetero.profiler.ops import OpObserver

_aten = torch.ops.aten
_FUSED_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


class FlopCounter:
    """Counts the FLOPs of what runs while it is entered, forward, backward and recomputation alike.

    The formulas are torch's (``torch.utils.flop_counter``): matrix products and convolutions. Fused attention
    counts as the products that it stands for, two forward and four backward, so that the figure is the same
    on every device and on meta; what a fused kernel recomputes by itself is not counted. Elementwise work
    counts as zero.

    Attributes:
        flops: FLOPs so far.
    """

    def __init__(self) -> None:
        self.flops = 0
        self._observer: AbstractContextManager[object] = OpObserver(self._observe)

    def __enter__(self) -> FlopCounter:
        self._observer.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._observer.__exit__(*exc)

    def _observe(self, op: Any, args: Any, kwargs: Any, out: Any, began_s: float) -> None:
        self.flops += op_flops(op, args, kwargs, out)


def count_flops(fn: Callable[..., object], *args: object) -> float:
    """FLOPs of ``fn(*args)``; with everything on the meta device nothing is computed.

    Args:
        fn: a module, or any function (a training step with its backward).
        args: what it is called with.

    Returns:
        FLOPs, a multiply-add counting as 2.
    """
    with FlopCounter() as counter:
        fn(*args)
    return float(counter.flops)


def op_flops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one operation; zero where there is no formula.

    Args:
        op: operator packet, such as ``torch.ops.aten.mm``.
        args: its arguments.
        kwargs: its keyword arguments.
        out: its result.
    """
    formula = _FORMULAS.get(op)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention(query: Any, key: Any, value: Any, *rest: object, **named: object) -> int:
    """The scores of query [b, h, s, d] and key [b, h', t, d], and their product with value [b, h', t, e]."""
    batch, heads, queries, width = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: object, **named: object) -> int:
    return 2 * _attention(query, key, value)


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for kind in _FUSED_ATTENTION:
        name = f"_scaled_dot_product_{kind}"
        if hasattr(_aten, name):
            formulas[getattr(_aten, name)] = _attention
            formulas[getattr(_aten, f"{name}_backward")] = _attention_backward
    return formulas


_FORMULAS = _formulas()
