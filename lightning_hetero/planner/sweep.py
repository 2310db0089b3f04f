"""The same question for several clusters, models and shardings: what a step would take on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.errors import HeteroError, InfeasibleError, raise_all
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.plan.options import hybrid_size, option_problems
from lightning_hetero.plan.shard import MODES
from lightning_hetero.planner.layout_plan import layout_plan, layout_problems
from lightning_hetero.planner.pipeline import plan_pipeline
from lightning_hetero.planner.shard import plan_shard
from lightning_hetero.planner.training import Training
from lightning_hetero.simulator.calibration import Calibration
from lightning_hetero.simulator.simulate import simulate
from lightning_hetero.simulator.simulated_step import SimulatedStep

PLANNED = (ShardPlan.STRATEGY, PipelinePlan.STRATEGY)
"""beside the layouts by name: the fastest plan that fits, of either strategy"""


@dataclass(frozen=True)
class Sweep:
    """What is the same for all points.

    Args:
        batch_per_rank: samples of a step for each rank, as in weak scaling; ``None`` with ``global_batch``.
        global_batch: samples of a step over all ranks, as in strong scaling; ``None`` with ``batch_per_rank``.
        precision: of the training, in Lightning's words.
        optimizer: whose state takes memory.
        checkpointing: whether layouts by name run forwards again in backward. Plans decide it for themselves.
        even: whether layouts by name have equal shares instead of shares by speed.
        calibration: constants that were fitted to measured steps; ``None``: costs and cluster as they are.
        engine: that runs shard plans, one of :data:`~lightning_hetero.simulator.execution.ENGINES`.
        options: of layouts by name, as a plan holds them.

    Raises:
        HeteroError: if not exactly one of the two batches is given, or an option is not known.
    """

    batch_per_rank: int | None = None
    global_batch: int | None = None
    precision: str = "32-true"
    optimizer: str = "adamw"
    checkpointing: bool = False
    even: bool = False
    calibration: Calibration | None = None
    engine: str = "fsdp2"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [f"{name} is {value!r}: {accepted}" for name, value, accepted in option_problems(self.options)]
        raise_all(HeteroError, "the options are not valid", problems)
        if (self.batch_per_rank is None) == (self.global_batch is None):
            raise HeteroError(
                "give either batch_per_rank (weak scaling) or global_batch (strong scaling), and not both"
            )

    def training(self, ranks: int) -> Training:
        """How so many ranks train."""
        batch = self.global_batch if self.batch_per_rank is None else self.batch_per_rank * ranks
        assert batch is not None
        return Training(batch, self.precision, self.optimizer)

    def point(self, cluster: Cluster, costs: ModelCosts, sharding: str) -> SweepPoint:
        """Simulate one step, or say why there is none.

        Args:
            cluster: one device per rank.
            costs: of a model.
            sharding: a layout by name ("FULL_SHARD", "HYBRID_8"), or one of :data:`PLANNED`.

        Raises:
            HeteroError: if seconds are not known, or an argument is malformed.
        """
        training = self.training(cluster.world_size)
        problems = [] if sharding in PLANNED else layout_problems(sharding, cluster.world_size)
        if problems:
            return SweepPoint(costs.model, sharding, cluster, training.global_batch_size, None, problems[0])
        constants = None
        if self.calibration is not None:
            cluster, costs = self.calibration.applied(cluster, costs)
            constants = self.calibration.devices
        try:
            plan = self._plan(cluster, costs, training, sharding)
        except InfeasibleError as error:
            why = str(error).splitlines()[0]
            return SweepPoint(costs.model, sharding, cluster, training.global_batch_size, None, why)
        step = simulate(plan, cluster, costs, training, constants=constants, engine=self.engine)
        return SweepPoint(costs.model, sharding, cluster, training.global_batch_size, step)

    def _plan(self, cluster: Cluster, costs: ModelCosts, training: Training, sharding: str) -> ShardPlan | PipelinePlan:
        if sharding == ShardPlan.STRATEGY:
            return plan_shard(cluster, costs, training)
        if sharding == PipelinePlan.STRATEGY:
            return plan_pipeline(cluster, costs, training)
        return layout_plan(
            cluster,
            costs,
            training,
            sharding,
            checkpointing=self.checkpointing,
            even=self.even,
            options=self.options,
        )


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep.

    Attributes:
        model: name of the model.
        sharding: a layout by name, or the strategy that planned.
        cluster: that it is on.
        global_batch_size: samples of the step.
        step: what was simulated; ``None`` where there is no such plan.
        problem: why there is none; empty where there is.
    """

    model: str
    sharding: str
    cluster: Cluster
    global_batch_size: int
    step: SimulatedStep | None
    problem: str = ""

    @property
    def nodes(self) -> int:
        """Nodes of its cluster."""
        return len(self.cluster.nodes)

    @property
    def ranks(self) -> int:
        """Ranks of its cluster."""
        return self.cluster.world_size

    @property
    def samples_per_s(self) -> float | None:
        """Throughput, where it runs."""
        return self.step.samples_per_s if self.step is not None and self.step.fits else None

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        found: dict[str, Any] = {
            "model": self.model,
            "sharding": self.sharding,
            "cluster": self.cluster.describe(),
            "nodes": self.nodes,
            "ranks": self.ranks,
            "global_batch_size": self.global_batch_size,
        }
        step = self.step
        if step is None:
            return {**found, "problem": self.problem}
        fullest = step.fullest
        return {
            **found,
            "step_s": step.step_s,
            "samples_per_s": step.samples_per_s,
            "alone_samples_per_s": step.alone_samples_per_s,
            "share_of_alone": step.share_of_alone,
            "busy_share": step.busy_share,
            "exposed_communication_share": step.exposed_share,
            "bubble_share": step.bubble_share,
            "peak_bytes": max(rank.peak_bytes for rank in step.ranks),
            "fullest_rank": {
                "rank": fullest.rank,
                "peak_bytes": fullest.peak_bytes,
                "capacity_bytes": fullest.capacity_bytes,
            },
            "fits": step.fits,
            "energy_j": step.energy_j,
            "no_energy": step.no_energy,
        }


@dataclass(frozen=True)
class Change:
    """What another node, or one less, would do.

    Attributes:
        what: was changed, in words ("adding 8 x A100-80GB").
        before: the cluster as it is.
        after: the changed one.
    """

    what: str
    before: SweepPoint
    after: SweepPoint

    @property
    def ratio(self) -> float | None:
        """Throughput after over before, where both run."""
        before, after = self.before.samples_per_s, self.after.samples_per_s
        return None if before is None or after is None else after / before

    @property
    def alone_ratio(self) -> float | None:
        """The same of what the devices would do together if none ever waited or communicated."""
        before, after = self.before.step, self.after.step
        if before is None or after is None:
            return None
        return after.alone_samples_per_s / before.alone_samples_per_s

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "what": self.what,
            "ratio": self.ratio,
            "alone_ratio": self.alone_ratio,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }


def sharding_problems(names: Sequence[str]) -> list[str]:
    """Which of these are neither a layout by name nor a strategy, as texts."""
    known = f"{', '.join(MODES)}, HYBRID_k (k ranks in a group), {' or '.join(PLANNED)}"
    return [
        f"sharding {name!r} is not known: give {known}"
        for name in names
        if name not in (*MODES, *PLANNED) and hybrid_size(name) is None
    ]
