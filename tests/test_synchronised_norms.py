"""Plans that SyncBatchNorm cannot run; torch has it for GPUs only, so what refuses them is called by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies.loss_check import synchronised_norm_problems
from lightning_hetero.strategies.opening import Opening

TYPES = ("fast", "slow", "slow")
EVEN = ShardPlan(6, (2, 2, 2), ((0, 1), (2,)), TYPES)
IDLE = ShardPlan(6, (4, 2, 0), ((0, 1, 2),), TYPES)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (EVEN, []),
        (ShardPlan(6, (2, 2, 2), ((0, 1), (2,)), TYPES, micro_batches=(2, 2)), []),
        (ShardPlan(6, (2, 2, 2), ((0, 1), (2,)), TYPES, activation_checkpointing=(True,) * 3), []),
        (IDLE, ["ranks 2 have"]),
        (ShardPlan(6, (4, 1, 1), ((0, 1, 2),), TYPES, micro_batches=(2,)), ["ranks 1, 2 have"]),
        (ShardPlan(6, (2, 2, 2), ((0, 1), (2,)), TYPES, micro_batches=(1, 2)), ["groups run 1, 2 micro-batches"]),
        (
            ShardPlan(6, (6, 0, 0), ((0, 1), (2,)), TYPES, activation_checkpointing=(True, True, False)),
            ["ranks 1, 2 have", "activation_checkpointing [True, True, False]"],
        ),
    ],
)
def test_all_ranks_have_to_meet_in_each_layer_with_samples(plan: ShardPlan, said: list[str]) -> None:
    problems = synchronised_norm_problems(plan)
    assert [problem[: len(start)] for problem, start in zip(problems, said, strict=True)] == said


def _open(layer: nn.Module, plan: ShardPlan | None) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), layer)
    module.trainer = None
    strategy: Any = SimpleNamespace(lightning_module=module, plan=plan)
    Opening(strategy, "warn", count_flops=False).run(None)


def test_such_a_plan_is_refused_where_there_are_such_layers() -> None:
    with pytest.raises(UnsupportedError, match=r"SyncBatchNorm in training mode \(1\) cannot run.*\n.*ranks 2 have"):
        _open(nn.SyncBatchNorm(2), IDLE)


@pytest.mark.parametrize(
    ("layer", "plan"),
    [
        (nn.SyncBatchNorm(2), EVEN),
        (nn.SyncBatchNorm(2), None),
        (nn.SyncBatchNorm(2).eval(), IDLE),
        (nn.BatchNorm1d(2), IDLE),
    ],
)
def test_what_can_run_is_not_refused(layer: nn.Module, plan: ShardPlan | None) -> None:
    _open(layer, plan)
