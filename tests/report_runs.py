"""Runs as their metrics.jsonl would have them, with round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_hetero.metrics import RankFile, merge_rank_files
from lightning_hetero.plan import Pipeline, PipelinePlan, RankPrediction, ShardPlan, Stage
from lightning_hetero.simulator.pipeline import StageSeconds
from lightning_hetero.simulator.planned_step import PipelineSeconds

CALLBACKS = ["RankThroughput", "RankMemory", "StragglerMonitor"]
MIB = 2**20


def shard_plan(shares: Sequence[int] = (6, 2)) -> ShardPlan:
    """Rank 0 is busy for 0.8 s of 1 s, rank 1 for 0.9 s."""
    ranks = len(shares)
    busy = (0.8, *(0.9,) * (ranks - 1))
    return ShardPlan(
        sum(shares),
        tuple(shares),
        (tuple(range(ranks)),),
        ("fast", *("slow",) * (ranks - 1)),
        predicted_step_s=1.0,
        predictions=tuple(RankPrediction.of(busy_s, 1.0, 64 * MIB) for busy_s in busy),
    )


def pipeline_plan(predicted: bool = True) -> PipelinePlan:
    """Two stages, two micro-batches of 3 and 6 s a stage: a step of 1 + 3 x 3 = ... by 1F1B."""
    stages = (Stage((0, 2), 2), Stage((2, 3), 1))
    predictions = (RankPrediction.of(6.0, 9.0, MIB), RankPrediction.of(6.0, 9.0, MIB)) if predicted else ()
    return PipelinePlan(
        8,
        4,
        (Pipeline((0, 1), stages, 2),),
        ("fast", "slow"),
        ("a", "b", "c"),
        predicted_step_s=9.0 if predicted else None,
        predictions=predictions,
    )


SECONDS = PipelineSeconds((StageSeconds(1.0, 2.0), StageSeconds(1.0, 2.0)), (0.0,))


def step_values(rank: int, samples: float, **more: Any) -> dict[str, Any]:
    """A step of 1.25 s; rank 0 computes for 0.75 s, the others for 1 s."""
    compute = 0.75 if rank == 0 else 1.0
    parts = {"compute_s": compute, "blocked_s": 1.1 - compute, "messages_s": 0.0}
    parts |= {"input_s": 0.05, "optimizer_s": 0.05, "rest_s": 0.05}
    return {
        "batches": 1,
        "samples": samples,
        "step_s": 1.25,
        **parts,
        "flops": samples * 1e12,
        "memory_peak_bytes": 48 * MIB,
        **more,
    }


def write_run(
    folder: Path,
    *,
    plan: ShardPlan | PipelinePlan | None = None,
    ranks: int = 2,
    steps: int = 4,
    emulated: bool = False,
    strategy: str = "hetero_fsdp",
    samples: Sequence[float] = (6.0, 2.0),
    merged: bool = True,
    header: dict[str, Any] | None = None,
    without: Sequence[str] = (),
    extra: dict[int, list[tuple[str, dict[str, Any]]]] | None = None,
    each: dict[int, dict[str, Any]] | None = None,
    ended: bool = True,
    pipelines: Sequence[PipelineSeconds] | None = None,
) -> Path:
    """Write a run.

    Args:
        folder: for it.
        plan: what it follows.
        without: keys that no step has.
        extra: by rank, further lines.
        each: by step, what its lines have beside.
        pipelines: seconds of the plan's stages.
    """
    for rank in range(ranks):
        file = RankFile(folder, rank)
        own = None
        if plan is not None and plan.predictions:
            prediction = plan.predictions[rank]
            own = {"step_s": plan.predicted_step_s, "busy_s": prediction.busy_s, "idle_share": prediction.idle_share}
            own |= {"peak_memory_bytes": prediction.peak_memory_bytes, "samples": samples[rank]}
        first = {"schema": 1, "run": "a", "world_size": ranks, "strategy": strategy, "device": f"dev{rank}"}
        first |= {"emulated": emulated, "dtype": "fp32", "peak_flops_per_s": None, "no_peak": "it is a CPU"}
        file.write("run", {**first, "callbacks": CALLBACKS, "plan": own, "step": 0, **(header or {})})
        if rank == 0 and plan is not None:
            given = None if pipelines is None else [one.to_dict() for one in pipelines]
            file.write("whole_plan", {"step": 0, "plan": plan.to_dict(), "pipelines": given})
        for step in range(1, steps + 1):
            values = {"step": step, **step_values(rank, samples[rank]), **(each or {}).get(step, {})}
            file.write("step", {name: value for name, value in values.items() if name not in without})
        for kind, values in (extra or {}).get(rank, []):
            file.write(kind, values)
        if ended:
            file.write("end", {"step": steps})
        file.close()
    if merged:
        merge_rank_files(folder)
    return folder
