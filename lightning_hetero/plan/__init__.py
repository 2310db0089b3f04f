"""Plans: the hinge between deciding and doing. Data, versioned, editable by hand, checked on load."""

from lightning_hetero.plan.common import ModelKey, RankPrediction
from lightning_hetero.plan.shard import ShardPlan

__all__ = ["ModelKey", "RankPrediction", "ShardPlan"]
