"""What the options of hetero_fsdp do: orders of collectives, types, and the same numbers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_hetero.strategies.opening import Opening
from lightning_hetero.strategies.options import ShardingOptions
from tests.fits import Classifier, Fit, cluster_for
from tests.harness import WarmRanks
from tests.option_fits import WIDTHS, fitted, in_flight_of, of_types, orders_of, said_and_seen, without_overlap

FORWARD = {
    "ahead": "G0 G1 F0 G2 F1 F2",
    "two ahead": "G0 G1 G2 F0 F1 F2",
    "none": "G0 F0 G1 F1 G2 F2",
}
BACKWARD = {
    "pre": "G2 G1 B2 R2 G0 B1 R1 B0 R0",
    "pre, two ahead": "G2 G1 G0 B2 R2 B1 R1 B0 R0",
    "post": "G2 B2 G1 R2 B1 G0 R1 B0 R0",
    "post, two ahead": "G2 B2 G1 G0 R2 B1 R1 B0 R0",
    "none": "G2 B2 R2 G1 B1 R1 G0 B0 R0",
    "gathered": "B2 R2 B1 R1 B0 R0",
}
ORDERS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "ahead", "pre"),
    ({"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True, "limit_all_gathers": True}, "ahead", "pre"),
    ({"backward_prefetch": "BACKWARD_POST"}, "ahead", "post"),
    ({"backward_prefetch": "NONE"}, "ahead", "none"),
    ({"forward_prefetch": False}, "none", "pre"),
    ({"limit_all_gathers": 1}, "none", "none"),
    ({"limit_all_gathers": 3}, "two ahead", "pre, two ahead"),
    ({"limit_all_gathers": False}, "two ahead", "pre, two ahead"),
    ({"limit_all_gathers": 3, "backward_prefetch": "BACKWARD_POST"}, "two ahead", "post, two ahead"),
    ({"limit_all_gathers": False, "backward_prefetch": "NONE"}, "two ahead", "none"),
]


def test_the_order_of_gathers_computes_and_reductions(ranks: WarmRanks) -> None:
    fit = Fit(network="mlp", shares=(4, 2))  # no batch looks like a layer
    fits = [fit.on(options=options) for options, _, _ in ORDERS]
    for found in ranks.run(2, orders_of, fits):
        for (options, forward, backward), seen in zip(ORDERS, found, strict=True):
            assert seen == (FORWARD[forward], BACKWARD[backward]), options


def test_parameters_that_stay_gathered_are_not_gathered_again(ranks: WarmRanks) -> None:
    fit = Fit(network="mlp", shares=(4, 2), reshard=False)
    fits = [fit.on(options={"backward_prefetch": when}) for when in ("BACKWARD_PRE", "BACKWARD_POST", "NONE")]
    for found in ranks.run(2, orders_of, fits):
        assert found == [(FORWARD["two ahead"], BACKWARD["gathered"])] * 3


def test_what_stays_gathered_is_in_flight_at_once_where_there_is_room(ranks: WarmRanks) -> None:
    fit = Fit(network="mlp", shares=(4, 2), reshard=False)
    parameters = 8 * sum(rows * (columns + 1) for columns, rows in itertools.pairwise(WIDTHS))
    limited = fit.on(options={"limit_all_gathers": True})
    cases = [(fit, 10 * parameters, False), (fit, 10 * parameters - 1, False), (limited, 2**30, False)]
    for found in ranks.run(2, in_flight_of, [*cases, (fit, 2**30, True)]):
        assert found == [
            (FORWARD["two ahead"], 5),
            (FORWARD["ahead"], 2),
            (FORWARD["ahead"], 5),
            (FORWARD["two ahead"], 2),
        ]


@pytest.mark.parametrize(
    ("network", "reshard"),
    [*(pytest.param("vit", each, marks=pytest.mark.slow) for each in (True, False)), ("mlp", True), ("mlp", False)],
)
def test_numbers_are_the_same_under_all_orders(ranks: WarmRanks, network: str, reshard: bool) -> None:
    fit = Fit(network=network, shares=(3, 2), max_steps=3, reshard=reshard)
    several: list[dict[str, Any]] = [{"activation_checkpointing": True}, {"activation_checkpointing": 2}]
    several += [options for options, _, _ in ORDERS[2:]] if reshard else [{"backward_prefetch": "BACKWARD_POST"}]
    expected, *found = ranks.run(2, fitted, [fit, *(fit.on(options=options) for options in several)])[0]
    for options, outcome in zip(several, found, strict=True):
        for name, value in expected.parameters.items():
            assert torch.equal(value, outcome.parameters[name]), (options, name)
        assert outcome.logged == expected.logged, options


def test_what_does_nothing_is_said_once(ranks: WarmRanks) -> None:
    options = {"cpu_offload": True, "compile": True, "backward_prefetch": "NONE", "sharding_strategy": "SHARD_GRAD_OP"}
    said, _ = ranks.run(2, said_and_seen, of_types("a", "b"), options, fits=2)[0]
    assert sorted(text.split(": ", 1)[1].split(" does")[0] for text in said) == [
        "backward_prefetch=NONE",
        "compile",
        "cpu_offload",
    ]


def test_nothing_is_said_of_options_that_do_something(ranks: WarmRanks) -> None:
    options = {"backward_prefetch": "NONE", "sharding_strategy": "FULL_SHARD", "cpu_offload": False, "compile": False}
    assert ranks.run(2, said_and_seen, of_types("a", "b"), options)[0][0] == []


# -- mixed precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "gathered", "output"),
    [
        ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, "bfloat16", "bfloat16"),
        ({"param_dtype": "bf16", "output_dtype": "fp32"}, "bfloat16", "float32"),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64), "bfloat16", "float64"),
        ({"reduce_dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_parameters_compute_in_the_type_asked_for_and_are_kept_in_their_own(
    ranks: WarmRanks, policy: Any, gathered: str, output: str
) -> None:
    options = {"mixed_precision": policy, "sharding_strategy": "SHARD_GRAD_OP"}
    for _, seen in ranks.run(2, said_and_seen, cluster_for(2), options):
        assert seen["output"] == f"torch.{output}"
        assert seen["gathered"] == f"torch.{gathered}"
        assert seen["kept"] == "torch.float32"


@pytest.mark.parametrize(
    "policy", [{"reduce_dtype": "float32"}, pytest.param({"param_dtype": "float32"}, marks=pytest.mark.slow)]
)
def test_gradients_reduced_in_another_type_are_waited_for_before_they_are_cast(
    ranks: WarmRanks, policy: dict[str, str]
) -> None:
    fit = Fit(network="vit", shares=(3, 2), max_steps=4, options={"mixed_precision": policy})
    expected = ranks.run(2, without_overlap, fit)
    for (one, exact), other in zip(ranks.run(2, fitted, [fit, fit.on(options={})]), expected, strict=True):
        for name, value in other.parameters.items():
            assert torch.equal(value, one.parameters[name]), name
        assert any(not torch.equal(value, exact.parameters[name]) for name, value in one.parameters.items())


def test_a_measurement_under_other_options_is_another_one() -> None:
    module: Any = Classifier("mlp")
    module._trainer = SimpleNamespace(global_step=0)

    def key(groups: tuple[tuple[int, ...], ...] = ((0, 1),), optimizers: Any = (), **options: Any) -> str:
        strategy = SimpleNamespace(
            lightning_module=module,
            cluster=of_types("a", "b"),
            global_rank=0,
            world_size=2,
            reshards=True,
            costs=None,
            precision_plugin=SimpleNamespace(precision="32-true"),
            options=ShardingOptions(**options),
            layout=SimpleNamespace(groups=groups),
            optimizers=optimizers,
        )
        first: Any = SimpleNamespace(batch=lambda samples: torch.zeros(samples, 64), loader=None)
        opening: Any = Opening(strategy, "off", False)  # type: ignore[arg-type]
        found: str = opening._cache_key(first, 4).file_name
        return found

    keys = {key(), key(activation_checkpointing=True), key(mixed_precision={"param_dtype": "bfloat16"}), key()}
    assert len(keys) == 3
    keys |= {key(groups=((0,), (1,))), key(optimizers=[torch.optim.AdamW(module.parameters())])}
    assert len(keys) == 5


def test_a_group_of_one_rank_gathers_after_its_gradients_too(ranks: WarmRanks) -> None:
    fit = Fit(network="vit", shares=(3, 2), max_steps=3, groups=((0,), (1,)))
    several = [fit, *(fit.on(options={"backward_prefetch": when}) for when in ("BACKWARD_POST", "NONE"))]
    expected, *found = ranks.run(2, fitted, several)[0]
    for outcome in found:
        for name, value in expected.parameters.items():
            assert torch.equal(value, outcome.parameters[name]), name
