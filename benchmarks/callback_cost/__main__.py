"""``python -m benchmarks.callback_cost``: steps with all callbacks and without, in turn; how much longer they take."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles, stdev
from typing import Any

from benchmarks.callback_cost import arms
from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.model import ViTSize
from benchmarks.hetero_speedup.ranks import Arm, ArmFailedError, ArmRanks
from lightning_hetero.records import write_json

WITHOUT, AGAIN, WITH = "without", "without again", "with"
"""the arms; the second one is the first one once more: what differs between these two is what the run cannot resolve"""

CASES: dict[str, tuple[int, Arm, Arm]] = {
    "one device": (1, arms.one_device, arms.one_device_measured),
    "DDP": (2, arms.ddp, arms.ddp_measured),
    "hetero_fsdp": (2, arms.hetero_fsdp, arms.hetero_fsdp_measured),
}
"""by name: ranks, and what trains without callbacks and with them"""

SMALL = ViTSize(width=48, patch_pixels=8)
"""as many units as the usual model, and so little work in each that tenths of a millisecond can be told"""

WARMUP_STEPS = 5
DRAWS = 200
ALLOWED = 0.02
SCHEMA = 1


def run(name: str, local_batch: int, steps: int, size: ViTSize) -> dict[str, Any]:
    """Run the arms of a case step by step in turn; returns what is written of it."""
    world, without, measured = CASES[name]
    batch = local_batch * world
    case = Case(name, world, batch, batch, max_steps=steps + WARMUP_STEPS + 2, size=size)
    step_s: dict[str, list[float]] = {WITHOUT: [], AGAIN: [], WITH: []}
    with contextlib.ExitStack() as stack:
        running = {}
        for arm_name, arm in ((WITHOUT, without), (AGAIN, without), (WITH, measured)):
            running[arm_name] = stack.enter_context(
                contextlib.closing(ArmRanks(f"{name}, {arm_name}", arm, case, world))
            )
            running[arm_name].wait_ready()
        for step in range(steps + WARMUP_STEPS):
            turn = list(step_s)[step % 3 :] + list(step_s)[: step % 3]
            for arm_name in turn if step % 2 == 0 else reversed(turn):
                took_s = running[arm_name].step()
                if step >= WARMUP_STEPS:
                    step_s[arm_name].append(took_s)
        for ranks in running.values():
            ranks.stop()
    return {
        "environment": environment(),
        "ranks": world,
        "local_batch": local_batch,
        "size": asdict(size),
        "step_s": step_s,
        "cost": costs(step_s[WITHOUT], step_s[WITH]),
        "unresolved": costs(step_s[WITHOUT], step_s[AGAIN]),
    }


def costs(without: list[float], measured: list[float]) -> dict[str, float]:
    """How much longer steps of one arm take than those of another, as a share of these.

    Args:
        without: seconds of each step.
        measured: of the other arm, measured in turn.

    Returns:
        ``median``, of the median step; ``quiet``, of the step that a fifth of all are shorter than, which other work
        disturbs less; ``mean``, of all steps together, those too in which memory is counted and values are logged;
        ``median_s``, the difference of the median steps in seconds; ``error_s``, its standard error, by drawing the
        rounds anew.
    """
    rounds, random = list(zip(without, measured, strict=True)), Random(0)
    drawn_s = []
    for _ in range(DRAWS):
        one, other = zip(*random.choices(rounds, k=len(rounds)), strict=True)
        drawn_s.append(median(other) - median(one))
    return {
        "median_s": median(measured) - median(without),
        "error_s": stdev(drawn_s),
        "median": median(measured) / median(without) - 1,
        "quiet": quantiles(measured, n=5)[0] / quantiles(without, n=5)[0] - 1,
        "mean": mean(measured) / mean(without) - 1,
    }


def main() -> int:
    """Run the command line; the exit status is 1 where a median step costs more than is allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callback_cost", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="what to run")
    parser.add_argument("--steps", type=int, default=150, help="measured steps of each arm")
    parser.add_argument("--local-batch", type=int, default=16, help="samples of a rank in a step")
    parser.add_argument("--small", action="store_true", help="a small model, for the cost in milliseconds")
    parser.add_argument("--out", type=Path, help="JSON file to write; what it has of other cases stays")
    options = parser.parse_args()
    results: dict[str, Any] = {"schema": SCHEMA, "emulated": False, "cases": {}}
    if options.out is not None and options.out.exists():
        results["cases"] = json.loads(options.out.read_text())["cases"]
    costing = False
    try:
        for name in options.cases:
            size = SMALL if options.small else ViTSize()
            found = run(name, options.local_batch, options.steps, size)
            results["cases"][f"{name}, small" if options.small else name] = found
            if options.out is not None:  # case by case: an interruption loses one
                write_json(options.out, results)
            costing |= not options.small and found["cost"]["median"] > ALLOWED
            medians = ", ".join(f"{arm} {median(step_s) * 1e3:.1f} ms" for arm, step_s in found["step_s"].items())
            print(f"{name}, median steps: {medians}", flush=True)
            for what in ("cost", "unresolved"):
                median_ms, error_ms = (found[what][key] * 1e3 for key in ("median_s", "error_s"))
                shares = ", ".join(f"{key} {found[what][key]:+.2%}" for key in ("median", "quiet", "mean"))
                print(f"  {what}: {median_ms:+.2f} ms +- {error_ms:.2f}; {shares}", flush=True)
    except ArmFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if costing else 0


if __name__ == "__main__":
    sys.exit(main())
