"""Decisions: pure Python, no torch."""

from lightning_hetero.planner.batch import slowest_seconds, split_batch
from lightning_hetero.planner.one_group import plan_one_group
from lightning_hetero.planner.partition import Partition, partition_units
from lightning_hetero.planner.pipeline import PipelineSearch, plan_pipeline, search_pipeline

__all__ = [
    "Partition",
    "PipelineSearch",
    "partition_units",
    "plan_one_group",
    "plan_pipeline",
    "search_pipeline",
    "slowest_seconds",
    "split_batch",
]
