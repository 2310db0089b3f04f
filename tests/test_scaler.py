"""The loss scaler of fp16: a step is skipped on all ranks or on none, and the scale stays the same everywhere."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_hetero.strategies import HeteroFSDPStrategy
from lightning_hetero.strategies.scaler import SharedGradScaler, share_by_largest, share_scaler
from tests.harness import WarmRanks


def scaled_step(
    scaler: torch.amp.GradScaler, weight: nn.Parameter, gradient: torch.Tensor, fused: bool = False
) -> float:
    """One step of SGD with this gradient, as it comes out of a scaled backward; the scale after it."""
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    scaler.scale(torch.ones(()))  # makes the scale
    weight.grad = gradient * scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("elsewhere", "is_skipped"), [(0.0, False), (1.0, True)])
def test_what_another_rank_found_decides(elsewhere: float, is_skipped: bool, fused: bool) -> None:
    asked: list[float] = []

    def share(own: torch.Tensor) -> torch.Tensor:
        asked.append(own.item())
        return torch.maximum(own, torch.tensor(elsewhere))

    weight = nn.Parameter(torch.ones(3))
    scaler = SharedGradScaler(share, "cpu", init_scale=8.0)
    scale = scaled_step(scaler, weight, torch.full((3,), 0.25), fused)
    assert asked == [0.0]
    assert scale == (4.0 if is_skipped else 8.0)
    assert torch.equal(weight, torch.full((3,), 1.0 if is_skipped else 0.75))


def test_an_own_infinity_is_told() -> None:
    asked: list[float] = []
    weight = nn.Parameter(torch.ones(2))
    scaler = SharedGradScaler(lambda own: asked.append(own.item()) or own, "cpu", init_scale=8.0)  # type: ignore
    assert scaled_step(scaler, weight, torch.tensor([1.0, float("inf")])) == 4.0
    assert asked == [1.0]
    assert torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize(("elsewhere", "scale"), [(0.0, 8.0), (1.0, 4.0)])
def test_a_rank_without_gradients_goes_along(elsewhere: float, scale: float) -> None:
    """As one of a pipeline whose own parameters are frozen, or that is idle."""
    scaler = SharedGradScaler(lambda own: torch.maximum(own, torch.tensor(elsewhere)), "cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0))
    scaler.update()
    assert scaler.get_scale() == scale


def test_all_micro_batches_losses_are_scaled_alike() -> None:
    ran: list[torch.Tensor] = []
    plugin = SimpleNamespace(
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0), backward=lambda loss, module, optimizer: ran.append(loss)
    )
    strategy: Any = SimpleNamespace(
        lightning_module=nn.Identity(),
        _trainer=SimpleNamespace(accumulate_grad_batches=2),
        _loss_factor=lambda: 0.5,
        precision_plugin=plugin,
        instruments=SimpleNamespace(step=lambda batch: nullcontext()),
        gradients=SimpleNamespace(backward=lambda is_last: nullcontext()),
    )
    HeteroFSDPStrategy.early_backward(strategy, torch.tensor(3.0), None)
    plugin.scaler = None  # of precisions that need none
    HeteroFSDPStrategy.early_backward(strategy, torch.tensor(3.0), None)
    assert ran == [8.0 * 3.0 * 0.5 / 2, 3.0 * 0.5 / 2]


def _overflow_on_one(rank_with_infinity: int | None, shared: bool) -> tuple[float, list[float]]:
    """Two shard groups of two ranks; in one of them one rank's shard has an infinity."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    local = torch.full((2,), 0.25)
    if dist.get_rank() == rank_with_infinity:
        local[0] = float("inf")
    gradient = DTensor.from_local(local, mesh, [Shard(0)])
    plain = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler = SharedGradScaler.like(plain, share_by_largest, "cpu") if shared else plain
    scale = scaled_step(scaler, weight, gradient)
    return scale, weight.detach().to_local().tolist()  # type: ignore[attr-defined]


def test_all_ranks_skip_together_across_groups(ranks: WarmRanks) -> None:
    assert ranks.run(4, _overflow_on_one, 3, True) == [(4.0, [1.0, 1.0])] * 4
    assert ranks.run(4, _overflow_on_one, None, True) == [(8.0, [0.75, 0.75])] * 4
    # torch's own leaves the other group in the dark
    assert ranks.run(4, _overflow_on_one, 3, False) == [(8.0, [0.75, 0.75])] * 2 + [(4.0, [1.0, 1.0])] * 2


def test_a_precision_plugins_scaler_is_replaced_with_its_settings() -> None:
    own = torch.amp.GradScaler("cpu", init_scale=32.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    plugin = MixedPrecision("16-mixed", "cpu", own)
    share_scaler(plugin, torch.device("cpu"))
    scaler = plugin.scaler
    assert isinstance(scaler, SharedGradScaler)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (32.0, 3.0, 0.25)
    assert scaler.get_growth_interval() == 7
    share_scaler(plugin, torch.device("cpu"))
    assert plugin.scaler is scaler
    without = MixedPrecision("bf16-mixed", "cpu")
    share_scaler(without, torch.device("cpu"))
    assert without.scaler is None
