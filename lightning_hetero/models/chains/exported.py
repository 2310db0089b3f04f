"""Units of a model that no adapter knows, best effort, out of the graph that ``torch.export`` makes of its forward.

The model is exported in training mode, and in evaluation mode once that is needed: its forward then is a list of calls
of operators. It is cut between two calls where, of all that was computed before and is used later, one tensor is left:

- It depends on the inputs, is of floating point, has the samples as its first dimension, and no later call changes it
  in place. It travels as the value ``hidden``.
- What depends on no parameter, on no random number and on nothing changed in place (masks, index tables) does not
  count: every unit that uses it computes it from the inputs, which travel as values of their own.
- No buffer that is changed (running statistics) is used on both sides.

Between two such places lies a run of calls. One without parameters joins the run before it, or the first one after it
at the start of the model. So a model with long skip connections has one large unit where they are. The places of the
evaluation's graph are those that have used the same parameters as often.

The graph is fixed to the example: its samples, shapes, dtypes, modes of modules, and arguments that are no tensors.
Smaller micro-batches are filled up with copies of their last sample, which outputs are cut down by; all else that
differs is refused. Parameters and buffers are looked up by name in the model whenever a unit runs. Activation
checkpoints and hooks inside of the model are not kept: export looks through them.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError, raise_all
from lightning_hetero.models.chain import ChainUnit, UnitChain, Values
from lightning_hetero.models.chains.exported_graph import INPUT, OUTPUT, Graph, Names, Run
from lightning_hetero.models.chains.recognition import PROTOCOL

SAMPLES = "samples"
"""name of the value that is the number of samples of a micro-batch"""


def exported_chain(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> UnitChain:
    """The units of a model, from its exported graph.

    Args:
        model: any; its parameters may be on any device, meta included. Its mode is left as it is.
        args: of its forward, as an example: those of a whole micro-batch.
        kwargs: of its forward, too.

    Returns:
        The chain, bound to this model.

    Raises:
        UnsupportedError: if the model cannot be exported, or cannot be cut anywhere; with the reason.
    """
    return ExportedUnits(model, args, kwargs).chain_of(model)


class ExportedUnits:
    """Graphs of a model, cut into units, for the model itself and for copies of it.

    Args:
        model: as for :func:`exported_chain`.
        args: of its forward.
        kwargs: of its forward.

    Raises:
        UnsupportedError: as :func:`exported_chain`.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._class = type(model).__name__
        self._signature = inspect.signature(model.forward)
        example = self._taken_apart(args, kwargs)
        self._build = _apart(dict(self._signature.bind(*args, **kwargs).arguments)).build
        self._others = example.others
        self._shapes = {name: (tuple(each.shape), each.dtype) for name, each in example.tensors.items()}
        self._samples = next((shape[0] for shape, _ in self._shapes.values() if shape), 0)
        try:
            with torch.inference_mode(False):
                self._copies = {mode: _without_values(model, mode) for mode in (True, False)}
        except Exception as error:
            raise self._refused(error) from error
        self._modes = {mode: _modes(copied) for mode, copied in self._copies.items()}
        self._names = Names.of(model, "model.")
        self._borders: list[int] = []  # in the training's graph
        self._training = self._exported(True)
        memory = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())} - {0}
        held = [what for _, what in self._training.graph.leaves.values() if isinstance(what, Tensor)]
        if not memory.isdisjoint(map(_address, held)):
            raise self._refused("its forward holds the parameters of one object, and copies of the model use them too")
        self._evaluation: _Mode | None = None
        self._tensors = self._owned()

    def chain_of(self, model: nn.Module) -> UnitChain:
        """The chain of the model or of a copy of it, whose tensors are looked up in that one."""
        names: list[str] = []
        for run in self._training.runs:
            name = _unit_name([each for each in run.tensors if each in self._names.parameters])
            numbered = itertools.chain([name], (f"{name}({i})" for i in itertools.count(2)))
            names.append(next(each for each in numbered if each not in names))
        units = [
            ChainUnit(name, (), partial(self._run, model, index), run.reads, run.writes, owned)
            for index, (name, run, owned) in enumerate(zip(names, self._training.runs, self._tensors, strict=True))
        ]
        inputs = (*(f"{INPUT}{name}" for name in self._shapes), SAMPLES)
        begin, end = partial(self._begin, model), partial(self._end, model)
        return UnitChain(tuple(units), begin, end, inputs, (*units[-1].writes, SAMPLES))

    def _begin(self, model: nn.Module, *args: Any, **kwargs: Any) -> Values:
        given = self._taken_apart(args, kwargs)
        samples = next((len(each) for each in given.tensors.values() if each.ndim), 0)
        modes = self._modes[model.training]
        problems = [
            f"{name or 'the model'} is in {'training' if mode else 'evaluation'} mode, and was not when exported"
            for name, mode in _modes(model).items()
            if mode != modes.get(name, mode)
        ]
        problems += self._differences(given, samples)
        if samples != self._samples:
            problems += self._reasons_not_to_fill(samples, self._mode(model.training).graph)
        raise_all(UnsupportedError, f"{self._class} was called with what its exported graph cannot do", problems)
        values: Values = {
            f"{INPUT}{name}": _filled(given.tensors[name], self._shapes[name][0]) for name in self._shapes
        }
        device = next((each.device for each in given.tensors.values()), None)
        return values | {SAMPLES: torch.tensor([samples], device=device)}

    def _differences(self, given: _Apart, samples: int) -> Iterator[str]:
        """What of arguments differs from the example's, besides the number of samples."""
        for name in {**self._shapes, **self._others, **given.tensors, **given.others}:
            tensor, example = given.tensors.get(name), self._shapes.get(name)
            if tensor is None and example is None:
                now, was = given.others.get(name), self._others.get(name)
                if not _equal(now, was):
                    yield f"{name} is {now!r} and was {was!r} in the example, which the graph is fixed to"
            elif tensor is None or example is None:
                now, was = (
                    (given.others.get(name), "a tensor") if tensor is None else ("a tensor", self._others.get(name))
                )
                yield f"{name} is {now} and was {was} in the example, which the graph is fixed to"
            else:
                shape, dtype = example
                sizes = {shape[:1], (samples,)} if shape[:1] == (self._samples,) else {shape[:1]}
                same = tuple(tensor.shape[:1]) in sizes and tensor.shape[1:] == shape[1:] and tensor.dtype == dtype
                if not same:
                    yield f"{name} is {list(tensor.shape)} of {tensor.dtype} and was {list(shape)} of {dtype}"

    def _reasons_not_to_fill(self, samples: int, graph: Graph) -> Iterator[str]:
        if not 0 < samples < self._samples:
            yield f"it has {samples} samples and the example had {self._samples}: give 1 to {self._samples}"
            return
        fill = f"{samples} samples would be filled up to the example's {self._samples}, which"
        for layer in dict.fromkeys(graph.batch_layers()):
            yield f"{fill} changes the statistics of {layer}: use micro-batches of equal size"
        for shape in graph.outputs_without_samples():
            yield f"{fill} changes an output of shape {list(shape)}, which is not per sample"

    def _end(self, model: nn.Module, values: Values) -> Any:
        mode, samples = self._mode(model.training), values[SAMPLES]
        count = self._samples if samples is None or samples.is_meta else int(samples)
        found: dict[str, Any] = {}
        for index, name in enumerate(mode.outputs):
            tensor = values[f"{OUTPUT}{index}"]
            assert tensor is not None
            found[name] = tensor if count == self._samples else tensor[:count]
        return mode.build(found)

    def _run(self, model: nn.Module, index: int, values: Values) -> Values:
        absent: Values = dict.fromkeys(self._training.runs[index].writes)
        return absent | self._mode(model.training).runs[index](model, values)

    def _mode(self, training: bool) -> _Mode:
        """What was exported in a mode, which is done when it is first needed."""
        if training:
            return self._training
        if self._evaluation is None:
            self._evaluation = self._exported(False)
        return self._evaluation

    def _exported(self, training: bool) -> _Mode:
        output: dict[str, Any] = {}
        whole = _Whole(self._copies[training], partial(self._flat_forward, output))
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.inference_mode(False):
                warnings.simplefilter("ignore")
                example = tuple(torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in self._shapes.values())
                with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                    program = torch.export.export(whole, example, strict=False)
            if any(isinstance(each, Tensor) and each.requires_grad for each in program.constants.values()):
                raise UnsupportedError(
                    "its forward uses parameters that are not its own, or those of another copy of it"
                )
            graph = Graph(program, self._names, list(self._shapes), self._samples)
            borders = graph.own_borders() if training else graph.borders_like(self._training.graph, self._borders)
            runs = graph.cut(borders)
            if training:
                self._borders = borders
            else:
                self._check_alike(runs)
        except Exception as error:
            raise self._refused(error) from error
        if len(runs) < 2:
            raise self._refused("nowhere between two of its parameters is a single tensor left")
        del self._copies[training]
        return _Mode(graph, runs, **output)

    def _check_alike(self, runs: Sequence[Run]) -> None:
        """Check that runs in evaluation mode need no more than the units have by those in training mode."""
        first = self._names.first
        for run, other, owned in zip(runs, self._training.runs, self._tensors, strict=True):
            more = [name for name in run.tensors if first[name] not in {first[each] for each in owned}]
            more += [name for name in (*run.reads, *run.writes) if name not in {*other.reads, *other.writes}]
            if more:
                raise UnsupportedError(f"in evaluation mode a unit uses {', '.join(more)}, and not in training mode")

    def _owned(self) -> list[tuple[str, ...]]:
        """Names of the tensors of every unit; what no unit uses is the last one's."""
        first, owned = self._names.first, [run.tensors for run in self._training.runs]
        used = {first[name] for names in owned for name in names}
        owned[-1] += tuple(name for name in first if name == first[name] and name not in used)
        return owned

    def _flat_forward(self, output: dict[str, Any], model: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The model's forward from tensors to tensors; tells ``output`` how they become what it returns."""
        args, kwargs = self._by_name(self._build(dict(zip(self._shapes, tensors, strict=True))))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        parts = _apart(model(*args, **kwargs), "output")
        _write_back(model, buffers)
        if not parts.tensors:
            raise UnsupportedError("its forward returns no tensor")
        output.update(outputs=list(parts.tensors), build=parts.build)
        return tuple(parts.tensors.values())

    def _by_name(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments to call a forward with: by keyword if they can be, since decorators may count the others."""
        kinds = {name: self._signature.parameters[name].kind for name in arguments}
        many = any(kind == Parameter.VAR_POSITIONAL and arguments[name] for name, kind in kinds.items())
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, kind in kinds.items():
            if kind == Parameter.VAR_POSITIONAL:
                args += arguments[name]
            elif kind == Parameter.VAR_KEYWORD:
                kwargs |= arguments[name]
            elif kind == Parameter.POSITIONAL_ONLY or (many and kind == Parameter.POSITIONAL_OR_KEYWORD):
                args.append(arguments[name])
            else:
                kwargs[name] = arguments[name]
        return args, kwargs

    def _taken_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Apart:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _apart(dict(bound.arguments))

    def _refused(self, reason: Exception | str) -> UnsupportedError:
        line = next((line.strip() for line in str(reason).splitlines() if line.strip()), type(reason).__name__)
        return UnsupportedError(f"{self._class} could not be split by torch.export: {line}. Instead, {PROTOCOL}")


@dataclass(frozen=True)
class _Mode:
    """What was exported in one mode, and how its outputs become what the forward returns."""

    graph: Graph
    runs: list[Run]
    outputs: list[str]
    build: Callable[[Mapping[str, Any]], Any]


class _Whole(nn.Module):
    """What is exported: the model, from tensors to tensors."""

    def __init__(self, model: nn.Module, forward: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._forward(self.model, *tensors)


@dataclass(frozen=True)
class _Apart:
    """The leaves of nested containers by their paths, and how to put them together again."""

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    build: Callable[[Mapping[str, Any]], Any]


def _apart(tree: Any, path: str = "") -> _Apart:
    if isinstance(tree, Tensor):
        return _Apart({path: tree}, {}, operator.itemgetter(path))
    if isinstance(tree, Mapping):
        children = dict(tree)
    elif isinstance(tree, list | tuple):
        children = dict(enumerate(tree))
    elif is_dataclass(tree) and not isinstance(tree, type):
        children = {field.name: getattr(tree, field.name) for field in fields(tree)}
    else:
        return _Apart({}, {path: tree}, lambda _, other=tree: other)  # type: ignore[misc]
    parts = {key: _apart(child, f"{path}.{key}" if path else str(key)) for key, child in children.items()}
    tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
    others = {name: other for part in parts.values() for name, other in part.others.items()}
    return _Apart(tensors, others, partial(_together, type(tree), {key: part.build for key, part in parts.items()}))


def _together(kind: type, builds: Mapping[Any, Callable[[Mapping[str, Any]], Any]], found: Mapping[str, Any]) -> Any:
    parts = {key: build(found) for key, build in builds.items()}
    if issubclass(kind, list | tuple):
        return kind(*parts.values()) if hasattr(kind, "_fields") else kind(parts.values())
    return kind(parts) if kind in (dict, OrderedDict) else kind(**parts)


def _without_values(model: nn.Module, training: bool) -> nn.Module:
    """A copy in a mode, on the CPU: memory that is never touched takes none."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    for module in model.modules():
        plain = [each for each in vars(module).values() if isinstance(each, Tensor)]
        memo |= {id(each): each.detach().cpu() for each in plain if id(each) not in memo}
    copied = copy.deepcopy(model, memo)
    return copied if copied.training == training else copied.train(training)


def _write_back(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Write what the forward assigned to buffers into the ones that were there: export would lose it in submodules.

    Raises:
        UnsupportedError: if a buffer is new, or has another shape than before.
    """
    for name, value in list(model.named_buffers(remove_duplicate=False)):
        holder, _, own = name.rpartition(".")
        before = buffers.get(name)
        if before is None or before.shape != value.shape:
            raise UnsupportedError(f"its forward gives the buffer {name} another shape, or makes it")
        if value is not before:
            before.copy_(value.detach() if value.requires_grad else value)
            setattr(model.get_submodule(holder), own, before)


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _filled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor with its last sample repeated up to a shape."""
    if tuple(tensor.shape) == shape:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(shape[0] - len(tensor), *shape[1:])])


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # an argument may be of any class
        return False


def _unit_name(parameters: Sequence[str]) -> str:
    """The module that holds all of the parameters; if that is the model, the one of the first, or the first's name."""
    modules = [name.split(".")[:-1] for name in parameters]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*modules, strict=False))
    return ".".join([level[0] for level in levels] or modules[0]) or parameters[0]
