"""What is printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_results(results: dict[str, Any], console: Console) -> None:
    """Print both cases and the overhead, each labelled with what kind of devices it ran on."""
    if "raw" in results:
        console.print(_case_table(f"{results['case']['name']}: EMULATED devices, a rehearsal", results))
        batch = results["case"]["solo_batch"]
        console.print(f"(devices alone ran batches of {batch} images, which gives their rate sooner)")
    if "real_work" in results:
        real = results["real_work"]
        console.print(_case_table("real work, nothing emulated: one of two ranks computes everything twice", real))
    if "overhead_equal_devices" in results:
        console.print(
            "overhead on equal, not emulated ranks: hetero_fsdp takes "
            f"{results['overhead_equal_devices']:.3f} x the step of a plain FSDP2 loop (1 = none; on gloo it gathers "
            "ahead and reduces beside the backward, which FSDP2's defaults do not)"
        )
    if results.get("quick"):
        console.print("--quick: one or two steps of each, which scatter on real cores, by more than a tenth")


def _case_table(title: str, case: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("images/step", "step (s)", "images/s"):
        table.add_column(column, justify="right")
    for name, arm in case["raw"].items():
        step, rate = f"{arm['median_step_s']:.3f}", f"{arm['images_per_s']:.2f}"
        table.add_row(name, str(arm["images_per_step"]), step, rate)
    table.add_section()
    table.add_row("sum of the devices alone", "", "", f"{case['solo_sum_images_per_s']:.2f}")
    table.add_row("efficiency: hetero_fsdp / that sum", "", "", f"{case['efficiency']:.3f}")
    table.add_row("speedup: hetero_fsdp / even", "", "", f"{case['speedup']:.3f}")
    table.add_row("speedup in theory", "", "", f"{case['theoretical_speedup']:.3f}")
    if "efficiency_of_side_by_side" in case:
        together = f"{case['efficiency_of_side_by_side']:.3f}"
        table.add_row("hetero_fsdp / devices side by side, without a strategy", "", "", together)
    shares = case["raw"]["hetero_fsdp"].get("batch_shares_at_end", case["raw"]["hetero_fsdp"].get("batch_shares"))
    table.caption = f"hetero_fsdp's batch shares: {', '.join(map(str, shares))}" if shares else None
    return table
