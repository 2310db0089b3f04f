"""Warm ranks: real gloo ranks for tests, without paying the import of torch in every one.

A forkserver imports torch, Lightning and timm once a session; every job forks its ranks from it, so ranks
start in milliseconds and nothing that a job changes (default dtype, seeds, environment, registries, process
groups) can leak into the next.
"""

from tests.harness.outcome import Outcome, RankFailedError, RanksTimedOutError
from tests.harness.pool import WarmRanks

__all__ = ["Outcome", "RankFailedError", "RanksTimedOutError", "WarmRanks"]
