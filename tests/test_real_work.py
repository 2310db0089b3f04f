"""The slow rank of the benchmark's real case really works twice, and changes nothing by it."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hetero_speedup.doubled import double, undouble, vit_units
from benchmarks.hetero_speedup.model import ViTSize, shard
from tests.harness import WarmRanks

SIZE = ViTSize(depth=2, width=48, heads=3, patch_pixels=8)


def _batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 1, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def _gradients(size: ViTSize, doubled: bool, dropout: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = size.build()
    for block in model.blocks:
        block.attn.proj_drop.p = dropout
    if doubled:
        double(vit_units(model))
    images, labels = _batch(4)
    cross_entropy(model(images), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_bitwise_unchanged(dropout: float) -> None:
    expected = _gradients(SIZE, doubled=False, dropout=dropout)
    found = _gradients(SIZE, doubled=True, dropout=dropout)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_twice_the_operations_take_about_twice_as_long() -> None:
    size = ViTSize(depth=2)
    single, doubled = size.build(), size.build()
    double(vit_units(doubled))
    images, labels = _batch(16)

    def flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            cross_entropy(model(images), labels).backward()
        return counter.get_total_flops()

    def seconds(model: nn.Module) -> float:
        start_s = time.process_time()
        cross_entropy(model(images), labels).backward()
        return time.process_time() - start_s

    assert flops(doubled) == 2 * flops(single)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [(seconds(single), seconds(doubled)) for _ in range(8)]
    finally:
        torch.set_num_threads(threads)
    # pair by pair, and wide: the machine's other core has work of its own
    assert 1.6 < median(two / one for one, two in times[1:]) < 2.6


def test_units_run_twice_without_gradients_too() -> None:
    model = SIZE.build()
    calls = []
    for unit in vit_units(model):
        for module in list(unit.modules())[1:]:
            module.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(_batch(1)[0])
        single = len(calls)
        double(vit_units(model))
        model(_batch(1)[0])
    assert len(calls) == 3 * single


def _sharded_gradients(doubled: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = SIZE.build()
    if doubled and dist.get_rank() == 1:
        double(vit_units(model))
    shard(model, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    images, labels = _batch(4, seed=dist.get_rank())
    for _ in range(2):
        cross_entropy(model(images), labels).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_gradients_are_unchanged_under_fsdp2(ranks: WarmRanks) -> None:
    expected = ranks.run(2, _sharded_gradients, False)
    found = ranks.run(2, _sharded_gradients, True)
    assert all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])


def test_hooks_on_parameters_run_once() -> None:
    model = SIZE.build()
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: calls.append(1))
    double(vit_units(model))
    images, labels = _batch(2)
    cross_entropy(model(images), labels).backward()
    assert len(calls) == len(list(model.parameters()))


def test_it_can_be_taken_back() -> None:
    model = SIZE.build()
    double(vit_units(model))
    undouble(vit_units(model))
    assert all("forward" not in vars(unit) for unit in vit_units(model))
