"""What strategies ask of GPUs: a backend, no whole model on each, and to give up a hang; with stand-ins for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map
from torchmetrics import MeanMetric

from lightning_hetero.strategies import (
    HeteroAutoStrategy,
    HeteroFSDPStrategy,
    HeteroPipelineStrategy,
    block_forwards,
    lightning_adapter,
    sharding,
    torch_adapter,
)
from lightning_hetero.strategies.base import HeteroStrategy
from lightning_hetero.strategies.options import ShardingOptions

ALL = [HeteroFSDPStrategy, HeteroPipelineStrategy, HeteroAutoStrategy]
CPU, CUDA, ELSEWHERE = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
OFFLOAD = {"cpu_offload": True}


@pytest.mark.parametrize("kind", ALL)
def test_a_model_is_built_on_the_host_whatever_the_device(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "root_device", ELSEWHERE)
    strategy = kind()
    with strategy.tensor_init_context():
        built = nn.Linear(2, 2)
    with strategy.tensor_init_context(empty_init=True):
        empty = nn.Linear(2, 2)
    assert (built.weight.device, empty.weight.device) == (CPU, torch.device("meta"))


@pytest.mark.parametrize("kind", ALL)
def test_a_model_is_built_in_the_dtype_of_its_precision(kind: Any) -> None:
    strategy = kind(precision_plugin=HalfPrecision("bf16-true"))
    with strategy.tensor_init_context():
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("strategy", "on_cuda"),
    [
        (HeteroFSDPStrategy(), "nccl"),
        (HeteroFSDPStrategy(cpu_offload=True), "cpu:gloo,cuda:nccl"),
        (HeteroPipelineStrategy(), "nccl"),
        (HeteroAutoStrategy(), "nccl"),
        (HeteroAutoStrategy(fsdp=OFFLOAD), "cpu:gloo,cuda:nccl"),
    ],
)
def test_what_is_kept_on_the_host_is_reduced_there(strategy: HeteroStrategy, on_cuda: str) -> None:
    assert strategy.backend_for(CUDA) == on_cuda
    assert strategy.backend_for(CPU) == "gloo"


def test_with_cpu_offload_metrics_are_moved_and_shards_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeteroFSDPStrategy, "root_device", ELSEWHERE)
    strategy = HeteroFSDPStrategy(cpu_offload=True)
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.mean = MeanMetric()
    strategy.model = model
    strategy.model_to_device()
    assert model.mean.mean_value.device == ELSEWHERE
    assert model[0].weight.device == CPU


@pytest.mark.parametrize(
    ("config", "done"),
    [("cpu:gloo,cuda:gloo", "destroy"), ("cuda:nccl", "abort"), ("cpu:gloo,cuda:nccl", "abort")],
)
def test_a_rank_in_a_hanging_nccl_collective_is_not_waited_for(
    config: str, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append("destroy"))
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda: seen.append("abort"))
    torch_adapter.abort_process_group()
    assert seen == [done]


def test_recomputing_sees_the_devices_of_what_a_block_is_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these the random states are kept; by keywords alone nothing was seen, and dropout drew anew."""
    seen: list[torch.Tensor] = []

    def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
        tree_map(seen.append, args)
        return function(*args)

    monkeypatch.setattr(block_forwards, "checkpoint", checkpoint)
    value, mask = torch.ones(2), torch.zeros(2)
    run = block_forwards._recomputing(lambda hidden, *, function: hidden + function)
    assert torch.equal(run(hidden=value, function=mask), value)
    assert {id(each) for each in seen} == {id(value), id(mask)}


@pytest.mark.parametrize("kind", [HeteroFSDPStrategy, HeteroPipelineStrategy])
def test_what_is_logged_on_the_host_is_reduced_on_the_device(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "root_device", ELSEWHERE)
    monkeypatch.setattr(kind, "world_size", 2)
    asked: list[torch.device] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: asked.append(tensor.device))
    strategy = kind()
    with pytest.raises(NotImplementedError, match="meta"):  # back to the host, where nothing can come from meta
        strategy.sum_over_ranks(torch.ones(2))
    assert asked == [ELSEWHERE]


@pytest.mark.parametrize("kind", [HeteroFSDPStrategy, HeteroPipelineStrategy])
def test_what_is_reduced_from_the_host_travels_by_the_device(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``strategy.reduce``, as ``sync_dist`` calls it."""
    monkeypatch.setattr(kind, "root_device", ELSEWHERE)
    asked: list[torch.device] = []

    def reduced(tensor: torch.Tensor, group: Any, reduce_op: Any) -> torch.Tensor:
        asked.append(tensor.device)
        return torch.full(tensor.shape, 7.0)

    monkeypatch.setattr(lightning_adapter, "reduce_over_ranks", reduced)
    assert kind().reduce(torch.ones(2)).tolist() == [7.0, 7.0]
    assert asked == [ELSEWHERE]


@pytest.mark.parametrize("crosses", [True, False])
def test_gradients_that_cross_on_the_host_are_there_when_they_are_read(
    crosses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 copies to pinned memory without waiting, and waits only when backward ends."""
    made: list[Any] = []
    monkeypatch.setattr(sharding, "fully_shard", lambda module, offload_policy, **kwargs: made.append(offload_policy))
    monkeypatch.setattr(sharding, "take_from_rank_0", lambda tensor, device: None)
    groups: Any = SimpleNamespace(crosses=crosses, mesh=None)
    options = ShardingOptions(cpu_offload=True)
    model = nn.Sequential(nn.Linear(2, 2))
    sharding.shard_module(model, [], groups, ELSEWHERE, reshard_after_forward=True, options=options)
    assert [policy.pin_memory for policy in made] == [not crosses]
