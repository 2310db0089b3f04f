"""What is wrong with what ``lightning-hetero simulate`` was asked, all of it at once, before anything is counted."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.sweep import sharding_problems
from lightning_hetero.records import read_json

MOST_RANKS = 2**20
"""that a sweep may have: beyond, planning runs for hours and memory"""

_PLANS = (ShardPlan.KIND, PipelinePlan.KIND)
_MADE_BY = {
    "plan": '"lightning-hetero plan"',
    "costs": '"lightning-hetero profile"',
    "calibration": '"lightning-hetero calibrate"',
}


def argument_problems(options: argparse.Namespace) -> list[str]:
    """What does not go together, what is not known, and files that are of another kind."""
    problems = []
    if not options.models and options.costs is None:
        problems.append("neither --costs nor --models is given: give a costs file, or names of models")
    if options.models and options.costs is not None:
        problems.append("both --costs and --models are given: leave one out")
    problems += _model_problems(options.models) + _file_problems(options)
    return problems + (_plan_problems(options) if options.plan is not None else _sweep_problems(options))


def _plan_problems(options: argparse.Namespace) -> list[str]:
    """Beside a plan."""
    problems = []
    sweeping = {
        "--nodes": options.nodes,
        "--sharding": options.sharding,
        "--add": options.add,
        "--remove": options.remove,
        "--global-batch": options.global_batch,
        "--batch-per-rank": options.batch_per_rank,
        "--activation-checkpointing": options.activation_checkpointing,
        "--even": options.even,
        "--backward-prefetch": options.backward_prefetch,
        "--limit-all-gathers": options.limit_all_gathers,
        "--plot": options.plot,
    }
    given = [name for name, value in sweeping.items() if value]
    if given:
        problems.append(f"a plan is for one cluster and one batch as it is: leave out {', '.join(given)}, or --plan")
    if len(options.models) > 1:
        problems.append(f"a plan is for one model, --models names {len(options.models)}: give one")
    return problems


def _sweep_problems(options: argparse.Namespace) -> list[str]:
    """Without a plan."""
    problems = []
    batches = (options.global_batch is not None) + (options.batch_per_rank is not None)
    if batches != 1:
        what = (
            "neither --global-batch nor --batch-per-rank is"
            if not batches
            else "both --global-batch and --batch-per-rank are"
        )
        problems.append(f"{what} given: the first keeps the batch, the second scales it with the ranks; give one")
    steps = max(1, len(options.models)) * len(options.sharding or "1") * len(options.nodes or "1")
    if options.trace is not None and steps > 1:
        problems.append(f"--trace is of one step, this is {steps}: give one model, one sharding, one number of nodes")
    asked = [name for name, value in (("--add", options.add), ("--remove", options.remove)) if value]
    if asked and len(options.nodes or ()) > 1:
        problems.append(
            f"{' and '.join(asked)} ask{'s' if len(asked) == 1 else ''} about one cluster, --nodes makes "
            f"{len(options.nodes)}: give one number of nodes, or ask in a command of its own"
        )
    return problems + [f"--{text}" for text in sharding_problems(options.sharding or ())]


def size_problems(nodes: Sequence[int], cluster: Cluster) -> list[str]:
    """Numbers of nodes that make more ranks than can be simulated."""
    own = [len(cluster.ranks_of(node)) for node in cluster.nodes]

    def ranks(count: int) -> int:
        return count // len(own) * sum(own) + sum(own[: count % len(own)])

    return [
        f"--nodes {count} makes {ranks(count)} ranks of cluster {cluster.name!r}: give so few that there are "
        f"{MOST_RANKS} at most"
        for count in nodes
        if ranks(count) > MOST_RANKS
    ]


def plan_cluster_problems(plan: ShardPlan | PipelinePlan, cluster: Cluster) -> list[str]:
    """A plan for other devices than the cluster has, in one text."""
    planned, found = list(plan.device_types), list(cluster.device_types())
    if len(planned) != len(found):
        difference = f"is for {len(planned)} ranks, cluster {cluster.name!r} has {len(found)}"
    elif planned != found:
        rank = next(index for index, pair in enumerate(zip(planned, found, strict=True)) if pair[0] != pair[1])
        differing = sum(one != other for one, other in zip(planned, found, strict=True))
        difference = (
            f"is for other devices than cluster {cluster.name!r} has: its rank {rank} is a {planned[rank]}, the "
            f"cluster's a {found[rank]}; so {differing} of {len(found)} ranks differ"
        )
    else:
        return []
    return [f"the plan {difference}: give the cluster that the plan is for (--cluster), or plan for this one"]


def _model_problems(models: Sequence[str]) -> list[str]:
    """Names that no model has."""
    if not models:
        return []
    from lightning_hetero.models.presets import PRESETS  # loads torch, which files do without

    unknown = [name for name in models if name not in PRESETS]
    if not unknown:
        return []
    are = f"{', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not known"
    return [f"--models: {are}: give {', '.join(PRESETS)}"]


def _file_problems(options: argparse.Namespace) -> list[str]:
    """Files that cannot be read, or are of another kind than asked for: all of their keys would be wrong."""
    problems = []
    for option, path in (("plan", options.plan), ("costs", options.costs), ("calibration", options.calibration)):
        if path is None:
            continue
        next_step = f"give the path of a {option} file, or make one with {_MADE_BY[option]}"
        try:
            found = _kind_of(read_json(Path(path), f"{option} file", HeteroError, next_step))
        except HeteroError as error:
            problems.append(str(error))
            continue
        if found not in (None, option):
            problems.append(f"--{option} {path} is not a {option} file (it is a {found} file): {next_step}")
    return problems


def _kind_of(data: object) -> str | None:
    """What a file of this package holds; ``None`` where that cannot be told: reading it says what is wrong."""
    if not isinstance(data, Mapping):
        return None
    if "kind" in data:
        return "plan" if data["kind"] in _PLANS else str(data["kind"])
    # Costs have no kind, and neither have the first plans.
    return "costs" if "units" in data and "model" in data else "plan" if "batch_shares" in data else None
