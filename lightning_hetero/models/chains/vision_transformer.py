"""The unit chain of timm's vision transformers: ViT, and DeiT with its distillation token."""

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

_KNOWN = {
    ("timm.models.vision_transformer", "VisionTransformer"),
    ("timm.models.deit", "VisionTransformerDistilled"),
}
_METHODS = ("forward", "forward_features", "forward_head", "_pos_embed", "pool")
_EMBED_MODULES = ("patch_embed", "pos_drop", "patch_drop", "norm_pre")
_EMBED_TENSORS = ("cls_token", "reg_token", "dist_token", "pos_embed")
_HEAD_MODULES = ("attn_pool", "fc_norm", "head_drop", "head", "head_dist")


def vision_transformer_chain(model: nn.Module) -> UnitChain | None:
    """The units of a timm ``VisionTransformer`` or ``VisionTransformerDistilled``.

    They are ``patch_embed`` (with all tokens and position embeddings), one per block, ``norm``, and ``head`` (with the
    pooling and the norm after it).

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
    embed = ChainUnit(
        "patch_embed",
        modules_present(model, _EMBED_MODULES),
        partial(_embed, model),
        reads=("image",),
        tensors=tensors_present(model, _EMBED_TENSORS),
    )
    blocks = [
        ChainUnit(name, (name,), partial(_block, model, index), reads=("hidden", "attn_mask"))
        for index, name in enumerate(f"blocks.{index}" for index in range(len(_blocks(model))))
    ]
    norm = ChainUnit("norm", ("norm",), partial(_norm, model))
    head = ChainUnit(
        "head", modules_present(model, _HEAD_MODULES), partial(_head, model), writes=("logits", "logits_dist")
    )
    return UnitChain(
        (embed, *blocks, norm, head),
        begin=partial(image_values, model),
        end=_end,
        inputs=("image", "attn_mask"),
        outputs=("logits", "logits_dist"),
    )


def _embed(model: Any, values: Values) -> Values:
    hidden = model._pos_embed(model.patch_embed(values["image"]))
    return {"hidden": model.norm_pre(model.patch_drop(hidden))}


def _block(model: Any, index: int, values: Values) -> Values:
    block, hidden, attn_mask = model.blocks[index], values["hidden"], values["attn_mask"]
    if attn_mask is not None:
        return {"hidden": block(hidden, attn_mask=attn_mask)}
    if model.grad_checkpointing:
        from timm.models import checkpoint_seq

        return {"hidden": checkpoint_seq((block,), hidden)}
    return {"hidden": block(hidden)}


def _norm(model: Any, values: Values) -> Values:
    return {"hidden": model.norm(values["hidden"])}


def _head(model: Any, values: Values) -> Values:
    logits = model.forward_head(values["hidden"])
    # DeiT's two heads are averaged, but not in distilled training.
    first, second = logits if isinstance(logits, tuple) else (logits, None)
    return {"logits": first, "logits_dist": second}


def _end(values: Values) -> Any:
    logits, logits_dist = values["logits"], values["logits_dist"]
    return logits if logits_dist is None else (logits, logits_dist)


def _blocks(model: Any) -> Any:
    return model.blocks
