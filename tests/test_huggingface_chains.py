"""Chains of transformers' decoders compute what these do, to the bit, and refuse arguments that they cannot do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import owned_tensors
from lightning_hetero.models.chains import find_chain, has_chain
from lightning_hetero.models.units import find_units

from .stage_runs import assert_exact, assert_same, detached

transformers = pytest.importorskip("transformers")

TOKENS = 7
GPT2 = {"vocab_size": 19, "n_positions": 12, "n_embd": 8, "n_layer": 3, "n_head": 2}
LLAMA = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
}
KINDS = [("GPT2", "LMHeadModel"), ("Llama", "ForCausalLM"), ("Mistral", "ForCausalLM"), ("Qwen2", "ForCausalLM")]
KINDS += [("Qwen3", "ForCausalLM")]


def decoder(kind: str, head: str = "Model", **options: Any) -> nn.Module:
    """A small model that is called as in training, without a cache."""
    sizes = GPT2 if kind == "GPT2" else LLAMA
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "use_cache": False, **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}{head}")(config).train()


def tokens(samples: int = 3) -> Tensor:
    return torch.randint(19, (samples, TOKENS), generator=torch.Generator().manual_seed(3))


def padding() -> Tensor:
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    mask[1, :2] = 0
    mask[2, 4:] = 0
    return mask


@pytest.mark.parametrize(("kind", "head"), KINDS)
def test_language_modelling(kind: str, head: str) -> None:
    model = decoder(kind, head)
    assert_exact(model, input_ids=tokens(), labels=tokens())
    assert_exact(model, tokens())


@pytest.mark.parametrize(("kind", "head"), KINDS)
def test_padded_samples_at_positions_of_their_own(kind: str, head: str) -> None:
    mask = padding()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    labels = tokens().masked_fill(mask == 0, -100)
    model = decoder(kind, head).double()
    assert_exact(model, input_ids=tokens(), attention_mask=mask, position_ids=positions, labels=labels)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
def test_the_bare_model(kind: str) -> None:
    assert_exact(decoder(kind), tokens(), attention_mask=padding())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_both_kinds_of_attention(kind: str, attention: str) -> None:
    model = decoder(kind, attn_implementation=attention)
    assert_exact(model, tokens(), attention_mask=padding())
    assert_exact(model, tokens())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "head"), KINDS[:2])
def test_tied_embeddings(kind: str, head: str, tied: bool) -> None:
    model = decoder(kind, head, tie_word_embeddings=tied)
    chain = find_chain(model)
    owners = [
        unit.name
        for unit in chain.units
        if any(tensor is model.get_input_embeddings().weight for tensor in owned_tensors(model, unit).values())
    ]
    assert owners == ([chain.units[0].name, "lm_head"] if tied else [chain.units[0].name])
    assert_exact(model, input_ids=tokens(), labels=tokens())


def test_sliding_windows() -> None:
    assert_exact(decoder("Mistral", sliding_window=3), tokens())
    assert_exact(decoder("Mistral", sliding_window=None), tokens(), attention_mask=padding())


def test_layers_of_two_kinds_get_their_masks() -> None:
    options = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    model = decoder("Qwen2", "ForCausalLM", **options)
    kinds = [unit.reads[1] for unit in find_chain(model).units[1:4]]
    assert kinds == ["full_attention_mask", "sliding_attention_mask", "sliding_attention_mask"]
    assert_exact(model, input_ids=tokens(), labels=tokens(), attention_mask=padding())


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_packed_samples_do_not_see_each_other(kind: str) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(3, -1)
    assert_exact(decoder(kind), tokens(), position_ids=positions)


def test_rotary_tables_that_grow_with_the_sequence() -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert_exact(decoder("Llama", rope_parameters=scaled, max_position_embeddings=5), tokens())


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_activation_checkpointing_is_kept(kind: str, use_reentrant: bool) -> None:
    model = decoder(kind)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_exact(model, tokens())


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_tuple_where_the_config_says_so(kind: str) -> None:
    model = decoder(kind, return_dict=False)
    assert isinstance(find_chain(model).run(tokens()), tuple)
    assert_exact(model, tokens())
    assert_exact(model, tokens(), return_dict=False)


@pytest.mark.parametrize(("kind", "head"), KINDS[:2])
def test_a_tuple_from_language_modelling(kind: str, head: str) -> None:
    # transformers 5.24 itself fails on config.return_dict=False here, and can only be asked for a tuple in the call.
    model = decoder(kind, head).eval()
    expected = model(tokens(), labels=tokens(), return_dict=False)
    model.config.return_dict = False
    assert_same(find_chain(model).run(tokens(), labels=tokens()), expected)


def test_a_cache_in_the_config_is_not_made() -> None:
    model = decoder("Llama", "ForCausalLM", use_cache=True).eval()
    output = find_chain(model).run(tokens())
    assert list(detached(output)) == ["logits"]
    torch.testing.assert_close(output.logits, model(tokens()).logits)


@pytest.mark.parametrize(("kind", "head"), KINDS)
def test_units_are_named_and_hold_what_structure_finds(kind: str, head: str) -> None:
    model = decoder(kind, head)
    names = [unit.name for unit in find_chain(model).units]
    if kind == "GPT2":
        assert names == ["transformer.wte", *[f"transformer.h.{i}" for i in range(3)], "transformer.ln_f", "lm_head"]
    else:
        assert names == ["model.embed_tokens", *[f"model.layers.{i}" for i in range(3)], "model.norm", "lm_head"]
    owned = [module for unit in find_chain(model).units for module in unit.modules]
    assert all(any(f"{unit.name}.".startswith(f"{module}.") for module in owned) for unit in find_units(model))


@pytest.mark.parametrize(("kind", "head"), KINDS[:2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_cache": True}, "use_cache is True, .*: leave it out, or give use_cache=False"),
        ({"past_key_values": (1,)}, r"past_key_values is \(1,\), .*: leave it out"),
        ({"output_attentions": True}, "output_attentions is True"),
        ({"output_hidden_states": True}, "output_hidden_states is True"),
        ({"inputs_embeds": torch.zeros(3, TOKENS, 8)}, "inputs_embeds is a tensor, .*: give input_ids"),
        ({"logits_to_keep": 1}, "logits_to_keep is 1"),
        ({"is_causal": False}, "is_causal is False"),
        ({"num_items_in_batch": 4}, "num_items_in_batch is 4"),
        ({"return_dict": False}, r"return_dict .*: set model\.config\.return_dict = False"),
        ({"return_dict": False, "logits_to_keep": 1}, "logits_to_keep is 1(.|\n)*return_dict is False"),
        ({"use_cache": True, "logits_to_keep": 1}, "use_cache is True(.|\n)*logits_to_keep is 1"),
    ],
)
def test_an_argument_that_stages_cannot_do_is_refused_by_name(
    kind: str, head: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_chain(decoder(kind, head)).run(input_ids=tokens(), **arguments)


def test_arguments_that_change_nothing_are_taken() -> None:
    chain = find_chain(decoder("Llama", "ForCausalLM"))
    chain.run(tokens(), use_cache=False, logits_to_keep=0, return_dict=True, cache=None, output_attentions=False)
    chain.run(tokens(), return_dict=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "LlamaModel was called without input_ids"),
        ({"input_ids": tokens()[0]}, r"input_ids of shape \(7,\)"),
        ({"input_ids": tokens(), "attention_mask": {}}, "attention_mask a dict"),
        ({"input_ids": tokens(), "labels": tokens()}, "labels is a tensor"),
    ],
)
def test_an_argument_of_a_wrong_form_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_chain(decoder("Llama")).run(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("output_attentions", True), ("output_hidden_states", True), ("is_causal", True), ("is_causal", False)],
)
def test_a_config_that_asks_for_what_stages_cannot_do_is_refused(name: str, value: bool) -> None:
    model = decoder("Llama", "ForCausalLM", attn_implementation="eager")
    setattr(model.config, name, value)
    with pytest.raises(UnsupportedError, match=rf"config\.{name} is {value}"):
        find_chain(model).run(tokens())


def test_a_mask_that_is_no_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("Llama")
    # As for flex_attention, whose BlockMask torch compiles for seconds.
    monkeypatch.setattr(f"{type(model).__module__}.create_causal_mask", lambda cache, **_: [])
    with pytest.raises(UnsupportedError, match=r"mask that is a list and no tensor: set another .* than 'sdpa'"):
        find_chain(model).run(tokens())


class LoudModel(transformers.LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class LoudHead(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_with_a_forward_of_its_own_is_refused() -> None:
    config = transformers.LlamaConfig(**LLAMA)
    with pytest.raises(UnsupportedError, match=r"LoudHead cannot .*:\n  - it overrides LlamaForCausalLM\.forward"):
        find_chain(LoudHead(config))
    model = transformers.LlamaForCausalLM(config)
    model.model = LoudModel(config)
    with pytest.raises(UnsupportedError, match=r"LoudModel cannot .*:\n  - it overrides LlamaModel\.forward"):
        find_chain(model)
    model.model = nn.Identity()
    with pytest.raises(UnsupportedError, match=r"its model is Identity and no LlamaModel"):
        find_chain(model)


def test_other_heads_and_other_models_of_transformers_are_refused() -> None:
    assert not has_chain(transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA)))
    assert not has_chain(transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**GPT2)))


def test_a_layer_that_the_config_leaves_out_is_refused() -> None:
    model = decoder("Llama")
    model.config.num_hidden_layers = 2
    with pytest.raises(UnsupportedError, match=r"no unit owns layers\.2\."):
        find_chain(model)


def test_transformers_is_not_imported_for_other_models() -> None:
    code = (
        "import sys\nfrom torch import nn\nfrom lightning_hetero.models.chains import has_chain\n"
        "assert has_chain(nn.Sequential(nn.Linear(2, 2))) and not has_chain(nn.Linear(2, 2))\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
