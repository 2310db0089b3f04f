"""Chains out of exported graphs compute what the model does, whole and in stages; what they cannot do they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.models.chain import check_chain, owned_tensors
from lightning_hetero.models.chains.exported import ExportedUnits, exported_chain
from lightning_hetero.profiler.meta import meta_copy

from . import stage_runs
from .exported_models import (
    Anyhow,
    Branches,
    Containers,
    Loss,
    Masked,
    Moving,
    Outputs,
    Overwrites,
    Pair,
    Residual,
    Silent,
    Single,
    Switches,
    Tied,
    TwoHeads,
    convnext,
    drawn,
    made,
    mixer,
    resnet,
    swin,
)
from .stage_runs import run_in_stages, run_whole

POINTER = "give the model a method unit_chain"


TOKENS = torch.tensor([[1, 2, 3, 0], [4, 0, 6, 5], [0, 1, 1, 6]])
PADDED = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
IMAGES = drawn(3, 3, 16, 16)
MASKED = {"mask": PADDED, "bias": {"hidden": drawn(3, 6)}, "scale": 0.5}
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "resnet": (resnet, (IMAGES,), {}),
    "convnext": (convnext, (drawn(2, 3, 32, 32),), {}),
    "mixer": (mixer, (IMAGES[..., :8, :8],), {}),
    "swin": (swin, (IMAGES,), {}),
    "residual": (Residual, (drawn(3, 4),), {}),
    "masked": (Masked, (TOKENS,), MASKED),
    "unmasked": (Masked, (TOKENS,), {}),
    "tied": (Tied, (TOKENS,), {}),
    "moving": (Moving, (drawn(3, 4),), {}),
    "two heads": (TwoHeads, (drawn(3, 4),), {}),
}
_exported: dict[str, tuple[nn.Module, ExportedUnits]] = {}


def exported(case: str) -> tuple[nn.Module, ExportedUnits]:
    """A new model of a case, and its graphs, which are made once."""
    make, args, kwargs = CASES[case]
    if case not in _exported:
        model = made(make)
        _exported[case] = model, ExportedUnits(model, args, kwargs)
    model, units = _exported[case]
    return copy.deepcopy(model).train(), units


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_whole_and_in_stages(case: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, units = exported(case)
    _, args, kwargs = CASES[case]
    model.train(training)
    check_chain(model, units.chain_of(model))
    expected = run_whole(model, lambda whole: whole, args, kwargs)
    stage_runs.assert_same(run_whole(model, lambda whole: units.chain_of(whole).run, args, kwargs), expected)
    monkeypatch.setattr(stage_runs, "find_chain", units.chain_of)
    count = len(units.chain_of(model).units)
    for borders in ([count // 2], range(1, count)):
        assert_close(run_in_stages(model, borders, args, kwargs), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", ["resnet", "moving"])
def test_buffers_change_as_in_the_model(case: str, training: bool) -> None:
    model, units = exported(case)
    model.train(training)
    other = copy.deepcopy(model)
    before = copy.deepcopy(dict(model.named_buffers()))
    for _ in range(2):
        model(*CASES[case][1])
        units.chain_of(other).run(*CASES[case][1])
    expected = dict(model.named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in other.named_buffers())
    assert all(torch.equal(buffer, expected[name]) != training for name, buffer in before.items())


def names_of(case: str) -> list[str]:
    model, units = exported(case)
    return [unit.name for unit in units.chain_of(model).units]


def test_units_are_called_by_the_module_of_their_parameters() -> None:
    assert names_of("resnet")[:4] == ["conv1", "bn1", "layer1.0", "layer2.0"]
    assert names_of("mixer") == ["stem.proj", "blocks.0", "blocks.0(2)", "blocks.1", "blocks.1(2)", "norm", "head"]
    assert names_of("residual") == ["stem", "position", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_what_is_changed_lives_in_one_unit() -> None:
    model, units = exported("moving")
    chain = units.chain_of(model)
    assert [unit.name for unit in chain.units] == ["a", "b", "shared", "d"]
    assert "bare.num_batches_tracked" in owned_tensors(model, chain.units[0])
    assert {"shared.running_mean", "c.weight", "shared.weight"} <= owned_tensors(model, chain.units[2]).keys()


def test_masks_travel_as_inputs_and_are_made_where_they_are_used() -> None:
    model, units = exported("masked")
    chain = units.chain_of(model)
    assert [unit.name for unit in chain.units] == ["embed", "blocks.0", "blocks.1", "head"]
    assert "input.mask" not in chain.units[0].reads
    assert set(chain.units[1].reads) == {"hidden", "input.mask"}
    assert chain.inputs == ("input.tokens", "input.mask", "input.bias.hidden", "samples")


def test_tied_parameters_are_in_every_unit_that_uses_them() -> None:
    model, units = exported("tied")
    chain = units.chain_of(model)
    owned = {unit.name: unit.tensors for unit in chain.units}
    assert owned["embed"] == ("embed.weight",)
    assert owned["head"] == ("head.weight", "unused")
    assert owned["first"] == ("first.weight", "first.bias")
    assert owned["second"] == ("second.weight", "second.bias")


@pytest.mark.parametrize(("case", "training"), [("residual", False), ("masked", True), ("resnet", False)])
def test_a_smaller_micro_batch_is_filled_up(case: str, training: bool) -> None:
    model, units = exported(case)
    model.train(training)

    def first(tree: Any, count: int) -> Any:
        if isinstance(tree, dict):
            return {name: first(part, count) for name, part in tree.items()}
        return tree[:count] if isinstance(tree, Tensor) else tree

    for count in (1, 2):
        args, kwargs = [first(each, count) for each in CASES[case][1]], first(CASES[case][2], count)
        expected = run_whole(model, lambda whole: whole, args, kwargs)
        assert_close(run_whole(model, lambda whole: units.chain_of(whole).run, args, kwargs), expected)


def test_filling_up_where_it_changes_results_is_refused() -> None:
    model, units = exported("resnet")
    message = (
        r"(?s)2 samples would be filled up to the example's 3, which changes the statistics of bn1 .*layer1\.0\.bn1"
    )
    with pytest.raises(UnsupportedError, match=message):
        units.chain_of(model).run(IMAGES[:2])
    model, units = exported("moving")
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)statistics of bare .*statistics of shared .*statistics of mean: use micro-batches of equal",
    ):
        units.chain_of(model).run(drawn(2, 4))


def test_filling_up_a_loss_is_refused() -> None:
    chain = exported_chain(made(Loss), (drawn(3, 4),), {})
    assert chain.run(drawn(3, 4)).ndim == 0
    with pytest.raises(UnsupportedError, match=r"changes an output of shape \[\], which is not per sample"):
        chain.run(drawn(2, 4))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((TOKENS.repeat(2, 1),), {"mask": PADDED.repeat(2, 1)}, r"has 6 samples and the example had 3: give 1 to 3"),
        ((TOKENS[:0],), {"mask": PADDED[:0]}, r"has 0 samples and the example had 3"),
        ((TOKENS[:, :2], PADDED), {}, r"tokens is \[3, 2\] of torch.int64 and was \[3, 4\] of torch.int64"),
        ((TOKENS, PADDED.double()), {}, r"mask is .* of torch.float64 and was"),
        ((TOKENS, PADDED[:2]), {}, r"mask is \[2, 4\]"),
        ((TOKENS, None), {}, r"mask is None and was a tensor in the example, which the graph is fixed to"),
        ((TOKENS, PADDED), {"scale": 2.0}, r"scale is 2.0 and was 0.5 in the example, which the graph is fixed to"),
        ((TOKENS, PADDED), {"bias": None}, r"bias is None and was .*|bias.hidden is None and was a tensor"),
        (
            (TOKENS, PADDED),
            {"bias": {"other": drawn(3, 6)}},
            r"bias.hidden is None.*bias.other is a tensor and was",
        ),
    ],
)
def test_arguments_that_differ_from_the_example_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    model, units = exported("masked")
    begin = units.chain_of(model).begin
    with pytest.raises(
        UnsupportedError, match=f"(?s)Masked was called with what its exported graph cannot do.*({message})"
    ):
        begin(*args, **({"scale": 0.5, "bias": MASKED["bias"]} | kwargs))


def test_the_way_in_which_arguments_are_given_does_not_matter() -> None:
    model, units = exported("masked")
    actual = units.chain_of(model).run(bias=MASKED["bias"], mask=PADDED, tokens=TOKENS, scale=0.5)
    stage_runs.assert_same(stage_runs.detached(actual), stage_runs.detached(model(TOKENS, **MASKED)))


def test_a_forward_of_any_signature() -> None:
    model = made(Anyhow)
    chain = exported_chain(model, (drawn(3, 4), 2.0, drawn(3, 1)), {"last": drawn(3, 4)})
    assert chain.inputs == ("input.x", "input.more.0", "input.others.last", "samples")
    args = (-drawn(3, 4), 2.0, 3 * drawn(3, 1))
    assert torch.equal(chain.run(*args, last=drawn(3, 4)), model(*args, last=drawn(3, 4)))


def test_outputs_come_in_the_containers_of_the_model() -> None:
    model = made(Containers)
    chain, expected = exported_chain(model, (TOKENS,), {"mask": PADDED}), model(TOKENS, mask=PADDED)
    actual = chain.run(TOKENS, mask=PADDED)
    assert (type(actual), type(actual.other), actual.other.others) == (Pair, Outputs, [None, 3])
    assert torch.equal(actual.one, expected.one)
    assert torch.equal(actual.other.first, expected.other.first)
    assert chain.run(TOKENS[:1], mask=PADDED[:1]).other.first.shape == (1, 6)


def test_a_module_in_another_mode_is_refused_and_one_that_stays_in_it_is_not() -> None:
    model, units = exported("resnet")
    model.layer1.eval()
    with pytest.raises(UnsupportedError, match=r"layer1\.0\.bn1 is in evaluation mode, and was not when exported"):
        units.chain_of(model).run(IMAGES)
    expected = run_whole(model, lambda whole: whole, (IMAGES,), {})
    chain_of = ExportedUnits(model, (IMAGES,), {}).chain_of
    assert not model.layer1[0].bn1.training
    assert model.training
    assert_close(run_whole(model, lambda whole: chain_of(whole).run, (IMAGES,), {}), expected)


def test_exporting_changes_nothing_in_the_model_and_draws_no_random_numbers() -> None:
    model = made(Moving).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    chain = exported_chain(model, (drawn(3, 4),), {})
    assert not model.training
    with torch.inference_mode():
        assert torch.equal(chain.run(drawn(3, 4)), model(drawn(3, 4)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("case", ["residual", "masked", "moving", "swin"])
@pytest.mark.parametrize("training", [True, False])
def test_graphs_follow_the_model_to_another_device(case: str, training: bool) -> None:
    model, units = exported(case)
    model.train(training)
    _, args, kwargs = CASES[case]

    def there(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: there(part) for name, part in tree.items()}
        return tree.to("meta") if isinstance(tree, Tensor) else tree

    chain = units.chain_of(meta_copy(model))
    outputs = stage_runs.tensors_in(stage_runs.detached(chain.run(*map(there, args), **there(kwargs))))
    assert {output.device.type for output in outputs} == {"meta"}
    whole = run_whole(copy.deepcopy(model), lambda whole: units.chain_of(whole).run, args, kwargs)
    stage_runs.assert_same(whole, run_whole(model, lambda whole: whole, args, kwargs))


def test_a_model_without_values_has_a_chain() -> None:
    with torch.device("meta"):
        model = Residual()
    model.plain = torch.zeros(6)
    chain = exported_chain(model, (torch.zeros(3, 4, device="meta"),), {})
    assert [unit.name for unit in chain.units] == ["stem", "position", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_mixed_precision() -> None:
    model = Residual().float()
    model.plain = model.plain.float()
    chain = exported_chain(model.eval(), (drawn(3, 4).float(),), {})
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(drawn(3, 4).float())
        assert torch.equal(chain.run(drawn(3, 4).float()), expected)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Branches, r"split by torch\.export: Could not guard on data-dependent expression"),
        (Single, r"nowhere between two of its parameters is a single tensor left"),
        (Overwrites, r"its forward changes input\.x in place"),
        (Silent, r"its forward returns no tensor"),
    ],
)
def test_what_cannot_be_split_is_refused(cls: type[nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{cls.__name__} could not .*{message}.*{POINTER}"):
        exported_chain(made(cls), (drawn(3, 4),), {})


def test_a_forward_that_is_bound_to_one_object_is_refused() -> None:
    model = made(Residual)
    weight = model.head.weight
    model.head.forward = lambda x: x @ weight.T
    with pytest.raises(UnsupportedError, match=r"Residual could not .*holds the parameters of one object"):
        exported_chain(model, (drawn(3, 4),), {})


def test_a_model_with_other_units_in_evaluation_is_refused_when_it_is_evaluated() -> None:
    model = made(Switches)
    chain = exported_chain(model, (drawn(3, 4),), {})
    assert torch.equal(chain.run(drawn(3, 4)), model(drawn(3, 4)))
    model.eval()
    with pytest.raises(UnsupportedError, match=f"Switches could not .*no place that matches.*{POINTER}"):
        chain.run(drawn(3, 4))
