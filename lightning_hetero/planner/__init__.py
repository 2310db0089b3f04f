"""Decisions: no torch. Seconds, bytes and links in; the best plan out, with its reasons."""

from lightning_hetero.planner.batch import slowest_seconds, split_batch
from lightning_hetero.planner.one_group import plan_one_group
from lightning_hetero.planner.partition import Partition, partition_units
from lightning_hetero.planner.pipeline import PipelineSearch, plan_pipeline, search_pipeline
from lightning_hetero.planner.shard import plan_shard, search_shard
from lightning_hetero.planner.shard_candidates import ShardSearch
from lightning_hetero.planner.training import Training

__all__ = [
    "Partition",
    "PipelineSearch",
    "ShardSearch",
    "Training",
    "partition_units",
    "plan_one_group",
    "plan_pipeline",
    "plan_shard",
    "search_pipeline",
    "search_shard",
    "slowest_seconds",
    "split_batch",
]
