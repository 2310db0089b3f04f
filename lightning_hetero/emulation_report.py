"""What an emulated rank says at the end: targets, times taken, and how much came too late."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.cluster import Device
from lightning_hetero.profiler.marks import Phase
from lightning_hetero.units import format_flops_per_s, format_seconds

_KEPT = 4096
"""Runs of a unit of which the medians are; totals are of all."""


class PhaseTally:
    """Sums of one unit's forwards, or of its backwards."""

    def __init__(self) -> None:
        self.runs = 0
        self.late = 0
        self.late_s = 0.0
        self.target_s = 0.0
        self.taken_s = 0.0
        self.recent: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, target_s: float, taken_s: float) -> None:
        """Add a run."""
        self.runs += 1
        self.target_s += target_s
        self.taken_s += taken_s
        self.recent.append((target_s, taken_s))

    def add_late(self, late_s: float) -> None:
        """Count a run, added before or after, as late by so many seconds."""
        self.late += 1
        self.late_s += late_s


@dataclass(frozen=True)
class UnitPhase:
    """One unit's forwards, or its backwards.

    Args:
        unit: the unit's name, or "outside units".
        phase: "forward" or "backward".
        runs: how many ran.
        late: of how many the real compute took longer than the target, and could not be made up for.
        late_s: by how many seconds in all.
        target_s: seconds that they should have taken, in all.
        taken_s: seconds that they took, in all.
        median_target_s: median of the targets, of the last 4096 runs.
        median_taken_s: median of the times taken, of the last 4096 runs.
    """

    unit: str
    phase: str
    runs: int
    late: int
    late_s: float
    target_s: float
    taken_s: float
    median_target_s: float
    median_taken_s: float


@dataclass(frozen=True)
class EmulationReport:
    """One rank's emulation so far. Units without a target (no FLOPs) are in ``phases`` and in no count.

    Args:
        rank: the rank.
        device_type: type of the emulated device.
        speed_flops_per_s: its true speed; ``None`` where the targets come from a costs file.
        memory_bytes: its memory.
        peak_bytes: the most that was live; ``None`` where memory was not accounted.
        phases: per unit and phase.
    """

    rank: int
    device_type: str
    speed_flops_per_s: float | None
    memory_bytes: int
    peak_bytes: int | None
    phases: tuple[UnitPhase, ...]

    @property
    def units_run(self) -> int:
        """Forwards and backwards with a target."""
        return sum(phase.runs for phase in self._timed)

    @property
    def units_late(self) -> int:
        """Those whose real compute took longer than their target."""
        return sum(phase.late for phase in self._timed)

    @property
    def late_share(self) -> float:
        """``units_late / units_run``, 0 before any ran."""
        return self.units_late / self.units_run if self.units_run else 0.0

    @property
    def late_s(self) -> float:
        """Seconds by which late units overran."""
        return sum(phase.late_s for phase in self._timed)

    @property
    def target_s(self) -> float:
        """Seconds that all units should have taken."""
        return sum(phase.target_s for phase in self.phases)

    @property
    def taken_s(self) -> float:
        """Seconds that all units took, those without a target too."""
        return sum(phase.taken_s for phase in self.phases)

    @property
    def _timed(self) -> tuple[UnitPhase, ...]:
        return tuple(phase for phase in self.phases if phase.target_s > 0)

    @property
    def what(self) -> str:
        """What was emulated: the speed, or the device type where a costs file gave the times."""
        if self.speed_flops_per_s is None:
            return f"a {self.device_type}"
        return format_flops_per_s(self.speed_flops_per_s)

    @classmethod
    def of(
        cls,
        rank: int,
        device: Device,
        tallies: Mapping[tuple[str, Phase], PhaseTally],
        *,
        from_costs: bool,
        peak_bytes: int | None,
    ) -> EmulationReport:
        """The report of the sums so far."""
        phases = tuple(
            UnitPhase(
                unit=unit,
                phase=phase,
                runs=tally.runs,
                late=tally.late,
                late_s=tally.late_s,
                target_s=tally.target_s,
                taken_s=tally.taken_s,
                median_target_s=statistics.median(target_s for target_s, _ in tally.recent),
                median_taken_s=statistics.median(taken_s for _, taken_s in tally.recent),
            )
            for (unit, phase), tally in tallies.items()
        )
        return cls(
            rank=rank,
            device_type=device.type,
            speed_flops_per_s=None if from_costs else device.actual_speed_flops_per_s,
            memory_bytes=device.memory_bytes,
            peak_bytes=peak_bytes,
            phases=phases,
        )


def late_line(reports: Sequence[EmulationReport]) -> str | None:
    """One line that says how many units were late, labelled as emulated; ``None`` when none was.

    Args:
        reports: of every rank of the job.
    """
    late = [report for report in reports if report.units_late]
    if not late:
        return None
    ranks = f"{len(reports)} rank{'s' if len(reports) > 1 else ''}"
    whats = " and ".join(dict.fromkeys(report.what for report in late))
    share = sum(report.units_late for report in reports) / sum(report.units_run for report in reports)
    each = ", ".join(
        f"rank {report.rank} ({report.device_type}) {_percent(report.late_share)} by "
        f"{format_seconds(report.late_s)} in all"
        for report in late
    )
    by = sum(report.late_s for report in reports) / sum(report.target_s for report in reports)
    return (
        f"emulated: this CPU is too slow to emulate {whats} on {ranks}: {_percent(share)} of units were late, which "
        f"made all of them together {_percent(by)} longer: {each}"
    )


def _percent(share: float) -> str:
    # Rounding must not turn a few late units into none.
    return f"{max(1, round(100 * share))} %"
