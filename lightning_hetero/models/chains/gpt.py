"""The unit chain of the bundled GPT."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hetero.models.chain import ChainUnit, UnitChain, Values
from lightning_hetero.models.chains.recognition import refuse_overrides
from lightning_hetero.models.gpt import GPT


def gpt_chain(model: nn.Module) -> UnitChain | None:
    """The units of a :class:`~lightning_hetero.models.gpt.GPT`: ``embed``, one per block, ``norm`` and ``head``.

    A tied token embedding is owned by ``embed`` and by ``head``.

    Args:
        model: any model.

    Returns:
        The chain, or None for a model of another kind.

    Raises:
        UnsupportedError: for a subclass that overrides ``forward``.
    """
    if not isinstance(model, GPT):
        return None
    refuse_overrides(model, (GPT,), ("forward",))
    names = [f"blocks.{index}" for index in range(len(model.blocks))]
    units = [ChainUnit("embed", ("embed",), partial(_call, model, "embed", "tokens"), reads=("tokens",))]
    units += [ChainUnit(name, (name,), partial(_call, model, name, "hidden")) for name in [*names, "norm", "head"]]
    return UnitChain(tuple(units), begin=_begin, end=_end, inputs=("tokens",))


def _begin(tokens: Tensor) -> Values:
    return {"tokens": tokens}


def _call(model: nn.Module, module: str, reads: str, values: Values) -> Values:
    return {"hidden": model.get_submodule(module)(values[reads])}


def _end(values: Values) -> Any:
    return values["hidden"]
