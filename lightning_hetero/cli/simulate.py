"""``lightning-hetero simulate``: what a step would take, of a plan, or of many clusters, models and shardings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_hetero.cli.arguments import names, node_counts, positive_integer
from lightning_hetero.cli.cluster_argument import add_cluster_argument, devices_of
from lightning_hetero.cli.model_costs import (
    add_training_arguments,
    calibration_data,
    read_calibration,
    read_costs,
    unmeasured,
)
from lightning_hetero.cli.precision_notes import precision_notes
from lightning_hetero.cli.simulation_checks import argument_problems, plan_cluster_problems, size_problems
from lightning_hetero.cluster import Cluster
from lightning_hetero.cluster.bundled_clusters import load_cluster
from lightning_hetero.cluster.resized import with_node, with_nodes, without_node
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, raise_all
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.plan.options import BACKWARD_PREFETCH
from lightning_hetero.planner.sweep import Change, Sweep, SweepPoint
from lightning_hetero.planner.training import Training
from lightning_hetero.records import read_json, write_json
from lightning_hetero.report.console import console, progress_bar
from lightning_hetero.report.simulation_table import (
    SIMULATED,
    change_lines,
    ideal_samples_per_s,
    simulated_lines,
    step_table,
    sweep_table,
)
from lightning_hetero.simulator.calibration import Calibration
from lightning_hetero.simulator.chrome_trace import simulated_trace, write_trace
from lightning_hetero.simulator.execution import ENGINES
from lightning_hetero.simulator.simulate import simulate
from lightning_hetero.simulator.simulated_step import SimulatedStep

SCHEMA = 1

DESCRIPTION = """\
Simulate one optimizer step: seconds, exposed communication, waiting, peak memory, energy where watts are known. Nothing
is run, and no device is needed.

  one plan   --plan plan.json with --costs (or --models) and the cluster that it is for
  a sweep    every model of --models (or the one of --costs), over --nodes, under each --sharding
  questions  --add and --remove: what one more node would bring, what one node less would cost

Shardings are layouts by name (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_k with k neighbouring ranks in a group), with
shares by speed; or hetero_fsdp and hetero_pipe, the fastest plan of that strategy that is predicted to fit.
--batch-per-rank scales the batch with the ranks (weak scaling), --global-batch keeps it (strong scaling)."""

EPILOG = """\
examples:
  lightning-hetero simulate --plan plan.json --cluster cluster.yaml --costs costs.json --trace step.json
  lightning-hetero simulate --cluster frontier --models vit_1b,vit_5b --nodes 1,2,4,8,16,32,64,128 \\
      --sharding FULL_SHARD,HYBRID_8 --batch-per-rank 32 --precision bf16-true --activation-checkpointing --plot s.png
  lightning-hetero simulate --cluster lab_3090_4090 --models gpt_1_4b --global-batch 64 --precision bf16-true \\
      --add 4xRTX-4090 --remove lab-3090

