"""Chains of units compute what the model does, to the bit, whole and in stages; what they cannot do they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import ChainUnit, UnitChain, check_chain, owned_tensors, run_unit
from lightning_hetero.models.chains import find_chain, has_chain
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.models.units import find_units

from .stage_runs import assert_exact, run_in_stages

SMALL = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
SMALL_GPT = GPTConfig(11, context=6, width=8, depth=3, heads=2, dropout=0.1)


def make(cls: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """A small model with weights far from their initial values, many of which are zero."""
    torch.manual_seed(0)
    model = cls(**{**SMALL, **options})
    return randomised(model)


def randomised(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def vit(**options: Any) -> nn.Module:
    return make(timm.models.VisionTransformer, **options)


def images(height: int = 8, width: int = 8) -> Tensor:
    return torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(2))


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reg_tokens": 2},
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "global_pool": "avg", "reg_tokens": 1, "no_embed_class": True},
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "token", "fc_norm": True},
        {"global_pool": "avgmax"},
        {"global_pool": "max"},
        {"global_pool": "map"},
        {"global_pool": "prr"},
        {"global_pool": ""},
        {"global_pool": "", "num_classes": 0},
        {"final_norm": False},
        {"pos_embed": "none"},
        {"no_embed_class": True, "reg_tokens": 2, "init_values": 0.5},
        {"pre_norm": True, "qk_norm": True},
        {"patch_drop_rate": 0.5, "pos_drop_rate": 0.1, "drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.2},
        {"block_fn": timm.models.vision_transformer.ParallelScalingBlock},
        {"depth": 1},
    ],
    ids=str,
)
def test_vision_transformers(options: dict[str, Any]) -> None:
    assert_exact(vit(**options), images())


def test_a_vision_transformer_for_images_of_any_size() -> None:
    assert_exact(vit(dynamic_img_size=True), images(12, 8))
    assert_exact(vit(dynamic_img_size=True, dynamic_img_pad=True, class_token=False, global_pool="avg"), images(10, 7))


def test_a_vision_transformer_with_an_attention_mask() -> None:
    assert_exact(vit(), images(), attn_mask=causal(5))
    assert_exact(vit().double(), images().double(), causal(5))


def test_a_vision_transformer_in_evaluation_mode() -> None:
    assert_exact(vit(patch_drop_rate=0.5, drop_rate=0.5).eval(), images())


@pytest.mark.parametrize("cls", [timm.models.VisionTransformer, Eva])
def test_activation_checkpointing_is_kept(cls: Callable[..., nn.Module]) -> None:
    model = make(cls, proj_drop_rate=0.1)
    model.set_grad_checkpointing()
    assert_exact(model, images())
    assert_exact(model, images(), attn_mask=causal(5))
    calls: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    counts = []
    for forward in (model, find_chain(model).run):
        for options in ({}, {"attn_mask": causal(5)}):
            calls.clear()
            forward(images(), **options).sum().backward()
            counts.append(len(calls))
    assert counts[:2] == counts[2:] == ([2, 1] if cls is timm.models.VisionTransformer else [2, 2])


def test_frozen_parameters_get_no_gradient() -> None:
    model = vit()
    model.patch_embed.requires_grad_(False)
    model.cls_token.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    assert_exact(model, images())


@pytest.mark.parametrize("distilled_training", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_distilled_vision_transformer(distilled_training: bool, training: bool) -> None:
    model = make(VisionTransformerDistilled, drop_rate=0.1)
    model.set_distilled_training(distilled_training)
    model.train(training)
    assert_exact(model, images())
    output = find_chain(model).run(images())
    assert isinstance(output, tuple) == (distilled_training and training)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rot_pos_emb": True},
        {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "class_token": False, "attn_type": "rope"},
        {"use_rot_pos_emb": True, "rope_type": "mixed", "attn_type": "rope"},
        {"use_rot_pos_emb": True, "rope_type": "dinov3", "num_reg_tokens": 2, "rope_jitter_coords": 2.0},
        {"use_rot_pos_emb": True, "patch_drop_rate": 0.5, "attn_type": "rope"},
        {"use_rot_pos_emb": True, "rope_type": "mixed", "patch_drop_rate": 0.5, "attn_type": "rope"},
        {"global_pool": "map", "use_pre_transformer_norm": True},
        {"global_pool": "token", "no_embed_class": True, "num_reg_tokens": 1},
        {"use_post_norm": True, "init_values": 0.5},
        {"swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False, "scale_attn_inner": True},
        {"pos_drop_rate": 0.1, "drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.2},
    ],
    ids=str,
)
def test_eva(options: dict[str, Any]) -> None:
    assert_exact(make(Eva, **options), images())


def test_eva_for_images_of_any_size_and_with_an_attention_mask() -> None:
    assert_exact(make(Eva, use_rot_pos_emb=True, dynamic_img_size=True), images(12, 8))
    assert_exact(make(Eva, use_rot_pos_emb=True), images(), attn_mask=causal(5))


def test_learned_rotary_tables_go_to_their_own_block_only() -> None:
    chain = find_chain(make(Eva, use_rot_pos_emb=True, rope_type="mixed"))
    assert chain.units[0].writes == ("hidden", "rope.0", "rope.1")
    assert [unit.reads for unit in chain.units[1:3]] == [("hidden", f"rope.{i}", "attn_mask") for i in range(2)]


@pytest.mark.parametrize("tied", [False, True])
def test_the_bundled_gpt(tied: bool) -> None:
    torch.manual_seed(0)
    model = randomised(GPT(replace(SMALL_GPT, tied_embedding=tied)))
    assert_exact(model, torch.randint(11, (2, 6)))
    chain = find_chain(model)
    assert [unit.name for unit in chain.units] == ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    shared = model.embed.token.weight
    owners = [unit.name for unit in chain.units if any(t is shared for t in owned_tensors(model, unit).values())]
    assert owners == (["embed", "head"] if tied else ["embed"])


def test_a_sequential_and_the_sequentials_in_it() -> None:
    class Skip(nn.Sequential):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + super().forward(hidden)

    blocks = nn.Sequential(Skip(nn.Linear(6, 6)), nn.Dropout(0.3), Skip(nn.Linear(6, 6)))
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), blocks, nn.Sequential(), nn.LayerNorm(6), nn.Linear(6, 6))
    assert [unit.name for unit in find_chain(model).units] == ["0", "1", "2.0", "2.1", "2.2", "4", "5"]
    assert_exact(model.double(), torch.randn(3, 4, dtype=torch.double))


def test_what_works_in_place_is_not_cut_from_what_it_works_on() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3, inplace=True)]
    model = nn.Sequential(*layers)
    assert [unit.modules for unit in find_chain(model).units] == [("0", "1"), ("2",), ("3", "4")]
    assert_exact(model, torch.randn(3, 4))


def test_repeated_sequentials_stay_whole_as_the_units_that_are_measured() -> None:
    def block(first: nn.Module) -> nn.Sequential:
        return nn.Sequential(first, nn.Linear(4, 4), nn.LayerNorm(4))

    model = nn.Sequential(nn.Linear(3, 4), block(nn.GELU()), block(nn.GELU()), block(nn.ReLU(inplace=True)))
    chain = find_chain(model)
    # the last one changes its input, which must not come from another stage
    assert [unit.modules for unit in chain.units] == [("0",), ("1",), ("2", "3")]
    inside = {name for unit in chain.units for name in unit.modules}
    assert {unit.name for unit in find_units(model)} == inside


def test_a_sequential_takes_one_tensor_and_passes_one_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    with pytest.raises(TypeError, match="positional"):
        find_chain(model).run(torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.raises(UnsupportedError, match=r"unit '1' of Sequential returns tuple and no tensor"):
        find_chain(model).run(torch.zeros(1, 4))


@pytest.mark.parametrize("model", [vit(), make(Eva), make(VisionTransformerDistilled), GPT(SMALL_GPT)])
def test_every_unit_that_is_found_by_structure_lies_in_one_of_the_chain(model: nn.Module) -> None:
    owned = [module for unit in find_chain(model).units for module in unit.modules]
    for unit in find_units(model):
        assert any(f"{unit.name}.".startswith(f"{module}.") for module in owned), unit.name


class Tower(nn.Module):
    """A model with a chain of its own, of which a test can change a part."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.stem, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))
        self.changes = changes

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.scale * self.stem(image))

    def unit_chain(self) -> UnitChain:
        stem = {"name": "stem", "modules": ("stem",), "tensors": ("scale",), "reads": ("image",)}
        stem["run"] = lambda values: {"hidden": self.scale * self.stem(values["image"])}
        head = ChainUnit("head", ("head",), lambda values: {"hidden": self.head(values["hidden"])})
        return UnitChain(
            (ChainUnit(**{**stem, **self.changes}), head),
            begin=lambda image: {"image": image},
            end=lambda values: values["hidden"],
            inputs=("image",),
        )


