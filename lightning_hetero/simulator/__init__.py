"""Predictions: pure Python, no torch."""

from lightning_hetero.simulator.memory import MemoryPoint, RankMemory, StateBytes
from lightning_hetero.simulator.sharded_memory import shard_memory

__all__ = ["MemoryPoint", "RankMemory", "StateBytes", "shard_memory"]
