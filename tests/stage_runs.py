"""A model's chain run whole and in stages: every stage holds only its own tensors, and goes backward by hand."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.models.chain import ChainUnit, UnitChain, owned_tensors, run_unit
from lightning_hetero.models.chains import find_chain

Gradients = dict[str, Tensor]


def assert_exact(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Its chain gives the model's own outputs and gradients, to the bit: whole, cut in half and cut everywhere."""
    expected = run_whole(model, lambda whole: whole, args, kwargs)
    assert_same(run_whole(model, lambda whole: find_chain(whole).run, args, kwargs), expected)
    count = len(find_chain(model).units)
    for borders in ([count // 2], range(1, count)):
        assert_same(run_in_stages(model, borders, args, kwargs), expected)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the bit, of the same types, with the same names."""
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), (actual - expected).abs().max()
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for name in expected:
            assert_same(actual[name], expected[name])
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def run_whole(
    model: nn.Module, forward_of: Callable[[nn.Module], Callable[..., Any]], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Gradients]:
    """What one device computes: the output, and the gradients of a loss over all of it."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    output = forward_of(model)(*args, **kwargs)
    loss_of(output).backward()
    return detached(output), gradients_of([model])


def run_in_stages(
    model: nn.Module, borders: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Gradients]:
    """The same, by stages that start at unit 0 and at ``borders``."""
    count = len(find_chain(model).units)
    stages = [Stage.of(model, start, end) for start, end in itertools.pairwise([0, *borders, count])]
    torch.manual_seed(1)
    values, writer = stages[0].chain.begin(*args, **kwargs), {}
    assert values.keys() == set(stages[0].chain.inputs)
    for index, stage in enumerate(stages):
        stage.forward(values, writer)
        values |= stage.written
        writer |= dict.fromkeys(stage.written, index)
    output = stages[-1].output()
    gradients: list[Gradients] = [{} for _ in stages]
    for index in reversed(range(len(stages))):
        stages[index].backward(gradients[index], loss_of(output) if index == len(stages) - 1 else None)
        for name, source, gradient in stages[index].gradients_to_send():
            there = gradients[source]
            there[name] = there[name] + gradient if name in there else gradient
    return detached(output), gradients_of([stage.model for stage in stages])


@dataclasses.dataclass
class Stage:
    """Some units of a copy of the model, in which all that they do not own is on meta."""

    model: nn.Module
    chain: UnitChain
    units: tuple[ChainUnit, ...]
    is_last: bool
    received: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    written: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, start: int, end: int) -> Stage:
        copied = copy.deepcopy(model)
        chain = find_chain(copied)
        units = chain.units[start:end]
        own = {id(tensor) for unit in units for tensor in owned_tensors(copied, unit).values()}
        for module in copied.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in own:
                    setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if id(buffer) not in own:
                    setattr(module, name, buffer.to("meta"))
        return cls(copied, chain, units, is_last=end == len(chain.units))

    def reads(self) -> list[str]:
        written: set[str] = set()
        names = []
        for unit in self.units:
            names += [name for name in unit.reads if name not in written]
            written |= set(unit.writes)
        if self.is_last:
            names += [name for name in self.chain.outputs if name not in written]
        return list(dict.fromkeys(names))

    def forward(self, values: Mapping[str, Tensor | None], writer: Mapping[str, int]) -> None:
        self.received = {name: across_border(values[name]) for name in self.reads()}
        self.sources = {name: writer[name] for name in self.received if name in writer}
        values = dict(self.received)
        for unit in self.units:
            written = run_unit(unit, values)
            values |= written
            self.written |= written

    def output(self) -> Any:
        values = self.received | self.written
        return self.chain.end({name: values[name] for name in self.chain.outputs})

    def backward(self, gradients: Gradients, loss: Tensor | None) -> None:
        if loss is not None:
            loss.backward()
            return
        reached = [name for name in gradients if self.written[name].requires_grad]
        assert reached == list(gradients)
        torch.autograd.backward([self.written[name] for name in reached], [gradients[name] for name in reached])

    def gradients_to_send(self) -> Iterator[tuple[str, int, Tensor]]:
        for name, source in self.sources.items():
            value = self.received[name]
            if value is not None and value.grad is not None:
                yield name, source, value.grad


def across_border(value: Tensor | None) -> Tensor | None:
    """As it comes out of a transfer: contiguous, without history, with a gradient of its own."""
    if value is None:
        return None
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def loss_of(output: Any) -> Tensor:
    """A loss with a gradient for every floating-point tensor in the output."""
    return torch.stack([tensor.square().mean() for tensor in tensors_in(output)]).sum()


def tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output
    return [tensor for part in parts for tensor in tensors_in(part)]


def detached(output: Any) -> Any:
    """``output``, of the same types, without history."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return type(output)(**{name: detached(part) for name, part in output.items()})
    return type(output)(detached(part) for part in output)


def gradients_of(models: Sequence[nn.Module]) -> Gradients:
    """Every parameter's gradient, summed over the models that computed one."""
    found: Gradients = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return dict(sorted(found.items()))
