"""One stage of a pipeline on its rank: forward and backward of one micro-batch, between its received values and what it
hands on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.models.chain import ChainUnit, Values, run_unit
from lightning_hetero.strategies.pipe.halves import Halves
from lightning_hetero.strategies.pipe.randomness import Draws


@dataclass
class _Flight:
    """A micro-batch between its forward and the end of its backward."""

    leaves: Values  # what was received and wants a gradient
    handed_on: Values  # what other stages got, with its graph
    loss: Tensor | None = None
    halves: Any = None  # between the two halves of a backward


class Stage:
    """The units of one stage.

    Args:
        index: of the stage.
        units: with their indices in the chain.
        hands_on: names of the values that later stages read.
        parameters: of its units.
        recompute: whether units keep only their inputs and run their forward again in backward.
    """

    def __init__(
        self,
        index: int,
        units: Sequence[tuple[int, ChainUnit]],
        hands_on: Iterable[str],
        parameters: Iterable[nn.Parameter],
        recompute: bool,
    ) -> None:
        self.index = index
        self._units = tuple(units)
        self._hands_on = tuple(hands_on)
        self._parameters = tuple(parameters)
        self._recompute = recompute
        self._flights: dict[int, _Flight] = {}

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and the end of their backward."""
        return len(self._flights)

    def forward(self, micro_batch: int, received: Values, draws: Draws) -> Values:
        """Run the units.

        Args:
            micro_batch: index in the step.
            received: what earlier stages made, as leaves; on the first stage, what the user's step made.
            draws: random states.

        Returns:
            All values that are there at the end, with their graph.
        """
        # what the first stage gets was made by the user's step, and may have a graph of its own
        leaves: Values = {n: v for n, v in received.items() if self.index and v is not None and v.requires_grad}
        values = dict(received)
        for number, unit in self._units:
            values |= self._run(unit, number, values, draws)
        if torch.is_grad_enabled():
            handed_on = {name: values[name] for name in self._hands_on}
            self._flights[micro_batch] = _Flight(leaves, handed_on)
        return values

    def _run(self, unit: ChainUnit, number: int, values: Values, draws: Draws) -> Values:
        def seeded(reads: Values) -> Values:
            draws.begin_unit(number)
            return run_unit(unit, reads)

        reads = {name: values[name] for name in unit.reads}
        if not (self._recompute and torch.is_grad_enabled()):
            return seeded(reads)
        # the unit seeds itself, so nothing has to be kept of the random state
        again: Values = checkpoint(seeded, reads, use_reentrant=False, preserve_rng_state=False)
        return again

    def end_with(self, micro_batch: int, loss: Tensor) -> None:
        """Say what the last stage's backward begins with: the loss, weighted."""
        self._flights[micro_batch].loss = loss

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[Tensor]]) -> Values:
        """Run the backward; parameters' gradients add up.

        Args:
            micro_batch: index in the step.
            gradients: per value that was handed on, its gradients from the stages that read it, latest stage first.

        Returns:
            Gradients of the received values that want one.
        """
        flight = self._flights.pop(micro_batch)
        roots, into = _roots(flight, gradients)
        if roots:
            torch.autograd.backward(roots, into)
        return _gradients_of(flight.leaves)

    def backward_inputs(self, micro_batch: int, gradients: Mapping[str, Sequence[Tensor]]) -> Values:
        """The first half of a backward: gradients of the received values alone, to be sent on at once."""
        flight = self._flights[micro_batch]
        roots, into = _roots(flight, gradients)
        if not flight.leaves:
            flight.halves = roots, into  # the first stage has nobody to send to: all is its second half's
            return {}
        leaves = [leaf for leaf in flight.leaves.values() if leaf is not None]
        flight.halves = Halves.after_inputs(roots, into, leaves, self._trained())
        flight.handed_on, flight.loss = {}, None
        return _gradients_of(flight.leaves)

    def backward_weights(self, micro_batch: int) -> None:
        """The second half: gradients of parameters."""
        flight = self._flights.pop(micro_batch)
        if isinstance(flight.halves, Halves):
            flight.halves.finish()
            return
        roots, into = flight.halves
        if roots:
            torch.autograd.backward(roots, into)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._flights.clear()


def _roots(flight: _Flight, gradients: Mapping[str, Sequence[Tensor]]) -> tuple[list[Tensor], list[Tensor | None]]:
    """With what a backward begins: tensors and their gradients."""
    roots: list[Tensor] = []
    into: list[Tensor | None] = []
    for name, value in flight.handed_on.items():
        parts = gradients.get(name, ())
        if value is None or not value.requires_grad or not parts:
            continue
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        roots.append(value)
        into.append(total)
    if flight.loss is not None and flight.loss.requires_grad:
        roots.append(flight.loss)
        into.append(None)
    return roots, into


def _gradients_of(leaves: Values) -> Values:
    """The gradients of leaves, zero where none came."""
    found: Values = {}
    for name, leaf in leaves.items():
        if leaf is not None:
            found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
    return found
