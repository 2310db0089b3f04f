"""Bad input to hetero_fsdp: every error names the value and the next step, and every rank ends within seconds."""

from __future__ import annotations

import dataclasses
import json
import time
import types
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_hetero  # noqa: F401  (registers the name)
from lightning_hetero.callbacks import EmulatedDevices
from lightning_hetero.cluster import Cluster, Device
from lightning_hetero.errors import ClusterError, DataError, HeteroError, PlanError, UnsupportedError
from lightning_hetero.plan import ModelKey, ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy
from tests.fits import Classifier, cluster_for, dataset
from tests.harness import WarmRanks

SECONDS = 30.0
"""until every rank has ended; most of it is for a machine that does other things as well"""

GOOD = """
schema: 1
name: four
emulate: true
nodes:
  - name: a
    devices: [{type: fast, count: 2, memory: 2 GiB, speed: 6 GFLOP/s}]
  - name: b
    devices: [{type: slow, count: 2, memory: 2 GiB, speed: 3 GFLOP/s}]
"""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_steps": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

# what is wrong -> the change to GOOD, and what the message has to say
BAD_FILES: dict[str, tuple[str, str, list[str]]] = {
    "not YAML": ("name: four", "name: [four", ["is not YAML", "correct that line"]),
    "unknown keys": ("name: four", "name: four\ncolour: red\nemulated: yes", ["'colour'", "did you mean 'emulate'"]),
    "unit without number": ("speed: 6 GFLOP/s", "speed: GFLOP/s", ["nodes[0].devices[0].speed", "GFLOP/s"]),
    "zero speed": ("speed: 6 GFLOP/s", "speed: 0 GFLOP/s", ["nodes[0].devices[0].speed", "0 GFLOP/s"]),
    "negative speed": ("speed: 3 GFLOP/s", "speed: -3 GFLOP/s", ["nodes[1].devices[0].speed", "-3 GFLOP/s"]),
    "two at once": ("speed: 6 GFLOP/s", "speed: 0, size: 3", ["2 problems", ".speed", "'size'"]),
}


def emulated(*speeds_gflops: float, memory_bytes: int = 2**34, name: str = "small") -> Cluster:
    devices = tuple(Device(f"d{i}", "n", memory_bytes, speed * 1e9) for i, speed in enumerate(speeds_gflops))
    return Cluster(name, devices, emulate=True)


def says(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message, message


# -- before any process is started -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["argument", "variable"])
@pytest.mark.parametrize("what", BAD_FILES)
def test_a_bad_cluster_file_is_refused(tmp_path: Path, monkeypatch: Any, what: str, way: str) -> None:
    old, new, words = BAD_FILES[what]
    assert old in GOOD
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ClusterError) as caught:
        _start_with(path, way, monkeypatch)
    says(str(caught.value), [str(path), *words])


@pytest.mark.parametrize("way", ["argument", "variable"])
def test_a_missing_cluster_file_is_named(tmp_path: Path, monkeypatch: Any, way: str) -> None:
    with pytest.raises(ClusterError) as caught:
        _start_with(tmp_path / "no.yaml", way, monkeypatch)
    says(str(caught.value), [str(tmp_path / "no.yaml"), "does not exist", "Cluster.discover().to_yaml"])


def _start_with(path: Path, way: str, monkeypatch: Any) -> None:
    if way == "argument":
        HeteroFSDPStrategy(cluster=path)
    else:
        monkeypatch.setenv("LIGHTNING_HETERO_CLUSTER", str(path))
        pl.Trainer(strategy="hetero_fsdp", **QUIET)


@pytest.mark.parametrize("devices", [1, 3, "3", 5])
@pytest.mark.parametrize("form", ["name", "object"])
def test_devices_that_disagree_with_an_emulated_cluster(
    tmp_path: Path, monkeypatch: Any, form: str, devices: Any
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD)
    monkeypatch.setenv("LIGHTNING_HETERO_CLUSTER", str(path))
    strategy = "hetero_fsdp" if form == "name" else HeteroFSDPStrategy(cluster=str(path))
    with pytest.raises(ClusterError) as caught:
        pl.Trainer(strategy=strategy, **QUIET, devices=devices)
    says(
        str(caught.value),
        ["'four' has 4 devices", f"{int(devices)} ranks", f"devices={devices!r}", "leave devices out"],
    )


@pytest.mark.parametrize("devices", [None, "auto", 4, "4"])
def test_an_emulated_cluster_sets_the_number_of_ranks(devices: Any) -> None:
    options = {} if devices is None else {"devices": devices}
    trainer = pl.Trainer(strategy=HeteroFSDPStrategy(cluster=emulated(1, 1, 1, 1)), **QUIET, **options)
    assert trainer.world_size == 4


@pytest.mark.parametrize("devices", [1, 3])
def test_devices_that_disagree_with_a_real_cluster(devices: int) -> None:
    with pytest.raises(ClusterError) as caught:
        pl.Trainer(strategy=HeteroFSDPStrategy(cluster=cluster_for(2)), **QUIET, devices=devices)
    says(str(caught.value), ["'test' has 2 devices", f"{devices} ranks", "make both 2"])


