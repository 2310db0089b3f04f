"""The graph of an exported forward: where it can be cut, and the runs of calls between those places.

The module docstring of :mod:`lightning_hetero.models.chains.exported` says which places these are.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import Values

HIDDEN, INPUT, OUTPUT = "hidden", "input.", "output."
"""names of values: what is left at a place; before the names of inputs; before the numbers of outputs"""

# It holds the device and the dtype of the example against moves and autocast.
_SKIPPED = "aten._assert_tensor_metadata.default"
_FROM_VALUES, _FROM_MODEL, _FROM_GRAPH = range(3)


@dataclass(frozen=True)
class Names:
    """Names of a model's parameters and buffers.

    Args:
        first: by each name, the first one that the same tensor has.
        parameters: those of parameters.
        prefix: of all of them in the exported module.
    """

    first: Mapping[str, str]
    parameters: frozenset[str]
    prefix: str

    @classmethod
    def of(cls, model: nn.Module, prefix: str) -> Names:
        """Those of a model."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        seen: dict[int, str] = {}
        tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
        first = {name: seen.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        return cls(first, frozenset(parameters), prefix)

    def used_by(self, name: str, call: Node) -> str:
        """Which of the names that a tensor has is in the module that a call was in."""
        stack: dict[str, tuple[str, Any]] = call.meta.get("nn_module_stack") or {}
        inside = [path.split("@")[0] + "." for path, _ in stack.values()]
        path = inside[-1].removeprefix(self.prefix) if inside else ""
        own = path + name.rpartition(".")[2]
        if self.first.get(own) == self.first[name]:
            return own
        aliases = [each for each, first in self.first.items() if first == self.first[name] and each.startswith(path)]
        return aliases[0] if aliases and path else name


class Graph:
    """The calls of an exported forward.

    Args:
        program: what was exported, on the CPU.
        names: of the model's tensors.
        inputs: their names.
        samples: of the example.

    Raises:
        UnsupportedError: if the forward changes an input or a tensor that is no buffer, in place.
    """

    def __init__(self, program: ExportedProgram, names: Names, inputs: Sequence[str], samples: int) -> None:
        self._module, self._names, self._samples = program.graph_module, names, samples
        self._device = torch.device("cpu")
        self.leaves = _leaves(program, names.prefix, inputs)
        self._constants: dict[tuple[Node, torch.device], Any] = {}
        *nodes, end = program.graph.nodes
        self.outputs: tuple[Node, ...] = tuple(end.args[0])
        self._storages = _Storages()
        calls = [node for node in nodes if node.op == "call_function" and str(node.target) != _SKIPPED]
        self.calls = self._with_early_assignments(calls)
        self._index = {node: i for i, node in enumerate(self.calls)} | {end: len(self.calls)}
        self._changes = {
            self._storages[changed]: i
            for i, node in enumerate(self.calls)
            for changed in _changed_by(node, self._module)
        }
        for leaf, (kind, what) in self.leaves.items():
            if kind != _FROM_MODEL and leaf.op == "placeholder" and self._storages[leaf] in self._changes:
                raise UnsupportedError(f"its forward changes {what if kind == _FROM_VALUES else leaf.name} in place")
        self._free = self._found_free()
        self._from_inputs = {leaf for leaf, (kind, _) in self.leaves.items() if kind == _FROM_VALUES}
        for node in self.calls:
            if not self._from_inputs.isdisjoint(node.all_input_nodes):
                self._from_inputs.add(node)

    def _with_early_assignments(self, calls: list[Node]) -> list[Node]:
        """The calls in an order in which buffers that the forward assigns get their values as early as they can.

        Export puts that at the end (``self.mean = 0.9 * self.mean + ...``), and the values would be left until then.
        """
        for node in list(calls):
            if str(node.target) == "aten.copy_.default" and not node.users and node.args[0] in self.leaves:
                calls.remove(node)
                buffer, source = (self._storages[each] for each in node.all_input_nodes)
                touching = [
                    i
                    for i, each in enumerate(calls, start=1)
                    if each is node.args[1]
                    or buffer in map(self._storages.__getitem__, each.all_input_nodes)
                    or source in map(self._storages.__getitem__, _changed_by(each, self._module))
                ]
                calls.insert(max(touching, default=len(calls)), node)
        return calls

    def _found_free(self) -> set[Node]:
        """What any run may compute again: it needs no parameter and no random number, and nothing changes in place."""
        free = {
            leaf
            for leaf, (kind, what) in self.leaves.items()
            if self._storages[leaf] not in self._changes and not (kind == _FROM_MODEL and self._is_parameter(what))
        }
        for node in self.calls:
            same = node.target is operator.getitem or (_is_operator(node) and not _is_random(node))
            if same and self._storages[node] not in self._changes and free.issuperset(node.all_input_nodes):
                free.add(node)
        return free

    def _is_parameter(self, name: str) -> bool:
        return name in self._names.parameters

    def places(self) -> dict[int, Node]:
        """Where it can be cut: by the number of calls before a place, the one tensor that is left there."""
        last = {node: max((self._index.get(user, -1) for user in node.users), default=-1) for node in self.calls}
        blocked: set[int] = set()
        for leaf in self.leaves:
            uses = [self._index[user] for user in leaf.users if user in self._index]
            if uses and self._storages[leaf] in self._changes:
                blocked.update(range(min(uses) + 1, max(uses) + 1))
        live: list[Node] = []
        found: dict[int, Node] = {}
        before: Node | None = None
        for place, node in enumerate(self.calls, start=1):
            live = [each for each in (*live, node) if each not in self._free and last[each] >= place]
            if len(live) == 1 and live[0] is not before and place not in blocked and self._can_travel(live[0], place):
                before = live[0]
                found[place] = before
        return found

    def _can_travel(self, node: Node, place: int) -> bool:
        tensor = node.meta.get("val")
        if not isinstance(tensor, Tensor) or node not in self._from_inputs or not tensor.is_floating_point():
            return False
        return tensor.shape[:1] == (self._samples,) and self._changes.get(self._storages[node], -1) < place

    def _uses(self, start: int, stop: int) -> Counter[str]:
        """How often the calls between two places use each parameter."""
        readers = [node.all_input_nodes for node in self.calls[start:stop]]
        if stop == len(self.calls):
            readers.append(list(self.outputs))
        used = (self.leaves[leaf] for leaves in readers for leaf in leaves if leaf in self.leaves)
        return Counter(
            self._names.first[name] for kind, name in used if kind == _FROM_MODEL and self._is_parameter(name)
        )

    def own_borders(self) -> list[int]:
        """The places between runs that use at least one parameter each."""
        borders: list[int] = []
        any_before = False
        for start, stop in itertools.pairwise([0, *self.places(), len(self.calls)]):
            if self._uses(start, stop):
                borders += [start] if any_before else []
                any_before = True
        return borders

    def borders_like(self, other: Graph, borders: Sequence[int]) -> list[int]:
        """The places before which the same parameters are used as often as before another graph's borders.

        Raises:
            UnsupportedError: if there are none.
        """
        places: dict[frozenset[tuple[str, int]], int] = {}
        uses: Counter[str] = Counter()
        for start, stop in itertools.pairwise([0, *self.places()]):
            uses += self._uses(start, stop)
            places[frozenset(uses.items())] = stop
        wanted = [frozenset(other._uses(0, border).items()) for border in borders]
        if not places.keys() >= set(wanted):
            raise UnsupportedError("in evaluation mode it has no place that matches one that it has in training mode")
        return [places[each] for each in wanted]

    def cut(self, borders: Sequence[int]) -> list[Run]:
        """The runs between borders."""
        places = self.places()
        outputs = {f"{OUTPUT}{i}": node for i, node in enumerate(self.outputs)}
        runs = []
        for start, stop in itertools.pairwise([0, *borders, len(self.calls)]):
            sent = {HIDDEN: places[stop]} if stop < len(self.calls) else outputs
            runs.append(self._run(self.calls[start:stop], places.get(start), sent))
        return runs

    def _run(self, own: Sequence[Node], received: Node | None, sent: dict[str, Node]) -> Run:
        needed: set[Node] = set()
        stack = [*(node for node in own if node not in self._free), *sent.values()]
        while stack:
            node = stack.pop()
            if node not in needed and node is not received:
                needed.add(node)
                stack += node.all_input_nodes
        sources = {leaf: source for leaf, source in self.leaves.items() if leaf in needed}
        calls = [node for node in self.calls if node in needed]
        names: dict[str, None] = {}
        for node in [*calls, *sent.values()]:
            for leaf in [node] if node in self.leaves else node.all_input_nodes:
                kind, name = sources.get(leaf, (_FROM_GRAPH, None))
                if kind == _FROM_MODEL:
                    names[self._names.used_by(name, node)] = None
        if received is not None:
            sources[received] = (_FROM_VALUES, HIDDEN)
        return Run(self, calls, sources, sent, tuple(names))

    def batch_layers(self) -> Iterator[str]:
        """What computes over all samples: modules in which a batch norm does, and buffers that the samples change."""
        buffers = ((leaf, name) for leaf, (kind, name) in self.leaves.items() if kind == _FROM_MODEL)
        named = {self._storages[leaf]: name for leaf, name in buffers if not self._is_parameter(name)}
        for node in self.calls:
            changed = _changed_by(node, self._module)
            if _is_batch_norm(node):
                stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
                yield f"{stack[-1][0].removeprefix(self._names.prefix)} ({str(node.target).split('.')[1]})"
            elif not self._from_inputs.isdisjoint(node.all_input_nodes):
                yield from (named[self._storages[each]] for each in changed if self._storages[each] in named)

    def outputs_without_samples(self) -> Iterator[tuple[int, ...]]:
        """Shapes of outputs whose first dimension is not the example's samples."""
        shapes = (tuple(node.meta["val"].shape) for node in self.outputs)
        return (shape for shape in shapes if shape[:1] != (self._samples,))

    def constant(self, leaf: Node) -> Any:
        """A tensor or graph that the exported program itself holds, on the device of its calls."""
        if (leaf, self._device) not in self._constants:
            held = self.leaves[leaf][1]
            self._constants[leaf, self._device] = held.to(self._device) if isinstance(held, Tensor) else held
        return self._constants[leaf, self._device]

    def move_to(self, device: torch.device) -> None:
        """Make what its calls make on a device, in place of the one before."""
        if device == self._device:
            return
        for module in self._module.modules():
            if isinstance(module, GraphModule):
                for node in module.graph.nodes:
                    _move(node, self._device, device)
                module.recompile()
        self._device = device


class Run:
    """Calls that one unit does.

    Args:
        graph: that they are of.
        calls: in their order.
        sources: where what they do not compute comes from.
        sent: what they compute for others, by the names of the values.
        tensors: names of the parameters and buffers that they use.
    """

    def __init__(
        self,
        graph: Graph,
        calls: Sequence[Node],
        sources: dict[Node, tuple[int, Any]],
        sent: dict[str, Node],
        tensors: tuple[str, ...],
    ) -> None:
        self._graph, self._sources, self._sent, self.tensors = graph, sources, sent, tensors
        self.reads = tuple(dict.fromkeys(name for kind, name in sources.values() if kind == _FROM_VALUES))
        self.writes = tuple(sent)
        last = {each: node for node in calls for each in (node, *node.all_input_nodes)}
        drops: dict[Node, list[Node]] = {node: [] for node in calls}
        for each, node in last.items():
            if each not in sent.values():
                drops[node].append(each)
        self._steps = list(drops.items())

    def __call__(self, model: nn.Module, values: Values) -> Values:
        """Do the calls with the parameters and buffers that the model has now.

        Args:
            model: that was exported, or a copy of it.
            values: that the run reads.

        Returns:
            The values that it writes.
        """
        device = next(value.device for value in values.values() if value is not None)
        self._graph.move_to(device)
        found: dict[Node, Any] = {}
        for leaf, (kind, what) in self._sources.items():
            if kind == _FROM_VALUES:
                found[leaf] = values[what]
            elif kind == _FROM_MODEL:
                holder, _, own = what.rpartition(".")
                found[leaf] = getattr(model.get_submodule(holder), own)
            else:
                found[leaf] = self._graph.constant(leaf)
        for node, dropped in self._steps:
            args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for each in dropped:
                del found[each]
        return {name: found[node] for name, node in self._sent.items()}


class _Storages:
    """A number for the memory that the tensor of a node is in, the same for views of one tensor."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def __getitem__(self, node: Node) -> int:
        tensor = node.meta.get("val")
        held = tensor.untyped_storage() if isinstance(tensor, Tensor) else node
        self._kept[id(held)] = held
        return id(held)


def _leaves(program: ExportedProgram, prefix: str, inputs: Sequence[str]) -> dict[Node, tuple[int, Any]]:
    """Where what no call computes comes from."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    names = iter(inputs)
    found: dict[Node, tuple[int, Any]] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            found[node] = (_FROM_GRAPH, operator.attrgetter(node.target)(program.graph_module))
        elif node.op == "placeholder":
            kind, target = specs[node.name].kind, specs[node.name].target
            if kind == InputKind.USER_INPUT:
                found[node] = (_FROM_VALUES, f"{INPUT}{next(names)}")
            elif kind in (InputKind.PARAMETER, InputKind.BUFFER) and target is not None:
                found[node] = (_FROM_MODEL, target.removeprefix(prefix))
            elif kind == InputKind.CONSTANT_TENSOR and target is not None:
                found[node] = (_FROM_GRAPH, program.constants[target])
            else:
                raise UnsupportedError(f"its graph takes {node.name}, of kind {kind.name}")
    return found


def _changed_by(node: Node, module: nn.Module) -> list[Node]:
    """What a call changes in place."""
    inner = [getattr(module, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
    graphs = [each for each in inner if isinstance(each, GraphModule)]
    if graphs:
        changes = any(
            _changed_by(each, graph) for graph in graphs for each in graph.graph.nodes if each.op == "call_function"
        )
        return [each for each in node.all_input_nodes if each.op != "get_attr"] if changes else []
    if not _is_operator(node):
        return []
    name = str(node.target).split(".")[1]
    if _is_batch_norm(node):
        return [each for each in node.args[3:5] if isinstance(each, Node)]
    if name == "detach_":
        return []
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
        return node.all_input_nodes[:1]
    return list(node.all_input_nodes) if node.is_impure() and not _is_random(node) else []


def _is_operator(node: Node) -> bool:
    return hasattr(node.target, "tags")


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_batch_norm(node: Node) -> bool:
    """Whether it computes statistics over all samples, or changes running ones."""
    name = str(node.target)
    over_all = name == "aten.batch_norm.default" or (name == "aten.instance_norm.default" and node.args[3] is not None)
    return over_all and bool(node.args[5])


def _move(node: Node, old: torch.device, new: torch.device) -> None:
    if str(node.target) == "wrap_with_autocast" and node.args[0] == old.type:
        node.args = (new.type, *node.args[1:])
    node.args = map_aggregate(node.args, lambda each: new if isinstance(each, torch.device) else each)
    node.kwargs = map_aggregate(node.kwargs, lambda each: new if isinstance(each, torch.device) else each)
