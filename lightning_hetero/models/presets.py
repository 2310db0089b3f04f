"""Models by name: the six ViTs of the Frontier study, and GPTs.

The ViTs are those of Tsaris et al., "Pretraining Billion-Scale Geospatial Foundational Models on Frontier" (IPDPS
workshops 2024), as the code published with it builds them: timm blocks with a SwiGLU MLP (three matrices), norms
after attention and MLP inside the residual branch ("residual post-norm"), normalised queries and keys, a class token
and 1000 classes. The width that the study prints for the MLP is that of a two-matrix MLP with about as many
parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from timm.layers.mlp import SwiGLU
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import nn

from lightning_hetero.errors import HeteroError
from lightning_hetero.models.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a Frontier ViT.

    Args:
        width: of the residual stream.
        depth: number of blocks.
        heads: attention heads per block.
        swiglu_width: hidden width of the three-matrix MLP.
        patch_size: pixels along each side of a patch.
        image_size: pixels along each side of an image.
        classes: number of classes.
    """

    width: int
    depth: int
    heads: int
    swiglu_width: int
    patch_size: int
    image_size: int = 224
    classes: int = 1000

    def build(self) -> VisionTransformer:
        """Build the model on torch's current default device; it takes images (batch, 3, size, size)."""
        return VisionTransformer(
            img_size=self.image_size,
            patch_size=self.patch_size,
            num_classes=self.classes,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            # timm multiplies by the width and rounds down; the half keeps the product from falling short.
            mlp_ratio=(self.swiglu_width + 0.5) / self.width,
            qk_norm=True,
            block_fn=ResPostBlock,
            mlp_layer=SwiGLU,
            # timm hands its own default, GELU, to the MLP; with SiLU it is a SwiGLU.
            act_layer=nn.SiLU,
        )


@dataclass(frozen=True)
class Preset:
    """A model that is known by name.

    Args:
        name: as :func:`build_preset` takes it.
        config: its sizes.
        published_parameters: the count that its source gives, rounded as there.
        source: where sizes and count are from.
    """

    name: str
    config: ViTConfig | GPTConfig
    published_parameters: float
    source: str


_FRONTIER = "Tsaris et al. 2024, Pretraining Billion-Scale Geospatial Foundational Models on Frontier"
_GPT3 = "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("vit_base", ViTConfig(768, 12, 12, 2064, 16), 87e6, _FRONTIER),
        Preset("vit_huge", ViTConfig(1280, 32, 16, 3440, 14), 635e6, _FRONTIER),
        Preset("vit_1b", ViTConfig(1536, 32, 16, 4128, 14), 914e6, _FRONTIER),
        Preset("vit_3b", ViTConfig(2816, 32, 32, 7568, 14), 3067e6, _FRONTIER),
        Preset("vit_5b", ViTConfig(1792, 56, 16, 15360, 14), 5349e6, _FRONTIER),
        Preset("vit_15b", ViTConfig(5040, 48, 48, 13545, 14), 14720e6, _FRONTIER),
        Preset("gpt_125m", GPTConfig(context=2048, width=768, depth=12, heads=12), 125e6, f"{_GPT3}, 'Small'"),
        # The paper rounds 356 million to 350; GPT-2 medium, the same blocks, is published with 355 million.
        Preset(
            "gpt_350m",
            GPTConfig(context=2048, width=1024, depth=24, heads=16),
            355e6,
            f"{_GPT3}, 'Medium'; count of GPT-2 medium, openai-community/gpt2-medium on Hugging Face",
        ),
        # Untied, as in Pythia: embedding and head are two units, each as large as two blocks.
        Preset(
            "gpt_1_4b",
            GPTConfig(vocabulary=50304, context=2048, width=2048, depth=24, heads=16, tied_embedding=False),
            1.4147e9,
            "Biderman et al. 2023, Pythia, 1.4B: the same sizes, with learned in place of rotary positions",
        ),
    )
}


def build_preset(
    name: str, *, device: torch.device | str | None = None, depth: int | None = None
) -> VisionTransformer | GPT:
    """Build a model by name.

    Args:
        name: a key of ``PRESETS``: ``vit_base``, ``vit_huge``, ``vit_1b``, ``vit_3b``, ``vit_5b``,
            ``vit_15b``, ``gpt_125m``, ``gpt_350m`` or ``gpt_1_4b``.
        device: where its parameters are; ``"meta"`` takes no memory and has no values. ``None`` is torch's
            current default.
        depth: number of blocks, for a model with the same blocks but fewer or more of them; ``None`` is the
            preset's.

    Returns:
        The model, in 32-bit, in training mode. ViTs take images of shape (batch, 3, 224, 224), GPTs token
        numbers of shape (batch, sequence).

    Raises:
        HeteroError: for a name that is not known, or a depth below 1.
    """
    if name not in PRESETS:
        raise HeteroError(f"the model preset {name!r} is not known: give one of {', '.join(PRESETS)}")
    if depth is not None and depth < 1:
        raise HeteroError(f"depth is {depth}: give at least one block")
    config = PRESETS[name].config
    if depth is not None:
        config = replace(config, depth=depth)
    with torch.device(device if device is not None else torch.get_default_device()):
        return config.build() if isinstance(config, ViTConfig) else GPT(config)