@pytest.mark.parametrize("emulate", [True, False])
def test_a_launcher_that_started_another_number_of_ranks(monkeypatch: Any, emulate: bool) -> None:
    """As torchrun --nproc-per-node 3 would set it."""
    ids = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**ids, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29999")
    cluster = dataclasses.replace(cluster_for(4), emulate=emulate)
    options = {} if emulate else {"devices": 3}
    with pytest.raises(ClusterError) as caught:
        pl.Trainer(strategy=HeteroFSDPStrategy(cluster=cluster), **QUIET, **options)
    says(str(caught.value), ["has 4 devices", "3 ranks"])


@pytest.mark.filterwarnings("ignore:You passed")  # Lightning says that it takes bf16 in fp16's place
def test_all_that_the_trainer_gets_wrong_is_said_at_once() -> None:
    with pytest.raises(HeteroError) as caught:
        pl.Trainer(strategy=HeteroFSDPStrategy(cluster=emulated(1, 1)), **QUIET, devices=3, precision="16-mixed")
    says(str(caught.value), ["precision='16-mixed'", "has 2 devices", "3 ranks"])


@pytest.mark.filterwarnings("ignore:You passed", "ignore:`precision=16`")
@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "16", 16])
def test_fp16_is_refused_by_name(precision: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        pl.Trainer(strategy="hetero_fsdp", **QUIET, precision=precision)
    says(str(caught.value), [f"precision={precision!r}", "fp16", "bf16-mixed", "32-true"])


def test_fp16_is_refused_as_a_plugin_too() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(UnsupportedError, match="16-mixed"):
        pl.Trainer(strategy="hetero_fsdp", **QUIET, plugins=[plugin])


def test_an_emulated_cluster_needs_cpu_ranks() -> None:
    strategy = HeteroFSDPStrategy(cluster=emulated(1, 1), accelerator=CUDAAccelerator())
    with pytest.raises(ClusterError) as caught:
        strategy._check_trainer({"devices": 2})
    says(str(caught.value), ["CUDAAccelerator", "accelerator='cpu'"])


def test_all_bad_arguments_are_said_at_once() -> None:
    bad: dict[str, Any] = {"check_loss": "yes", "reshard_after_forward": "often", "global_batch_size": 0}
    with pytest.raises(HeteroError) as caught:
        HeteroFSDPStrategy(**bad)
    for name, value in bad.items():
        says(str(caught.value), [f"{name}={value!r}"])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("check_loss", None, ["'warn', 'error' or 'off'"]),
        ("reshard_after_forward", 2, ["True, False or 'auto'"]),
        ("reshard_after_forward", None, ["True, False or 'auto'"]),
        ("global_batch_size", -4, ["whole number", "1 or more"]),
        ("global_batch_size", 2.5, ["whole number"]),
        ("global_batch_size", "8", ["whole number"]),
        ("global_batch_size", True, ["whole number"]),
        ("cluster", 3, ["int", "path"]),
        ("plan", 3, ["int", "'auto'"]),
        ("plan", None, ["NoneType", "'auto'"]),
        ("costs", 3, ["int", "path"]),
        ("wrap", nn.Linear, ["wrap", "set"]),
    ],
)
def test_a_bad_argument_is_named(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(HeteroError) as caught:
        HeteroFSDPStrategy(**{name: value})
    says(str(caught.value), [f"{name}={value!r}", *words])


def test_a_bad_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError) as caught:
        HeteroFSDPStrategy(plan=path)
    says(str(caught.value), [str(path), "does not exist", 'plan="auto"'])
    path.write_text("{batch: 3}")
    with pytest.raises(PlanError, match="is not JSON"):
        HeteroFSDPStrategy(plan=str(path))
    path.write_text(json.dumps(a_plan((1, 1)).to_dict() | {"batch_share": [2], "schema": 7}))
    with pytest.raises(PlanError) as caught:
        HeteroFSDPStrategy(plan=path)
    says(str(caught.value), [str(path), "2 problems", "'batch_share'", "did you mean 'batch_shares'", "schema"])


def test_a_missing_costs_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeteroError, match=r"no\.json"):
        HeteroFSDPStrategy(costs=tmp_path / "no.json")


# -- in the ranks ------------------------------------------------------------------------------------------------------


def a_plan(shares: tuple[int, ...], types: tuple[str, ...] | None = None, **changes: Any) -> ShardPlan:
    ranks = len(shares)
    types = types or tuple(f"d{r}" for r in range(ranks))
    return dataclasses.replace(ShardPlan(sum(shares), shares, (tuple(range(ranks)),), types), **changes)


