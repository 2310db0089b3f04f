"""Runs the topics and makes their tables' rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hetero_speedup.conductor import Progress, alternate
from benchmarks.vit_scaling import figures, groups, settings
from benchmarks.vit_scaling.figures import Row
from benchmarks.vit_scaling.groups import Group
from benchmarks.vit_scaling.settings import Here, Settings
from lightning_hetero.cluster.peaks import peak_flops_per_s
from lightning_hetero.errors import HeteroError

Alternate = Callable[..., Any]
"""as :func:`benchmarks.hetero_speedup.conductor.alternate`"""


def topics_here(here: Here) -> tuple[str, ...]:
    """The topics that can run on these devices."""
    return tuple(topic for topic in settings.TOPICS if topic != settings.ONE_GPU or here.gpus)


def topics_of(here: Here, asked: Sequence[str] | None, quick: bool) -> tuple[str, ...]:
    """The topics that are run: those that were asked for, else all that can be.

    With ``quick`` the options of gathers are left out, whose effect on CPU ranks is small beside what scatters.

    Raises:
        HeteroError: naming those that cannot run here.
    """
    there = topics_here(here)
    missing = [topic for topic in asked or () if topic not in there]
    if missing:
        raise HeteroError(f"--only {' '.join(missing)}: there is no GPU here; leave it out")
    if asked:
        return tuple(topic for topic in there if topic in asked)
    return tuple(topic for topic in there if not (quick and topic == settings.OPTIONS))


def run(
    wanted: Settings,
    topics: tuple[str, ...],
    progress: Progress,
    total: Callable[[int], None],
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measure the topics; returns rows and what follows from them, by topic.

    Args:
        wanted: what to run.
        topics: some of ``settings.TOPICS``.
        progress: told what runs.
        total: told once how many steps there are.
        keep: given what there is after each topic, so that a run that ends early has not been in vain.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = {topic: groups.BUILDERS[topic](wanted, Path(folder)) for topic in topics}
        total(sum(steps_of(group) for each in plan.values() for group in each))
        found: dict[str, Any] = {}
        for topic, each in plan.items():
            found[topic] = measure(topic, each, progress, wanted.here)
            keep(found)
    return found


def steps_of(group: Group) -> int:
    """Steps of all its arms, for a progress bar."""
    settling = group.effort.settling_steps if "hetero_fsdp" in group.entries else 0
    return len(group.entries) * group.effort.steps_per_arm + settling


def measure(
    topic: str, each: list[Group], progress: Progress, here: Here, alternating: Alternate = alternate
) -> dict[str, Any]:
    """Run a topic's groups, one after the other; of a ladder's, no more once nothing of one has fitted."""
    rows: list[Row] = []
    for group in each:
        found = rows_of(group, progress, here, alternating)
        rows += found
        if topic == settings.ONE_GPU and all(row["outcome"] == figures.OUT_OF_MEMORY for row in found):
            break
    return {"rows": rows} | derived(topic, rows)


def rows_of(group: Group, progress: Progress, here: Here, alternating: Alternate = alternate) -> list[Row]:
    """Run a group's arms; one that runs out of memory is a row like the others.

    On CPUs they take turns. On GPUs they run one after the other: an arm that waits would hold its memory.
    """
    plan = {name: (entry.arm, entry.case) for name, entry in group.entries.items()}
    on_gpus = any(entry.case.accelerator == "cuda" for entry in group.entries.values())
    times = {}
    for each in [{name: one} for name, one in plan.items()] if on_gpus else [plan]:
        times |= alternating(group.title, each, group.effort, progress, figures.out_of_memory)
    rows = []
    for name, entry in group.entries.items():
        on_gpu = entry.case.accelerator == "cuda"
        peak = peak_flops_per_s(here.gpu_name, "bf16") if on_gpu else None
        row = figures.row_of(
            groups.labels_of(entry, name),
            times[name],
            entry.case.world_size,
            flops_per_sample=groups.flops_of(entry),
            skipped_steps=group.skipped_steps,
            peak_flops_per_s=peak,
        )
        if peak is None:
            row["no_mfu"] = no_mfu(here, row)
        rows.append(row)
    return rows


def no_mfu(here: Here, row: Mapping[str, Any]) -> str:
    """Why there is no MFU."""
    if row["emulated"]:
        return "the devices are emulated by a CPU"
    if row["accelerator"] == "cpu":
        return "no vendor states a dense peak of a CPU"
    return f"no dense bf16 peak of a {here.gpu_name} is known (lightning_hetero/cluster/peaks.py)"


def derived(topic: str, rows: list[Row]) -> dict[str, Any]:
    """What follows from a topic's rows."""
    if topic == settings.WEAK_SCALING:
        figures.add_scaling(rows)
    if topic == settings.LIMITS:
        return {"parts": figures.limits(rows)}
    if topic in (settings.MIXED, settings.MEMORY):
        return {"hetero_fsdp_over": figures.ratios(rows, "hetero_fsdp")} | {
            "hetero_pipe_over": figures.ratios(rows, "hetero_pipe")
        }
    if topic == settings.GPT_TOPIC:
        return {"hetero_pipe_over": figures.ratios(rows, "hetero_pipe")}
    return {}
