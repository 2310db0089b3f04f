"""Fit a handful of constants to measured runs, and say how well they explain them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.calibration import Calibration, RunError, basis_flops_per_s
from lightning_hetero.simulator.device_fit import fit_device, samples_by_type
from lightning_hetero.simulator.link_fit import fit_links
from lightning_hetero.simulator.measured_run import MeasuredRun
from lightning_hetero.simulator.simulate import simulate
from lightning_hetero.simulator.simulated_shards import least_blocked_s
from lightning_hetero.simulator.simulated_step import SimulatedStep


def fit_constants(runs: Sequence[MeasuredRun]) -> Calibration:
    """The constants that explain the runs best, per type of device and link.

    Args:
        runs: at least one; all on emulated devices or all on real ones. Links are those of the first one's cluster.

    Returns:
        The constants, where each comes from, what cannot be told from these runs, and the error of every run.

    Raises:
        HeteroError: if there is no run, emulated and real ones are mixed, or seconds of one type are measured in some
            costs and computed from a speed in others; listing every problem.
    """
    raise_all(HeteroError, "constants cannot be fitted", _problems(runs))
    sources, refused = {}, []
    devices = {}
    for kind, samples in samples_by_type(runs).items():
        fit = fit_device(kind, samples)
        devices[kind] = fit.constants
        sources.update({f"devices.{kind}.{name}": text for name, text in fit.sources.items()})
        refused += fit.refused
    made = Calibration(devices, sources=sources, emulated=runs[0].cluster.emulate)
    links = fit_links(runs, made)
    sources.update({f"links.{name}": text for name, text in links.sources.items()})
    made = replace(made, links=links.links, sources=sources, refused=(*refused, *links.refused))
    return replace(made, runs=tuple(run_error(run, made) for run in runs))


def run_error(run: MeasuredRun, calibration: Calibration) -> RunError:
    """How well constants explain a run, be it one that they were fitted to or another."""
    plain = simulate(run.plan, run.cluster, run.costs, run.training)
    cluster, costs = calibration.applied(run.cluster, run.costs)
    step = simulate(run.plan, cluster, costs, run.training, constants=calibration.devices)
    return RunError(run.name, run.step_s, step.step_s, plain.step_s, _parts_s(run, step, cluster, costs))


def _parts_s(
    run: MeasuredRun, step: SimulatedStep, cluster: Cluster, costs: ModelCosts
) -> dict[str, tuple[float, float]]:
    """Seconds of each part in the mean over ranks, measured and simulated."""
    parts = {"compute": (_mean(rank.compute_s for rank in run.ranks), step.mean("busy_s"))}
    if run.communication_s is not None and isinstance(run.plan, ShardPlan):
        parts["communication"] = (run.communication_s, least_blocked_s(run.plan, cluster, costs, run.training))
    parts["rest"] = (_mean(rank.optimizer_s + rank.fixed_s for rank in run.ranks), step.mean("rest_s"))
    used = [sum(seconds) for seconds in zip(*parts.values(), strict=True)]
    parts["waiting"] = (max(0.0, run.step_s - used[0]), max(0.0, step.step_s - used[1]))
    return parts


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _problems(runs: Sequence[MeasuredRun]) -> list[str]:
    if not runs:
        return ["there is no run: give at least one"]
    problems = []
    emulated = [run.name for run in runs if run.cluster.emulate]
    if 0 < len(emulated) < len(runs):
        problems.append(f"{', '.join(emulated)} ran on emulated devices, the others on real ones: fit them apart")
    bases: dict[str, dict[float | None, str]] = {}
    for run in runs:
        for kind in run.cluster.types:
            bases.setdefault(kind, {}).setdefault(basis_flops_per_s(kind, run.cluster, run.costs), run.name)
    problems += [
        f"seconds on {kind} have another basis in {' than in '.join(known.values())} (measured seconds, or another "
        "speed): give costs and clusters that agree"
        for kind, known in bases.items()
        if len(known) > 1
    ]
    return problems
