"""``python -m benchmarks.emulation_fidelity``: run the cases, print a table, write raw figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.emulation_fidelity.figures import figures
from benchmarks.emulation_fidelity.ranks import Case, as_json, run_case
from benchmarks.hetero_speedup.environment import environment
from lightning_hetero.emulation_report import late_line

CASES = (
    Case("one rank", (6e9,), (43,)),
    Case("four ranks on unequal devices", (6e9, 6e9, 3e9, 3e9), (43, 43, 21, 21)),
    Case("four ranks too fast for this CPU", (40e9,) * 4, (32,) * 4),
)
# The last case shows how late units are counted, not that they are in time.
KEPT = CASES[:2]
LIMIT = 0.02


def is_within(ratio: float | None) -> bool:
    """Whether a ratio is there, and within 2 % of 1."""
    return ratio is not None and abs(ratio - 1) <= LIMIT


def main() -> int:
    """Run the benchmark; the exit status is 1 when a case that should keep up was off by more than 2 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulation_fidelity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 steps a case in place of 8")
    parser.add_argument("--out", type=Path, help="JSON file for the raw figures")
    options = parser.parse_args()
    steps = 3 if options.quick else 8
    results: dict[str, Any] = {"schema": 1, "environment": environment(), "limit": LIMIT, "cases": {}}
    print("emulated devices: seconds taken over target\n")
    print(f"{'case':34} {'total':>7} {'worst rank':>11} {'worst median':>13} {'late':>6}")
    for case in CASES:
        reports = run_case(case, steps if case in KEPT else 2)
        found = figures(reports)
        results["cases"][case.name] = {**found, "raw": as_json(case, reports)}
        median = "-" if found["worst_median_ratio"] is None else f"{found['worst_median_ratio']:.4f}"
        print(
            f"{case.name:34} {found['total_ratio']:7.4f} {found['worst_rank_ratio']:11.4f} "
            f"{median:>13} {found['late_share']:6.1%}",
            flush=True,
        )
        if case in KEPT and found["not_in_time"]:
            print(f"  not in time, left out of the medians: {', '.join(found['not_in_time'])}")
        line = late_line(reports)
        if line is not None:
            print(f"  {line}")
    ratios = ("total_ratio", "worst_rank_ratio", "worst_median_ratio")
    off = {
        f"{case.name}: {name}": results["cases"][case.name][name]
        for case in KEPT
        for name in ratios
        if not is_within(results["cases"][case.name][name])
    }
    results["within_limit"] = not off
    print(f"\n{'all within' if not off else 'NOT within'} {LIMIT:.0%} {off or ''}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
