"""What one rank did in a run, against what was planned for it: numbers, or None where there is no ground for one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.metrics import Line
from lightning_hetero.report.run import Run

PARTS = ("compute", "waiting", "communication", "blocked", "input", "optimizer", "rest")
"""of a step, in the order in which they are shown; ``blocked`` is waiting or communication where lines of other ranks
are missing, by which they are told apart"""


@dataclass(frozen=True)
class Pair:
    """A value as planned and as measured; None where there is none."""

    planned: float | None
    measured: float | None


@dataclass(frozen=True)
class MeasuredRank:
    """Means over the compared steps of one rank.

    Attributes:
        rank: the rank.
        device: its device.
        step_s: seconds of a step.
        busy_s: of these, in forwards and backwards of its units.
        idle_share: share of the step in which none ran.
        peak_memory_bytes: the most in any of the steps.
        parts_s: seconds of each part; they sum to the step.
        samples: of a step.
        samples_per_s: its samples over its seconds.
        own_samples_per_s: over the seconds in which it computed: what it could do if it did nothing else.
        tflops_per_s: 10^12 FLOP/s of the model.
        mfu: of the dense peak.
        power_w: watts.
        joules_per_sample: energy.
    """

    rank: int
    device: str
    step_s: Pair
    busy_s: Pair
    idle_share: Pair
    peak_memory_bytes: Pair
    parts_s: dict[str, float]
    samples: float
    samples_per_s: float
    own_samples_per_s: float | None
    tflops_per_s: float | None
    mfu: float | None
    power_w: float | None
    joules_per_sample: float | None


def measured_ranks(run: Run) -> list[MeasuredRank]:
    """What each rank of a run did, in the steps that are compared."""
    return [_measured(run, rank) for rank in run.ranks]


def _measured(run: Run, rank: int) -> MeasuredRank:
    lines = run.lines_compared(rank)
    seconds, busy, samples = (_total(lines, name) or 0.0 for name in ("step_s", "compute_s", "samples"))
    count = len(lines)
    planned = run.planned(rank) or {}
    # a plan is for one batch, and a step may be several
    batches = (_total(lines, "batches") or count) / count
    flops, joules, energy_s = (_total(lines, name) for name in ("flops", "joules", "energy_s"))
    peak_flops_per_s = run.metrics.ranks[rank].get("peak_flops_per_s")
    memory = [line["memory_peak_bytes"] for line in run.by_rank[rank] if line.get("memory_peak_bytes") is not None]
    idle = None if planned.get("idle_share") is None else float(planned["idle_share"])
    return MeasuredRank(
        rank,
        run.device(rank),
        Pair(_times(planned.get("step_s"), batches), seconds / count),
        Pair(_times(planned.get("busy_s"), batches), busy / count),
        Pair(idle, 1.0 - busy / seconds),
        Pair(planned.get("peak_memory_bytes"), max(memory, default=None)),
        _parts(lines),
        samples / count,
        samples / seconds,
        samples / busy if busy > 0 else None,
        None if flops is None else flops / seconds / 1e12,
        None if flops is None or not peak_flops_per_s else flops / seconds / peak_flops_per_s,
        joules / energy_s if joules is not None and energy_s else None,
        joules / samples if joules is not None and samples > 0 else None,
    )


def _parts(lines: Sequence[Line]) -> dict[str, float]:
    """Seconds of each part in a mean step; told apart where all ranks' lines are there."""
    apart = all(line.get("waiting_s") is not None for line in lines)
    found = {}
    for name in PARTS:
        if name in (("blocked",) if apart else ("waiting", "communication")):
            continue
        total = math.fsum(line.get(f"{name}_s") or 0.0 for line in lines)
        if name == "blocked":
            total += math.fsum(line.get("messages_s") or 0.0 for line in lines)
        found[name] = total / len(lines)
    return found


def _total(lines: Sequence[Line], name: str) -> float | None:
    """The sum; None where a line has none."""
    values = [line.get(name) for line in lines]
    return None if any(value is None for value in values) else math.fsum(values)  # type: ignore[arg-type]


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
