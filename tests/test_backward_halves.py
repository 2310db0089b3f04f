"""A backward in two halves: what zero_bubble runs gives the gradients of one backward, however parameters are used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.strategies.pipe.halves import Halves


class Parts(nn.Module):
    """Layers for the stages below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))
        self.wide = nn.Linear(4, 8)


def one_after_the_other(parts: Parts, x: Tensor) -> list[Tensor]:
    return [parts.second(parts.first(x).tanh())]


def used_again(parts: Parts, x: Tensor) -> list[Tensor]:
    return [parts.first(parts.first(parts.first(x).tanh()).tanh())]


def a_bias_of_several(parts: Parts, x: Tensor) -> list[Tensor]:
    hidden = parts.first(x) + parts.bias
    return [parts.second(hidden.tanh()) * parts.bias + hidden]


def several_outputs_of_a_node(parts: Parts, x: Tensor) -> list[Tensor]:
    left, right = parts.wide(x).split(4, dim=1)
    first, second = torch.unbind(torch.stack([left * parts.bias, right.tanh()]))
    return [parts.first(first) * second, second + parts.bias]


def a_root_of_parameters_alone(parts: Parts, x: Tensor) -> list[Tensor]:
    return [parts.first(x), parts.second(x.detach())]


def nothing_of_what_came_in(parts: Parts, x: Tensor) -> list[Tensor]:
    return [parts.first(x.detach()), parts.bias.expand(3, 4) * 2]


def a_parameter_handed_on(parts: Parts, x: Tensor) -> list[Tensor]:
    return [parts.first(x) * parts.bias, parts.bias.expand(3, 4) * 2]


@pytest.mark.parametrize(
    "stage",
    [
        one_after_the_other,
        used_again,
        a_bias_of_several,
        several_outputs_of_a_node,
        a_root_of_parameters_alone,
        nothing_of_what_came_in,
        a_parameter_handed_on,
    ],
)
def test_halves_are_the_whole(stage: Callable[[Parts, Tensor], list[Tensor]]) -> None:
    torch.manual_seed(0)
    parts = Parts().double()
    given, into = torch.randn(3, 4).double(), [torch.randn(3, 4).double() for _ in range(2)]
    weights = list(parts.parameters())
    for times in (1, 2):  # gradients add up over micro-batches
        whole = given.clone().requires_grad_()
        roots = stage(parts, whole)
        parts.zero_grad()
        torch.autograd.backward(roots, into[: len(roots)])
        expected = [None if weight.grad is None else times * weight.grad for weight in weights]
        parts.zero_grad()
        for _ in range(times):
            half = given.clone().requires_grad_()
            halves = Halves.after_inputs(stage(parts, half), into[: len(roots)], [half], weights)
            torch.testing.assert_close(half.grad, whole.grad, rtol=1e-12, atol=1e-12)
            halves.finish()
        for weight, gradient in zip(weights, expected, strict=True):
            assert (weight.grad is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(weight.grad, gradient, rtol=1e-12, atol=1e-12)
