"""``python -m benchmarks.hetero_speedup``: run the comparison, print it, write it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.hetero_speedup.case import PINNED_CLUSTER, Case, Effort
from benchmarks.hetero_speedup.conductor import (
    EVEN,
    HETERO,
    PLAIN,
    SIDE_BY_SIDE,
    measure_case,
    measure_overhead,
    solo_name,
    steps_of_case,
)
from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.ranks import ArmFailedError
from benchmarks.hetero_speedup.speedup import ArmTimes, ratio_of_turns, summarise
from benchmarks.hetero_speedup.table import print_results
from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import HeteroError
from lightning_hetero.records import write_json
from lightning_hetero.strategies.rebalance import REFINING_WINDOWS, Rebalance

SCHEMA = 1
EMULATED_BATCH_PER_RANK = 32
SETTLING_STEPS = (REFINING_WINDOWS + 2) * Rebalance().window
"""what decides whether shares move, twice, and batches that are drawn already"""
PARTS = ("emulated", "real_work", "overhead")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hetero_speedup", description=__doc__)
    parser.add_argument("--cluster", type=Path, default=PINNED_CLUSTER, help="cluster file of emulated devices")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, at most 3 minutes")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only (may be repeated)")
    return parser.parse_args(arguments)


def cases(cluster_path: Path, quick: bool) -> dict[str, tuple[Case, Effort]]:
    """Return what is run, by part."""
    cluster = Cluster.from_yaml(cluster_path)
    if not cluster.emulate:
        raise HeteroError(f"cluster file {cluster_path}: this benchmark emulates its devices; set emulate: true")
    ranks = cluster.world_size
    emulated = Case(
        cluster.name,
        ranks,
        global_batch=EMULATED_BATCH_PER_RANK * ranks,
        solo_batch=EMULATED_BATCH_PER_RANK // 4 if quick else EMULATED_BATCH_PER_RANK,
        cluster_path=cluster_path.resolve(),
    )
    # many turns: a virtual machine's cores drift by a third within a minute, which turns must share
    images = 192 if quick else 384
    real_work = Case("real work", 2, global_batch=images, solo_batch=images // 3, doubled_ranks=(1,), max_steps=200)
    equal = Case("equal devices", 2, global_batch=32, solo_batch=16)
    if quick:
        efforts = Effort(1, 1), Effort(2, 1), Effort(3, 2)
    else:
        efforts = Effort(3, 2), Effort(20, 1, settling_steps=SETTLING_STEPS), Effort(20, 2)
    return dict(zip(PARTS, zip((emulated, real_work, equal), efforts, strict=True), strict=True))


def run(parts: dict[str, tuple[Case, Effort]], progress: Progress, only: list[str] | None) -> dict[str, Any]:
    """Measure the parts; returns the results in the form that is written."""
    wanted = [part for part in PARTS if part in (only or PARTS)]
    total = sum(
        2 * effort.steps_per_arm if part == "overhead" else steps_of_case(case, effort)
        for part, (case, effort) in parts.items()
        if part in wanted
    )
    task = progress.add_task("starting", total=total)

    def tell(what: str, steps: int) -> None:
        progress.update(task, description=what, advance=steps)

    results: dict[str, Any] = {"schema": SCHEMA, "environment": environment()}
    for part in wanted:
        case, effort = parts[part]
        if part == "overhead":
            times = measure_overhead(case, effort, tell)
            results["overhead_equal_devices"] = ratio_of_turns(times[HETERO], times[PLAIN])
            results["overhead_raw"] = _raw(times)
            continue
        times = measure_case(case, effort, tell)
        kinds = case.kind_of_rank()
        solo = {kind: times[solo_name(kind)] for kind in kinds}
        found = {
            **summarise(times[HETERO], times[EVEN], solo, kinds),
            "emulated": case.emulated,
            "case": _describe(case),
            "raw": _raw(times),
        }
        if SIDE_BY_SIDE in times:
            found["side_by_side_images_per_s"] = times[SIDE_BY_SIDE].images_per_s
            found["efficiency_of_side_by_side"] = ratio_of_turns(times[SIDE_BY_SIDE], times[HETERO])
        results.update(found if part == "emulated" else {"real_work": found})
    return results


def _raw(times: dict[str, ArmTimes]) -> dict[str, Any]:
    return {name: arm.to_dict() for name, arm in times.items()}


def _describe(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "kind_of_rank": case.kind_of_rank(),
        "global_batch": case.global_batch,
        "solo_batch": case.solo_batch,
        "model": f"timm VisionTransformer, {case.size.depth} blocks, width {case.size.width}, "
        f"{case.size.tokens} tokens, {case.size.heads} heads",
    }


def main() -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        parts = cases(options.cluster, options.quick)
        with Progress(*columns, console=console) as progress:
            results = run(parts, progress, options.only)
    except (HeteroError, ArmFailedError) as error:
        print(error, file=sys.stderr)
        return 1
    results["quick"] = options.quick
    print_results(results, console)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    if options.plot is not None:
        from lightning_hetero.report.speedup import plot_speedup

        plot_speedup(results, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
