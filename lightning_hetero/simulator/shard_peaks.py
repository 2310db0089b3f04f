"""Peak memory of every rank of a shard plan, under either engine.

FSDP2 is :mod:`~lightning_hetero.simulator.sharded_memory`. FSDP1 differs where nothing is sharded: it keeps the copy of
all parameters that it computes with (bfloat16 under mixed precision) from forward to backward, and of gradients too,
until its stream of reductions has passed: with no all-gather to limit it, the host is a whole backward ahead, so that
what it frees is still in use ("active" in torch's words).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import ShardPlan
from lightning_hetero.simulator.execution import Execution
from lightning_hetero.simulator.memory import MemoryPoint, RankMemory, StateBytes
from lightning_hetero.simulator.shard_prediction import group_memory
from lightning_hetero.simulator.sharded_memory import ReduceBuffers


@dataclass(frozen=True)
class ShardPeak:
    """The most memory that a rank needs in a step.

    Args:
        size_bytes: bytes at that moment.
        moment: which one it is.
    """

    size_bytes: int
    moment: MemoryPoint


def shard_peaks(
    plan: ShardPlan, cluster: Cluster, costs: ModelCosts, state: StateBytes, execution: Execution
) -> tuple[ShardPeak, ...]:
    """The peak of every rank, in a micro-batch of its largest size.

    Args:
        plan: a valid one for this cluster.
        cluster: one device per rank.
        costs: of the model.
        state: bytes per parameter.
        execution: whose engine counts.
    """
    buffers = ReduceBuffers.of(cluster)
    memories: dict[tuple[int, str, bool, bool], RankMemory] = {}
    found: dict[tuple[object, int], ShardPeak] = {}  # equal ranks are asked for once
    peaks: dict[int, ShardPeak] = {}
    for index, group in enumerate(plan.groups):
        count = plan.micro_batches_of(index)
        mode = plan.mode_of(index)
        if execution.engine == "fsdp1" and len(group) == 1:
            mode = "NO_SHARD"
        for rank in group:
            samples = max(1, -(-plan.batch_shares[rank] // count))
            key = (len(group), mode, plan.checkpoints(rank), count > 1)
            if (key, samples) not in found:
                if key not in memories:
                    memories[key] = group_memory(costs, state, buffers, *key)
                moment = memories[key].peak(samples)
                extra = _unfreed_bytes(costs, state, execution, mode)
                found[key, samples] = ShardPeak(moment.needed_bytes(samples) + extra, moment)
            peaks[rank] = found[key, samples]
    return tuple(peaks[rank] for rank in range(plan.world_size))


def _unfreed_bytes(costs: ModelCosts, state: StateBytes, execution: Execution, mode: str) -> int:
    if execution.engine != "fsdp1" or mode != "NO_SHARD" or state.gathered >= state.parameter:
        return 0
    return round(costs.parameters * (state.gathered + state.reduced))
