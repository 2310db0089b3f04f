"""What was planned is what runs: seen at the modules, in autograd, and at the process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.models.chain import ChainUnit, UnitChain
from lightning_hetero.schedule import Action
from lightning_hetero.strategies.pipe.routes import Route, Routes
from tests.harness import WarmRanks
from tests.pipe_fits import Pictures, PipeFit, run_pipeline

FIT = PipeFit(steps=1, counts=(6,), module={"drop": 0.0, "outside": False})


class Watched(Pictures):
    """Notes when its units run forward and backward."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[tuple[str, str]] = []
        for name in ("patch_embed", *(f"blocks.{i}" for i in range(len(self.model.blocks))), "norm", "head"):
            self.model.get_submodule(name).register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen.append((name, "F"))
            if output.requires_grad:
                output.register_hook(lambda grad: self.seen.append((name, "B")))

        return after


def watch(fit: PipeFit) -> tuple[list[tuple[str, str]], list[tuple[int, int]], list[str]]:
    """Run a fit; returns what its units did, its sends (rank, tag), and its row of the plan."""
    sends: list[tuple[int, int]] = []
    plain, made = dist.isend, []

    def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        sends.append((dst, tag))
        return plain(tensor, dst, group=group, tag=tag)

    class Fit(PipeFit):
        def make_module(self) -> Any:
            super().make_module()
            made.append(Watched(**self.module))
            return made[-1]

    own = Fit(**fit.__dict__)
    dist.isend = isend
    try:
        result = run_pipeline(own, own.plan())
    finally:
        dist.isend = plain
    trained = next(module for module in made if module.seen)
    row = own.plan().schedule_of(0).rows[dist.get_rank() if dist.is_initialized() else result["rank"]]
    assert result["executed"] == [str(action) for action in row]
    return trained.seen, sends, result["executed"]


@pytest.mark.parametrize(
    "fit",
    [
        FIT,
        replace(FIT, schedule="gpipe"),
        replace(FIT, extra=1),
        replace(FIT, cuts=((3, 2, 3, 2),), ranks_of=(2,), schedule="interleaved_1f1b"),
    ],
    ids=["1f1b", "gpipe", "deep warm-up", "interleaved"],
)
def test_units_and_messages_follow_the_plan(ranks: WarmRanks, fit: PipeFit) -> None:
    found = ranks.run(fit.world, watch, fit, process_group=False)
    cut = fit.cuts[0]
    names = ["patch_embed", *(f"blocks.{i}" for i in range(7)), "norm", "head"]
    stage_of = [stage for stage, units in enumerate(cut) for _ in range(units)]
    for rank, (seen, sends, executed) in enumerate(found):
        actions = [Action.parse(text) for text in executed]
        expected = []
        for action in actions:
            own = [name for name, stage in zip(names, stage_of, strict=True) if stage == action.stage]
            expected += [(name, action.kind) for name in (own if action.kind == "F" else reversed(own))]
        assert seen == expected
        last = len(cut) - 1
        letters = [
            (action, action.stage + (1 if action.kind == "F" else -1))
            for action in actions
            if (action.kind == "F" and action.stage < last) or (action.kind == "B" and action.stage > 0)
        ]
        away = [(a, to) for a, to in letters if to % fit.world != rank]
        # the first message of each route has a header of two tensors before it; a mask that is absent is said so once
        stages = len(cut)
        tags = [each for each in dict.fromkeys(sends) if abs(stages_on(each[1], stages)) == 1]
        assert [to % fit.world for _, to in away] == [dst for dst, _ in tags]
        assert [tag for _, tag in tags] == [
            ((a.micro_batch * stages + a.stage) * stages + to) * 2 + (a.kind == "F") for a, to in away
        ]


def stages_on(tag: int, stages: int) -> int:
    """How many stages a message goes on."""
    return tag // 2 % stages - tag // 2 // stages % stages


def chain_with_a_mask() -> UnitChain:
    def add(values: dict[str, Any]) -> dict[str, Any]:
        return {"hidden": values["hidden"] + values["mask"]}

    units = [ChainUnit(str(i), (), add, reads=("hidden", "mask") if i in (0, 3) else ("hidden",)) for i in range(4)]
    return UnitChain(
        tuple(units), begin=lambda x, m: {"hidden": x, "mask": m}, end=lambda v: v["hidden"], inputs=("hidden", "mask")
    )


def test_a_value_that_skips_stages_goes_straight_to_who_reads_it() -> None:
    routes = Routes.of(chain_with_a_mask(), [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert routes.all == (
        Route("hidden", 0, 1),
        Route("hidden", 1, 2),
        Route("mask", 0, 3),
        Route("hidden", 2, 3),
    )
    assert routes.targets(0) == (1, 3)
    assert routes.sources(3) == (0, 2)
    assert routes.between(0, 2) == ()
