"""``python -m benchmarks.predicted_steps``: run the settings, print predicted beside measured, write it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.preload import preload
from benchmarks.hetero_speedup.ranks import ArmFailedError, ArmRanks
from benchmarks.predicted_steps import arms
from benchmarks.predicted_steps.figures import SKIPPED_STEPS, Row, problems, row_of, summary
from benchmarks.predicted_steps.setting import Setting
from benchmarks.predicted_steps.settings import QUICK, SETTINGS
from benchmarks.predicted_steps.table import print_results
from lightning_hetero.errors import HeteroError
from lightning_hetero.records import read_json, write_json

SCHEMA = 1
STEPS, QUICK_STEPS = 6, 4
"""with the first, which does not count. Fewer than after which hetero_fsdp may move shares (``Rebalance.window``)"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_steps", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six settings, fewer steps: at most 2 minutes")
    parser.add_argument("--out", type=Path, help="JSON file to write, after each setting")
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    parser.add_argument(
        "--only", metavar="TEXT", action="append", help="settings whose name holds it; others that --out has stay there"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--list", action="store_true", help="print the names of the settings")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace, known: dict[str, Row]) -> list[str]:
    """Names of the settings that are to run.

    Raises:
        HeteroError: if there is none of that name.
    """
    names = list(QUICK if options.quick else SETTINGS)
    if options.only:
        names = [name for name in names if any(text in name for text in options.only)]
        if not names:
            raise HeteroError(f"--only {' '.join(options.only)}: no setting is called so; --list shows them")
    return [name for name in names if not (options.resume and name in known)]


def measure(setting: Setting, steps: int) -> Row:
    """Run one setting.

    Raises:
        ArmFailedError: a rank failed.
    """
    with contextlib.closing(ArmRanks(setting.name, arms.run, setting, setting.world_size)) as ranks:
        planned = ranks.wait_ready()
        step_s = [ranks.step() for _ in range(steps)]
        told = ranks.stop()
    return {
        "strategy": setting.strategy,
        "true_gflops": setting.true_speeds,
        "declared_gflops": setting.declared,
    } | row_of(planned, told, step_s)


def results_of(rows: dict[str, Row], quick: bool) -> dict[str, Any]:
    """In the form that is written."""
    return {
        "schema": SCHEMA,
        "emulated": True,
        "quick": quick,
        "environment": environment(),
        "skipped_steps": SKIPPED_STEPS,
        "summary": summary(rows),
        "settings": rows,
    }


def run(names: Sequence[str], rows: dict[str, Row], options: argparse.Namespace, progress: Progress) -> None:
    """Measure the named settings into ``rows``, in the order of all settings, and write after each."""
    task = progress.add_task("starting", total=len(names))
    for name in names:
        progress.update(task, description=name)
        rows[name] = measure(SETTINGS[name], QUICK_STEPS if options.quick else STEPS)
        ordered = {each: rows[each] for each in SETTINGS if each in rows}
        rows.clear()
        rows.update(ordered)
        if options.out is not None:
            write_json(options.out, results_of(rows, options.quick))
        progress.advance(task)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 where a prediction is off, 2 where nothing ran."""
    options = parse_arguments(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    if options.list:
        console.print("\n".join(SETTINGS))
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        rows = _known(options)
        names = chosen(options, rows)
        preload("benchmarks.predicted_steps.arms")
        with Progress(*columns, console=console) as progress:
            run(names, rows, options, progress)
    except (HeteroError, ArmFailedError) as error:
        print(error, file=sys.stderr)
        return 2
    print_results(results_of(rows, options.quick), console)
    if options.out is not None and names:
        console.print(f"wrote {options.out}")
    if options.plot is not None:
        from lightning_hetero.report.predicted_steps import plot_predicted_steps

        plot_predicted_steps(rows, options.plot)
        console.print(f"wrote {options.plot}")
    off = problems(rows)
    for text in off:
        print(text, file=sys.stderr)
    return 1 if off else 0


def _known(options: argparse.Namespace) -> dict[str, Row]:
    """Rows that are in the file already, where they are to stay."""
    if options.out is None or not options.out.exists() or not (options.only or options.resume):
        return {}
    found = read_json(options.out, "results", HeteroError, "delete it, or give another file")
    rows: dict[str, Row] = {name: row for name, row in found["settings"].items() if name in SETTINGS}
    return rows


if __name__ == "__main__":
    sys.exit(main())
