"""Where a step's time goes, by a clock that the test moves; and a peak that several readers begin anew."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from lightning_hetero.callbacks.timed_collectives import time_collectives
from lightning_hetero.profiler import step_timeline
from lightning_hetero.profiler.shared_peak import SharedPeak
from lightning_hetero.profiler.step_timeline import BLOCKED, INPUT, MESSAGES, OPTIMIZER, REST, StepParts, StepTimeline

CPU = torch.device("cpu")


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    class Clock:
        now = 100.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(step_timeline, "time", clock)

    def move(seconds: float) -> None:
        clock.now += seconds

    return move


def unit(timeline: StepTimeline, advance: Callable[[float], None], phase: str, seconds: float) -> None:
    timeline.begin(0, phase)
    advance(seconds)
    timeline.end(0, phase)


def step(timeline: StepTimeline, advance: Callable[[float], None]) -> StepParts:
    timeline.enter(INPUT)
    advance(1)
    timeline.enter(BLOCKED if timeline.between == BLOCKED else REST)
    advance(2)
    unit(timeline, advance, "forward", 10)
    advance(3)  # between units
    unit(timeline, advance, "forward", 10)
    advance(4)  # the loss
    timeline.enter(REST)
    unit(timeline, advance, "backward", 20)
    advance(5)  # between units
    unit(timeline, advance, "backward", 20)
    advance(6)  # gradients are waited for
    timeline.end_backward()
    timeline.enter(OPTIMIZER)
    advance(7)
    timeline.enter(REST)
    with timeline.within(BLOCKED):
        advance(8)
    advance(9)
    timeline.close_step()
    (parts,) = timeline.take_steps()
    return parts


def test_a_rank_that_shards_is_blocked_between_units(advance: Callable[[float], None]) -> None:
    parts = step(StepTimeline(CPU, BLOCKED, BLOCKED), advance)
    assert parts == StepParts(compute_s=60, blocked_s=2 + 3 + 5 + 6 + 8, input_s=1, optimizer_s=7, rest_s=4 + 9)
    assert parts.step_s == 105
    assert parts.idle_share == pytest.approx(45 / 105)


def test_a_replica_is_blocked_at_the_end_of_its_backward(advance: Callable[[float], None]) -> None:
    parts = step(StepTimeline(CPU, REST, BLOCKED), advance)
    assert (parts.blocked_s, parts.rest_s, parts.step_s) == (6 + 8, 2 + 3 + 4 + 5 + 9, 105)


def test_one_device_is_blocked_by_nothing_of_its_own(advance: Callable[[float], None]) -> None:
    timeline = StepTimeline(CPU)
    assert step(timeline, advance).blocked_s == 8  # what was said to block
    assert step(timeline, advance).step_s == 105  # and the next one begins where that ended


def test_micro_batches(advance: Callable[[float], None]) -> None:
    timeline = StepTimeline(CPU, BLOCKED, BLOCKED)
    timeline.enter(REST)
    for _ in range(2):
        unit(timeline, advance, "forward", 10)
        advance(1)
        unit(timeline, advance, "backward", 20)
        advance(2)
    timeline.end_backward()
    timeline.close_step()
    (parts,) = timeline.take_steps()
    assert parts == StepParts(compute_s=60, blocked_s=4, rest_s=2)


def test_a_unit_within_another_counts_once(advance: Callable[[float], None]) -> None:
    timeline = StepTimeline(CPU)
    timeline.enter(REST)
    timeline.begin(0, "backward")
    unit(timeline, advance, "forward", 10)
    advance(5)
    timeline.end(0, "backward")
    timeline.end(7, "backward")  # an end without a begin
    timeline.close_step()
    assert next(timeline.take_steps()) == StepParts(compute_s=15)


def test_stages_wait_between_their_actions(advance: Callable[[float], None]) -> None:
    timeline = StepTimeline(CPU)
    timeline.enter(MESSAGES)
    advance(3)
    timeline.begin_action()
    advance(1)
    unit(timeline, advance, "forward", 10)
    timeline.end_action()
    advance(4)
    timeline.enter(REST)
    timeline.begin_action()  # outside of a schedule
    advance(2)
    timeline.close_step()
    parts = next(timeline.take_steps())
    assert parts == StepParts(compute_s=10, messages_s=7, rest_s=3)
    hidden = parts.with_hidden(5)
    assert hidden == StepParts(compute_s=15, messages_s=5, rest_s=0)
    assert hidden.step_s == parts.step_s
    assert parts.with_hidden(100).step_s == parts.step_s


def test_pauses_are_no_steps(advance: Callable[[float], None]) -> None:
    timeline = StepTimeline(CPU)
    advance(50)
    timeline.enter(INPUT)
    advance(1)
    timeline.pause()
    with timeline.within(BLOCKED):
        advance(50)
    unit(timeline, advance, "forward", 50)  # of a validation
    assert timeline.paused
    timeline.enter(REST)
    advance(2)
    timeline.close_step()
    timeline.pause()
    advance(50)
    timeline.enter(INPUT)
    advance(4)
    timeline.close_step()
    assert list(timeline.take_steps()) == [StepParts(input_s=1, rest_s=2), StepParts(input_s=4)]


def test_readers_of_a_peak_do_not_disturb_each_other() -> None:
    now, peak = [5], [5]

    def reset() -> None:
        peak[0] = now[0]

    def use(value: int) -> None:
        now[0] = value
        peak[0] = max(peak[0], value)

    shared = SharedPeak(lambda: peak[0], reset)
    one, other = shared.reader(), shared.reader()
    use(20)
    use(3)
    assert one.peek() == one.take() == 20
    use(7)
    assert one.peek() == 7
    assert other.take() == 20
    use(2)
    assert (one.take(), other.take()) == (7, 7)
    assert (one.take(), other.take()) == (2, 2)


def test_a_strategys_collectives_block(advance: Callable[[float], None]) -> None:
    class Strategy:
        def reduce(self, value: float, by: float = 1) -> float:
            advance(3)
            return value * by

    strategy, timeline = Strategy(), StepTimeline(CPU)
    timeline.enter(OPTIMIZER)
    undo = time_collectives(strategy, timeline)
    assert strategy.reduce(2, by=5) == 10
    advance(1)
    undo()
    strategy.reduce(2)
    timeline.close_step()
    assert next(timeline.take_steps()) == StepParts(blocked_s=3, optimizer_s=4)


def test_a_timed_collective_is_taken_for_the_strategys_own() -> None:
    """Lightning compares the one that a name was logged with before with the one that it is logged with now."""

    class Strategy:
        def reduce(self, value: float) -> float:
            return value

    strategy, other = Strategy(), Strategy()
    own = strategy.reduce
    undo = time_collectives(strategy, StepTimeline(CPU))
    assert strategy.reduce is not own
    assert strategy.reduce == own
    assert own == strategy.reduce
    assert hash(own) == hash(strategy.reduce)
    assert own != other.reduce
    assert strategy.reduce != other.reduce
    assert copy.deepcopy(strategy.reduce) is strategy.reduce
    undo()
    assert "reduce" not in strategy.__dict__
