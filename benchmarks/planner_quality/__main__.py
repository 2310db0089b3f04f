"""``python -m benchmarks.planner_quality``: compare the rules, time the planner, print it, write it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hetero_speedup.environment import environment
from benchmarks.planner_quality.clusters import anchors, random_clusters
from benchmarks.planner_quality.growth import measure_growth
from benchmarks.planner_quality.quality import compare
from benchmarks.planner_quality.rules import Rules, load_rules
from lightning_hetero.records import write_json

SCHEMA = 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 random clusters in place of 1,000, small sizes")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="figure of the planning times to write")
    parser.add_argument(
        "--packages", type=Path, help="folder with DeepSpeed and torchgpipe, made by pip install --target"
    )
    return parser.parse_args(arguments)


def run(quick: bool, rules: Rules, console: Console) -> dict[str, Any]:
    """Measure everything; returns the results in the form that is written."""
    with console.status("starting") as status:
        return {
            "schema": SCHEMA,
            "quick": quick,
            "environment": environment(),
            "libraries": {"versions": rules.versions, "missing": rules.missing},
            "anchors": compare(anchors(), rules, status.update),
            "random": compare(random_clusters(100 if quick else 1000), rules, status.update),
            "growth": measure_growth(quick, status.update),
        }


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for title, part in (("published layer times", "anchors"), ("random clusters", "random")):
        console.print(_quality_table(f"{results[part]['cases']} cases of {title}", results[part]))
    for library, reason in results["libraries"]["missing"].items():
        console.print(f"{library} is left out, as it cannot be imported here: {reason}")
    for axis, rows in results["growth"].items():
        table = Table(title=f"planning time {axis.replace('_', ' ')}", title_justify="left")
        for column in ("", "devices", "units", "median (ms)"):
            table.add_column(column, justify="right" if column else "left")
        for name, points in rows.items():
            for point in points:
                table.add_row(name, str(point["devices"]), str(point["units"]), f"{point['median_s'] * 1e3:.1f}")
            table.add_section()
        console.print(table)


def _quality_table(title: str, part: dict[str, Any]) -> Table:
    table = Table(title=f"{title}: bottleneck / optimum in the order as listed", title_justify="left")
    table.add_column("")
    for column in ("worst", "mean", "a device empty", "planning, median (ms)", "worst (ms)"):
        table.add_column(column, justify="right")
    for name, rule in part["rules"].items():
        table.add_row(
            name,
            f"{rule['worst']:.3f}",
            f"{rule['mean']:.3f}",
            str(rule["cases_with_an_empty_device"]),
            f"{rule['median_planning_s'] * 1e3:.2f}",
            f"{rule['worst_planning_s'] * 1e3:.1f}",
        )
    checked = part["free_order_checked"]
    table.caption = (
        f"free order against every order one by one, in the {checked['cases']} cases with up to "
        f"{checked['most_orders']} orders: largest gap {checked['largest_gap']:.1e}"
    )
    return table


def main() -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments()
    console = Console()
    results = run(options.quick, load_rules(options.packages), console)
    print_results(results, console)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    if options.plot is not None:
        from lightning_hetero.report.planning import plot_planning_time

        plot_planning_time(results["growth"], options.plot)
        console.print(f"wrote {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
