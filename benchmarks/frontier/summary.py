"""How far the predictions are from the study, beside a ruler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.frontier.tables import Throughput, weak_scaling

Rows = Sequence[Mapping[str, Any]]

MOST_NODES = 64
"""of the errors that are held to limits; rows of 128 nodes are shown beside them"""

FEWEST_NODES = 8
"""from which on modes are chosen"""

LARGE = 0.2
"""relative error that is listed row by row"""


def summarise(rows: Rows, options: Rows) -> dict[str, Any]:
    """Errors of predicted rows that have a published number, as plain data.

    Args:
        rows: with ``model``, ``sharding``, ``nodes``, ``images_per_s``, ``peak_memory_gb`` and, where there is one,
            ``published_images_per_s`` and ``published_peak_memory_gb``.
        options: the same of communication options.
    """
    measured = [row for row in rows if row.get("published_images_per_s")]
    ours = {_key(row): _error(row["images_per_s"], row["published_images_per_s"]) for row in measured}
    within = {key: error for key, error in ours.items() if key[2] <= MOST_NODES}
    models = {row["model"] for row in measured}
    line = {
        _key(row): error for row, error in zip(*_ruler([r for r in weak_scaling() if r.model in models]), strict=True)
    }
    line = {key: error for key, error in line.items() if key in within}
    return {
        "throughput": {"ours": _by(within), "ruler": _by(line)},
        "throughput_128_nodes": _by({key: error for key, error in ours.items() if key[2] > MOST_NODES}),
        "large_errors": [
            {"model": key[0], "sharding": key[1], "nodes": key[2], "error": error}
            for key, error in ours.items()
            if abs(error) > LARGE
        ],
        "choice": _choice(measured),
        "memory": _memory_errors(rows),
        "options": [
            dict(row) | {"error": _error(row["images_per_s"], row["published_images_per_s"])} for row in options
        ],
    }


def _key(row: Mapping[str, Any] | Throughput) -> tuple[str, str, int]:
    if isinstance(row, Throughput):
        return row.model, row.sharding, row.nodes
    return row["model"], row["sharding"], row["nodes"]


def _error(predicted: float, published: float) -> float:
    return predicted / published - 1


def _by(errors: Mapping[tuple[str, str, int], float]) -> dict[str, Any]:
    """Mean absolute relative errors: of all, by mode and by model."""

    def means(name: Callable[[tuple[str, str, int]], str]) -> dict[str, float]:
        groups: dict[str, list[float]] = defaultdict(list)
        for key, error in errors.items():
            groups[name(key)].append(abs(error))
        return {group: sum(each) / len(each) for group, each in groups.items()}

    overall = means(lambda key: "all").get("all")
    return {
        "rows": len(errors),
        "mean": overall,
        "by_sharding": means(lambda key: key[1]),
        "by_model": means(lambda key: key[0]),
    }


def _ruler(rows: Sequence[Throughput]) -> tuple[Sequence[Throughput], list[float]]:
    """What a straight line says: images per second are nodes times one rate for each model, fitted up to 64 nodes."""
    rates: dict[str, float] = {}
    for model in {row.model for row in rows}:
        own = [row for row in rows if row.model == model and row.nodes <= MOST_NODES]
        candidates = [row.images_per_s / row.nodes for row in own]
        rates[model] = min(
            candidates, key=lambda rate: sum(abs(rate * row.nodes / row.images_per_s - 1) for row in own)
        )
    return rows, [_error(rates[row.model] * row.nodes, row.images_per_s) for row in rows]


def _choice(measured: Rows) -> dict[str, Any]:
    """What the mode that is predicted to be fastest loses against the one that was."""
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in measured:
        if row["nodes"] >= FEWEST_NODES and row["fits"]:
            runs[row["model"], row["nodes"]].append(row)
    found = []
    for (model, nodes), own in runs.items():
        chosen = max(own, key=lambda row: row["images_per_s"])
        best = max(own, key=lambda row: row["published_images_per_s"])
        loss = 1 - chosen["published_images_per_s"] / best["published_images_per_s"]
        found.append(
            {"model": model, "nodes": nodes, "chosen": chosen["sharding"], "best": best["sharding"], "loss": loss}
        )
    losses = [each["loss"] for each in found]
    if not losses:
        return {"runs": []}
    return {"runs": found, "mean_loss": sum(losses) / len(losses), "worst_loss": max(losses)}


def _memory_errors(rows: Rows) -> dict[str, Any]:
    errors = [
        _error(row["peak_memory_gb"], row["published_peak_memory_gb"])
        for row in rows
        if row.get("published_peak_memory_gb")
    ]
    if not errors:
        return {"rows": 0}
    sizes: Iterable[float] = [abs(error) for error in errors]
    return {"rows": len(errors), "mean": sum(sizes) / len(errors), "worst": max(errors, key=abs)}
