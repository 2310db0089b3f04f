"""What is printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.predicted_steps.figures import MOST_LATE, Row, worst


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print a row for each setting, and what they come to."""
    table = Table(title="EMULATED devices: predicted before training, measured in it", title_justify="left")
    table.add_column("setting")
    table.add_column("true (declared) GFLOP/s")
    for name in ("predicted", "measured", "error", "busy", "memory", "late"):
        table.add_column(name, justify="right")
    for name, row in results["settings"].items():
        table.add_row(
            name,
            _speeds(row),
            _seconds(row["predicted_step_s"]),
            _seconds(row["measured_step_s"]),
            _percent(row["error"]),
            _percent(worst(row["busy_errors"])),
            _percent(worst(row["memory_errors"])),
            f"{row['late_share']:.1%}{' LATE' if row['late_share'] > MOST_LATE else ''}",
        )
    table.caption = "busy and memory: of the rank that is farthest off; late: of the device that was latest"
    console.print(table)
    for strategy, found in results["summary"].items():
        console.print(
            f"{strategy}, {found['settings']} settings: steps within {_percent(found['largest_step_error'], sign='')} "
            f"(mean {_percent(found['mean_step_error'], sign='')}), memory within "
            f"{_percent(found['largest_memory_error'], sign='')}"
        )


def _speeds(row: Row) -> str:
    pairs = zip(row["true_gflops"], row["declared_gflops"], strict=True)
    return ", ".join(f"{true:g}" if true == declared else f"{true:g} ({declared:g})" for true, declared in pairs)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _percent(value: float | None, sign: str = "+") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"
