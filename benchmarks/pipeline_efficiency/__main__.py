"""``python -m benchmarks.pipeline_efficiency``: run the comparison, print it, write it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.ranks import Arm, ArmFailedError, ArmRanks
from benchmarks.pipeline_efficiency import arms
from benchmarks.pipeline_efficiency.case import Beside, PipelineCase
from lightning_hetero.records import write_json

SCHEMA = 1
EVEN = (3, 3, 3, 3)
OURS, TORCH, EVEN_CUT = "hetero_pipe", "torch Schedule1F1B", "hetero_pipe, even cut"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_efficiency", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of each arm")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--settings", action="store_true", help="predicted against measured, over many settings")
    return parser.parse_args(arguments)


def measure(
    cases: dict[str, tuple[Any, PipelineCase]], turns: int, steps: int, progress: Progress
) -> dict[str, list[list[float]]]:
    """Run every arm in turn; returns per arm its turns' step times."""
    task = progress.add_task("starting", total=len(cases) * (1 + turns * steps))
    times: dict[str, list[list[float]]] = {name: [] for name in cases}
    with contextlib.ExitStack() as stack:
        running: dict[str, ArmRanks] = {}
        for name, (arm, case) in cases.items():
            made: Arm = arm
            running[name] = stack.enter_context(contextlib.closing(ArmRanks(name, made, case, case.world_size)))  # type: ignore[arg-type]
            running[name].wait_ready()
            running[name].step()  # learns shapes
            progress.advance(task)
        for turn in range(turns):
            order = list(cases) if turn % 2 == 0 else list(reversed(cases))
            for name in order:
                progress.update(task, description=name)
                times[name].append([])
                for _ in range(steps):
                    times[name][-1].append(running[name].step())
                    progress.advance(task)
        for ranks in running.values():
            ranks.stop()
    return times


def step_s(turns: list[list[float]]) -> float:
    """Median over turns of the median of each."""
    return median(median(turn) for turn in turns)


def compare(micro_batches: int, turns: int, steps: int, progress: Progress) -> dict[str, Any]:
    """Our pipeline, torch's and the even cut, for so many micro-batches."""
    case = PipelineCase(micro_batches=micro_batches)
    even = replace(case, cut=EVEN)
    cases = {OURS: (arms.hetero_pipe, case), TORCH: (arms.torch_1f1b, case), EVEN_CUT: (arms.hetero_pipe, even)}
    times = measure(cases, turns, steps, progress)
    seconds = {name: step_s(found) for name, found in times.items()}
    return {
        "bound_ratio": case.bound_s() / seconds[OURS],
        "torch_bound_ratio": case.bound_s() / seconds[TORCH],
        "speedup_over_even": seconds[EVEN_CUT] / seconds[OURS],
        "predicted_speedup_over_even": even.predicted_s() / case.predicted_s(),
        "bound_s": case.bound_s(),
        "predicted_step_s": {OURS: case.predicted_s(), EVEN_CUT: even.predicted_s()},
        "step_s": seconds,
        "raw_step_s": times,
        "settings": asdict(case) | {"even_cut": EVEN},
    }


SETTINGS = (
    PipelineCase(micro_batches=8),
    PipelineCase(micro_batches=8, extra=0),
    PipelineCase(micro_batches=8, schedule="gpipe"),
    PipelineCase(micro_batches=8, schedule="zero_bubble"),
    PipelineCase(micro_batches=8, cut=(2, 2, 2, 2, 1, 1, 1, 1), schedule="interleaved_1f1b", speeds=(1, 1, 1, 1)),
    PipelineCase(micro_batches=8, cut=(3, 3, 3, 3)),
    PipelineCase(micro_batches=8, cut=(5, 3, 2, 2), speeds=(3, 2, 1, 1)),
    PipelineCase(micro_batches=16, cut=(8, 4), speeds=(2, 1)),
    PipelineCase(micro_batches=4, cut=(8, 4), speeds=(2, 1), schedule="gpipe"),
    PipelineCase(micro_batches=12, cut=(5, 1, 6), speeds=(1, 2, 1)),
    PipelineCase(micro_batches=12, cut=(2, 8, 2), speeds=(1, 4, 1), extra=2),
    PipelineCase(micro_batches=6, cut=(6, 3, 3), speeds=(2, 1, 1), schedule="zero_bubble"),
    PipelineCase(micro_batches=20, cut=(1, 5, 4, 2), speeds=(1, 2, 2, 1), forward_ms=12),
    PipelineCase(micro_batches=5, cut=(4, 4, 2, 2), forward_ms=16),
)


