"""The line that says how far this CPU kept up with what it emulated."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_hetero.cluster import Device
from lightning_hetero.emulation import Emulation
from lightning_hetero.emulation_report import EmulationReport, UnitPhase, late_line
from lightning_hetero.models.units import find_units
from tests.test_emulation import GIB


def report(rank: int, runs: int, late: int, speed: float | None = 40e9) -> EmulationReport:
    emulation = Emulation(Device("fast", "a", GIB, 40e9), rank, find_units(nn.Linear(2, 2)))
    phase = UnitPhase("u", "forward", runs, late, 0.5 * late, 100.0, 100.0, 0.1, 0.1)
    return replace(emulation.report(), speed_flops_per_s=speed, phases=(phase,))


def test_the_line_says_which_share_was_late() -> None:
    line = late_line([report(0, 100, 37), report(1, 100, 37), report(2, 100, 37), report(3, 100, 37)])
    assert line is not None
    assert line.startswith("emulated: this CPU is too slow to emulate 40 GFLOP/s on 4 ranks: 37 % of units were late")
    assert "rank 1 (fast) 37 % by 18.5 s" in line
    assert "all of them together 18 % longer" in line


def test_no_line_where_nothing_was_late() -> None:
    assert late_line([report(0, 100, 0)]) is None
    assert late_line([]) is None


def test_a_few_late_units_are_not_rounded_away() -> None:
    line = late_line([report(0, 10_000, 1, speed=None)])
    assert line is not None
    assert "emulate a fast on 1 rank: 1 % of units were late" in line
