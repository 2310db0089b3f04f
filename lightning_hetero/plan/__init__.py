"""Plans: the hinge between deciding and doing. Data, versioned, editable by hand, checked on load."""

from lightning_hetero.plan.common import ModelKey, RankPrediction, even_parts
from lightning_hetero.plan.pipeline import PipelinePlan
from lightning_hetero.plan.shard import ShardPlan
from lightning_hetero.plan.stages import Pipeline, Stage

__all__ = ["ModelKey", "Pipeline", "PipelinePlan", "RankPrediction", "ShardPlan", "Stage", "even_parts"]
