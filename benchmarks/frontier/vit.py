"""What the study's models cost, by hand: parameters, floating-point operations and bytes of every unit.

Blocks are timm's ``ResPostBlock`` with normalised queries and keys and a SwiGLU of three matrices with biases. A test
holds parameters and operations against what the package counts on the real models.
"""

from __future__ import annotations

from benchmarks.frontier.tables import ViT
from lightning_hetero.costs import ModelCosts, UnitCost

BF16_BYTES = 2
CLASSES = 1000
IMAGE_VALUES = 3 * 224 * 224


def model_costs(model: ViT) -> ModelCosts:
    """Embedding, blocks and head of a model, in bfloat16, per image."""
    width, tokens = model.width, model.tokens
    patch_values = 3 * model.patch_size**2
    embedding_flops = 2 * patch_values * width * (tokens - 1)
    embed = UnitCost(
        "embed",
        parameters=patch_values * width + width + width + tokens * width,  # patches, class token, positions
        forward_flops=embedding_flops,
        backward_flops=embedding_flops,  # images need no gradient
        kept_activation_bytes=IMAGE_VALUES * BF16_BYTES,
        output_bytes=tokens * width * BF16_BYTES,
        is_block=False,
    )
    head = UnitCost(
        "head",
        parameters=2 * width + width * CLASSES + CLASSES,  # a norm before it
        forward_flops=2 * width * CLASSES,
        backward_flops=4 * width * CLASSES,
        kept_activation_bytes=tokens * width * BF16_BYTES,
        output_bytes=CLASSES * BF16_BYTES,
        is_block=False,
    )
    return ModelCosts(model.name, (embed, *(_block(model, index) for index in range(model.depth)), head), "bfloat16")


def _block(model: ViT, index: int) -> UnitCost:
    width, hidden, tokens = model.width, model.swiglu_width, model.tokens
    attention = 4 * width * width + 4 * width + 4 * (width // model.heads)  # and norms of queries and keys
    mlp = 3 * width * hidden + 2 * hidden + width
    flops = 2 * tokens * (4 * width * width + 3 * width * hidden) + 4 * tokens**2 * width
    scores = tokens * model.heads  # of one token, with all others
    # Input, queries, keys and values, normalised queries and keys, both scaled, attention's output, its projection,
    # the sum with the input, the MLP's output: 12 as wide as the model. Gate, value, SiLU of the gate and their product
    # are as wide as the MLP. Attention is computed step by step, without a fused kernel: its weights are kept.
    kept = 12 * width + 4 * hidden + scores
    # While the MLP's backward runs: gradients of the product, of the SiLU and of the gate, and of the norm's input.
    inner = 3 * hidden + width
    return UnitCost(
        f"blocks.{index}",
        parameters=attention + mlp + 4 * width,  # two norms
        forward_flops=flops,
        backward_flops=2 * flops,
        kept_activation_bytes=tokens * kept * BF16_BYTES,
        output_bytes=tokens * width * BF16_BYTES,
        inner_gradient_bytes=tokens * inner * BF16_BYTES,
    )
