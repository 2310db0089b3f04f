"""Model presets: parameter counts against the published, what they are made of, and that they run."""

from functools import cache

import pytest
import torch
from timm.layers.mlp import SwiGLU
from timm.models.vision_transformer import ResPostBlock

from lightning_hetero.errors import HeteroError
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.models.presets import PRESETS, ViTConfig, build_preset
from lightning_hetero.models.units import find_units
from tests.anchors import table

FRONTIER = {row["model"]: row for row in table("frontier_vit_models.csv")}


@cache
def on_meta(name):
    return build_preset(name, device="meta")


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_of_the_study_is_a_preset():
    assert set(FRONTIER) == {name for name in PRESETS if name.startswith("vit_")}
    assert len(FRONTIER) == 6


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_within_one_percent_of_the_published(name):
    preset = PRESETS[name]
    model = on_meta(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert count(model) == pytest.approx(preset.published_parameters, rel=0.01)
    if name in FRONTIER:
        assert preset.published_parameters == float(FRONTIER[name]["params_millions"]) * 1e6


@pytest.mark.parametrize("name", FRONTIER)
def test_a_frontier_vit_is_built_as_the_study_says(name):
    row = FRONTIER[name]
    model = on_meta(name)
    block = model.blocks[0]
    assert len(model.blocks) == int(row["depth"])
    assert model.embed_dim == int(row["width"])
    assert model.patch_embed.patch_size == (int(row["patch_size"]),) * 2
    assert isinstance(block, ResPostBlock)
    assert isinstance(block.mlp, SwiGLU)
    assert block.mlp.fc2.in_features == int(row["swiglu_hidden_dim"])
    assert isinstance(block.mlp.act, torch.nn.SiLU)
    assert block.attn.num_heads == int(row["heads"])
    assert isinstance(block.attn.q_norm, torch.nn.LayerNorm)
    assert model.cls_token is not None
    assert model.num_classes == 1000


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_are_found_as_units(name):
    model = on_meta(name)
    blocks = [unit for unit in find_units(model) if unit.is_block]
    assert [unit.module for unit in blocks] == list(model.blocks)


def test_gpt_counts_follow_from_the_sizes():
    """Per block 12 width^2 + 13 width; OPT-350M's layer of width 1024 is published as 12,596,224 (x 4 bytes)."""
    model = on_meta("gpt_350m")
    assert count(model.blocks[0]) == 12 * 1024**2 + 13 * 1024 == 50384896 // 4
    tied = (50257 + 2048) * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert count(on_meta("gpt_125m")) == tied


def test_fewer_blocks_of_the_same_kind():
    whole, short = (build_preset("vit_base", device="meta", depth=depth) for depth in (None, 2))
    assert len(short.blocks) == 2
    assert count(whole) - count(short) == 10 * count(short.blocks[0])


def test_a_vit_runs_and_learns():
    torch.manual_seed(0)
    model = ViTConfig(width=32, depth=2, heads=4, swiglu_width=43, patch_size=8, image_size=16, classes=5).build()
    assert model.blocks[0].mlp.fc2.in_features == 43
    logits = model(torch.randn(3, 3, 16, 16))
    assert logits.shape == (3, 5)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


SMALL = GPTConfig(vocabulary=17, context=12, width=16, depth=3, heads=4)


def test_gpt_looks_at_no_later_token():
    torch.manual_seed(0)
    model = GPT(SMALL).double().eval()
    tokens = torch.randint(0, 17, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 17)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=-1).min() > 1e-6


def test_gpt_positions_and_a_shorter_sequence():
    torch.manual_seed(0)
    model = GPT(SMALL).double().eval()
    repeated = torch.full((1, 12), 3)
    assert (model(repeated)[0, 0] - model(repeated)[0, 5]).abs().max() > 1e-6
    torch.testing.assert_close(model(repeated[:, :5]), model(repeated)[:, :5], rtol=0, atol=1e-12)


def test_gpt_starts_at_the_loss_of_a_guess_and_learns():
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(0, 17, (4, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(30):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(17.0).log().item(), abs=0.1)
    assert losses[-1] < 0.5


def test_gpt_drops_out_in_training_only():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=17, context=12, width=16, depth=3, heads=4, dropout=0.5))
    tokens = torch.randint(0, 17, (1, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_ties_head_and_embedding_if_asked(tied):
    model = GPT(GPTConfig(vocabulary=17, context=12, width=16, depth=1, heads=4, tied_embedding=tied))
    assert (model.head.weight is model.embed.token.weight) == tied
    # Blocks add to the residual stream by weights that are smaller with depth.
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"width": 10, "heads": 4}, "width 10 is no multiple of 4 heads"),
        ({"depth": 0}, "depth is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_malformed_sizes(sizes, expected):
    with pytest.raises(HeteroError, match=expected):
        GPTConfig(**sizes)


def test_errors_name_what_is_known():
    with pytest.raises(HeteroError, match=r"'vit_2b' is not known: give one of vit_base, .*gpt_1_4b"):
        build_preset("vit_2b")
    with pytest.raises(HeteroError, match="depth is 0"):
        build_preset("vit_base", depth=0)
    with pytest.raises(HeteroError, match="13 tokens and the model a context of 12"):
        GPT(SMALL)(torch.zeros(1, 13, dtype=torch.long))
