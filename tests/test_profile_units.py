"""Units counted on meta and measured on the device agree with the whole model."""

from __future__ import annotations

import copy
import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hetero.errors import HeteroError
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.models.inputs import class_loss, preset_inputs
from lightning_hetero.models.presets import PRESETS, ViTConfig, build_preset
from lightning_hetero.models.units import find_units
from lightning_hetero.profiler import rehearsal, units
from lightning_hetero.profiler.analytic import ROOT, analytic_costs
from lightning_hetero.profiler.flops import count_flops
from lightning_hetero.profiler.meta import fused_attention, materialise, meta_copy
from lightning_hetero.profiler.units import profile_units

TINY_GPT = GPTConfig(vocabulary=61, context=16, width=24, depth=3, heads=4)


def tiny_vit() -> nn.Module:
    return ViTConfig(width=32, depth=3, heads=4, swiglu_width=43, patch_size=8, image_size=32, classes=7).build()


class Mixed(nn.Module):
    """What does not lie in units: activations and products between them, before the first and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.unused = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x * self.scale)
        x = self.layers(x)
        return torch.tanh(x @ x.transpose(1, 2))


CASES = {
    "vit": (tiny_vit, lambda n: [torch.randn(n, 3, 32, 32)]),
    "gpt": (lambda: GPT(TINY_GPT), lambda n: [torch.randint(0, 61, (n, 16))]),
    "swin": (
        lambda: timm.models.SwinTransformer(
            img_size=32, patch_size=4, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4), num_classes=5
        ),
        lambda n: [torch.randn(n, 3, 32, 32)],
    ),
    "mixed": (Mixed, lambda n: [torch.randn(n, 4, 8)]),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2),
        lambda n: [torch.randn(n, 5, 16)],
    ),
}


def kept_by(model, batch) -> int:
    """Bytes of all storages that a real forward keeps, parameters and buffers aside."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*batch)
    assert output is not None
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


def step(model, *batch):
    out = model(*batch)
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize("case", CASES)
def test_what_is_counted_on_meta_is_what_the_processor_does(case):
    build, inputs = CASES[case]
    torch.manual_seed(0)
    model = build()
    costs = analytic_costs(model, inputs(1))
    assert costs.parameters == sum(parameter.numel() for parameter in model.parameters())
    samples = 4
    forward = count_flops(model, *inputs(samples))
    both = count_flops(step, model, *inputs(samples))
    assert samples * sum(unit.forward_flops for unit in costs.units) == pytest.approx(forward, rel=1e-9)
    assert samples * sum(unit.backward_flops for unit in costs.units) == pytest.approx(both - forward, rel=1e-9)
    kept = kept_by(model, inputs(samples))
    # what is kept once per batch (positions) is counted per sample, rounded up
    assert samples * sum(unit.kept_activation_bytes for unit in costs.units) == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_measured_units_are_those_of_the_model(case):
    build, inputs = CASES[case]
    torch.manual_seed(0)
    model, example = build(), inputs(1)
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    remarks = []
    counted = analytic_costs(model, example)
    costs = profile_units(model, example, micro_batches=(1, 3), repeats=1, device="cpu", remark=remarks.append)
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    (kind,) = costs.devices
    assert costs.timed_types == (kind,)
    for unit, analytic in zip(costs.units, counted.units, strict=True):
        assert (unit.name, unit.parameters, unit.forward_flops, unit.output_bytes) == (
            analytic.name,
            analytic.parameters,
            analytic.forward_flops,
            analytic.output_bytes,
        )
        # the processor's kernels keep what was counted for a fused one
        assert unit.kept_activation_bytes == pytest.approx(analytic.kept_activation_bytes, abs=8, rel=1e-3)
        timing = unit.timings[kind]
        if unit.name not in ("unused", ROOT):
            assert [point.samples for point in timing.points] == [1, 3]
            assert timing.forward_s(3) > 0
        else:
            assert timing.forward_s(3) == timing.backward_s(3) == 0


def test_units_come_in_the_order_of_their_calls_with_their_outputs():
    costs = analytic_costs(GPT(TINY_GPT), [torch.zeros(1, 16, dtype=torch.int64)], loss=class_loss)
    names = ["embed.token", "embed.position", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert [unit.name for unit in costs.units] == names
    hidden, logits = 16 * 24 * 4, 16 * 61 * 4
    # embed.position returns no batch, but what the first block takes is passed on behind it
    assert [unit.output_bytes for unit in costs.units] == [hidden] * 6 + [logits]
    # log-probabilities, their gradient, and the targets
    assert costs.loss_bytes == pytest.approx(2 * logits + 16 * 8, abs=8)
    assert [str(shape) for shape in costs.inputs] == ["int64[16]"]


def test_tied_parameters_count_once_and_are_named():
    tied = analytic_costs(GPT(TINY_GPT), [torch.zeros(1, 16, dtype=torch.int64)])
    head = tied.units[-1]
    assert (head.parameters, head.shared_parameters) == (0, 61 * 24)
    assert [unit.shared_parameters for unit in tied.units[:-1]] == [0] * 6


def test_parameters_of_no_unit_are_not_lost():
    model = tiny_vit()
    costs = analytic_costs(model, [torch.zeros(1, 3, 32, 32)])
    first = costs.units[0]
    loose = model.cls_token.numel() + model.pos_embed.numel()
    own = sum(parameter.numel() for parameter in model.patch_embed.proj.parameters())
    assert (first.name, first.parameters, first.is_block) == ("patch_embed.proj", own + loose, False)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x * self.scale)
            return x

    root, *blocks = analytic_costs(Scaled(), [torch.zeros(1, 8)]).units
    assert (root.name, root.parameters, root.is_block) == (ROOT, 8, False)
    assert [unit.is_block for unit in blocks] == [True, True]


