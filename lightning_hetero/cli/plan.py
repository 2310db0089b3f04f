"""``lightning-hetero plan``: who does what, predicted, against the even plan, with the reasons."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_hetero.cli.arguments import positive_integer
from lightning_hetero.cli.cluster_argument import add_cluster_argument
from lightning_hetero.cli.model_costs import (
    add_training_arguments,
    calibrated_with,
    read_calibration,
    read_costs,
    unmeasured,
)
from lightning_hetero.cli.profile import add_model_arguments
from lightning_hetero.cluster import Cluster
from lightning_hetero.cluster.bundled_clusters import load_cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import InfeasibleError
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.even import even_pipeline_plan, even_shard_plan
from lightning_hetero.planner.pipeline import PipelineSearch, plan_pipeline, search_pipeline
from lightning_hetero.planner.shard import plan_shard, search_shard
from lightning_hetero.planner.shard_candidates import ShardSearch
from lightning_hetero.planner.training import Training
from lightning_hetero.report.console import console, progress_bar
from lightning_hetero.report.explanation import explain, explanation_lines, tried_table
from lightning_hetero.report.plan_table import Plan, plan_lines, plan_table
from lightning_hetero.units import format_bytes, format_seconds

DESCRIPTION = """\
Plan the training of one model on a cluster, and write the fastest plan that is predicted to fit every device's memory:

  hetero_fsdp   shard groups, possibly of unequal size, and a batch share for every rank
  hetero_pipe   pipelines: which devices in which order, where the model is cut, how many micro-batches
  auto          both are planned, and the faster one is taken

Seconds per unit come from a costs file ("lightning-hetero profile"), by device type; for a type that was not measured,
and with --model, they are FLOPs over the device's speed. The plan is shown rank by rank, with its predicted step time,
throughput, idle share and peak memory, beside the even plan of the same kind: one shard group with equal shares, or one
pipeline with equally many units on every device."""

EPILOG = """\
examples:
  lightning-hetero plan --cluster cluster.yaml --costs costs.json --global-batch 256 --out plan.json --explain
  lightning-hetero plan --cluster cluster.yaml --model vit_5b --precision bf16-true --strategy hetero_pipe \\
      --global-batch 512 --out plan.json

Trainer(strategy=HeteroFSDPStrategy(plan="plan.json")) trains a model of that name and size by a shard plan,
HeteroPipelineStrategy(plan="plan.json") by one of pipelines. The file may be edited by hand, and is checked when it is
read."""


@dataclass(frozen=True)
class Planned:
    """What one strategy would do.

    Args:
        strategy: its name.
        plan: the fastest that fits.
        even: the even plan of the same kind, ``None`` where there is none.
    """

    strategy: str
    plan: Plan
    even: Plan | None

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.predicted_step_s or float("inf")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="who does what: shard groups and batch shares, or pipeline stages",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_cluster_argument(parser)
    parser.add_argument("--costs", metavar="FILE", help='costs file (JSON), of "profile"; or --model')
    add_model_arguments(parser, required=False)
    parser.add_argument(
        "--strategy",
        default="auto",
        choices=("auto", *_PLANNERS),
        help="what to plan for (default: auto, the faster of both)",
    )
    parser.add_argument(
        "--global-batch",
        required=True,
        type=positive_integer,
        metavar="N",
        help="samples per optimizer step over all ranks",
    )
    add_training_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="plan file to write (JSON)")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also say what was tried and rejected and why, what binds now, and which change would help most",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, write the file, show it."""
    cluster = load_cluster(options.cluster)
    training = Training(options.global_batch, options.precision, options.optimizer)
    with progress_bar("planning") as progress:
        steps = [*(["counting the model"] if options.costs is None else []), *_names(options.strategy)]
        steps += [_EXPLAINING] if options.explain else []

        def begin(step: str) -> None:
            progress(steps.index(step), len(steps), step)

        costs, notes = read_costs(options.costs, options.model, options.sequence, options.precision, begin)
        calibration, more = read_calibration(options.calibration, cluster)
        notes += [*more, *unmeasured(costs, cluster, calibration)]
        if calibration is not None:
            cluster, costs = calibration.applied(cluster, costs)
        planned, rejected = plan_with(options.strategy, cluster, costs, training, begin=begin)
        if options.explain:
            begin(_EXPLAINING)
            search = _SEARCHES[planned.strategy](cluster, costs, training)
            explanation = explain(search)
    plan = planned.plan
    if options.explain:
        plan = search.plan  # the same, with reasons that know what other designs would bring
    if calibration is not None and plan.predicted_step_s is not None:
        plan = plan.lasting(plan.predicted_step_s, calibrated_with(options.calibration, calibration))  # for the file
    screen = console()
    screen.print(plan_table(plan, cluster, planned.even))
    misfits = _misfits(planned.even, cluster)
    lines = plan_lines(plan, planned.even, misfit=bool(misfits)) + misfits + rejected
    lines += notes + _beyond_measured(plan, costs, cluster)
    if options.explain:
        screen.print(tried_table(explanation))
        lines += explanation_lines(explanation)
    if options.out:
        plan.save(options.out)
        lines.append(f"written to {Path(options.out)}")
    for line in lines:
        screen.print(line, markup=False, soft_wrap=True)
    return 0


