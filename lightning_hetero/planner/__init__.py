"""Decisions: pure Python, no torch."""

from lightning_hetero.planner.batch import split_batch

__all__ = ["split_batch"]
