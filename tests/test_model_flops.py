"""FLOPs of a step, counted on meta: those of formulas written by hand, recompute apart, under any wrapping."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_hetero.errors import HeteroError
from lightning_hetero.models.inputs import preset_inputs
from lightning_hetero.models.presets import build_preset
from lightning_hetero.profiler.flops import FlopCounter
from lightning_hetero.profiler.model_flops import CallRecorder, ModuleCall, call_flops, model_flops, skeleton
from lightning_hetero.strategies.torch_adapter import in_backward


def block_flops(*, tokens: int, width: int, mlp_products: int, mlp_width: int) -> int:
    """Forward of one block: a product of [m, k] and [k, n] takes 2 m k n; attention is counted in full."""
    qkv = 2 * tokens * width * 3 * width
    attention = 2 * tokens * tokens * width + 2 * tokens * tokens * width  # scores, and scores x values
    project = 2 * tokens * width * width
    return qkv + attention + project + mlp_products * 2 * tokens * width * mlp_width


def trained(forward: int, without_input_gradient: int) -> int:
    """A product's backward is two products of its size; the first one's input needs no gradient."""
    return 3 * forward - without_input_gradient


def test_vit_b16() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    embed = 2 * 196 * (3 * 16 * 16) * 768
    block = block_flops(tokens=197, width=768, mlp_products=2, mlp_width=3072)
    by_hand = trained(embed + 12 * block + 2 * 768 * 1000, embed)
    counted = model_flops(model, [torch.empty(4, 3, 224, 224, device="meta")]).per(4)
    assert counted.model == pytest.approx(by_hand, rel=0.005)
    assert counted.recomputed == 0
    assert by_hand == pytest.approx(3 * 35.1e9, rel=0.01)  # three times the published 17.6 G multiply-adds, x 2


def test_vit_5b() -> None:
    embed = 2 * 256 * (3 * 14 * 14) * 1792
    block = block_flops(tokens=257, width=1792, mlp_products=3, mlp_width=15360)  # SwiGLU: three matrices
    by_hand = trained(embed + 56 * block + 2 * 1792 * 1000, embed)
    counted = model_flops(build_preset("vit_5b", device="meta"), preset_inputs("vit_5b", 2)).per(2)
    assert counted.model == pytest.approx(by_hand, rel=0.005)
    # six FLOPs a parameter and token, and the attention
    assert by_hand == pytest.approx(6 * 5349e6 * 257 + 3 * 56 * 4 * 257**2 * 1792, rel=0.02)


def test_gpt_1_4b() -> None:
    block = block_flops(tokens=2048, width=2048, mlp_products=2, mlp_width=4 * 2048)
    by_hand = trained(24 * block + 2 * 2048 * 2048 * 50304, 0)  # embeddings are looked up, and their output is trained
    counted = model_flops(build_preset("gpt_1_4b", device="meta"), preset_inputs("gpt_1_4b", 1))
    assert counted.model == pytest.approx(by_hand, rel=0.005)


class Net(nn.Module):
    """Computes a part of itself again in backward: all of a layer's children, or one module."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.how == "kept":
            return self.block(hidden)  # type: ignore[no-any-return]
        if self.how == "module":
            return checkpoint(self.block, hidden, use_reentrant=False)  # type: ignore[no-any-return]
        return checkpoint(self.block.forward, hidden, use_reentrant=self.how == "reentrant")  # type: ignore[no-any-return]


FIRST = 2 * 3 * 8 * 16
INNER = 2 * 3 * 16 * 16
LAST = 2 * 3 * 16 * 4


@pytest.mark.parametrize(
    ("how", "again"), [("kept", 0), ("module", 2 * INNER), ("children", 2 * INNER), ("reentrant", 2 * INNER + LAST)]
)
def test_recompute_is_counted_apart(how: str, again: int) -> None:
    """Without reentry the last product is not needed again; all that runs is what a counter sees of the real step."""
    root = nn.Module()
    root.net = Net(how)
    x = torch.zeros(3, 8, requires_grad=how == "reentrant")
    recorder = CallRecorder(root, in_backward)
    recorder.attach()
    with FlopCounter() as ran:
        root.net(x).sum().backward()
    recorder.detach()
    flops = recorder.step_flops(skeleton(root))
    assert flops.model == 3 * (FIRST + 2 * INNER + LAST) - (0 if x.requires_grad else FIRST)
    assert flops.recomputed == again
    assert flops.model + flops.recomputed == ran.flops
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in root.modules())


def test_what_a_step_calls_is_what_counts() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 16), nn.Linear(8, 16)
            self.unused = nn.Linear(8, 16)

    root = Root()
    root.teacher.requires_grad_(False)
    recorder = CallRecorder(root, in_backward)
    recorder.attach()
    x = torch.zeros(3, 8)
    with torch.no_grad():
        target = root.teacher(x)
    for _ in range(2):
        (root.student(x) - target).sum().backward()
    recorder.detach()
    flops = recorder.step_flops(skeleton(root))
    assert flops.model == FIRST + 2 * (2 * FIRST)


def test_a_skeleton_has_no_values_and_leaves_the_module_alone(tmp_path: Path) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(8, 16), []
            self.tied = self.layer
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x)
            return self.tied(x) * self.scale  # type: ignore[no-any-return]

    module = Keeps()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = model_flops(module, [torch.zeros(3, 8)])
        fully_shard(module)
        assert model_flops(module, [torch.zeros(3, 8)]) == plain
    finally:
        dist.destroy_process_group()
    assert plain.model == 2 * FIRST
    assert module.seen == []
    bare = skeleton(module)
    assert type(bare) is Keeps
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    assert bare.layer is bare.tied


def test_shapes_stand_for_every_kind_of_argument() -> None:
    call = ModuleCall.of("", ({"x": [torch.zeros(3, 8)]},), {"flag": True})
    again = ModuleCall.of("", ({"x": [torch.ones(3, 8)]},), {"flag": True})
    other = ModuleCall.of("", ({"x": [torch.zeros(4, 8)]},), {"flag": True})
    assert call.key() == again.key() != other.key()

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, values: dict[str, list[Tensor]], flag: bool) -> dict[str, Tensor]:
            return {"out": self.layer(values["x"][0])} if flag else {}

    assert call_flops(skeleton(Nested()), call).model == 2 * FIRST


def test_types_that_do_not_fit_are_those_of_autocast() -> None:
    call = ModuleCall.of("", (torch.zeros(3, 8, dtype=torch.bfloat16),), {})
    assert call_flops(skeleton(nn.Linear(8, 16)), call).model == 2 * FIRST


def test_a_model_that_needs_values_is_told() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if float(x.sum()) >= 0 else x  # type: ignore[no-any-return]

    with pytest.raises(HeteroError, match=r"Reads '' cannot run on the meta device.*pass flops_per_sample"):
        model_flops(Reads(), [torch.zeros(3, 8)])
