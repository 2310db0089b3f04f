"""The unit chain of ``nn.Sequential``: its children, and those of an ``nn.Sequential`` among them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import ChainUnit, UnitChain, Values
from lightning_hetero.models.chains.recognition import PROTOCOL, refuse_overrides


def sequential_chain(model: nn.Module) -> UnitChain | None:
    """One unit for each child of an ``nn.Sequential``; a child that is itself one gives its own children.

    A child that works in place (``nn.ReLU(inplace=True)``) belongs to the unit before it.

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
    for name in _names(model, ""):
        # What comes from another stage is a leaf of that stage's graph, and must not be changed in place.
        if groups and getattr(model.get_submodule(name), "inplace", False):
            groups[-1] += (name,)
        else:
            groups.append((name,))
    units = [ChainUnit(group[0], group, partial(_call, model, group)) for group in groups]
    return UnitChain(tuple(units), begin=_begin, end=_end)


def _names(sequential: nn.Sequential, prefix: str) -> Iterator[str]:
    children = [
        (name, module) for name, module in sequential.named_modules(remove_duplicate=False) if name and "." not in name
    ]
    for name, module in children:
        # A class of its own may have a forward of its own.
        if type(module) is nn.Sequential:
            yield from _names(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


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
