"""What messages between stages take, from a rehearsal of a plan's pipelines, and the plan's step with that."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.cluster import Cluster, Link
from lightning_hetero.plan import PipelinePlan
from lightning_hetero.simulator.pipeline import simulate_pipeline
from lightning_hetero.simulator.planned_step import PipelineSeconds

_SMALL_S = 1e-4
"""by which messages are made longer to see how much longer all of it becomes"""


def extra_hop_s(
    plan: PipelinePlan, seconds: Sequence[PipelineSeconds], micro_batches: Sequence[int], taken_s: Sequence[float]
) -> float:
    """Seconds that a message takes beyond what the plan was made with: the mean over pipelines of several stages.

    What a rehearsal took beyond its simulation is put down to its messages, one like the other: to handing over, waking
    up, and whatever else lies between the end of one stage and the begin of the next.

    Args:
        plan: of the pipelines.
        seconds: what it was made with, by pipeline.
        micro_batches: of each pipeline's rehearsal.
        taken_s: what that took.
    """
    found = []
    for index, (own, count, measured_s) in enumerate(zip(seconds, micro_batches, taken_s, strict=True)):
        if len(own.stages) > 1:
            expected_s = _simulated_s(plan, index, own, 0.0, count)
            per_second = (_simulated_s(plan, index, own, _SMALL_S, count) - expected_s) / _SMALL_S
            found.append(max(0.0, measured_s - expected_s) / per_second if per_second > 0 else 0.0)
    return statistics.fmean(found) if found else 0.0


def longer_s(plan: PipelinePlan, seconds: Sequence[PipelineSeconds], extra_s: float) -> float:
    """By how much the slowest pipeline of a step takes longer where each message takes ``extra_s`` more."""
    before, after = (
        max(_simulated_s(plan, index, own, more_s) for index, own in enumerate(seconds)) for more_s in (0.0, extra_s)
    )
    return max(0.0, after - before)


def with_slower_links(cluster: Cluster, extra_s: float) -> Cluster:
    """The cluster with ``extra_s`` more latency on the links that it has."""

    def slower(link: Link | None) -> Link | None:
        return None if link is None else Link(link.bandwidth_bytes_per_s, link.latency_s + extra_s)

    return replace(cluster, within_node=slower(cluster.within_node), between_nodes=slower(cluster.between_nodes))


def _simulated_s(
    plan: PipelinePlan, index: int, seconds: PipelineSeconds, more_s: float, micro_batches: int | None = None
) -> float:
    hops = [hop_s + more_s for hop_s in seconds.hop_s]
    return simulate_pipeline(plan.schedule_of(index, micro_batches), seconds.stages, hops).step_s
