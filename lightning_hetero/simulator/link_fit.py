"""Fit bandwidth and latency of links to the communication that measured runs could not hide.

What is measured is exposed communication, of the rank that has least of it. What is predicted is the same, by
simulation, with the scales of compute already fitted, as a function of the links. The logarithms of bandwidths and
latencies are moved until the squares of the differences are least (Levenberg 1944, Marquardt 1963), each difference
over the measured seconds.

A constant is told by the runs only if moving it changes some prediction in a way that no other constant can undo: what
remains of its column of derivatives without the other columns. Where that is little the constant is refused. Messages
of one size, say, fix only the sum ``latency + size / bandwidth``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.cluster import Link
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.calibration import LINKS, Calibration
from lightning_hetero.simulator.measured_run import MeasuredRun
from lightning_hetero.simulator.simulate import simulate

Floats = NDArray[np.float64]

FELT = 0.05
"""a constant is told where a change of it by a factor e moves predictions by this share of what was measured"""

NOTICED = 0.02
"""seconds of communication below this share of the step are noise"""

_UNKNOWN = Link(1e9, 50e-6)
_BANDWIDTHS, _LATENCIES = np.logspace(8, 12, 9), np.logspace(-6, -2, 5)
_STEP, _ROUNDS = 1e-3, 40
_LEAST_LATENCY_S = 1e-9
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
    fit = _Fit(usable, calibration)
    free: list[Constant] = [(name, which) for name in names for which in (0, 1)]
    free = fit.without_unfelt(free, found)
    while free:
        fit.solve(free)
        worst = fit.least_told(free)
        if worst is None:
            break
        free = fit.refuse(worst, free, found)
    for name in dict.fromkeys(name for name, _ in free):
        found.links[name] = fit.link(name)
        held = [_NAMES[which] for which in (0, 1) if (name, which) not in free]
        by = f"exposed communication of {len(usable)} runs ({', '.join(run.name for run in usable[:4])})"
        found.sources[name] = by + (f"; {held[0]} as in the cluster file" if held else "")
    return found


def _uses(run: MeasuredRun, name: str) -> bool:
    nodes = [device.node for device in run.cluster.devices]
    return len(set(nodes)) > 1 if name == "between_nodes" else len(set(nodes)) < len(nodes)


class _Fit:
    """The state of a fit: one value for each constant, in logarithms."""

    def __init__(self, runs: Sequence[MeasuredRun], calibration: Calibration) -> None:
        self.runs, self.calibration = runs, calibration
        self.measured = np.array([run.communication_s or 0.0 for run in runs])
        # What is nearly nothing must not count as much as what is much.
        self.scale = np.maximum(self.measured, NOTICED * np.array([run.step_s for run in runs]))
        self.files = {name: getattr(runs[0].cluster, name) for name in LINKS}
        self.values: dict[Constant, float] = {}
        for name in LINKS:
            link = self.files[name] or _UNKNOWN
            self._set(name, link)
        self.silent: set[str] = {name for name in LINKS if self.files[name] is None}
        self.prepared = [calibration.applied(run.cluster, run.costs) for run in runs]

    def _set(self, name: str, link: Link) -> None:
        self.values[name, 0] = float(np.log(link.bandwidth_bytes_per_s))
        self.values[name, 1] = float(np.log(max(link.latency_s, _LEAST_LATENCY_S)))

    def link(self, name: str) -> Link:
        """As it is now."""
        return Link(float(np.exp(self.values[name, 0])), float(np.exp(self.values[name, 1])))

    def predicted(self) -> Floats:
        """Exposed seconds of every run, over what counts as much."""
        links: dict[str, Any] = {name: None if name in self.silent else self.link(name) for name in LINKS}
        found = []
        for run, (cluster, costs) in zip(self.runs, self.prepared, strict=True):
            step = simulate(run.plan, replace(cluster, **links), costs, run.training)
            found.append(min(rank.exposed_s for rank in step.ranks))
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

    def without_unfelt(self, free: list[Constant], found: LinkFit) -> list[Constant]:
        """Without links that no prediction depends on, wherever their values are looked for."""
        for name in dict.fromkeys(name for name, _ in free):
            self.silent.discard(name)
            felt = self._search(name)
            if felt < FELT:
                free = [constant for constant in free if constant[0] != name]
                self._put_back(name)
                found.refused.append(
                    f"links.{name}: nothing in these runs depends on it, since compute hides what is sent over it: a "
                    "run with less batch a rank, or with NO_SHARD, would show it; discover measures it by itself"
                )
        return free

    def _search(self, name: str) -> float:
        """Put a link where predictions come nearest, over a grid; returns how much they depend on it there at all."""
        best, errors = None, []
        for bandwidth in _BANDWIDTHS:
            for latency_s in _LATENCIES:
                self._set(name, Link(float(bandwidth), float(latency_s)))
                errors.append(self.error())
                if best is None or errors[-1] < best[0]:
                    best = errors[-1], self.values[name, 0], self.values[name, 1]
        assert best is not None
        _, self.values[name, 0], self.values[name, 1] = best
        return max(errors) - min(errors)

    def _put_back(self, name: str) -> None:
        link = self.files[name]
        self._set(name, link or _UNKNOWN)
        if link is None:
            self.silent.add(name)

    def solve(self, free: Sequence[Constant]) -> None:
        """Move the free constants to the least error."""
        damping, error = 1e-2, self.error()
        for _ in range(_ROUNDS):
            jacobian = self.derivatives(free)
            residual = self.measured / self.scale - self.predicted()
            normal = jacobian.T @ jacobian
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), jacobian.T @ residual)
            before = {constant: self.values[constant] for constant in free}
            for constant, change in zip(free, np.clip(move, -1, 1), strict=True):
                self.values[constant] += float(change)
            after = self.error()
            if after < error:
                if error - after < 1e-12:
                    return
                error, damping = after, damping / 4
            else:
                self.values.update(before)
                damping *= 8
                if damping > 1e6:
                    return

    def least_told(self, free: Sequence[Constant]) -> Constant | None:
        """The constant that the runs tell least, where it is too little."""
        columns = self.derivatives(free)
        own = []
        for index in range(len(free)):
            others = np.delete(columns, index, axis=1)
            column = columns[:, index]
            if others.size:
                column = column - others @ np.linalg.lstsq(others, column)[0]
            own.append(float(np.linalg.norm(column)))
        least = int(np.argmin(own))
        return None if own[least] >= FELT else free[least]

    def refuse(self, worst: Constant, free: list[Constant], found: LinkFit) -> list[Constant]:
        """Without a constant that plays no part; or without its link, where the link's other constant hides it."""
        name, which = worst
        columns = dict(zip(free, self.derivatives(free).T, strict=True))
        unfelt = float(np.linalg.norm(columns[worst])) < FELT
        if unfelt and self.files[name] is not None:
            # It plays no part in these runs, so the value of the file does no harm.
            self.values[worst] = self._of_file(worst)
            found.refused.append(
                f"links.{name}: its {_NAMES[which]} plays no part in these runs: it stays as in the cluster file; a "
                f"run with {'many small' if which else 'large'} messages would tell it"
            )
            return [constant for constant in free if constant != worst]
        self._put_back(name)
        count = len(self.runs)
        found.refused.append(
            f"links.{name}: bandwidth and latency cannot be told apart by {count} run{'s' if count > 1 else ''}, which "
            f"{'send' if count > 1 else 'sends'} messages of about one size over it: a run with shard groups of "
            "another size, or of a model whose blocks have another size, would tell; discover measures both"
        )
        return [constant for constant in free if constant[0] != name]

    def _of_file(self, constant: Constant) -> float:
        link: Link = self.files[constant[0]]
        value = link.latency_s if constant[1] else link.bandwidth_bytes_per_s
        return float(np.log(max(value, _LEAST_LATENCY_S)))
