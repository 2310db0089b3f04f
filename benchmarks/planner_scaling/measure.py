"""Plan one case in a process of its own, so that its peak memory is that of this plan."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.planner_scaling.cases import make_case
from benchmarks.planner_scaling.planners import PLANNERS
from lightning_hetero.errors import InfeasibleError


def measure(planner: str, devices: int, units: int, repeats: int) -> dict[str, Any]:
    """Seconds (wall and processor) and peak resident bytes of a plan; the fastest of ``repeats`` processes counts."""
    runs = []
    for _ in range(repeats):
        command = [sys.executable, "-m", "benchmarks.planner_scaling.measure", planner, str(devices), str(units)]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | one_thread)
        runs.append(json.loads(output.stdout.splitlines()[-1]))
    fastest = min(runs, key=lambda run: run["processor_s"])
    return fastest | {"all_processor_s": [run["processor_s"] for run in runs]}


def _plan_once(planner: str, devices: int, units: int) -> dict[str, Any]:
    case = make_case(devices, units)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, processor = time.perf_counter(), time.process_time()
    try:
        plan = PLANNERS[planner](*case)
    except InfeasibleError as error:
        plan, reason = None, str(error).splitlines()[0]
    wall_s, processor_s = time.perf_counter() - begin, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "planner": planner,
        "devices": devices,
        "units": units,
        "wall_s": wall_s,
        "processor_s": processor_s,
        "peak_rss_bytes": peak * 1024,
        "peak_rss_before_bytes": before * 1024,
    }
    if plan is None:
        return result | {"infeasible": reason}
    return result | {"predicted_step_s": plan.predicted_step_s, "lower_bound_s": plan.lower_bound_s}


if __name__ == "__main__":
    print(json.dumps(_plan_once(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
