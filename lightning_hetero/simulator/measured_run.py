"""What a run measured, as far as constants are fitted to it: seconds of a median step, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.cluster import Cluster
from lightning_hetero.costs import ModelCosts
from lightning_hetero.plan import PipelinePlan, ShardPlan
from lightning_hetero.planner.training import Training


@dataclass(frozen=True)
class RankMeasurement:
    """Medians of one rank over the steps of a run.

    Args:
        compute_s: seconds in forwards and backwards of its own units.
        optimizer_s: seconds of the optimizer's step.
        fixed_s: seconds of input, loss, hooks, loggers and Python.
        communication_s: seconds of communication that nothing hides; ``None`` where it was not told apart from waiting.
        power_w: watts over the step; ``None`` where they were not measured.
    """

    compute_s: float
    optimizer_s: float
    fixed_s: float
    communication_s: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class MeasuredRun:
    """One run, with all that a simulation of it takes.

    Args:
        name: of the run.
        plan: that its steps followed.
        cluster: that it ran on, one device per rank.
        costs: of its model.
        training: global batch, precision, optimizer.
        step_s: seconds of a median step, of the rank with the longest one.
        steps: how many the medians are over.
        ranks: what each measured.
    """

    name: str
    plan: ShardPlan | PipelinePlan
    cluster: Cluster
    costs: ModelCosts
    training: Training
    step_s: float
    steps: int
    ranks: tuple[RankMeasurement, ...]

    @property
    def communication_s(self) -> float | None:
        """Exposed communication of the rank that has least of it, which is what the lines tell apart from waiting."""
        found = [rank.communication_s for rank in self.ranks]
        known = [seconds for seconds in found if seconds is not None]
        return min(known) if known and len(known) == len(found) else None

    def owned_parameters(self, rank: int) -> float:
        """Parameters whose optimizer's step a rank runs."""
        plan = self.plan
        if isinstance(plan, ShardPlan):
            group = plan.group_of(rank)
            is_whole = plan.mode_of(group) == "NO_SHARD"
            return self.costs.parameters / (1 if is_whole else len(plan.groups[group]))
        return float(
            sum(
                unit.parameters
                for pipeline in plan.pipelines
                for stage in pipeline.stages_of(rank)
                for unit in self.costs.units[slice(*pipeline.stages[stage].units)]
            )
        )
