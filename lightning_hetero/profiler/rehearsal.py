"""Run one unit by itself on random inputs of the right shape: its seconds, and the bytes that it keeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hetero.costs import TimingPoint
from lightning_hetero.profiler.calls import TensorShape, UnitCall
from lightning_hetero.profiler.memory import tensors_in

Computing = Callable[[], AbstractContextManager[Any]]

_WARM_UP = 2
_ENOUGH = 3  # repeats after which a long measurement may end
_BUDGET_S = 5.0


class Rehearsal:
    """One unit, ready to run.

    The random state of the caller is left as it was.

    Args:
        module: the unit, on ``device``, its floating-point values in one dtype.
        call: with what it is called.
        device: where it runs.
        generator: of the random inputs, on ``device``; on meta there is none.
        around: makes a context around each timed forward and backward, given the samples.
        now: the clock by which they are timed, where it is another than the device's: that of an emulated one.
        computing: makes a context around each timed forward, such as autocast's.
    """

    def __init__(
        self,
        module: nn.Module,
        call: UnitCall,
        device: torch.device,
        generator: torch.Generator | None = None,
        around: Callable[[int], AbstractContextManager[object]] = nullcontext,
        now: Callable[[], float] | None = None,
        computing: Computing = nullcontext,
    ) -> None:
        self._around, self._now, self._computing = around, now, computing
        self.module = module
        self.call = call
        self.device = device
        self._generator = generator
        tables = [inner.num_embeddings for inner in module.modules() if isinstance(inner, nn.Embedding)]
        self._index_limit = min(tables, default=1)

    def time(self, samples: int, repeats: int) -> TimingPoint:
        """Median seconds of a forward and of a backward with so many samples, after a warm-up.

        Args:
            samples: of the micro-batch.
            repeats: timed ones; fewer, but at least three of them, where they take more than some seconds.
        """
        forward_s: list[float] = []
        backward_s: list[float] = []
        with self._random_state_kept():
            args, kwargs = self.call.arguments(lambda shape: self._random(shape, samples))
            began_s = time.perf_counter()
            for repeat in range(_WARM_UP + repeats):
                with self._around(samples):
                    forward, backward = self._once(args, kwargs)
                if repeat >= _WARM_UP:
                    forward_s.append(forward)
                    backward_s.append(backward)
                if len(forward_s) >= _ENOUGH and time.perf_counter() - began_s > _BUDGET_S:
                    break
        return TimingPoint(samples, statistics.median(forward_s), statistics.median(backward_s))

    def kept_bytes(self, samples: int) -> int:
        """Bytes that a forward with so many samples keeps for its backward.

        Each storage counts once, the unit's own parameters and buffers do not, its inputs do.
        """
        own = [tensor.untyped_storage() for tensor in (*self.module.parameters(), *self.module.buffers())]
        not_counted = {id(storage) for storage in own}
        # A storage has one Python object for as long as it lives, and here all live to the end.
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in not_counted:
                kept[id(storage)] = storage
            return tensor

        with self._random_state_kept():
            args, kwargs = self.call.arguments(lambda shape: self._random(shape, samples))
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                self.module(*args, **kwargs)
        return sum(storage.nbytes() for storage in kept.values())

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        for parameter in self.module.parameters():
            parameter.grad = None
        # Copies, since a unit may change its input in place, which a leaf does not allow.
        args, kwargs = _copied(args), _copied(kwargs)
        clock = _Clock(self.device, self._now)
        clock.mark()
        with self._computing():
            output = self.module(*args, **kwargs)
        clock.mark()
        wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        gradients = [torch.randn_like(tensor) for tensor in wanted]
        clock.mark()
        if wanted:
            torch.autograd.backward(wanted, gradients)
        clock.mark()
        forward_s, _, backward_s = clock.between_s()
        return forward_s, backward_s if wanted else 0.0

    def _random(self, shape: TensorShape, samples: int) -> Tensor:
        size = shape.of(samples)
        if shape.dtype is torch.bool:
            return torch.ones(size, dtype=torch.bool, device=self.device)
        if not shape.dtype.is_floating_point:
            # Of a table as small as any that is looked up here.
            return torch.randint(
                self._index_limit, size, dtype=shape.dtype, device=self.device, generator=self._generator
            )
        values = torch.randn(size, dtype=shape.dtype, device=self.device, generator=self._generator)
        return values.requires_grad_(shape.requires_grad)

    def _random_state_kept(self) -> Any:
        devices = [self.device] if self.device.type == "cuda" else []
        return torch.random.fork_rng(devices)


class _Clock:
    """Points in time on a device: events on CUDA, the host's clock on CPU, or another clock that is given."""

    def __init__(self, device: torch.device, now: Callable[[], float] | None) -> None:
        self._cuda = device.type == "cuda" and now is None
        self._device, self._now = device, now or time.perf_counter
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(self._now())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def between_s(self) -> list[float]:
        """Seconds from each mark to the next."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._cuda:
            return [later - earlier for earlier, later in pairs]
        self._marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.requires_grad else value
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _rebuilt(value, [_copied(item) for item in value])
    return value


def _rebuilt(sequence: Any, items: list[Any]) -> Any:
    make: Callable[..., Any] = type(sequence)
    return make(*items) if hasattr(sequence, "_fields") else make(items)
