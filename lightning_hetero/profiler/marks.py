"""Marks: tell listeners when each unit's forward and backward begins and ends.

Where a mark stands, with FSDP2 (``fully_shard``, applied before :meth:`UnitMarks.attach`)::

    forward    all-gather | BEGIN unit's forward END | reshard
    backward   all-gather | BEGIN unit's backward END | reshard, reduce-scatter

No node is added to the autograd graph, so gradients are bitwise those of the unmarked model. Forward marks
are module hooks. The backward of a unit begins when the node that made its output runs, and ends at the first
of:

- a node that made one of its inputs runs: autograd runs ready nodes in the reverse of their making, so all
  that the unit had to do is done;
- the output of another unit gets its gradient (FSDP2's gather is a hook on that tensor, put there after
  ours);
- for a unit whose inputs come from no node, such as a model's first: the last of its parameters' gradients is there.

Every begin has one end, and marks do not nest:

- A unit called several times is marked each time.
- A backward whose end is never seen (its input was modified in place through a view, say) ends when the next
  one begins, or with :meth:`UnitMarks.close`.
- Activation checkpointing without reentry runs forwards inside a unit's backward: they are part of that
  backward, and not marked. With reentry they run between backwards: they are marked, as forwards.
- Without gradients there are forward marks only; a unit in which nothing needs a gradient has no backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lightning_hetero.models.units import Unit

Phase = Literal["forward", "backward"]


class UnitListener(Protocol):
    """Is told of each unit's begin and end, on the thread that runs the unit."""

    def begin(self, unit_index: int, phase: Phase) -> None:
        """The unit's own compute is about to start; its parameters are gathered."""

    def end(self, unit_index: int, phase: Phase) -> None:
        """The unit's own compute is done; nothing of what follows it has run."""


