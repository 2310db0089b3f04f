"""``python -m benchmarks.scale``: set-up of both strategies for 1,024 ranks, computed, and really made rank by rank."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hetero_speedup.environment import environment
from benchmarks.scale import pipeline_rank, shard_rank
from benchmarks.scale.cases import PipelineCase, ShardCase, pipeline_cases, shard_cases
from benchmarks.scale.compare import PipelineSetUp, ShardSetUp, kinds_of_pipeline_ranks, kinds_of_shard_ranks
from benchmarks.scale.recorder import Recorded
from lightning_hetero.errors import HeteroError
from lightning_hetero.models.inputs import preset_inputs
from lightning_hetero.models.presets import build_preset
from lightning_hetero.records import read_json, write_json
from lightning_hetero.units import format_bytes

SCHEMA = 1
PRESET, DEPTH = "vit_huge", 32
ONE_GROUP_DEPTH = 2
"""Fake tensors take some 0.5 ms for each of 1,024 parts of each parameter: blocks enough for all kinds of units."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--case", action="append", help="only these cases; others' results in the file stay")
    parser.add_argument("--quick", action="store_true", help="2 blocks, one rank of each plan")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def shard_row(case: ShardCase, quick: bool) -> dict[str, Any]:
    """Compute a shard plan's set-up, make that of one rank of each kind, and compare."""
    model = build_preset(case.preset, device="meta", depth=case.depth)
    parameters, costs = shard_rank.parameters_of(model), shard_rank.costs_of(model)
    begin_s = time.process_time()
    setup = ShardSetUp(case, parameters, costs)
    computed_s = time.process_time() - begin_s
    begin_s = time.process_time()
    stuck = setup.stuck()
    ordered_s = time.process_time() - begin_s
    inputs = preset_inputs(case.preset)[0]
    ranks = kinds_of_shard_ranks(case)[: 1 if quick else None]
    made = []
    for rank in ranks:
        begin_s = time.process_time()
        real = shard_rank.run_shard_rank(case.plan, rank, model, inputs)
        made.append(_rank_row(rank, real.set_up_s, time.process_time() - begin_s, real.seen))
        made[-1]["differences"] = setup.differences(rank, real)
    return {
        "case": case.name,
        "model": f"{case.preset}, {case.depth} blocks",
        "model_elements": costs.parameters,
        "shard_groups": len(case.plan.groups),
        "native": setup.membership.is_native,
        "written_bytes": sum(part.size_bytes for part in setup.checkpoint),
        "writers": len({rank for part in setup.checkpoint for rank in part.writers}),
        **_computed(setup, computed_s, ordered_s, stuck),
        "ranks": made,
    }


def pipeline_row(case: PipelineCase, quick: bool) -> dict[str, Any]:
    """The same for a pipeline plan."""
    parameters = pipeline_rank.parameters_of(case)
    costs = pipeline_rank.costs_of(case, parameters)
    begin_s = time.process_time()
    setup = PipelineSetUp(case, parameters, costs)
    computed_s = time.process_time() - begin_s
    begin_s = time.process_time()
    stuck = setup.stuck()
    ordered_s = time.process_time() - begin_s
    made = []
    for rank in kinds_of_pipeline_ranks(case)[: 1 if quick else None]:
        begin_s = time.process_time()
        real = pipeline_rank.run_pipeline_rank(case, rank)
        made.append(_rank_row(rank, real.set_up_s, time.process_time() - begin_s, real.seen))
        made[-1]["differences"] = setup.differences(rank, real)
    return {
        "case": case.name,
        "model": f"GPT, {len(case.plan.unit_names)} units",
        "model_elements": sum(each.elements for each in parameters),
        "pipelines": len(case.plan.pipelines),
        "idle_ranks": len(case.plan.idle_ranks),
        "written_bytes": setup.file.size_bytes,
        "sent_to_rank_0_bytes": sum(setup.sent_bytes.values()),
        **_computed(setup, computed_s, ordered_s, stuck),
        "ranks": made,
    }


