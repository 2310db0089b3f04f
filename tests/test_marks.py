"""Marks stand where the compute of units begins and ends, under FSDP2 too, and change no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_hetero.models.units import Unit, find_units
from lightning_hetero.profiler.marks import Phase, UnitMarks


class Log:
    """Writes marks as "F0(", ")F0", and, as a dispatch mode, matrix products and collectives between them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, unit_index: int, phase: Phase) -> None:
        self.lines.append(f"{phase[0].upper()}{unit_index}(")

    def end(self, unit_index: int, phase: Phase) -> None:
        self.lines.append(f"){phase[0].upper()}{unit_index}")

    @property
    def marks(self) -> str:
        return " ".join(line for line in self.lines if "(" in line or ")" in line)

    @property
    def all(self) -> str:
        return " ".join(self.lines)


class LogOps(TorchDispatchMode):
    products = ("mm", "addmm")
    # where FSDP2 gathers, reshards, gathers again, scatters
    regions: ClassVar = {
        "pre_forward": "pre",
        "post_forward": "post",
        "pre_backward": "pre",
        "post_backward_reduce": "reduce",
    }

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.products:
            self.log.lines.append("mm")
        if name == "_record_function_enter_new":
            region = args[0].removeprefix("FSDP::").split(" ")[0]
            self.log.lines += [self.regions[region]] if region in self.regions else []
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """stem, two blocks, head: units 0 to 3; ``call`` is how a block is called."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks, self.head = (
            nn.Linear(4, 8),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(8, 2),
        )
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


FORWARD = "F0( )F0 F1( )F1 F2( )F2 F3( )F3"
BACKWARD = "B3( )B3 B2( )B2 B1( )B1 B0( )B0"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(model: Net) -> Net:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def run(model: nn.Module, *, marked: bool = True, inputs: Tensor | None = None, steps: int = 1) -> Log:
    log = Log()
    marks = UnitMarks(find_units(model), [log])
    if marked:
        marks.attach()
    for _ in range(steps):
        x = torch.linspace(-1, 1, 12).reshape(3, 4) if inputs is None else inputs
        with LogOps(log):
            model(x).square().sum().backward()
    if marked:
        marks.detach()
    return log


def gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


def test_each_unit_is_marked_around_all_of_its_products() -> None:
    log = run(Net())
    assert log.all == (
        "F0( mm )F0 F1( mm mm )F1 F2( mm mm )F2 F3( mm )F3 "
        # the stem's input needs no gradient: one product instead of two
        "B3( mm mm )B3 B2( mm mm mm mm )B2 B1( mm mm mm mm )B1 B0( mm )B0"
    )


def test_every_step_is_marked_alike() -> None:
    assert run(Net(), steps=3).marks == " ".join([FORWARD, BACKWARD] * 3)


@pytest.mark.parametrize("prefetch", [False, True])
def test_fsdp_communicates_outside_the_marks(prefetch: bool, one_rank: None) -> None:
    model = wrapped(Net())
    if not prefetch:  # a list that holds a module already gathered turns the default prefetch off
        for module in (model, *model.blocks):
            module.set_modules_to_backward_prefetch([model])
    assert run(model).all == (
        "pre F0( mm )F0 pre F1( mm mm )F1 post pre F2( mm mm )F2 post F3( mm )F3 post "
        "pre B3( mm mm )B3 pre B2( mm mm mm mm )B2 reduce pre B1( mm mm mm mm )B1 reduce B0( mm )B0 reduce"
    )


def test_units_of_a_wrapped_model_are_those_of_the_model(one_rank: None) -> None:
    model = Net()
    names = [(unit.name, unit.is_block) for unit in find_units(model)]
    assert "FSDPBlock" in str(wrapped(model))
    assert [(unit.name, unit.is_block) for unit in find_units(model)] == names


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_gradients_are_bitwise_those_of_the_unmarked_model(with_fsdp: bool, one_rank: None) -> None:
    found = []
    for marked in (False, True):
        model = Net()
        if with_fsdp:
            model = wrapped(model)
        run(model, marked=marked, steps=2)
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_an_input_used_twice_keep_their_order_of_summation() -> None:
    """An identity node at the unit's input would sum ((a + b) + c) as (a + (b + c))."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.source, self.blocks = nn.Linear(4, 64), nn.ModuleList([Reader() for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            memory = self.source(x)
            for block in self.blocks:
                x = block(x, memory=memory)
            return x

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(64, 4), nn.Linear(64, 4)

        def forward(self, x: Tensor, *, memory: Tensor) -> Tensor:
            return x + torch.tanh(self.key(memory)) * self.value(memory)

    found = []
    for marked in (False, True):
        model = Memory()
        log = run(model, marked=marked)
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert log.marks.endswith("B5( )B5 B4( )B4 B3( )B3 B2( )B2 B1( )B1 B0( )B0")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_are_forward_marks_only(mode: Callable[[], Any]) -> None:
    model, log = Net().eval(), Log()
    with UnitMarks(find_units(model), [log]), mode():
        model(torch.ones(3, 4))
    assert log.marks == FORWARD


def test_a_unit_in_which_nothing_needs_a_gradient_has_no_backward() -> None:
    model = Net()
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    assert run(model).marks == f"{FORWARD} B3( )B3 B2( )B2"


def test_a_frozen_unit_between_trained_ones_has_a_backward() -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    assert run(model).all.endswith("B3( mm mm )B3 B2( mm mm )B2 B1( mm mm mm mm )B1 B0( mm )B0")


