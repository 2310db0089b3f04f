"""``python -m benchmarks.rebalance``: throttle a device in mid-run, print and write how the runs did."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.environment import environment
from benchmarks.hetero_speedup.model import ViTSize
from benchmarks.hetero_speedup.ranks import Arm, ArmFailedError, ArmRanks
from benchmarks.rebalance import arms
from benchmarks.rebalance.recovery import ENOUGH, WITHIN, recovery
from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import HeteroError
from lightning_hetero.records import write_json

CLUSTER = Path(__file__).with_name("throttling.yaml")
MOVING, STAYING, IDEAL = "shares move", "shares stay", "planned for it"
STEPS_AFTER = WITHIN + 8
SIZE = ViTSize(width=64, heads=2)
"""small, on slow devices: the CPU is busy for a tenth of what it emulates, and keeps up beside other work"""

SCHEMA = 1


def run(cluster_path: Path, global_batch: int, folder: Path) -> dict[str, Any]:
    """Run the three arms step by step in turn; returns what is written."""
    cluster = Cluster.from_yaml(cluster_path)
    change = max(c.step for device in cluster.devices for c in device.speed_schedule)
    cluster.to_yaml(folder / "throttling.yaml")
    arms.throttled_from_the_start(cluster).to_yaml(folder / "throttled.yaml")
    base = Case(
        MOVING, cluster.world_size, global_batch, global_batch, folder / "throttling.yaml", size=SIZE, max_steps=80
    )
    plan: dict[str, tuple[Arm, Case]] = {
        MOVING: (arms.moving, base),
        STAYING: (arms.staying, replace(base, name=STAYING)),
        IDEAL: (arms.staying, replace(base, name=IDEAL, cluster_path=folder / "throttled.yaml")),
    }
    step_s: dict[str, list[float]] = {name: [] for name in plan}
    info: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, ArmRanks] = {}
        # one after the other: arms that start together would measure their devices under each other's load
        for name, (arm, case) in plan.items():
            running[name] = stack.enter_context(contextlib.closing(ArmRanks(name, arm, case, case.world_size)))
            info[name] = running[name].wait_ready()
            print(f"{name}: batch shares {info[name]['batch_shares']}", flush=True)
        for step in range(change + STEPS_AFTER):
            # the ideal does not depend on the step: it is measured where it is needed
            turn = [name for name in plan if name != IDEAL or step >= change]
            for name in turn if step % 2 == 0 else reversed(turn):
                step_s[name].append(running[name].step())
            times = ", ".join(f"{name} {step_s[name][-1]:.2f} s" for name in turn)
            print(f"step {step}{' (throttled)' if step >= change else ''}: {times}", flush=True)
        for ranks in running.values():
            ranks.stop()
    ideal_step_s = median(step_s[IDEAL][1:])
    return {
        "schema": SCHEMA,
        "emulated": True,
        "environment": environment(),
        "global_batch": global_batch,
        "change_at_step": change,
        "ideal_step_s": ideal_step_s,
        "arms": {
            name: {
                "batch_shares": info[name]["batch_shares"],
                "moves": json.loads(arms.moves_path(case).read_text()),
                "step_s": step_s[name],
                **({} if name == IDEAL else recovery(step_s[name], ideal_step_s, change)),
            }
            for name, (_, case) in plan.items()
        },
    }


def main() -> int:
    """Run the command line; the exit status is 1 when the moving run did not recover."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rebalance", description=__doc__)
    parser.add_argument("--cluster", type=Path, default=CLUSTER, help="cluster file with a speed_schedule")
    parser.add_argument("--global-batch", type=int, default=60, help="samples of a step")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = run(options.cluster, options.global_batch, Path(folder))
    except (HeteroError, ArmFailedError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\nEMULATED devices; a step of a run planned for the throttled device: {results['ideal_step_s']:.2f} s")
    for name in (MOVING, STAYING):
        arm = results["arms"][name]
        print(
            f"{name}: at once {arm['efficiency_at_once']:.3f} of the ideal, from {WITHIN} steps on "
            f"{arm['efficiency_after']:.3f}; at {ENOUGH:.0%} after {arm['steps_to_recover']} steps"
        )
    for move in results["arms"][MOVING]["moves"]:
        print(f"  shares from batch {move['batch']} on: {move['batch_shares']}")
    if options.out is not None:
        write_json(options.out, results)
        print(f"wrote {options.out}")
    return 0 if results["arms"][MOVING]["recovered"] else 1


if __name__ == "__main__":
    sys.exit(main())
