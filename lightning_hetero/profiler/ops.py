"""See every operation that a model runs, at the dispatcher: forward, backward, optimizer, collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# The documented way to write a dispatch mode; there is no public module for it (torch 2.11 to 2.14).
from torch.utils._python_dispatch import TorchDispatchMode

# The operator packet (``torch.ops.aten.mm``) or higher-order operator; its arguments and keyword arguments;
# its result; when it began, on the clock of ``time.perf_counter``.
Observe = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, float], None]


class OpObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that runs each operation and then calls ``observe(op, args, kwargs, out, began_s)``.

    Operations on a ``DTensor`` are seen as what they do to its local tensor. Composite operations, which
    ``torch.inference_mode`` leaves whole, are seen as their parts. Autograd runs a backward with the modes
    that are active at the call of ``backward()``.

    Args:
        observe: called after each operation; what it raises comes out of the operation.
    """

    def __init__(self, observe: Observe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observe = observe

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch's guard against compiling around each call, the documented way: it costs as much as an op."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            # DTensor's own dispatch comes next, and its local operations come back here.
            return NotImplemented
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        began_s = time.perf_counter()
        out = func(*args, **kwargs)
        self.observe(getattr(func, "overloadpacket", func), args, kwargs, out, began_s)
        return out
