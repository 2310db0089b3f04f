"""StragglerMonitor decides by numbers: who is named when and since when, and when shares are asked to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.callbacks import StragglerMonitor, straggler_monitor
from lightning_hetero.callbacks.run_facts import Planned
from lightning_hetero.callbacks.step_record import StepRecord
from lightning_hetero.profiler.step_timeline import StepParts
from lightning_hetero.strategies.rebalance import Rebalancer
from tests.odd_fits import Said

SECONDS, SAMPLES = 0.1, 8
"""what each rank's share is planned to take"""


class Asked(Rebalancer):
    """Notes when it was asked, and by which numbers."""

    def __init__(self) -> None:
        self.asked: list[list[float]] = []

    def ask(self, measured_s: Sequence[float]) -> bool:
        self.asked.append(list(measured_s))
        return False


class Run:
    """Steps of three ranks as the last one sees them; the others take what is planned, whatever they wait for it.

    Args:
        own: what the last rank's compute takes in a step, as a multiple of what is planned.
        values: what other callbacks have added to a step.
        part: of a full batch, in a step.
        options: of the monitor.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        own: Callable[[int], float],
        steps: int,
        values: Callable[[int], dict[str, Any]] = lambda step: {},
        part: Callable[[int], float] = lambda step: 1.0,
        planned: bool = True,
        **options: Any,
    ) -> None:
        class Together:
            """In place of RankValues: the other ranks' rows beside those of this one."""

            def __init__(self, trainer: Any, width: int) -> None:
                self.rows: list[list[float]] = []

            def add(self, row: list[float | None]) -> None:
                self.rows.append([float("nan") if value is None else value for value in row])

            def take(self) -> list[list[list[float]]]:
                other = [
                    [step, part(int(step)) * SECONDS, expected, samples] for step, _, expected, samples in self.rows
                ]
                return [other, other, self.rows]

        monkeypatch.setattr(straggler_monitor, "RankValues", Together)
        self.monitor, self.rebalancer = StragglerMonitor(**options), Asked()
        self.written: list[tuple[str, dict[str, Any]]] = []
        self.asked_at: list[int] = []
        monitor: Any = self.monitor
        expects = Planned(2 * SECONDS, SECONDS, 0.5, None, SAMPLES) if planned else None
        monitor._meter = SimpleNamespace(
            planned=expects,
            facts=SimpleNamespace(rank=2, emulated=False),
            complete=lambda trainer, behind: None,
            write=lambda kind, values: self.written.append((kind, values)),
        )
        strategy = SimpleNamespace(root_device=torch.device("cpu"), rebalancer=self.rebalancer)
        trainer: Any = SimpleNamespace(world_size=3, strategy=strategy, log_every_n_steps=1000, loggers=[])
        with Said() as said:
            monitor.begin_fit(trainer, None)
            for step in range(1, steps + 1):
                parts = StepParts(own(step) * part(step) * SECONDS, rest_s=0.07)
                record = StepRecord(step, 0, 1, part(step) * SAMPLES, parts, values=values(step))
                monitor.step_is_complete(trainer, record)
                before = len(self.rebalancer.asked)
                monitor.step_is_over(trainer, step)
                self.asked_at += [step] * (len(self.rebalancer.asked) - before)
        self.said = said.infos

    @property
    def named(self) -> list[tuple[int, int, int]]:
        return [(each.rank, each.since_step, each.step) for each in self.monitor.stragglers]


def test_a_rank_is_named_once_until_it_keeps_up_and_again_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows end at steps 6, 11, 16, ..., since the first step warms up."""
    run = Run(monkeypatch, lambda step: 1.3 if 9 <= step < 22 or step >= 29 else 1.0, 36, rebalance=True)
    assert run.named == [(2, 9, 11), (2, 29, 31)]
    for straggler in run.monitor.stragglers:
        assert (straggler.compute_s, straggler.slowdown) == pytest.approx((1.3 * SECONDS, 1.3))
        assert (straggler.expected_s, straggler.planned) == (SECONDS, True)
    assert [text for text in run.said if "keeps up" in text] == ["StragglerMonitor: rank 2 keeps up again at step 26"]
    assert [(kind, values["since_step"]) for kind, values in run.written] == [("straggler", 9), ("straggler", 29)]
    # once for each window in which it is slow, by what the ranks' own compute took
    assert run.asked_at == [11, 16, 21, 31, 36]
    assert run.rebalancer.asked == [pytest.approx([SECONDS, SECONDS, 1.3 * SECONDS])] * 5
    assert list(run.monitor.slow_ranks) == [2]


def test_a_rank_that_keeps_up_again_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 1.3 if step < 12 else 1.0, 16)
    assert run.named == [(2, 2, 6)]
    assert run.monitor.slow_ranks == {}
    assert run.asked_at == []  # nobody wants shares to move


@pytest.mark.parametrize(("slowdown", "named"), [(1.14, 0), (1.16, 1), (1.3, 1)])
def test_over_the_threshold_and_not_below(monkeypatch: pytest.MonkeyPatch, slowdown: float, named: int) -> None:
    for planned in (True, False):
        run = Run(monkeypatch, lambda step: slowdown, 6, planned=planned, threshold=0.15)
        assert len(run.named) == named
        assert [each.planned for each in run.monitor.stragglers] == [planned] * named


def test_a_rank_that_gets_slower_still_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 1.3 if step <= 11 else 1.6, 21)
    assert run.named == [(2, 2, 6), (2, 2, 16)]


def test_some_slow_steps_make_no_straggler(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, lambda step: 5.0 if step % 5 < 2 else 1.0, 21)
    assert run.named == []


def test_steps_that_are_longer_for_a_reason_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, those that are looked at, and a short batch, of which less is expected."""
    looked_at = {3: {"sampled": True}, 5: {"traced": True}}
    run = Run(
        monkeypatch,
        lambda step: 5.0 if step in (1, 3, 5) else 1.0,
        8,
        values=lambda step: looked_at.get(step, {}),
        part=lambda step: 0.25 if step == 7 else 1.0,
        window=1,
    )
    assert run.named == []
    # of a short batch as much is expected as it has samples
    run = Run(monkeypatch, lambda step: 1.5, 2, part=lambda step: 0.5, window=1)
    assert [each.expected_s for each in run.monitor.stragglers] == [SECONDS / 2]