class Odd(Classifier):
    """A classifier with something wrong in it."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("mlp")
        self.fault = fault
        if fault == "no parameters":
            self.model = nn.Sequential(nn.Flatten())
        elif fault == "0-dim parameters":
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.model.add_module("shift", _Shift())
        elif fault == "lazy":
            self.model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
        elif fault == "fetches batches":
            self.training_step = types.MethodType(_fetching_step, self)
        elif fault == "meta":
            with torch.device("meta"):
                self.table = _Table()


def _fetching_step(self: Any, dataloader_iter: Any) -> Tensor:
    raise AssertionError("not to be run")


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(4, 3))


def start(
    strategy: dict[str, Any],
    *,
    fault: str = "",
    loaders: int = 1,
    trainer: dict[str, Any] | None = None,
    callback: bool = False,
    batch_size: int = 2,
) -> str:
    strategy = {"cluster": cluster_for(2), "check_loss": "off", "summary": False, **strategy}
    made = HeteroFSDPStrategy(**strategy)
    callbacks = [EmulatedDevices(strategy["cluster"])] if callback else []
    options = {**QUIET, "devices": strategy["cluster"].world_size, **(trainer or {})}
    loader: Any = DataLoader(dataset(24, "32-true"), batch_size=batch_size)
    if loaders > 1:
        loader = {f"l{i}": DataLoader(dataset(24, "32-true"), batch_size=batch_size) for i in range(loaders)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using the `dataloader_iter` step flavor")
        pl.Trainer(strategy=made, callbacks=callbacks, **options).fit(Odd(fault), loader)
    return "trained"


def refused(ranks: WarmRanks, kind: type[HeteroError], words: list[str], *args: Any, **kwargs: Any) -> None:
    """Every rank ends with this error, in time."""
    began = time.monotonic()
    outcomes = ranks.run_outcomes(2, start, *args, timeout=2 * SECONDS, process_group=False, **kwargs)
    took_s = time.monotonic() - began
    for status, *rest in outcomes:
        assert status == "error", outcomes
        assert rest[0] == kind.__name__, rest
        says(rest[1], words)
    assert took_s < SECONDS


def test_what_is_tested_here_trains_without_a_fault(ranks: WarmRanks) -> None:
    assert ranks.run(2, start, {"plan": a_plan((3, 1))}, process_group=False) == ["trained"] * 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no parameters", ["Odd has no parameters", "configure_model"]),
        ("0-dim parameters", ["parameter scale", "parameter model.shift.by", "give it the shape [1]"]),
        ("lazy", ["model.1.weight", "model.1.bias", "uninitialised"]),
        ("fetches batches", ["training_step(dataloader_iter)", "write training_step(batch, batch_idx)"]),
        ("meta", ["table", "_Table", "meta", "reset_parameters"]),
    ],
)
def test_a_model_that_cannot_be_sharded(ranks: WarmRanks, fault: str, words: list[str]) -> None:
    refused(ranks, UnsupportedError, words, {}, fault=fault)


def test_a_global_batch_smaller_than_the_ranks(ranks: WarmRanks) -> None:
    words = ["global batch of 1", "ranks, 2", "2 or more"]
    refused(ranks, DataError, words, {"global_batch_size": 1})


def test_two_training_loaders(ranks: WarmRanks) -> None:
    refused(ranks, UnsupportedError, ["one DataLoader, got 2", "StackDataset"], {}, loaders=2)


def test_the_callback_beside_an_emulated_cluster(ranks: WarmRanks) -> None:
    words = ["'small' is emulated by the strategy already", "leave the EmulatedDevices callback out"]
    refused(ranks, UnsupportedError, words, {"cluster": emulated(5, 5)}, callback=True)


OTHER_MODEL = ModelKey("Other", 12)

BAD_PLANS: dict[str, tuple[ShardPlan, list[str]]] = {
    "more ranks": (a_plan((1, 1, 2)), ["3 ranks, cluster 'test' has 2", "make a new plan"]),
    "devices and model": (
        a_plan((1, 3), ("H100", "d1"), model=OTHER_MODEL),
        ["device_types[0]", "'H100'", "'d0'", "made for Other with 12 parameters", "this is Odd", "make a new plan"],
    ),
}


@pytest.mark.parametrize("what", BAD_PLANS)
def test_a_plan_made_for_something_else(ranks: WarmRanks, what: str) -> None:
    plan, words = BAD_PLANS[what]
    refused(ranks, PlanError, words, {"plan": plan})


def test_a_plan_file_made_for_something_else(ranks: WarmRanks, tmp_path: Path) -> None:
    plan, words = BAD_PLANS["devices and model"]
    plan.save(tmp_path / "plan.json")
    refused(ranks, PlanError, words, {"plan": str(tmp_path / "plan.json")})


def test_a_plan_that_is_not_valid_in_itself(ranks: WarmRanks) -> None:
    words = ["batch_shares[1] is -1", "batch_shares sum to 0, global_batch_size is 4", "groups lack rank 1"]
    plan = ShardPlan(4, (1, -1), ((0,),), ("d0", "d1"))
    refused(ranks, PlanError, words, {"plan": plan})


def test_a_plan_and_a_global_batch_that_disagree(ranks: WarmRanks) -> None:
    words = ["global_batch_size=6", "the plan was made for 4", "leave one out"]
    refused(ranks, DataError, words, {"plan": a_plan((1, 3)), "global_batch_size": 6})
