"""Unit chains of models that pipelines know: which model has which, and where to add one's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import UnitChain, check_chain
from lightning_hetero.models.chains.eva import eva_chain
from lightning_hetero.models.chains.gpt import gpt_chain
from lightning_hetero.models.chains.huggingface import huggingface_chain
from lightning_hetero.models.chains.recognition import PROTOCOL
from lightning_hetero.models.chains.sequential import sequential_chain
from lightning_hetero.models.chains.vision_transformer import vision_transformer_chain

Adapter = Callable[[nn.Module], UnitChain | None]
"""a model's chain, or None where the model is of another kind; UnsupportedError where it is of the kind, but no chain
can do what it does"""

_ADAPTERS: tuple[Adapter, ...] = (
    vision_transformer_chain,
    eva_chain,
    gpt_chain,
    huggingface_chain,
    sequential_chain,
)

_SUPPORTED = (
    "timm's VisionTransformer, VisionTransformerDistilled and Eva; lightning_hetero.models.gpt.GPT; nn.Sequential; of "
    "transformers GPT-2, Llama, Mistral, Qwen2 and Qwen3, each as the bare model and for causal language modelling"
)


def find_chain(model: nn.Module) -> UnitChain:
    """The units of a model, by its own ``unit_chain`` method or by what is known of its class.

    Args:
        model: the module whose forward is to be split. Its parameters may be on any device, meta included.

    Returns:
        A chain that :func:`~lightning_hetero.models.chain.check_chain` accepts.

    Raises:
        UnsupportedError: if no chain of this model is known, or it changes what the chain of its class repeats, or
            its own chain is not valid.
    """
    chain = _own_chain(model)
    for adapter in _ADAPTERS:
        chain = chain or adapter(model)
    if chain is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no known units to split it into. Known are {_SUPPORTED}. For another model, "
            f"{PROTOCOL}"
        )
    check_chain(model, chain)
    return chain


def has_chain(model: nn.Module) -> bool:
    """Whether :func:`find_chain` finds a chain for this model."""
    try:
        find_chain(model)
    except Exception:  # a model's own unit_chain may fail in any way
        return False
    return True


def _own_chain(model: nn.Module) -> UnitChain | None:
    own = getattr(model, "unit_chain", None)
    if own is None:
        return None
    chain = own() if callable(own) else own
    if not isinstance(chain, UnitChain):
        raise UnsupportedError(
            f"{type(model).__name__}.unit_chain gives {type(chain).__name__} and no UnitChain: {PROTOCOL}"
        )
    return chain