def test_a_model_with_a_chain_of_its_own() -> None:
    assert_exact(Tower(), torch.randn(3, 4))
    assert has_chain(Tower())


def test_the_own_chain_of_a_model_of_a_known_kind_wins() -> None:
    class Own(nn.Sequential):
        def unit_chain(self) -> UnitChain:
            unit = ChainUnit("all", ("0",), lambda values: {"hidden": self[0](values["hidden"])})
            return UnitChain((unit,), begin=lambda input: {"hidden": input}, end=lambda values: values["hidden"])

    assert [unit.name for unit in find_chain(Own(nn.Linear(2, 2))).units] == ["all"]


def test_the_runs_here_find_out_a_unit_that_uses_what_it_does_not_own() -> None:
    class Careless(Tower):
        def unit_chain(self) -> UnitChain:
            chain = super().unit_chain()
            head = ChainUnit("head", ("head",), lambda values: {"hidden": self.head(self.scale * values["hidden"])})
            return replace(chain, units=(chain.units[0], head))

    with pytest.raises(RuntimeError, match="meta"):
        run_in_stages(Careless(), [1], (torch.randn(3, 4),), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": ()}, "no unit owns scale"),
        ({"modules": ("stem", "body")}, "unit 'stem' owns 'body', which is not in the model"),
        ({"tensors": ("scale", "stem.gain")}, "unit 'stem' owns 'stem.gain', which is not in the model"),
        ({"tensors": ("scale", "body.gain")}, "unit 'stem' owns 'body.gain', which is not in the model"),
        ({"name": "head"}, "two units are called 'head'"),
        ({"reads": ("image", "mask")}, "unit 'stem' reads 'mask', which nothing wrote"),
        ({"writes": ("image",)}, "unit 'head' reads 'hidden', which nothing wrote"),
    ],
)
def test_a_chain_that_cannot_be_cut_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the unit chain of Tower is not valid:\n  - {message}"):
        find_chain(Tower(**changes))
    assert not has_chain(Tower(**changes))


