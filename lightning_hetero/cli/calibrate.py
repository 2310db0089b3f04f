"""``lightning-hetero calibrate``: a handful of constants that explain measured steps, for plan and simulate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_hetero.cli.model_costs import add_precision_arguments
from lightning_hetero.cluster import Cluster
from lightning_hetero.cluster.bundled_clusters import bundled_names, load_cluster
from lightning_hetero.cluster.resized import with_nodes
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.planner.training import Training
from lightning_hetero.report.calibration_table import calibration_tables, table_width
from lightning_hetero.report.console import console, progress_bar
from lightning_hetero.report.run import Run, read_runs
from lightning_hetero.report.run_medians import median_measurement, median_step_s
from lightning_hetero.simulator.fitting import fit_constants
from lightning_hetero.simulator.measured_run import MeasuredRun

LEAST_STEPS = 3
"""steps that a run must have for its medians to mean something"""

DESCRIPTION = """\
Fit constants to a few measured steps: of each type of device a scale of its compute seconds, the optimizer's seconds
per parameter, the fixed seconds of a step, watts; of each link bandwidth and latency. Never a correction per case: what
is fitted to some runs holds for any other plan, model and number of ranks. Says how well the constants explain each
run, and refuses what the runs cannot tell, with the run that would.

The runs are those of hetero_fsdp and hetero_pipe, with RankThroughput (and RankEnergy, for watts). Cluster and costs
are those that they were planned with, of "discover" and "profile" or written by hand."""

EPILOG = """\
examples:
  lightning-hetero calibrate lightning_logs/version_3 --cluster cluster.yaml --costs costs.json --out calibration.json
  lightning-hetero simulate --calibration calibration.json --cluster cluster.yaml --costs costs.json --nodes 1,2,4 ...

More runs tell more: with shard groups of two sizes bandwidth and latency come apart, and so do the optimizer's seconds
per parameter and its fixed ones."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "calibrate",
        help="constants that explain measured steps, for plan and simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "--cluster",
        required=True,
        action="append",
        metavar="FILE|NAME",
        help="cluster that runs were on; may be repeated where they were on several. A run on more or fewer nodes of "
        f"the same pattern needs none of its own. Bundled: {', '.join(bundled_names())}",
    )
    parser.add_argument(
        "--costs", required=True, action="append", metavar="FILE", help="costs of a run's model; may be repeated"
    )
    add_precision_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="calibration file to write (JSON)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, fit, show, write."""
    clusters = [load_cluster(name) for name in options.cluster]
    costs = [ModelCosts.load(path) for path in options.costs]
    with progress_bar("calibrating") as progress:
        read = read_runs(options.runs, lambda done, total, current: progress(done, total + 1, current))
        measured = measured_runs(read, clusters, costs, options.precision, options.optimizer)
        progress(len(read), len(read) + 1, "fitting")
        calibration = fit_constants(measured)
        progress(len(read) + 1, len(read) + 1, "done")
    screen = console()
    if calibration.warning:
        screen.print(f"mind: {calibration.warning}", markup=False, soft_wrap=True, style="bold")
    for table in calibration_tables(calibration, table_width()):
        table.show(screen)
    if options.out:
        calibration.save(options.out)
        screen.print(f"written to {Path(options.out)}", markup=False, soft_wrap=True)
    return 0


def measured_runs(
    runs: Sequence[Run], clusters: Sequence[Cluster], costs: Sequence[ModelCosts], precision: str, optimizer: str
) -> list[MeasuredRun]:
    """What runs measured, each with the cluster and the costs that are its own.

    Args:
        runs: as read.
        clusters: that they were on; a run on another number of a cluster's nodes, taken in turn, is on it too.
        costs: of their models, told apart by their number of parameters.
        precision: of the training.
        optimizer: of the training.

    Raises:
        HeteroError: listing every run that cannot be used, and why.
    """
    found, problems = [], _repeated(runs)
    for each in runs:
        try:
            found.append(_measured(each, clusters, costs, precision, optimizer))
        except HeteroError as error:
            problems.append(f"{each.path}: {error}")
    raise_all(HeteroError, "these runs cannot be calibrated with", problems)
    return found


def _repeated(runs: Sequence[Run]) -> list[str]:
    """Which runs are given twice, or are copies, as texts."""
    problems = []
    for place, each in enumerate(runs):
        first = next(index for index, other in enumerate(runs) if other.metrics.steps == each.metrics.steps)
        if first < place:
            problems.append(
                f"{each.path}: run {place + 1} of the command is run {first + 1} once more ({runs[first].path}): it "
                "would count twice; give each once"
            )
    return problems


def _measured(
    each: Run, clusters: Sequence[Cluster], costs: Sequence[ModelCosts], precision: str, optimizer: str
) -> MeasuredRun:
    plan = each.plan
    if plan is None:
        raise HeteroError(f"{each.no_plan}: give a run of hetero_fsdp or hetero_pipe")
    if each.missing_ranks:
        raise HeteroError(f"the lines of ranks {each.missing_ranks} are not here: bring their files into its folder")
    if len(each.compared) < LEAST_STEPS:
        count = f"{len(each.compared)} step{'s' if len(each.compared) > 1 else ''} that can be compared"
        raise HeteroError(
            f"it has {count} (full ones after the first, under one plan), medians need {LEAST_STEPS}: train it longer"
        )
    if any((line.get("batches") or 1) != 1 for rank in each.ranks for line in each.lines_compared(rank)):
        raise HeteroError("its steps are several batches, a plan's are one: give a run without accumulate_grad_batches")
    cluster = _cluster(plan.device_types, clusters)
    if each.emulated != cluster.emulate:
        kinds = ("emulated", "real") if each.emulated else ("real", "emulated")
        raise HeteroError(f"its devices are {kinds[0]}, those of cluster {cluster.name!r} {kinds[1]}: give its cluster")
    return MeasuredRun(
        each.name,
        plan,
        cluster,
        _costs(None if plan.model is None else plan.model.parameters, costs),
        Training(plan.global_batch_size, precision, optimizer),
        median_step_s(each),
        len(each.compared),
        tuple(median_measurement(each, rank) for rank in each.ranks),
    )


def _cluster(types: Sequence[str], clusters: Sequence[Cluster]) -> Cluster:
    """The cluster with these devices in this order, or so many of its nodes as have them."""
    for cluster in clusters:
        if cluster.device_types() == tuple(types):
            return cluster
    for cluster in clusters:
        for nodes in range(1, len(types) + 1):
            made = with_nodes(cluster, nodes)
            if made.world_size > len(types):
                break
            if made.device_types() == tuple(types):
                return made
    given = "; ".join(cluster.describe() for cluster in clusters)
    kinds = ", ".join(f"{list(types).count(kind)} x {kind}" for kind in dict.fromkeys(types))
    raise HeteroError(f"it ran on {kinds}, and no given cluster has these in this order ({given}): give its own")


def _costs(parameters: int | None, costs: Sequence[ModelCosts]) -> ModelCosts:
    matching = [each for each in costs if parameters is None or each.parameters == parameters]
    if len(matching) == 1:
        return matching[0]
    given = ", ".join(f"{each.model} with {each.parameters}" for each in costs)
    if matching:
        raise HeteroError(f"several costs are of its model ({given}): give one of each model")
    raise HeteroError(f"its model has {parameters} parameters, the costs are of {given}: give --costs of its model")
