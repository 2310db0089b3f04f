"""Live storages: each counted once, for as long as something holds it, at its present size."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_hetero.profiler.memory import LiveStorages

KIB = 1024


def kib(count: int = 1) -> torch.Tensor:
    return torch.zeros(256 * count)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_operations_make_counts_while_it_lives() -> None:
    live = LiveStorages()
    with live.observing():
        a = kib()
        b = kib(2)
        assert live.current_bytes == 3 * KIB
        del a
        assert live.current_bytes == 2 * KIB
        c = b + b
    outside = kib(8)
    assert live.current_bytes == 4 * KIB
    del b, c, outside
    assert live.current_bytes == 0
    assert live.peak_bytes == 4 * KIB


def test_views_share_their_storage() -> None:
    live = LiveStorages()
    with live.observing():
        whole = kib(4)
        part = whole[:256].view(16, 16)
        part.add_(1)
        assert live.current_bytes == 4 * KIB
        del whole
        assert live.current_bytes == 4 * KIB  # the part keeps all of it
        del part
    assert live.current_bytes == 0


def test_a_step_of_training_peaks_where_a_sum_by_hand_does() -> None:
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)  # 256 KiB of weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    live = LiveStorages()
    live.add_module(model)
    batch = torch.ones(256, 256)
    live.add([batch])
    assert live.current_bytes == 512 * KIB
    with live.observing():
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
    # weights, batch, gradient, momentum; and the loss, a scalar
    assert live.current_bytes == 4 * 256 * KIB + 4
    # at the gradient of the weights: weights, batch, output, gradient; the output's gradient is an expanded
    # scalar
    assert 4 * 256 * KIB < live.peak_bytes <= 5 * 256 * KIB + 64
    again = LiveStorages()
    again.add_module(model)
    again.add_optimizer(optimizer)
    assert again.current_bytes == 3 * 256 * KIB


def test_adding_twice_counts_once() -> None:
    live = LiveStorages()
    model = nn.BatchNorm1d(256)
    for _ in range(2):
        live.add_module(model)
    # weight, bias, running mean and variance; the number of batches is one int64
    assert live.current_bytes == 4 * KIB + 8


def test_a_resized_storage_counts_as_what_it_is() -> None:
    live = LiveStorages()
    with live.observing():
        a, b = kib(4), kib(4)
        a.untyped_storage().resize_(0)
        assert live.recount() == 4 * KIB
        a.untyped_storage().resize_(2 * KIB)
        a.resize_(512)
        assert live.current_bytes == 6 * KIB
    del b
    assert live.current_bytes == 2 * KIB


def test_meta_tensors_hold_no_memory() -> None:
    live = LiveStorages()
    with live.observing():
        big = torch.zeros(1 << 40, device="meta")
        big + 1
    assert live.peak_bytes == 0


def test_the_peak_can_begin_again() -> None:
    live = LiveStorages()
    with live.observing():
        a = kib(8)
        del a
        b = kib()
        assert live.peak_bytes == 8 * KIB
        live.reset_peak()
        assert live.peak_bytes == KIB
    del b


def test_growth_is_told_with_its_size_and_can_stop_the_operation() -> None:
    told: list[tuple[int, str]] = []

    def on_grow(added_bytes: int, what: str) -> None:
        told.append((added_bytes, what))
        if added_bytes > 4 * KIB:
            raise MemoryError("too much")

    live = LiveStorages(on_grow)
    live.add([kib(2)], "parameters")
    with live.observing():
        a = kib(3)
        a.view(-1)
        with pytest.raises(MemoryError, match="too much"):
            kib(5)
    assert [size for size, _ in told] == [2 * KIB, 3 * KIB, 5 * KIB]
    assert told[0][1] == "parameters"
    assert "zeros" in told[1][1]


def test_an_error_from_growth_comes_out_of_the_backward_as_it_is() -> None:
    def on_grow(added_bytes: int, what: str) -> None:
        if armed:
            raise MemoryError("in backward")

    armed: list[bool] = []
    live = LiveStorages(on_grow)
    weight = torch.ones(8, 8, requires_grad=True)
    with live.observing():
        loss = (weight @ weight).sum()
        armed.append(True)
        with pytest.raises(MemoryError, match="in backward"):
            loss.backward()


def test_gathered_parameters_count_while_fsdp_holds_them(one_rank: None) -> None:
    """The peak of a chain of wrapped layers is its shards and two gathered layers, never all of them."""
    layers, width = 6, 128
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    layer_bytes = 4 * width * width
    live = LiveStorages()
    live.add_module(model)
    assert live.current_bytes == layers * layer_bytes
    batch = torch.ones(1, width)
    peaks = []
    for _ in range(2):
        live.reset_peak()
        with live.observing(), torch.no_grad():
            model(batch)
        peaks.append(live.peak_bytes)
        assert live.recount() == layers * layer_bytes
    small = 16 * KIB
    for peak in peaks:
        assert (layers + 1) * layer_bytes <= peak <= (layers + 2) * layer_bytes + small
    del model, layer
    gc.collect()
    assert live.recount() == 0


def test_what_dtensor_tries_on_whole_shapes_takes_no_memory(one_rank: None) -> None:
    """DTensor runs an operation on fake tensors of the whole shape, the first time: its first AdamW step, say."""
    model = nn.Linear(256, 256, bias=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    live = LiveStorages()
    live.add_module(model)
    with live.observing():
        optimizer.step()
    states = 4 * 256 * KIB  # parameter, gradient, two moments
    assert states <= live.peak_bytes < states + 16 * KIB
