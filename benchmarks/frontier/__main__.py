"""``python -m benchmarks.frontier``: the Frontier ViT study, predicted and set beside what was published."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from benchmarks.frontier import machine
from benchmarks.frontier.fit import FIELDS, fit, held_out_errors
from benchmarks.frontier.machine import Constants
from benchmarks.frontier.predict import MODES, NODES, is_possible, predict
from benchmarks.frontier.summary import summarise
from benchmarks.frontier.tables import comm_options, memory, models, weak_scaling
from benchmarks.frontier.tables_on_screen import print_results
from lightning_hetero.records import write_json
from lightning_hetero.simulator.execution import PREFETCHES, Execution

SCHEMA = 1

OPTIONS_MODEL, OPTIONS_NODES = "vit_5b", 8


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()), metavar="MODEL")
    parser.add_argument("--sharding", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES), metavar="N", help="of 8 GCDs; 1 to 128")
    parser.add_argument("--fit", action="store_true", help="find the constants again from the tables (a minute)")
    parser.add_argument(
        "--hold-out", action="store_true", help="fit to all models but one, predict that one, each in turn (minutes)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="figure to write")
    options = parser.parse_args(arguments)
    if bad := [nodes for nodes in options.nodes if not 1 <= nodes <= 4096]:
        parser.error(f"argument --nodes: {', '.join(map(str, bad))}: give 1 to 4096")
    return options


def predict_rows(names: list[str], sharding: list[str], nodes: list[int], constants: Constants) -> list[dict[str, Any]]:
    """One row for each model, mode and number of nodes; modes that need more GCDs than there are left out.

    Where a GCD has not the memory, ``fits`` is false, and ``images_per_s`` is what it would be with more.
    """
    throughput = {(row.model, row.sharding, row.nodes): row.images_per_s for row in weak_scaling()}
    peaks = {(row.model, row.sharding, row.nodes): row.peak_gb for row in memory()}
    rows = []
    for name in names:
        for mode in sharding:
            for count in nodes:
                if not is_possible(mode, count):
                    continue
                found = predict(name, mode, count, constants)
                # numbers for any number of nodes are beside the runs on 8
                peak = peaks.get((name, mode, count)) or (peaks.get((name, mode, None)) if count == 8 else None)
                rows.append(
                    {
                        "model": name,
                        "sharding": mode,
                        "nodes": count,
                        "images_per_s": found.images_per_s,
                        "peak_memory_gb": found.peak_bytes / 1e9,
                        "fits": found.fits,
                        "step_s": found.step_s,
                        "exposed_s": found.exposed_s,
                        "published_images_per_s": throughput.get((name, mode, count)),
                        "published_peak_memory_gb": peak,
                    }
                )
    return rows


def predict_options(constants: Constants) -> list[dict[str, Any]]:
    """vit_5b on 8 nodes by backward prefetch, beside the study's runs with the limit on all-gathers."""
    published = {
        (row.sharding, row.backward_prefetch): row.images_per_s for row in comm_options() if row.limit_all_gathers
    }
    unlimited = {
        (row.sharding, row.backward_prefetch): row.images_per_s for row in comm_options() if not row.limit_all_gathers
    }
    rows = []
    for mode in dict.fromkeys(sharding for sharding, _ in published):
        for prefetch in PREFETCHES:
            execution = Execution(engine="fsdp1", backward_prefetch=prefetch, limit_all_gathers=True)
            found = predict(OPTIONS_MODEL, mode, OPTIONS_NODES, constants, execution)
            rows.append(
                {
                    "sharding": mode,
                    "backward_prefetch": prefetch,
                    "images_per_s": found.images_per_s,
                    "published_images_per_s": published[mode, prefetch],
                    "published_without_limit": unlimited[mode, prefetch],
                }
            )
    return rows


def environment() -> dict[str, Any]:
    """Where the prediction was made, which needs no torch."""
    return {
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": f"{os.getloadavg()[0]:.2f}",
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    constants = fit() if options.fit else machine.FITTED
    begin = perf_counter()
    with console.status("simulating"):
        rows = predict_rows(options.models, options.sharding, options.nodes, constants)
        prefetch = predict_options(constants) if OPTIONS_MODEL in options.models else []
    results = {
        "schema": SCHEMA,
        "environment": environment(),
        "simulated_s": perf_counter() - begin,
        "constants": asdict(constants),
        "fitted": [*FIELDS, "process_bytes"],
        "rows": rows,
        "options": prefetch,
        "summary": summarise(rows, prefetch),
    }
    if options.hold_out:
        results["held_out"] = held_out_errors()
    print_results(results, console)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    if options.plot is not None:
        from lightning_hetero.report.frontier import plot_frontier

        plot_frontier(results, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
