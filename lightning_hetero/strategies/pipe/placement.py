"""Which submodule is split, and what of it this rank keeps.

A rank keeps the parameters and buffers of its stages' units. The others stay where they are in the module, under their
names, as parameters on the meta device: without memory, and skipped by optimizers, since they never have a gradient.
So names, parameter groups and the numbering in an optimizer's state are the same on every rank as on one device.

What the LightningModule has outside the split model every rank keeps, whole (a temperature, a loss's weights, metrics).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.membership.parameters import OUTSIDE, ParameterShape
from lightning_hetero.models.chain import ChainUnit, UnitChain, owned_tensors
from lightning_hetero.models.chains import find_chain, has_chain
from lightning_hetero.models.shapes import count_names
from lightning_hetero.strategies.first_values import materialise, take_from_rank_0


def find_model(root: nn.Module, name: str | None = None) -> tuple[str, nn.Module, UnitChain]:
    """The submodule to split: the one that is named, or the largest child that has a unit chain.

    Args:
        root: the LightningModule.
        name: dotted name in it.

    Returns:
        Its dotted name, itself, and its chain.

    Raises:
        UnsupportedError: if there is none, or the named one has none, with what to do.
    """
    if name is not None:
        known = dict(root.named_modules())
        if name not in known or not name:
            raise UnsupportedError(
                f"module={name!r}: {type(root).__name__} has no submodule of that name; its children are "
                f"{', '.join(n for n, _ in root.named_children()) or 'none'}"
            )
        return name, known[name], find_chain(known[name])
    level = list(root.named_children())
    while level:
        able = [(size_of(child), name, child) for name, child in level if has_chain(child)]
        able = [entry for entry in able if entry[0]]
        if able:
            _, name, child = max(able, key=lambda entry: entry[0])
            return name, child, find_chain(child)
        largest = max(level, key=lambda entry: size_of(entry[1]))
        level = [(f"{largest[0]}.{inner}", module) for inner, module in largest[1].named_children()]
    children = [child for _, child in root.named_children()]
    if not children:
        raise UnsupportedError(f"{type(root).__name__} has no submodule: hetero_pipe splits one of its children")
    find_chain(max(children, key=size_of))  # which says why it is not supported
    raise AssertionError("unreachable: a child with a chain was not found")


def size_of(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


class Placement:
    """What of the split model lives where.

    Args:
        root: the LightningModule.
        prefix: name of the split model in it.
        model: the split model.
        chain: of the model.
    """

    def __init__(self, root: nn.Module, prefix: str, model: nn.Module, chain: UnitChain) -> None:
        self.root, self.prefix, self.model, self.chain = root, prefix, model, chain
        self.names_of_unit = [self._names(unit) for unit in chain.units]
        inside = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.outside = {name: p for name, p in root.named_parameters() if id(p) not in inside}

    def _names(self, unit: ChainUnit) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{name}" for name in owned_tensors(self.model, unit))

    def owners(self) -> dict[str, tuple[int, ...]]:
        """Units that own each parameter and buffer of the model, by its name in the root.

        One that is tied has its owners under each of its names.
        """
        tensors = dict(self._named_tensors())
        units: dict[int, set[int]] = {}
        for index, names in enumerate(self.names_of_unit):
            for name in names:
                units.setdefault(id(tensors[name]), set()).add(index)
        return {name: tuple(sorted(units.get(id(tensor), ()))) for name, tensor in tensors.items()}

    def parameter_shapes(self) -> tuple[ParameterShape, ...]:
        """Shapes of all parameters of the root, each with the units that own it."""
        owners = self.owners()
        names = [unit.name for unit in self.chain.units]
        counts = count_names(self.root)
        found = []
        for name, parameter in self.root.named_parameters():
            first, *others = [names[unit] for unit in owners.get(name, ())] or [OUTSIDE]
            found.append(ParameterShape(name, first, tuple(parameter.shape), tuple(others), counts[name]))
        return tuple(found)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for source in (
            self.model.named_parameters(remove_duplicate=False),
            self.model.named_buffers(remove_duplicate=False),
        ):
            yield from ((f"{self.prefix}.{name}", tensor) for name, tensor in source)

    def keep(self, units: Iterable[int], device: torch.device) -> None:
        """Give every rank rank 0's values, and keep those of ``units`` alone (a collective).

        Modules on the meta device get memory and values one at a time, and what this rank does not keep is dropped at
        once, so that a model larger than a machine's memory can be made.
        """
        kept_units = set(units)
        kept = {name for name, owners in self.owners().items() if not kept_units.isdisjoint(owners)}
        first_names = _first_names(self.root)
        done: dict[str, Tensor] = {}  # by first name: tied tensors are met again under others
        for path, child in self.root.named_modules():
            own = {name: f"{path}.{name}" if path else name for name, _ in _own_tensors(child)}
            new = [name for name, full in own.items() if first_names[full] not in done]
            if new:
                materialise(path, child, device)
            for name, full in own.items():
                first = first_names[full]
                if name in new:
                    tensor = _own(child, name)
                    take_from_rank_0(tensor, device)
                    drop = full.startswith(f"{self.prefix}.") and full not in kept
                    done[first] = _without_values(tensor) if drop else tensor
                _put(child, name, done[first])


def _first_names(root: nn.Module) -> dict[str, str]:
    """By the full name of every parameter and buffer, the first name that the same tensor has."""
    first: dict[int, str] = {}
    found = {}
    for path, child in root.named_modules():
        for name, tensor in _own_tensors(child):
            full = f"{path}.{name}" if path else name
            found[full] = first.setdefault(id(tensor), full)
    return found


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _own(module: nn.Module, name: str) -> Tensor:
    tensor = getattr(module, name)
    assert isinstance(tensor, Tensor)
    return tensor


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    if getattr(module, name) is not tensor:
        setattr(module, name, tensor)


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def move(module: nn.Module, device: torch.device) -> None:
    """Move what has values to ``device``; what is on meta stays there."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        module.to(device)
        return
    for child in module.children():
        move(child, device)
    for name, tensor in _own_tensors(module):
        if not tensor.is_meta:
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(device)
            else:
                _put(module, name, tensor.to(device))


def unit_with(name: str, placement: Placement) -> int | None:
    """The chain's unit that has a module of this name."""
    short = name.removeprefix(f"{placement.prefix}.")
    for index, unit in enumerate(placement.chain.units):
        if short == unit.name or any(short == m or short.startswith(f"{m}.") for m in unit.modules):
            return index
    for index, unit in enumerate(placement.chain.units):
        if any(tensor == short or tensor.startswith(f"{short}.") for tensor in unit.tensors):
            return index  # the first that has a part of it
    return None
