"""Figure of the benchmark of runs on mixed GPUs: predicted beside measured steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.report.save import save_figure
from lightning_hetero.report.style import MEASURED, PLANNED, new_figure, plain


def plot_mixed_runs(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the rows of ``benchmarks.mixed_runs``: two bars a run, the error above them.

    Args:
        rows: what the benchmark writes as JSON; a run that was not measured has one bar.
        path: image file to write, whole or not at all; its suffix gives the format.

    Raises:
        ValueError: when there is no row.
    """
    if not rows:
        raise ValueError("there is no run to draw")
    figure = new_figure(max(5.0, 1.5 * len(rows) + 2.0), 4.6)
    axes = figure.subplots()
    for kind, shift, color in (("measured_step_s", -0.2, MEASURED), ("predicted_step_s", 0.2, PLANNED)):
        bars = [(place, row[kind]) for place, row in enumerate(rows) if row[kind] is not None]
        places, heights = [place + shift for place, _ in bars], [height for _, height in bars]
        axes.bar(places, heights, width=0.38, color=color, label=kind.removesuffix("_step_s"))
    for place, row in enumerate(rows):
        if row["error"] is not None:
            top = max(row["measured_step_s"], row["predicted_step_s"])
            axes.text(place, top, f"{100 * row['error']:+.1f} %", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(rows)))
    axes.set_xticklabels(
        [f"{row['run']}\n{row['pipelines']} x {len(row['stages'])} stages" for row in rows], fontsize=9
    )
    axes.set_ylabel("step (s)")
    axes.margins(y=0.12)
    axes.legend(fontsize=9, frameon=False)
    models = ", ".join(dict.fromkeys(row["model"] for row in rows))
    axes.set_title(f"{models} on mixed GPUs: measured by the Sailor project, predicted here", fontsize=10)
    plain(axes)
    save_figure(figure, path)