How good predictions are, and what is left out: docs/simulate.md, docs/simulation.md."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="what a step would take: of a plan, or over nodes, models and shardings",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_cluster_argument(parser)
    _add_what(parser)
    _add_how(parser)
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NxTYPE[@SPEED]",
        help="what one more node of these devices would bring, such as 8xA100-80GB or 4xL4@40TFLOP/s; repeatable",
    )
    parser.add_argument(
        "--remove", action="append", default=[], metavar="NODE", help="what this node less would cost; repeatable"
    )
    parser.add_argument("--plot", metavar="PNG", help="picture of throughput over ranks, with the ideal")
    parser.add_argument("--trace", metavar="FILE", help="chrome trace of the one step that is simulated (JSON)")
    parser.add_argument("--out", metavar="FILE", help="all figures (JSON)")
    parser.set_defaults(run=run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    """What is simulated: plan, models, shardings, nodes, batch."""
    parser.add_argument("--plan", metavar="FILE", help='plan file (JSON), of "plan" or a strategy')
    parser.add_argument("--costs", metavar="FILE", help='costs file (JSON), of "profile"; or --models')
    parser.add_argument(
        "--models",
        "--model",
        type=names,
        default=(),
        metavar="NAME,NAME",
        help="models that this package builds by name",
    )
    parser.add_argument(
        "--sequence", type=positive_integer, metavar="N", help="tokens per sample of a GPT (default: its whole context)"
    )
    parser.add_argument(
        "--sharding",
        type=names,
        metavar="NAME,NAME",
        help="layouts by name, hetero_fsdp, hetero_pipe (default: hetero_fsdp)",
    )
    parser.add_argument(
        "--nodes", type=node_counts, metavar="N,N", help="numbers of nodes; the cluster's are taken in turn, repeatedly"
    )
    parser.add_argument("--global-batch", type=positive_integer, metavar="N", help="samples per step over all ranks")
    parser.add_argument(
        "--batch-per-rank", type=positive_integer, metavar="N", help="samples per step, times the ranks"
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    """How steps are run."""
    add_training_arguments(parser)
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="layouts by name run blocks' forwards again in backward"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="fsdp2",
        help="what runs shard plans (default: fsdp2, as hetero_fsdp)",
    )
    parser.add_argument(
        "--backward-prefetch", choices=BACKWARD_PREFETCH, help="of layouts by name (default: BACKWARD_PRE)"
    )
    parser.add_argument(
        "--limit-all-gathers",
        metavar="N|true|false",
        help="all-gathers in flight, of layouts by name: true is 2, false no limit (default: true)",
    )
    parser.add_argument("--even", action="store_true", help="layouts by name have equal shares, not shares by speed")


def run(options: argparse.Namespace) -> int:
    """Simulate, show, write."""
    raise_all(HeteroError, "this cannot be simulated", argument_problems(options))
    cluster = load_cluster(options.cluster)
    raise_all(HeteroError, "this cannot be simulated", size_problems(options.nodes or (), cluster))
    calibration, notes = read_calibration(options.calibration, cluster)
    if options.plan is not None:
        return _run_plan(options, cluster, calibration, notes)
    return _run_sweep(options, cluster, calibration, notes)


def _run_plan(options: argparse.Namespace, cluster: Cluster, calibration: Calibration | None, notes: list[str]) -> int:
    plan = _read_plan(options.plan)
    raise_all(HeteroError, "this cannot be simulated", plan_cluster_problems(plan, cluster))
    model = options.models[0] if options.models else None
    costs, more = read_costs(options.costs, model, options.sequence, options.precision)
    notes = [*notes, *more, *unmeasured(costs, cluster, calibration)]
    notes += precision_notes(options.precision, [cluster], [costs])
    constants = None
    if calibration is not None:
        cluster, costs = calibration.applied(cluster, costs)
        constants = calibration.devices
    training = Training(plan.global_batch_size, options.precision, options.optimizer)
    step = simulate(plan, cluster, costs, training, constants=constants, engine=options.engine)
    screen = console()
    what = f"{step.strategy} of {costs.model} on {cluster.name}"
    step_table(step, what, cluster.emulate).show(screen)
    if plan.predicted_step_s:
        notes.append(
            f"the plan's own prediction is {plan.predicted_step_s:.4g} s a step, simulated are {step.step_s:.4g} s"
        )
    point = SweepPoint(costs.model, step.strategy, cluster, plan.global_batch_size, step)
    written = [*_write_trace(options.trace, step, what), *_write(options, [point], [], notes, calibration)]
    for line in [*notes, *written]:
        screen.print(line, markup=False, soft_wrap=True)
    return 0


def _read_plan(path: str) -> ShardPlan | PipelinePlan:
    """Of whichever kind a file is."""
    data = read_json(Path(path), "plan file", HeteroError, 'give the path of a plan file, or make one with "plan"')
    is_pipeline = isinstance(data, dict) and data.get("kind") == PipelinePlan.KIND
    return PipelinePlan.load(path) if is_pipeline else ShardPlan.load(path)


def _run_sweep(options: argparse.Namespace, cluster: Cluster, calibration: Calibration | None, notes: list[str]) -> int:
    sweep = Sweep(
        options.batch_per_rank,
        options.global_batch,
        options.precision,
        options.optimizer,
        options.activation_checkpointing,
        options.even,
        calibration,
        options.engine,
        _layout_options(options),
    )
    sweep.training(cluster.world_size)  # names of precision and optimizer, before anything is counted
    shardings = options.sharding or (ShardPlan.STRATEGY,)
    with progress_bar("simulating") as progress:
        costs, more = _all_costs(options, lambda what: progress(0, 1, what))
        asked = list(_clusters(options.nodes, cluster))
        changed = _changed(options, asked[0], costs)
        notes += [
            *more,
            *_seconds_notes(options.precision, [*asked, *(other for _, other in changed)], costs, calibration),
        ]
        total, done = len(costs) * len(shardings) * (len(asked) + len(changed)), 0
        points: list[SweepPoint] = []
        changes: list[Change] = []
        for each in costs:
            for sharding in shardings:
                for one in asked:
                    progress(done, total, f"{each.model}, {sharding}, nodes: {len(one.nodes)}")
                    points.append(sweep.point(one, each, sharding))
                    done += 1
                for what, other in changed:  # which are questions about the one cluster that was asked about
                    progress(done, total, f"{each.model}, {sharding}, {what}")
                    changes.append(Change(what, points[-1], sweep.point(other, each, sharding)))
                    done += 1
        progress(total, total, "done")
    screen = console()
    if len(points) == 1 and points[0].step is not None:
        step_table(points[0].step, _what(points[0]), cluster.emulate).show(screen)
    else:
        sweep_table(points).show(screen)
    written = [*_write_plot(options, points), *_write_one_trace(options.trace, points)]
    written += _write(options, points, changes, notes, calibration)
    for line in [*change_lines(changes), *notes, *written]:
        screen.print(line, markup=False, soft_wrap=True)
    return 0 if any(point.step is not None for point in points) else 1


def _what(point: SweepPoint) -> str:
    return f"{point.sharding} of {point.model} on {point.cluster.name}"


def _layout_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, as a plan holds them."""
    found: dict[str, Any] = {}
    if options.backward_prefetch is not None:
        found["backward_prefetch"] = options.backward_prefetch
    limit = options.limit_all_gathers
    if limit is not None:
        words = {"true": True, "false": False}
        found["limit_all_gathers"] = words.get(limit.lower(), int(limit) if limit.isdecimal() else limit)
    return found


def _all_costs(options: argparse.Namespace, begin: Callable[[str], None]) -> tuple[list[ModelCosts], list[str]]:
    found, notes = [], []
    for model in options.models or (None,):
        if model is not None:
            begin(f"counting {model}")
        costs, more = read_costs(options.costs, model, options.sequence, options.precision)
        found.append(costs)
        notes += more
    return found, list(dict.fromkeys(notes))


def _seconds_notes(
    precision: str, clusters: Sequence[Cluster], costs: Sequence[ModelCosts], calibration: Calibration | None
) -> list[str]:
    """Where seconds are not measured, of all devices that are asked about."""
    devices = {device.type: device for cluster in clusters for device in cluster.devices}
    every = replace(clusters[0], devices=tuple(replace(device, uuid=None) for device in devices.values()))
    texts = dict.fromkeys(text for each in costs for text in unmeasured(each, every, calibration))
    return [*texts, *precision_notes(precision, clusters, costs)]


def _clusters(nodes: Sequence[int] | None, cluster: Cluster) -> Iterator[Cluster]:
    if nodes is None:
        yield cluster
    else:
        yield from (with_nodes(cluster, count) for count in nodes)


def _changed(options: argparse.Namespace, cluster: Cluster, costs: Sequence[ModelCosts]) -> list[tuple[str, Cluster]]:
    """What was changed, and the cluster that it makes; every fault of --add and --remove at once."""
    found, problems = [], []
    for index, text in enumerate(options.add):
        try:
            devices = devices_of(text, f"added-{index}", cluster, costs[0])
            found.append((f"adding a node of {len(devices)} x {devices[0].type}", with_node(cluster, devices)))
        except HeteroError as error:
            problems.append(f"--add {error}")
    for node in options.remove:
        try:
            found.append((f"removing node {node}", without_node(cluster, node)))
        except HeteroError as error:
            problems.append(f"--remove: {error}")
    raise_all(HeteroError, "the questions cannot be answered", problems)
    return found


def _write_plot(options: argparse.Namespace, points: Sequence[SweepPoint]) -> list[str]:
    if options.plot is None:
        return []
    if find_spec("matplotlib") is None:
        return ["no plot: matplotlib is not installed; install it with: pip install 'lightning-hetero[plot]'"]
    from lightning_hetero.report.simulation_plot import plot_simulated_scaling

    lines = simulated_lines(points)
    if not lines:
        return ["no plot: nothing that was asked about fits"]
    batch = (
        f"global batch {options.global_batch}"
        if options.batch_per_rank is None
        else f"{options.batch_per_rank} samples a rank"
    )
    about = f"{points[0].cluster.name}, {batch}, {options.precision}"
    plot_simulated_scaling(lines, options.plot, about)
    return [f"plot written to {options.plot}"]


def _write_one_trace(path: str | None, points: Sequence[SweepPoint]) -> list[str]:
    if path is None:
        return []
    if points[0].step is None:
        return [f"no trace: {points[0].problem}"]
    return _write_trace(path, points[0].step, _what(points[0]))


def _write_trace(path: str | None, step: SimulatedStep, what: str) -> list[str]:
    if path is None:
        return []
    write_trace(path, simulated_trace(step, what))
    return [f"trace written to {path}: open it in https://ui.perfetto.dev or chrome://tracing"]


def _write(
    options: argparse.Namespace,
    points: Sequence[SweepPoint],
    changes: Sequence[Change],
    notes: Sequence[str],
    calibration: Calibration | None,
) -> list[str]:
    path = options.out
    if path is None:
        return []
    data: dict[str, Any] = {"schema": SCHEMA, "kind": "simulation", "label": SIMULATED, "notes": list(notes)}
    data["emulated"] = any(point.cluster.emulate for point in points)
    data["calibration"] = calibration_data(options.calibration, calibration)
    ideals = ideal_samples_per_s(points)
    data["points"] = [
        {**point.to_dict(), "ideal_samples_per_s": ideal} for point, ideal in zip(points, ideals, strict=True)
    ]
    data["changes"] = [change.to_dict() for change in changes]
    if len(points) == 1 and points[0].step is not None:
        data["ranks"] = [vars(rank) for rank in points[0].step.ranks]
    write_json(Path(path), data)
    return [f"written to {path}"]
