"""Fit the constants of each type of device to measured runs: compute, optimizer, fixed seconds, watts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_hetero.simulator.calibration import DeviceConstants, basis_flops_per_s
from lightning_hetero.simulator.measured_run import MeasuredRun, RankMeasurement
from lightning_hetero.simulator.simulate import simulate
from lightning_hetero.units import format_seconds

OTHER_SIZE = 1.5
"""by how much numbers of parameters must differ for a fixed part to be told from one per parameter"""

OTHER_SHARE = 0.2
"""by how much busy shares must differ for watts of computing and of waiting to be told apart"""


@dataclass(frozen=True)
class Sample:
    """One rank of one run.

    Args:
        run: the run.
        rank: the rank.
        predicted_busy_s: seconds that the costs as they are give it.
        measured: what it measured.
    """

    run: MeasuredRun
    rank: int
    predicted_busy_s: float
    measured: RankMeasurement


@dataclass
class Fit:
    """What was found.

    Attributes:
        constants: of a type of device.
        sources: of each constant, by its name.
        refused: what the runs cannot tell.
    """

    constants: DeviceConstants
    sources: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def samples_by_type(runs: Sequence[MeasuredRun]) -> dict[str, list[Sample]]:
    """The ranks of all runs, by type of device; those that a plan leaves idle are left out."""
    found: dict[str, list[Sample]] = {}
    for run in runs:
        step = simulate(run.plan, run.cluster, run.costs, run.training)
        for rank, measured in enumerate(run.ranks):
            if step.ranks[rank].busy_s > 0 and measured.compute_s > 0:
                kind = run.cluster.devices[rank].type
                found.setdefault(kind, []).append(Sample(run, rank, step.ranks[rank].busy_s, measured))
    return found


def fit_device(kind: str, samples: Sequence[Sample]) -> Fit:
    """The constants of one type.

    Args:
        kind: the type.
        samples: ranks on such devices, at least one.
    """
    scale, ratios = _scale(samples)
    where = _where(samples)
    basis = basis_flops_per_s(kind, samples[0].run.cluster, samples[0].run.costs)
    found = Fit(DeviceConstants())
    over = "the costs' measured seconds" if basis is None else "FLOPs over the file's speed"
    found.sources["compute_scale"] = (
        f"compute_s of {where}, against {over}; single ones {min(ratios):.3f} to {max(ratios):.3f}"
    )
    per_parameter, optimizer_fixed_s = _optimizer(kind, samples, found, where)
    fixed = [sample.measured.fixed_s for sample in samples]
    fixed_s = float(np.median(fixed)) + optimizer_fixed_s
    found.sources["fixed_s"] = (
        f"median of input_s + rest_s of {where}, {format_seconds(min(fixed))} to {format_seconds(max(fixed))}"
        + (f"; with {format_seconds(optimizer_fixed_s)} of the optimizer's" if optimizer_fixed_s else "")
    )
    busy_w, idle_w = _watts(kind, samples, found, where)
    found.constants = DeviceConstants(scale, basis, fixed_s, per_parameter, busy_w, idle_w)
    return found


def _scale(samples: Sequence[Sample]) -> tuple[float, list[float]]:
    """The scale with the least squares of relative deviations, and the scale of each rank alone."""
    shares = np.array([sample.predicted_busy_s / sample.measured.compute_s for sample in samples])
    return float(shares.sum() / (shares**2).sum()), list(1 / shares)


def _optimizer(kind: str, samples: Sequence[Sample], found: Fit, where: str) -> tuple[float, float]:
    """Seconds per parameter, and fixed ones where they can be told apart."""
    sizes = np.array([sample.run.owned_parameters(sample.rank) for sample in samples])
    seconds = np.array([sample.measured.optimizer_s for sample in samples])
    if not seconds.any():
        found.refused.append(
            f"devices.{kind}.optimizer_s_per_parameter: no optimizer_s was measured; it counts as none"
        )
        return 0.0, 0.0
    known = seconds > 0
    sizes, seconds = sizes[known], seconds[known]
    place = "optimizer_s_per_parameter"
    through_zero = float((sizes / seconds).sum() / ((sizes / seconds) ** 2).sum())
    if sizes.max() < OTHER_SIZE * sizes.min():
        found.sources[place] = (
            f"optimizer_s of {where}, of about {sizes.mean():.3g} parameters, taken without a fixed part"
        )
        found.refused.append(
            f"devices.{kind}.{place}: a fixed part of the optimizer's step cannot be told, since all ranks own about "
            f"{sizes.mean():.3g} parameters: a run with shard groups, or stages, of another size would tell"
        )
        return through_zero, 0.0
    spread = f"{sizes.min():.3g} to {sizes.max():.3g} parameters"
    slope, fixed_s = np.linalg.lstsq(np.stack([sizes / seconds, 1 / seconds], axis=1), np.ones_like(seconds))[0]
    # Noise may turn the line over; neither part can be negative.
    if slope <= 0:
        found.refused.append(
            f"devices.{kind}.{place}: could not be told: optimizer_s does not grow from {spread} "
            f"({format_seconds(seconds.min())} to {format_seconds(seconds.max())}), and counts as fixed seconds; runs "
            "of a larger model, or of more steps, would tell"
        )
        return 0.0, float(np.median(seconds))
    found.sources[place] = f"optimizer_s of {where}, of {spread}"
    return (float(slope), float(fixed_s)) if fixed_s > 0 else (through_zero, 0.0)


def _watts(kind: str, samples: Sequence[Sample], found: Fit, where: str) -> tuple[float | None, float | None]:
    """Watts while computing and while waiting."""
    known = [sample for sample in samples if sample.measured.power_w is not None]
    if not known:
        return None, None
    busy = np.array([min(1.0, sample.measured.compute_s / sample.run.step_s) for sample in known])
    watts = np.array([sample.measured.power_w or 0.0 for sample in known])
    if busy.max() - busy.min() < OTHER_SHARE:
        found.refused.append(
            f"devices.{kind}.busy_power_w, idle_power_w: watts of computing and of waiting cannot be told apart, since "
            f"ranks compute {100 * busy.min():.0f} to {100 * busy.max():.0f} % of a step: a run in which they wait "
            "more, with less batch a rank or the slowest device's share raised, would tell"
        )
        return None, None
    busy_w, idle_w = np.linalg.lstsq(np.stack([busy, 1 - busy], axis=1), watts)[0]
    found.sources["busy_power_w"] = found.sources["idle_power_w"] = (
        f"power_w of {where}, which compute {100 * busy.min():.0f} to {100 * busy.max():.0f} % of a step"
    )
    return max(0.0, float(busy_w)), max(0.0, float(idle_w))


def _where(samples: Sequence[Sample]) -> str:
    runs = {sample.run.name: sample.run for sample in samples}
    steps = sum(run.steps for run in runs.values())
    ranks = f"{len(samples)} rank{'s' if len(samples) > 1 else ''}"
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    return f"{ranks} in {steps} steps of {count}"
