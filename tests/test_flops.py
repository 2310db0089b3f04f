"""FLOPs by dispatch agree with formulas written by hand, on the meta device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_hetero.profiler.flops import FlopCounter, count_flops


def vit_forward_flops(*, depth: int, width: int, tokens: int, patch: int, classes: int) -> int:
    """Per image: a product of [m, k] and [k, n] takes 2 m k n; the class token makes ``tokens`` odd."""
    embed = 2 * (tokens - 1) * (3 * patch * patch) * width
    qkv = 2 * tokens * width * (3 * width)
    attention = 2 * tokens * tokens * width + 2 * tokens * tokens * width  # scores, and scores x values
    project = 2 * tokens * width * width
    mlp = 2 * tokens * width * (4 * width) * 2
    return embed + depth * (qkv + attention + project + mlp) + 2 * width * classes


def test_vit_b16_forward_is_the_formula() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224").eval()
        flops = count_flops(model, torch.empty(2, 3, 224, 224))
    by_hand = 2 * vit_forward_flops(depth=12, width=768, tokens=197, patch=16, classes=1000)
    assert flops == pytest.approx(by_hand, rel=0.005)
    assert by_hand / 2 == pytest.approx(35.1e9, rel=0.005)  # the published 17.6 G multiply-adds


def small_vit(device: str) -> nn.Module:
    with torch.device(device):
        return timm.models.VisionTransformer(
            img_size=32, patch_size=4, in_chans=3, num_classes=10, embed_dim=48, depth=2, num_heads=3
        )


@pytest.mark.parametrize("backward", [False, True])
def test_meta_and_cpu_agree(backward: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        loss = model(x).sum()
        if backward:
            loss.backward()

    flops = {d: count_flops(step, small_vit(d), torch.zeros(3, 3, 32, 32, device=d)) for d in ("cpu", "meta")}
    assert flops["cpu"] == flops["meta"]
    forward = 3 * vit_forward_flops(depth=2, width=48, tokens=65, patch=4, classes=10)
    embed = 3 * 2 * 64 * 48 * 48  # no gradient for the images
    assert flops["cpu"] == (3 * forward - embed if backward else forward)


def test_the_cpu_runs_fused_attention_and_it_is_counted() -> None:
    q, k, v = (torch.zeros(2, 3, n, 16, requires_grad=True) for n in (7, 11, 11))
    seen: list[str] = []

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    with torch.profiler.profile(acc_events=True) as profile:
        forward = count_flops(F.scaled_dot_product_attention, q, k, v)
        both = count_flops(step)
    seen = [event.name for event in profile.events()]
    assert any("flash_attention_for_cpu" in name for name in seen)
    assert forward == 2 * (2 * 2 * 3 * 7 * 11 * 16)
    assert both == 3 * forward


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_grad_mode_changes_nothing(mode: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    with mode():
        flops = count_flops(model, torch.zeros(2, 3, 8, 8))
    assert flops == 2 * 2 * 36 * 27 * 4 + 2 * 2 * 144 * 5


def test_counters_nest_and_go_on_counting() -> None:
    x = torch.zeros(4, 4)
    with FlopCounter() as outer:
        x @ x
        with FlopCounter() as inner:
            x @ x
    with outer:
        x @ x
    x @ x
    assert inner.flops == 2 * 4**3
    assert outer.flops == 3 * 2 * 4**3


def test_sharded_parameters_count_as_what_runs(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, sharded = small_vit("cpu"), small_vit("cpu")
        fully_shard(sharded)

        def step(model: nn.Module) -> None:
            model(torch.zeros(2, 3, 32, 32)).sum().backward()
            torch.optim.AdamW(model.parameters()).step()

        assert count_flops(step, sharded) == count_flops(step, plain) > 0
    finally:
        dist.destroy_process_group()