def _computed(setup: ShardSetUp | PipelineSetUp, computed_s: float, ordered_s: float, stuck: str) -> dict[str, Any]:
    held = [each.total_bytes for each in setup.holdings]
    return {
        "world_size": len(held),
        "computed_s": computed_s,
        "ordered_s": ordered_s,
        "stuck": stuck,
        "process_groups": dict(Counter(group.purpose for group in setup.groups)),
        "held_bytes_least": min(held),
        "held_bytes_most": max(held),
    }


def _rank_row(rank: int, set_up_s: float, processor_s: float, seen: tuple[Recorded, ...]) -> dict[str, Any]:
    kinds = sorted({each.kind for each in seen})
    return {
        "rank": rank,
        "set_up_wall_s": set_up_s,
        "processor_s": processor_s,
        "collectives": {kind: sum(each.kind == kind for each in seen) for kind in kinds},
        "collective_bytes": {kind: sum(each.size_bytes for each in seen if each.kind == kind) for kind in kinds},
    }


def run(quick: bool, only: Sequence[str], known: Sequence[dict[str, Any]], console: Console) -> dict[str, Any]:
    """Do all cases, or some; returns the results in the form that is written.

    Args:
        quick: smaller models, fewer ranks.
        only: names of the cases to do; none is all.
        known: results of earlier runs, which stay for the cases that are not done.
        console: to say what is done.
    """
    depth = 2 if quick else DEPTH
    shards = [*shard_cases(PRESET, ONE_GROUP_DEPTH)[:1], *shard_cases(PRESET, depth)[1:]]
    cases: list[ShardCase | PipelineCase] = [*shards, *pipeline_cases()]
    kept = {row["case"]: row for row in known}
    for case in cases:
        if not only or case.name in only:
            console.print(f"{case.name} ...")
            row = shard_row(case, quick) if isinstance(case, ShardCase) else pipeline_row(case, quick)
            kept[case.name] = row | {"quick": quick, "torch": torch.__version__, "environment": environment()}
    return {"schema": SCHEMA, "cases": [kept[case.name] for case in cases if case.name in kept]}


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print what was computed for all ranks, and what one rank of each kind really had and did."""
    table = Table(title="computed for all ranks, without torch", title_justify="left")
    columns = ("case", "model", "ranks", "seconds", "process groups", "held by a rank", "checkpoint", "waits for ever")
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "model", "process groups") else "right")
    for row in results["cases"]:
        table.add_row(
            row["case"],
            row["model"],
            str(row["world_size"]),
            f"{row['computed_s']:.2f}",
            ", ".join(f"{count} {purpose}" for purpose, count in row["process_groups"].items()),
            f"{format_bytes(row['held_bytes_least'])} to {format_bytes(row['held_bytes_most'])}",
            format_bytes(row["written_bytes"]),
            row["stuck"] or "nothing",
        )
    console.print(table)
    table = Table(title="really made, one rank at a time, and one step of it", title_justify="left")
    for column in ("case", "rank", "set-up (s)", "collectives of a step", "unlike computed"):
        table.add_column(column, justify="right" if column in ("rank", "set-up (s)") else "left")
    for cells in _made(results):
        table.add_row(*cells)
    console.print(table)


def _made(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in results["cases"]:
        for made in row["ranks"]:
            sizes = made["collective_bytes"]
            shown = ", ".join(f"{n} {kind} ({format_bytes(sizes[kind])})" for kind, n in made["collectives"].items())
            yield (
                row["case"],
                str(made["rank"]),
                f"{made['set_up_wall_s']:.2f}",
                shown,
                "; ".join(made["differences"]) or "nothing",
            )


def main() -> int:
    """Run the command line; returns 1 where something was unlike computed."""
    options = parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    known = []
    if options.case and options.out is not None and options.out.exists():
        known = read_json(options.out, "results file", HeteroError, "leave --case out")["cases"]
    results = run(options.quick, options.case or (), known, console)
    print_results(results, console)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    failed = [row for row in results["cases"] if row["stuck"] or any(made["differences"] for made in row["ranks"])]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
