"""The figures of the fidelity benchmark, from reports made by hand."""

from __future__ import annotations

import pytest

from benchmarks.emulation_fidelity.__main__ import is_within
from benchmarks.emulation_fidelity.figures import figures
from lightning_hetero.emulation_report import EmulationReport, UnitPhase


def phase(unit: str, target_s: float, taken_s: float, late: int = 0) -> UnitPhase:
    late_s = max(0.0, taken_s - target_s) if late else 0.0
    return UnitPhase(unit, "forward", 10, late, late_s, 10 * target_s, 10 * taken_s, target_s, taken_s)


def report(rank: int, *phases: UnitPhase) -> EmulationReport:
    return EmulationReport(rank, "fast", 1e9, 1 << 30, None, phases)


def test_totals_hold_everything_and_medians_what_was_in_time() -> None:
    found = figures(
        [
            report(0, phase("block", 0.1, 0.101), phase("head", 1e-5, 2e-4), phase("norm", 0.0, 0.002)),
            report(1, phase("block", 0.1, 0.099), phase("stem", 0.01, 0.02, late=5)),
        ]
    )
    assert found["total_ratio"] == pytest.approx((0.1032 + 0.119) / (0.10001 + 0.11))
    assert found["worst_rank_ratio"] == pytest.approx(0.119 / 0.11)
    assert found["worst_median_ratio"] == pytest.approx(1.01)
    assert found["not_in_time"] == ["rank 1 stem forward"]
    assert found["late_share"] == pytest.approx(5 / 40)


def test_where_all_is_late_there_is_no_median() -> None:
    assert figures([report(0, phase("block", 0.1, 0.5, late=10))])["worst_median_ratio"] is None
    assert not is_within(None)


@pytest.mark.parametrize(("ratio", "within"), [(1.0, True), (1.019, True), (0.979, False), (1.021, False)])
def test_two_percent_is_the_limit(ratio: float, within: bool) -> None:
    assert is_within(ratio) == within
