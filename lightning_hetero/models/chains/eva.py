"""The unit chain of timm's EVA, whose rotary tables travel from the patch embedding to the blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lightning_hetero.models.chain import ChainUnit, UnitChain, Values
from lightning_hetero.models.chains.recognition import (
    image_values,
    known_classes,
    modules_present,
    refuse_overrides,
    tensors_present,
)

_KNOWN = {("timm.models.eva", "Eva")}
_METHODS = ("forward", "forward_features", "forward_head", "_pos_embed", "pool")
_EMBED_MODULES = ("patch_embed", "pos_drop", "patch_drop", "rope", "norm_pre")
_EMBED_TENSORS = ("cls_token", "reg_token", "pos_embed")
_HEAD_MODULES = ("attn_pool", "fc_norm", "head_drop", "head")


def eva_chain(model: nn.Module) -> UnitChain | None:
    """The units of a timm ``Eva`` (EVA, EVA-02, rope-ViT, DINOv3 and others).

    They are ``patch_embed`` (with all tokens and position embeddings, the rotary ones too), one per block, ``norm``,
    and ``head`` (with the pooling and the norm after it).

    Args:
        model: any model.

    Returns:
        The chain, or None for a model of another kind.

    Raises:
        UnsupportedError: for a subclass that overrides a method whose steps the chain repeats.
    """
    known = known_classes(model, _KNOWN)
    if not known:
        return None
    refuse_overrides(model, known, _METHODS)
    ropes = _rope_names(model)
    embed = ChainUnit(
        "patch_embed",
        modules_present(model, _EMBED_MODULES),
        partial(_embed, model),
        reads=("image",),
        writes=("hidden", *dict.fromkeys(ropes)),
        tensors=tensors_present(model, _EMBED_TENSORS),
    )
    blocks = [
        ChainUnit(
            f"blocks.{index}",
            (f"blocks.{index}",),
            partial(_block, model, index, rope),
            reads=("hidden", rope, "attn_mask"),
        )
        for index, rope in enumerate(ropes)
    ]
    norm = ChainUnit("norm", ("norm",), partial(_norm, model))
    head = ChainUnit("head", modules_present(model, _HEAD_MODULES), partial(_head, model))
    return UnitChain(
        (embed, *blocks, norm, head), begin=partial(image_values, model), end=_end, inputs=("image", "attn_mask")
    )


def _rope_names(model: Any) -> list[str]:
    """The name of the value with each block's rotary table: one for all, or, where they are learned, one each."""
    if model.rope is not None and getattr(model, "rope_mixed", False):
        return [f"rope.{index}" for index in range(len(model.blocks))]
    return ["rope"] * len(model.blocks)


def _embed(model: Any, values: Values) -> Values:
    hidden, rope = model._pos_embed(model.patch_embed(values["image"]))
    hidden = model.norm_pre(hidden)
    names = _rope_names(model)
    if "rope" in names:
        return {"hidden": hidden, "rope": rope}
    return {"hidden": hidden, **{name: rope[index] for index, name in enumerate(names)}}


def _block(model: Any, index: int, rope: str, values: Values) -> Values:
    block = model.blocks[index]
    tables: dict[str, Any] = {"rope": values[rope], "attn_mask": values["attn_mask"]}
    if model.grad_checkpointing:
        from timm.models import checkpoint

        return {"hidden": checkpoint(block, values["hidden"], **tables)}
    return {"hidden": block(values["hidden"], **tables)}


def _norm(model: Any, values: Values) -> Values:
    return {"hidden": model.norm(values["hidden"])}


def _head(model: Any, values: Values) -> Values:
    return {"hidden": model.forward_head(values["hidden"])}


def _end(values: Values) -> Any:
    return values["hidden"]
