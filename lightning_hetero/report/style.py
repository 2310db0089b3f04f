"""What all figures of a report have in common: colours, units of axes, titles that say what is emulated."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hetero.report.run import Run
from lightning_hetero.report.run_tables import EMULATED

PLANNED, MEASURED = "#9aa5b1", "#1f6feb"

COLORS = {
    "compute": "#1f6feb",
    "F": "#457b9d",
    "B": "#e76f51",
    "I": "#e9a15b",
    "W": "#8d6a9f",
    "waiting": "#d9dee4",
    "idle": "#efdcae",
    "messages": "#d9dee4",
    "communication": "#e9c46a",
    "blocked": "#efdcae",
    "input": "#2a9d8f",
    "optimizer": "#8d6a9f",
    "rest": "#6b7785",
}
"""of parts of a step and kinds of actions"""

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, parameters",
    "idle": "all else, as planned",
    "blocked": "waiting or communication",
    "messages": "waiting for messages",
    "rest": "rest (loss, hooks, Python)",
}
"""in legends, where it is another than the key"""

LINES = ("#1f6feb", "#e76f51", "#2a9d8f", "#8d6a9f", "#e9c46a", "#457b9d")

MOST_RANKS = 64
"""that a figure shows"""


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own, in inches: no pyplot, so that no global state is touched and no display is needed."""
    return Figure(figsize=(width, height), layout="constrained")


def head(figure: Figure, run: Run, what: str, note: str = "") -> None:
    """Title of a figure of one run."""
    own = f"{what}: {run.name}, {run.strategy}"
    if run.world_size > MOST_RANKS:
        own += f", the first {MOST_RANKS} of {run.world_size} ranks"
    title(figure, "\n".join([own, *filter(None, [note])]), run.emulated)


def title(figure: Figure, text: str, emulated: bool) -> None:
    """Title of a figure, with what is to be known of emulated devices."""
    if emulated:
        figure.suptitle(f"{EMULATED}\n{text}", fontsize=11, color="#9d1c1c")
    else:
        figure.suptitle(text, fontsize=11)


def seconds_unit(values: Sequence[float | None]) -> tuple[float, str]:
    """By which to multiply seconds, and the unit that they are in then."""
    most = max((value for value in values if value is not None), default=0.0)
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if most * factor >= 1:
            return factor, unit
    return 1e6, "us"


def bytes_unit(values: Sequence[float | None]) -> tuple[float, str]:
    """The same for bytes."""
    most = max((value for value in values if value is not None), default=0.0)
    for size, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if most >= size:
            return 1 / size, unit
    return 1.0, "B"


def rank_labels(ranks: Sequence[int], devices: Sequence[str]) -> list[str]:
    """Of an axis: rank and device, cut where it is long; rank alone where there are many."""
    if len(ranks) > 16:
        return [str(rank) for rank in ranks]
    most = max(6, 72 // max(1, len(ranks)))
    return [
        f"{rank}\n{device if len(device) <= most else device[: most - 1] + '…'}"
        for rank, device in zip(ranks, devices, strict=True)
    ]


def plain(axes: Axes) -> None:
    """No frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)


def say(axes: Axes, text: str) -> None:
    """Say in an empty panel why it is empty."""
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=9, transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
