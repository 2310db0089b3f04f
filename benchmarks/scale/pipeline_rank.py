"""The real set-up of hetero_pipe for one rank of many, and one step of its schedule, without the others.

The rank's part of the plan is made as in a fit (groups, stages, mail, gradients) and its row of the schedule runs, in a
process group that communicates with nobody. Tensors are real: a stage asks how many owners had a gradient, which fake
ones cannot say. Ranks know from the start what messages look like, as from a fit's second step on; the first step sends
that as well, in two more messages for each border that a rank sends over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.scale.cases import PipelineCase
from benchmarks.scale.recorder import Recorded, Recorder, made_groups
from benchmarks.scale.shard_rank import fake_world
from lightning_hetero.costs import ModelCosts, UnitCost
from lightning_hetero.membership.parameters import ParameterShape
from lightning_hetero.models.chain import Values
from lightning_hetero.models.gpt import GPT, GPTConfig
from lightning_hetero.schedule import FORWARD
from lightning_hetero.strategies.pipe.assembly import Assembly
from lightning_hetero.strategies.pipe.mail import TensorSpec
from lightning_hetero.strategies.pipe.placement import Placement, find_model
from lightning_hetero.strategies.pipe.randomness import Draws

_SHAPES = "full"
"""what the shapes of all micro-batches follow from: they are alike"""


@dataclass(frozen=True)
class PipelineRank:
    """What one rank really has and does.

    Args:
        set_up_s: seconds of the set-up.
        groups: ranks of every process group that was made after the first, in order.
        elements: of parameters that it has.
        seen: messages and sums of a step.
    """

    set_up_s: float
    groups: tuple[tuple[int, ...], ...]
    elements: int
    seen: tuple[Recorded, ...]


class Module(pl.LightningModule):
    """A GPT, and a parameter outside of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.temperature = nn.Parameter(torch.ones(1))


class _Step:
    """The two ends of a step."""

    def __init__(self, module: Module, assembly: Assembly, tokens: Sequence[Tensor]) -> None:
        self._module, self._assembly, self._tokens = module, assembly, tokens

    def begin(self, micro_batch: int) -> Values:
        return self._assembly.placement.chain.begin(self._tokens[micro_batch])

    def finish(self, micro_batch: int, output: Any) -> Tensor | None:
        loss: Tensor = (output * self._module.temperature).square().mean()
        return loss

    def draws(self, micro_batch: int) -> Draws:
        return Draws(0, 0, micro_batch)

    def computing(
        self, micro_batch: int, received: Sequence[Tensor | None], kind: str = FORWARD
    ) -> AbstractContextManager[Any]:
        return nullcontext()

    def inputs_came(self, at_s: float | None) -> None:
        pass

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stage_is_done(self, stage: int) -> None:
        self._assembly.gradients.stage_is_done(stage)


def make_placement(case: PipelineCase) -> Placement:
    """Return the model of a case with where its parts are, on the CPU."""
    blocks = len(case.plan.unit_names) - 3
    config = GPTConfig(
        vocabulary=64, context=case.sequence, width=case.width, depth=blocks, heads=2, tied_embedding=case.tied
    )
    module = Module(GPT(config))
    return Placement(module, *find_model(module))


def parameters_of(case: PipelineCase) -> tuple[ParameterShape, ...]:
    """Return the parameters of a case's model."""
    with torch.device("meta"):
        return make_placement(case).parameter_shapes()


def costs_of(case: PipelineCase, parameters: Sequence[ParameterShape]) -> ModelCosts:
    """Return the units of a case's model with their sizes and what they pass on: one vector of 32 bits a token."""
    sizes: dict[str, int] = {}
    for each in parameters:
        sizes[each.unit] = sizes.get(each.unit, 0) + each.elements
    passed_on = case.sequence * case.width * 4
    return ModelCosts(
        "GPT", tuple(UnitCost(name, sizes.get(name, 0), 0, 0, 0, passed_on) for name in case.plan.unit_names)
    )


def run_pipeline_rank(case: PipelineCase, rank: int) -> PipelineRank:
    """Set up one rank and run one step.

    Args:
        case: the plan and the model.
        rank: which one.

    Raises:
        UnsupportedError: if a message looks otherwise than the other ranks expect.
    """
    plan = case.plan
    torch.manual_seed(0)
    with fake_world(rank, plan.world_size), made_groups() as groups:
        begin_s = time.perf_counter()
        placement = make_placement(case)
        assembly = Assembly(plan, placement, rank, torch.device("cpu"), _make_group, lambda value: [value])
        set_up_s = time.perf_counter() - begin_s
        elements = sum(p.numel() for p in placement.root.parameters() if not p.is_meta)
        return PipelineRank(set_up_s, tuple(groups), elements, _run_step(case, assembly))


def _make_group(ranks: Sequence[int], backend: str | None = None) -> Any:
    return dist.new_group(sorted(ranks), backend="fake")


def _run_step(case: PipelineCase, assembly: Assembly) -> tuple[Recorded, ...]:
    """Run one step; returns what was sent, received and summed."""
    module = assembly.placement.root
    assert isinstance(module, Module)
    assembly.gradients.begin(keep=False)
    with Recorder() as recorder:
        if assembly.runtime is not None:
            count, samples = assembly.own.micro_batches, case.plan.micro_batch_size
            tokens = [torch.zeros(samples, case.sequence, dtype=torch.int64) for _ in range(count)]
            spec = {"hidden": TensorSpec((samples, case.sequence, case.width), torch.float32, requires_grad=True)}
            for stage in range(len(assembly.own.stages) - 1):
                assembly.runtime.mail._known[stage, stage + 1, _SHAPES] = spec
            schedule = assembly.schedule(count, training=True)
            assembly.runtime.run(schedule, _Step(module, assembly, tokens), [_SHAPES] * count)
        assembly.gradients.take(summed=True)
    return tuple(recorder.seen)
