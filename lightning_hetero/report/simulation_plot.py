"""Figure of simulated scaling: a row of panels for each model, a line for each sharding."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_hetero.report.run_tables import EMULATED
from lightning_hetero.report.save import save_figure
from lightning_hetero.report.scaling import ScalingLine
from lightning_hetero.report.scaling_plot import draw_scaling, scaling_title
from lightning_hetero.report.style import new_figure


def plot_simulated_scaling(
    lines: Mapping[str, Sequence[ScalingLine]], path: str | os.PathLike[str], about: str
) -> None:
    """Draw throughput over ranks with the ideal, and the share of it.

    Args:
        lines: by model.
        path: image file to write, whole or not at all; its suffix gives the format.
        about: cluster, batch and precision, for the title.
    """
    most = max(len(own) for own in lines.values())
    figure = new_figure(11.5, 0.9 + (4.2 + 0.4 * most) * len(lines))  # a legend below each panel
    panels = figure.subplots(len(lines), 2, squeeze=False)
    for (total, share), (model, own) in zip(panels, lines.items(), strict=True):
        draw_scaling(total, share, own)
        total.set_title(model, fontsize=10)
        total.set_yscale("log")  # from one node to a hundred: a straight line is what scales
        drawn = [float(value) for line in total.get_lines() for value in np.asarray(line.get_ydata())]
        total.set_ylim(0.7 * min(drawn), 1.5 * max(drawn))
    every = [line for own in lines.values() for line in own]
    emulated = f"; {EMULATED}" if any(line.emulated for line in every) else ""
    figure.suptitle(
        f"{scaling_title(every)} on {about}\nSIMULATED, nothing was run{emulated}", fontsize=11, color="#9d1c1c"
    )
    save_figure(figure, path)
