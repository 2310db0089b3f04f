"""The unit chains of decoders of transformers 5: GPT-2, Llama, and those whose forward is Llama's.

They repeat what the forward of the bare model (``LlamaModel``) and of the one for language modelling
(``LlamaForCausalLM``) do, with the mask functions and output classes of the module that the model comes from. The
first unit makes attention masks, position numbers and rotary tables, which travel to the layers; labels travel to the
last one, which makes the loss. Nothing is cached and no hidden state or attention is kept, whatever the config says
of ``use_cache``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import ChainUnit, UnitChain, Values
from lightning_hetero.models.chains.recognition import PROTOCOL, known_classes, refuse_arguments, refuse_overrides

_MASK_FUNCTIONS = {
    "full_attention": "create_causal_mask",
    "sliding_attention": "create_sliding_window_causal_mask",
}
# What False asks for is what a chain does.
_OFF_BY_DEFAULT = {"use_cache", "output_attentions", "output_hidden_states"}
_ADVICE = {
    "inputs_embeds": "give input_ids",
    "use_cache": "leave it out, or give use_cache=False",
    "num_items_in_batch": "leave it out, and weigh the loss outside the model",
    "config.output_attentions": "set it to False",
    "config.output_hidden_states": "set it to False",
    "config.is_causal": "leave it None",
}


@dataclass(frozen=True)
class _Family:
    """Where the models of one kind have what.

    Args:
        module: of transformers, that defines the classes.
        bare: class of the model without a head.
        causal: class of the model for language modelling.
        inner: attribute of a ``causal`` with its ``bare``.
        embed: modules of the first unit, its main one first.
        layers: attribute of a ``bare`` with its layers.
        norm: attribute of a ``bare`` with the norm after them.
        outputs: classes of what ``bare`` and ``causal`` return.
        attention_kinds: from a ``bare``, for each of its layers, the key of the mask that it takes.
    """

    module: str
    bare: str
    causal: str
    inner: str
    embed: tuple[str, ...]
    layers: str
    norm: str
    outputs: tuple[str, str]
    attention_kinds: Callable[[Any], list[str]]


def _all_full(bare: Any) -> list[str]:
    return ["full_attention"] * bare.config.num_hidden_layers


def _all_alike(bare: Any) -> list[str]:
    kind = "full_attention" if bare.config.sliding_window is None else "sliding_attention"
    return [kind] * bare.config.num_hidden_layers


def _by_layer(bare: Any) -> list[str]:
    return list(bare.config.layer_types[: bare.config.num_hidden_layers])


def _llama_like(name: str, prefix: str, attention_kinds: Callable[[Any], list[str]]) -> _Family:
    return _Family(
        module=f"transformers.models.{name}.modeling_{name}",
        bare=f"{prefix}Model",
        causal=f"{prefix}ForCausalLM",
        inner="model",
        embed=("embed_tokens", "rotary_emb"),
        layers="layers",
        norm="norm",
        outputs=("BaseModelOutputWithPast", "CausalLMOutputWithPast"),
        attention_kinds=attention_kinds,
    )


_GPT2 = _Family(
    module="transformers.models.gpt2.modeling_gpt2",
    bare="GPT2Model",
    causal="GPT2LMHeadModel",
    inner="transformer",
    embed=("wte", "wpe", "drop"),
    layers="h",
    norm="ln_f",
    outputs=("BaseModelOutputWithPastAndCrossAttentions", "CausalLMOutputWithCrossAttentions"),
    attention_kinds=_all_full,
)
_FAMILIES = (
    _GPT2,
    _llama_like("llama", "Llama", _all_full),
    _llama_like("mistral", "Mistral", _all_alike),
    _llama_like("qwen2", "Qwen2", _by_layer),
    _llama_like("qwen3", "Qwen3", _by_layer),
)


def huggingface_chain(model: nn.Module) -> UnitChain | None:
    """The units of a GPT-2, Llama, Mistral, Qwen2 or Qwen3 of transformers: embeddings, layers, norm and head.

    A tied token embedding is owned by the first unit and by the head.

    Args:
        model: any model.

    Returns:
        The chain, or None for a model of another kind. It takes ``input_ids``, ``attention_mask``, ``position_ids``
        and, for language modelling, ``labels``.

    Raises:
        UnsupportedError: for a subclass that overrides ``forward``, or one whose inner model is of another kind.
    """
    for family in _FAMILIES:
        known = known_classes(model, {(family.module, family.bare), (family.module, family.causal)})
        if not known:
            continue
        refuse_overrides(model, known, ("forward",))
        decoder = _Decoder(model, family, is_causal=known[0].__name__ == family.causal)
        bare_classes = known_classes(decoder.bare, {(family.module, family.bare)})
        if not bare_classes:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be split into units: its {family.inner} is "
                f"{type(decoder.bare).__name__} and no {family.bare}: {PROTOCOL}"
            )
        refuse_overrides(decoder.bare, bare_classes, ("forward",))
        return decoder.chain()
    return None


class _Decoder:
    """What the units of one model do."""

    def __init__(self, model: nn.Module, family: _Family, is_causal: bool) -> None:
        self.model: Any = model
        self.family = family
        self.is_causal = is_causal
        self.prefix = f"{family.inner}." if is_causal else ""
        self.bare: Any = getattr(model, family.inner) if is_causal else model

    def chain(self) -> UnitChain:
        """All units, with the first and the last step."""
        kinds = self.family.attention_kinds(self.bare)
        tables = ("position_ids",) if self.family is _GPT2 else ("position_ids", "cos", "sin")
        embed = tuple(f"{self.prefix}{name}" for name in self.family.embed)
        units = [
            ChainUnit(
                embed[0],
                embed,
                self.embed,
                reads=("input_ids", "attention_mask", "position_ids"),
                writes=("hidden", *dict.fromkeys(_mask_name(kind) for kind in kinds), *tables),
            )
        ]
        for index, kind in enumerate(kinds):
            name = f"{self.prefix}{self.family.layers}.{index}"
            reads = ("hidden", _mask_name(kind), *tables)
            units.append(ChainUnit(name, (name,), partial(self.layer, index, _mask_name(kind)), reads=reads))
        norm = f"{self.prefix}{self.family.norm}"
        units.append(ChainUnit(norm, (norm,), self.norm))
        if not self.is_causal:
            return UnitChain(
                tuple(units), begin=self.begin, end=self.end, inputs=("input_ids", "attention_mask", "position_ids")
            )
        units.append(
            ChainUnit("lm_head", ("lm_head",), self.head, reads=("hidden", "labels"), writes=("loss", "logits"))
        )
        return UnitChain(
            tuple(units),
            begin=self.begin,
            end=self.end,
            inputs=("input_ids", "attention_mask", "position_ids", "labels"),
            outputs=("loss", "logits"),
        )

    def begin(self, *args: Any, **kwargs: Any) -> Values:
        """The arguments of forward that a chain can do, once the others are refused."""
        bound = inspect.signature(type(self.model).forward).bind(self.model, *args, **kwargs)
        given = dict(list(bound.arguments.items())[1:])
        given |= given.pop("kwargs", {})
        names = ["input_ids", "attention_mask", "position_ids", *(["labels"] if self.is_causal else [])]
        values = {name: given.pop(name, None) for name in names}
        self._refuse_others(given)
        self._check_values(values)
        return values

    def _refuse_others(self, given: dict[str, Any]) -> None:
        # The output is made in another process than the one that sees this argument.
        return_dict = given.pop("return_dict", None)
        for name in ("output_attentions", "output_hidden_states", "is_causal"):
            given[f"config.{name}"] = getattr(self.bare.config, name, None)
        if isinstance(given.get("logits_to_keep"), int) and given["logits_to_keep"] == 0:
            del given["logits_to_keep"]
        refused = {
            name: value
            for name, value in given.items()
            if value is not None and not (value is False and name.removeprefix("config.") in _OFF_BY_DEFAULT)
        }
        if return_dict not in (None, self.model.config.return_dict):
            refused["return_dict"] = return_dict
        refuse_arguments(
            self.model, refused, {"return_dict": f"set model.config.return_dict = {return_dict}", **_ADVICE}
        )

    def _check_values(self, values: dict[str, Any]) -> None:
        name = type(self.model).__name__
        if values["input_ids"] is None:
            raise UnsupportedError(f"{name} was called without input_ids: give them")
        for argument, dimensions in {"input_ids": (2,), "attention_mask": (2, 4)}.items():
            value = values[argument]
            if value is None or (isinstance(value, Tensor) and value.ndim in dimensions):
                continue
            shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise UnsupportedError(f"{name} was called with {argument} {shape}: give a tensor (samples, tokens)")

    def embed(self, values: Values) -> Values:
        """Token and position embedding, and all that the layers take besides."""
        bare, position_ids = self.bare, values["position_ids"]
        embedded = getattr(bare, self.family.embed[0])(values["input_ids"])
        if position_ids is None:
            position_ids = torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)
        written = {"position_ids": position_ids}
        for kind in dict.fromkeys(self.family.attention_kinds(bare)):
            written[_mask_name(kind)] = self._mask(kind, embedded, values["attention_mask"], position_ids)
        if self.family is _GPT2:
            return {"hidden": bare.drop(embedded + bare.wpe(position_ids)), **written}
        cos, sin = bare.rotary_emb(embedded, position_ids)
        return {"hidden": embedded, "cos": cos, "sin": sin, **written}

    def _mask(self, kind: str, embedded: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Any:
        make_mask = getattr(sys.modules[self.family.module], _MASK_FUNCTIONS[kind])
        arguments = {
            "config": self.bare.config,
            "inputs_embeds": embedded,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        # The cache was called past_key_values before transformers 5.24, and has no default.
        names = inspect.signature(make_mask).parameters.keys() & {"cache", "past_key_values"}
        mask = make_mask(**arguments, **dict.fromkeys(names))
        if mask is not None and not isinstance(mask, Tensor):
            raise UnsupportedError(
                f"{type(self.model).__name__} has an attention mask that is a {type(mask).__name__} and no tensor: set "
                f"another attn_implementation than {self.bare.config._attn_implementation!r}, such as 'sdpa'"
            )
        return mask

    def layer(self, index: int, mask: str, values: Values) -> Values:
        """One decoder layer."""
        tables: dict[str, Any] = {"attention_mask": values[mask], "position_ids": values["position_ids"]}
        if self.family is not _GPT2:
            tables["position_embeddings"] = (values["cos"], values["sin"])
        hidden = getattr(self.bare, self.family.layers)[index](values["hidden"], **tables)
        return {"hidden": hidden}

    def norm(self, values: Values) -> Values:
        """The norm after the layers."""
        return {"hidden": getattr(self.bare, self.family.norm)(values["hidden"])}

    def head(self, values: Values) -> Values:
        """Logits, and the loss where there are labels."""
        logits, labels = self.model.lm_head(values["hidden"]), values["labels"]
        loss = None
        if labels is not None:
            loss = self.model.loss_function(logits=logits, labels=labels, vocab_size=self.model.config.vocab_size)
        return {"loss": loss, "logits": logits}

    def end(self, values: Values) -> Any:
        """The model's own output class, or a tuple where its config says so."""
        fields = dict(values) if self.is_causal else {"last_hidden_state": values["hidden"]}
        output = getattr(sys.modules[self.family.module], self.family.outputs[self.is_causal])(**fields)
        return output if self.model.config.return_dict else output.to_tuple()


def _mask_name(kind: str) -> str:
    return f"{kind}_mask"
