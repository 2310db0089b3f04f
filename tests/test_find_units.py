"""Units are found by structure: blocks of timm, transformers-like, Swin-like and plain models."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import timm
import torch
from torch import Tensor, nn

from lightning_hetero.models.units import find_units


def names(root: nn.Module, blocks: bool | None = None, wrap: set[type[nn.Module]] | None = None) -> list[str]:
    return [unit.name for unit in find_units(root, wrap) if blocks is None or unit.is_block == blocks]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def timm_model(name: str) -> nn.Module:
    return on_meta(lambda: timm.create_model(name))


def test_a_timm_vit() -> None:
    model = timm_model("vit_tiny_patch16_224")
    assert names(model) == ["patch_embed.proj", *[f"blocks.{i}" for i in range(12)], "norm", "head"]
    assert names(model, blocks=True) == [f"blocks.{i}" for i in range(12)]
    assert find_units(model)[1].module is model.blocks[0]


def test_a_timm_vit_of_one_block() -> None:
    model = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3)
    assert names(model, blocks=True) == ["blocks.0"]


@pytest.mark.parametrize(
    ("name", "stages", "outside"),
    [
        (
            "swin_tiny_patch4_window7_224",
            {"layers.0": 2, "layers.2": 6, "layers.3": 2},
            "layers.1.downsample.reduction",
        ),
        ("convnext_tiny", {"stages.0": 3, "stages.2": 9, "stages.3": 3}, "stages.1.downsample.1"),
    ],
)
def test_the_blocks_inside_the_stages_of_a_pyramid(name: str, stages: dict[str, int], outside: str) -> None:
    model = timm_model(name)
    blocks = names(model, blocks=True)
    for stage, depth in stages.items():
        assert [b for b in blocks if b.startswith(stage)] == [f"{stage}.blocks.{i}" for i in range(depth)]
    assert outside in names(model, blocks=False)


def test_a_stage_of_one_block_is_opened_like_the_others() -> None:
    model = timm_model("efficientnet_b0")
    blocks = names(model, blocks=True)
    assert blocks[:3] == ["blocks.0.0", "blocks.1.0", "blocks.1.1"]
    assert blocks[-1] == "blocks.6.0"
    assert "blocks" not in blocks


def test_the_layers_of_a_resnet() -> None:
    blocks = names(timm_model("resnet18"), blocks=True)
    assert blocks == [f"layer{stage}.{i}" for stage in (1, 2, 3, 4) for i in (0, 1)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(4, 4), nn.Linear(4, 4)


class DecoderLayer(nn.Module):
    """As in Llama, with a mixture of experts whose weights outnumber the rest."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.self_attn, self.norm = Attention(), nn.LayerNorm(4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(experts)])


class Decoder(nn.Module):
    def __init__(self, experts: tuple[int, ...] = (3, 3, 3)) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([DecoderLayer(n) for n in experts])
        self.norm = nn.LayerNorm(4)


class CausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Decoder(), nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


def test_a_transformers_like_decoder_keeps_its_layers_whole() -> None:
    assert names(CausalLM()) == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
        "lm_head",
    ]


def test_layers_that_differ_in_their_number_of_experts_are_still_the_blocks() -> None:
    assert names(Decoder((2, 3, 3, 3)), blocks=True) == [f"layers.{i}" for i in range(4)]


def test_torch_transformer_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 3), "head": nn.Linear(8, 2)})
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "head"]


def test_a_plain_sequential_gives_each_child_with_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2))
    assert names(model, blocks=True) == ["0", "3", "4"]


def test_a_sequential_of_a_backbone_and_a_head_is_not_cut_at_its_children() -> None:
    backbone = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=3)
    model = nn.Sequential(backbone, nn.Linear(1000, 2))
    assert names(model, blocks=True) == ["0.blocks.0", "0.blocks.1"]
    assert names(model)[-1] == "1"


def test_stem_and_head_beside_blocks_in_one_sequential() -> None:
    blocks = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))
    assert names(model) == ["0", "1", "2", "3"]
    assert names(model, blocks=True) == ["1", "2"]


def test_a_module_list_is_never_a_unit() -> None:
    """Layers that are pairs in a ModuleList: the pairs are never called, what is in them is."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([Attention(), nn.Linear(4, 4)]) for _ in range(2)])
    assert names(model, blocks=True) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_alternating_layers_are_one_stack() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Attention(), DecoderLayer(1), Attention(), DecoderLayer(1), Attention()])
    assert names(model, blocks=True) == [f"layers.{i}" for i in range(5)]


def test_wrap_overrides_the_structure() -> None:
    assert names(CausalLM(), blocks=True, wrap={Attention}) == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert names(CausalLM(), blocks=True, wrap={Decoder, Attention}) == ["model"]
    assert names(CausalLM(), blocks=True, wrap=set()) == []


def test_a_module_that_owns_parameters_and_holds_owners_is_one_unit() -> None:
    """nn.MultiheadAttention uses its out_proj's weight without calling it."""
    model = nn.Module()
    model.attention, model.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 2)
    assert names(model) == ["attention", "head"]


def test_units_of_a_lightning_module_are_disjoint_and_named_from_it() -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(1))
            self.wrapped = nn.ModuleDict({"net": CausalLM()})
            self.again = self.wrapped["net"]
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Tensor) -> Tensor:
            return x

    units = find_units(Module())
    assert [unit.name for unit in units][:2] == ["wrapped.net.model.embed_tokens", "wrapped.net.model.layers.0"]
    inside = [id(module) for unit in units for module in unit.module.modules()]
    assert len(inside) == len(set(inside))


def test_a_single_module_and_none_at_all() -> None:
    assert names(nn.Linear(2, 2)) == ["Linear"]
    assert names(nn.Sequential(nn.ReLU(), nn.Flatten())) == []
