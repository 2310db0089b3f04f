"""The arms: hetero_fsdp as it plans by itself and in groups, and what people run; each under the same emulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.hetero_speedup.arms import even_fsdp2, fit, solo
from benchmarks.hetero_speedup.case import Case
from benchmarks.hetero_speedup.gate import Gate
from benchmarks.hetero_speedup.model import DigitClassifier
from benchmarks.hetero_speedup.ranks import Arm
from lightning_hetero.cluster import Cluster
from lightning_hetero.plan import ShardPlan
from lightning_hetero.strategies import HeteroFSDPStrategy

__all__ = ["LAYOUTS", "alone", "even_fsdp2", "hetero_auto", "hetero_pairs", "solo"]

Groups = tuple[tuple[int, ...], ...]
ENOUGH_BYTES = 2**34


def hetero_auto(case: Case, rank: int, gate: Gate) -> None:
    """hetero_fsdp with nothing said: one shard group, shares and micro-batches by what it measures."""
    fit(case, DigitClassifier(case.size), HeteroFSDPStrategy(cluster=case.cluster_path), [], gate)


def hetero_pairs(case: Case, rank: int, gate: Gate) -> None:
    """hetero_fsdp with a shard group for each two ranks: groups need not march together."""
    strategy = HeteroFSDPStrategy(cluster=case.cluster_path, sharding_strategy="HYBRID_2")
    fit(case, DigitClassifier(case.size), strategy, [], gate)


class Layout:
    """hetero_fsdp on equal devices by a plan with these groups.

    Args:
        groups: ranks that shard together.
        reshard: whether blocks are gathered again for backward.
    """

    def __init__(self, groups: Groups, reshard: bool = True) -> None:
        self.groups, self.reshard = groups, reshard

    def __call__(self, case: Case, rank: int, gate: Gate) -> None:
        """Run it in one rank."""
        assert case.cluster_path is not None
        cluster = Cluster.from_yaml(case.cluster_path)
        plan = ShardPlan(
            global_batch_size=case.global_batch,
            batch_shares=(case.local_batch,) * case.world_size,
            groups=self.groups,
            device_types=cluster.device_types(),
            reshard_after_forward=self.reshard,
        )
        fit(case, DigitClassifier(case.size), HeteroFSDPStrategy(cluster, plan), [], gate)


LAYOUTS: dict[str, Arm] = {
    "{4}": Layout(((0, 1, 2, 3),)),
    "{2,2}": Layout(((0, 1), (2, 3))),
    "{1,3}": Layout(((0,), (1, 2, 3))),
    "{1,1,2}": Layout(((0,), (1,), (2, 3))),
    "{1,1,1,1}": Layout(((0,), (1,), (2,), (3,))),
}


def alone(case: Case, rank: int, folder: Path) -> Case:
    """The case of the device of ``rank`` alone, with memory enough for the whole model: its speed is what counts."""
    assert case.cluster_path is not None
    device = Cluster.from_yaml(case.cluster_path).devices[rank]
    path = folder / f"rank{rank}.yaml"
    Cluster(f"{device.type} alone", (replace(device, memory_bytes=ENOUGH_BYTES),), emulate=True).to_yaml(path)
    return replace(case, world_size=1, global_batch=case.solo_batch, cluster_path=path)
