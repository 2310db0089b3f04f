"""What an emulated pipeline takes: its schedule's time, never less, and not much more."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from benchmarks.pipeline_efficiency import arms
from benchmarks.pipeline_efficiency.case import PipelineCase
from lightning_hetero.strategies.pipe.runtime import PipelineRuntime
from tests.harness import WarmRanks

STEPS = 5


class Steps:
    """Lets an arm run so many steps."""

    def __init__(self) -> None:
        self.left = STEPS

    def ready(self, info: dict[str, Any]) -> None:
        pass

    def wait(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def step_done(self) -> None:
        pass


def seconds(case: PipelineCase) -> list[float]:
    """Of this rank's row of the schedule, in each step."""
    taken = []
    run = PipelineRuntime.run

    def timed(self: PipelineRuntime, *args: Any) -> None:
        began_s = time.perf_counter()
        run(self, *args)
        taken.append(time.perf_counter() - began_s)

    PipelineRuntime.run = timed  # type: ignore[method-assign]
    try:
        arms.hetero_pipe(case, int(os.environ["RANK"]), Steps())  # type: ignore[arg-type]
    finally:
        PipelineRuntime.run = run  # type: ignore[method-assign]
    return taken


@pytest.mark.parametrize("speeds", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
def test_an_emulated_step_takes_its_schedule_s_time(ranks: WarmRanks, speeds: tuple[float, ...]) -> None:
    """A stage that waited for a message begins when that came; one that did not, where it was done."""
    case = PipelineCase(cut=(2, 2), speeds=speeds, micro_batches=4, forward_ms=10, extra=0)
    first = ranks.run(2, seconds, case, process_group=False)[0]
    assert len(first) == STEPS
    assert min(first) >= case.predicted_s() - 1e-3
    assert min(first) <= 1.25 * case.predicted_s()  # the least: a machine that is busy makes it longer