class UnitMarks:
    """Calls listeners around each unit's forward and backward.

    For one pass at a time: one thread runs the forwards, and no forward runs beside a backward (a backward
    may run on autograd's device thread).

    Args:
        units: what to mark; ``unit_index`` is the index in this sequence.
        listeners: called in this order at a begin, in reverse at an end.
        halves: whether backwards run in two halves, by ``autograd.grad``, which torch's hooks on several gradients do
            not bear: the gradients are counted then, and one that never comes is waited for in vain.
    """

    def __init__(self, units: Sequence[Unit], listeners: Sequence[UnitListener], halves: bool = False) -> None:
        self.units = tuple(units)
        self._halves = halves
        self.listeners = tuple(listeners)
        self._handles: list[RemovableHandle] = []
        self._forward: _Call | None = None
        self._inner_forwards = 0
        self._backward: _Call | None = None

    def attach(self) -> None:
        """Put the hooks on the modules. After any wrapping: hooks of wrappers must be there first.

        Raises:
            RuntimeError: when attached already.
        """
        if self._handles:
            raise RuntimeError("UnitMarks are attached already: detach them first")
        for index, unit in enumerate(self.units):
            before, after = self._forward_hooks(index)
            # last before the forward, so after the gather; first after it, so before the reshard
            self._handles += [
                unit.module.register_forward_pre_hook(before, with_kwargs=True),
                # called after an exception too, so that a forward that failed does not stay open
                unit.module.register_forward_hook(after, prepend=True, always_call=True),
            ]

    def detach(self) -> None:
        """Take the hooks off and end what is open. Graphs made before stay usable, without marks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.close()

    def listen(self, listener: UnitListener) -> None:
        """Call one more listener, first at a begin and last at an end."""
        self.listeners = (listener, *self.listeners)

    def unlisten(self, listener: UnitListener) -> None:
        """Call it no longer."""
        self.listeners = tuple(each for each in self.listeners if each is not listener)

    def close(self) -> None:
        """End what is open; call it at the end of a step."""
        if self._backward is not None:
            self._end_backward(self._backward)
        if self._forward is not None:
            self._end_forward()

    def __enter__(self) -> UnitMarks:
        self.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def _forward_hooks(self, index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._backward is not None:  # recomputation, part of that backward
                return
            if self._forward is not None:  # a unit that calls itself, or another one
                self._inner_forwards += 1
                return
            self._forward = call = _Call(index)
            # putting up marks takes time of the unit's, which an emulated device does not take
            self._notify_begin(index, "forward")
            if torch.is_grad_enabled():
                self._mark_inputs(call, _grad_tensors((args, kwargs)))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self._forward
            if self._backward is not None or call is None:
                return
            if self._inner_forwards:
                self._inner_forwards -= 1
                return
            if torch.is_grad_enabled():
                self._mark_outputs(call, module, output)
            self._end_forward()

        return before, after

    def _mark_inputs(self, call: _Call, inputs: Sequence[Tensor]) -> None:
        """End the call's backward at the first node that made an input.

        Autograd runs ready nodes in the reverse of their making, so when a node older than the unit runs, all
        that the unit had to do is done.
        """

        def end(grads: object) -> None:
            self._end_backward(call)

        for tensor in inputs:
            node = tensor.grad_fn
            if node is None:
                call.leaf_inputs.append(tensor)
            elif node not in call.input_nodes:
                call.input_nodes.append(node)
                node.register_prehook(end)

    def _mark_outputs(self, call: _Call, module: nn.Module, output: Any) -> None:
        """Begin the call's backward at the first node that made an output."""

        def end_other(grad: Tensor) -> None:
            if self._backward is not None and self._backward is not call:
                self._end_backward(self._backward)

        def begin(grads: object) -> None:
            self._begin_backward(call)

        # An input that is passed through is made by another unit.
        nodes = [(tensor, tensor.grad_fn) for tensor in _grad_tensors(output)]
        made = [(tensor, node) for tensor, node in nodes if node is not None and node not in call.input_nodes]
        for tensor, node in made:
            # Hooks on the tensor run before hooks on its node: ours, FSDP2's gather (put there next), the
            # begin.
            tensor.register_hook(end_other)  # type: ignore[no-untyped-call]
            node.register_prehook(begin)
        if made and not call.input_nodes:
            self._mark_leaves(call, [*call.leaf_inputs, *(p for p in module.parameters() if p.requires_grad)])
        # The graph keeps the call: the call must not keep the graph.
        call.input_nodes, call.leaf_inputs = [], []

    def _mark_leaves(self, call: _Call, leaves: Sequence[Tensor]) -> None:
        """End the call's backward with the last gradient of ``leaves``."""
        if not leaves:
            return
        reference = weakref.ref(call)

        def end(grads: object) -> None:
            call = reference()
            if call is not None:
                self._end_backward(call)

        if self._halves:
            self._count_leaves(call, leaves)
            return
        # Leaves outlive the graph. Their hooks go with the call, which only the graph's hooks keep.
        weakref.finalize(call, register_multi_grad_hook(leaves, end).remove).atexit = False

    def _count_leaves(self, call: _Call, leaves: Sequence[Tensor]) -> None:
        """The same by counting, of the gradients that come while the call's backward is open."""
        reference = weakref.ref(call)

        def count(grad: Tensor) -> None:
            call = reference()
            if call is None or call is not self._backward:
                return  # of another call, whose graph has the same leaf
            call.gradients += 1
            if call.gradients == len(leaves):
                self._end_backward(call)

        for leaf in leaves:
            handle = leaf.register_hook(count)  # type: ignore[no-untyped-call]
            weakref.finalize(call, handle.remove).atexit = False

    def _begin_backward(self, call: _Call) -> None:
        if not self._handles or self._forward is not None or call is self._backward:
            return
        if self._backward is not None:
            self._end_backward(self._backward)
        self._backward = call
        call.gradients = 0
        self._notify_begin(call.unit_index, "backward")

    def _end_backward(self, call: _Call) -> None:
        if call is self._backward:
            self._backward = None
            self._notify_end(call.unit_index, "backward")

    def _end_forward(self) -> None:
        call, self._forward, self._inner_forwards = self._forward, None, 0
        if call is not None:
            self._notify_end(call.unit_index, "forward")

    def _notify_begin(self, unit_index: int, phase: Phase) -> None:
        for listener in self.listeners:
            listener.begin(unit_index, phase)

    def _notify_end(self, unit_index: int, phase: Phase) -> None:
        for listener in reversed(self.listeners):
            listener.end(unit_index, phase)


class _Call:
    """One forward of a unit, and the backward that belongs to it."""

    def __init__(self, unit_index: int) -> None:
        self.unit_index = unit_index
        self.input_nodes: list[Node] = []
        self.leaf_inputs: list[Tensor] = []
        self.gradients = 0


def _grad_tensors(value: Any) -> list[Tensor]:
    """Tensors that require a gradient, in nested tuples, lists, dictionaries and dataclasses."""
    found: list[Tensor] = []
    _add_grad_tensors(value, found)
    return found


def _add_grad_tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _add_grad_tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _add_grad_tensors(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _add_grad_tensors(getattr(value, field.name), found)
