"""A backward in two halves: gradients of a stage's inputs at once, those of its parameters when there is time.

The first half is torch's (:func:`~lightning_hetero.strategies.torch_adapter.first_half_of_backward`). The second is our
own: torch's counts a parameter that is used again in a stage too often (2.11 and 2.12) or fails there, and leaves out
what was computed from parameters alone, such as a bias that is handed on as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_hetero.strategies import torch_adapter


@dataclass
class Halves:
    """What is left of a backward after its first half.

    Args:
        weights: parameters that want gradients.
        branches: where the graph of inputs branches off to them.
        apart: roots that were computed from no input, all of whose backward is still to come.
        apart_gradients: of these.
    """

    weights: Sequence[Tensor]
    branches: list[dict[str, Any]]
    apart: list[Tensor]
    apart_gradients: list[Tensor | None]

    @classmethod
    def after_inputs(
        cls,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> Halves:
        """Run the first half: ``inputs`` that some root was computed from have their gradients then.

        Args:
            roots: with what the backward begins.
            gradients: of the roots; None for a loss.
            inputs: leaves that want a gradient.
            weights: parameters that want one.
        """
        nodes = {get_gradient_edge(leaf).node: leaf for leaf in inputs}
        needed: set[Any] = set()
        within: list[tuple[Tensor, Tensor]] = []
        halves = cls(weights, [], [], [])
        for root, gradient in zip(roots, gradients, strict=True):
            found = _reached(root, nodes)
            if found:
                within.append((root, torch.ones_like(root) if gradient is None else gradient))
                needed |= found
            else:
                halves.apart.append(root)
                halves.apart_gradients.append(gradient)
        if within:
            used = [leaf for node, leaf in nodes.items() if node in needed]
            halves.branches = torch_adapter.first_half_of_backward(
                [root for root, _ in within], [into for _, into in within], used, weights
            )
        return halves

    def finish(self) -> None:
        """Run the second half: gradients are added to those that the parameters have."""
        by_node = {get_gradient_edge(weight).node: weight for weight in self.weights}
        # from one of several nodes the way to a parameter may lead through what another branch needs still
        for branch in sorted(self.branches, key=lambda branch: -len(branch["intermediates"])):
            nodes, found = _gradients_of_branch(branch)
            for node, gradient in zip(nodes, found, strict=True):
                _add_gradient(by_node[node], gradient)
        self.branches.clear()
        if self.apart:
            torch.autograd.backward(self.apart, self.apart_gradients)
            self.apart.clear()


def _reached(root: Tensor, leaves: Collection[Any]) -> set[Any]:
    """Which of the leaves' nodes a root was computed from."""
    todo = [get_gradient_edge(root).node]
    seen = set(todo)
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return seen.intersection(leaves)


def _gradients_of_branch(branch: dict[str, Any]) -> tuple[list[Any], Sequence[Tensor]]:
    """Nodes of parameters, and their gradients. Empties the branch, whose nodes hold what it holds."""
    branching = list(branch["intermediates"])
    grads_in = branch.get("grads") or [None] * len(branching)  # none where nothing came
    came_in = [(node, grads) for node, grads in zip(branching, grads_in, strict=True) if grads]
    edges = [(GradientEdge(node, i), grad) for node, grads in came_in for i, grad in enumerate(grads)]
    edges = [(edge, grad) for edge, grad in edges if grad is not None]
    several = len(branching) > 1
    # what comes down from one of these nodes to another is in what that one got already
    hooks = [node.register_prehook(lambda _, own=grads: own) for node, grads in came_in if several]
    nodes = list(branch["params"])
    branch.clear()
    if not edges:
        return [], ()
    try:
        return nodes, torch.autograd.grad(
            [edge for edge, _ in edges],
            [GradientEdge(node, 0) for node in nodes],
            grad_outputs=[grad for _, grad in edges],
            retain_graph=several,
        )
    finally:
        for hook in hooks:
            hook.remove()


def _add_gradient(weight: Tensor, gradient: Tensor) -> None:
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient
