"""Decisions: pure Python, no torch."""

from lightning_hetero.planner.batch import slowest_seconds, split_batch
from lightning_hetero.planner.partition import Partition, partition_units
from lightning_hetero.planner.shard import plan_shard

__all__ = ["Partition", "partition_units", "plan_shard", "slowest_seconds", "split_batch"]