def test_the_first_unit_needs_no_gradient_of_its_input():
    first, block, *_ = analytic_costs(tiny_vit(), [torch.zeros(1, 3, 32, 32)]).units
    assert first.backward_flops == first.forward_flops
    assert block.backward_flops == 2 * block.forward_flops


def test_frozen_units_have_no_backward():
    model = tiny_vit()
    for unit in find_units(model)[:2]:
        unit.module.requires_grad_(False)
    model.cls_token.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    costs = profile_units(model, [torch.zeros(1, 3, 32, 32)], micro_batches=(1,), repeats=1, device="cpu")
    (kind,) = costs.devices
    assert [unit.backward_flops > 0 for unit in costs.units[:3]] == [False, False, True]
    assert [unit.timings[kind].backward_s(1) > 0 for unit in costs.units[:3]] == [False, False, True]


def test_half_the_bytes_in_16_bits():
    full, half = (analytic_costs(tiny_vit(), [torch.zeros(1, 3, 32, 32)], dtype=d) for d in ("float32", "bfloat16"))
    for one, two in zip(full.units, half.units, strict=True):
        assert one.output_bytes == 2 * two.output_bytes
        # statistics of norms and attention stay in 32 bits
        assert 0.5 * one.kept_activation_bytes <= two.kept_activation_bytes < 0.56 * one.kept_activation_bytes
        assert one.forward_flops == two.forward_flops
    assert half.inputs[0].dtype == half.dtype == "bfloat16"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_on_what_is_said_to_be_their_input(name):
    """Two blocks of each; the whole models are counted by the slow tests and by hand."""
    model = build_preset(name, device="meta", depth=2)
    costs = analytic_costs(model, preset_inputs(name), name=name, loss=class_loss)
    assert costs.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert costs.loss_bytes > 0
    with pytest.raises(HeteroError, match=f"{name} takes"):
        preset_inputs(name, sequence=4096)


@pytest.mark.slow
def test_a_model_larger_than_this_machine_is_counted():
    """vit_15b has 59 GB of parameters in 32 bits."""
    costs = analytic_costs(build_preset("vit_15b", device="meta"), preset_inputs("vit_15b"), dtype="bfloat16")
    assert len(costs.units) == 51
    assert costs.parameters == pytest.approx(14.72e9, rel=0.01)
    # 6 FLOPs per parameter and token, and the attention
    assert sum(u.forward_flops + u.backward_flops for u in costs.units) == pytest.approx(6 * 257 * 14.72e9, rel=0.03)


def count_rehearsals(monkeypatch):
    seen = []
    time = rehearsal.Rehearsal.time

    def counted(self, samples, repeats):
        seen.append(samples)
        return time(self, samples, repeats)

    monkeypatch.setattr(rehearsal.Rehearsal, "time", counted)
    return seen


def test_alike_blocks_are_measured_once_and_said_so(monkeypatch):
    seen = count_rehearsals(monkeypatch)
    remarks, progress = [], []
    costs = profile_units(
        tiny_vit(),
        [torch.zeros(1, 3, 32, 32)],
        micro_batches=(2, 1, 2),
        repeats=1,
        device="cpu",
        progress=lambda *args: progress.append(args),
        remark=remarks.append,
    )
    assert seen == [1, 2] * 4
    assert remarks == ["3 units are alike, blocks.0 to blocks.2: blocks.0 is measured for all of them"]
    assert progress[0] == (0, 8, "patch_embed.proj, 1 sample")
    assert progress[-1] == (8, 8, "done")
    timings = [unit.timings for unit in costs.units if unit.is_block]
    assert timings[0] == timings[1] == timings[2]


def test_blocks_that_differ_in_a_setting_are_measured_each(monkeypatch):
    seen = count_rehearsals(monkeypatch)
    model = tiny_vit()
    model.blocks[1].attn.fused_attn = False  # the same shapes, other work
    model.blocks[2].layer_idx = 2  # its place is no difference
    profile_units(model, [torch.zeros(1, 3, 32, 32)], micro_batches=(1,), repeats=1, device="cpu")
    assert len(seen) == 5


def test_a_unit_that_runs_twice_costs_twice():
    class Looped(nn.Module):
        def __init__(self, rounds: int) -> None:
            super().__init__()
            self.rounds = rounds
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

        def forward(self, x):
            for _ in range(self.rounds):
                x = self.layers(x)
            return x

    once, thrice = (analytic_costs(Looped(rounds), [torch.zeros(1, 16)]) for rounds in (1, 3))
    assert [u.forward_flops for u in thrice.units] == [3 * u.forward_flops for u in once.units]