def plan_with(
    strategy: str,
    cluster: Cluster,
    costs: ModelCosts,
    training: Training,
    *,
    begin: Callable[[str], None] = lambda step: None,
) -> tuple[Planned, list[str]]:
    """The plan of a strategy, or with "auto" the faster of all, and what to say of those that were not taken.

    Args:
        strategy: "hetero_fsdp", "hetero_pipe" or "auto".
        cluster: one device per rank.
        costs: of the model.
        training: global batch, precision, optimizer.
        begin: is told the name of each strategy before it is planned.

    Raises:
        InfeasibleError: if no strategy has a plan that fits, with the words of each.
        HeteroError: if seconds are not known, or an argument is malformed.
    """
    planned: list[Planned] = []
    refused: dict[str, InfeasibleError] = {}
    for name in _names(strategy):
        begin(name)
        try:
            planned.append(_PLANNERS[name](cluster, costs, training))
        except InfeasibleError as error:
            refused[name] = error
    if not planned:
        raise InfeasibleError("\n".join(f"{name}: {error}" for name, error in refused.items()))
    best = min(planned, key=lambda each: each.step_s)
    said = [
        f"{best.strategy} is taken: {format_seconds(best.step_s)} a step against {format_seconds(each.step_s)} of "
        f"{each.strategy}, {each.step_s / best.step_s:.2f} x as fast"
        for each in planned
        if each is not best
    ]
    said += [
        f"{best.strategy} is taken, since {name} has no plan that fits: {error}" for name, error in refused.items()
    ]
    return best, said


def _names(strategy: str) -> list[str]:
    return list(_PLANNERS) if strategy == "auto" else [strategy]


def _plan_shards(cluster: Cluster, costs: ModelCosts, training: Training) -> Planned:
    plan = plan_shard(cluster, costs, training)
    return Planned("hetero_fsdp", plan, even_shard_plan(cluster, costs, training))


def _plan_pipelines(cluster: Cluster, costs: ModelCosts, training: Training) -> Planned:
    plan = plan_pipeline(cluster, costs, training)
    return Planned("hetero_pipe", plan, even_pipeline_plan(cluster, costs, training))


_PLANNERS: dict[str, Callable[[Cluster, ModelCosts, Training], Planned]] = {
    "hetero_fsdp": _plan_shards,
    "hetero_pipe": _plan_pipelines,
}

# Planning once more, and with changes: slower, so only for the strategy that is taken and only when asked for.
_SEARCHES: dict[str, Callable[[Cluster, ModelCosts, Training], ShardSearch | PipelineSearch]] = {
    "hetero_fsdp": search_shard,
    "hetero_pipe": search_pipeline,
}

_EXPLAINING = "looking for what would help"


def _beyond_measured(plan: Plan, costs: ModelCosts, cluster: Cluster) -> list[str]:
    """Where a plan's micro-batches are much larger than those that were measured, and its line may lead astray."""
    largest: dict[str, int] = {}
    for unit in costs.units:
        for kind in set(unit.timings) & set(cluster.types):
            largest[kind] = max([largest.get(kind, 0), *(point.samples for point in unit.timings[kind].points)])
    sizes = plan.micro_batch_sizes or plan.batch_shares if isinstance(plan, ShardPlan) else ()
    planned = dict.fromkeys(cluster.types, 0)
    for rank, device in enumerate(cluster.devices):
        size = plan.micro_batch_size if isinstance(plan, PipelinePlan) else sizes[rank]
        planned[device.type] = max(planned[device.type], size)
    return [
        f"mind: on {kind} up to {most} samples at once were measured, and the plan has {planned[kind]}: seconds beyond "
        f"are those of a line; profile with --micro-batches up to {planned[kind]}"
        for kind, most in largest.items()
        if 0 < most < planned[kind] / 4
    ]


def _misfits(even: Plan | None, cluster: Cluster) -> list[str]:
    """Whether the even plan would run at all."""
    peaks = [prediction.peak_memory_bytes or 0 for prediction in even.predictions] if even is not None else []
    missing = [
        (peak - device.memory_bytes, rank)
        for rank, (peak, device) in enumerate(zip(peaks, cluster.devices, strict=False))
        if peak > device.memory_bytes
    ]
    if not missing:
        return []
    most, rank = max(missing)
    who = f"rank {rank} ({cluster.devices[rank].type})"
    ranks = f"{len(missing)} of {len(peaks)} ranks lack memory"
    return [f"the even plan does not fit: {format_bytes(most)} are missing on {who}; {ranks}"]
