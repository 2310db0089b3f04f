"""What is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.vit_scaling import figures, settings
from benchmarks.vit_scaling.figures import Row
from lightning_hetero.units import format_bytes

TITLES = {
    settings.SHARDING: "throughput and memory by sharding mode",
    settings.OPTIONS: "backward prefetch x limit on all-gathers",
    settings.WEAK_SCALING: "weak scaling: the same batch per rank",
    settings.LIMITS: "what limits: input, communication or compute",
    settings.MIXED: "mixed devices",
    settings.MEMORY: "mixed devices, the fast ones with little memory",
    settings.GPT_TOPIC: "GPT: FSDP against a pipeline",
    settings.ONE_GPU: "one GPU: the ladder up to what fits",
}


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print each topic's table; emulated rows and scaled-down models are named so."""
    for line in notes(results):
        console.print(line, markup=False)
    for topic, found in results["topics"].items():
        console.print(_table(TITLES[topic], found["rows"]))
        for line in conclusions(topic, found):
            console.print(line, markup=False)
        console.print()


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """What has to be known before the tables are read."""
    scaled = {name: each for name, each in results["models"].items() if each["scaled_down"]}
    if scaled:
        names = ", ".join(f"{name} {each['parameters'] / 1e6:.3g} M parameters" for name, each in scaled.items())
        one = next(iter(scaled.values()))
        yield (
            f"SCALED DOWN for CPU ranks: width / {one['width_divisor']}, depth / {one['depth_divisor']}; ViTs take "
            f"images of 112 x 112 in place of 224 x 224, the GPT's vocabulary and context are / {one['width_divisor']} "
            f"too. {names}. They are not the published models."
        )
    if any(row["emulated"] for found in results["topics"].values() for row in found["rows"]):
        yield "Rows named EMULATED are a rehearsal by CPU ranks that sleep, not measurements of any device."


def conclusions(topic: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What a table's figures say, one line each."""
    parts = found.get("parts")
    if parts:
        shares = ", ".join(
            f"{name.removesuffix('_s')} {parts[name]:.3f} s ({parts[name] / parts['step_s']:.0%})"
            for name in ("compute_s", "communication_s", "input_s")
        )
        yield f"a step with image files, {parts['step_s']:.3f} s: {shares}; limited by {parts['limited_by']}"
    for name in ("hetero_fsdp_over", "hetero_pipe_over"):
        ratios = found.get(name)
        if ratios:
            shown = ", ".join(f"{ratio:.2f} x {arm}" for arm, ratio in ratios.items())
            yield f"{name.removesuffix('_over')}: {shown} (images/s)"
    for row in found["rows"]:
        if row["outcome"] == figures.OUT_OF_MEMORY:
            yield f"{row['arm']}: {row['why']}"


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    table.add_column("arm", no_wrap=True)
    table.add_column("devices")
    for column in ("batch/rank", "step (s)", "images/s", "TFLOP/s/device", "MFU", "peak memory", "predicted"):
        table.add_column(column, justify="right")
    with_efficiency = any("efficiency" in row for row in rows)
    if with_efficiency:
        table.add_column("of ideal", justify="right")
    for row in rows:
        table.add_row(*_cells(row), *([_percent(row.get("efficiency"))] if with_efficiency else []))
    return table


def _cells(row: Row) -> list[str]:
    kind = "EMULATED" if row["emulated"] else {"cpu": "CPU", "cuda": "GPU"}[row["accelerator"]]
    first = [row["model"] + (" (scaled down)" if row["scaled_down"] else ""), row["arm"], f"{row['ranks']} {kind}"]
    if row["outcome"] != figures.OK:
        return [
            *first,
            str(row["local_batch"]),
            row["outcome"],
            "",
            "",
            "",
            "",
            _bytes(row.get("predicted_peak_bytes")),
        ]
    return [
        *first,
        str(row["local_batch"]),
        f"{row['median_step_s']:.3f}",
        f"{row['images_per_s']:.4g}",
        f"{row['tflops_per_device']:.3g}" if row["tflops_per_device"] else "",
        _percent(row["mfu"]),
        _bytes(largest_peak(row)),
        _bytes(row.get("predicted_peak_bytes")),
    ]


def largest_peak(row: Row) -> int | None:
    """Of the ranks' peaks; None where none was counted."""
    return max((peak for peak in row.get("peak_bytes", ()) if peak), default=None)


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
