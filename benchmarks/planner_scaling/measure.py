"""Plan one case in a process of its own, so that its peak memory is that of this plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.planner_scaling.cases import make_case
from benchmarks.planner_scaling.planners import PLANNERS
from lightning_hetero.errors import InfeasibleError

_ONCE_S = 5.0
"""a plan that takes longer is made once: noise does not matter then"""

_CHILD = "from benchmarks.planner_scaling.measure import main; main()"
_NO_TORCH = "import sys; sys.modules.update(dict.fromkeys(('torch', 'lightning', 'timm'))); "


def measure(planner: str, devices: int, units: int, repeats: int, *, torch: bool = False) -> dict[str, Any]:
    """Seconds (wall and processor) and peak resident bytes of a plan, by the fastest of several processes.

    Args:
        planner: its name in ``PLANNERS``.
        devices: of the case.
        units: of the case.
        repeats: processes at most; there is no further one after one that takes more than 5 s of processor time.
        torch: whether torch may be imported, which ``import lightning_hetero`` does where it is installed; planning
            does not use it.

    Returns:
        What the process with the least processor time measured, with that of all of them.
    """
    runs: list[dict[str, Any]] = []
    while len(runs) < repeats and (not runs or runs[-1]["processor_s"] <= _ONCE_S):
        child = _CHILD if torch else _NO_TORCH + _CHILD
        command = [sys.executable, "-c", child, planner, str(devices), str(units)]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | one_thread)
        runs.append(json.loads(output.stdout.splitlines()[-1]))
    fastest = min(runs, key=lambda run: run["processor_s"])
    return fastest | {"all_processor_s": [run["processor_s"] for run in runs]}


def _plan_once(planner: str, devices: int, units: int) -> dict[str, Any]:
    case = make_case(devices, units)
    before_bytes = _peak_bytes()
    begin, processor = time.perf_counter(), time.process_time()
    try:
        plan = PLANNERS[planner](*case)
    except InfeasibleError as error:
        plan, reason = None, str(error).splitlines()[0]
    wall_s, processor_s = time.perf_counter() - begin, time.process_time() - processor
    result = {
        "planner": planner,
        "devices": devices,
        "units": units,
        "wall_s": wall_s,
        "processor_s": processor_s,
        "peak_rss_bytes": _peak_bytes(),
        "peak_rss_before_bytes": before_bytes,
    }
    if plan is None:
        return result | {"infeasible": reason}
    return result | {"predicted_step_s": plan.predicted_step_s, "lower_bound_s": plan.lower_bound_s}


def _peak_bytes() -> int:
    """The most resident bytes this process has had. ``ru_maxrss`` is not that: it begins with its parent's peak."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Plan the case that the command line names, and print what it took as one line of JSON."""
    print(json.dumps(_plan_once(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
