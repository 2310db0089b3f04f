"""A handful of physical constants that were fitted to measured steps: the file between measuring and simulating.

Per type of device and per link, never per case: what holds for one model, plan or number of ranks holds for all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_hetero.cluster import Cluster, Fabric, Link
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.records import (
    Record,
    boolean,
    integer,
    number,
    optional,
    read_json,
    shown,
    text,
    tuple_of,
    write_json,
)
from lightning_hetero.units import format_flops_per_s, format_seconds

SCHEMA = 1
LINKS = ("within_pair", "within_node", "between_nodes")
"""links that a calibration may know, by their names in a cluster file"""

UNEXPLAINED = 0.2
"""mean error of the runs above which constants are warned of"""

SAME_SPEED = 0.01
"""by how much a device's speed may differ from the one that its scale was fitted to"""

_NEXT_STEP = 'give the path of a calibration file, or make one with "lightning-hetero calibrate"'
_DEVICE_KEYS = ("compute_scale", "basis_flops_per_s", "fixed_s", "optimizer_s_per_parameter")
_POWER_KEYS = ("busy_power_w", "idle_power_w")


@dataclass(frozen=True)
class DeviceConstants:
    """What holds for one type of device.

    Args:
        compute_scale: seconds of forwards and backwards as measured, over those that the costs give.
        basis_flops_per_s: the device speed that the costs' seconds were FLOPs over, in FLOP/s; ``None`` where they
            are measured seconds. The scale belongs to this basis.
        fixed_s: seconds of a step that depend on neither samples nor model: input, loss, hooks, loggers, Python.
        optimizer_s_per_parameter: seconds of the optimizer's step for each parameter that a rank owns.
        busy_power_w: watts while the device computes; ``None`` where it is not known.
        idle_power_w: watts while it waits; ``None`` where it is not known.
    """

    compute_scale: float = 1.0
    basis_flops_per_s: float | None = None
    fixed_s: float = 0.0
    optimizer_s_per_parameter: float = 0.0
    busy_power_w: float | None = None
    idle_power_w: float | None = None

    def tail_s(self, parameters: float) -> float:
        """Seconds of a step beside computing and communication, for a rank that owns so many parameters."""
        return self.fixed_s + self.optimizer_s_per_parameter * parameters


@dataclass(frozen=True)
class RunError:
    """How well the constants explain one run.

    Args:
        run: its name.
        measured_step_s: seconds of its median step.
        predicted_step_s: seconds of the step that is simulated with the constants.
        uncalibrated_step_s: the same without them, from costs and cluster as they were.
        parts_s: seconds of each part of the step, measured and predicted, in the mean over ranks: compute;
            communication that nothing hides, where it was told apart; rest, as of a simulated rank (optimizer, input,
            Python); waiting, which is what remains.
    """

    run: str
    measured_step_s: float
    predicted_step_s: float
    uncalibrated_step_s: float
    parts_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_step_s / self.measured_step_s - 1


