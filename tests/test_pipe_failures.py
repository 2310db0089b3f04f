"""One stage fails in the middle of a schedule: all ranks end, quickly, with its message and what it was at."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import checkpoint as state_io
from tests.harness import WarmRanks
from tests.pipe_runs import Layout, Small, points, seeded, trainer_of

SECONDS = 30.0
"""until all ranks have ended; most of it is for a machine that does other things as well"""

THREE = Layout(cuts=((1, 3, 1),), counts=(4,))
PAIR = Layout(cuts=((2, 3), (4, 1)), counts=(3, 2))
UNIT_OF_STAGE = (0, 2, 4)


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, due: Any) -> Tensor:
        ctx.due = due
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.due():
            raise ArithmeticError("broken in backward")
        return gradients[0], None


class Breaking(Small):
    """Fails in its second step, on the third micro-batch that the place sees."""

    def __init__(self, where: str, stage: int) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        unit: Any = self.model[UNIT_OF_STAGE[stage]]
        if where in ("forward", "kill"):
            unit.register_forward_hook(lambda *args: self.look(where))
        if where == "backward":
            unit.register_forward_hook(lambda _, __, out: _FailsInBackward.apply(out, self.due))
        if where == "hook":
            unit.weight.register_hook(lambda grad: self.look(where))

    def due(self) -> bool:
        if not (self._trainer and self.trainer.training and self.global_step == 1):
            return False
        self.calls += 1
        return self.calls == 3

    def look(self, where: str) -> None:
        if self.where == where and self.due():
            if where == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError(f"broken in {where}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("before")
        logits = self.model(batch[0])
        self.look("after")
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])
        if self.where == "validation" and self.global_step > 1 and self.trainer.global_rank == 1:
            raise ArithmeticError("broken in validation")


class BreakingData(Dataset[Any]):
    """Fails from a sample of the second step on."""

    def __init__(self, fails: bool) -> None:
        self.data, self.fails = points(24), fails

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if self.fails and index >= 10:
            raise ArithmeticError("broken in dataset")
        return self.data[index]


def fit(layout: Layout, where: str, stage: int, folder: str, workers: int) -> None:
    def full(*args: Any) -> None:
        raise OSError("broken in saving: no space left on device")

    if where == "saving":
        state_io.put_in_place = full
    trainer = trainer_of(
        layout,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2)] if where == "saving" else [],
        enable_checkpointing=where == "saving",
    )
    train = DataLoader(BreakingData(where == "dataset"), batch_size=layout.batch, num_workers=workers)
    module = seeded(Breaking, where, stage)
    try:
        trainer.fit(module, train, DataLoader(points(4), batch_size=1))
    except BaseException as error:
        if any(thread.name == "hetero-failure-watch" for thread in threading.enumerate()):
            raise AssertionError("the failure watch is still running") from error
        raise


def ended(ranks: WarmRanks, layout: Layout, where: str, stage: int, folder: Any, workers: int = 0) -> list[Any]:
    began = time.monotonic()
    outcomes = ranks.run_outcomes(
        layout.world, fit, layout, where, stage, str(folder), workers, process_group=False, timeout=2 * SECONDS
    )
    assert time.monotonic() - began < SECONDS
    assert all(outcome[0] == "error" for outcome in outcomes), outcomes
    return outcomes


KINDS = {"forward": "forward", "backward": "backward", "hook": "backward", "before": "forward", "after": "forward"}


@pytest.mark.parametrize(
    ("where", "stage"),
    [
        ("forward", 1),
        ("backward", 0),
        *(pytest.param("forward", stage, marks=pytest.mark.slow) for stage in (0, 2)),
        *(pytest.param("backward", stage, marks=pytest.mark.slow) for stage in (1, 2)),
        ("hook", 1),
        ("before", 0),
        ("after", 2),
    ],
)
def test_in_the_middle_of_a_schedule(ranks: WarmRanks, tmp_path: Any, where: str, stage: int) -> None:
    outcomes = ended(ranks, THREE, where, stage, tmp_path)
    action = KINDS[where]
    for rank, (_, kind, message) in enumerate(outcomes):
        assert f"broken in {where}" in message, outcomes
        if rank == stage:
            assert kind == "ArithmeticError", outcomes
            continue
        assert kind == "RankFailedError", outcomes
        place = rf"rank {stage} failed in train, step 1, stage {stage}, {action} of micro-batch 2 \(action "
        assert re.match(place, message), message
        assert "test_pipe_failures.py:" in message, message


@pytest.mark.parametrize(
    ("where", "layout", "culprit", "place", "kind", "workers"),
    [
        ("dataset", THREE, 2, "train, step 1", "ArithmeticError", 0),
        ("dataset", THREE, 2, "train, step 1", "ArithmeticError", 1),
        ("dataset", PAIR, None, "train, step ", "ArithmeticError", 0),
        ("saving", THREE, 0, "train, step 2", "OSError", 0),
        ("validation", PAIR, 1, "validate, step ", "ArithmeticError", 0),
    ],
    ids=["dataset", "dataset, a worker", "dataset, two pipelines", "saving", "validation"],
)
@pytest.mark.slow
def test_elsewhere(
    ranks: WarmRanks, tmp_path: Any, where: str, layout: Layout, culprit: Any, place: str, kind: str, workers: int
) -> None:
    outcomes = ended(ranks, layout, where, 0, tmp_path, workers)
    for rank, (_, own, message) in enumerate(outcomes):
        assert f"broken in {where}" in message, outcomes
        if rank == culprit:
            assert own == kind, outcomes
        elif culprit is not None:
            assert own == "RankFailedError", outcomes
            assert message.startswith(f"rank {culprit} failed in {place}"), message
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]


@pytest.mark.parametrize("stage", range(3))
def test_a_killed_rank(ranks: WarmRanks, tmp_path: Any, stage: int) -> None:
    outcomes = ended(ranks, THREE, "kill", stage, tmp_path)
    for rank, (_, kind, message) in enumerate(outcomes):
        if rank == stage:
            assert kind == "RankDied", outcomes
            continue
        assert kind == "RankFailedError", outcomes
        assert message.startswith(f"rank {stage} failed in train, step 1"), message
        assert "its process ended without a word" in message, message


class Stopping(Callback):
    """Stops after the second step, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            trainer.should_stop = True


def stop_alone(rank: int) -> None:
    strategy = THREE.strategy(timeout=timedelta(seconds=6))
    trainer = trainer_of(THREE, strategy, callbacks=[Stopping(rank)])
    trainer.fit(seeded(Small), DataLoader(points(40), batch_size=THREE.batch))


@pytest.mark.parametrize("rank", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2))])
def test_a_rank_that_stops_alone_is_named(ranks: WarmRanks, rank: int) -> None:
    began = time.monotonic()
    others = [other for other in range(3) if other != rank]
    for status, _, message in ranks.run_outcomes(3, stop_alone, rank, process_group=False):
        assert status == "error"
        assert f"on ranks [{rank}] and not on ranks {others}" in message
        assert "reduce_boolean_decision" in message
    assert time.monotonic() - began < SECONDS
