"""Published measurements (tests/data/anchors, with their sources) in the form that planners take."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "anchors"


@cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """The rows of a table."""
    with (FOLDER / name).open(newline="") as file:
        return tuple(csv.DictReader(file))


@cache
def opt350_seconds(gpu: str, micro_batch: int) -> tuple[float, ...]:
    """Forward + backward seconds of each of OPT-350M's 26 layers on a GPU type, tensor parallel 1."""
    rows = [
        row
        for row in table("opt350_layer_times_tp1.csv")
        if row["gpu"] == gpu and row["micro_batch"] == str(micro_batch)
    ]
    rows.sort(key=lambda row: int(row["layer"]))
    assert [int(row["layer"]) for row in rows] == list(range(26)), (gpu, micro_batch)
    return tuple(float(row["forward_s"]) + float(row["backward_s"]) for row in rows)


def layer_fit_ms(model: str, gpu: str, dtype: str, forwards: int) -> tuple[float, float]:
    """Milliseconds per sample and fixed, of ``forwards`` forward passes and one backward through a layer."""
    (row,) = (
        row
        for row in table("layer_latency_fits.csv")
        if (row["model"], row["gpu"], row["dtype"]) == (model, gpu, dtype)
    )
    return (
        forwards * float(row["forward_ms_per_sample"]) + float(row["backward_ms_per_sample"]),
        forwards * float(row["forward_ms_fixed"]) + float(row["backward_ms_fixed"]),
    )
