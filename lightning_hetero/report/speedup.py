"""Figure of the speed-up benchmark: hetero_fsdp, an even split, and the devices alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hetero.report.save import save_figure

_EVEN, _HETERO = "#9aa5b1", "#1f6feb"
_DEVICES = ("#2a9d8f", "#e9c46a", "#e76f51", "#8d6a9f", "#457b9d", "#a3b18a")


def plot_speedup(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the results of ``benchmarks.hetero_speedup`` as bars in images per second.

    One panel for the emulated devices, named so, and one for the real work where it was measured. The devices
    alone are stacked rank by rank, so that the height of the stack is the bound of hetero_fsdp.

    Args:
        results: what the benchmark writes as JSON.
        path: image file to write, whole or not at all; its suffix gives the format.

    Raises:
        KeyError: when ``results`` holds neither case.
    """
    cases = [case for case in (results, results.get("real_work", {})) if "raw" in case]
    if not cases:
        raise KeyError("the results hold no case: neither 'raw' nor 'real_work'")
    # no pyplot: a figure of its own touches no global state and needs no display
    figure = Figure(figsize=(5.5 * len(cases), 4.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        _draw_case(axes, case)
    if results.get("quick"):
        figure.suptitle("--quick: one or two steps of each, which scatter", fontsize=9)
    save_figure(figure, path)


def _draw_case(axes: Axes, case: Mapping[str, Any]) -> None:
    even, hetero = case["even_images_per_s"], case["hetero_images_per_s"]
    axes.bar("even split,\nstock FSDP2", even, color=_EVEN)
    axes.bar("hetero_fsdp", hetero, color=_HETERO)
    kinds = list(case["case"]["kind_of_rank"])
    colors = {kind: _DEVICES[i % len(_DEVICES)] for i, kind in enumerate(dict.fromkeys(kinds))}
    bottom, named = 0.0, set()
    for rank, kind in enumerate(kinds):
        rate = case["raw"][f"{kind} alone"]["images_per_s"]
        label = None if kind in named else f"one {kind} device alone"
        axes.bar("sum of the\ndevices alone", rate, bottom=bottom, color=colors[kind], edgecolor="white", label=label)
        axes.text(2, bottom + rate / 2, f"rank {rank}", ha="center", va="center", fontsize=8)
        named.add(kind)
        bottom += rate
    for x, height in ((0, even), (1, hetero), (2, bottom)):
        axes.text(x, height, f"{height:.1f}", ha="center", va="bottom")
    axes.set_ylim(0, 1.25 * max(even, hetero, bottom))
    axes.set_ylabel("throughput (images/s)")
    axes.set_title(_title(case), fontsize=10, color="#9d1c1c" if case["emulated"] else "black")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _title(case: Mapping[str, Any]) -> str:
    devices = "EMULATED devices, a rehearsal" if case["emulated"] else "nothing emulated"
    return (
        f"{case['case']['name']} ({devices}), global batch {case['case']['global_batch']} images\n"
        f"speedup {case['speedup']:.2f} of {case['theoretical_speedup']:.2f} in theory, "
        f"efficiency {case['efficiency']:.2f}"
    )
