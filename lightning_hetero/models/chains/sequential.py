"""The unit chain of ``nn.Sequential``: its children, and those of an ``nn.Sequential`` among them that is no unit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import ChainUnit, UnitChain, Values
from lightning_hetero.models.chains.recognition import PROTOCOL, refuse_overrides
from lightning_hetero.models.units import find_units


def sequential_chain(model: nn.Module) -> UnitChain | None:
    """One unit for each child of an ``nn.Sequential``; a child that is itself one gives its own children.

    But one that is a block (models/units.py) stays whole, as it is measured, wrapped and emulated. A child that works
    in place (``nn.ReLU(inplace=True)``) belongs to the unit before it.

    Args:
        model: any model.

    Returns:
        The chain, or None for a model of another kind.

    Raises:
        UnsupportedError: for a subclass that overrides ``forward``.
    """
    if not isinstance(model, nn.Sequential):
        return None
    refuse_overrides(model, (nn.Sequential,), ("forward",))
    groups: list[tuple[str, ...]] = []
    blocks = {unit.module for unit in find_units(model) if unit.is_block}
    for name in _names(model, "", blocks):
        # What comes from another stage is a leaf of that stage's graph, and must not be changed in place.
        if groups and _begins_in_place(model.get_submodule(name)):
            groups[-1] += (name,)
        else:
            groups.append((name,))
    units = [ChainUnit(group[0], group, partial(_call, model, group)) for group in groups]
    return UnitChain(tuple(units), begin=_begin, end=_end)


def _names(sequential: nn.Sequential, prefix: str, blocks: Collection[nn.Module]) -> Iterator[str]:
    children = [
        (name, module) for name, module in sequential.named_modules(remove_duplicate=False) if name and "." not in name
    ]
    for name, module in children:
        # A class of its own may have a forward of its own.
        if type(module) is nn.Sequential and module not in blocks:
            yield from _names(module, f"{prefix}{name}.", blocks)
        else:
            yield f"{prefix}{name}"


def _begins_in_place(module: nn.Module) -> bool:
    if type(module) is nn.Sequential:
        return any(_begins_in_place(first) for first in list(module)[:1])
    return bool(getattr(module, "inplace", False))


def _begin(input: Tensor) -> Values:
    return {"hidden": input}


def _call(model: nn.Module, names: tuple[str, ...], values: Values) -> Values:
    hidden: Any = values["hidden"]
    for name in names:
        hidden = model.get_submodule(name)(hidden)
    if not isinstance(hidden, Tensor):
        raise UnsupportedError(
            f"unit {names[0]!r} of {type(model).__name__} returns {type(hidden).__name__} and no tensor: {PROTOCOL}"
        )
    return {"hidden": hidden}


def _end(values: Values) -> Any:
    return values["hidden"]