def test_an_input_that_needs_a_gradient_itself_ends_with_the_last_gradient() -> None:
    log = run(Net(), inputs=torch.ones(3, 4, requires_grad=True))
    assert log.all.endswith("B0( mm mm )B0")


@pytest.mark.parametrize("with_fsdp", [False, True])
def test_recomputation_is_part_of_the_backward(with_fsdp: bool, one_rank: None) -> None:
    model = Net(lambda block, x: checkpoint(block, x, use_reentrant=False))
    if with_fsdp:
        model = wrapped(model)
    log = run(model, steps=2)
    assert log.marks == " ".join([FORWARD, BACKWARD] * 2)
    # autograd stops the recomputed forward before its second product, of which nothing is kept
    assert [inside.count("mm") for inside in _inside(log.lines)] == [1, 2, 2, 1, 2, 5, 5, 1] * 2


def test_recomputation_with_reentry_is_marked_as_a_forward() -> None:
    log = run(Net(lambda block, x: checkpoint(block, x, use_reentrant=True)))
    assert log.marks == f"{FORWARD} B3( )B3 F2( )F2 B2( )B2 F1( )F1 B1( )B1 B0( )B0"


def test_a_unit_called_twice_is_marked_twice() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(2 * x)

    log = run(Twice(), steps=2)
    assert log.marks == " ".join([FORWARD, FORWARD, BACKWARD, BACKWARD] * 2)


def test_outputs_and_inputs_may_be_nested() -> None:
    @dataclass
    class Output:
        hidden: dict[str, Any]
        other: Tensor

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, *, state: Output) -> Output:
            hidden = self.norm(self.linear(state.hidden["x"][0]))
            # a tensor that is passed through untouched is no output of this unit
            return Output({"x": [hidden], "n": 3}, state.other)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Linear(4, 4), nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            state = Output({"x": [x], "n": 0}, x)
            for layer in self.layers:
                state = layer(state=state)
            return state.hidden["x"][0] + state.other

    assert run(Stack()).all == "F0( mm )F0 F1( mm )F1 F2( mm )F2 B2( mm mm )B2 B1( mm mm )B1 B0( mm )B0"


@pytest.mark.parametrize("view", [False, True])
def test_operations_in_place_on_inputs_and_outputs_work_as_without_marks(view: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            y = self.out(self.linear(x))
            return y.view(-1, 4, 2).flatten(1) if view else y

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.stem, self.layers = nn.Linear(4, 8), nn.ModuleList([InPlace(), InPlace()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x.view(x.shape) if view else x
            for layer in self.layers:
                x = layer(x)
                x += 1
            return x

    found = []
    for marked in (False, True):
        model = Chain()
        log = run(model, marked=marked)
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if not view:
        assert log.marks == "F0( )F0 F1( )F1 F2( )F2 B2( )B2 B1( )B1 B0( )B0"
    assert log.marks.count("(") == log.marks.count(")")


def test_a_forward_that_fails_is_ended() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("as told")

    model, log = nn.Sequential(nn.Linear(4, 4), Fails()), Log()
    with UnitMarks(find_units(model), [log]):
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="as told"):
                model(torch.ones(3, 4))
    assert log.marks == "F0( )F0 F1( )F1 F0( )F0 F1( )F1"


def test_graphs_outlive_the_marks_and_the_marks_do_not_keep_hooks_on_parameters() -> None:
    model, log = Net(), Log()
    marks = UnitMarks(find_units(model), [log])
    marks.attach()
    for _ in range(3):  # forwards whose backward never comes
        model(torch.ones(3, 4))
    loss = model(torch.ones(3, 4)).sum()
    marks.detach()
    loss.backward()
    assert log.marks == " ".join([FORWARD] * 4)
    del loss
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_second_backward_through_a_kept_graph_is_marked() -> None:
    model, log = Net(), Log()
    with UnitMarks(find_units(model), [log]):
        loss = model(torch.ones(3, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert log.marks == f"{FORWARD} {BACKWARD} {BACKWARD}"


def test_a_backward_without_an_end_is_ended_by_close() -> None:
    """The unit's only leaf is not one of its parameters, so nothing says that its backward is done."""

    class Borrows(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.borrowed = [weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.borrowed[0]

    owner = nn.Linear(4, 4)
    module, log = Borrows(owner.weight), Log()
    marks = UnitMarks([Unit("borrows", module, True)], [log])
    marks.attach()
    module(torch.ones(2, 4)).sum().backward()
    assert log.marks == "F0( )F0 B0("
    marks.close()
    assert log.marks == "F0( )F0 B0( )B0"
    marks.detach()


def test_listeners_nest() -> None:
    order: list[str] = []

    class Named(Log):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def begin(self, unit_index: int, phase: Phase) -> None:
            order.append(f"{self.name}(")

        def end(self, unit_index: int, phase: Phase) -> None:
            order.append(f"){self.name}")

    model = nn.Linear(2, 2)
    with UnitMarks(find_units(model), [Named("a"), Named("b")]), torch.no_grad():
        model(torch.ones(1, 2))
    assert order == ["a(", "b(", ")b", ")a"]


def test_attaching_twice_is_refused() -> None:
    with UnitMarks(find_units(Net()), []) as marks, pytest.raises(RuntimeError, match="attached already"):
        marks.attach()


def _inside(lines: list[str]) -> list[list[str]]:
    """What stands between each begin and its end; asserts that they alternate."""
    found: list[list[str]] = []
    opened = False
    for line in lines:
        if line.endswith("("):
            assert not opened, lines
            opened = True
            found.append([])
        elif line.startswith(")"):
            assert opened, lines
            opened = False
        elif opened:
            found[-1].append(line)
    return found
