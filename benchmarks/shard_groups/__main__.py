"""``python -m benchmarks.shard_groups``: what layouts cost, what memory costs, and what options cost."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.hetero_speedup.case import Case, Effort
from benchmarks.hetero_speedup.conductor import alternate, solo_name
from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.ranks import Arm, ArmFailedError
from benchmarks.hetero_speedup.speedup import ratio_of_turns
from benchmarks.shard_groups import arms
from benchmarks.shard_groups.plain import PAIRS
from lightning_hetero.errors import HeteroError
from lightning_hetero.records import write_json

SCHEMA = 1
OPTIONS = "options"
OURS, PLAIN = "hetero_fsdp", "plain FSDP2 loop"
EVEN = "even FSDP2"
PARTS: dict[str, tuple[str, dict[str, Arm]]] = {
    "layouts": ("four_equal.yaml", arms.LAYOUTS),
    "mixed_memory": (
        "fast_small_slow_large.yaml",
        {"hetero_fsdp": arms.hetero_auto, "hetero_fsdp, HYBRID_2": arms.hetero_pairs},
    ),
}


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shard_groups", description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="turns of each arm (default: 3)")
    parser.add_argument("--only", choices=[*PARTS, OPTIONS], help="run this part only")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    console = Console()
    results: dict[str, Any] = {"schema": SCHEMA, "environment": environment()}
    try:
        with Progress(console=console) as progress:
            for part in [options.only] if options.only else [*PARTS, OPTIONS]:
                if part == OPTIONS:
                    results[part] = run_options(Effort(options.turns, 4), progress)
                else:
                    results[part] = run(part, Effort(options.turns, 2), progress)
    except (HeteroError, ArmFailedError) as error:
        print(error, file=sys.stderr)
        return 1
    for part in PARTS:
        if part in results:
            console.print(_table(part, results[part]))
    if OPTIONS in results:
        console.print(_options_table(results[OPTIONS]))
    if "mixed_memory" in results:
        console.print(f"even FSDP2: {results['mixed_memory']['even_fsdp2']}", markup=False)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    return 0


def run(part: str, effort: Effort, progress: Progress) -> dict[str, Any]:
    """Measure a part's arms in turn, and each kind of device alone; returns the results in the form that is written."""
    file, hetero = PARTS[part]
    path = Path(__file__).with_name(file)
    case = Case(part, 4, global_batch=128, solo_batch=32, cluster_path=path)
    kinds = case.kind_of_rank()
    task = progress.add_task("starting", total=(len(hetero) + len(set(kinds))) * effort.steps_per_arm)

    def tell(what: str, steps: int) -> None:
        progress.update(task, description=what, advance=steps)

    with tempfile.TemporaryDirectory() as folder:
        plan: dict[str, tuple[Arm, Case]] = {name: (arm, case) for name, arm in hetero.items()}
        for kind, rank in case.rank_of_kind().items():
            plan[solo_name(kind)] = (arms.solo, arms.alone(case, rank, Path(folder)))
        times = alternate(case.name, plan, effort, tell)
    total = sum(times[solo_name(kind)].images_per_s for kind in kinds)
    found = {
        "emulated": True,
        "cluster": path.read_text(),
        "kind_of_rank": kinds,
        "solo_sum_images_per_s": total,
        "efficiency": {name: times[name].images_per_s / total for name in hetero},
        "raw": {name: each.to_dict() for name, each in times.items()},
    }
    return found | ({"even_fsdp2": _even(case)} if part == "mixed_memory" else {})


def run_options(effort: Effort, progress: Progress) -> dict[str, Any]:
    """Measure each option's pair of arms in turn, on two equal ranks that compute for real."""
    case = Case(OPTIONS, 2, global_batch=32, solo_batch=16)
    task = progress.add_task("starting", total=2 * len(PAIRS) * effort.steps_per_arm)

    def tell(what: str, steps: int) -> None:
        progress.update(task, description=what, advance=steps)

    found: dict[str, Any] = {"emulated": False, "overhead": {}, "raw": {}}
    for name, (ours, plain) in PAIRS.items():
        times = alternate(name, {OURS: (ours, case), PLAIN: (plain, case)}, effort, tell)
        found["overhead"][name] = ratio_of_turns(times[OURS], times[PLAIN])
        found["raw"][name] = {arm: each.to_dict() for arm, each in times.items()}
    return found


def _options_table(results: Mapping[str, Any]) -> Table:
    table = Table(title="options: two equal ranks, not emulated", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in (f"{OURS} (s)", f"{PLAIN} (s)", "step / plain step"):
        table.add_column(column, justify="right")
    for name, arms_of in results["raw"].items():
        seconds = [f"{arms_of[arm]['median_step_s']:.3f}" for arm in (OURS, PLAIN)]
        table.add_row(name, *seconds, f"{results['overhead'][name]:.3f}")
    return table


def _even(case: Case) -> str:
    """Run stock FSDP2 with an even split under the same emulation; say what came of it."""
    try:
        times = alternate(case.name, {EVEN: (arms.even_fsdp2, case)}, Effort(1, 2), lambda what, steps: None)
    except ArmFailedError as error:
        lines = [line.strip() for line in str(error).splitlines() if "is out of memory" in line]
        if not lines:
            raise
        return lines[0]
    return f"{times[EVEN].images_per_s:.2f} images/s"


def _table(part: str, results: Mapping[str, Any]) -> Table:
    table = Table(title=f"{part}: EMULATED devices, a rehearsal", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("images/step", "micro-batches", "planned (s)", "step (s)", "images/s", "of the sum alone"):
        table.add_column(column, justify="right")
    for name, arm in results["raw"].items():
        share = results["efficiency"].get(name)
        planned_s = arm.get("predicted_step_s")
        row = (
            str(arm["images_per_step"]),
            ", ".join(map(str, arm.get("micro_batches") or ())),
            "" if planned_s is None else f"{planned_s:.3f}",
            f"{arm['median_step_s']:.3f}",
            f"{arm['images_per_s']:.2f}",
        )
        table.add_row(name, *row, "" if share is None else f"{share:.3f}")
    table.add_section()
    table.add_row("sum of the devices alone", "", "", "", "", f"{results['solo_sum_images_per_s']:.2f}", "")
    return table


if __name__ == "__main__":
    sys.exit(main())
