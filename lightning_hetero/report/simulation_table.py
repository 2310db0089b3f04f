"""Simulated steps as tables, a line a rank or a line a point of a sweep; what a change would bring, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from lightning_hetero.planner.sweep import Change, SweepPoint
from lightning_hetero.report.run_tables import EMULATED, percent
from lightning_hetero.report.scaling import Point, ScalingLine
from lightning_hetero.report.table import ReportTable, cells
from lightning_hetero.simulator.simulated_step import SimulatedRank, SimulatedStep
from lightning_hetero.units import format_bytes, format_seconds

SIMULATED = "simulated, nothing was run"
ALONE = "the devices alone, if none waited, communicated or computed anything twice"


def step_table(step: SimulatedStep, what: str, emulated: bool = False) -> ReportTable:
    """One line a rank; neighbouring ranks that do the same share a line.

    Args:
        step: to be shown.
        what: it is of ("FULL_SHARD of vit_1b on frontier").
        emulated: whether its devices are.
    """
    rows = []
    for first, last in _alike(step.ranks):
        rows.append(
            cells(
                [
                    str(first.rank) if first is last else f"{first.rank} to {last.rank}",
                    first.node if first.node == last.node else f"{first.node} to {last.node}",
                    first.device,
                    str(first.samples),
                    _share(first.busy_s, step),
                    _share(first.exposed_s, step),
                    _share(first.rest_s, step),
                    _share(first.idle_s, step),
                    format_bytes(first.peak_bytes),
                    percent(first.peak_bytes / first.capacity_bytes),
                    None if first.energy_j is None else f"{first.energy_j:.4g}",
                ]
            )
        )
    parts = ("busy", "exposed\ncomm", "rest", "waiting")
    columns = ("rank", "node", "device", "samples", *parts, "peak memory", "of its\ndevice", "energy\nJ")
    title = f"{what} ({SIMULATED}{f'; {EMULATED}' if emulated else ''})"
    left = ("device", "node")
    return ReportTable(title, columns, tuple(rows), tuple(step_lines(step)), left).without_empty()


def step_lines(step: SimulatedStep) -> list[str]:
    """What is to be said of a whole step."""
    throughput = f"{rate(step.samples_per_s)} samples/s with {step.global_batch_size} samples"
    lines = [
        f"step {format_seconds(step.step_s)}, {throughput}",
        f"{ALONE}: {rate(step.alone_samples_per_s)} samples/s; the step has {percent(step.share_of_alone)} of that",
    ]
    if step.strategy == "hetero_pipe":
        lines.append("a message that a stage waits for counts as waiting, as the pipeline's bubble does")
    lines += _misfits(step)
    joules = step.energy_j
    if joules is None:
        lines.append(f"no energy: {step.no_energy}")
    else:
        lines.append(f"energy {joules:.4g} J a step, {joules / step.global_batch_size:.3g} J a sample")
    return [*lines, *(f"assumed: {text}" for text in step.assumed)]


def sweep_table(points: Sequence[SweepPoint]) -> ReportTable:
    """One line a point."""
    ideals = ideal_samples_per_s(points)
    mixed = any(len(point.cluster.types) > 1 for point in points)
    head = ("model", "sharding", "nodes", "ranks", "samples\na step")
    seconds = ("step", "samples/s", "of the\nideal", "of devices\nalone", "busy", "exposed\ncomm", "waiting")
    columns = (*head, *seconds, "fullest\nrank", "J/sample")
    rows = tuple(
        (*_asked(point), *cells(_found(point, ideal, mixed) or [None] * (len(columns) - len(head))))
        for point, ideal in zip(points, ideals, strict=True)
    )
    steps = [point.step for point in points if point.step is not None]
    notes = _said_once(points)
    if any(ideal is not None for ideal in ideals):
        notes.insert(0, "of the ideal: what each rank of the smallest number of nodes does, times the ranks")
    if mixed and any(step.fits for step in steps):
        notes.insert(0, f"of {ALONE}: samples/s over theirs together, each at its own speed")
    notes += dict.fromkeys(f"assumed: {text}" for step in steps for text in step.assumed)
    notes += dict.fromkeys(f"no energy: {step.no_energy}" for step in steps if step.no_energy)
    emulated = f"; {EMULATED}" if any(point.cluster.emulate for point in points) else ""
    names = ", ".join(dict.fromkeys(point.cluster.name for point in points))
    return ReportTable(
        f"{names} ({SIMULATED}{emulated})", columns, rows, tuple(notes), ("model", "sharding")
    ).without_empty()


def ideal_samples_per_s(points: Sequence[SweepPoint]) -> list[float | None]:
    """For each point what each rank of the smallest number of nodes does, times its ranks.

    None where there is no smaller one of the same devices in the same proportion, or the point does not run.
    """
    found: dict[int, float | None] = {}
    for line, own in _lines(points):
        ideals = [line.ideal(drawn) for drawn in line.points]
        if sum(ideal is not None for ideal in ideals) > 1:  # the smallest alone is all of its own ideal
            found |= {id(point): ideal for point, ideal in zip(own, ideals, strict=True)}
    return [found.get(id(point)) for point in points]


def _asked(point: SweepPoint) -> tuple[str, ...]:
    return point.model, point.sharding, str(point.nodes), str(point.ranks), str(point.global_batch_size)


def _found(point: SweepPoint, ideal: float | None, mixed: bool) -> list[str | None]:
    """Cells of what was simulated; none of a point without a step."""
    step = point.step
    if step is None:
        return []
    return [
        format_seconds(step.step_s),
        rate(step.samples_per_s) if step.fits else "does not fit",
        None if ideal is None else percent(step.samples_per_s / ideal),
        percent(step.share_of_alone) if mixed and step.fits else None,
        percent(step.busy_share),
        percent(step.exposed_share),
        percent(step.bubble_share),
        format_bytes(step.fullest.peak_bytes),
        None if step.energy_j is None else f"{step.energy_j / step.global_batch_size:.3g}",
    ]


def _said_once(points: Sequence[SweepPoint]) -> list[str]:
    """Why points do not run: a text for all numbers of nodes of which it is true."""
    nodes: dict[tuple[str, str, str], list[str]] = {}
    for point in points:
        for text in [point.problem] if point.step is None else _misfits(point.step):
            nodes.setdefault((point.model, point.sharding, text), []).append(str(point.nodes))
    return [
        f"{model}, {sharding}, {', '.join(counts)} node{'' if counts == ['1'] else 's'}: {text}"
        for (model, sharding, text), counts in nodes.items()
    ]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """What another node would bring, or one less would cost: a sentence each."""
    lines = []
    for change in changes:
        before, after = change.before, change.after
        what = f"{before.model}, {before.sharding}: {change.what}"
        problem = next(
            (
                _why_not(point, place)
                for point, place in ((before, "before"), (after, "after"))
                if point.samples_per_s is None
            ),
            None,
        )
        if problem is not None:
            lines.append(f"{what}: {problem}")
            continue
        assert before.step is not None
        assert after.step is not None
        ratio = change.ratio or 0.0
        verdict = f"{ratio:.2f} x as fast" if ratio >= 1 else f"costs {100 * (1 - ratio):.1f} % of the throughput"
        own = change.alone_ratio or 0.0
        batch = (
            f"{before.global_batch_size} samples a step"
            if before.global_batch_size == after.global_batch_size
            else f"{before.global_batch_size} and {after.global_batch_size} samples a step"
        )
        lines.append(
            f"{what}: {rate(before.step.samples_per_s)} to {rate(after.step.samples_per_s)} samples/s, {verdict} "
            f"({batch}); {ALONE}: {own:.2f} x"
        )
    return lines


def simulated_lines(points: Sequence[SweepPoint]) -> dict[str, list[ScalingLine]]:
    """Lines of scaling by model, as the report draws them; points that do not run are left out."""
    found: dict[str, list[ScalingLine]] = {}
    for line, own in _lines(points):
        if line.points:
            found.setdefault(own[0].model, []).append(line)
    return found


def _lines(points: Sequence[SweepPoint]) -> Iterator[tuple[ScalingLine, list[SweepPoint]]]:
    """A line for each model and sharding, and the points that it is of."""
    groups: dict[tuple[str, str], list[SweepPoint]] = {}
    for point in points:
        groups.setdefault((point.model, point.sharding), []).append(point)
    for (_, sharding), own in groups.items():
        running = sorted((point for point in own if point.samples_per_s is not None), key=lambda point: point.ranks)
        mixed = any(len(point.cluster.types) > 1 for point in own)
        made = tuple(_point(point, mixed) for point in running)
        yield ScalingLine(sharding, any(point.cluster.emulate for point in own), made, simulated=True), running


def _point(point: SweepPoint, mixed: bool) -> Point:
    assert point.step is not None
    # Of devices of one kind it is the ideal line once more.
    own = point.step.alone_samples_per_s if mixed else None
    counts = Counter(point.cluster.device_types())
    # Of unequal devices, more nodes are more of the same only where the proportion is.
    devices = frozenset(f"{count / point.ranks:.6f} {kind}" for kind, count in counts.items())
    return Point(point.cluster.name, point.ranks, devices, point.global_batch_size, point.step.samples_per_s, own)


def _alike(ranks: Sequence[SimulatedRank]) -> Iterator[tuple[SimulatedRank, SimulatedRank]]:
    """First and last of each run of neighbouring ranks that do the same on devices of one type."""

    def work(rank: SimulatedRank) -> tuple[object, ...]:
        seconds = (f"{value:.4g}" for value in (rank.busy_s, rank.exposed_s, rank.rest_s, rank.idle_s))
        return (rank.device, rank.samples, *seconds, rank.peak_bytes, rank.capacity_bytes)

    for _, same in groupby(ranks, key=work):
        run = list(same)
        yield run[0], run[-1]


def _share(seconds: float, step: SimulatedStep) -> str:
    return f"{format_seconds(seconds)}\n{percent(seconds / step.step_s)}"


def _misfits(step: SimulatedStep) -> list[str]:
    if step.fits:
        return []
    short = [rank for rank in step.ranks if not rank.fits]
    worst = max(short, key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
    missing = format_bytes(worst.peak_bytes - worst.capacity_bytes)
    where = f"{missing} are missing on rank {worst.rank} ({worst.device})"
    many = "every rank lacks" if len(short) == len(step.ranks) else f"{len(short)} of {len(step.ranks)} ranks lack"
    return [f"does not fit: {where}; {many} memory"]


def _why_not(point: SweepPoint, place: str) -> str:
    why = point.problem if point.step is None else _misfits(point.step)[0]
    return f"{place} it, nothing can be said: {why}"


def rate(samples_per_s: float) -> str:
    """Samples/s: whole numbers from 100 up, below with a digit or more."""
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 else f"{samples_per_s:.4g}"
