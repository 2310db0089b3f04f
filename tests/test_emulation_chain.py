"""Units in a chain end where their seconds say, whatever comes between them; halves of a backward take half each."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lightning_hetero.cluster import Device
from lightning_hetero.costs import ModelCosts, UnitCost, UnitTiming
from lightning_hetero.emulation import Emulation
from lightning_hetero.models.units import Unit

UNIT_S, GAP_S = 0.03, 0.02


class TwoUnits(nn.Module):
    """Two layers with time lost between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.one(given)
        time.sleep(GAP_S)
        result: torch.Tensor = self.two(hidden)
        return result


def emulation(model: TwoUnits, halves: bool = False) -> Emulation:
    timings = {"slow": UnitTiming(0.0, UNIT_S, 0.0, 2 * UNIT_S)}
    costs = ModelCosts("m", tuple(UnitCost(name, 20, 1.0, 2.0, 1, 1, timings) for name in ("one", "two")))
    units = [Unit("one", model.one, True), Unit("two", model.two, True)]
    made = Emulation(Device("slow", "n", 2**30, 1e9), 0, units, costs, account_memory=False, halves=halves)
    made.start(model)
    return made


@pytest.mark.parametrize(("chained", "expected_s"), [(True, 2 * UNIT_S), (False, 2 * UNIT_S + GAP_S)])
def test_time_between_chained_units_is_not_the_devices(chained: bool, expected_s: float) -> None:
    model = TwoUnits()
    made = emulation(model)
    taken = []
    for _ in range(5):
        made.resume(None)  # a queue goes on from step to step, and what is between them would be hidden
        with made.step(samples=1, chained=chained):
            began_s = time.perf_counter()
            model(torch.randn(1, 4))
            taken.append(time.perf_counter() - began_s)
    # the least: a machine that is busy makes it longer
    assert min(taken) == pytest.approx(expected_s, abs=GAP_S / 2)
    assert min(taken) >= expected_s - 1e-3


def test_halves_of_a_backward_take_its_seconds_together() -> None:
    model = TwoUnits()
    made = emulation(model, halves=True)
    leaf = torch.randn(1, 4, requires_grad=True)
    weights = list(model.parameters())
    taken: dict[str, list[float]] = {"I": [], "W": []}
    for _ in range(3):
        with made.step(samples=1, chained=True):
            output = model(leaf).sum()
        for which, inputs in (("I", [leaf]), ("W", weights)):
            began_s = time.perf_counter()
            with made.step(samples=1, chained=True), made.half(which):
                torch.autograd.grad(output, inputs, retain_graph=True)
            taken[which].append(time.perf_counter() - began_s)
    assert min(taken["I"]) == pytest.approx(2 * UNIT_S, abs=UNIT_S / 2)
    assert min(taken["W"]) >= 2 * UNIT_S - 1e-3


def test_time_between_chained_steps_is_not_the_devices_unless_it_waited() -> None:
    """What a host does between two steps an accelerator's queue hides; where inputs were waited for, it begins then."""
    model = TwoUnits()
    made = emulation(model)
    taken: dict[str, list[float]] = {"busy": [], "waited": [], "hidden": []}
    for _ in range(5):
        made.resume(None)
        with made.step(samples=1, chained=True):
            model(torch.randn(1, 4))
        began_s = time.perf_counter()
        hidden_s = made.hidden_total_s
        time.sleep(GAP_S)
        with made.step(samples=1, chained=True):
            model(torch.randn(1, 4))
        taken["busy"].append(time.perf_counter() - began_s)
        taken["hidden"].append(made.hidden_total_s - hidden_s)
        time.sleep(GAP_S)
        arrived_s = time.perf_counter()
        made.resume(arrived_s)
        with made.step(samples=1, chained=True):
            model(torch.randn(1, 4))
        taken["waited"].append(time.perf_counter() - arrived_s)
    assert min(taken["busy"]) == pytest.approx(2 * UNIT_S, abs=GAP_S / 2)
    assert min(taken["waited"]) == pytest.approx(2 * UNIT_S, abs=GAP_S / 2)
    # between the steps, and between their units, where the gap is
    # the most: where the machine woke a unit late, its host saw more of it
    assert max(taken["hidden"]) == pytest.approx(2 * GAP_S, abs=GAP_S / 2)
    (forward, other) = made.report().phases
    assert {forward.late, other.late} == {0}
    assert forward.taken_s == pytest.approx(forward.target_s, rel=0.05)


def test_what_has_no_marks_is_hidden_whole() -> None:
    """An exported model's operations: nobody else is told of the seconds in which the host sleeps for them."""
    model = TwoUnits()
    made = Emulation(Device("slow", "n", 2**30, 1e6), 0, [Unit("one", model.one, True)], None, account_memory=False)
    made.start(model)
    with made.step(samples=1, chained=True):
        torch.randn(1, 40) @ torch.randn(40, 40)
    assert made.hidden_total_s == made.device_s >= 2 * 40 * 40 / 1e6
    made.stop()


def test_a_host_that_is_behind_its_device_is_late() -> None:
    model = TwoUnits()
    made = emulation(model)
    with made.step(samples=1, chained=True):
        model(torch.randn(1, 4))
    time.sleep(2 * UNIT_S)  # longer than the next unit takes
    began_s = time.perf_counter()
    with made.step(samples=1, chained=True):
        model(torch.randn(1, 4))
    # the first unit was over before its host came to it, and counts as late; the next one takes its time
    assert time.perf_counter() - began_s >= UNIT_S - 1e-3
    assert [phase.late for phase in made.report().phases] == [1, 0]
