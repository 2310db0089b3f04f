"""``python -m benchmarks.mixed_runs``: predict runs on mixed GPUs, print them beside what was measured, write them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mixed_runs.predict import predict
from benchmarks.mixed_runs.runs import read_runs
from benchmarks.mixed_runs.tables import find_table, read_tables
from lightning_hetero.errors import HeteroError
from lightning_hetero.records import write_json
from lightning_hetero.report.console import console
from lightning_hetero.report.table import ReportTable, cells

Rows = list[dict[str, Any]]

SCHEMA = 1


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed_runs", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="runs, as opt350_measured_runs.json")
    parser.add_argument("--out", type=Path, help="JSON file to write, with a row for each run")
    parser.add_argument(
        "--layer-times",
        type=Path,
        metavar="CSV",
        help="seconds per layer; by default MODEL_layer_times.csv beside FILE.json, or else the one of this benchmark",
    )
    parser.add_argument(
        "--layer-sizes", type=Path, metavar="CSV", help="bytes per layer; by default found in the same way"
    )
    parser.add_argument("--plot", type=Path, help="figure to write: predicted beside measured")
    return parser.parse_args(arguments)


def run(files: Sequence[Path], layer_times: Path | None = None, layer_sizes: Path | None = None) -> Rows:
    """Predict the runs of all files; returns a row for each.

    Raises:
        HeteroError: listing what is wrong with a file, or not known for a run.
    """
    rows: Rows = []
    for path in files:
        file = read_runs(path)
        times_path = layer_times or find_table(path, file.model, "layer_times", "--layer-times")
        sizes_path = layer_sizes or find_table(path, file.model, "layer_sizes", "--layer-sizes")
        predictions = predict(file, read_tables(times_path, sizes_path))
        rows += [each.row() | {"model": file.model, "file": path.name} for each in predictions]
    return rows


def mean_absolute_error(rows: Rows) -> float | None:
    """Of the steps that were measured; ``None`` without any."""
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    return sum(errors) / len(errors) if errors else None


def as_table(rows: Rows) -> ReportTable:
    """What is printed."""
    columns = (
        "run", "pipelines x stages", "measured (s)", "predicted (s)", "error (%)",
        "gradients, measured (s)", "gradients, predicted (s)", "exposed communication (s)", "not computing (%)",
    )  # fmt: skip
    mean = mean_absolute_error(rows)
    shown = [
        cells(
            [
                row["run"],
                f"{row['pipelines']} x {len(row['stages'])}",
                _number(row["measured_step_s"]),
                _number(row["predicted_step_s"]),
                None if row["error"] is None else f"{100 * row['error']:+.1f}",
                _number(row["measured_gradient_sync_s"]),
                _number(row["predicted_gradient_sync_s"]),
                _number(row["predicted_exposed_communication_s"]),
                f"{100 * row['predicted_bubble']:.0f}",
            ]
        )
        for row in rows
    ]
    note = () if mean is None else (f"mean absolute error of the step: {100 * mean:.1f} %",)
    return ReportTable("step of runs on mixed GPUs", columns, tuple(shown), note)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with the reasons on standard error."""
    options = parse_arguments(arguments)
    try:
        rows = run(options.files, options.layer_times, options.layer_sizes)
    except HeteroError as error:
        print(error, file=sys.stderr)
        return 2
    screen = console()
    as_table(rows).show(screen)
    if options.out is not None:
        write_json(options.out, {"schema": SCHEMA, "mean_absolute_error": mean_absolute_error(rows), "rows": rows})
        screen.print(f"wrote {options.out}", markup=False)
    if options.plot is not None:
        from lightning_hetero.report.mixed_runs import plot_mixed_runs

        plot_mixed_runs(rows, options.plot)
        screen.print(f"wrote {options.plot}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
