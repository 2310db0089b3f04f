"""``python -m benchmarks.callback_cost``: steps with all callbacks and without, in turn; how much longer they take."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.callback_cost import arms
from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.ranks import Arm, ArmFailedError, ArmRanks
from lightning_hetero.records import write_json

WITHOUT, WITH = "without", "with"
CASES: dict[str, tuple[int, Arm, Arm]] = {
    "one device": (1, arms.one_device, arms.one_device_measured),
    "DDP": (2, arms.ddp, arms.ddp_measured),
    "hetero_fsdp": (2, arms.hetero_fsdp, arms.hetero_fsdp_measured),
}
"""by name: ranks, and the two arms"""

WARMUP_STEPS = 5
ALLOWED = 0.02
SCHEMA = 1


def run(name: str, local_batch: int, steps: int) -> dict[str, Any]:
    """Run the two arms of a case step by step in turn; returns what is written of it."""
    world, without, measured = CASES[name]
    batch = local_batch * world
    case = Case(name, world, batch, batch, max_steps=steps + WARMUP_STEPS + 2)
    step_s: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    with contextlib.ExitStack() as stack:
        running = {}
        for arm_name, arm in ((WITHOUT, without), (WITH, measured)):
            running[arm_name] = stack.enter_context(
                contextlib.closing(ArmRanks(f"{name}, {arm_name}", arm, case, world))
            )
            running[arm_name].wait_ready()
        for step in range(steps + WARMUP_STEPS):
            turn = (WITHOUT, WITH) if step % 2 == 0 else (WITH, WITHOUT)
            for arm_name in turn:
                took_s = running[arm_name].step()
                if step >= WARMUP_STEPS:
                    step_s[arm_name].append(took_s)
        for ranks in running.values():
            ranks.stop()
    return {"ranks": world, "local_batch": local_batch, "step_s": step_s, **costs(step_s)}


def costs(step_s: dict[str, list[float]]) -> dict[str, float]:
    """How much longer a step with the callbacks takes than one without, as a share of it.

    Args:
        step_s: seconds of each step, "without" and "with", measured in turn.

    Returns:
        ``median_cost``, of the median step; ``mean_cost``, of all steps together, those in which memory is counted and
        values are logged too; ``pair_cost``, the median over pairs that ran one after the other.
    """
    without, measured = step_s[WITHOUT], step_s[WITH]
    return {
        "median_cost": median(measured) / median(without) - 1,
        "mean_cost": mean(measured) / mean(without) - 1,
        "pair_cost": median(b / a for a, b in zip(without, measured, strict=True)) - 1,
    }


def main() -> int:
    """Run the command line; the exit status is 1 where a median step costs more than is allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callback_cost", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="what to run")
    parser.add_argument("--steps", type=int, default=150, help="measured steps of each arm")
    parser.add_argument("--local-batch", type=int, default=16, help="samples of a rank in a step")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    results: dict[str, Any] = {"schema": SCHEMA, "emulated": False, "environment": environment(), "cases": {}}
    try:
        for name in options.cases:
            found = results["cases"][name] = run(name, options.local_batch, options.steps)
            print(
                f"{name}: median step {median(found['step_s'][WITHOUT]) * 1e3:.1f} ms without, "
                f"{median(found['step_s'][WITH]) * 1e3:.1f} ms with: {found['median_cost']:+.2%}; by pairs "
                f"{found['pair_cost']:+.2%}, all steps {found['mean_cost']:+.2%}",
                flush=True,
            )
    except ArmFailedError as error:
        print(error, file=sys.stderr)
        return 1
    if options.out is not None:
        write_json(options.out, results)
        print(f"wrote {options.out}")
    return 0 if all(case["median_cost"] <= ALLOWED for case in results["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
