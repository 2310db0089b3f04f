"""Several runs side by side: throughput over ranks, against the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.report.measured_rank import measured_ranks
from lightning_hetero.report.run import Run
from lightning_hetero.report.run_tables import EMULATED, percent
from lightning_hetero.report.table import ReportTable, cells

_SAME = 0.02
"""by how much samples per rank may differ in weak scaling"""


@dataclass(frozen=True)
class Point:
    """One run in a line of scaling.

    Attributes:
        name: of the run.
        ranks: how many.
        devices: their kinds.
        samples: of a step, over all ranks.
        samples_per_s: over all ranks; None where ranks are missing.
        own_samples_per_s: what its ranks could do together if they only computed: their samples over their own compute.
    """

    name: str
    ranks: int
    devices: frozenset[str]
    samples: float
    samples_per_s: float | None
    own_samples_per_s: float | None


@dataclass(frozen=True)
class ScalingLine:
    """Runs by one strategy, all on emulated devices or all on real ones.

    Attributes:
        strategy: its name.
        emulated: whether the devices are emulated.
        points: by ranks.
        simulated: whether nothing was run, and throughputs are predictions.
    """

    strategy: str
    emulated: bool
    points: tuple[Point, ...]
    simulated: bool = False

    @property
    def label(self) -> str:
        """Its name where there are several."""
        return f"{self.strategy}{', EMULATED' if self.emulated else ''}"

    @property
    def is_weak(self) -> bool:
        """Whether each rank has as many samples in all runs."""
        each = [point.samples / point.ranks for point in self.points]
        return max(each) <= min(each) * (1 + _SAME)

    @property
    def is_strong(self) -> bool:
        """Whether all runs have as many samples in a step."""
        samples = [point.samples for point in self.points]
        return max(samples) <= min(samples) * (1 + _SAME)

    @property
    def origin(self) -> str:
        """Where its throughputs are from."""
        return "simulated" if self.simulated else "measured"

    def ideal(self, point: Point) -> float | None:
        """Samples/s of as many ranks as the point has, at what each rank of the smallest run does.

        None where there is no other run, or its devices are of other kinds.
        """
        first = self.points[0]
        if len(self.points) == 1 or point.devices != first.devices:
            return None
        return None if first.samples_per_s is None else first.samples_per_s / first.ranks * point.ranks


def scaling_lines(runs: Sequence[Run]) -> list[ScalingLine]:
    """The runs by strategy; emulated devices and real ones never in one line."""
    groups: dict[tuple[str, bool], list[Point]] = {}
    for run in runs:
        groups.setdefault((run.strategy, run.emulated), []).append(_point(run))
    return [
        ScalingLine(strategy, emulated, tuple(sorted(points, key=lambda point: point.ranks)))
        for (strategy, emulated), points in groups.items()
    ]


def scaling_table(lines: Sequence[ScalingLine]) -> ReportTable:
    """One line a run."""
    rows = []
    for line in lines:
        for point in line.points:
            ideal, total, own = line.ideal(point), point.samples_per_s, point.own_samples_per_s
            rows.append(
                cells(
                    [
                        point.name,
                        line.label,
                        str(point.ranks),
                        f"{point.samples:.4g}",
                        f"{point.samples / point.ranks:.4g}",
                        None if total is None else f"{total:.4g}",
                        None if ideal is None else f"{ideal:.4g}",
                        None if ideal is None or total is None else percent(total / ideal),
                        None if own is None else f"{own:.4g}",
                        None if own is None or total is None else percent(total / own),
                    ]
                )
            )
    notes = [
        "ideal: the smallest run's samples/s for each rank, times the ranks; none for other devices, or a run alone",
        "only computing: what the ranks of this run would do together without waiting, input, optimizer or Python",
    ]
    notes += [f"{line.label}: not weak scaling, since samples a rank differ" for line in lines if not line.is_weak]
    if any(point.samples_per_s is None for line in lines for point in line.points):
        notes.append("no samples/s of runs whose ranks' lines are not all here")
    emulated = f" ({EMULATED})" if any(line.emulated for line in lines) else ""
    columns = (
        "run",
        "strategy",
        "ranks",
        "samples\na step",
        "samples\na rank",
        "samples/s",
        "ideal",
        "of the\nideal",
        "only\ncomputing",
        "of that",
    )
    return ReportTable(f"Runs side by side{emulated}", columns, tuple(rows), tuple(notes))


def _point(run: Run) -> Point:
    ranks = measured_ranks(run)
    devices = frozenset(each.device for each in ranks)
    samples = sum(each.samples for each in ranks)
    if run.missing_ranks:
        return Point(run.name, run.world_size, devices, samples * run.world_size / len(ranks), None, None)
    own = [each.own_samples_per_s for each in ranks if each.samples > 0]
    known = [rate for rate in own if rate is not None]
    total = sum(each.samples_per_s for each in ranks)
    return Point(run.name, run.world_size, devices, samples, total, sum(known) if len(known) == len(own) else None)
