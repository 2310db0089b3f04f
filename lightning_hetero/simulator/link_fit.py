"""Fit bandwidth and latency of links to the communication that measured runs could not hide.

What is measured is how long the rank is blocked that is blocked least. What is predicted is the same, by simulation,
with the scales of compute already fitted, as a function of the links. The logarithms of bandwidths and latencies are
moved until the squares of the differences are least (Levenberg 1944, Marquardt 1963), each difference over the measured
seconds.

A constant is told by the runs only if moving it changes some prediction in a way that no other constant can undo: what
remains of its column of derivatives without the other columns, next to the noise (:data:`SURE`). Messages of one size,
say, fix only the sum ``latency + size / bandwidth``. One that hardly moves any prediction (:data:`FELT`) plays no part
in the runs, if it cannot play one either: with a value that is felt, the others moved as well as they can be, the runs
are explained worse. A link is fitted where all of it that plays a part is told.

Of a link whose bandwidth and latency are not told apart one is fitted, with the other as the cluster file gives it:
communication that was measured must not stay unexplained. It is the latency, unless the bandwidth explains more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.cluster import Link
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.calibration import LINKS, Calibration
from lightning_hetero.simulator.measured_run import MeasuredRun
from lightning_hetero.simulator.simulated_shards import least_blocked_s
from lightning_hetero.units import format_bytes_per_s, format_seconds

Floats = NDArray[np.float64]

FELT = 0.05
"""a constant plays a part where a change of it by a factor e moves a prediction by this share of what was measured"""

NOISE = 0.01
"""share of what was measured that is noise at least; more where the best fit leaves more unexplained"""

SURE = 3.0
"""a constant is told where moving it by a factor e explains the runs worse by as many times the noise, whatever the
others do: where noise is 1 %, it is known within a third then"""

ALIKE = 1.1
"""choices whose errors differ by this factor or less explain the runs alike"""

NOTICED = 0.02
"""seconds of communication below this share of the step are noise"""

_UNKNOWN = Link(1e9, 50e-6)
_BANDWIDTHS, _LATENCIES = np.logspace(8, 12, 5), np.logspace(-6, -3, 4)
_ALONE = (np.logspace(6, 12, 13), np.logspace(-6, -1, 11))
"""where a bandwidth or a latency is looked for with the other as given: it stands for both"""

_BOUNDS = tuple((float(np.log(low)), float(np.log(high))) for low, high in ((1e6, 1e13), (1e-8, 1e-1)))
"""logarithms of what bandwidths and latencies may be"""

_STEP, _ROUNDS, _CONVERGED = 1e-3, 40, 1e-6
_LEAST_LATENCY_S = 1e-9
_STRONGLY, _MOST_DOUBLINGS = 0.3, 20
_NAMES = ("bandwidth", "latency")


@dataclass
class LinkFit:
    """What was found.

    Attributes:
        links: that were fitted, by name.
        sources: of each, by name.
        refused: what the runs cannot tell, and which run would.
    """

    links: dict[str, Link] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


Constant = tuple[str, int]
"""name of a link, and 0 for its bandwidth or 1 for its latency"""


def fit_links(runs: Sequence[MeasuredRun], calibration: Calibration) -> LinkFit:
    """Bandwidth and latency of every link that the runs tell.

    Args:
        runs: only those of shard plans whose communication was told apart from waiting are looked at.
        calibration: scales of compute, already fitted.
    """
    usable = [run for run in runs if isinstance(run.plan, ShardPlan) and run.communication_s is not None]
    found = LinkFit()
    names = [name for name in LINKS if any(_uses(run, name) for run in runs)]
    if not usable:
        found.refused += [
            f"links.{name}: no run says how much communication is exposed: a run of hetero_fsdp with the lines of all "
            "ranks would"
            for name in names
        ]
        return found
    fit = _Fit(usable, calibration, names)
    free: list[Constant] = [(name, which) for name in names for which in (0, 1)]
    if free:
        fit.solve_from_everywhere(free)
        free = fit.without_part(free)
    told = fit.told(free)
    problems = {name: fit.problem(name, _of(free, name), told) for name in names}
    untold = [constant for constant in free if not told.issuperset(_of(free, constant[0]))]
    alone = dict(fit.solve_one_each(untold, [constant for constant in free if constant not in untold]))
    count = f"{len(usable)} run{'s' if len(usable) > 1 else ''}"
    by = f"exposed communication of {count}"
    for name in names:
        if name in alone:
            held = _NAMES[1 - alone[name]]
            given = f"{held} as the cluster file gives it ({fit.given(name, 1 - alone[name])})"
            found.refused.append(
                f"links.{name}.{held}: {problems[name]}. Only its {_NAMES[alone[name]]} was fitted, with {given}"
            )
            found.sources[name] = f"{by}; only its {_NAMES[alone[name]]}, with {given}"
        elif problems[name]:
            found.refused.append(f"links.{name}: {problems[name]}")
            continue
        else:
            parts = [which for _, which in _of(free, name)]
            found.sources[name] = by + "".join(f"; its {_NAMES[w]} plays no part" for w in (0, 1) if w not in parts)
        found.links[name] = fit.link(name)
    return found


def _of(constants: Sequence[Constant], name: str) -> list[Constant]:
    return [constant for constant in constants if constant[0] == name]


def _uses(run: MeasuredRun, name: str) -> bool:
    if name == "within_pair":
        return run.cluster.within_pair is not None
    nodes = [device.node for device in run.cluster.devices]
    return len(set(nodes)) > 1 if name == "between_nodes" else len(set(nodes)) < len(nodes)


class _Fit:
    """The state of a fit: one value for each constant, in logarithms."""

    def __init__(self, runs: Sequence[MeasuredRun], calibration: Calibration, names: Sequence[str]) -> None:
        self.runs, self.names = runs, names
        self.measured = np.array([run.communication_s or 0.0 for run in runs])
        # What is nearly nothing must not count as much as what is much.
        self.scale = np.maximum(self.measured, NOTICED * np.array([run.step_s for run in runs]))
        self.files: dict[str, Link | None] = {name: getattr(runs[0].cluster, name) for name in names}
        self.values: dict[Constant, float] = {}
        for name in names:
            link = self.files[name] or _UNKNOWN
            self._set(name, link)
        self.prepared = [calibration.applied(run.cluster, run.costs) for run in runs]

    def _set(self, name: str, link: Link) -> None:
        self.values[name, 0] = _logarithm(link.bandwidth_bytes_per_s)
        self.values[name, 1] = _logarithm(link.latency_s)

    def link(self, name: str) -> Link:
        """As it is now, with what else the cluster file says of it."""
        bandwidth, latency_s = (float(np.exp(self.values[name, which])) for which in (0, 1))
        return replace(self.files[name] or _UNKNOWN, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)

    def predicted(self) -> Floats:
        """Exposed seconds of every run, over what counts as much."""
        links: dict[str, Any] = {name: self.link(name) for name in self.names}
        found = []
        for run, (cluster, costs) in zip(self.runs, self.prepared, strict=True):
            assert isinstance(run.plan, ShardPlan)
            found.append(least_blocked_s(run.plan, replace(cluster, **links), costs, run.training))
        predicted: Floats = np.array(found) / self.scale
        return predicted

    def error(self) -> float:
        """Sum of squares."""
        return float(((self.predicted() - self.measured / self.scale) ** 2).sum())

    def derivatives(self, free: Sequence[Constant]) -> Floats:
        """Of the predictions by each constant's logarithm, shape (runs, constants)."""
        columns = []
        for constant in free:
            here = self.values[constant]
            self.values[constant] = here + _STEP
            above = self.predicted()
            self.values[constant] = here - _STEP
            columns.append((above - self.predicted()) / (2 * _STEP))
            self.values[constant] = here
        return np.stack(columns, axis=1)

    def solve_from_everywhere(self, free: Sequence[Constant]) -> None:
        """Solve from the cluster file's values and, where that leaves much unexplained, from the best of a grid."""
        self.solve(free)
        best = self.error(), dict(self.values)
        if best[0] < len(self.runs) * NOISE**2:
            return
        for _ in range(2):  # the place of the first link depends on where the others are
            for name in self.names:
                self._search(name)
        self.solve(free)
        if self.error() > best[0]:
            self.values = best[1]

    def _search(self, name: str) -> None:
        """Put a link where predictions come nearest to what was measured, over a grid."""
        found = []
        for bandwidth in _BANDWIDTHS:
            for latency_s in _LATENCIES:
                self._set(name, Link(float(bandwidth), float(latency_s)))
                found.append((self.error(), self.values[name, 0], self.values[name, 1]))
        _, self.values[name, 0], self.values[name, 1] = min(found)

    def solve(self, free: Sequence[Constant], rounds: int = _ROUNDS) -> None:
        """Move the free constants to the least error."""
        if not free:
            return
        damping, error = 1e-2, self.error()
        for _ in range(rounds):
            jacobian = self.derivatives(free)
            residual = self.measured / self.scale - self.predicted()
            normal = jacobian.T @ jacobian
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), jacobian.T @ residual)
            before = {constant: self.values[constant] for constant in free}
            for constant, change in zip(free, np.clip(move, -1, 1), strict=True):
                low, high = _BOUNDS[constant[1]]
                self.values[constant] = min(high, max(low, self.values[constant] + float(change)))
            after = self.error()
            if after < error:
                if error - after < _CONVERGED * error + _CONVERGED**2:
                    return
                error, damping = after, damping / 4
            else:
                self.values.update(before)
                damping *= 8
                if damping > 1e6:
                    return

    def solve_one_each(self, untold: Sequence[Constant], told: Sequence[Constant]) -> tuple[Constant, ...]:
        """Solve for one constant of each link, or of as many links as the runs tell, with the rest as given.

        Where choices explain the runs alike, within noise, it is latencies, and those of the slower kind of link.

        Args:
            untold: constants of links that are not told.
            told: those that stay free with them.

        Returns:
            The constants that were chosen. Without any, nothing has changed.
        """
        start, names = dict(self.values), [name for name in self.names if self.files[name] and _of(untold, name)]
        for count in range(len(names), 0, -1):
            found = []
            for chosen in combinations(names, count):
                for constants in product(*(_of(untold, name) for name in chosen)):
                    self.values = dict(start)
                    if self._solve_alone(constants, names, told):
                        left = float(np.sqrt(self.error() / len(self.runs)))
                        found.append((left, constants, self.values))
            if found:
                least = min(left for left, _, _ in found)
                alike = [each[1:] for each in found if each[0] <= ALIKE * least + NOISE]
                constants, self.values = max(alike, key=lambda each: self._preference(each[0]))
                return constants
        self.values = start
        return ()

    def _preference(self, constants: Sequence[Constant]) -> tuple[int, list[int]]:
        return sum(which for _, which in constants), [self.names.index(name) for name, _ in constants]

    def _solve_alone(self, constants: Sequence[Constant], names: Sequence[str], told: Sequence[Constant]) -> bool:
        """Solve for these with the rest of links as given; whether the runs tell them."""
        for name in names:
            self._set(name, self.files[name] or _UNKNOWN)
        for _ in range(2):  # the place of the first one depends on where the others are
            for constant in constants:
                places = [self.values[constant], *np.log(_ALONE[constant[1]])]
                errors = []
                for self.values[constant] in places:
                    errors.append(self.error())
                self.values[constant] = places[int(np.argmin(errors))]
        free = [*told, *constants]
        self.solve(free, _ROUNDS // 4)  # the grid is near
        # What such a fit leaves is the other constant's, not noise: it must not keep what is known from being told.
        return self.told(free, NOISE).issuperset(constants)

    def given(self, name: str, which: int) -> str:
        """What the cluster file says, in words."""
        link = self.files[name] or _UNKNOWN
        return format_seconds(link.latency_s) if which else format_bytes_per_s(link.bandwidth_bytes_per_s)

    def without_part(self, free: list[Constant]) -> list[Constant]:
        """Those that play a part or may; the others take the cluster file's value, unless it contradicts the runs."""
        for constant, norm in zip(free, np.linalg.norm(self.derivatives(free), axis=0), strict=True):
            if norm >= FELT or not self._is_excluded(constant, free):
                continue
            free = [other for other in free if other != constant]
            before, error = dict(self.values), self.error()
            link = self.files[constant[0]]
            if link is not None:
                self.values[constant] = _logarithm(link.latency_s if constant[1] else link.bandwidth_bytes_per_s)
                self.solve(free)
                if self._is_worse(error, free):
                    self.values = before
        return free

    def _is_excluded(self, constant: Constant, free: Sequence[Constant]) -> bool:
        """Whether runs are explained worse where a constant that is not felt is slow enough to be felt."""
        before, error = dict(self.values), self.error()
        others = [other for other in free if other != constant]
        for _ in range(_MOST_DOUBLINGS):
            self.values[constant] += np.log(2) if constant[1] else -np.log(2)
            if np.linalg.norm(self.derivatives([constant])) >= _STRONGLY:
                break
        self.solve(others)
        worse = self._is_worse(error, free)
        self.values = before
        return worse

    def _is_worse(self, error: float, free: Sequence[Constant]) -> bool:
        """Whether the runs are explained worse than with this error of the best fit, beyond noise."""
        return self.error() - error > (SURE * self._noise(error, free)) ** 2

    def _noise(self, error: float, free: Sequence[Constant]) -> float:
        """Of one run, from what the best fit leaves unexplained."""
        return max(NOISE, float(np.sqrt(error / max(1, len(self.runs) - len(free)))))

    def told(self, free: Sequence[Constant], noise: float | None = None) -> set[Constant]:
        """Those whose part none of the others can play, with noise as the fit leaves it or as given."""
        if not free:
            return set()
        columns, least = self.derivatives(free), SURE * (noise or self._noise(self.error(), free))
        return {constant for index, constant in enumerate(free) if _own(columns, index) >= least}

    def problem(self, name: str, own: Sequence[Constant], told: set[Constant]) -> str:
        """Why a link is not fitted, and which run would tell; empty where it is."""
        if not own:
            return (
                "nothing in these runs depends on it: compute hides what is sent over it, or it is faster than a link "
                "that the same messages take; a run with less batch a rank, or with shard groups that use no other "
                "link, would show it; discover measures it by itself"
            )
        if told.issuperset(own):
            missing = [_NAMES[which] for which in (0, 1) if (name, which) not in own]
            if self.files[name] is not None or not missing:
                return ""
            kind = "large" if missing == ["bandwidth"] else "many small"
            return (
                f"its {missing[0]} plays no part in these runs, and the cluster file has none: a run with {kind} "
                "messages would tell it"
            )
        count = len(self.runs)
        runs = f"{count} run{'s' if count > 1 else ''}"
        columns, least = self.derivatives(own), SURE * self._noise(self.error(), own)
        if all(_own(columns, index) >= least for index in range(len(own))):
            return (
                f"it cannot be told apart from the other link by {runs}: a run whose shard groups lie within a node "
                "(HYBRID_k), or one on a single node, would tell; discover measures both"
            )
        return (
            f"bandwidth and latency cannot be told apart by {runs}, with messages of about one size over it: a run "
            "with shard groups of another size, or of a model whose blocks have another size, would tell; discover "
            "measures both"
        )


def _logarithm(value: float) -> float:
    return float(np.log(max(value, _LEAST_LATENCY_S)))


def _own(columns: Floats, index: int) -> float:
    """The length of a column without what the others span."""
    others, column = np.delete(columns, index, axis=1), columns[:, index]
    if others.size:
        column = column - others @ np.linalg.lstsq(others, column)[0]
    return float(np.linalg.norm(column))
