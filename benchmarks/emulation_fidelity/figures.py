"""Figures of the reports: taken over target, in total and by unit and phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hetero.emulation_report import EmulationReport, UnitPhase

TIMED_S = 1e-3
"""Units with a shorter target are made up for by others, and have no figure of their own."""


LATE_RUNS = 0.1
"""A unit and phase with a larger share of late runs counts as one whose real compute is not under its target."""


def timed(report: EmulationReport, in_time: bool) -> list[UnitPhase]:
    """Units and phases that are timed one by one: those in time, or the others."""
    long_enough = [p for p in report.phases if p.median_target_s >= TIMED_S]
    return [p for p in long_enough if (p.late <= LATE_RUNS * p.runs) == in_time]


def figures(reports: Sequence[EmulationReport]) -> dict[str, Any]:
    """Totals, medians and late units over all ranks.

    Returns:
        ``total_ratio``: seconds taken over target, all units of all ranks; ``worst_rank_ratio``: of the rank
        that is farthest from 1; ``worst_median_ratio``: of the unit and phase that is farthest from 1, among
        those in time; ``late_share``; ``late_s``.
    """
    ratios = [report.taken_s / report.target_s for report in reports]
    medians = [p.median_taken_s / p.median_target_s for report in reports for p in timed(report, in_time=True)]
    return {
        "total_ratio": sum(r.taken_s for r in reports) / sum(r.target_s for r in reports),
        "worst_rank_ratio": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "worst_median_ratio": max(medians, key=lambda ratio: abs(ratio - 1), default=None),
        "late_share": sum(r.units_late for r in reports) / sum(r.units_run for r in reports),
        "late_s": sum(r.late_s for r in reports),
        "not_in_time": [f"rank {r.rank} {p.unit} {p.phase}" for r in reports for p in timed(r, in_time=False)],
    }
