"""``python -m benchmarks.planner_scaling``: time and memory of whole plans by devices and units."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hetero_speedup.environment import environment
from benchmarks.planner_scaling.measure import measure
from benchmarks.planner_scaling.planners import PLANNERS
from lightning_hetero.records import write_json

SCHEMA = 1
DEVICES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
UNITS = (26, 50, 98, 194, 386)
# The case that the project promises: below 2 s and 500 MB on one thread.
PROMISED = (1024, 98)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 64 devices and 98 units, once each")
    parser.add_argument("--planner", choices=sorted(PLANNERS), action="append", help="only these planners")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def run(quick: bool, planners: list[str], console: Console) -> dict[str, Any]:
    """Measure everything; returns the results in the form that is written."""
    growth: dict[str, Any] = {}
    with console.status("starting") as status:
        for planner in planners:
            rows: dict[str, list[dict[str, Any]]] = {"by_devices": [], "by_units": []}
            sizes = [("by_devices", (devices, PROMISED[1])) for devices in DEVICES if not quick or devices <= 64]
            sizes += [("by_units", (64 if quick else 256, units)) for units in UNITS if not quick or units <= 98]
            for axis, (devices, units) in sizes:
                status.update(f"{planner}: {devices} devices, {units} units")
                rows[axis].append(measure(planner, devices, units, 1 if quick else 3))
            status.update(f"{planner}: with torch imported")
            rows["with_torch"] = [measure(planner, *((64, 98) if quick else PROMISED), 1, torch=True)]
            growth[planner] = rows
    return {"schema": SCHEMA, "quick": quick, "environment": environment(), "growth": growth}


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print one table per planner and axis."""
    for planner, axes in results["growth"].items():
        for axis, rows in axes.items():
            table = Table(title=f"{planner} plans {axis.replace('_', ' ')}", title_justify="left")
            for column in ("devices", "units", "processor (s)", "wall (s)", "peak memory (MB)", "gap to the bound"):
                table.add_column(column, justify="right")
            for row in rows:
                table.add_row(
                    str(row["devices"]),
                    str(row["units"]),
                    f"{row['processor_s']:.2f}",
                    f"{row['wall_s']:.2f}",
                    f"{row['peak_rss_bytes'] / 1e6:.0f}",
                    _gap(row),
                )
            console.print(table)


def _gap(row: dict[str, Any]) -> str:
    if "infeasible" in row:
        return "does not fit"
    return f"{row['predicted_step_s'] / row['lower_bound_s'] - 1:.1%}"


def main() -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments()
    console = Console()
    results = run(options.quick, options.planner or list(PLANNERS), console)
    print_results(results, console)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