CALIBRATION = (
    PipelineCase(cut=(6, 6), speeds=(1, 1), micro_batches=1),
    PipelineCase(cut=(3, 3, 3, 3), speeds=(1, 1, 1, 1), micro_batches=1),
)
"""one micro-batch there and back: the stages' seconds, their messages one by one, and what is beside"""


def calibrate(steps: int, progress: Progress) -> Beside:
    """What a step takes on this machine beside its stages, from two cases that are not among those predicted."""
    excess = [step_s(measure({OURS: (arms.hetero_pipe, c)}, 1, steps, progress)[OURS]) for c in CALIBRATION]
    first, second = (found - case.predicted_s() for found, case in zip(excess, CALIBRATION, strict=True))
    messages = [2 * (case.world_size - 1) for case in CALIBRATION]
    return Beside.of((first, second), (messages[0], messages[1]))


def predictions(beside: Beside, steps: int, progress: Progress) -> list[dict[str, Any]]:
    """Predicted against measured step time of each setting."""
    found = []
    for case in SETTINGS:
        times = measure({OURS: (arms.hetero_pipe, case)}, 1, steps, progress)
        measured_s = step_s(times[OURS])
        found.append(
            {
                "settings": asdict(case),
                "predicted_step_s": case.predicted_s(beside),
                "predicted_of_stages_alone_s": case.predicted_s(),
                "measured_step_s": measured_s,
                "error": case.predicted_s(beside) / measured_s - 1,
                "raw_step_s": times[OURS],
            }
        )
    return found


def print_results(results: dict[str, Any], console: Console) -> None:
    """As tables."""
    table = Table(title="pipelines of 4 EMULATED devices (speeds 2, 2, 1, 1), 12 blocks", title_justify="left")
    for name in ("micro-batches", "bound", OURS, "bound / ours", "torch", "bound / torch", "over even", "predicted"):
        table.add_column(name, justify="right")
    for key, found in results["by_micro_batches"].items():
        table.add_row(
            key,
            f"{found['bound_s']:.3f} s",
            f"{found['step_s'][OURS]:.3f} s",
            f"{found['bound_ratio']:.3f}",
            f"{found['step_s'][TORCH]:.3f} s",
            f"{found['torch_bound_ratio']:.3f}",
            f"{found['speedup_over_even']:.3f}",
            f"{found['predicted_speedup_over_even']:.3f}",
        )
    console.print(table)
    for found in results.get("predictions", ()):
        case = found["settings"]
        console.print(
            f"{case['schedule']} {list(case['cut'])} speeds {list(case['speeds'])} m={case['micro_batches']}: "
            f"predicted {found['predicted_step_s']:.3f} s (of the stages alone "
            f"{found['predicted_of_stages_alone_s']:.3f} s), measured {found['measured_step_s']:.3f} s, "
            f"{found['error']:+.1%}"
        )
    if "beside" in results:
        beside = results["beside"]
        console.print(
            f"beside stages, from two other cases: {beside['message_s'] * 1e3:.1f} ms a message, "
            f"{beside['step_s'] * 1e3:.1f} ms a step"
        )


def main() -> int:
    """Run the command line; returns the exit status."""
    options = parse_arguments()
    console = Console(width=150)
    turns, steps = (1, 2) if options.quick else (4, 3)
    try:
        with Progress(console=console) as progress:
            by_count = {str(m): compare(m, turns, steps, progress) for m in (8, 32)}
            results: dict[str, Any] = {"schema": SCHEMA, "environment": environment(), "emulated": True}
            keys = ("bound_ratio", "torch_bound_ratio", "speedup_over_even", "predicted_speedup_over_even")
            results |= {key: by_count["32"][key] for key in keys}
            results["by_micro_batches"] = by_count
            if options.settings:
                beside = calibrate(3 if options.quick else 9, progress)
                results["beside"] = asdict(beside) | {"from": [asdict(case) for case in CALIBRATION]}
                results["predictions"] = predictions(beside, 3 if options.quick else 5, progress)
    except ArmFailedError as error:
        print(error, file=sys.stderr)
        return 1
    results["quick"] = options.quick
    print_results(results, console)
    if options.out is not None:
        write_json(options.out, results)
        console.print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
