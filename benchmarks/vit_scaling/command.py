"""The command line: the study's tables on whatever is there."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.ranks import ArmFailedError
from benchmarks.vit_scaling import measure, settings
from benchmarks.vit_scaling.settings import Here, Settings
from benchmarks.vit_scaling.shapes import Shape
from benchmarks.vit_scaling.table import print_results
from lightning_hetero.errors import HeteroError
from lightning_hetero.records import read_json, write_json

SCHEMA = 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit_scaling", description=__doc__)
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--models", **several, help="ViTs (default: all six, on CPUs four, with --quick vit_huge)")
    parser.add_argument("--sharding", **several, help="DDP, FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_k")
    parser.add_argument("--prefetch", **several, help="BACKWARD_PRE, BACKWARD_POST, NONE")
    parser.add_argument("--limit-all-gathers", nargs="+", type=limit, default=(True, False), metavar="true|false|N")
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 4), metavar="N", help="of weak scaling")
    parser.add_argument("--strategy", **several, default=settings.STRATEGIES, help="of mixed devices")
    parser.add_argument("--cluster", type=Path, help="cluster file of emulated mixed devices")
    parser.add_argument("--data", choices=("synthetic", "images"), default="synthetic")
    parser.add_argument("--image-folder", type=Path, help="a folder per class (default: scikit-learn's digits as PNG)")
    parser.add_argument("--workers", type=int, default=1, help="processes of each rank that read images (default: 1)")
    parser.add_argument("--width-divisor", type=int, default=8, help="of the models on CPU ranks (default: 8)")
    parser.add_argument("--depth-divisor", type=int, default=4, help="of the models on CPU ranks (default: 4)")
    parser.add_argument("--only", nargs="+", choices=settings.TOPICS, help="these topics only")
    parser.add_argument("--quick", action="store_true", help="small steps, few repeats: under 2 minutes on 2 cores")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    parser.add_argument("--from", dest="results", type=Path, help="print and draw this JSON; nothing is measured")
    return parser.parse_args(arguments)


def limit(text: str) -> bool | int:
    """``limit_all_gathers`` from the command line."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: give true, false, or a number of 1 or more")


def find_devices() -> Here:
    """What is there."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = torch.cuda.get_device_name(0) if gpus else None
    return Here(len(os.sched_getaffinity(0)), gpus, name)


def settings_of(given: argparse.Namespace, here: Here) -> Settings:
    """What to run, with defaults for what was not given."""
    return Settings(
        here,
        tuple(given.models or settings.default_models(here, given.quick)),
        tuple(given.sharding or settings.default_sharding(here.devices, given.quick)),
        tuple(given.prefetch or settings.default_prefetch(given.quick)),
        tuple(given.limit_all_gathers),
        tuple(sorted(set(given.ranks))),
        tuple(given.strategy),
        given.cluster,
        given.image_folder,
        given.data == "images",
        given.workers,
        given.quick,
        given.width_divisor,
        given.depth_divisor,
    )


def measured(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the topics; returns the results in the form that is written."""
    here = find_devices()
    wanted = settings_of(given, here)
    topics = measure.topics_of(here, given.only, given.quick)

    def results(found: dict[str, Any]) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "environment": environment() | {"gpus": here.gpus, "gpu": here.gpu_name},
            "quick": wanted.quick,
            "arguments": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(given).items()
                if value is not None
            },
            "models": models_of(found, wanted),
            "topics": found,
        }

    def keep(found: dict[str, Any]) -> None:
        if given.out is not None:
            write_json(given.out, results(found))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=None)
        found = measure.run(
            wanted,
            topics,
            lambda what, steps: progress.update(task, description=what, advance=steps),
            lambda total: progress.update(task, total=total),
            keep,
        )
    return results(found)


def models_of(found: dict[str, Any], wanted: Settings) -> dict[str, Any]:
    """What the models of the rows are, by name."""
    rows = [row for topic in found.values() for row in topic["rows"]]
    shapes = {}
    for row in rows:
        scaled = row["scaled_down"]
        shape = wanted.shape(row["model"]) if scaled else Shape(row["model"])
        shapes[row["model"] if scaled else f"{row['model']}, own size"] = shape.describe()
    return shapes


def read_results(path: Path) -> dict[str, Any]:
    """What ``--out`` has written.

    Raises:
        HeteroError: it is no such file.
    """
    again = "give a file that --out has written"
    found = read_json(path, "results", HeteroError, again)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "topics" not in found:
        raise HeteroError(f"results {path} are not of this benchmark's schema {SCHEMA}: {again}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 165)
    try:
        if given.results is not None:
            results = read_results(given.results)
        else:
            results = measured(given, console)
    except (HeteroError, ArmFailedError) as error:
        print(error, file=sys.stderr)
        return 1
    print_results(results, console)
    if given.out is not None:
        write_json(given.out, results)
        console.print(f"wrote {given.out}")
    if given.plot is not None:
        from lightning_hetero.report.vit_scaling import plot_scaling

        plot_scaling(results, given.plot)
        console.print(f"wrote {given.plot}")
    return 0
