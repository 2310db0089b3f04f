"""The options of hetero_fsdp: which values they take, where they may be said, and what each of them does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningCLI
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_hetero.errors import HeteroError, PlanError, UnsupportedError
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.options import ShardingOptions
from tests.fits import Classifier, cluster_for
from tests.harness import WarmRanks
from tests.option_fits import QUIET, layout_of, of_types, recorded_plan

PLAN = ShardPlan(4, (2, 2), ((0, 1),), ("d0", "d1"))

BAD: list[tuple[str, Any, list[str]]] = [
    ("sharding_strategy", "ZERO3", ["auto, FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_k"]),
    ("sharding_strategy", "HYBRID_0", ["HYBRID_k"]),
    ("sharding_strategy", "HYBRID_x", ["HYBRID_k"]),
    ("sharding_strategy", "full_shard", ["FULL_SHARD"]),
    ("sharding_strategy", 3, ["FULL_SHARD"]),
    ("backward_prefetch", "PRE", ["BACKWARD_PRE, BACKWARD_POST or NONE"]),
    ("backward_prefetch", True, ["BACKWARD_PRE, BACKWARD_POST or NONE"]),
    ("forward_prefetch", "yes", ["True or False"]),
    ("forward_prefetch", 1, ["True or False"]),
    ("limit_all_gathers", 0, ["a whole number in flight >= 1"]),
    ("limit_all_gathers", 1.5, ["a whole number in flight >= 1"]),
    ("cpu_offload", "cpu", ["True or False"]),
    ("activation_checkpointing", 0, ["every n-th block"]),
    ("activation_checkpointing", "all", ["every n-th block"]),
    ("mixed_precision", "bf16", ["param_dtype, reduce_dtype, output_dtype"]),
    ("mixed_precision", {"params": "bfloat16"}, ["mixed_precision.params='bfloat16'", "param_dtype"]),
    ("mixed_precision", {"param_dtype": "int8"}, ["mixed_precision.param_dtype='int8'", "float32, bfloat16"]),
    ("mixed_precision", {"cast_forward_inputs": 1}, ["mixed_precision.cast_forward_inputs=1", "True or False"]),
    ("compile", "inductor", ["True or False"]),
]


def says(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message, message


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=lambda each: str(each)[:30])
def test_a_bad_value_is_refused_by_name(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(HeteroError) as caught:
        HeteroFSDPStrategy(**{name: value})
    says(str(caught.value), words)
    if not isinstance(value, dict):
        says(str(caught.value), [f"{name}={value!r}"])


def test_all_bad_values_are_said_at_once() -> None:
    bad = {name: value for name, value, _ in BAD if not isinstance(value, dict)}
    with pytest.raises(HeteroError) as caught:
        HeteroFSDPStrategy(check_loss="yes", **bad)  # type: ignore[arg-type]
    says(str(caught.value), ["check_loss='yes'", *(f"{name}={value!r}" for name, value in bad.items())])


@pytest.mark.parametrize(
    ("sharding", "reshard", "agree"),
    [
        ("FULL_SHARD", True, True),
        ("FULL_SHARD", False, False),
        ("SHARD_GRAD_OP", False, True),
        ("SHARD_GRAD_OP", True, False),
        ("NO_SHARD", True, False),
        ("HYBRID_2", True, True),
        ("HYBRID_2", False, True),
        ("auto", False, True),
    ],
)
def test_two_names_for_one_thing_agree_or_are_refused(sharding: str, reshard: bool, agree: bool) -> None:
    if agree:
        assert HeteroFSDPStrategy(sharding_strategy=sharding, reshard_after_forward=reshard).options.reshards is reshard
        return
    with pytest.raises(HeteroError) as caught:
        HeteroFSDPStrategy(sharding_strategy=sharding, reshard_after_forward=reshard)
    says(str(caught.value), [f"sharding_strategy={sharding!r}", f"reshard_after_forward={reshard}", "leave one out"])


@pytest.mark.parametrize(
    ("sharding", "groups", "modes"),
    [
        ("FULL_SHARD", ((0, 1, 2, 3),), ("FULL_SHARD",)),
        ("SHARD_GRAD_OP", ((0, 1, 2, 3),), ("SHARD_GRAD_OP",)),
        ("NO_SHARD", ((0, 1, 2, 3),), ("NO_SHARD",)),
        ("HYBRID_4", ((0, 1, 2, 3),), ("FULL_SHARD",)),
        ("HYBRID_2", ((0, 1), (2, 3)), ("FULL_SHARD",) * 2),
        ("HYBRID_1", ((0,), (1,), (2,), (3,)), ("FULL_SHARD",) * 4),
    ],
)
def test_what_a_sharding_strategy_stands_for(sharding: str, groups: Any, modes: Any) -> None:
    assert ShardingOptions(sharding).layout(4) == (groups, modes, "")
    assert ShardingOptions("auto").layout(4) is None
    kept = ShardingOptions(sharding, reshard_after_forward=False).layout(4)
    assert kept is not None
    assert kept.modes == (("SHARD_GRAD_OP",) * len(groups) if "HYBRID" in sharding else modes)


# -- ranks and devices -------------------------------------------------------------------------------------------------


def test_groups_that_do_not_divide_the_ranks_are_refused_before_any_process() -> None:
    with pytest.raises(UnsupportedError) as caught:
        pl.Trainer(
            strategy=HeteroFSDPStrategy(cluster=cluster_for(6), sharding_strategy="HYBRID_4"), devices=6, **QUIET
        )
    says(str(caught.value), ["sharding_strategy='HYBRID_4'", "6 ranks", "HYBRID_1, HYBRID_2, HYBRID_3, HYBRID_6"])


@pytest.mark.parametrize(
    ("options", "precision", "said"),
    [
        ({"mixed_precision": {"param_dtype": "bfloat16"}}, "32-true", "mixed_precision="),
        ({"mixed_precision": {"reduce_dtype": "bf16"}}, "32-true", "mixed_precision="),
        ({"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, "32-true", "mixed_precision="),
        ({}, "bf16-mixed", "precision='bf16-mixed'"),
        ({}, "bf16-true", "precision='bf16-true'"),
    ],
)
def test_a_type_that_a_device_lacks_is_said_with_the_ranks(options: dict[str, Any], precision: Any, said: str) -> None:
    strategy = HeteroFSDPStrategy(cluster=of_types("H200", "V100-16GB", "A100-40GB", "T4"), **options)
    with pytest.raises(UnsupportedError) as caught:
        pl.Trainer(strategy=strategy, precision=precision, **QUIET)
    says(str(caught.value), [said, "bfloat16 is not there on ranks 1 (V100-16GB), 3 (T4)", "float32"])


@pytest.mark.parametrize("types", [("H200", "A100-40GB"), ("fast", "slow"), ("H100-NVL", "H200")])
def test_a_type_that_is_there_or_not_known_of_is_taken(types: tuple[str, ...]) -> None:
    strategy = HeteroFSDPStrategy(cluster=of_types(*types), mixed_precision={"param_dtype": "bfloat16"})
    assert pl.Trainer(strategy=strategy, precision="bf16-mixed", **QUIET).world_size == 2


def test_fp16_parameters_ask_for_a_scaler() -> None:
    strategy = HeteroFSDPStrategy(cluster=of_types("H200", "H200"), mixed_precision={"param_dtype": "float16"})
    with pytest.raises(UnsupportedError) as caught:
        pl.Trainer(strategy=strategy, **QUIET)
    says(str(caught.value), ["'float16'", "loss scaler", "precision='16-mixed'", "bfloat16"])


@pytest.mark.parametrize(
    ("precision", "is_taken"), [("16-mixed", True), (16, True), ("16-true", False), ("bf16-mixed", True)]
)
def test_fp16_is_taken_on_cuda_with_its_scaler_only(precision: Any, is_taken: bool) -> None:
    strategy = HeteroFSDPStrategy(
        mixed_precision={"param_dtype": "fp16"} if is_taken and "b" not in str(precision) else None
    )
    strategy._accelerator = CUDAAccelerator()
    if is_taken:
        strategy._check_trainer({"precision": precision})
        return
    with pytest.raises(UnsupportedError, match=r"16-true.*16-mixed"):
        strategy._check_trainer({"precision": precision})


# -- plans -------------------------------------------------------------------------------------------------------------

PLANNED = {
    "backward_prefetch": "BACKWARD_POST",
    "forward_prefetch": False,
    "limit_all_gathers": 3,
    "cpu_offload": True,
    "activation_checkpointing": 2,
    "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "compile": True,
}


def test_a_plan_file_holds_options_only_where_there_are_some(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plain.json")
    assert "options" not in json.loads((tmp_path / "plain.json").read_text())
    plan = replace(PLAN, options=PLANNED)
    plan.save(tmp_path / "plan.json")
    assert ShardPlan.load(tmp_path / "plan.json") == plan
    assert hash(plan) == hash(PLAN)
    options = HeteroFSDPStrategy(cluster=cluster_for(2), plan=tmp_path / "plan.json").options
    assert options.given() == PLANNED
    assert (options.backward, options.gathers_ahead, options.gathers_forward(True)) == ("BACKWARD_POST", 2, False)
    assert options.policy(with_output=True) == MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def test_a_plan_file_with_bad_options_is_refused_with_all_of_them(tmp_path: Path) -> None:
    bad = {name: value for name, value, _ in BAD if name != "sharding_strategy" and not isinstance(value, dict)}
    data = PLAN.to_dict() | {"options": bad | {"backwards": "NONE", "sharding_strategy": "NO_SHARD"}}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        HeteroFSDPStrategy(plan=tmp_path / "plan.json")
    says(str(caught.value), [str(tmp_path / "plan.json"), "did you mean 'backward_prefetch'", "'sharding_strategy'"])
    says(str(caught.value), [f"options.{name}: is {value!r}" for name, value in bad.items()])


@pytest.mark.parametrize(
    ("options", "again", "words"),
    [
        ({"limit_all_gathers": 0}, (), ["options.limit_all_gathers is 0"]),
        ({"sharding_strategy": "FULL_SHARD"}, (), ["options.sharding_strategy", "groups, modes"]),
        ({"speed": 1}, (), ["options.speed is 1", "known options"]),
        ({"activation_checkpointing": False}, (True, False), ["options.activation_checkpointing is false"]),
    ],
)
def test_a_plan_made_in_python_is_checked_too(options: Any, again: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        replace(PLAN, options=options, activation_checkpointing=again).validate()
    says(str(caught.value), words)


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ({"compile": True}, {"options": {"compile": False}}, ["compile=True", "options say False"]),
        (
            {"mixed_precision": {"param_dtype": "float32"}},
            {"options": {"mixed_precision": {"param_dtype": "bfloat16"}}},
            ["'float32'", "'bfloat16'"],
        ),
        ({"reshard_after_forward": False}, {}, ["reshard_after_forward=False", "FULL_SHARD"]),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {}, ["'SHARD_GRAD_OP'", "[0, 1] FULL_SHARD"]),
        ({"sharding_strategy": "NO_SHARD"}, {}, ["'NO_SHARD'", "[0, 1] FULL_SHARD"]),
        ({"sharding_strategy": "HYBRID_1"}, {}, ["'HYBRID_1'", "[0, 1] FULL_SHARD"]),
        (
            {"activation_checkpointing": True},
            {"activation_checkpointing": (True, False)},
            ["activation_checkpointing=True", "[True, False]"],
        ),
    ],
)
def test_an_argument_that_disagrees_with_the_plan_is_refused(arguments: Any, changes: Any, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        HeteroFSDPStrategy(plan=replace(PLAN, **changes), **arguments)
    says(str(caught.value), [*words, "leave"])


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, {}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({"sharding_strategy": "NO_SHARD"}, {"groups": ((0,), (1,)), "modes": ("FULL_SHARD", "NO_SHARD")}),
        ({"sharding_strategy": "HYBRID_1"}, {"groups": ((0,), (1,))}),
        ({"sharding_strategy": "HYBRID_2"}, {"reshard_after_forward": False}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": (True, True)}),
        ({"mixed_precision": {"param_dtype": "bf16"}}, {"options": {"mixed_precision": {"param_dtype": "bfloat16"}}}),
        ({"backward_prefetch": "NONE"}, {"options": {"compile": True}}),
    ],
)
def test_arguments_and_plans_may_say_the_same(arguments: Any, changes: Any) -> None:
    options = HeteroFSDPStrategy(plan=replace(PLAN, **changes), **arguments).options
    assert options.given().keys() >= changes.get("options", {}).keys()


def test_a_plan_made_in_a_fit_says_how_it_was_run(ranks: WarmRanks) -> None:
    options = {"activation_checkpointing": 2, "backward_prefetch": "NONE"}
    for plan in ranks.run(2, recorded_plan, of_types("a", "b"), options):
        assert plan["options"] == options
        assert plan["activation_checkpointing"] == (True, True)


@pytest.mark.parametrize(
    ("options", "manual", "replicas"),
    [
        ({"sharding_strategy": "NO_SHARD"}, False, ((0,), (1,), (2,), (3,))),
        ({"sharding_strategy": "HYBRID_2"}, False, ((0, 1), (2, 3))),
        ({"sharding_strategy": "HYBRID_2", "reshard_after_forward": False}, True, ((0, 1), (2, 3))),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, True, ((0, 1, 2, 3),)),
    ],
    ids=str,
)
def test_a_sharding_strategy_is_what_runs_and_what_the_plan_says(
    ranks: WarmRanks, options: dict[str, Any], manual: bool, replicas: Any
) -> None:
    for found, plan in ranks.run(4, layout_of, cluster_for(4), options, manual):
        assert found == replicas
        assert HeteroFSDPStrategy(plan=plan, **options).options.reshards == ShardingOptions(**options).reshards


# -- configuration files -----------------------------------------------------------------------------------------------

CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_hetero.strategies.HeteroFSDPStrategy
    init_args:
      cluster: {cluster}
      sharding_strategy: HYBRID_2
      reshard_after_forward: true
      backward_prefetch: NONE
      forward_prefetch: false
      limit_all_gathers: {limit}
      cpu_offload: false
      activation_checkpointing: 2
      mixed_precision:
        param_dtype: bfloat16
        reduce_dtype: float32
      compile: true
"""


@pytest.mark.parametrize(("limit", "ahead"), [("3", 2), ("1", 0), ("true", 1), ("false", None)])
def test_options_from_a_configuration_file(tmp_path: Path, monkeypatch: Any, limit: str, ahead: int | None) -> None:
    of_types("a", "b").to_yaml(tmp_path / "cluster.yaml")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(cluster=tmp_path / "cluster.yaml", limit=limit))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI does
    monkeypatch.setattr("sys.argv", ["train", "--config", str(config)])
    cli = LightningCLI(Classifier, run=False, save_config_callback=None)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HeteroFSDPStrategy)
    options = strategy.options
    assert (options.sharding_strategy, options.reshards, options.backward) == ("HYBRID_2", True, "NONE")
    assert (options.forward_prefetch, options.gathers_ahead, options.cpu_offload) == (False, ahead, False)
    assert (options.activation_checkpointing, options.compile) == (2, True)
    assert options.policy(with_output=True) == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