@dataclass(frozen=True)
class Calibration:
    """Constants, and where each comes from.

    Args:
        devices: constants by type of device.
        links: links that were fitted, by their name in a cluster file; others are those of the cluster.
        sources: where a constant comes from, by its place ("devices.H200.compute_scale", "links.within_node").
        refused: what the runs cannot tell, and which run would; one text each.
        runs: how well the constants explain each run that they were fitted to.
        emulated: whether the runs were of emulated devices; such constants say nothing of real ones.
    """

    devices: Mapping[str, DeviceConstants] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    runs: tuple[RunError, ...] = ()
    emulated: bool = False

    @property
    def mean_error(self) -> float:
        """Mean over the runs of how far the simulated step is off, as a share of the measured one; 0 without runs."""
        return sum(abs(run.error) for run in self.runs) / max(1, len(self.runs))

    @property
    def warning(self) -> str:
        """That the constants do not explain the runs, and which part misses; empty where they do."""
        if self.mean_error <= UNEXPLAINED:
            return ""
        said = f"mean error {100 * self.mean_error:.0f} %: these constants do not explain the runs"
        totals: dict[str, list[float]] = {}
        for run in self.runs:
            for name, seconds in run.parts_s.items():
                total = totals.setdefault(name, [0.0, 0.0, 0.0])
                # Runs that miss to either side must not cancel.
                for place, value in enumerate((*seconds, abs(seconds[1] - seconds[0]))):
                    total[place] += value / len(self.runs)
        if not totals:
            return said
        name, (measured_s, predicted_s, _) = max(totals.items(), key=lambda item: item[1][2])
        return (
            f"{said}; {name} misses most: {format_seconds(predicted_s)} of a step simulated, "
            f"{format_seconds(measured_s)} measured, in the mean over runs"
        )

    def device(self, kind: str) -> DeviceConstants:
        """The constants of a type; of one that was not measured, those that change nothing."""
        return self.devices.get(kind, DeviceConstants())

    def missing(self, cluster: Cluster) -> tuple[str, ...]:
        """Types of a cluster that the calibration does not know."""
        return tuple(kind for kind in cluster.types if kind not in self.devices)

    def applied(self, cluster: Cluster, costs: ModelCosts) -> tuple[Cluster, ModelCosts]:
        """The cluster with the fitted links, and the costs with seconds scaled as fitted.

        Args:
            cluster: with the types that are asked about.
            costs: of a model, with seconds for them, or whose FLOPs are over the cluster's speeds.

        Raises:
            HeteroError: if constants of emulated devices meet real ones or the other way round; if a scale was fitted
                to another basis than these costs give; if seconds are not known.
        """
        if cluster.emulate != self.emulated:
            whose = ("emulated", "real") if self.emulated else ("real", "emulated")
            raise HeteroError(
                f"the calibration is of {whose[0]} devices, cluster {cluster.name!r} has {whose[1]} ones: calibrate "
                f"with runs on {whose[1]} devices"
            )
        timings = unit_timings(costs, cluster)
        raise_all(HeteroError, "the calibration does not fit these costs", self._basis_problems(cluster, costs))
        scaled = {kind: [_scaled(t, self.device(kind).compute_scale) for t in row] for kind, row in timings.items()}
        units = tuple(
            replace(unit, timings={**unit.timings, **{kind: row[index] for kind, row in scaled.items()}})
            for index, unit in enumerate(costs.units)
        )
        links: dict[str, Any] = dict(self.links)
        return replace(cluster, **links), replace(costs, units=units)

    def _basis_problems(self, cluster: Cluster, costs: ModelCosts) -> list[str]:
        problems = []
        for kind in cluster.types:
            if kind not in self.devices:
                continue
            fitted, given = self.devices[kind].basis_flops_per_s, basis_flops_per_s(kind, cluster, costs)
            if (fitted is None) != (given is None) or (fitted and given and abs(given / fitted - 1) > SAME_SPEED):
                problems.append(
                    f"compute_scale of {kind} was fitted to {_basis(fitted)}, here it would scale {_basis(given)}: "
                    "give the costs and the cluster that it was fitted with, or calibrate again"
                )
        return problems

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, whole or not at all; :meth:`load` gives an equal calibration back."""
        write_json(Path(path), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as plain data."""
        return {
            "schema": SCHEMA,
            "kind": "calibration",
            "emulated": self.emulated,
            "devices": {kind: asdict(constants) for kind, constants in self.devices.items()},
            "links": {name: asdict(link) for name, link in self.links.items()},
            "sources": dict(self.sources),
            "refused": list(self.refused),
            "mean_error": self.mean_error,
            "warning": self.warning or None,
            "runs": [_run_data(run) for run in self.runs],
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what :meth:`save` wrote, possibly edited by hand.

        Raises:
            HeteroError: listing every problem with its place, value and next step.
        """
        data = read_json(Path(path), "calibration file", HeteroError, _NEXT_STEP)
        return cls.from_dict(data, f"calibration file {path}")

    @classmethod
    def from_dict(cls, data: object, source: str = "calibration") -> Calibration:
        """Build a calibration from what a file holds; ``source`` names it in the error."""
        record = Record(source, HeteroError)
        known = ("kind", "emulated", "devices", "links", "sources", "refused", "runs", "mean_error", "warning")
        top = record.mapping(data, "", ("schema",), known) or {}
        if top.get("schema", SCHEMA) != SCHEMA:
            record.note("schema", f"is {shown(top['schema'])}: this version reads schema {SCHEMA}")
        if top.get("kind", "calibration") != "calibration":
            record.note("kind", f"is {shown(top['kind'])}: give a file that calibrate wrote")
        devices = {kind: _read_device(record, item, kind) for kind, item in _entries(record, top, "devices")}
        links = {name: _read_link(record, item, name) for name, item in _entries(record, top, "links")}
        sources = {name: str(item) for name, item in _entries(record, top, "sources")}
        runs = record.items(top["runs"], "runs", "run") if top.get("runs") else []
        made = tuple(_read_run(record, item, place) for place, item in runs)
        emulated = record.take(top, "emulated", "", boolean, False)
        refused: tuple[str, ...] = record.take(top, "refused", "", tuple_of(text), ())
        record.finish()
        return cls(devices, {name: link for name, link in links.items() if link}, sources, refused, made, emulated)


def basis_flops_per_s(kind: str, cluster: Cluster, costs: ModelCosts) -> float | None:
    """The speed that seconds of a type are FLOPs over, as for :func:`unit_timings`; ``None``: they were measured."""
    if kind in costs.timed_types:
        return None
    return min(device.speed_flops_per_s or 0.0 for device in cluster.devices if device.type == kind)


def _basis(speed: float | None) -> str:
    return "measured seconds" if speed is None else f"FLOPs over {format_flops_per_s(speed)}"


def _scaled(timing: UnitTiming, scale: float) -> UnitTiming:
    return UnitTiming(
        timing.forward_fixed_s * scale,
        timing.forward_per_sample_s * scale,
        timing.backward_fixed_s * scale,
        timing.backward_per_sample_s * scale,
    )


def _entries(record: Record, top: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = top.get(key) or {}
    if not isinstance(value, Mapping):
        record.note(key, f"is {shown(value)}: write a mapping")
        return []
    return list(value.items())


def _read_device(record: Record, value: object, kind: str) -> DeviceConstants:
    place = f"devices.{kind}"
    entry = record.mapping(value, place, (), (*_DEVICE_KEYS, *_POWER_KEYS)) or {}
    found: dict[str, Any] = {}
    for key in _DEVICE_KEYS:
        parse = optional(number(0)) if key.startswith("basis") else number(0)
        if key in entry:
            found[key] = record.take(entry, key, place, parse, None if key.startswith("basis") else 0.0)
    for key in _POWER_KEYS:
        found[key] = record.take(entry, key, place, optional(number(0)), None)
    if found.get("compute_scale") == 0:
        record.note(f"{place}.compute_scale", "is 0: write a number above 0; 1 changes nothing")
    return DeviceConstants(**found)


def _read_link(record: Record, value: object, name: str) -> Link | None:
    place = f"links.{name}"
    if name not in LINKS:
        record.note(place, f"is no link: known ones are {', '.join(LINKS)}")
    shared = ("nics", "half_bandwidth_nodes") if name == "between_nodes" else ()
    entry = record.mapping(value, place, ("bandwidth_bytes_per_s", "latency_s"), shared) or {}
    bandwidth = record.take(entry, "bandwidth_bytes_per_s", place, number(0), 0.0)
    latency_s = record.take(entry, "latency_s", place, number(0), 0.0)
    if bandwidth <= 0:
        record.note(f"{place}.bandwidth_bytes_per_s", "is not above 0: write bytes per second, such as 1e9")
        return None
    nics = record.take(entry, "nics", place, integer(1), 1)
    half = record.take(entry, "half_bandwidth_nodes", place, optional(number(1e-9)), None)
    return Fabric(bandwidth, latency_s, nics, half) if set(shared) & set(entry) else Link(bandwidth, latency_s)


def _run_data(run: RunError) -> dict[str, Any]:
    parts = {name: {"measured": seconds[0], "predicted": seconds[1]} for name, seconds in run.parts_s.items()}
    return {**asdict(run), "error": run.error, "parts_s": parts}


def _read_run(record: Record, value: object, place: str) -> RunError:
    keys = ("measured_step_s", "predicted_step_s", "uncalibrated_step_s")
    entry = record.mapping(value, place, ("run", *keys), ("error", "parts_s")) or {}
    parts: dict[str, tuple[float, float]] = {}
    for name, item in _entries(record, entry, "parts_s"):
        inside = f"{place}.parts_s.{name}"
        own = record.mapping(item, inside, ("measured", "predicted")) or {}
        measured_s, predicted_s = (record.take(own, key, inside, number(0), 0.0) for key in ("measured", "predicted"))
        parts[name] = (measured_s, predicted_s)
    name = record.take(entry, "run", place, text, "")
    measured_s, predicted_s, plain_s = (record.take(entry, key, place, number(0), 0.0) for key in keys)
    return RunError(name, measured_s, predicted_s, plain_s, parts)
