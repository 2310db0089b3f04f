"""The results as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print predictions beside what was published, then how far they are from it."""
    _print_throughput(results["rows"], console)
    _print_memory(results["rows"], console)
    _print_options(results["options"], console)
    _print_summary(results["summary"], console)
    for model, errors in results.get("held_out", {}).items():
        console.print(
            f"{model}, from constants fitted to the other models: mean error of throughput "
            f"{100 * errors['throughput']:.1f} %, of memory {100 * errors['memory']:.1f} %"
        )
    constants = ", ".join(f"{name} {value:.4g}" for name, value in results["constants"].items())
    console.print(f"constants: {constants}; fitted: {', '.join(results['fitted'])}", soft_wrap=True)
    console.print(f"{len(results['rows'])} runs simulated in {results['simulated_s']:.1f} s")


def _print_throughput(rows: list[dict[str, Any]], console: Console) -> None:
    nodes = sorted({row["nodes"] for row in rows})
    table = Table(title="images/s, predicted (published, error in %)", title_justify="left")
    for column in ("model", "sharding", *(f"{count} nodes" for count in nodes)):
        table.add_column(column, justify="left" if column in ("model", "sharding") else "right")
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["sharding"]), {})[row["nodes"]] = _throughput(row)
    before = None
    for (model, sharding), cells in lines.items():
        if before not in (None, model):
            table.add_section()
        before = model
        table.add_row(model, sharding, *(cells.get(count, "") for count in nodes))
    console.print(table, soft_wrap=True)


def _throughput(row: Mapping[str, Any]) -> str:
    published = row["published_images_per_s"]
    if not row["fits"] and published is None:
        return "no memory"
    text = f"{row['images_per_s']:.0f}"
    return text if published is None else f"{text} ({published:.0f}, {_percent(row['images_per_s'], published)})"


def _print_memory(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="peak memory of a GCD in GB, where one was published", title_justify="left")
    for column in ("model", "sharding", "nodes", "predicted", "published", "error"):
        table.add_column(column, justify="left" if column in ("model", "sharding") else "right")
    for row in rows:
        published = row["published_peak_memory_gb"]
        if published is not None:
            error = _percent(row["peak_memory_gb"], published)
            numbers = (f"{row['peak_memory_gb']:.2f}", f"{published:.2f}", error)
            table.add_row(row["model"], row["sharding"], str(row["nodes"]), *numbers)
    console.print(table)


def _print_options(rows: list[dict[str, Any]], console: Console) -> None:
    if not rows:
        return
    table = Table(title="communication options, vit_5b on 8 nodes, images/s", title_justify="left")
    for column in ("sharding", "backward prefetch", "predicted", "published, with limit", "without limit"):
        table.add_column(column, justify="right" if "predicted" in column or "limit" in column else "left")
    for row in rows:
        numbers = (row["images_per_s"], row["published_images_per_s"], row["published_without_limit"])
        table.add_row(row["sharding"], row["backward_prefetch"], *(f"{number:.0f}" for number in numbers))
    console.print(table)


def _print_summary(summary: Mapping[str, Any], console: Console) -> None:
    ours, ruler = summary["throughput"]["ours"], summary["throughput"]["ruler"]
    if ours["rows"]:
        table = Table(title="mean absolute error of throughput, 1 to 64 nodes, in %", title_justify="left")
        for column in ("", "ours", "straight line, a rate for each model"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("all", f"{100 * ours['mean']:.1f}", f"{100 * ruler['mean']:.1f}")
        for part in ("by_sharding", "by_model"):
            table.add_section()
            for name, error in ours[part].items():
                table.add_row(name, f"{100 * error:.1f}", f"{100 * ruler[part][name]:.1f}")
        console.print(table)
    for row in summary["large_errors"]:
        console.print(f"wrong by {100 * row['error']:+.0f} %: {row['model']} {row['sharding']} on {row['nodes']} nodes")
    choice = summary["choice"]
    if choice["runs"]:
        console.print(
            f"the mode predicted best, from 8 nodes on, loses {100 * choice['mean_loss']:.2f} % on average and "
            f"{100 * choice['worst_loss']:.1f} % at worst against the published best"
        )
        for run in choice["runs"]:
            if run["loss"] > 0:
                where = f"{run['model']} on {run['nodes']} nodes"
                console.print(f"  {where}: {run['chosen']} chosen, {run['best']} best, -{100 * run['loss']:.1f} %")
    if summary["memory"]["rows"]:
        mean, worst = summary["memory"]["mean"], summary["memory"]["worst"]
        console.print(f"peak memory: mean error {100 * mean:.1f} %, worst {100 * worst:+.1f} %")


def _percent(predicted: float, published: float) -> str:
    return f"{100 * (predicted / published - 1):+.0f} %"
