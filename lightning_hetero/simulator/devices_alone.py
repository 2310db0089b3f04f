"""What the devices of a cluster would do together if none ever waited, communicated or computed anything twice."""

from __future__ import annotations

from collections import Counter

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.planner.seconds import unit_timings
from lightning_hetero.simulator.shard_step import Passes

_SHORTEST_S = 1e-12


def alone_samples_per_s(cluster: Cluster, costs: ModelCosts, global_batch_size: int) -> float:
    """Samples/s of all devices, each with the whole model and as many samples as let all end together.

    It is of devices, costs and batch, and not of a plan: memory plays no part, shares need not be whole, and no forward
    runs twice. Each device has what its units take whatever the samples once a step.

    Args:
        cluster: one device per rank; its links are not looked at.
        costs: of the model.
        global_batch_size: samples of the step.

    Raises:
        HeteroError: if seconds are not known.
    """
    passes = {kind: Passes.of(row) for kind, row in unit_timings(costs, cluster).items()}
    counts = Counter(cluster.device_types())
    # A fit in the noise may find that samples take no time.
    rates = {kind: counts[kind] / max(own.per_sample_s, _SHORTEST_S) for kind, own in passes.items()}
    total_rate, lost, step_s = 0.0, 0.0, 0.0
    # In a step of T seconds type t does rate_t (T - fixed_t) samples, if T is longer than its fixed seconds.
    for kind in sorted(passes, key=lambda each: passes[each].fixed_s):
        if total_rate and passes[kind].fixed_s >= step_s:
            break
        total_rate += rates[kind]
        lost += rates[kind] * passes[kind].fixed_s
        step_s = (global_batch_size + lost) / total_rate
    return global_batch_size / step_s
