"""Decisions: pure Python, no torch."""

from lightning_hetero.planner.batch import slowest_seconds, split_batch
from lightning_hetero.planner.one_group import plan_one_group
from lightning_hetero.planner.partition import Partition, partition_units

__all__ = ["Partition", "partition_units", "plan_one_group", "slowest_seconds", "split_batch"]
