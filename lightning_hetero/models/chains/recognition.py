"""What the adapters of this folder share: which known class a model is of, what it changes, and what it holds.

Classes are matched by module and name along the method resolution order, so that no library is imported for a model
that is not of it, and so that a class that FSDP2 has put its own in front of still counts as what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError, raise_all
from lightning_hetero.models.chain import Values

PROTOCOL = (
    "give the model a method unit_chain(self) that returns a UnitChain (lightning_hetero/models/chain.py shows how)"
)
"""the next step for a model that no adapter can do"""


def known_classes(model: nn.Module, known: Collection[tuple[str, str]]) -> tuple[type[nn.Module], ...]:
    """The classes of a model, the most derived first, that are known.

    Args:
        model: the model.
        known: module and name of each class.

    Returns:
        The classes; empty for a model of another kind.
    """
    return tuple(cls for cls in type(model).__mro__ if (cls.__module__, cls.__name__) in known)


def refuse_overrides(model: nn.Module, known: Sequence[type[nn.Module]], methods: Iterable[str]) -> None:
    """Refuse a model that replaces a method whose steps an adapter repeats.

    Args:
        model: the model.
        known: classes whose own methods the adapter knows.
        methods: names of the methods that must be those of a known class.

    Raises:
        UnsupportedError: naming the class and every such method.
    """
    problems = []
    for method in methods:
        function = getattr(getattr(model, method), "__func__", None)
        if function is None or all(function is not vars(cls).get(method) for cls in known):
            problems.append(f"it overrides {known[0].__name__}.{method}: {PROTOCOL}")
    raise_all(UnsupportedError, f"{type(model).__name__} cannot be split into units", problems)


def refuse_arguments(model: nn.Module, arguments: Mapping[str, Any], advice: Mapping[str, str] | None = None) -> None:
    """Refuse arguments that a chain cannot do.

    Args:
        model: whose forward takes them.
        arguments: those that were given, by name.
        advice: what to do instead, by name; "leave it out" by default.

    Raises:
        UnsupportedError: naming every argument, if there is one.
    """
    advice = advice or {}
    problems = [
        f"{name} is {'a tensor' if isinstance(value, Tensor) else repr(value)}, which a model in stages cannot do: "
        f"{advice.get(name, 'leave it out')}"
        for name, value in arguments.items()
    ]
    raise_all(UnsupportedError, f"{type(model).__name__} was called with what its unit chain cannot do", problems)


def image_values(model: nn.Module, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Values:
    """With what the chain of a timm transformer over images begins: "image" and "attn_mask".

    Args:
        model: whose forward takes the other arguments.
        x: the images.
        attn_mask: of all blocks.
        is_causal: what a chain cannot do.

    Raises:
        UnsupportedError: if ``is_causal`` is true.
    """
    if is_causal:
        refuse_arguments(model, {"is_causal": is_causal}, {"is_causal": "give a causal attn_mask"})
    return {"image": x, "attn_mask": attn_mask}


def modules_present(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that are modules of the model, in their order."""
    return tuple(name for name in names if isinstance(getattr(model, name, None), nn.Module))


def tensors_present(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that are parameters or buffers of the model, in their order."""
    return tuple(name for name in names if isinstance(getattr(model, name, None), Tensor))