def test_all_that_is_wrong_with_a_chain_is_said_at_once() -> None:
    chain = UnitChain((), begin=dict, end=dict, outputs=("logits",), inputs=())
    with pytest.raises(UnsupportedError, match="it has no unit\n  - end reads 'logits', which nothing wrote"):
        check_chain(Tower(), chain)


def test_a_unit_that_writes_other_values_than_it_says_is_refused() -> None:
    unit = find_chain(Tower(writes=("hidden", "mask"))).units[0]
    with pytest.raises(UnsupportedError, match="unit 'stem' wrote hidden and says that it writes hidden, mask"):
        run_unit(unit, {"image": torch.zeros(1, 4)})


def test_a_model_of_no_known_kind_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"Linear has no known units.*VisionTransformer.*method unit_chain"):
        find_chain(model)
    assert not has_chain(model)


def test_a_method_that_gives_no_chain_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.unit_chain = lambda: ["0"]
    with pytest.raises(UnsupportedError, match=r"Linear\.unit_chain gives list and no UnitChain"):
        find_chain(model)
    model.unit_chain = lambda: 1 / 0
    assert not has_chain(model)


class DoubledViT(timm.models.VisionTransformer):
    def forward_features(self, x: Tensor, **kwargs: Any) -> Tensor:
        return 2 * super().forward_features(x, **kwargs)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        return 2 * super().pool(x, pool_type)


class RenamedViT(timm.models.VisionTransformer):
    pass


class LoudEva(Eva):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LoudSequential(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class LoudGPT(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (make(DoubledViT), r"DoubledViT .*overrides VisionTransformer\.forward_features.*VisionTransformer\.pool"),
        (make(LoudEva), r"LoudEva cannot .*overrides Eva\.forward: give the model a method unit_chain"),
        (LoudSequential(nn.Linear(2, 2)), r"LoudSequential cannot .*overrides Sequential\.forward"),
        (LoudGPT(SMALL_GPT), r"LoudGPT cannot .*overrides GPT\.forward"),
    ],
)
def test_a_subclass_that_computes_something_else_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        find_chain(model)


@pytest.mark.parametrize("cls", [timm.models.VisionTransformer, VisionTransformerDistilled])
def test_a_model_whose_forward_was_replaced_is_refused(cls: Callable[..., nn.Module]) -> None:
    model = make(cls)
    model.forward = lambda x: x
    with pytest.raises(UnsupportedError, match=r"overrides VisionTransformer\w*\.forward:"):
        find_chain(model)


def test_a_subclass_that_computes_the_same_is_not_refused() -> None:
    assert_exact(make(RenamedViT), images())


def test_a_parameter_that_no_unit_of_a_known_kind_owns_is_refused() -> None:
    model = vit()
    model.temperature = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedError, match="no unit owns temperature"):
        find_chain(model)


@pytest.mark.parametrize("cls", [timm.models.VisionTransformer, Eva])
def test_a_causal_flag_is_refused(cls: Callable[..., nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=r"is_causal is True, .*: give a causal attn_mask"):
        find_chain(make(cls)).run(images(), is_causal=True)


def test_a_chain_can_be_found_for_a_model_without_values() -> None:
    with torch.device("meta"):
        assert has_chain(timm.create_model("vit_tiny_patch16_224"))


def test_a_module_that_is_there_twice_has_both_names():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu)
    given = torch.randn(2, 3)
    assert torch.equal(find_chain(model).run(given), model(given))