def test_the_clock_is_read_around_forward_and_backward(monkeypatch):
    """A clock that jumps at each read: 1 s for a forward, 4 s for a backward, whatever the machine does."""
    # to the four marks of one run: begin, forward done, gradients drawn, backward done
    steps = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.5, 4.0]))
    monkeypatch.setattr(rehearsal._Clock, "mark", lambda self: self._marks.append(next(steps)))
    costs = profile_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [torch.zeros(1, 4)], device="cpu")
    for unit in costs.units:
        (timing,) = unit.timings.values()
        assert [(p.forward_s, p.backward_s) for p in timing.points] == [(1.0, 4.0)] * 3


def test_sizes_that_do_not_fit_are_left_out(monkeypatch):
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), [torch.zeros(1, 64)]
    weights = 2 * (64 * 64 + 64) * 4
    activations = 2 * 3 * 64 * 4  # kept input and twice the output, and their gradients
    remarks = []
    monkeypatch.setattr(units, "free_bytes", lambda device: weights + 4 * activations)
    costs = profile_units(model, inputs, micro_batches=(1, 4, 5), repeats=1, device="cpu", remark=remarks.append)
    (timing,) = costs.units[0].timings.values()
    assert [point.samples for point in timing.points] == [1, 4]
    assert f"({activations} bytes are missing): sizes from there on are left out" in " ".join(remarks)
    monkeypatch.setattr(units, "free_bytes", lambda device: weights)
    with pytest.raises(HeteroError, match=rf"unit '0' with 1 samples needs .* \({activations} bytes are missing\)"):
        profile_units(model, inputs, micro_batches=(1, 4), repeats=1, device="cpu")


def test_running_out_of_memory_ends_the_sizes(monkeypatch):
    time = rehearsal.Rehearsal.time

    def out_of_memory(self, samples, repeats):
        if samples > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return time(self, samples, repeats)

    monkeypatch.setattr(rehearsal.Rehearsal, "time", out_of_memory)
    model, remarks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), []
    costs = profile_units(model, [torch.zeros(1, 8)], repeats=1, device="cpu", remark=remarks.append)
    (timing,) = costs.units[0].timings.values()
    assert [point.samples for point in timing.points] == [1, 2]
    assert "the sizes from 4 on are left out" in remarks[-1]
    with pytest.raises(HeteroError, match="give smaller micro-batches"):
        profile_units(model, [torch.zeros(1, 8)], repeats=1, micro_batches=(4,), device="cpu")


def test_bad_arguments_are_listed():
    model, inputs = nn.Linear(4, 4), [torch.zeros(1, 4)]
    with pytest.raises(HeteroError) as caught:
        profile_units(model, inputs, device="meta", micro_batches=(0, 2), repeats=0)
    for expected in ("device is meta", "micro_batches are [0, 2]", "repeats is 0"):
        assert expected in str(caught.value)
    with pytest.raises(HeteroError, match="dtype is 'int8'"):
        analytic_costs(model, inputs, dtype="int8")
    with pytest.raises(HeteroError, match="no input"):
        analytic_costs(model, [])
    with pytest.raises(HeteroError, match="first dimensions of the inputs are 1, 2"):
        analytic_costs(model, [torch.zeros(1, 4), torch.zeros(2, 4)])
    with pytest.raises(HeteroError, match=r"Linear cannot run without values, .* with inputs \[2, 5\]"):
        analytic_costs(model, [torch.zeros(1, 5)])
    with pytest.raises(HeteroError, match="has no parameters"):
        analytic_costs(nn.ReLU(), inputs)


def test_meta_copies_have_no_values_and_the_same_ties():
    model = GPT(TINY_GPT)
    copied = meta_copy(model)
    assert all(tensor.is_meta for tensor in (*copied.parameters(), *copied.buffers()))
    assert copied.head.weight is copied.embed.token.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_materialised_blocks_have_values_that_compute():
    block = meta_copy(tiny_vit()).blocks[0]
    generator = torch.Generator("cpu").manual_seed(0)
    real = materialise(block, torch.device("cpu"), torch.bfloat16, generator)
    out = real(torch.randn(2, 17, 32, dtype=torch.bfloat16))
    assert out.isfinite().all()
    assert out.abs().max() > 0
    weight = torch.nn.Linear(4, 4)
    assert torch.equal(materialise(weight, torch.device("cpu"), torch.float32, generator).weight, weight.weight)


def test_attention_on_meta_is_the_fused_one_only_while_asked():
    plain = F.scaled_dot_product_attention
    with fused_attention():
        q, k = torch.zeros(2, 4, 5, 8, device="meta"), torch.zeros(2, 2, 7, 8, device="meta")
        assert F.scaled_dot_product_attention(q, k, k, enable_gqa=True).shape == q.shape
        real = torch.randn(2, 2, 5, 8)
        assert torch.equal(F.scaled_dot_product_attention(real, real, real), plain(real, real, real))
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, k)
    assert F.scaled_dot_product_attention is plain
